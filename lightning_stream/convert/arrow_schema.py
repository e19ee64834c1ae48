"""The MDS encoding of each Arrow type: what is inferred, and what may be asked for.

==========================================  =====================  =================================================
Arrow                                       MDS                    read back as
==========================================  =====================  =================================================
int8 ... int64, uint8 ... uint64            the same               the number
halffloat float double                      float16 float32        the number
                                            float64
bool                                        uint8                  0 or 1
decimal                                     str_decimal            Decimal
string, dictionary of strings               str                    str
binary                                      bytes                  bytes, untouched; ask for ``jpeg`` or ``png`` to
                                                                   read pictures
date                                        int32                  days since 1970-01-01
timestamp                                   int64                  microseconds since 1970-01-01 (UTC, if it has a
                                                                   zone)
duration, time                              int64                  microseconds
list of numbers or booleans, also nested    ndarray:<dtype>        array; rows may differ in shape
fixed-size list of them, also nested        ndarray:<dtype>:<n>    array of that shape
struct, map, other lists                    json                   dict, list; dates as ISO text, decimals as text,
                                                                   binary as base64; null stays None
==========================================  =====================  =================================================

Of a date or timestamp, ``str`` (ISO) may be asked for instead. Null is an error in every column but json, unless nulls
are filled or dropped.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pyarrow as pa

from lightning_stream.formats.encodings import get_encoding


def is_number(kind: pa.DataType) -> bool:
    """Whether numpy has it: whole numbers, floats, truth values."""
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind))


def is_text(kind: pa.DataType) -> bool:
    """Whether it is text of any Arrow type."""
    return str(kind) in ("string", "large_string", "string_view")


def is_list(kind: pa.DataType) -> bool:
    """Whether it is a list of any Arrow type."""
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def plain_type(kind: pa.DataType) -> pa.DataType:
    """The type of the values: of a dictionary, those it holds; of an extension, those it stores."""
    if isinstance(kind, pa.BaseExtensionType):
        return plain_type(kind.storage_type)
    return plain_type(kind.value_type) if pa.types.is_dictionary(kind) else kind


_NUMERIC = ("int", "uint", "float", "str_")
# What may be asked for instead of the inferred encoding: beginnings of names.
_ALLOWED: tuple[tuple[Any, tuple[str, ...]], ...] = (
    (lambda kind: is_number(kind) or pa.types.is_duration(kind) or pa.types.is_time(kind), _NUMERIC),
    (pa.types.is_temporal, (*_NUMERIC, "str")),
    (is_text, ("str", "bytes", "json")),
    (pa.types.is_decimal, ("str_decimal", "str", "float", "int")),
    (is_list, ("ndarray", "json")),
    (lambda kind: pa.types.is_struct(kind) or pa.types.is_map(kind), ("json",)),
)


def arrow_columns(schema: pa.Schema, asked: Mapping[str, str] | None = None) -> dict[str, str]:
    """The encoding of every column that is written."""
    names = list(schema.names)
    problems = [f"two columns are named {name!r}." for name in sorted({n for n in names if names.count(n) > 1})]
    columns: dict[str, str] = {}
    for name in names if asked is None else asked:
        if name not in names:
            problems.append(f"{name!r} is not a column; the columns are {', '.join(names)}.")
            continue
        try:
            columns[name] = _chosen(plain_type(schema.field(name).type), None if asked is None else asked[name])
        except (ValueError, TypeError, KeyError) as error:
            problems.append(f"column {name!r}: {error}.")
    if problems or not columns:
        raise ValueError("the columns cannot be written: " + " ".join(problems or ["there are none."]))
    return columns


def _chosen(kind: pa.DataType, asked: str | None) -> str:
    if asked is not None:
        get_encoding(asked)
        allowed = next((names for fits, names in _ALLOWED if fits(kind)), None)
        if allowed is not None and not asked.startswith(allowed):
            raise ValueError(
                f"Arrow's {kind!s:.60} is not written as {asked!r}. Cast the column, or ask for one of "
                f"{', '.join(f'{name}...' for name in allowed)}"
            )
        return asked
    return _inferred(kind)


def _inferred(kind: pa.DataType) -> str:
    if is_number(kind):
        return _number(kind)
    if is_text(kind):
        return "str"
    if is_list(kind):
        element, shape = kind, []
        while is_list(element):
            shape.append(element.list_size if pa.types.is_fixed_size_list(element) else 0)
            element = element.value_type
        if is_number(element):
            fixed = all(size > 0 for size in shape)
            return f"ndarray:{_number(element)}" + (":" + ",".join(map(str, shape)) if fixed else "")
    found = _OTHERS.get(type(kind).__name__)
    if found is not None:
        return found
    if pa.types.is_date(kind):
        return "int32"
    if pa.types.is_temporal(kind):
        return "int64"
    if str(kind) in ("binary", "large_binary", "binary_view") or pa.types.is_fixed_size_binary(kind):
        return "bytes"
    _check_json(kind)
    return "json"


_OTHERS = dict.fromkeys(("Decimal32Type", "Decimal64Type", "Decimal128Type", "Decimal256Type"), "str_decimal")


def _number(kind: pa.DataType) -> str:
    if pa.types.is_boolean(kind):
        return "uint8"
    return {"halffloat": "float16", "float": "float32", "double": "float64"}.get(str(kind), str(kind))


def _check_json(kind: pa.DataType) -> None:
    """Raise ValueError unless values of this type can be written as json."""
    kind = plain_type(kind)
    if pa.types.is_struct(kind):
        for k in range(kind.num_fields):
            _check_json(kind.field(k).type)
    elif pa.types.is_map(kind):
        _check_json(kind.key_type)
        _check_json(kind.item_type)
    elif is_list(kind):
        _check_json(kind.value_type)
    elif pa.types.is_null(kind):
        raise ValueError("all its values are null. Omit it by columns=")
    elif pa.types.is_nested(kind):
        raise ValueError(f"there is no encoding for Arrow's type {kind!s:.60}. Cast it, or omit it by columns=")
