"""An Arrow batch as the columns that a writer takes, without a loop over rows where memory allows."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute
from numpy.typing import NDArray

from lightning_stream.convert.arrow_schema import is_list, plain_type
from lightning_stream.writer.batch import arrow_numbers

Values: TypeAlias = "NDArray[Any] | Sequence[Any] | pa.Array"

_EPOCH_UNIT = {"time": pa.timestamp("us"), "span": pa.duration("us")}
_CHANNELS = {1: "L", 3: "RGB", 4: "RGBA"}


def count_nulls(batch: pa.RecordBatch, columns: Mapping[str, str]) -> dict[str, int]:
    """Return the numbers of nulls by column, with those of elements of arrays, for the columns that have any.

    Null is a value of json, so those columns are never here.
    """
    counts: dict[str, int] = {}
    for name, encoding in columns.items():
        column = batch.column(name)
        if encoding == "json":
            continue
        if column.null_count:
            counts[name] = column.null_count
        while is_list(column.type):
            column = column.flatten()
            if column.null_count:
                label = f"{name} (elements of arrays)"
                counts[label] = counts.get(label, 0) + column.null_count
    return counts


def writer_columns(batch: pa.RecordBatch, columns: Mapping[str, str]) -> dict[str, Any]:
    """The values of every column, as `MDSWriter.write_batch` takes them."""
    return {name: _named_values(batch, name, encoding) for name, encoding in columns.items()}


def _named_values(batch: pa.RecordBatch, name: str, encoding: str) -> Values:
    try:
        return _values(batch.column(name), encoding)
    except (ValueError, TypeError, pa.ArrowInvalid) as error:
        raise ValueError(f"column {name!r}: {error}") from error


def _values(column: pa.Array, encoding: str) -> Values:
    column = _plain(column)
    kind = column.type
    if encoding == "json":
        return list(map(_json_value(kind), column.to_pylist()))
    if pa.types.is_boolean(kind):
        return arrow_numbers(column.cast(pa.uint8()))
    if pa.types.is_date(kind):
        return (
            column.cast(pa.string()) if encoding == "str" else arrow_numbers(column.cast(pa.date32()).cast(pa.int32()))
        )
    if pa.types.is_timestamp(kind):
        return _times(column, encoding)
    if pa.types.is_duration(kind):
        return arrow_numbers(column.cast(_EPOCH_UNIT["span"]).cast(pa.int64()))
    if pa.types.is_time(kind):
        return arrow_numbers(column.cast(pa.time64("us")).cast(pa.int64()))
    if pa.types.is_decimal(kind):
        return _decimals(column, encoding)
    if is_list(kind):
        return _arrays(column, encoding)
    if pa.types.is_struct(kind):
        return list(_images(column, encoding))
    if pa.types.is_integer(kind) or pa.types.is_floating(kind):
        return arrow_numbers(column)
    return column  # text and binary: the writer takes views of Arrow's own memory


def _plain(column: pa.Array) -> pa.Array:
    """The values of a dictionary or an extension as themselves, and views as what all readers know."""
    if isinstance(column, pa.ExtensionArray):
        return _plain(column.storage)
    if pa.types.is_dictionary(column.type):
        return _plain(column.dictionary_decode())
    known = {"string_view": pa.large_string(), "binary_view": pa.large_binary()}.get(str(column.type))
    if known is None and pa.types.is_fixed_size_binary(column.type):
        known = pa.binary()
    return column if known is None else column.cast(known)


def _arrays(column: pa.Array, encoding: str) -> NDArray[Any] | list[NDArray[Any]]:
    """Lists of numbers, in the dtype that was asked for if all values fit it."""
    arrays = nested_arrays(column)
    wanted = np.dtype(encoding.split(":")[1]) if ":" in encoding else None
    if isinstance(arrays, np.ndarray):
        return arrays if wanted in (None, arrays.dtype) else _cast(arrays, wanted)
    return [array if wanted in (None, array.dtype) else _cast(array, wanted) for array in arrays]


def _cast(array: NDArray[Any], wanted: Any) -> NDArray[Any]:
    with np.errstate(invalid="ignore", over="ignore"):
        cast: NDArray[Any] = array.astype(wanted)
    if cast.dtype.kind != "f" and not np.array_equal(cast, array):
        raise ValueError(f"values of {array.dtype} do not fit {wanted}.")
    return cast


def _times(column: pa.Array, encoding: str) -> Values:
    if encoding != "str":
        return arrow_numbers(column.cast(pa.timestamp("us", column.type.tz)).cast(pa.int64()))
    return [value.isoformat() for value in map(_in_utc, column.to_pylist())]


def _in_utc(moment: Any) -> Any:
    from datetime import timezone

    return moment if moment.tzinfo is None else moment.astimezone(timezone.utc)


def _decimals(column: pa.Array, encoding: str) -> Values:
    if encoding.startswith("float"):
        return arrow_numbers(column.cast(pa.float64()))
    if encoding.startswith("int"):
        return arrow_numbers(column.cast(pa.int64()))
    values: list[Any] = column.to_pylist()
    return values if encoding == "str_decimal" else list(map(str, values))


def nested_arrays(column: pa.Array) -> NDArray[Any] | list[NDArray[Any]]:
    """Lists of numbers, nested or not, as one array if all rows have one shape, else as one array per row."""
    if pa.types.is_fixed_size_list(column.type):
        flat = nested_arrays(column.flatten())
        size = column.type.list_size
        if isinstance(flat, np.ndarray):
            return flat.reshape(len(column), size, *flat.shape[1:])
        return [_stacked(flat[k : k + size]) for k in range(0, len(flat), size)]
    if not is_list(column.type):
        return arrow_numbers(column.cast(pa.uint8()) if pa.types.is_boolean(column.type) else column)
    ends = arrow_numbers(column.offsets)
    ends = ends - ends[0]
    inner = nested_arrays(column.flatten())
    lengths = np.diff(ends)
    if isinstance(inner, np.ndarray):
        if len(lengths) and (lengths == lengths[0]).all():
            return inner.reshape(len(lengths), int(lengths[0]), *inner.shape[1:])
        return [inner[begin:end] for begin, end in pairwise(ends.tolist())]
    return [_stacked(inner[begin:end]) for begin, end in pairwise(ends.tolist())]


def _stacked(rows: list[NDArray[Any]]) -> NDArray[Any]:
    shapes = {row.shape for row in rows}
    if len(shapes) > 1:
        raise ValueError(
            f"nested lists of one row must have one shape to be an array; found {sorted(shapes)}. Ask for 'json'."
        )
    return np.stack(rows) if rows else np.empty((0,))


def _images(column: pa.Array, encoding: str) -> Iterator[Any]:
    """Rows of Spark's image source, whose pixels are blue, green, red, as the bytes of a ``pil`` value or as images."""
    for row in column.to_pylist():
        height, width, channels = row["height"], row["width"], row["nChannels"]
        if channels not in _CHANNELS or height < 1 or width < 1:
            raise ValueError(f"{row['origin']} is no image that could be read. Read with option dropInvalid=true.")
        pixels = np.frombuffer(row["data"], np.uint8).reshape(height, width, channels)
        if channels > 1:
            pixels = pixels[..., [2, 1, 0, 3][:channels]]
        yield _pil_bytes(pixels) if encoding == "pil" else _pil_image(pixels, encoding)


def _pil_bytes(pixels: NDArray[np.uint8]) -> bytes:
    mode = _CHANNELS[pixels.shape[2]].encode()
    head = np.array([pixels.shape[1], pixels.shape[0], len(mode)], "<u4").tobytes()
    return head + mode + pixels.tobytes()


def _pil_image(pixels: NDArray[np.uint8], encoding: str) -> Any:
    from PIL import Image

    image = Image.fromarray(np.ascontiguousarray(pixels.squeeze(2) if pixels.shape[2] == 1 else pixels))
    return image.convert("RGB") if encoding == "jpeg" and image.mode == "RGBA" else image


def _json_value(kind: pa.DataType) -> Callable[[Any], Any]:
    """What turns a value of this type into what json knows."""
    kind = plain_type(kind)
    if pa.types.is_struct(kind):
        inner = {kind.field(k).name: _json_value(kind.field(k).type) for k in range(kind.num_fields)}
        return _unless_none(lambda value: {name: inner[name](value[name]) for name in value})
    if pa.types.is_map(kind):
        key, item = _json_key(kind.key_type), _json_value(kind.item_type)
        return _unless_none(lambda value: {key(k): item(v) for k, v in value})
    if is_list(kind):
        element = _json_value(kind.value_type)
        return _unless_none(lambda value: [element(each) for each in value])
    if pa.types.is_date(kind):
        return _unless_none(lambda value: value.isoformat())
    if pa.types.is_timestamp(kind):
        return _unless_none(lambda value: _in_utc(value).isoformat())
    if pa.types.is_duration(kind):
        return _unless_none(lambda value: round(value.total_seconds() * 1e6))
    if pa.types.is_decimal(kind) or pa.types.is_time(kind):
        return _unless_none(str)
    if "binary" in str(kind):
        return _unless_none(lambda value: base64.b64encode(value).decode())
    return lambda value: value


def _json_key(kind: pa.DataType) -> Callable[[Any], str]:
    value = _json_value(kind)
    return lambda key: found if isinstance(found := value(key), str) else str(found)


def _unless_none(convert: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda value: None if value is None else convert(value)


def fill_nulls(batch: pa.RecordBatch, values: Mapping[str, Any]) -> pa.RecordBatch:
    """Return the batch with these values instead of nulls, by column."""
    for name, value in values.items():
        k = batch.schema.get_field_index(name)
        if k >= 0 and batch.column(k).null_count:
            column = _plain(batch.column(k))
            batch = batch.set_column(k, name, column.fill_null(pa.scalar(value, column.type)))
    return batch


def drop_nulls(batch: pa.RecordBatch, columns: Mapping[str, str]) -> pa.RecordBatch:
    """Return the rows that have a value in every one of these columns that is not json."""
    keep = None
    for name, encoding in columns.items():
        if encoding != "json" and batch.column(name).null_count:
            valid = batch.column(name).is_valid()
            keep = valid if keep is None else pa.compute.and_(keep, valid)
    return batch if keep is None else batch.filter(keep)
