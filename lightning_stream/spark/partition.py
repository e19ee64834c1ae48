"""The work of one Spark task: what it gets, and what it does: write the shards of its partition, return a receipt.

`mds_kwargs` are checked before Spark does anything.

Spark may run a task several times: again after a failure, twice at once under speculation, and on executors that it
took for dead. Spark decides which attempt counts: the receipts that reach the driver are those of committed
attempts, and only the shards that they list enter the index.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import pyarrow as pa
import xxhash

from lightning_stream.convert.partition import OutputSpec, PartitionWriter, Receipt, RefusedError, refusing
from lightning_stream.formats.encodings import get_encoding
from lightning_stream.shared_files import scratch_folder
from lightning_stream.sources.nulls import NullRule
from lightning_stream.stores import absolute
from lightning_stream.writer.base import WriterConfig
from lightning_stream.writer.lengths import check_functions

_MODES = {1: "L", 3: "RGB", 4: "RGBA"}  # of PIL, by channels
_WRITER_KEYS = ("compression", "hashes", "size_limit", "max_workers", "progress_bar", "lengths")
_OWN_KEYS = ("out", "columns", "keep_local", "overwrite", "exist_ok", "retry", "store_options")
# What the writer in an executor would refuse, with a task's long error around it.
_CHECKS: Mapping[str, Callable[[Any], Any]] = {
    "hashes": lambda hashes: WriterConfig.make(None, hashes, None),
    "compression": lambda compression: WriterConfig.make(compression, None, None),
    "size_limit": lambda limit: WriterConfig.make(None, None, limit),
    "lengths": check_functions,
}


@dataclass(frozen=True)
class SparkJob(OutputSpec):
    """The description of the work that every task gets.

    Attributes:
        columns: Before the work is planned, those that the user chose; empty for all, inferred.
        overwrite: Whether what is there is replaced.
        done: Partitions that an earlier run of it has receipts for.
        udf: From a pandas frame to an iterable of samples; None to write the rows as they are.
        udf_kwargs: Its arguments.
    """

    overwrite: bool = False
    done: frozenset[int] = frozenset()
    udf: Callable[..., Iterable[Mapping[str, Any]]] | None = None
    udf_kwargs: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, mds_kwargs: Mapping[str, Any] | None, *, with_udf: bool = False) -> Self:
        """Check `mds_kwargs`; the work is not planned yet.

        Raises:
            ValueError: Settings that are wrong; all are named.
            TypeError: It is not a mapping.
        """
        if mds_kwargs is not None and not isinstance(mds_kwargs, Mapping):
            raise TypeError(f"mds_kwargs must be a dict such as {{'out': ...}}; found {mds_kwargs!r:.60}.")
        mds_kwargs = mds_kwargs or {}
        passed = {name: value for name, value in mds_kwargs.items() if value is not None}
        if problems := _problems(passed, with_udf):
            raise ValueError(" ".join(problems))
        writer = {"compression": "zstd", **{key: mds_kwargs[key] for key in _WRITER_KEYS if key in mds_kwargs}}
        if "hashes" in passed:
            writer["hashes"] = list(passed["hashes"])
        retry = {"retries": passed["retry"]} if "retry" in passed else {}
        return cls(
            absolute(passed["out"]),
            bool(passed.get("keep_local")),
            {**retry, **passed.get("store_options", {})} or None,
            passed.get("columns", {}),
            writer,
            "",
            bool(passed.get("overwrite") or passed.get("exist_ok")),
        )


def _problems(passed: Mapping[str, Any], with_udf: bool) -> list[str]:
    problems = []
    if "out" not in passed:
        problems.append("mds_kwargs needs out: a folder that all machines share, a URL, or (local folder, URL).")
    columns = passed.get("columns")
    if columns is not None and not (isinstance(columns, Mapping) and columns):
        problems.append(f"columns must be a dict of encodings by name, {{'id': 'int64'}}; found {columns!r:.60}.")
    elif with_udf and columns is None:
        problems.append("with udf_iterable, mds_kwargs needs columns: the encoding of each value of its samples.")
    if unknown := sorted(passed.keys() - {*_WRITER_KEYS, *_OWN_KEYS}):
        problems.append(f"mds_kwargs has no {', '.join(unknown)}; it takes {', '.join(_OWN_KEYS + _WRITER_KEYS)}.")
    if isinstance(passed.get("hashes"), str):
        problems.append(f"hashes must be a list of names, such as [{passed['hashes']!r}]; found {passed['hashes']!r}.")
    problems += [
        f"{name} must be True or False; found {passed[name]!r:.60}."
        for name in ("keep_local", "overwrite", "exist_ok")
        if passed.get(name, False) not in (True, False)
    ]
    for name, check in _CHECKS.items():
        try:
            check(passed.get(name))
        except (ValueError, TypeError) as error:
            problems.append(str(error))
    return problems


def continued(job: SparkJob, partition_id: int, batches: Iterator[pa.RecordBatch]) -> Receipt:
    """Write the rows of a partition, unless an earlier run wrote these very rows; put a receipt, and return it.

    A plan may give another run other rows at the same place: the bounds of a sort come from samples. Nothing is known
    of such rows before the last one, so those that may be written already are kept until then.
    """
    content = xxhash.xxh3_128()
    rows = _hashed(batches, content)
    if partition_id not in job.done:
        receipt = written(job, partition_id, rows)
        return job.put(replace(receipt, content=content.hexdigest()))
    with scratch_folder() as folder:
        batches = _stored(rows, Path(folder, "rows"))
        receipt = job.receipt(partition_id)
        if receipt.content != content.hexdigest():
            receipt = written(job, partition_id, batches)
    return job.put(replace(receipt, content=content.hexdigest()))


def _hashed(batches: Iterator[pa.RecordBatch], content: xxhash.xxh3_128) -> Iterator[pa.RecordBatch]:
    """The same batches; each that was taken is hashed."""
    for batch in batches:
        content.update(b"%d" % batch.num_rows)
        for column in batch.columns:
            for buffer in filter(None, column.buffers()):
                content.update(buffer)
        yield batch


def _stored(batches: Iterator[pa.RecordBatch], path: Path) -> Iterator[pa.RecordBatch]:
    """All batches, from a file."""
    first = next(batches, None)
    if first is None:
        return iter(())
    with pa.ipc.new_stream(path, first.schema) as file:
        for batch in itertools.chain([first], batches):
            file.write_batch(batch)
    return iter(pa.ipc.open_stream(pa.memory_map(str(path))))


def written(job: SparkJob, partition_id: int, batches: Iterator[pa.RecordBatch]) -> Receipt:
    """Write the rows of a partition; return a receipt, which also tells of nulls and of values that were refused."""
    first = next(filter(len, batches), None)
    if first is None:
        return Receipt(partition_id)
    nulls: dict[str, int] = {}
    writer = PartitionWriter(job, partition_id)
    try:
        with writer:
            for batch in itertools.chain([first], batches):
                if job.udf is not None:
                    _write_samples(writer, job.udf(_as_pandas(batch), **job.udf_kwargs))
                    continue
                with refusing():
                    values, _ = NullRule().settle(_with_images(batch, job.columns), job.columns, nulls, set())
                    writer.write_batch(values)
    except RefusedError as error:
        return Receipt(partition_id, refused=str(error))
    return writer.receipt(nulls)


def _write_samples(writer: PartitionWriter, samples: Iterable[Mapping[str, Any]]) -> None:
    if not isinstance(samples, Iterable):
        raise TypeError(f"udf_iterable must return an iterable of samples (dicts); got {type(samples).__name__}.")
    for sample in samples:  # Spark repeats the task if the function itself raises
        with refusing():
            if isinstance(sample, Mapping) and (extra := sample.keys() - (writer.columns or {}).keys()):
                raise ValueError(f"columns= has no {extra.pop()!r}, a key of a sample. Name it there, or leave it out.")
            writer.write(sample)


def _as_pandas(batch: pa.RecordBatch) -> Any:
    """A frame as Spark makes them. Whole numbers stay whole beside nulls: floats hold no more than 53 bits exactly."""
    frame = batch.to_pandas(date_as_object=True, integer_object_nulls=True, maps_as_pydicts="strict")
    for field_ in batch.schema:
        name = field_.name
        if pa.types.is_integer(field_.type) and frame[name].dtype == object:
            frame[name] = frame[name].astype(str(field_.type).capitalize())
        if frame[name].dtype == "str":  # since pandas 3, where a null would be NaN
            frame[name] = frame[name].astype(object).where(frame[name].notna(), None)
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
