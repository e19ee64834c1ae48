"""What a writer needs to know of a format: how samples and batches become the bytes of a shard's files."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from lightning_stream.formats.encodings.base import Bytes2d
from lightning_stream.formats.index.schema import Schema, schema_object

_JOIN_BYTES = 1 << 16  # small parts are joined to about so many before they are copied: a step for many


class Buffer(Protocol):
    """What takes the bytes of samples in order."""

    def add(self, data: Any) -> None:
        """Add bytes, or a view of some."""

    def add_rows(self, blocks: Sequence[Bytes2d]) -> None:
        """Add rows whose bytes stand side by side in blocks."""


class EncodedBatch(NamedTuple):
    """The rows of a batch as bytes, of sizes[k] bytes each.

    Either ``blocks``, uint8[rows, width] each: row k is what their rows k make together. Or ``parts``, of which
    parts[k * per_row : (k + 1) * per_row] are row k. Both may be views of the caller's memory: they are to be copied
    before `write_batch` returns.
    """

    sizes: NDArray[np.int64]
    blocks: Sequence[Bytes2d] = ()
    parts: Sequence[Any] = ()
    per_row: int = 1

    def copy_to(self, buffer: Buffer, begin: int, end: int) -> None:
        """Add the bytes of rows begin to end, in order."""
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
            raise TypeError("encode_many must give bytes, or views of bytes; it gave a list of arrays of other items.")

    def joined(self) -> bytes | memoryview:
        """All bytes, in order, in memory of their own."""
        if len(self.blocks) > 1:
            return np.concatenate(self.blocks, axis=1).reshape(-1).data
        return self.blocks[0].tobytes() if self.blocks else b"".join(self.parts)


class ShardEncoder(Protocol):
    """One format, with its columns known.

    Attributes:
        schema: What every shard entry says.
        header_bytes: Bytes of the file whose size is limited, without samples.
        per_sample_overhead: What a sample adds to that file beyond its own bytes.
    """

    schema: Schema
    header_bytes: int
    per_sample_overhead: int

    def encode(self, sample: Mapping[str, Any]) -> list[bytes]:
        """A sample's bytes, in parts. Keys that are not columns are left out.

        Raises:
            TypeError: A value of a type that its column does not take; names the column.
            ValueError: A column is missing, or a value is out of range, or of a wrong shape, dtype or length.
        """

    def encode_batch(self, columns: dict[str, Any], num_rows: int) -> EncodedBatch:
        """The bytes of a batch's rows: the same as those of `encode` for each."""

    def files(self, sizes: Sequence[int], parts: Sequence[Any]) -> tuple[tuple[str, list[Any]], ...]:
        """A shard's files: (``"data"`` or ``"meta"``, the file's bytes in parts).

        Args:
            sizes: Bytes of each sample.
            parts: The samples' bytes in order, cut anywhere.
        """


def config_bytes(schema: Schema) -> bytes:
    """The text inside every shard file that describes its columns."""
    return json.dumps(schema_object(schema), sort_keys=True).encode()


def offset_table(sizes: Sequence[int] | NDArray[Any], first: int) -> bytes:
    """Count and offsets of samples of these sizes, the first at ``first``."""
    offsets = np.empty(len(sizes) + 1, np.int64)
    offsets[0] = first
    np.cumsum(sizes, out=offsets[1:])
    offsets[1:] += first
    return len(sizes).to_bytes(4, "little") + offsets.astype("<u4").tobytes()


def require_columns(columns: Mapping[str, str]) -> None:
    """Raise ValueError unless there are columns, TypeError unless their names are text."""
    if not columns:
        raise ValueError("columns must name at least one column and its encoding, e.g. {'text': 'str'}.")
    wrong = next((name for name in columns if not isinstance(name, str)), None)
    if wrong is not None:
        raise TypeError(f"names of columns must be text; got {wrong!r}.")


def column_error(name: str, encoding: str, sample: Any, error: Exception) -> Exception:
    """The error for a sample that cannot be encoded: what is wrong with it, or with one of its columns."""
    if not isinstance(sample, Mapping):
        return TypeError(f"a sample must be a mapping of column names to values; got {type(sample).__name__}.")
    if name not in sample:
        return ValueError(
            f"column {name!r} ({encoding}) is missing in a sample that has {', '.join(map(str, sample))}."
        )
    return named_error(name, error)


def named_error(name: str, error: Exception) -> Exception:
    """The error with its column named; only what a wrong value raises is changed."""
    if isinstance(error, (TypeError, ValueError)):
        kind = TypeError if isinstance(error, TypeError) else ValueError
        return kind(f"column {name!r}: {error}")
    return error
