"""`dataframe_to_mds`: a Spark DataFrame to MDS shards, each row exactly once, also where Spark repeats tasks."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from lightning_stream.convert.publish import Publication
from lightning_stream.convert.receipt import Receipt, check
from lightning_stream.spark.delta import delta_versions
from lightning_stream.spark.explain import explained
from lightning_stream.spark.parquet_scan import ParquetScan
from lightning_stream.spark.partition import RESULT, SparkJob, write_partition
from lightning_stream.spark.plan import fingerprint, ordered, plan_text, selected, small_batches
from lightning_stream.spark.progress import Progress
from lightning_stream.spark.schema import holds_files, mds_columns, vector_columns
from lightning_stream.spark.settings import Settings

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_LOG = logging.getLogger(__name__)
_FILE_BATCH_ROWS = 256
_ARRAY_BATCH_ROWS = 1000  # few enough to stay in a processor's cache: a third less work on blocks of tokens
_REPLACE = "pass overwrite=True in mds_kwargs"
_FILL = "Fill them (dataframe.fillna), drop the rows (dataframe.dropna), or ask for 'json' in columns=."


def dataframe_to_mds(
    dataframe: DataFrame,
    merge_index: bool = True,
    mds_kwargs: Mapping[str, Any] | None = None,
    udf_iterable: Callable[..., Iterable[Mapping[str, Any]]] | None = None,
    udf_kwargs: Mapping[str, Any] | None = None,
    *,
    order_by: Sequence[str] | str | None = None,
    shuffle_seed: int | None = None,
) -> tuple[str, str]:
    """Write a DataFrame as an MDS dataset, with the executors writing its shards and the driver its index.

    Every row is in the dataset exactly once, also where tasks fail, run twice, or outlive their executors. index.json
    comes last: without it there is no dataset, and then the same call again redoes only what is missing. The same
    partitions give the same files. ``manifest.json`` beside it holds schema, row counts and source.

    Example::

        dataframe_to_mds(spark.table("photos"), mds_kwargs={"out": "s3://bucket/train", "size_limit": "64mb"})

    Args:
        dataframe: The rows. Types are written as `lightning_stream.spark.schema` lists them.
        merge_index: One index over all partitions; else one in the folder of each.
        mds_kwargs: The writer's settings: ``out`` (a folder that all machines share, a URL, or (local folder, URL)),
            and, if wanted, ``columns``, ``compression`` (default ``"zstd"``), ``hashes`` (default
            ``["xxh3_64"]``; ``[]`` for none), ``size_limit``,
            ``keep_local``, ``overwrite`` (or ``exist_ok``), ``max_workers``, ``progress_bar``, ``retry``,
            ``store_options``.
        udf_iterable: Called in the executors with a pandas frame of some rows, gives samples (dicts) to write
            instead. Needs ``columns``. For repeatable files it must be deterministic.
        udf_kwargs: More arguments for it.
        order_by: Columns to sort all rows by.
        shuffle_seed: Mix rows over all partitions by a hash of their values instead.

    Returns:
        (local, remote): where it was written; the one that was not used is ``""``.

    Raises:
        ValueError: Settings, types or values that cannot be written; null values, with column and count; no rows.
        FileExistsError: ``out`` holds something else than the remains of this very call.
        StoreError: What executors wrote is not where the driver looks for it.
    """
    if not hasattr(dataframe, "mapInArrow"):
        raise TypeError(
            f"dataframe must be a Spark DataFrame; found {type(dataframe).__name__}. Of what pandas or Python holds, "
            "spark.createDataFrame(...) makes one; lightning_stream.convert needs no Spark."
        )
    settings = Settings.read(mds_kwargs, with_udf=udf_iterable is not None)
    if order_by is not None and shuffle_seed is not None:
        raise ValueError("pass order_by= or shuffle_seed=, not both.")
    conversion = Conversion.plan(
        ordered(dataframe, order_by, shuffle_seed), settings, udf_iterable, dict(udf_kwargs or {})
    )
    publication = Publication.begin(conversion.job, settings.overwrite, _REPLACE)
    receipts = conversion.run(publication, progress_bar=settings.progress_bar)
    publication.publish(receipts, merge_index, conversion.about())
    return settings.result()


@dataclass(frozen=True)
class Conversion:
    """The conversion of one DataFrame into one dataset.

    Attributes:
        dataframe: What is written, in its order and with its columns.
        job: What tasks get.
        batch_rows: Rows at a time, where a row may be large.
    """

    dataframe: Any
    job: SparkJob
    batch_rows: int | None

    @classmethod
    def plan(
        cls, dataframe: Any, settings: Settings, udf: Callable[..., Any] | None, udf_kwargs: Mapping[str, Any]
    ) -> Conversion:
        """Choose columns, and compute the fingerprint of this conversion. Reads no rows."""
        schema = dataframe.schema
        if udf is None:
            columns = mds_columns(schema, settings.columns)
            read: Sequence[str] = list(columns)
        else:
            assert settings.columns is not None
            columns, read = dict(settings.columns), dataframe.columns
        rows = selected(dataframe, read, vector_columns(schema, dict.fromkeys(read, "")))
        about = {**settings.writer, "columns": columns, "udf_kwargs": repr(sorted(udf_kwargs.items()))}
        job = SparkJob(
            settings.out,
            settings.keep_local,
            settings.store_options,
            columns,
            settings.writer,
            fingerprint(rows, about, udf),
            udf=udf,
            udf_kwargs=udf_kwargs,
        )
        return cls(rows, job, _batch_rows(schema, columns, read))

    def run(self, publication: Publication, *, progress_bar: bool = False) -> list[Receipt]:
        """Have Spark write all partitions but those done; receipts of the attempts it committed, in their order.

        Raises:
            ValueError: Values that cannot be written.
            StoreError: What an executor's store could not do; for what else fails there, Spark's own error.
            MissingExtraError: Executors lack a package.
        """
        done = publication.done
        if done:
            _LOG.info("continuing an earlier run: %d partitions are written already", len(done))
        progress = Progress(self.job) if progress_bar else nullcontext()
        with progress, small_batches(self.dataframe.sparkSession, self.batch_rows):
            rows = _collected(self._receipts(replace(self.job, done=done)))
        receipts = sorted((Receipt.from_bytes(bytes(row[0])) for row in rows), key=lambda receipt: receipt.partition)
        check(receipts, "the DataFrame", _FILL)
        return receipts

    def _receipts(self, job: SparkJob) -> Any:
        """A DataFrame whose tasks write the partitions, each a row."""
        scan = ParquetScan.of(self.dataframe) if job.udf is None else None
        if scan is None:
            return self.dataframe.mapInArrow(_task(job), RESULT)
        numbers = self.dataframe.sparkSession.range(0, len(scan.partitions), 1, len(scan.partitions))
        return numbers.mapInArrow(_scanning_task(job, scan, self.batch_rows), RESULT)

    def about(self) -> dict[str, Any]:
        """The DataFrame's part of the manifest."""
        files = self.dataframe.inputFiles()
        versions = delta_versions(files)
        return {
            "schema": json.loads(self.dataframe.schema.json()),
            "plan": plan_text(self.dataframe).splitlines(),
            "num_source_files": len(files),
            **({"delta_tables": versions} if versions else {}),
        }

    def writing_to(self, uri: str) -> Conversion:
        """The same conversion into another folder or URL."""
        return replace(self, job=replace(self.job, out=uri))


def _collected(results: Any) -> Any:
    try:
        return results.collect()
    except Exception as error:
        cause = explained(error)
        if cause is None:
            raise
        raise cause from error


def _batch_rows(schema: Any, columns: Mapping[str, str], read: Sequence[str]) -> int | None:
    if holds_files(schema, dict.fromkeys(read, "")):
        return _FILE_BATCH_ROWS
    return _ARRAY_BATCH_ROWS if any(name.startswith("ndarray") for name in columns.values()) else None


def conversion_of(dataframe: Any, mds_kwargs: Mapping[str, Any]) -> Conversion:
    """The conversion that `dataframe_to_mds` would run."""
    return Conversion.plan(dataframe, Settings.read(mds_kwargs, with_udf=False), None, {})


def _task(job: SparkJob) -> Callable[[Iterator[Any]], Iterator[Any]]:
    def write(batches: Iterator[Any]) -> Iterator[Any]:
        from pyspark import TaskContext

        context = TaskContext.get()
        assert context is not None
        return write_partition(job, context.partitionId(), batches)

    return write


def _scanning_task(
    job: SparkJob, scan: ParquetScan, batch_rows: int | None
) -> Callable[[Iterator[Any]], Iterator[Any]]:
    def write(numbers: Iterator[Any]) -> Iterator[Any]:
        for batch in numbers:
            for number in batch.column(0).to_pylist():
                yield from write_partition(job, number, scan.read(number, batch_rows))

    return write
