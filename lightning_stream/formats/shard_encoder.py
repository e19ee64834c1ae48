"""The interface of a format to its writer: how samples and batches become the bytes of a shard's files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from .encodings.base import EncodedColumn
from .model import Schema

_CHUNK_BYTES = 1 << 18  # it stays in a core's cache between the copy, the hash and the write
_WIDE_BYTES = 1 << 16  # values from this size on are not copied together
_SMALL_BYTES = 1 << 10


class EncodedBatch(NamedTuple):
    """The rows of a batch as bytes: row k has ``sizes[k]`` bytes, its values of all ``columns`` side by side.

    Columns may be views of the caller's memory, so they must be copied before `write_batch` returns.
    """

    sizes: NDArray[np.int64]
    columns: Sequence[EncodedColumn]

    def rows(self) -> list[memoryview]:
        """The bytes of each row."""
        data = memoryview(b"".join(self.chunks()))
        ends = np.cumsum(self.sizes).tolist()
        return [data[end - size : end] for end, size in zip(ends, self.sizes.tolist(), strict=True)]

    def chunks(self, begin: int = 0, end: int | None = None) -> Iterator[Any]:
        """Yield the bytes of rows in order, about 256 KiB at a time.

        Large values, and rows that are one array, are yielded as views. TypeError for values that are not bytes.
        """
        columns = [column[begin:end] for column in self.columns]
        sizes = self.sizes[begin:end]
        blocks = [column for column in columns if isinstance(column, np.ndarray)]
        if len(columns) == len(blocks) == 1 and blocks[0].flags.c_contiguous:
            yield from _cut(blocks[0].reshape(-1).data)
            return
        num_bytes = max(1, int(sizes.sum()))
        is_wide = num_bytes >= _WIDE_BYTES * len(sizes) * len(columns)
        step = max(1, _CHUNK_BYTES * len(sizes) // num_bytes)
        for at in range(0, len(sizes), step):
            rows = slice(at, at + step)
            if len(columns) == len(blocks):
                yield np.concatenate([block[rows] for block in blocks], axis=1).reshape(-1).data
                continue
            parts: list[Any] = [b""] * (len(sizes[rows]) * len(columns))
            for k, column in enumerate(columns):
                parts[k :: len(columns)] = _row_views(column[rows])
            joined = parts if is_wide else [b"".join(parts)]
            if sum(map(len, joined)) != sizes[rows].sum():
                raise TypeError("encode_many must give bytes, or views of bytes; it gave arrays of other items.")
            yield from joined


def _cut(data: memoryview) -> Iterator[memoryview]:
    return (data[at : at + _CHUNK_BYTES] for at in range(0, len(data), _CHUNK_BYTES))


def _row_views(column: EncodedColumn) -> Sequence[Any]:
    """Return one bytes-like value per row.

    Small ones are bytes: views are tracked by the garbage collector, which took half of the time of writing text.
    """
    if not isinstance(column, np.ndarray):
        return column
    width = column.shape[1]
    flat: Any = column.tobytes() if width < _SMALL_BYTES else np.ascontiguousarray(column).reshape(-1).data
    return [flat[at : at + width] for at in range(0, len(flat), width)] if width else [b""] * len(column)


class ShardEncoder(Protocol):
    """One format, for known columns."""

    schema: Schema
    header_bytes: int  # of the file whose size is limited, without samples
    per_sample_overhead: int  # bytes that a sample adds to that file beyond its own

    def encode(self, sample: Mapping[str, Any]) -> list[bytes]:
        """Return a sample's bytes, in parts. Keys that are not columns are ignored.

        TypeError for a value of a wrong type, ValueError for a missing column or another wrong value.
        """

    def encode_batch(self, columns: dict[str, Any], num_rows: int) -> EncodedBatch:
        """Return the bytes of a batch's rows: the same as those of `encode` for each row."""

    def files(self, sizes: Sequence[int], parts: Sequence[Any]) -> tuple[tuple[str, list[Any]], ...]:
        """Return a shard's files from its samples' sizes and bytes: (``"data"`` or ``"meta"``, the file in parts)."""


def offset_table(sizes: Sequence[int] | NDArray[Any], first: int) -> bytes:
    """Return the number and the offsets of samples of these sizes, the first one at ``first``."""
    offsets = np.empty(len(sizes) + 1, np.int64)
    offsets[0] = 0
    np.cumsum(sizes, out=offsets[1:])
    offsets += first
    return len(sizes).to_bytes(4, "little") + offsets.astype("<u4").tobytes()


def check_columns(columns: Mapping[str, str]) -> None:
    """Raise ValueError unless there are columns, TypeError unless their names are text."""
    if not columns:
        raise ValueError("columns must name at least one column and its encoding, e.g. {'text': 'str'}.")
    for name in columns:
        if not isinstance(name, str):
            raise TypeError(f"column names must be text; got {name!r}.")


def column_error(name: str, encoding: str, sample: Any, error: Exception) -> Exception:
    """Return the error for a sample that cannot be encoded, or for one of its columns."""
    if not isinstance(sample, Mapping):
        return TypeError(f"a sample must be a mapping of column names to values; got {type(sample).__name__}.")
    if name not in sample:
        return ValueError(f"column {name!r} ({encoding}) is missing; found {', '.join(map(str, sample))}.")
    for kind in (TypeError, ValueError):
        if isinstance(error, kind):
            return kind(f"column {name!r}: {error}")
    return error
