"""The work of one Spark task: write the shards of its partition, and return a receipt for them.

Spark may run a task several times: again after a failure, twice at once under speculation, and on executors that it
took for dead. Spark decides which attempt counts: the receipts that reach the driver are those of committed
attempts, and only the shards that they list enter the index.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any

import numpy as np
import pyarrow as pa

from lightning_stream.convert.partition import PartitionWriter, Receipt, RefusedError, refusing
from lightning_stream.errors import NotFoundError
from lightning_stream.formats.encodings import get_encoding
from lightning_stream.sources.nulls import NullRule
from lightning_stream.spark.settings import SparkJob
from lightning_stream.writer.place import digest_of

RESULT = "receipt binary"
_MODES = {1: "L", 3: "RGB", 4: "RGBA"}  # of PIL, by channels


def write_partition(job: SparkJob, partition_id: int, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Write a partition; yield its receipt, as Spark wants it."""
    receipt = Receipt(partition_id, "")
    first = next((batch for batch in batches if batch.num_rows), None)
    if first is not None:
        begins = digest_of(first.serialize())
        earlier = None
        if partition_id in job.done:
            with suppress(NotFoundError):
                earlier = job.receipt(partition_id)
        if earlier is not None and earlier.begins == begins:
            receipt = earlier
        else:
            receipt = written(job, partition_id, begins, itertools.chain([first], batches))
    data = job.put(receipt).to_bytes()
    yield pa.RecordBatch.from_arrays([pa.array([data], pa.binary())], names=["receipt"])


def written(job: SparkJob, partition_id: int, begins: str, batches: Iterable[pa.RecordBatch]) -> Receipt:
    """Write the rows of a partition; return a receipt, which also tells of nulls and of values that were refused."""
    nulls: dict[str, int] = {}
    writer = PartitionWriter(job, partition_id)
    try:
        with writer:
            for batch in batches:
                if job.udf is not None:
                    _write_samples(writer, job.udf(_as_pandas(batch), **job.udf_kwargs))
                else:
                    _write_rows(writer, batch, job.columns, nulls)
    except RefusedError as error:
        return Receipt(partition_id, begins, refused=str(error))
    return writer.receipt(begins, nulls)


def _write_rows(
    writer: PartitionWriter, batch: pa.RecordBatch, columns: Mapping[str, str], nulls: dict[str, int]
) -> None:
    with refusing():
        values, _ = NullRule().settle(_with_images(batch, columns), columns, nulls)
        writer.write_batch(values)


def _write_samples(writer: PartitionWriter, samples: Iterable[Mapping[str, Any]]) -> None:
    if not isinstance(samples, Iterable):
        raise TypeError(f"udf_iterable must return an iterable of samples (dicts); got {type(samples).__name__}.")
    for sample in samples:  # Spark repeats the task if the function itself raises
        with refusing():
            writer.write(sample)


def _as_pandas(batch: pa.RecordBatch) -> Any:
    """A frame as Spark makes them: times without a zone, in the session's."""
    frame = batch.to_pandas(date_as_object=True)
    for name in frame.columns:
        if getattr(frame[name].dtype, "tz", None) is not None:
            frame[name] = frame[name].dt.tz_localize(None)
    return frame


def _with_images(batch: pa.RecordBatch, columns: Mapping[str, str]) -> pa.RecordBatch:
    """The batch with rows of Spark's image source as the bytes that are stored."""
    for k, name in enumerate(batch.schema.names):
        if pa.types.is_struct(batch.schema.field(k).type) and columns.get(name, "json") != "json":
            images = [None if row is None else _image_bytes(row, columns[name]) for row in batch.column(k).to_pylist()]
            batch = batch.set_column(k, name, pa.array(images, pa.large_binary()))
    return batch


def _image_bytes(row: Mapping[str, Any], encoding: str) -> bytes:
    height = row["height"]
    width = row["width"]
    channels = row["nChannels"]
    if channels not in _MODES or height < 1 or width < 1:
        raise ValueError(f"{row['origin']} is no image that could be read. Read with option dropInvalid=true.")
    pixels = np.frombuffer(row["data"], np.uint8).reshape(height, width, channels)
    if channels > 1:  # Spark's pixels are blue, green, red
        pixels = pixels[..., [2, 1, 0, 3][:channels]]
    if encoding == "pil":
        mode = _MODES[channels].encode()
        return np.array([width, height, len(mode)], "<u4").tobytes() + mode + pixels.tobytes()
    from PIL import Image

    image = Image.fromarray(np.ascontiguousarray(pixels.squeeze(2) if channels == 1 else pixels))
    return get_encoding(encoding).encode(image.convert("RGB") if encoding == "jpeg" and channels == 4 else image)
