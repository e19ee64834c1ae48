"""A table as streamed rows: a column to predict, and the columns of numbers to predict it from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_stream.convert import Inputs
from recipes.data.base import RecipeData
from recipes.data.text import SYNTHETIC

_ROWS_OF_PARTITION = 500


def synthetic_rows(partition: tuple[int, int]) -> Iterator[dict[str, float]]:
    """500 rows of a seed: `y` depends on `a` to `d` and some noise, not on `e`."""
    rng = np.random.default_rng(partition)
    for a, b, c, d, e, noise in rng.normal(size=(_ROWS_OF_PARTITION, 6)).tolist():
        yield {"a": a, "b": b, "c": c, "d": d, "e": e, "y": 2 * np.sin(a) + b * c - 0.5 * d**2 + 0.1 * noise}


class TableData(RecipeData):
    """Streams ``{column: number[n]}`` a batch.

    Args:
        source: A CSV, Parquet or JSON lines file, or a folder or pattern of such; or ``synthetic``.
        label: The column to predict.
        features: The columns to predict it from; None for all others that hold numbers.
        fill_nulls: Values in place of empty cells, by column.
        drop_nulls: Drop rows with empty cells.
        synthetic_count, synthetic_seed: How many synthetic rows (in steps of 500), and which.
        **shared: See `RecipeData`.
    """

    def __init__(
        self, *, label: str = "y", features: Sequence[str] | None = None, fill_nulls: Mapping[str, Any] | None = None,
        drop_nulls: bool = False, synthetic_count: int = 2000, synthetic_seed: int = 1, **shared: Any,
    ) -> None:  # fmt: skip
        self.nulls = {"fill_nulls": dict(fill_nulls or {}), "drop_nulls": drop_nulls}
        settings = {**self.nulls, "synthetic": (synthetic_count, synthetic_seed)}
        super().__init__(settings=settings, **{"name": "table", **shared})
        self.label, self.synthetic = label, (synthetic_count, synthetic_seed)
        self._features = None if features is None else tuple(features)

    def convert_source(self) -> None:
        """Write the rows in a random order, since tables often lie sorted."""
        source: Any = self.source
        if source == SYNTHETIC:
            count, seed = self.synthetic
            source = Inputs([(seed, number) for number in range(-(-count // _ROWS_OF_PARTITION))], synthetic_rows)
        self.convert(source, shuffle=True, **self.nulls)

    @property
    def features(self) -> tuple[str, ...]:
        """The columns to predict the label from.

        Raises:
            ValueError: The table has no such columns, or they do not hold numbers.
        """
        row = self.train_dataset[0]
        numbers = [name for name, value in row.items() if isinstance(value, int | float | np.number)]
        chosen = self._features or tuple(name for name in numbers if name != self.label)
        if missing := [name for name in (self.label, *chosen) if name not in numbers]:
            raise ValueError(
                f"label and features must be columns of numbers; {', '.join(missing)} is not one. Set data.label and "
                f"data.features to some of {', '.join(numbers)}."
            )
        return chosen

    def feature_stats(self, max_rows: int = 1 << 16) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Mean and standard deviation of the features, then the label, float64[features + 1], of up to `max_rows`."""
        size = self.train_dataset.size
        ids = np.unique(np.linspace(0, size - 1, min(max_rows, size)).astype(np.int64))
        columns = self.train_dataset.read_batch(ids)
        values = np.stack([np.asarray(columns[name], np.float64) for name in (*self.features, self.label)])
        return values.mean(1), np.maximum(values.std(1), 1e-8)
