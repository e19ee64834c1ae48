"""MDS values as Arrow arrays of Spark's types: what ``spark.read.format("mds")`` returns.

docs/spark.md has the table of types. Nothing is decoded whose type Spark does not have: images, media, tensors and
pickles are the bytes that are stored.
"""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal
from io import BytesIO
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from lightning_stream.errors import FormatError
from lightning_stream.formats.encodings import get_encoding

Decoder = Callable[[bytes], Any]

_NUMBERS = {
    "int8": pa.int8(), "int16": pa.int16(), "int32": pa.int32(), "int64": pa.int64(), "int": pa.int64(),
    "uint8": pa.int16(), "uint16": pa.int32(), "uint32": pa.int64(), "uint64": pa.decimal128(20, 0),
    "float16": pa.float32(), "float32": pa.float32(), "float64": pa.float64(), "float": pa.float64(),
}  # fmt: skip
_OTHERS = {
    "str": pa.string(), "str_int": pa.decimal128(38, 0), "str_float": pa.float64(), "str_decimal": pa.string(),
    "json": pa.string(),
}  # fmt: skip
_TEXTS = ("str_decimal", "json")  # read as they are stored
_PNG_MODES = ("1", "L", "LA", "P", "RGB", "RGBA", "I;16")


def arrow_type_of(encoding: str, first: Callable[[], Any]) -> pa.DataType:
    """Return the type that values of an encoding are read as.

    Args:
        encoding: Its name.
        first: Returns the first value of the column, for arrays whose encoding does not say their dimensions.
    """
    base, *given = encoding.split(":")
    if base == "ndarray":
        if len(given) == 2:
            return _nested_type(_NUMBERS[given[0]], given[1].count(",") + 1)
        array = first()
        return _nested_type(_NUMBERS[array.dtype.name], array.ndim)
    if _is_list(base):
        return pa.list_(pa.binary())
    return _NUMBERS.get(base) or _OTHERS.get(base) or pa.binary()


def decoder_of(encoding: str) -> Decoder | None:
    """Return what decodes an encoding that has no type of Spark; None for one that has."""
    if encoding.startswith("ndarray") or encoding in _NUMBERS or encoding in ("str", "str_int", "str_float"):
        return None
    if encoding in _TEXTS:
        return _text
    if _is_list(encoding):
        return _stored_pixels if encoding == "list[pil]" else get_encoding(encoding).stored  # type: ignore[attr-defined]
    return _as_file if encoding == "pil" else bytes


def _is_list(encoding: str) -> bool:
    return encoding.startswith("list[") or encoding in ("jpeg_array", "jpegarray")


def _text(data: bytes) -> str:
    return str(data, "utf-8")


def _stored_pixels(data: bytes) -> list[bytes]:
    return [_as_file(bytes(image)) for image in get_encoding("list[pil]").stored(data)]  # type: ignore[attr-defined]


def _as_file(data: bytes) -> bytes:
    """Raw pixels as an image file, which other programs can open: PNG, and TIFF for the modes that PNG lacks."""
    image, out = get_encoding("pil").decode(data), BytesIO()
    image.save(out, "PNG" if image.mode in _PNG_MODES else "TIFF", compress_level=1)
    return out.getvalue()


def arrow_array(name: str, encoding: str, values: Any, target: pa.DataType) -> pa.Array:
    """Return a column of a batch as an Arrow array of the type that is wanted.

    Raises:
        FormatError: A value does not fit the type.
    """
    try:
        array = _natural(encoding, values)
        return array if array.type.equals(target) else array.cast(target)
    except (ValueError, TypeError, ArithmeticError, NotImplementedError) as error:  # pyarrow's errors are among them
        why = str(error).rstrip(".")
        raise FormatError(
            f"column {name!r}, stored as {encoding!r}, cannot be read as {target!s:.60}: {why:.200}. "
            "Read it as its own type, without a schema, and convert it in the query."
        ) from error


def _natural(encoding: str, values: Any) -> pa.Array:
    if encoding.startswith("ndarray"):
        return _nested(values)
    if isinstance(values, np.ndarray):
        return _numbers(values)
    if encoding == "json":
        return pa.array([None if value.strip() == "null" else value for value in values], pa.string())
    if encoding == "str_int":
        values = list(map(Decimal, values))
    if _is_list(encoding):
        return pa.array([list(map(bytes, images)) for images in values], pa.list_(pa.binary()))
    return pa.array(values, _OTHERS.get(encoding) or pa.binary())


def _numbers(values: NDArray[Any]) -> pa.Array:
    wanted = _NUMBERS[values.dtype.name]
    if values.dtype.name == "uint64":
        return pa.array(list(map(Decimal, values.tolist())), wanted)
    if values.dtype.name == "float16":
        values = values.astype(np.float32)
    array = pa.array(np.ascontiguousarray(values).astype(values.dtype.newbyteorder("="), copy=False))
    return array.cast(wanted)


def _nested(arrays: Any) -> pa.Array:
    """Arrays of any shapes, but of one number of dimensions, as lists of lists."""
    dims = {array.ndim for array in arrays}
    if len(dims) > 1:
        raise ValueError(f"its arrays have {sorted(dims)} dimensions, and a type of Spark has one number of them.")
    shapes = np.array([array.shape for array in arrays], np.int64)
    result = _numbers(np.concatenate([array.reshape(-1) for array in arrays]))
    for level in reversed(range(shapes.shape[1])):
        counts = np.repeat(shapes[:, level], shapes[:, :level].prod(axis=1))
        result = pa.ListArray.from_arrays(np.concatenate([[0], np.cumsum(counts)]).astype(np.int32), result)
    return result


def _nested_type(element: pa.DataType, dims: int) -> pa.DataType:
    for _ in range(dims):
        element = pa.list_(element)
    return element
