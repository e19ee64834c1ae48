"""``spark.read.format("mds")``: the samples of a dataset as Arrow batches, each shard read by one task.

The driver chooses a version once, and each task gets the index entries of its shards. So a query reads one version,
whatever is appended or deleted meanwhile.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from inspect import signature
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from pyspark.sql.datasource import DataSourceReader, InputPartition
from pyspark.sql.pandas.types import from_arrow_type, to_arrow_schema
from pyspark.sql.types import StructField, StructType

from lightning_stream.cache import ShardCache
from lightning_stream.formats.index import Index, Schema, ShardEntry
from lightning_stream.formats.shard import Shard, open_shard
from lightning_stream.reading.deleted import deleted_samples
from lightning_stream.reading.stream import CacheDefaults, Stream, cache_of, index_of
from lightning_stream.spark.values import arrow_array, arrow_type_of, decoders_of
from lightning_stream.stores import LocalStore, open_store

_BATCH_ROWS = 4096
_BATCH_BYTES = 1 << 24  # of samples, decompressed
Rows = NDArray[np.int64]


@dataclass(frozen=True)
class Dataset:
    """One version of a dataset as a query reads it.

    Attributes:
        url: Its folder or URL.
        version: As `Stream` takes it; None for the newest.
        columns: Those to read; None for all.
        partition_bytes: Consecutive shards of up to so many bytes, decompressed, are one partition.
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
        cache, index = self.open()
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
            kind = arrow_type_of(encodings[name], lambda name=name: self._first(cache, index, name))  # type: ignore[misc]
            fields.append(StructField(name, from_arrow_type(kind), _has_nulls(index.schemas, name)))
        return StructType(fields)

    def _first(self, cache: ShardCache, index: Index, name: str) -> Any:
        """The first value of a column."""
        for shard in range(len(index)):
            if index.shard_sizes[shard] and name in index.schema(shard).names:
                with _opened(cache.store, index.entry(shard)) as opened:
                    return opened.columns(np.zeros(1, np.int64), [name])[name][0]
        raise ValueError(f"{index.where} has no sample that shows the dimensions of {name!r}. Pass .schema('...').")


def _encodings(index: Index) -> dict[str, str]:
    """The encoding of every column of any shard."""
    found: dict[str, str] = {}
    for schema in index.schemas:
        for name, encoding in schema.columns.items():
            if found.setdefault(name, encoding) != encoding:
                raise ValueError(
                    f"a column must have one encoding to have one type of Spark; {index.where} has {name!r} as "
                    f"{found[name]!r} and as {encoding!r}. Read the other columns by the option columns."
                )
    return found


def _has_nulls(schemas: Sequence[Schema], name: str) -> bool:
    """Whether a column may have nulls: null is a value of json, and some shards may lack the column."""
    return any(schema.columns.get(name, "json") == "json" for schema in schemas)


@contextlib.contextmanager
def _opened(store: Any, entry: ShardEntry) -> Iterator[Shard]:
    """An open shard: in place if it is a local file, else in a temporary folder."""
    is_packed = any(packed is not None for _, packed in entry.files)
    is_here = isinstance(store, LocalStore) and not is_packed
    with TemporaryDirectory(prefix="mds-") as folder:
        cache = ShardCache(store, None if is_here else folder)
        with cache.lease(entry) as lease:
            decoders = decoders_of(entry.schema.columns) if entry.format == "mds" else None
            shard = open_shard(entry, lease.folder, decoders=decoders)
            try:
                yield shard
            finally:
                shard.close()


@dataclass(frozen=True, repr=False)
class ShardSpan(InputPartition):  # type: ignore[misc,unused-ignore]
    """Some shards of a dataset, for one task.

    Attributes:
        index: The index of these shards alone.
        deleted: The samples of these shards that are deleted: int64[n].
    """

    index: bytes
    deleted: Rows

    def __repr__(self) -> str:
        return f"ShardSpan({len(self.index)} bytes of an index)"


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
        self._filters: list[Any] = []

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_opened"}

    @cached_property
    def _opened(self) -> tuple[ShardCache, Index]:
        cache, index = self._dataset.open()
        names = {name for schema in index.schemas for name in schema.names}
        if index.schemas and (unknown := [name for name in self._arrow.names if name not in names]):
            raise ValueError(
                f"the schema must have columns of the dataset; {index.where} has {', '.join(sorted(names))}; found "
                f"{', '.join(unknown)}. If the dataset was replaced, load it again."
            )
        return cache, index

    def partitions(self) -> list[ShardSpan]:
        """Return the spans of shards, in their order."""
        cache, index = self._opened
        deleted, ends = deleted_samples(cache, index), np.cumsum(index.shard_sizes)
        spans, first = [], 0
        while first < len(index):
            sizes = np.cumsum(index.raw_bytes[first:])
            last = first + max(1, int(sizes.searchsorted(self._dataset.partition_bytes, side="right")))
            begin, end = ends[first] - index.shard_sizes[first], ends[last - 1]
            texts = b", ".join(index.text(shard) for shard in range(first, last))
            gone = deleted[(deleted >= begin) & (deleted < end)] - begin
            spans.append(ShardSpan(b'{"version": 2, "shards": [' + texts + b"]}", gone))
            first = last
        return spans

    def read(self, partition: InputPartition) -> Iterator[Any]:
        """Yield the rows of a partition as Arrow batches."""
        if not isinstance(partition, ShardSpan):  # Spark's own, for a dataset without shards
            return
        index = Index.from_bytes(partition.index, self._dataset.url)
        store = open_store(self._dataset.url, self._dataset.store_options)
        begin = 0
        for shard in range(len(index)):
            entry, size = index.entry(shard), int(index.shard_sizes[shard])
            rows = np.setdiff1d(np.arange(size), partition.deleted - begin)
            begin += size
            if len(rows):
                with _opened(store, entry) as opened:
                    yield from self._batches(opened, entry, rows)

    def _batches(self, shard: Shard, entry: ShardEntry, rows: Rows) -> Iterator[pa.RecordBatch]:
        step = max(1, min(_BATCH_ROWS, _BATCH_BYTES * entry.num_samples // max(1, entry.raw.num_bytes)))
        first = {name for each in self._filters for name in columns_of(each)}
        for at in range(0, len(rows), step):
            chosen = rows[at : at + step]
            held = self._columns(shard, chosen, first)
            mask = np.ones(len(chosen), np.bool_)
            for each in self._filters:
                mask &= evaluated(each, held)
            if not mask.any():
                continue
            if not mask.all():
                held = {name: array.filter(pa.array(mask)) for name, array in held.items()}
            held |= self._columns(shard, chosen[mask], {*self._arrow.names} - first)
            yield pa.RecordBatch.from_arrays([held[name] for name in self._arrow.names], schema=self._arrow)

    def _columns(self, shard: Shard, rows: Rows, names: Iterable[str]) -> dict[str, pa.Array]:
        """These columns of a shard. No other column is decoded."""
        encodings, wanted = shard.schema.columns, [name for name in self._arrow.names if name in names]
        here = [name for name in wanted if name in encodings]
        values = shard.columns(rows, here) if here else {}
        types = {name: self._arrow.field(name).type for name in wanted}
        held = {name: arrow_array(name, encodings[name], values[name], types[name]) for name in here}
        return held | {name: pa.nulls(len(rows), types[name]) for name in wanted if name not in held}


class FilteringMDSReader(MDSReader):
    """A reader that evaluates the filters of a query, before the other columns are decoded.

    Spark has a setting for it, and refuses a reader with this method if the setting is off.
    """

    def pushFilters(self, filters: list[Any]) -> Iterable[Any]:  # noqa: N802 - Spark's name
        """Take the filters that mean the same here as in Spark, and return the others."""
        schemas, types = self._opened[1].schemas, {each.name: each.type for each in self._arrow}
        known = {name: kind for name, kind in types.items() if not _has_nulls(schemas, name)}
        self._filters = [each for each in filters if can_evaluate(each, known)]
        return [each for each in filters if not can_evaluate(each, known)]


def _equal(values: Any, wanted: Any) -> NDArray[np.bool_]:
    if isinstance(wanted, str):
        return np.asarray(pc.equal(values, wanted))
    return np.asarray((values == wanted) | ((values != values) & (wanted != wanted)))


def _greater(values: Any, wanted: Any) -> NDArray[np.bool_]:
    if isinstance(wanted, str):
        return np.asarray(pc.greater(values, wanted))
    return np.asarray(((values > wanted) | (values != values)) & (wanted == wanted))


# By the names of Spark's filters, which Spark 4.0 does not have. Of two floats, NaN is the larger, and equal to NaN.
_COMPARED: dict[str, Callable[[Any, Any], Any]] = {
    "EqualTo": _equal,
    "EqualNullSafe": _equal,
    "GreaterThan": _greater,
    "GreaterThanOrEqual": lambda x, v: _greater(x, v) | _equal(x, v),
    "LessThan": lambda x, v: ~(_greater(x, v) | _equal(x, v)),
    "LessThanOrEqual": lambda x, v: ~_greater(x, v),
    "In": lambda x, values: np.logical_or.reduce([_equal(x, v) for v in values]),
}
_TEXTS: dict[str, Callable[[Any, str], Any]] = {
    "StringStartsWith": pc.starts_with,
    "StringEndsWith": pc.ends_with,
    "StringContains": pc.match_substring,
}
_NULLS = {"IsNull": False, "IsNotNull": True}  # of columns without nulls


def columns_of(each: Any) -> tuple[str, ...]:
    """The path of the column that a filter is about."""
    return columns_of(each.child) if type(each).__name__ == "Not" else tuple(each.attribute)


def can_evaluate(each: Any, types: Mapping[str, pa.DataType]) -> bool:
    """Whether a filter is about a column of these, which have no nulls, and has the same meaning here as in Spark."""
    name, path = type(each).__name__, columns_of(each)
    if name == "Not":
        return can_evaluate(each.child, types)
    kind = types.get(path[0]) if len(path) == 1 else None
    if kind is None or name in _NULLS:
        return kind is not None
    values = each.value if name == "In" else (each.value,)
    wanted = next((one for one, fits in _PYTHON.items() if fits(kind)), None)
    known = name in _COMPARED or (name in _TEXTS and wanted is str)
    return known and wanted is not None and len(values) > 0 and all(type(value) is wanted for value in values)


_PYTHON: dict[type, Callable[[pa.DataType], bool]] = {
    int: pa.types.is_integer,
    float: pa.types.is_floating,
    str: lambda kind: pa.types.is_string(kind) or pa.types.is_large_string(kind),
}


def evaluated(each: Any, held: Mapping[str, pa.Array]) -> NDArray[np.bool_]:
    """For which rows a filter is true: bool[n]."""
    name = type(each).__name__
    if name == "Not":
        return ~evaluated(each.child, held)
    column = held[columns_of(each)[0]]
    if name in _NULLS:
        return np.full(len(column), _NULLS[name])
    if name in _TEXTS:
        return np.asarray(_TEXTS[name](column, each.value))
    values = column if pa.types.is_string(column.type) or pa.types.is_large_string(column.type) else column.to_numpy()
    return np.asarray(_COMPARED[name](values, each.value))
