"""The Arrow type and the MDS encoding of each Spark type.

Tasks get their rows as Arrow batches, so the encodings are those of `lightning_stream.sources.arrow`. Spark has
two types more: an ML vector is written as ``ndarray:float64``, and a row of the image source as ``pil`` (or ``png``,
``jpeg``, if asked for). docs/spark.md has the table.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import pyarrow as pa

from lightning_stream.sources.arrow import arrow_columns

_ARROW = {
    "ByteType": pa.int8(), "ShortType": pa.int16(), "IntegerType": pa.int32(), "LongType": pa.int64(),
    "FloatType": pa.float32(), "DoubleType": pa.float64(), "BooleanType": pa.bool_(), "DecimalType": pa.decimal128(38),
    "StringType": pa.string(), "CharType": pa.string(), "VarcharType": pa.string(), "BinaryType": pa.binary(),
    "DateType": pa.date32(), "TimestampType": pa.timestamp("us", "UTC"), "TimestampNTZType": pa.timestamp("us"),
    "DayTimeIntervalType": pa.duration("us"),
}  # fmt: skip
_IMAGE_FIELDS = ["origin", "height", "width", "nChannels", "mode", "data"]
_IMAGE_ENCODINGS = ("pil", "png", "jpeg")


def mds_columns(schema: Any, asked: Mapping[str, str]) -> dict[str, str]:
    """Choose the encoding of every column that is written.

    Args:
        schema: A DataFrame's schema.
        asked: Encodings by column name: only these columns are then written. Empty for all, inferred.

    Raises:
        ValueError: No such column, an encoding that does not fit its type, or a type without an encoding.
    """
    types = [(field.name, _column_type(field.dataType)) for field in schema.fields]
    unknown = [
        f"column {field.name!r}: there is no encoding for Spark's type {field.dataType.simpleString():.60}."
        for field, (name, kind) in zip(schema.fields, types, strict=True)
        if kind is None and (not asked or name in asked)
    ]
    if unknown:
        raise ValueError(f"{' '.join(unknown)} Cast it, e.g. to string, or omit it by columns= in mds_kwargs.")
    arrow = pa.schema([(name, pa.null() if kind is None else kind) for name, kind in types])
    columns = arrow_columns(arrow, asked or None)
    images = [field.name for field in schema.fields if is_image(field.dataType) and field.name in columns]
    if not asked:
        return columns | dict.fromkeys(images, "pil")
    for name in images:
        if columns[name] not in _IMAGE_ENCODINGS:
            raise ValueError(f"column {name!r} holds images; ask for pil, png or jpeg, not {columns[name]!r}.")
    return columns


def _column_type(spark_type: Any) -> pa.DataType | None:
    """Return the type that a column of this one is written as; None if it cannot be written."""
    if kind_of(spark_type) == "VectorUDT":
        return pa.list_(pa.float64())
    if is_image(spark_type):
        return pa.binary()
    with suppress(KeyError):
        return _arrow_type(spark_type)
    return None


def _arrow_type(spark_type: Any) -> pa.DataType:
    """Return the type that Spark hands over for this one; KeyError for a type that cannot be written."""
    kind = kind_of(spark_type)
    if kind == "ArrayType":
        return pa.list_(_arrow_type(spark_type.elementType))
    if kind == "MapType":
        return pa.map_(_arrow_type(spark_type.keyType), _arrow_type(spark_type.valueType))
    if kind == "StructType":
        return pa.struct([(field.name, _arrow_type(field.dataType)) for field in spark_type.fields])
    return _ARROW[kind]


def is_image(spark_type: Any) -> bool:
    """Whether it is the struct of Spark's image source."""
    return kind_of(spark_type) == "StructType" and spark_type.names == _IMAGE_FIELDS


def kind_of(spark_type: Any) -> str:
    """The name of a Spark type, without an import of pyspark."""
    return type(spark_type).__name__
