"""What one Spark task does: write the shards of its partition, and give a receipt for them.

Spark may run a task several times: again after a failure, twice at once under speculation, and on executors that it
took for dead. So a shard's name holds a digest of its bytes, ``part-00003/shard.00000.<digest>.mds``: attempts that
write the same bytes write the same files, each put whole or not at all, and an attempt that writes other bytes writes
them elsewhere. Which attempt counts is for Spark to say: the receipts that reach the driver are those of committed
attempts, and only what they list enters the index.
"""

from __future__ import annotations

import itertools
import json
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import pyarrow as pa
import xxhash
import zstandard

from lightning_stream.errors import NotFoundError
from lightning_stream.formats.index import INDEX_NAME
from lightning_stream.spark.columns import count_nulls, writer_columns
from lightning_stream.storage import open_store
from lightning_stream.writer import MDSWriter
from lightning_stream.writer.batch import Pieces, batch_columns
from lightning_stream.writer.target import Target

CONTROL = "_conversion"
RESULT = "receipt binary"
_JOINS: Mapping[str, Callable[[Any, Any], Any]] = {"min": min, "max": max, "bytes": operator.add}


@dataclass(frozen=True)
class Job:
    """What every task is told.

    Attributes:
        out: Where to, as a writer takes it.
        keep_local: As a writer takes it.
        store_options: As a writer takes it.
        columns: Encoding by column name.
        writer: The writer's other settings.
        fingerprint: What tells this conversion from others.
        done: Partitions that an earlier run of it has receipts for.
        udf: From a pandas frame to an iterable of samples; None to write the rows as they are.
        udf_kwargs: Its arguments.
    """

    out: Any
    keep_local: bool
    store_options: Mapping[str, Any] | None
    columns: Mapping[str, str]
    writer: Mapping[str, Any]
    fingerprint: str
    done: frozenset[int] = frozenset()
    udf: Callable[..., Iterable[Mapping[str, Any]]] | None = None
    udf_kwargs: Mapping[str, Any] = field(default_factory=dict)

    @property
    def place(self) -> str:
        """Where the dataset stays: the remote of a pair."""
        return str(self.out[-1] if isinstance(self.out, (tuple, list)) else self.out)


@dataclass(frozen=True)
class Receipt:
    """What a task wrote.

    Attributes:
        partition: Its number.
        begins: Digest of the rows it began with: tells whether a later run has the same partition.
        num_samples: Rows written.
        shards: Index entries, their files named relative to the dataset's root.
        statistics: Lowest, highest and bytes of values, by column.
        nulls: Null values by column, where there are any: then nothing it wrote counts.
        refused: Why a value could not be written: then nothing it wrote counts.
    """

    partition: int
    begins: str
    num_samples: int = 0
    shards: tuple[dict[str, Any], ...] = ()
    statistics: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    nulls: Mapping[str, int] = field(default_factory=dict)
    refused: str = ""

    @property
    def is_good(self) -> bool:
        """Whether what it lists may enter an index."""
        return not self.nulls and not self.refused

    def to_bytes(self) -> bytes:
        """As compressed json."""
        return zstandard.ZstdCompressor().compress(json.dumps(asdict(self), sort_keys=True).encode())

    @classmethod
    def from_bytes(cls, data: bytes) -> Receipt:
        """Read it back."""
        held = json.loads(zstandard.ZstdDecompressor().decompress(data))
        return cls(**{**held, "shards": tuple(held["shards"])})

    def files(self) -> dict[str, int]:
        """Bytes by name of every file that is stored."""
        stored = [entry["zip_data"] or entry["raw_data"] for entry in self.shards]
        return {file["basename"]: file["bytes"] for file in stored}


def receipt_name(fingerprint: str, partition: int) -> str:
    """Where a receipt lies while the conversion is under way."""
    return f"{CONTROL}/{fingerprint}/{partition:05}.json.zst"


def write_partition(job: Job, number: int, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Write a partition; yield its receipt, as Spark wants it."""
    first = next(batches, None)
    while first is not None and not first.num_rows:
        first = next(batches, None)
    if first is None:
        receipt = Receipt(number, "")
    else:
        begins = _digest(first.serialize())
        receipt = _earlier(job, number, begins) or _written(job, number, begins, itertools.chain([first], batches))
    data = receipt.to_bytes()
    if receipt.is_good:
        open_store(job.place, _options(job)).put(receipt_name(job.fingerprint, number), data)
    yield pa.RecordBatch.from_arrays([pa.array([data], pa.binary())], names=["receipt"])


def _earlier(job: Job, number: int, begins: str) -> Receipt | None:
    """The receipt of a run that was cut short, if it is for the same rows."""
    if number not in job.done:
        return None
    try:
        data = open_store(job.place, _options(job)).read(receipt_name(job.fingerprint, number))
    except NotFoundError:
        return None
    receipt = Receipt.from_bytes(data)
    return receipt if receipt.begins == begins else None


def _written(job: Job, number: int, begins: str, batches: Iterable[pa.RecordBatch]) -> Receipt:
    nulls: dict[str, int] = {}
    statistics = _Statistics()
    writer = _PartitionWriter(job, number)
    try:
        with writer:
            for batch in batches:
                if job.udf is not None:
                    _write_samples(writer, job.udf(_as_pandas(batch), **job.udf_kwargs))
                    continue
                for name, count in count_nulls(batch, job.columns).items():
                    nulls[name] = nulls.get(name, 0) + count
                if not nulls:
                    _write_batch(writer, batch, job.columns, statistics)
    except _RefusedError as error:
        return Receipt(number, begins, refused=str(error))
    return Receipt(number, begins, writer.num_samples, tuple(writer.shards), statistics.columns, nulls)


class _RefusedError(Exception):
    """A value that its encoding does not take: trying again would not help."""


def _write_batch(
    writer: _PartitionWriter, batch: pa.RecordBatch, columns: Mapping[str, str], statistics: _Statistics
) -> None:
    try:
        values, _ = batch_columns(writer_columns(batch, columns))
        writer.write_batch(values)
    except (TypeError, ValueError, OverflowError) as error:
        raise _RefusedError(str(error)) from error
    statistics.add(values)


def _write_samples(writer: _PartitionWriter, samples: Iterable[Mapping[str, Any]]) -> None:
    if not isinstance(samples, Iterable):
        raise TypeError(f"udf_iterable must return an iterable of samples (dicts); got {type(samples).__name__}.")
    for sample in samples:  # what the function itself raises is Spark's to try again
        _write_sample(writer, sample)


def _write_sample(writer: _PartitionWriter, sample: Mapping[str, Any]) -> None:
    try:
        writer.write(sample)
    except (TypeError, ValueError, OverflowError) as error:
        raise _RefusedError(str(error)) from error


def _as_pandas(batch: pa.RecordBatch) -> Any:
    """A frame as Spark makes them: moments without a zone, in the session's."""
    frame = batch.to_pandas(date_as_object=True)
    for name in frame.columns:
        if getattr(frame[name].dtype, "tz", None) is not None:
            frame[name] = frame[name].dt.tz_localize(None)
    return frame


class _PartitionWriter(MDSWriter):
    """An `MDSWriter` whose shards are named by their bytes, and that keeps its index entries instead of putting them.

    Attributes:
        shards: The index entries, once finished.
    """

    def __init__(self, job: Job, number: int) -> None:
        super().__init__(out=job.out, columns=job.columns, exist_ok=True, **job.writer)
        self._part = _PartitionTarget(job, number)
        self._target = self._part

    @property
    def shards(self) -> list[dict[str, Any]]:
        return self._part.entries


class _PartitionTarget(Target):
    def __init__(self, job: Job, number: int) -> None:
        super().__init__(job.out, job.keep_local, _options(job))
        self._folder = f"part-{number:05}"
        self._digests: dict[str, str] = {}
        self.entries: list[dict[str, Any]] = []

    def put(self, name: str, data: Any, *, anew: bool = False) -> None:
        parts = [data] if isinstance(data, bytes) else data
        if name == INDEX_NAME:
            self.entries = [self._named(entry) for entry in json.loads(b"".join(parts))["shards"]]
            return
        self._digests[_stem(name)] = _digest(*parts)
        super().put(self._final(name), data, anew=anew)

    def _named(self, entry: dict[str, Any]) -> dict[str, Any]:
        for key in ("raw_data", "zip_data"):
            if entry[key] is not None:
                entry[key]["basename"] = self._final(entry[key]["basename"])
        return entry

    def _final(self, name: str) -> str:
        stem = _stem(name)
        return f"{self._folder}/{stem}.{self._digests[stem]}{name[len(stem) :]}"


class _Statistics:
    """Lowest and highest number, and bytes of texts and binary values, of each column."""

    def __init__(self) -> None:
        self.columns: dict[str, dict[str, Any]] = {}

    def add(self, values: Mapping[str, Any]) -> None:
        for name, column in values.items():
            if isinstance(column, Pieces):
                self.merge(name, {"bytes": sum(map(len, column))})
            elif isinstance(column, np.ndarray) and column.ndim == 1 and column.dtype.kind in "iuf" and len(column):
                self.merge(name, _extremes(column))

    def merge(self, name: str, found: Mapping[str, Any]) -> None:
        held = self.columns.setdefault(name, {})
        for key, value in found.items():
            held[key] = _JOINS[key](held[key], value) if key in held else value


def merged_statistics(receipts: Iterable[Receipt]) -> dict[str, dict[str, Any]]:
    """Of several partitions together."""
    total = _Statistics()
    for receipt in receipts:
        for name, found in receipt.statistics.items():
            total.merge(name, found)
    return total.columns


def _extremes(column: Any) -> dict[str, Any]:
    if column.dtype.kind == "f":
        column = column[np.isfinite(column)]
    return {"min": column.min().item(), "max": column.max().item()} if len(column) else {}


def _stem(name: str) -> str:
    return ".".join(name.split(".")[:2])


def _digest(*parts: Any) -> str:
    total = xxhash.xxh3_128()
    for part in parts:
        total.update(part)
    return str(total.hexdigest()[:16])


def _options(job: Job) -> Mapping[str, Any] | None:
    return job.store_options if "://" in job.place or job.place.startswith("dbfs:") else None


def with_done(job: Job, done: Iterable[int]) -> Job:
    """The same job, with partitions that need not be written again."""
    return replace(job, done=frozenset(done))
