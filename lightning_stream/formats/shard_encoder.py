"""The interface of a format to its writer: how samples and batches become the bytes of a shard's files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from lightning_stream.formats.encodings.base import Bytes2d
from lightning_stream.formats.model import Schema

_JOIN_BYTES = 1 << 16  # small parts are joined to about so many bytes before they are copied
_CHUNK_BYTES = 1 << 18  # it stays in a core's cache between the copy, the hash and the write
_WIDE_BYTES = 1 << 16  # parts from this size on are written one by one


class EncodedBatch(NamedTuple):
    """The rows of a batch as bytes; row k has sizes[k] bytes.

    Either ``blocks``, each uint8[rows, width]: row k is row k of each of them. Or ``parts``, of which
    parts[k * per_row : (k + 1) * per_row] are row k. Both may be views of the caller's memory, so they must be copied
    before `write_batch` returns.
    """

    sizes: NDArray[np.int64]
    blocks: Sequence[Bytes2d] = ()
    parts: Sequence[Any] = ()
    per_row: int = 1

    def copy_to(self, buffer: Any, begin: int, end: int) -> None:
        """Add the bytes of the rows begin to end to a `ShardBuffer`."""
        if self.blocks:
            buffer.add_rows([block[begin:end] for block in self.blocks])
            return
        parts = self.parts[begin * self.per_row : end * self.per_row]
        num_bytes = int(self.sizes[begin:end].sum())
        per_join = _JOIN_BYTES * len(parts) // max(1, num_bytes)
        if per_join <= 1:
            for part in parts:
                buffer.add(part)
            return
        for k in range(0, len(parts), per_join):
            joined = b"".join(parts[k : k + per_join])
            num_bytes -= len(joined)
            buffer.add(joined)
        if num_bytes:
            raise TypeError("encode_many must give bytes, or views of bytes; it gave arrays of other items.")

    def chunks(self) -> Iterator[Any]:
        """Yield all bytes in order, about a MiB at a time: each until the next one, or as a view where that is free."""
        if self.blocks:
            yield from _joined_rows(self.blocks)
        elif int(self.sizes.sum()) >= _WIDE_BYTES * len(self.parts):
            yield from self.parts
        else:
            step = max(1, _CHUNK_BYTES * len(self.parts) // max(1, int(self.sizes.sum())))
            yield from (b"".join(self.parts[k : k + step]) for k in range(0, len(self.parts), step))

    def joined(self) -> bytes | memoryview:
        """Return all bytes in order, copied."""
        if len(self.blocks) > 1:
            return np.concatenate(self.blocks, axis=1).reshape(-1).data
        return self.blocks[0].tobytes() if self.blocks else b"".join(self.parts)


def _joined_rows(blocks: Sequence[Bytes2d]) -> Iterator[memoryview]:
    """Yield blocks side by side, some rows at a time, in memory that is used again."""
    num_rows, width = len(blocks[0]), sum(block.shape[1] for block in blocks)
    if len(blocks) == 1 and blocks[0].flags.c_contiguous:
        flat: memoryview = blocks[0].reshape(-1).data
        yield from (flat[at : at + _CHUNK_BYTES] for at in range(0, len(flat), _CHUNK_BYTES))
        return
    step = max(1, _CHUNK_BYTES // max(1, width))
    memory = np.empty((min(step, num_rows), width), np.uint8)
    for begin in range(0, num_rows, step):
        rows = memory[: num_rows - begin]
        np.concatenate([block[begin : begin + step] for block in blocks], axis=1, out=rows)
        yield rows.reshape(-1).data


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
    offsets[0] = first
    np.cumsum(sizes, out=offsets[1:])
    offsets[1:] += first
    return len(sizes).to_bytes(4, "little") + offsets.astype("<u4").tobytes()


def check_columns(columns: Mapping[str, str]) -> None:
    """Raise ValueError unless there are columns, TypeError unless their names are text."""
    if not columns:
        raise ValueError("columns must name at least one column and its encoding, e.g. {'text': 'str'}.")
    wrong = next((name for name in columns if not isinstance(name, str)), None)
    if wrong is not None:
        raise TypeError(f"column names must be text; got {wrong!r}.")


def column_error(name: str, encoding: str, sample: Any, error: Exception) -> Exception:
    """Return the error for a sample that cannot be encoded, or for one of its columns."""
    if not isinstance(sample, Mapping):
        return TypeError(f"a sample must be a mapping of column names to values; got {type(sample).__name__}.")
    if name not in sample:
        return ValueError(f"column {name!r} ({encoding}) is missing in a sample that has {', '.join(map(str, sample))}")
    return named_error(name, error)


def named_error(name: str, error: Exception) -> Exception:
    """Return the error of a wrong value with its column named, and any other error as it is."""
    if isinstance(error, (TypeError, ValueError)):
        kind = TypeError if isinstance(error, TypeError) else ValueError
        return kind(f"column {name!r}: {error}")
    return error
