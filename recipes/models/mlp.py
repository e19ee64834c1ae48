"""A small network that predicts one column of a table from others."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from recipes.models.task import Batch, Task


class Regressor(Task):
    """Predicts a number from batches ``{column: number[n]}``; the loss is the standardized squared error.

    The datamodule knows the columns: its `label`, `features` and `statistics()`.

    Args:
        widths: Of the hidden layers.
        optimizer: Arguments of `Task`.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, widths: Sequence[int] = (64, 64), **optimizer: float) -> None:
        super().__init__(**optimizer)
        if not all(isinstance(width, int) and width > 0 for width in widths):
            raise ValueError(f"widths are whole numbers of at least 1; found {widths}")
        self.widths = widths
        self.network: Any = None

    def configure_model(self) -> None:
        """Make the network; the data is converted by now, so its columns are known."""
        if self.network is not None:
            return
        trainer: Any = self.trainer
        data = trainer.datamodule
        if not hasattr(data, "statistics"):
            raise ValueError(f"{type(self).__name__} trains on tables; found {type(data).__name__}. Choose other data")
        self.label = data.label
        self.features = data.features
        for name, values in zip(("mean", "std"), data.statistics(), strict=True):
            self.register_buffer(name, torch.from_numpy(values).float())
        sizes = (len(self.features), *self.widths)
        layers = [layer for size in pairwise(sizes) for layer in (nn.Linear(*size), nn.SiLU())]
        self.network = nn.Sequential(*layers, nn.Linear(sizes[-1], 1))

    def forward(self, batch: Batch) -> Tensor:
        """Predict the standardized label, float[n]."""
        rows = torch.stack([batch[name].float() for name in self.features], 1)
        return self.network((rows - self.mean[:-1]) / self.std[:-1])[:, 0]

    def measure(self, batch: Batch) -> dict[str, Tensor]:
        target = (batch[self.label].float() - self.mean[-1]) / self.std[-1]
        return {"loss": functional.mse_loss(self(batch), target)}
