"""A batch's columns to bytes, column by column, and then the rows' bytes in order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_stream.formats.encodings import get_encoding
from lightning_stream.formats.encodings.arrays import AnyArray
from lightning_stream.formats.encodings.base import Encoding, Layout
from lightning_stream.formats.index.schema import Schema
from lightning_stream.writer.batch import Pieces
from lightning_stream.writer.gathered import Bytes2d, Gathered

_JOIN_BYTES = 1 << 16  # small parts are joined to about so many before they are copied: a step for many


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

    def copy_to(self, gathered: Gathered, begin: int, end: int) -> None:
        """Add the bytes of rows begin to end, in order."""
        if self.blocks:
            gathered.add_rows([block[begin:end] for block in self.blocks])
            return
        parts = self.parts[begin * self.per_row : end * self.per_row]
        per_join = _JOIN_BYTES * len(parts) // max(1, int(self.sizes[begin:end].sum()))
        if per_join <= 1:
            for part in parts:
                gathered.add(part)
            return
        for k in range(0, len(parts), per_join):
            gathered.add(b"".join(parts[k : k + per_join]))

    def joined(self) -> bytes | memoryview:
        """All bytes, in order, in memory of their own."""
        if len(self.blocks) > 1:
            return np.concatenate(self.blocks, axis=1).reshape(-1).data
        return self.blocks[0].tobytes() if self.blocks else b"".join(self.parts)


def encode_batch(schema: Schema, columns: dict[str, Any], num_rows: int) -> EncodedBatch:
    """All rows of a batch, for one MDS schema.

    Raises:
        TypeError: A value of a type its column does not take; names the column.
        ValueError: A column is missing, or a value is out of range, or of a wrong shape or dtype.
    """
    fixed: dict[int, list[Bytes2d]] = {}
    varied: dict[int, Sequence[Any]] = {}
    for k, (name, encoding_name, size) in enumerate(zip(schema.names, schema.encodings, schema.sizes, strict=True)):
        if name not in columns:
            raise ValueError(f"column {name!r} ({encoding_name}) is missing in a batch that has {', '.join(columns)}.")
        encoding = get_encoding(encoding_name)
        try:
            blocks = _plain_blocks(encoding, columns[name])
            if blocks is not None:
                fixed[k] = blocks
            else:
                values = _encode_each(encoding, columns[name])
                varied[k] = values
                if size is not None:
                    fixed[k] = [_same_size(values, size, encoding_name)]
        except (TypeError, ValueError) as error:
            kind = TypeError if isinstance(error, TypeError) else ValueError
            raise kind(f"column {name!r}: {error}") from error
    return _assemble(schema, fixed, varied, num_rows)


def _assemble(
    schema: Schema, fixed: dict[int, list[Bytes2d]], varied: dict[int, Sequence[Any]], num_rows: int
) -> EncodedBatch:
    """Runs of columns of one width become one block each; values that vary stand between."""
    count = len(schema.names)
    lengths = {k: np.fromiter(map(len, varied[k]), np.int64, num_rows) for k in range(count) if k not in fixed}
    heads = [
        lengths[k] if k in lengths else np.full(num_rows, _width(fixed[k]), np.int64)
        for k in range(count)
        if schema.sizes[k] is None
    ]
    if any((sizes >= 1 << 32).any() for sizes in heads):
        raise ValueError("a value must stay under 4 GiB.")
    sizes = np.full(num_rows, 4 * len(heads) + sum(map(_width, fixed.values())), np.int64)
    for length in lengths.values():
        sizes += length
    run: list[Bytes2d] = []
    if heads:
        run.append(np.ascontiguousarray(np.array(heads, np.int64).T.astype("<u4")).view(np.uint8).reshape(num_rows, -1))
    pieces: list[Sequence[Any]] = []
    for k in range(count):
        if k in fixed:
            run += fixed[k]
            continue
        if run:
            pieces.append(_rows(run))
        pieces.append(varied[k])
        run = []
    if not pieces:
        return EncodedBatch(sizes, run)
    if run:
        pieces.append(_rows(run))
    parts: list[Any] = [b""] * (num_rows * len(pieces))
    for k, piece in enumerate(pieces):
        parts[k :: len(pieces)] = piece
    return EncodedBatch(sizes, (), parts, len(pieces))


def _width(blocks: Sequence[Bytes2d]) -> int:
    return sum(block.shape[1] for block in blocks)


def _rows(run: list[Bytes2d]) -> list[memoryview]:
    block = run[0] if len(run) == 1 else np.concatenate(run, axis=1)
    flat: memoryview = block.reshape(-1).data
    width = block.shape[1]
    return [flat[at : at + width] for at in range(0, len(flat), width)]


def _same_size(values: Sequence[Any], size: int, encoding_name: str) -> Bytes2d:
    wrong = next((value for value in values if len(value) != size), None)
    if wrong is not None:
        raise ValueError(f"{encoding_name} takes {size} bytes; got {len(wrong)} bytes.")
    return np.frombuffer(b"".join(values), np.uint8).reshape(len(values), size)


def _encode_each(encoding: Encoding, values: Any) -> Sequence[Any]:
    stored = not getattr(encoding, "checks_bytes", False)
    if isinstance(values, Pieces):
        if (values.encoding == "bytes" and stored) or encoding is get_encoding("str"):
            return values
        values = [bytes(value) if values.encoding == "bytes" else str(value, "utf-8") for value in values]
    if isinstance(values, np.ndarray) and values.ndim == 1 and values.dtype.kind in "USO":
        values = values.tolist()
    encode = encoding.encode
    if encoding is get_encoding("str") and set(map(type, values)) == {str}:
        try:
            return list(map(str.encode, values))
        except UnicodeEncodeError:
            return list(map(encode, values))  # says more
    return [value if stored and type(value) is bytes else encode(value) for value in values]


def _plain_blocks(encoding: Encoding, values: Any) -> list[Bytes2d] | None:
    """The column's bytes as blocks of uint8[rows, width], if its values are numbers in one array; else None."""
    if isinstance(encoding, AnyArray):
        return _array_blocks(encoding, values)
    block = _plain_block(encoding, values)
    return None if block is None else [block]


def _plain_block(encoding: Encoding, values: Any) -> Bytes2d | None:
    layout = getattr(encoding, "layout", None)
    if layout is None or not isinstance(values, (np.ndarray, list, tuple)):
        return None
    array = values if isinstance(values, np.ndarray) else _stacked(values)
    if array is None or array.dtype.kind not in "iufb":
        return None
    if layout.shape:
        return _shaped_block(layout, array)
    if array.ndim != 1:
        raise ValueError(f"takes one number per row; got an array of shape {array.shape}.")
    return _number_block(layout, array)


def _stacked(values: Sequence[Any]) -> NDArray[Any] | None:
    """A list of numbers, or of arrays of one shape, as one array; None if it is anything else."""
    if not values or isinstance(values[0], (str, bytes)):
        return None
    if not isinstance(values[0], np.ndarray) and type(values[0]) not in (int, float):
        return None
    kind = type(values[0])
    if any(type(value) is not kind for value in values):
        return None
    try:
        return np.array(values)
    except (ValueError, OverflowError):
        return None


def _shaped_block(layout: Layout, array: NDArray[Any]) -> Bytes2d:
    if array.shape[1:] != layout.shape:
        raise ValueError(f"takes shape {layout.shape} per row; got {array.shape[1:]}.")
    if array.dtype.newbyteorder("<") != layout.dtype:
        raise ValueError(f"takes dtype {layout.dtype.name}; got dtype {array.dtype}. Convert it with astype().")
    return _as_bytes(array.astype(layout.dtype, copy=False))


def _number_block(layout: Layout, array: NDArray[Any]) -> Bytes2d:
    """Numbers of one array as a scalar encoding stores them; refused where a single one would be."""
    dtype = layout.dtype
    if np.can_cast(array.dtype, dtype, "safe"):
        return _as_bytes(array.astype(dtype))
    cast = array
    if dtype.kind == "f":
        with np.errstate(over="ignore", invalid="ignore"):
            cast = array.astype(dtype)
        wrong = np.isinf(cast) & np.isfinite(array)
    else:
        limits = np.iinfo(dtype)
        wrong = np.array([not limits.min <= value <= limits.max for value in _extremes(array)])
        if array.dtype.kind == "f":
            wrong = np.array([wrong.any() or bool((array != np.floor(array)).any())])
    if wrong.any():
        raise ValueError(f"values are out of range for {dtype.name}, or no whole numbers.")
    return _as_bytes(cast.astype(dtype))


def _extremes(array: NDArray[Any]) -> list[Any]:
    return [array.min().item(), array.max().item()] if len(array) else []


def _array_blocks(encoding: AnyArray, values: Any) -> list[Bytes2d] | None:
    """Arrays of one shape, stored with their shape: the same head before every row."""
    if not isinstance(values, np.ndarray) or values.ndim < 2 or not len(values) or values.dtype == object:
        return None
    first = np.frombuffer(encoding.encode(values[0]), np.uint8)
    order = values.astype(values.dtype.newbyteorder("<"), copy=False)
    body = _as_bytes(order)
    head = first[: len(first) - body.shape[1]]
    return [np.broadcast_to(head, (len(values), len(head))), body]


def _as_bytes(array: NDArray[Any]) -> Bytes2d:
    width = array.dtype.itemsize * int(np.prod(array.shape[1:]))
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).reshape(len(array), width)
