"""The MDS encoding of each Spark type: the inferred one, and those that may be asked for.

==========================================  =====================  =================================================
Spark                                       MDS                    read back as
==========================================  =====================  =================================================
tinyint smallint int bigint                 int8 int16 int32       the signed number
                                            int64
float double                                float32 float64        the number
boolean                                     uint8                  0 or 1
decimal                                     str_decimal            Decimal
string char varchar                         str                    str
binary (also of the binaryFile source)      bytes                  bytes, untouched; ask for ``jpeg`` or ``png`` to
                                                                   read pictures
date                                        int32                  days since 1970-01-01
timestamp                                   int64                  microseconds since 1970-01-01 UTC
timestamp_ntz                               int64                  the same, of the time as written
interval day to second                      int64                  microseconds
array of numbers or booleans, also nested   ndarray:<dtype>        array; rows may differ in shape, none may be empty
Spark ML vector                             ndarray:float64        array, dense
the image source's struct                   pil                    PIL image, RGB
struct, map, other arrays                   json                   dict, list; dates as ISO text, decimals as text,
                                                                   binary as base64; null stays None
==========================================  =====================  =================================================

Of a date or timestamp, ``str`` (ISO) may be asked for instead. Null is an error in every column but json.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning_stream.formats.encodings import get_encoding

_NUMBERS = {
    "ByteType": "int8",
    "ShortType": "int16",
    "IntegerType": "int32",
    "LongType": "int64",
    "FloatType": "float32",
    "DoubleType": "float64",
    "BooleanType": "uint8",
}
_OTHERS = {
    "DecimalType": "str_decimal",
    "StringType": "str",
    "CharType": "str",
    "VarcharType": "str",
    "BinaryType": "bytes",
    "DateType": "int32",
    "TimestampType": "int64",
    "TimestampNTZType": "int64",
    "DayTimeIntervalType": "int64",
    "VectorUDT": "ndarray:float64",
}
_NUMERIC = ("int", "uint", "float", "str_")
# What may be asked for instead of the inferred encoding: beginnings of names, by the inferred one's.
_ALLOWED = {
    "number": _NUMERIC,
    "time": (*_NUMERIC, "str"),
    "StringType": ("str", "bytes", "json"),
    "DecimalType": ("str_decimal", "str", "float", "int"),
    "ArrayType": ("ndarray", "json"),
    "VectorUDT": ("ndarray", "json"),
    "image": ("pil", "png", "jpeg"),
    "json": ("json",),
}
_IMAGE_FIELDS = ("origin", "height", "width", "nChannels", "mode", "data")


def mds_columns(schema: Any, asked: Mapping[str, str] | None = None) -> dict[str, str]:
    """The encoding of every column that is written.

    Args:
        schema: A DataFrame's schema.
        asked: Encodings by column name: only these columns are then written. None for all, inferred.

    Raises:
        ValueError: No such column, an encoding that does not fit its type, or a type that none fits; all of them
            together.
    """
    fields: dict[str, Any] = {}
    problems = [f"two columns are named {name!r}." for name in _doubled(schema.names)]
    for field in schema.fields:
        fields[field.name] = field.dataType
    columns: dict[str, str] = {}
    for name in fields if asked is None else asked:
        if name not in fields:
            problems.append(f"{name!r} is no column; the DataFrame has {', '.join(fields)}.")
            continue
        try:
            columns[name] = _chosen(fields[name], None if asked is None else asked[name])
        except (ValueError, TypeError) as error:
            problems.append(f"column {name!r}: {error}")
    if problems or not columns:
        raise ValueError("the DataFrame's columns cannot be written: " + " ".join(problems or ["there are none."]))
    return columns


def vector_columns(schema: Any, columns: Mapping[str, str]) -> tuple[str, ...]:
    """The columns of Spark ML vectors, which Spark turns into arrays first."""
    return tuple(
        field.name for field in schema.fields if field.name in columns and _kind(field.dataType) == "VectorUDT"
    )


def holds_files(schema: Any, columns: Mapping[str, str]) -> bool:
    """Whether a row may be large: binary values or images."""
    return any(
        field.name in columns and (_kind(field.dataType) == "BinaryType" or _is_image(field.dataType))
        for field in schema.fields
    )


def _doubled(names: list[str]) -> list[str]:
    return sorted({name for name in names if names.count(name) > 1})


def _chosen(spark_type: Any, asked: str | None) -> str:
    inferred = _inferred(spark_type)
    if asked is None or asked == inferred:
        return inferred
    get_encoding(asked)
    allowed = _ALLOWED.get(_family(spark_type))
    if allowed is not None and not asked.startswith(allowed):
        raise ValueError(
            f"Spark's {spark_type.simpleString():.60} is written as {inferred!r}, not as {asked!r}. Cast the column, "
            f"or ask for one of {', '.join(f'{name}...' for name in allowed)}"
        )
    return asked


def _family(spark_type: Any) -> str:
    kind = _kind(spark_type)
    if kind in _NUMBERS:
        return "number"
    if kind in ("DateType", "TimestampType", "TimestampNTZType", "DayTimeIntervalType"):
        return "time"
    if kind in ("CharType", "VarcharType"):
        return "StringType"
    if _is_image(spark_type):
        return "image"
    return "json" if kind in ("StructType", "MapType") else kind


def _inferred(spark_type: Any) -> str:
    kind = _kind(spark_type)
    if kind in _NUMBERS or kind in _OTHERS:
        return _NUMBERS.get(kind) or _OTHERS[kind]
    if _is_image(spark_type):
        return "pil"
    if kind == "ArrayType":
        element = spark_type.elementType
        while _kind(element) == "ArrayType":
            element = element.elementType
        if _kind(element) in _NUMBERS:
            return f"ndarray:{_NUMBERS[_kind(element)]}"
    _check_json(spark_type)
    return "json"


def _check_json(spark_type: Any) -> None:
    """Raise ValueError unless values of this type can be written as json."""
    kind = _kind(spark_type)
    if kind == "StructType":
        for field in spark_type.fields:
            _check_json(field.dataType)
    elif kind == "ArrayType":
        _check_json(spark_type.elementType)
    elif kind == "MapType":
        _check_json(spark_type.keyType)
        _check_json(spark_type.valueType)
    elif kind not in _NUMBERS and (kind not in _OTHERS or kind == "VectorUDT"):
        raise ValueError(
            f"there is no encoding for Spark's type {spark_type.simpleString():.60}. Cast it, e.g. to string, or "
            "omit it by columns= in mds_kwargs"
        )


def _is_image(spark_type: Any) -> bool:
    return _kind(spark_type) == "StructType" and tuple(spark_type.names) == _IMAGE_FIELDS


def _kind(spark_type: Any) -> str:
    return type(spark_type).__name__
