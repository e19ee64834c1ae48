"""A small network that foretells one column of a table from others."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor, nn

from lightning_stream.recipes.converted_set import VAL
from lightning_stream.recipes.evaluation import Tally, tally
from lightning_stream.recipes.table import TableData
from lightning_stream.recipes.task import Batch, Judged, Shown, TaskData, TaskModel, fitting

_SHOWN_ROWS = 2000


class Regressor(TaskModel):
    """Foretells a number; learns from batches of ``{column: number[n]}``.

    Columns are standardised by their mean and deviation in the training rows, and the loss is the squared error of the
    standardised label: 1 is what the mean alone would have.

    Args:
        widths: Of the hidden layers.
        learning_rate, weight_decay, warmup: See `TaskModel`.
        seed: Of the first weights.
    """

    shown = ("train/loss", "val/loss", "val/explained")
    learns_from = TableData

    def __init__(
        self,
        *,
        widths: tuple[int, ...] | list[int] = (64, 64),
        learning_rate: float = 0.003,
        weight_decay: float = 0.01,
        warmup: float = 0.1,
        seed: int = 1,
    ) -> None:
        super().__init__(learning_rate, weight_decay, warmup)
        self.widths = tuple(widths)
        self.seed = seed
        self.columns: tuple[str, ...] = ()
        self.label = ""
        self.network: nn.Sequential | None = None
        self.mean: Tensor
        self.deviation: Tensor

    def build(self, data: TaskData) -> None:
        """Make the network, unless that was done, for the table's columns."""
        if self.network is not None:
            return
        table = fitting(data, TableData, "Choose a table, e.g. +data=table, or a model for this data.")
        self.columns, self.label = table.features, table.label
        mean, deviation = (torch.from_numpy(values).float() for values in table.moments())
        self.register_buffer("mean", mean)
        self.register_buffer("deviation", deviation)
        sizes = (len(self.columns), *self.widths)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            hidden = [layer for size in pairwise(sizes) for layer in (nn.Linear(*size), nn.SiLU())]
            self.network = nn.Sequential(*hidden, nn.Linear(sizes[-1], 1))

    def forward(self, batch: Batch) -> Tensor:
        """The foretold label, standardised: float[n]."""
        assert self.network is not None
        rows = torch.stack([batch[name].float() for name in self.columns], 1)
        foretold: Tensor = self.network((rows - self.mean[:-1]) / self.deviation[:-1])[:, 0]
        return foretold

    def judge(self, batch: Batch) -> Judged:
        """The squared error of the standardised label; right is what comes within half a deviation."""
        errors = self(batch) - (batch[self.label].float() - self.mean[-1]) / self.deviation[-1]
        losses = errors.square()
        return Judged(losses, tally(errors.detach().abs() < 0.5, losses))

    @staticmethod
    def measures(counted: Tally) -> dict[str, float]:
        """The mean loss, and what share of the label's variance it leaves explained."""
        return {"loss": counted.loss, "explained": 1 - counted.loss}

    @torch.inference_mode()
    def show(self, data: TaskData, folder: Path) -> Shown:
        """Foretold over true labels of held-out rows, as a picture."""
        assert isinstance(data, TableData)
        self.eval()
        held_out = data.datasets[VAL]
        assert held_out is not None
        columns = held_out.read_batch(range(min(_SHOWN_ROWS, held_out.size)))
        batch = {name: torch.as_tensor(columns[name]).to(self.device) for name in (*self.columns, self.label)}
        foretold = self(batch) * self.deviation[-1] + self.mean[-1]
        path = folder / "foretold.png"
        _draw(batch[self.label].float().cpu(), foretold.cpu(), self.label, path)
        return Shown({"picture": str(path)})


def _draw(true: Tensor, foretold: Tensor, label: str, path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5, 5), dpi=120)
    axes = figure.subplots()
    ends = [float(min(true.min(), foretold.min())), float(max(true.max(), foretold.max()))]
    axes.plot(ends, ends, color="#9aa0b5", lw=1, zorder=1)
    axes.scatter(true, foretold, s=9, alpha=0.5, color="#5b6ee1", lw=0, zorder=2)
    axes.set(xlabel=f"{label}, true", ylabel=f"{label}, foretold", title=f"{len(true)} held-out rows")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, bbox_inches="tight")
