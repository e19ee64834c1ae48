"""A table as streamed rows: a column to predict, and the columns of numbers to predict it from."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_stream.convert import Inputs
from recipes.data.base import INPUTS_AT_A_TIME, SYNTHETIC, ConvertedData
from recipes.data.synthetic import table_row


def read_row(number: int) -> list[dict[str, float]]:
    return [table_row(number)]


class TableData(ConvertedData):
    """Streams ``{column: number[n]}`` a batch; ``configs/data/table.yaml`` describes the settings."""

    def __init__(
        self, *, label: str = "y", features: Sequence[str] | None = None, fill_nulls: Mapping[str, Any] | None = None,
        drop_nulls: bool = False, synthetic_count: int = 2000, **shared: Any,
    ) -> None:  # fmt: skip
        self.nulls: dict[str, Any] = {"fill_nulls": dict(fill_nulls or {}), "drop_nulls": drop_nulls}
        self.label, self.chosen, self.synthetic_count = label, features, synthetic_count
        super().__init__(settings={**self.nulls, "synthetic_count": synthetic_count}, **shared)

    def convert_source(self) -> None:
        """Write the rows in a random order, since tables often lie sorted."""
        if self.source == SYNTHETIC:
            rows = Inputs(range(self.synthetic_count), read_row)
            self.convert(rows, shuffle=True, partition_bytes=INPUTS_AT_A_TIME)
        else:
            self.convert(self.source, shuffle=True, **self.nulls)

    @cached_property
    def features(self) -> list[str]:
        """The columns to predict the label from: by default, all others that hold numbers."""
        dataset: Any = self.datasets["train"]
        numbers = [name for name, value in dataset[0].items() if isinstance(value, int | float | np.number)]
        features = list(self.chosen or (name for name in numbers if name != self.label))
        if missing := [name for name in (self.label, *features) if name not in numbers]:
            advice = f"Set data.label and data.features to some of {', '.join(numbers)}."
            raise ValueError(f"label and features must hold numbers; {', '.join(missing)} does not. {advice}")
        return features

    def statistics(self, max_rows: int = 1 << 16) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Mean and standard deviation of the features, then the label, float64[features + 1], of up to `max_rows`."""
        dataset: Any = self.datasets["train"]
        rows = np.unique(np.linspace(0, dataset.size - 1, min(max_rows, dataset.size)).astype(int))
        columns = dataset.read_batch(rows)
        values = np.stack([np.asarray(columns[name], np.float64) for name in (*self.features, self.label)])
        return values.mean(1), np.maximum(values.std(1), 1e-8)
