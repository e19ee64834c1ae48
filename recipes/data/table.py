"""A table as streamed rows: a column to predict, and the columns of numbers to predict it from."""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_stream.convert import Inputs
from recipes.data.base import PARTITION, SYNTHETIC, RecipeData


def synthetic_row(number: int, seed: int) -> list[dict[str, float]]:
    """A row in which `y` depends on `a` to `d` and some noise, not on `e`."""
    a, b, c, d, e, noise = np.random.default_rng((seed, number)).normal(size=6).tolist()
    return [{"a": a, "b": b, "c": c, "d": d, "e": e, "y": 2 * math.sin(a) + b * c - 0.5 * d**2 + 0.1 * noise}]


class TableData(RecipeData):
    """Streams ``{column: number[n]}`` a batch; configs/data/table.yaml describes the settings."""

    def __init__(
        self, *, label: str = "y", features: Sequence[str] | None = None, fill_nulls: Mapping[str, Any] | None = None,
        drop_nulls: bool = False, synthetic_count: int = 2000, synthetic_seed: int = 1, **shared: Any,
    ) -> None:  # fmt: skip
        self.nulls: dict[str, Any] = {"fill_nulls": dict(fill_nulls or {}), "drop_nulls": drop_nulls}
        self.synthetic, self.label, self.chosen = (synthetic_count, synthetic_seed), label, tuple(features or ())
        super().__init__(settings={**self.nulls, "synthetic": self.synthetic}, **shared)

    def convert_source(self) -> None:
        """Write the rows in a random order, since tables often lie sorted."""
        if self.source != SYNTHETIC:
            self.convert(self.source, shuffle=True, **self.nulls)
            return
        count, seed = self.synthetic
        self.convert(Inputs(range(count), partial(synthetic_row, seed=seed)), shuffle=True, partition_bytes=PARTITION)

    @property
    def features(self) -> tuple[str, ...]:
        """The columns to predict the label from: by default, all others that hold numbers."""
        row = self.train_dataset[0]
        numbers = [name for name, value in row.items() if isinstance(value, int | float | np.number)]
        chosen = self.chosen or tuple(name for name in numbers if name != self.label)
        if missing := [name for name in (self.label, *chosen) if name not in numbers]:
            advice = f"Set data.label and data.features to some of {', '.join(numbers)}."
            raise ValueError(f"label and features must hold numbers; {', '.join(missing)} is not one. {advice}")
        return chosen

    def feature_stats(self, max_rows: int = 1 << 16) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Mean and standard deviation of the features, then the label, float64[features + 1], of up to `max_rows`."""
        size = self.train_dataset.size
        columns = self.train_dataset.read_batch(np.unique(np.linspace(0, size - 1, min(max_rows, size)).astype(int)))
        values = np.stack([np.asarray(columns[name], np.float64) for name in (*self.features, self.label)])
        return values.mean(1), np.maximum(values.std(1), 1e-8)
