"""`dataframe_to_mds`: a Spark DataFrame to MDS shards, each row exactly once, also where Spark repeats tasks."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from lightning_stream.convert.partition import Receipt, check
from lightning_stream.convert.publish import Publication
from lightning_stream.fingerprint import function_text
from lightning_stream.spark.partition import RESULT, write_partition
from lightning_stream.spark.plan import fingerprint, ordered, plan_text, selected, small_batches
from lightning_stream.spark.schema import is_image, kind_of, mds_columns
from lightning_stream.spark.settings import SparkJob
from lightning_stream.spark_jobs import collected
from lightning_stream.writer.lengths import check_measurable

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

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
        dataframe: The rows. docs/spark.md lists how each type is written.
        merge_index: One index over all partitions; else one in the folder of each.
        mds_kwargs: The writer's settings: ``out`` (a folder that all machines share, a URL, or (local folder, URL)),
            and, if wanted, ``columns``, ``compression`` (default ``"zstd"``), ``hashes`` (default
            ``["xxh3_64"]``; ``[]`` for none), ``size_limit``, ``keep_local``, ``overwrite`` (or ``exist_ok``),
            ``max_workers``, ``progress_bar`` (in the executors' logs), ``retry``, ``store_options``, ``lengths``.
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
            f"dataframe must be a Spark DataFrame; found {type(dataframe).__name__}. Use spark.createDataFrame(...), "
            "or lightning_stream.convert, which needs no Spark."
        )
    settings = SparkJob.read(mds_kwargs, with_udf=udf_iterable is not None)
    if order_by is not None and shuffle_seed is not None:
        raise ValueError("pass order_by= or shuffle_seed=, not both.")
    rows = ordered(dataframe, order_by, shuffle_seed)
    conversion = Conversion.plan(rows, replace(settings, udf=udf_iterable, udf_kwargs=dict(udf_kwargs or {})))
    conversion.write(merge_index)
    return settings.result()


@dataclass(frozen=True)
class Conversion:
    """The conversion of one DataFrame into one dataset.

    Attributes:
        dataframe: What is written, in its order and with its columns.
        job: The work that every task gets.
        batch_rows: Rows of an Arrow batch where a row may be large; None for Spark's default.
    """

    dataframe: Any
    job: SparkJob
    batch_rows: int | None

    @classmethod
    def plan(cls, dataframe: Any, settings: SparkJob) -> Conversion:
        """Choose columns, and compute the fingerprint of this conversion. Reads no rows."""
        if settings.udf is None:
            columns = mds_columns(dataframe.schema, settings.columns)
            rows = selected(dataframe, list(columns))
        else:
            columns = dict(settings.columns)
            rows = selected(dataframe, dataframe.columns)
        udf_kwargs = repr(sorted(settings.udf_kwargs.items()))
        fingerprinted = {**settings.writer, "columns": columns, "udf_kwargs": udf_kwargs}
        if lengths := settings.writer.get("lengths"):
            check_measurable(lengths, columns)
            fingerprinted["lengths"] = {name: function_text(function) for name, function in lengths.items()}
        job = replace(settings, columns=columns, fingerprint=fingerprint(rows, fingerprinted, settings.udf))
        batch_rows = None
        if any(kind_of(field.dataType) == "BinaryType" or is_image(field.dataType) for field in rows.schema.fields):
            batch_rows = _FILE_BATCH_ROWS
        elif any(encoding.startswith("ndarray") for encoding in columns.values()):
            batch_rows = _ARRAY_BATCH_ROWS
        return cls(rows, job, batch_rows)

    def write(self, merge_index: bool = True) -> None:
        """Let Spark write the partitions that are not written, and publish all.

        Raises:
            ValueError: Values that cannot be written.
            StoreError: A store failed in an executor. Other failures there are Spark's own errors.
            MissingExtraError: Executors lack a package.
        """
        publication = Publication.begin(self.job, self.job.overwrite, _REPLACE)
        job = replace(self.job, done=publication.done)
        with small_batches(self.dataframe.sparkSession, self.batch_rows):
            # Numbers as names of columns: Spark's own may hold dots, or differ in their case only.
            numbered = self.dataframe.toDF(*map(str, range(len(self.dataframe.columns))))
            rows = collected(numbered.mapInArrow(_task(job, self.dataframe.columns), RESULT))
        receipts = sorted((Receipt.from_bytes(bytes(row[0])) for row in rows), key=lambda receipt: receipt.partition)
        check(receipts, "the DataFrame", _FILL)
        notes = {
            "schema": json.loads(self.dataframe.schema.json()),
            "plan": plan_text(self.dataframe).splitlines(),
            "num_source_files": len(self.dataframe.inputFiles()),
        }
        publication.publish(receipts, merge_index, notes)


def _task(job: SparkJob, names: Sequence[str]) -> Callable[[Iterator[Any]], Iterator[Any]]:
    """What each task does with its rows, whose columns have these names."""

    def write(batches: Iterator[Any]) -> Iterator[Any]:
        from pyspark import TaskContext

        context = TaskContext.get()
        assert context is not None
        named = (batch.rename_columns(names) for batch in batches)
        yield from write_partition(job, context.partitionId(), named)

    return write
