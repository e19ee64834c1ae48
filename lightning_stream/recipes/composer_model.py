"""A recipe's model as MosaicML Composer trains it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from composer import ComposerModel
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_stream.recipes.evaluation import WIDTH, Tally
from lightning_stream.recipes.task import Judged, TaskModel


class ComposerTask(ComposerModel):  # type: ignore[misc]  # Composer has no types
    """A `TaskModel` as Composer trains it.

    Args:
        model: Built already.
    """

    def __init__(self, model: TaskModel) -> None:
        super().__init__()
        self.model = model
        names = model.measures(Tally(total=1))
        self.training_measures, self.held_out_measures = (
            nn.ModuleDict({name: Measure(model, name) for name in names}) for _ in range(2)
        )

    def forward(self, batch: Mapping[str, Any]) -> Judged:
        """What the model makes of a micro-batch."""
        return self.model.judge(batch)

    def loss(self, outputs: Judged, _batch: Mapping[str, Any]) -> Tensor:
        """The mean loss of a micro-batch; Composer weighs it by the samples that count."""
        return outputs.losses.mean()

    def eval_forward(self, batch: Mapping[str, Any], outputs: Judged | None = None) -> Judged:
        """For the metrics; the training's are taken where there are some."""
        return self.forward(batch) if outputs is None else outputs

    def update_metric(self, _batch: Mapping[str, Any], outputs: Judged, metric: Any) -> None:
        """Count."""
        metric.update(outputs)

    def get_metrics(self, is_train: bool) -> dict[str, Any]:
        """What the model measures, by name."""
        return dict((self.training_measures if is_train else self.held_out_measures).items())


class Measure(Metric):
    """One measure of a model, exact over any number of ranks: whole numbers are added.

    Args:
        model: Whose `measures`.
        name: Which of them.
    """

    full_state_update = False
    counted: Tensor

    def __init__(self, model: TaskModel, name: str) -> None:
        super().__init__()
        self._measures = type(model).measures  # without the model, since Composer copies metrics
        self._name = name
        self.add_state("counted", torch.zeros(WIDTH, dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, outputs: Judged) -> None:
        """Count a micro-batch."""
        self.counted = self.counted + outputs.tally.sum(0)

    def compute(self) -> Tensor:
        """The measure, float64."""
        return torch.tensor(self._measures(Tally.of(self.counted))[self._name], dtype=torch.float64)
