"""The work of one Spark task: write the shards of its partition, and return a receipt for them.

Spark may run a task several times: again after a failure, twice at once under speculation, and on executors that it
took for dead. Spark decides which attempt counts: the receipts that reach the driver are those of committed
attempts, and only the shards that they list enter the index.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from lightning_stream.convert.arrow import count_nulls, writer_columns
from lightning_stream.convert.partition import OutputSpec, PartitionWriter, RefusedError
from lightning_stream.convert.receipt import Receipt, receipt_name
from lightning_stream.errors import NotFoundError
from lightning_stream.writer.batch import batch_columns
from lightning_stream.writer.place import digest_of

RESULT = "receipt binary"


@dataclass(frozen=True)
class SparkJob(OutputSpec):
    """The description of the work that every task gets.

    Attributes:
        done: Partitions that an earlier run of it has receipts for.
        udf: From a pandas frame to an iterable of samples; None to write the rows as they are.
        udf_kwargs: Its arguments.
    """

    done: frozenset[int] = frozenset()
    udf: Callable[..., Iterable[Mapping[str, Any]]] | None = None
    udf_kwargs: Mapping[str, Any] = field(default_factory=dict)


def write_partition(job: SparkJob, number: int, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Write a partition; yield its receipt, as Spark wants it."""
    first = next(batches, None)
    while first is not None and not first.num_rows:
        first = next(batches, None)
    if first is None:
        receipt = Receipt(number, "")
    else:
        begins = digest_of(first.serialize())
        receipt = _earlier(job, number, begins) or _written(job, number, begins, itertools.chain([first], batches))
    data = receipt.to_bytes()
    if receipt.is_good:
        job.store.put(receipt_name(job.fingerprint, number), data)
    yield pa.RecordBatch.from_arrays([pa.array([data], pa.binary())], names=["receipt"])


def _earlier(job: SparkJob, number: int, begins: str) -> Receipt | None:
    """The receipt of a run that was cut short, if it is for the same rows."""
    if number not in job.done:
        return None
    try:
        data = job.store.read(receipt_name(job.fingerprint, number))
    except NotFoundError:
        return None
    receipt = Receipt.from_bytes(data)
    return receipt if receipt.begins == begins else None


def _written(job: SparkJob, number: int, begins: str, batches: Iterable[pa.RecordBatch]) -> Receipt:
    nulls: dict[str, int] = {}
    writer = PartitionWriter(job, number)
    try:
        with writer:
            for batch in batches:
                if job.udf is not None:
                    _write_samples(writer, job.udf(_as_pandas(batch), **job.udf_kwargs))
                    continue
                for name, count in count_nulls(batch, job.columns).items():
                    nulls[name] = nulls.get(name, 0) + count
                if not nulls:
                    _write_batch(writer, batch, job.columns)
    except RefusedError as error:
        return Receipt(number, begins, refused=str(error))
    return Receipt(number, begins, writer.num_samples, tuple(writer.shards), nulls)


def _write_batch(writer: PartitionWriter, batch: pa.RecordBatch, columns: Mapping[str, str]) -> None:
    try:
        values, _ = batch_columns(writer_columns(batch, columns))
        writer.write_batch(values)
    except (TypeError, ValueError, OverflowError) as error:
        raise RefusedError(str(error)) from error


def _write_samples(writer: PartitionWriter, samples: Iterable[Mapping[str, Any]]) -> None:
    if not isinstance(samples, Iterable):
        raise TypeError(f"udf_iterable must return an iterable of samples (dicts); got {type(samples).__name__}.")
    for sample in samples:  # Spark repeats the task if the function itself raises
        _write_sample(writer, sample)


def _write_sample(writer: PartitionWriter, sample: Mapping[str, Any]) -> None:
    try:
        writer.write(sample)
    except (TypeError, ValueError, OverflowError) as error:
        raise RefusedError(str(error)) from error


def _as_pandas(batch: pa.RecordBatch) -> Any:
    """A frame as Spark makes them: times without a zone, in the session's."""
    frame = batch.to_pandas(date_as_object=True)
    for name in frame.columns:
        if getattr(frame[name].dtype, "tz", None) is not None:
            frame[name] = frame[name].dt.tz_localize(None)
    return frame
