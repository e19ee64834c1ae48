"""Measures that are the same to the last digit on any number of devices: whole numbers are added, never rounded ones.

Sums of floats depend on who adds what first. So every sample's part of a measure becomes whole numbers, those are
added, over batches and ranks in any order, and one division at the end makes the measure.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

WIDTH = 4
_UNIT = 2**24  # parts of 1 that losses are counted in: finer than a float32 of about 1 knows, and 5e11 fit


@dataclass(frozen=True)
class Tally:
    """What was counted over some samples.

    Attributes:
        right: Predictions that were right.
        total: Predictions.
        loss_units: Sum of their losses, in fixed parts of 1.
        not_finite: Losses that were infinite or no number; they are in no sum.
    """

    right: int = 0
    total: int = 0
    loss_units: int = 0
    not_finite: int = 0

    @classmethod
    def of(cls, counted: Tensor) -> Tally:
        """From int64[4]."""
        return cls(*(int(value) for value in counted.tolist()))

    @property
    def accuracy(self) -> float:
        """Share that was right; not a number where nothing was counted."""
        return self.right / self.total if self.total else math.nan

    @property
    def loss(self) -> float:
        """Mean loss; not a number where one of them was none, or nothing was counted."""
        return self.loss_units / self.total / _UNIT if self.total and not self.not_finite else math.nan


def tally(right: Tensor, losses: Tensor, counts: Tensor | None = None) -> Tensor:
    """Each sample's part of a `Tally`, int64[n, 4]; sum it over samples, batches and ranks in any order.

    Args:
        right: bool[n, ...]: which predictions were right.
        losses: float[n, ...]: their losses.
        counts: bool[n, ...]: which of them count; None for all.
    """
    counts = torch.ones_like(right) if counts is None else counts
    losses = losses.detach().float()
    finite = losses.isfinite()
    units = torch.where(finite & counts, (losses * _UNIT).round(), 0.0).to(torch.int64)
    columns = (right & counts, counts, units, ~finite & counts)
    return torch.stack([column.to(torch.int64).flatten(1).sum(1) for column in _at_least_2d(columns)], 1)


def _at_least_2d(columns: tuple[Tensor, ...]) -> list[Tensor]:
    return [column[:, None] if column.ndim == 1 else column for column in columns]
