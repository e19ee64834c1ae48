"""A small network that predicts one column of a table from others."""

import math
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric, R2Score

from recipes.data.table import TableData
from recipes.models.base import Batch, ExactMean, LossOutput, RecipeModule


class R2(R2Score):
    """R2 over all ranks; not a number for fewer than two samples."""

    def compute(self) -> Tensor:
        return super().compute() if self.total > 1 else torch.tensor(math.nan)


class Regressor(RecipeModule):
    """Predicts a number from batches ``{column: number[n]}``; the loss is the standardized squared error."""

    data_type = TableData
    shown = ("train/loss", "val/loss", "val/r2")
    mean: Tensor
    std: Tensor

    def __init__(self, *, widths: list[int] | tuple[int, ...] = (64, 64), **shared: Any) -> None:
        super().__init__(**shared)
        self.widths = tuple(widths)
        self.columns: tuple[str, ...] = ()
        self.label = ""

    def make_metrics(self) -> dict[str, Metric]:
        return {"loss": ExactMean(), "r2": R2()}

    def make_network(self, data: TableData) -> nn.Module:
        self.columns, self.label = data.features, data.label
        for name, values in zip(("mean", "std"), data.feature_stats(), strict=True):
            self.register_buffer(name, torch.from_numpy(values).float())
        sizes = (len(self.columns), *self.widths)
        hidden = [layer for size in pairwise(sizes) for layer in (nn.Linear(*size), nn.SiLU())]
        return nn.Sequential(*hidden, nn.Linear(sizes[-1], 1))

    def forward(self, batch: Batch) -> Tensor:
        """Predict the standardized label, float[n]."""
        rows = torch.stack([batch[name].float() for name in self.columns], 1)
        return self.network((rows - self.mean[:-1]) / self.std[:-1])[:, 0]

    def compute_loss(self, batch: Batch) -> LossOutput:
        predicted = self(batch)
        target = (batch[self.label].float() - self.mean[-1]) / self.std[-1]
        return LossOutput((predicted - target).square(), {"r2": (predicted, target)})
