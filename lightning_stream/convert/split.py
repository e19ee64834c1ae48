"""The validation split: rows are chosen by a hash of their content, so neither processes nor other files matter."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

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
    seed: int = 0
    group_by: str | None = None
    columns: Mapping[str, str] | None = None

    def __post_init__(self) -> None:
        if not 0 < self.fraction < 1:
            raise ValueError(f"val_fraction must be between 0 and 1; got {self.fraction}.")

    def of_rows(self, values: Mapping[str, Any], num_rows: int) -> dict[str, NDArray[np.int64]]:
        """Return the numbers of a batch's rows by split."""
        parts: Iterator[Any]
        if self.group_by is not None:
            found = self._group(values)
            parts = map(_group_bytes, found.tolist() if isinstance(found, np.ndarray) else found)
        else:
            encoder = self._encoder()
            encoded = encoder.encode_batch({name: values[name] for name in self.columns or ()}, num_rows)
            data = memoryview(encoded.joined())
            ends = np.cumsum(encoded.sizes).tolist()
            parts = (data[begin:end] for begin, end in zip([0, *ends], ends, strict=False))
        chosen = np.fromiter(map(self._is_chosen, parts), np.bool_, num_rows)
        return {TRAIN: np.flatnonzero(~chosen), VAL: np.flatnonzero(chosen)}

    def of_sample(self, sample: Mapping[str, Any]) -> str:
        """Return the split of one sample."""
        if self.group_by is not None:
            data = _group_bytes(self._group(sample))
        else:
            data = b"".join(self._encoder().encode(sample))
        return VAL if self._is_chosen(data) else TRAIN

    def _encoder(self) -> MdsEncoder:
        return MdsEncoder(self.columns or {}, None, (), None)

    def _is_chosen(self, data: Any) -> bool:
        return xxhash.xxh3_64_intdigest(data, seed=self.seed) < int(self.fraction * 2**64)

    def _group(self, values: Mapping[str, Any]) -> Any:
        assert self.group_by is not None
        if self.group_by not in values:
            raise ValueError(f"group_by={self.group_by!r} is not a column; the columns are {', '.join(values)}.")
        return values[self.group_by]


def _group_bytes(value: Any) -> bytes:
    return bytes(value) if isinstance(value, (bytes, memoryview)) else str(value).encode()


def identifying(columns: Mapping[str, str], wanted: Sequence[str]) -> dict[str, str]:
    """Return those of the columns that tell rows apart: all, unless the source names some."""
    return {name: columns[name] for name in wanted if name in columns} or dict(columns)
