"""The validation split: rows are chosen by a hash of their content, so neither processes nor other files matter."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from lightning_stream.convert.partition import row_bytes
from lightning_stream.formats.mds.encode import MdsEncoder

TRAIN, VAL = "train", "val"


@dataclass(frozen=True)
class ValidationSplit:
    """Chooses rows by a hash of their encoded bytes, or of one column's value.

    A row keeps its split when files are added, removed or reordered. Equal rows are in the same split.

    Attributes:
        fraction: The expected share of rows, in (0, 1).
        seed: Another seed chooses other rows.
        group_by: A column: rows with the same value there are in the same split.
        columns: The columns that are hashed, with their encodings; unused with `group_by`.
    """

    fraction: float
    seed: int
    group_by: str | None
    columns: Mapping[str, str]

    def __post_init__(self) -> None:
        if not 0 < self.fraction < 1:
            raise ValueError(f"val_fraction must be between 0 and 1; got {self.fraction}.")

    def of_rows(self, values: Mapping[str, Any], num_rows: int) -> dict[str, NDArray[np.int64]]:
        """Return the numbers of a batch's rows by split."""
        below = int(self.fraction * 2**64)
        hashes = (xxhash.xxh3_64_intdigest(data, seed=self.seed) for data in self._hashed(values, num_rows))
        chosen = np.fromiter((each < below for each in hashes), np.bool_, num_rows)
        return {TRAIN: np.flatnonzero(~chosen), VAL: np.flatnonzero(chosen)}

    def _hashed(self, values: Mapping[str, Any], num_rows: int) -> Iterable[Any]:
        if self.group_by is None:
            encoder = MdsEncoder(self.columns, None, (), None)
            return row_bytes(encoder.encode_batch({name: values[name] for name in self.columns}, num_rows))
        if self.group_by not in values:
            raise ValueError(f"group_by={self.group_by!r} is not a column; the columns are {', '.join(values)}.")
        groups = values[self.group_by]
        return map(_group_bytes, groups.tolist() if isinstance(groups, np.ndarray) else groups)


def _group_bytes(value: Any) -> bytes:
    return bytes(value) if isinstance(value, (bytes, memoryview)) else str(value).encode()
