"""A table as streamed rows: a column to predict, and the columns of numbers to predict it from."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_stream.convert import Inputs
from recipes.data.base import INPUTS_AT_A_TIME, SYNTHETIC, ConvertedData
from recipes.data.synthetic import table_row


class TableData(ConvertedData):
    """Streams ``{column: number[n]}`` a batch; ``configs/data/table.yaml`` describes the settings."""

    def __init__(
        self, *, label: str = "y", features: Sequence[str] | None = None, fill_nulls: Mapping[str, Any] | None = None,
        drop_nulls: bool = False, synthetic_count: int = 2000, **shared: Any,
    ) -> None:  # fmt: skip
        self.nulls: dict[str, Any] = {"fill_nulls": dict(fill_nulls or {}), "drop_nulls": drop_nulls}
        self.label = label
        self.chosen = features
        self.synthetic_count = synthetic_count
        super().__init__(settings={**self.nulls, "synthetic_count": synthetic_count}, **shared)

    def convert_source(self) -> None:
        """Write the rows in a random order, since tables often lie sorted."""
        if self.source == SYNTHETIC:
            rows = Inputs(range(self.synthetic_count), table_row)
            self.convert(rows, shuffle=True, partition_bytes=INPUTS_AT_A_TIME)
        else:
            self.convert(self.source, shuffle=True, **self.nulls)

    @cached_property
    def features(self) -> list[str]:
        """The columns to predict the label from: by default, all others that hold numbers."""
        dataset: Any = self.datasets["train"]
        numbers = [name for name, value in dataset[0].items() if isinstance(value, int | float | np.number)]
        if self.label not in numbers:
            raise ValueError(f"data.label is one of the columns of numbers, {', '.join(numbers)}; found {self.label}.")
        numbers.remove(self.label)
        features = numbers if self.chosen is None else [*self.chosen]
        if not features or not set(features) <= set(numbers):
            raise ValueError(f"data.features are other columns of numbers: {', '.join(numbers)}; found {features}.")
        return features

    def statistics(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Mean and standard deviation of the features, then the label, float64[features + 1], of some rows."""
        dataset: Any = self.datasets["train"]
        rows = np.unique(np.linspace(0, dataset.size - 1, min(1 << 16, dataset.size)).astype(int))
        columns = dataset.read_batch(rows)
        values = np.stack([np.asarray(columns[name], np.float64) for name in (*self.features, self.label)])
        return values.mean(1), np.maximum(values.std(1), 1e-8)
