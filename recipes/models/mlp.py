"""A small network that predicts one column of a table from others."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric, R2Score

from recipes.data.base import RecipeData
from recipes.data.table import TableData
from recipes.models.base import Artifacts, Batch, ExactMean, LossOutput, RecipeModule

_SHOWN_ROWS = 2000


class R2(R2Score):
    """R2 over all ranks; not a number for fewer than two samples."""

    def compute(self) -> Tensor:
        return super().compute() if self.total > 1 else torch.tensor(math.nan)


class Regressor(RecipeModule):
    """Predicts a number from batches ``{column: number[n]}``.

    Columns are standardized by the mean and standard deviation of the training rows; the loss is the squared error of
    the standardized label.

    Args:
        widths: Sizes of the hidden layers.
        **shared: See `RecipeModule`.
    """

    data_type = TableData
    shown = ("train/loss", "val/loss", "val/r2")
    mean: Tensor
    std: Tensor

    def __init__(self, *, widths: list[int] | tuple[int, ...] = (64, 64), **shared: Any) -> None:
        super().__init__(**{"learning_rate": 0.003, "weight_decay": 0.01, "warmup": 0.1, **shared})
        self.widths = tuple(widths)
        self.columns: tuple[str, ...] = ()
        self.label = ""
        self.network: nn.Sequential | None = None

    def make_metrics(self) -> dict[str, Metric]:
        return {"loss": ExactMean(), "r2": R2()}

    def build(self, data: RecipeData) -> None:
        if self.network is not None:
            return
        assert isinstance(data, TableData)
        self.columns, self.label = data.features, data.label
        for name, values in zip(("mean", "std"), data.feature_stats(), strict=True):
            self.register_buffer(name, torch.from_numpy(values).float())
        sizes = (len(self.columns), *self.widths)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            hidden = [layer for size in pairwise(sizes) for layer in (nn.Linear(*size), nn.SiLU())]
            self.network = nn.Sequential(*hidden, nn.Linear(sizes[-1], 1))

    def forward(self, batch: Batch) -> Tensor:
        """Predict the standardized label, float[n]."""
        assert self.network is not None
        rows = torch.stack([batch[name].float() for name in self.columns], 1)
        predicted: Tensor = self.network((rows - self.mean[:-1]) / self.std[:-1])[:, 0]
        return predicted

    def compute_loss(self, batch: Batch) -> LossOutput:
        predicted = self(batch)
        target = (batch[self.label].float() - self.mean[-1]) / self.std[-1]
        return LossOutput((predicted - target).square(), {"r2": (predicted, target)})

    @torch.inference_mode()
    def show(self, data: RecipeData, folder: Path) -> Artifacts:
        """Plot predicted over true labels of the validation split."""
        from matplotlib.figure import Figure

        self.eval()
        columns = data.val_dataset.read_batch(range(min(_SHOWN_ROWS, data.val_dataset.size)))
        batch = {name: torch.as_tensor(columns[name]).to(self.device) for name in (*self.columns, self.label)}
        true, predicted = batch[self.label].float().cpu(), (self(batch) * self.std[-1] + self.mean[-1]).cpu()
        figure = Figure(figsize=(5, 5), dpi=120, layout="constrained")
        axes = figure.subplots()
        axes.axline((float(true.mean()), float(true.mean())), slope=1, color="0.6", linewidth=1)
        axes.scatter(true, predicted, s=9, alpha=0.5, linewidth=0)
        axes.set(xlabel=self.label, ylabel=f"predicted {self.label}", title=f"{len(true)} validation rows")
        path = folder / "predictions.png"
        figure.savefig(path)
        return Artifacts({"picture": str(path)})
