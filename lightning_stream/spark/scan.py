"""``spark.read.format("mds")``: the samples of a dataset as Arrow batches, each shard read by one task.

The driver chooses a version once, and each task gets the index entries of its shards. So a query reads one version,
whatever is appended or deleted meanwhile.

docs/spark.md has the table of types. Nothing is decoded whose type Spark does not have: images, media, tensors and
pickles are the bytes that are stored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from decimal import Decimal
from functools import partial
from inspect import signature
from io import BytesIO
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyspark.sql.datasource import DataSourceReader, InputPartition
from pyspark.sql.pandas.types import from_arrow_type, to_arrow_schema
from pyspark.sql.types import StructField, StructType

from lightning_stream.cache import ShardCache
from lightning_stream.convert.mds import temporary_reader
from lightning_stream.errors import FormatError
from lightning_stream.formats.encodings import get_encoding
from lightning_stream.formats.index import Index
from lightning_stream.reading.reader import SampleReader
from lightning_stream.reading.shard_table import ReaderConfig, deleted_samples
from lightning_stream.reading.stream import CacheDefaults, Stream, cache_of, index_of
from lightning_stream.sources.tables import fitting_rows

_BATCH_ROWS = 4096
_BATCH_BYTES = 1 << 24  # of samples, decompressed
Rows = NDArray[np.int64]
Decoder = Callable[[bytes], Any]

_BY_TYPE = {  # Spark has no numbers without a sign, and no half ones
    pa.int8(): "int8",
    pa.int16(): "int16 uint8",
    pa.int32(): "int32 uint16",
    pa.int64(): "int64 uint32 int",
    pa.decimal128(20, 0): "uint64",
    pa.float32(): "float32 float16",
    pa.float64(): "float64 float",
}
_NUMBERS = {name: kind for kind, names in _BY_TYPE.items() for name in names.split()}
_OTHERS = {
    "str": pa.string(), "str_int": pa.decimal128(38, 0), "str_float": pa.float64(), "str_decimal": pa.string(),
    "json": pa.string(),
}  # fmt: skip
_TEXTS = ("str_decimal", "json")  # read as they are stored
_PNG_MODES = ("1", "L", "LA", "P", "RGB", "RGBA", "I;16")


@dataclass(frozen=True)
class Dataset:
    """One version of a dataset as a query reads it.

    Attributes:
        url: Its folder or URL.
        version: As `Stream` takes it; None for the newest.
        columns: Those to read; None for all.
        partition_bytes: Consecutive shards of about so many bytes, decompressed, are one partition.
        store_options: Options of its store, which may hold credentials.
    """

    url: str
    version: str | int | None
    columns: Sequence[str] | None
    partition_bytes: int
    store_options: Mapping[str, Any] = field(repr=False)

    def open(self) -> tuple[ShardCache, Index]:
        """Read the index."""
        stream = Stream(self.url, version=self.version, options=self.store_options)
        cache = cache_of(stream, CacheDefaults())
        return cache, index_of(stream, cache)

    def schema(self) -> StructType:
        """Return the columns with Spark's types.

        Raises:
            ValueError: There is no such column, a column has two encodings, or there are no shards.
        """
        _, index = self.open()
        encodings = _encodings(index)
        if not encodings:
            raise ValueError(f"{index.where} lists no shards, so it has no columns. Pass .schema('...').")
        if unknown := [name for name in self.columns or () if name not in encodings]:
            raise ValueError(
                f"the option columns must name columns of the dataset, which has {', '.join(encodings)}; found "
                f"{', '.join(unknown)}."
            )
        fields = []
        for name in self.columns or encodings:
            kind = arrow_type_of(encodings[name], partial(self._first, index, name))
            # Null is a value of json, and some shards may lack the column.
            has_nulls = any(columns.get(name, "json") == "json" for columns in index.column_sets)
            fields.append(StructField(name, from_arrow_type(kind), has_nulls))
        return StructType(fields)

    def _first(self, index: Index, name: str) -> Any:
        """The first value of a column."""
        for shard in np.flatnonzero(index.shard_sizes).tolist():
            part = index.part(shard, shard + 1)
            if name in part.columns:
                with self.opened(part, [name]) as reader:
                    return reader.batch(np.zeros(1, np.int64))[name][0]
        raise ValueError(f"{index.where} has no sample that shows the dimensions of {name!r}. Pass .schema('...').")

    def opened(self, index: Index, names: Sequence[str]) -> AbstractContextManager[SampleReader]:
        """A reader of some columns of a shard; it decodes no value whose type Spark does not have."""
        decoders = {name: decoder for name in names if (decoder := decoder_of(index.columns[name])) is not None}
        config = ReaderConfig(decoders=decoders)
        return temporary_reader(self.url, self.store_options, index=index.choose(names), config=config)


def _encodings(index: Index) -> dict[str, str]:
    """The encoding of every column of any shard."""
    encodings: dict[str, str] = {}
    for columns in index.column_sets:
        for name, encoding in columns.items():
            if encodings.setdefault(name, encoding) != encoding:
                raise ValueError(
                    f"a column must have one encoding to have one type of Spark; {index.where} has {name!r} as "
                    f"{encodings[name]!r} and as {encoding!r}. Read the other columns by the option columns."
                )
    return encodings


@dataclass(frozen=True, repr=False)
class ShardSpan(InputPartition):  # type: ignore[misc,unused-ignore]
    """Some shards of a dataset, for one task.

    Attributes:
        index: That of these shards alone.
        deleted: The samples of these shards that are deleted: int64[n].
    """

    index: Index
    deleted: Rows

    def __repr__(self) -> str:
        return f"ShardSpan({len(self.index)} shards)"


class MDSReader(DataSourceReader):  # type: ignore[misc,unused-ignore]
    """Reads a dataset for one query. It is pickled to the tasks.

    Args:
        dataset: The dataset.
        schema: The columns that the query's table has, with their types.
    """

    def __init__(self, dataset: Dataset, schema: StructType) -> None:
        self._dataset = dataset
        has_zone = "timezone" in signature(to_arrow_schema).parameters
        self._arrow = to_arrow_schema(schema, **({"timezone": "UTC"} if has_zone else {}))

    def partitions(self) -> list[ShardSpan]:
        cache, index = self._dataset.open()
        names = {name for columns in index.column_sets for name in columns}
        if index.schemas and (unknown := [name for name in self._arrow.names if name not in names]):
            raise ValueError(
                f"the schema must have columns of the dataset; {index.where} has {', '.join(sorted(names))}; found "
                f"{', '.join(unknown)}. If the dataset was replaced, load it again."
            )
        deleted = deleted_samples(cache, index)
        ends = np.cumsum(index.shard_sizes)
        spans = []
        for first, last in index.cut(self._dataset.partition_bytes):
            begin = ends[first] - index.shard_sizes[first]
            end = ends[last - 1]
            gone = deleted[(deleted >= begin) & (deleted < end)] - begin
            spans.append(ShardSpan(index.part(first, last), gone))
        return spans

    def read(self, partition: InputPartition) -> Iterator[Any]:
        if not isinstance(partition, ShardSpan):  # Spark's own, for a dataset without shards
            return
        begin = 0
        for shard, num_samples in enumerate(partition.index.shard_sizes.tolist()):
            rows = np.setdiff1d(np.arange(num_samples), partition.deleted - begin)
            begin += num_samples
            if len(rows):
                yield from self._batches(partition.index.part(shard, shard + 1), rows)

    def _batches(self, index: Index, rows: Rows) -> Iterator[pa.RecordBatch]:
        """The rows of one shard."""
        encodings = index.columns
        names = [name for name in self._arrow.names if name in encodings]
        step = fitting_rows(index.num_samples, index.entry(0).raw.num_bytes, _BATCH_ROWS, _BATCH_BYTES)
        with self._dataset.opened(index, names) as reader:
            for at in range(0, len(rows), step):
                chosen = rows[at : at + step]
                values = reader.batch(chosen) if names else {}
                columns = [
                    arrow_array(field.name, encodings[field.name], values[field.name], field.type)
                    if field.name in values
                    else pa.nulls(len(chosen), field.type)
                    for field in self._arrow
                ]
                yield pa.RecordBatch.from_arrays(columns, schema=self._arrow)


# MDS values as Arrow arrays of Spark's types


def arrow_type_of(encoding: str, first: Callable[[], Any]) -> pa.DataType:
    """Return the type that values of an encoding are read as.

    Args:
        encoding: Its name.
        first: Returns the first value of the column, for arrays whose encoding does not say their dimensions.
    """
    base, *parameters = encoding.split(":")
    if base == "ndarray":
        if len(parameters) == 2:
            return _nested_type(_NUMBERS[parameters[0]], parameters[1].count(",") + 1)
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
        stored: Decoder = get_encoding(encoding).stored  # type: ignore[attr-defined]
        return (lambda data: list(map(_as_file, stored(data)))) if encoding == "list[pil]" else stored
    return _as_file if encoding == "pil" else bytes


def _is_list(encoding: str) -> bool:
    return encoding.startswith("list[") or encoding in ("jpeg_array", "jpegarray")


def _text(data: bytes) -> str:
    return str(data, "utf-8")


def _as_file(data: bytes) -> bytes:
    """Raw pixels as an image file, which other programs can open: PNG, and TIFF for the modes that PNG lacks."""
    image = get_encoding("pil").decode(bytes(data))
    out = BytesIO()
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
    return pa.array(np.ascontiguousarray(values, wanted.to_pandas_dtype()))


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
