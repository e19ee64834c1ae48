"""A batch as columns: from a mapping of arrays, an Arrow table, or a pandas frame.

Arrow and pandas are not imported, but recognised by their attributes. Values are not copied if their memory allows it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_stream.formats.encodings.base import BinaryColumn, type_name


def batch_columns(batch: Any) -> tuple[dict[str, Any], int]:
    """Return the columns of a batch (arrays, or sequences of values) of one length, and its number of rows."""
    columns = _columns(batch)
    lengths = {name: len(values) for name, values in columns.items()}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"the columns of a batch must have the same length; got {lengths}.")
    return columns, next(iter(lengths.values()), 0)


def _columns(batch: Any) -> dict[str, Any]:
    module = type(batch).__module__.split(".")[0]
    if module == "pyarrow" and hasattr(batch, "column_names"):
        names = _distinct(batch.column_names)
        return {name: arrow_values(batch.column(k), name) for k, name in enumerate(names)}
    if module == "pandas" and hasattr(batch, "columns"):
        names = _distinct(map(str, batch.columns))
        return {name: batch.iloc[:, k].to_numpy() for k, name in enumerate(names)}
    if isinstance(batch, Mapping):
        return {name: _values(values, name) for name, values in batch.items()}
    raise TypeError(f"a batch must be a mapping of columns, an Arrow or pandas table; got {type_name(batch)}.")


def _distinct(names: Iterable[str]) -> list[str]:
    """Return the names of columns; ValueError if two columns have the same name."""
    columns = list(names)
    if twice := sorted({name for name in columns if columns.count(name) > 1}):
        raise ValueError(f"columns of a batch must have different names; found {twice} more than once. Rename them.")
    return columns


def _values(values: Any, name: str) -> Any:
    if type(values).__module__.split(".")[0] == "pyarrow":
        return arrow_values(values, name)
    if hasattr(values, "__array__") and not isinstance(values, np.ndarray):
        try:
            values = np.asarray(values)
        except (RuntimeError, TypeError) as error:  # a torch tensor on a GPU, or with a gradient
            raise TypeError(f"column {name!r}: {type_name(values)} cannot be made an array: {error}") from error
    if isinstance(values, (str, bytes)) or (isinstance(values, np.ndarray) and not values.ndim):
        raise TypeError(f"column {name!r}: a batch has one value per row; got one {type_name(values)}. Pass a list.")
    if isinstance(values, np.ma.MaskedArray) and (masked := int(np.ma.getmaskarray(values).sum())):
        raise ValueError(f"column {name!r}: {masked} values are masked. Fill or drop them before writing.")
    if isinstance(values, (np.ndarray, Sequence)):
        return values
    raise TypeError(f"column {name!r}: a batch holds arrays or sequences of values; got {type_name(values)}.")


def arrow_values(column: Any, name: str) -> Any:
    """Return an Arrow column as an array, or as a list of bytes-like values, texts, arrays or plain objects."""
    if hasattr(column, "combine_chunks"):
        column = column.combine_chunks()
        if hasattr(column, "chunks"):  # older Arrow keeps a chunked array of one chunk
            column = column.chunk(0) if column.num_chunks == 1 else column
    if hasattr(column, "storage"):
        column = column.storage
    kind = str(column.type)
    if column.null_count:
        if kind.startswith(("struct", "list", "large_list", "map")):
            return column.to_pylist()
        raise ValueError(f"column {name!r}: {column.null_count} values are null. Fill or drop them before writing.")
    if kind in ("string", "large_string", "binary", "large_binary"):
        pieces = _arrow_bytes(column, "large" in kind)
        if "string" in kind:
            pieces.encoding = "str"
            pieces.is_checked = _is_utf8(column)
        return pieces
    if kind.startswith("fixed_size_list") and column.flatten().null_count == 0:
        flat = arrow_numbers(column.flatten())
        return flat.reshape(len(column), column.type.list_size) if flat.dtype != object else column.to_pylist()
    is_list = kind.startswith(("list<", "large_list<"))
    if is_list and str(column.values.type) in _NUMBERS and not column.values.null_count:
        values = arrow_numbers(column.values)  # arrays that share Arrow's memory
        return [values[begin:end] for begin, end in pairwise(arrow_numbers(column.offsets).tolist())]
    if kind in _NUMBERS or kind == "bool":
        return arrow_numbers(column)
    return column.to_pylist()


def arrow_numbers(column: Any) -> NDArray[Any]:
    """Return Arrow's numbers or truth values as an array that shares their memory if possible.

    Arrow's own conversion imports pandas if it is installed, which takes a second in every process.
    """
    kind = str(column.type)
    if kind not in ("bool", *_NUMBERS) or column.null_count:
        values: NDArray[Any] = column.to_numpy(zero_copy_only=False)
        return values
    if kind == "bool":
        return arrow_numbers(column.cast("uint8")).view(np.bool_)
    dtype = np.dtype(_NUMBERS[kind])
    if not len(column):
        return np.empty(0, dtype)
    return np.frombuffer(column.buffers()[1], dtype, len(column), column.offset * dtype.itemsize)


_SMALL_BYTES = 1 << 10
_NUMBERS = {
    "int8": "i1", "int16": "i2", "int32": "i4", "int64": "i8", "uint8": "u1", "uint16": "u2", "uint32": "u4",
    "uint64": "u8", "halffloat": "f2", "float": "f4", "double": "f8",
}  # fmt: skip


def check_texts(columns: Mapping[str, Any]) -> None:
    """Raise ValueError for text of Arrow that is not UTF-8, which Parquet files of some writers hold."""
    for name, values in columns.items():
        if isinstance(values, BinaryColumn) and values.encoding == "str" and not values.is_checked:
            try:
                b"\n".join(values).decode()
            except UnicodeDecodeError as error:
                raise ValueError(f"column {name!r}: text must be UTF-8; {error}. Cast it to binary.") from error


def _is_utf8(column: Any) -> bool:
    """As `check_texts` finds it, in a tenth of its time."""
    try:
        column.validate(full=True)
    except ValueError:
        return False
    return True


def _arrow_bytes(column: Any, large: bool) -> BinaryColumn:
    """Return text or binary values as views of Arrow's memory."""
    _, offsets, data = column.buffers()
    if not len(column):
        return BinaryColumn()
    table = np.frombuffer(offsets, np.int64 if large else np.int32)[column.offset : column.offset + len(column) + 1]
    begin = int(table[0])
    end = int(table[-1])
    stored: Any = memoryview(data).cast("B")[begin:end] if data is not None else b""
    if end - begin < _SMALL_BYTES * len(column):  # a copy costs less than the garbage collector's walk over views
        stored = bytes(stored)
    return BinaryColumn(stored[first:last] for first, last in pairwise((table - begin).tolist()))
