"""Arrow's types and values as MDS stores them: which encoding each type gets, and a batch as a writer takes it.

docs/convert.md has the table of types.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, timedelta
from functools import partial
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from lightning_stream.formats.encodings import get_encoding
from lightning_stream.formats.encodings.base import cast_numbers
from lightning_stream.sources.base import Asked, Columns
from lightning_stream.writer.batch import arrow_numbers

Values: TypeAlias = "NDArray[Any] | Sequence[Any] | pa.Array"

_NUMBERS = {f"{sign}int{bits}": f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)}
_NUMBERS |= {"halffloat": "float16", "float": "float32", "double": "float64", "bool": "uint8"}
# The first words of the names of types, by their sort.
_TYPES = {
    "number": " ".join(_NUMBERS),
    "text": "string large_string string_view",
    "binary": "binary large_binary binary_view fixed_size_binary",
    "decimal": "decimal32 decimal64 decimal128 decimal256",
    "list": "list large_list fixed_size_list",
    "date": "date32 date64",
    "time": "time32 time64",
    "timestamp": "timestamp",
    "duration": "duration",
    "struct": "struct",
    "map": "map",
    "null": "null",
}
_SORTS = {word: sort for sort, words in _TYPES.items() for word in words.split()}
_ENCODING = {
    "text": "str", "binary": "bytes", "decimal": "str_decimal",
    "date": "int32", "timestamp": "int64", "duration": "int64", "time": "int64",
}  # fmt: skip
# What views become, and binary values of one size: what all readers know. And what days and times become: Python's own
# values would lose what is finer.
_PLAIN_TYPES = {
    "string_view": pa.large_string(), "binary_view": pa.large_binary(), "fixed_size_binary": pa.binary(),
    "date64": pa.date32(), "time32": pa.time64("us"), "time64": pa.time64("us"), "duration": pa.duration("us"),
}  # fmt: skip
_NUMERIC = ("int", "uint", "float", "str_")
# What may be asked for instead of the inferred encoding: beginnings of names.
_ALLOWED = {
    **dict.fromkeys(("number", "duration", "time"), (*_NUMERIC, "json")),
    **dict.fromkeys(("date", "timestamp"), (*_NUMERIC, "str", "json")),
    "text": ("str", "bytes", "json"), "decimal": ("str_decimal", "str", "float", "int", "json"),
    "list": ("ndarray", "json"), "struct": ("json",), "map": ("json",),
}  # fmt: skip
# What is written as whole numbers of a unit.
_COUNTED = ("date", "timestamp", "duration", "time")


def _sort(kind: pa.DataType) -> str:
    """``number``, ``text``, ``list``... of a plain type."""
    return _SORTS.get(_word(kind), "other")


def _word(kind: pa.DataType) -> str:
    return re.split(r"\W", str(kind), maxsplit=1)[0]


def plain_type(kind: pa.DataType) -> pa.DataType:
    """The type of the values themselves: without dictionaries, runs, views and extensions, at any depth."""
    if isinstance(kind, pa.BaseExtensionType):
        return plain_type(kind.storage_type)
    if pa.types.is_dictionary(kind) or pa.types.is_run_end_encoded(kind):
        return plain_type(kind.value_type)
    if pa.types.is_struct(kind):
        fields = map(kind.field, range(kind.num_fields))
        return pa.struct([field.with_type(plain_type(field.type)) for field in fields])
    if pa.types.is_map(kind):
        inner = plain_type(kind.key_type), plain_type(kind.item_type)
        return kind if inner == (kind.key_type, kind.item_type) else pa.map_(*inner)
    if _sort(kind) == "list":
        element = kind.value_field.with_type(plain_type(kind.value_type))
        return pa.large_list(element) if pa.types.is_large_list(kind) else pa.list_(element, _list_size(kind))
    return _PLAIN_TYPES.get(_word(kind), kind)


def _list_size(kind: pa.DataType) -> int:
    """The elements of each list of this type; -1 if they differ."""
    return kind.list_size if pa.types.is_fixed_size_list(kind) else -1


def plain_values(column: pa.Array) -> pa.Array:
    """The values as a plain type: the same whether a process knows the extensions or not."""
    wanted = plain_type(column.type)
    if wanted == column.type:
        return column
    if isinstance(column, pa.ExtensionArray):
        return plain_values(column.storage)
    if pa.types.is_dictionary(column.type):
        return plain_values(column.dictionary_decode())
    if pa.types.is_run_end_encoded(column.type):
        import pyarrow.compute as pc  # slow to import

        return plain_values(pc.run_end_decode(column))
    return column.cast(wanted)


def check_unit(former: pa.DataType, latter: pa.DataType) -> pa.DataType:
    """The former of two plain types; ValueError if the numbers that are written of them count other units."""
    sorts = {_sort(former), _sort(latter)} - {"null"}
    if len(sorts) > 1 and not sorts.isdisjoint(_COUNTED):
        raise ValueError(f"numbers of {former!s:.60} and {latter!s:.60} count other units; 'json' takes both")
    return former


def common_type(former: pa.DataType, latter: pa.DataType) -> pa.DataType:
    """The plain type that holds all values of two exactly, as they are written; ValueError if there is none."""
    sorts = {_sort(former), _sort(latter)}
    if former == latter or {encoding_of(former), encoding_of(latter)} == {"json"}:
        return former
    if "null" in sorts:
        return pa.null()
    if sorts == {"number"}:
        return _common_number(former, latter)
    if len(sorts) > 1:
        raise ValueError(f"{former!s:.60} and {latter!s:.60} have no common type")
    return _common_list(former, latter) if sorts == {"list"} else former


def _common_number(former: pa.DataType, latter: pa.DataType) -> pa.DataType:
    dtypes = [np.dtype(_NUMBERS[str(kind)]) for kind in (former, latter)]
    common = np.promote_types(*dtypes)
    if common.kind == "f" and any(dtype.kind != "f" and dtype.itemsize == common.itemsize for dtype in dtypes):
        raise ValueError(f"no type holds all numbers of {former} and {latter} exactly")
    return pa.from_numpy_dtype(common)


def _common_list(former: pa.DataType, latter: pa.DataType) -> pa.DataType:
    elements = [former.value_type, latter.value_type]
    known = [kind for kind in elements if not pa.types.is_null(kind)]  # lists without a type are empty
    try:
        element = common_type(known[0], known[-1])
    except ValueError:
        if "json" in (encoding_of(former), encoding_of(latter)):
            return pa.list_(pa.null())
        raise
    return pa.list_(element, _list_size(former) if _list_size(former) == _list_size(latter) else -1)


def arrow_columns(schema: pa.Schema, asked: Asked | None = None) -> dict[str, str]:
    """Return the encoding of every column that is written; ValueError names all that cannot be."""
    names = list(schema.names)
    twice = sorted({name for name in names if names.count(name) > 1})
    problems = [f"two columns are named {name!r}." for name in twice]
    columns: dict[str, str] = {}
    for name in names if asked is None else asked:
        if name in twice:
            continue
        if name not in names:
            problems.append(f"{name!r} is not a column; the columns are {', '.join(names)}.")
            continue
        try:
            kind = plain_type(schema.field(name).type)
            wanted = None if asked is None else asked[name]
            columns[name] = encoding_of(kind) if wanted is None else _allowed(kind, wanted)
        except (ValueError, TypeError, KeyError) as error:
            problems.append(f"column {name!r}: {str(error).rstrip('.')}.")
    if problems or not columns:
        raise ValueError("the columns cannot be written: " + " ".join(problems or ["there are none."]))
    return columns


def _allowed(kind: pa.DataType, asked: str) -> str:
    get_encoding(asked)
    allowed = _ALLOWED.get(_sort(kind), ("",))
    if not asked.startswith(allowed):
        raise ValueError(
            f"Arrow's {kind!s:.60} is not written as {asked!r}. Cast the column, or ask for one of "
            f"{', '.join(f'{name}...' for name in allowed)}"
        )
    return asked


def _shape_of(kind: pa.DataType) -> tuple[list[int], pa.DataType]:
    """The dimensions of nested lists, 0 for each of no fixed size, and the type of the elements."""
    shape = []
    while _sort(kind) == "list":
        shape.append(max(0, _list_size(kind)))
        kind = kind.value_type
    return shape, kind


def encoding_of(kind: pa.DataType) -> str:
    """The encoding of a plain type; ValueError if it has none."""
    shape, element = _shape_of(kind)
    if _sort(element) == "number":
        dtype = _NUMBERS[str(element)]
        fixed = ":" + ",".join(map(str, shape)) if all(shape) else ""
        return f"ndarray:{dtype}{fixed}" if shape else dtype
    if _sort(kind) in _ENCODING:
        return _ENCODING[_sort(kind)]
    for inner in nested_types(kind):
        if _sort(inner) == "other":
            raise ValueError(f"there is no encoding for Arrow's type {inner!s:.60}. Cast it, or omit it by columns=")
    return "json"


def nested_types(kind: pa.DataType) -> Iterator[pa.DataType]:
    """The type that a column is stored as, and those of what is nested in it, in the order of Arrow's headers."""
    while isinstance(kind, pa.BaseExtensionType):
        kind = kind.storage_type
    yield kind
    for k in range(kind.num_fields):
        yield from nested_types(kind.field(k).type)


def settle_nulls(
    batch: pa.RecordBatch, columns: Columns, fill: Mapping[str, Any], drop: bool, nulls: dict[str, int]
) -> pa.RecordBatch:
    """Return a plain batch with nulls filled, or their rows dropped; add the numbers of what is left to ``nulls``.

    Nulls inside arrays count too. Null is a value of json, so those columns are never counted.
    """
    for name, value in fill.items():
        k = batch.schema.get_field_index(name)
        if k >= 0 and batch.column(k).null_count:
            column = batch.column(k)
            filling = pa.scalar(value, column.type)
            if "int" in str(column.type) and not np.array_equal(filling.as_py(), value):  # Arrow rounds it
                raise ValueError(f"fill_nulls of column {name!r} must be of its type {column.type}; got {value!r:.60}.")
            batch = batch.set_column(k, name, column.fill_null(filling))
    counted = [name for name, encoding in columns.items() if encoding != "json"]
    for name in counted if drop else ():
        if batch.column(name).null_count:
            batch = batch.filter(batch.column(name).is_valid())
    for name in counted:
        column = batch.column(name)
        label = name
        while column is not None:
            if column.null_count:
                nulls[label] = nulls.get(label, 0) + column.null_count
            column = _elements(column) if _sort(column.type) == "list" else None
            label = f"{name} (elements of arrays)"
    return batch


def writer_columns(batch: pa.RecordBatch, columns: Columns) -> dict[str, Values]:
    """Return a plain batch as values that `MDSWriter.write_batch` takes; loops over rows only where it must."""
    values = {}
    for name, encoding in columns.items():
        try:
            values[name] = _values(batch.column(name), encoding)
        except (ValueError, TypeError, OverflowError) as error:
            raise ValueError(f"column {name!r}: {error}") from error
    return values


def _values(column: pa.Array, encoding: str) -> Values:
    kind = column.type
    sort = _sort(kind)
    if encoding == "json":
        return list(map(_json_value(kind), column.to_pylist()))
    if sort in ("date", "timestamp") and encoding == "str":
        return list(map(_iso, column.to_pylist()))
    if sort == "timestamp":
        column = column.cast(pa.timestamp("us", kind.tz))
    if sort in _COUNTED:
        return arrow_numbers(column.cast(pa.int32() if sort == "date" else pa.int64()))
    if sort == "decimal" and encoding.startswith(("float", "int")):
        return arrow_numbers(column.cast(pa.float64() if encoding.startswith("float") else pa.int64()))
    if sort == "decimal":
        return [value if encoding == "str_decimal" else str(value) for value in column.to_pylist()]
    if sort in ("number", "list"):
        arrays = _nested(column)
        if "float" in encoding:
            _check_exact([arrays] if isinstance(arrays, np.ndarray) else arrays)
        if ":" not in encoding:
            return arrays
        cast = partial(cast_numbers, dtype=np.dtype(encoding.split(":")[1]))
        return cast(arrays) if isinstance(arrays, np.ndarray) else list(map(cast, arrays))
    return column  # the writer takes views of texts and bytes


def _check_exact(arrays: Sequence[NDArray[Any]]) -> None:
    """Raise ValueError for whole numbers, which may be ids, that no float tells from their neighbours."""
    for array in arrays:
        if array.dtype in (np.int64, np.uint64):
            rounded = array.astype(np.float64)
            fits = rounded < np.iinfo(array.dtype).max  # beyond, results of a cast differ between processors
            if not fits.all() or (rounded.astype(array.dtype) != array).any():
                raise ValueError(f"floats would round whole numbers beyond 2**53. Write them as {array.dtype}.")


def _iso(moment: Any) -> str:
    is_zoned = getattr(moment, "tzinfo", None)
    return str((moment.astimezone(UTC) if is_zoned else moment).isoformat())


def _nested(column: pa.Array) -> NDArray[Any] | list[NDArray[Any]]:
    """Numbers, or lists of them, nested or not: one array if all rows have one shape, else one array per row."""
    if _sort(column.type) != "list":
        return arrow_numbers(column.cast(pa.uint8()) if pa.types.is_boolean(column.type) else column)
    inner: Any = _nested(_elements(column))
    size = _list_size(column.type)
    ends = arrow_numbers(column.offsets) if size < 0 else size * np.arange(len(column) + 1)
    lengths = np.diff(ends)
    if isinstance(inner, np.ndarray) and len(lengths) and (lengths == lengths[0]).all():
        return inner.reshape(len(column), int(lengths[0]), *inner.shape[1:])
    shape, element = _shape_of(column.type)
    empty = np.empty((0, *shape[1:]), _NUMBERS.get(str(element)))  # not as its neighbours happen to be
    stack = _stacked if isinstance(inner, list) else np.asarray
    return [stack(inner[begin:end]) if begin < end else empty for begin, end in pairwise((ends - ends[0]).tolist())]


def _elements(column: pa.Array) -> pa.Array:
    """The elements of lists. Arrow's own `flatten` imports its compute functions, which takes 50 ms."""
    if column.null_count or not len(column):
        return column.flatten()
    if (size := _list_size(column.type)) >= 0:
        return column.values.slice(column.offset * size, len(column) * size)
    ends = arrow_numbers(column.offsets)
    return column.values.slice(int(ends[0]), int(ends[-1] - ends[0]))


def _stacked(rows: list[NDArray[Any]]) -> NDArray[Any]:
    shapes = {row.shape for row in rows}
    if len(shapes) > 1:
        raise ValueError(
            f"nested lists of one row must have one shape to be an array; found {sorted(shapes)}. Ask for 'json'."
        )
    return np.stack(rows)


def _object(pairs: list[tuple[Any, Any]]) -> dict[str, Any]:
    """The pairs of a map, keys of parts as JSON; ValueError where a key comes twice, of which JSON keeps one."""
    by_key = {json.dumps(key) if isinstance(key, (dict, list)) else str(key): value for key, value in pairs}
    if len(by_key) < len(pairs):
        raise ValueError(f"a map has a key twice, and json keeps one of them: {[key for key, _ in pairs]!s:.80}")
    return by_key


_JSON_VALUES: dict[str, Callable[[Any], Any]] = {
    "date": _iso,
    "timestamp": _iso,
    "duration": lambda value: value // timedelta(microseconds=1),
    "decimal": str,
    "time": str,
    "binary": lambda value: base64.b64encode(value).decode(),
}


def _json_value(kind: pa.DataType) -> Callable[[Any], Any]:
    """What turns a value of this type into what json knows."""
    sort = _sort(kind)
    if sort == "struct":
        fields = map(kind.field, range(kind.num_fields))
        of_field = {field.name: _json_value(field.type) for field in fields}
        make: Any = lambda value: {name: of_field[name](item) for name, item in value.items()}  # noqa: E731
    elif sort == "map":
        of_key = _json_value(kind.key_type)
        of_item = _json_value(kind.item_type)
        make = lambda value: _object([(of_key(key), of_item(item)) for key, item in value])  # noqa: E731
    elif sort == "list":
        of_element = _json_value(kind.value_type)
        make = lambda value: list(map(of_element, value))  # noqa: E731
    elif (make := _JSON_VALUES.get(sort)) is None:
        return lambda value: value
    return lambda value: None if value is None else make(value)
