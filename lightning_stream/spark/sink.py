"""``df.write.format("mds")`` and ``df.writeStream.format("mds")``: tasks put shards, the driver commits them.

Each task puts its shards below a folder of this write alone, ``job-<16 digits>-<8 digits>/``, and Spark hands the
receipts of the attempts that count to the driver. The driver puts the index, or a change in the log of versions, with
the shards of these receipts, and deletes what other attempts left in the folder. Nothing else deletes files there that
no index lists. So writes at the same time do not disturb each other.

The first 16 digits come from the key of the write, if it has one: a write that is repeated under its key also deletes
what killed ones left. The others are random.
"""

from __future__ import annotations

import logging
import re
import secrets
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyspark.sql.datasource as api
from pyspark import TaskContext

from lightning_stream.convert.mds import temporary_reader
from lightning_stream.convert.partition import Receipt, check, joined_lengths
from lightning_stream.convert.publish import check_seen
from lightning_stream.errors import AccessError, ConflictError, FormatError, NotFoundError, StoreError
from lightning_stream.formats.encodings import get_encoding
from lightning_stream.formats.index import INDEX_NAME, Index
from lightning_stream.formats.model import index_text, to_text, with_lengths
from lightning_stream.reading.shard_table import ReaderConfig
from lightning_stream.shared_files import sweep_drafts
from lightning_stream.sources.tables import pieces_of
from lightning_stream.spark.partition import SparkJob, written
from lightning_stream.spark.schema import kind_of, mds_columns
from lightning_stream.stores import LocalStore, Store
from lightning_stream.version_log import Edit, OtherChangeError, change_of, read_newest, with_first_key
from lightning_stream.writer.infer import check_appendable
from lightning_stream.writer.lengths import check_measurable
from lightning_stream.writer.place import Transaction, digest_of, listed_files

_LOG = logging.getLogger(__name__)
_JOB = re.compile(r"job-[0-9a-f]{16}-[0-9a-f]{8}/.*")
# So much of an Arrow batch is encoded at once: Spark's batches have 10,000 rows, which may be photos.
_ROWS = 1000
_BYTES = 1 << 24
# Spark has no public name for these. It sets them in every task of a streaming query; both survive a restart.
_QUERY = "sql.streaming.queryId"
_BATCH = "streaming.sql.batchId"


@dataclass(frozen=True)
class SinkJob(SparkJob, api.DataSourceArrowWriter):  # type: ignore[misc,unused-ignore]
    """One write: of one DataFrame, or of one micro-batch. It is pickled to the tasks, and to the process that commits.

    Attributes:
        overwrite: Whether the dataset is replaced; else the rows are appended, or make a new dataset.
        key: A name that no other append has, or "".
        message: A note about the append.
        if_exists: What happens where there is a dataset: ``"append"``, ``"error"`` or ``"ignore"``.
        skip: Whether nothing is written, since there is a dataset that ``"ignore"`` is about.
        base: The digest of the version that was there when the write was planned; "" if there was none.
        job: The name of its folder.
    """

    key: str = ""
    message: str = ""
    if_exists: str = "append"
    skip: bool = False
    base: str = ""
    job: str = ""

    def planned(self, schema: Any) -> SinkJob:
        """Choose the columns, and compare them with those of the dataset.

        Raises:
            ValueError: Columns that cannot be written, or that the dataset does not have.
            FileExistsError: There is a dataset that must not be, or there are other files.
        """
        store = self.place.store
        newest = _newest(store)
        appended = None if self.overwrite else newest
        if appended is not None and self.if_exists == "error":
            raise _exists(store)
        if newest is None and not self.overwrite:
            _refuse_other_files(store)
        asked = self.columns
        if not asked and appended is not None and appended.columns:
            asked = appended.columns
            if asked.keys() != set(schema.names):
                raise ValueError(
                    f"appended rows must have the columns of the dataset; {store.url} has {', '.join(asked)}, the "
                    f"DataFrame {', '.join(schema.names)}. Select the columns (df.select), or write another dataset."
                )
        if vectors := [field.name for field in schema.fields if kind_of(field.dataType) == "VectorUDT"]:
            raise ValueError(
                f"column {vectors[0]!r} holds ML vectors. Make it an array: "
                "pyspark.ml.functions.vector_to_array(column), or write it by dataframe_to_mds."
            )
        columns = mds_columns(schema, asked)
        if not self.columns:
            _check_units(schema, columns)
        lengths = self.writer.get("lengths") or {}
        check_measurable(lengths, columns)
        skip = appended is not None and self.if_exists == "ignore"
        if appended is not None and not skip:
            check_appendable(appended, "mds", columns, lengths)
        begin = digest_of(self.key.encode()) if self.key else secrets.token_hex(8)
        job = f"job-{begin}-{secrets.token_hex(4)}"
        return replace(self, columns=columns, skip=skip, base="" if newest is None else newest.digest, job=job)

    def folder_of(self, partition_id: int) -> str:
        return f"{self.job}/part-{partition_id:05}"

    def write(self, iterator: Iterator[Any]) -> SinkMessage:
        """Write the rows of a task; return its receipt."""
        context = TaskContext.get()
        pieces = (piece for batch in iterator if not self.skip for piece in pieces_of(batch, _ROWS, _BYTES))
        return SinkMessage(self, written(self, 0 if context is None else context.partitionId(), pieces))

    def commit(self, messages: Sequence[Any]) -> None:
        """Make the rows of these receipts part of the dataset, and delete the files of other attempts.

        Raises:
            ValueError: There are nulls, or values that cannot be written; or no rows, and no dataset to append to.
            FileExistsError, ConflictError: Another writer changed the dataset meanwhile; it stays as that one left it.
            StoreError: The files of a receipt are not where the driver looks for them.
        """
        if self.skip:
            return
        place = self.place
        receipts = [message.receipt for message in messages]
        files = {name: size for receipt in receipts for name, size in receipt.files().items()}
        try:
            if self.overwrite or not all(receipt.is_good for receipt in receipts) or _newest(place.store) is None:
                check(receipts, "the DataFrame")
            with suppress(AccessError):  # a store that refuses to list
                seen = {entry.name: entry.num_bytes for entry in place.store.list(f"{self.job}/")}
                check_seen(place.store, seen, files)
            is_in = self._change(place, receipts, files)
        except (ValueError, FileExistsError, ConflictError):
            _clean(place.store, self.job)
            raise
        if is_in:  # writes that are repeated under one key differ in the last digits, and the others are not in it
            _clean(place.store, self.job[:-8], files)
        else:
            _clean(place.store, self.job)

    def abort(self, messages: Sequence[SinkMessage | None]) -> None:
        """Delete what a failed write left. If `commit` had begun, it may have succeeded: then files stay."""
        if any(message is None or not message.receipt.is_good for message in messages):
            _clean(self.place.store, self.job)

    def _change(self, place: Transaction, receipts: Sequence[Receipt], files: Collection[str]) -> bool:
        """Put the index or a change; return whether the rows are in the dataset by this write, of these files."""
        entries = [to_text(entry) for receipt in receipts for entry in receipt.shards]
        lengths = joined_lengths(receipt.lengths for receipt in receipts)
        place.begin("overwrite" if self.overwrite else "merge")
        newest = _newest(place.store)
        if self.overwrite:
            if self.base != ("" if newest is None else newest.digest):
                raise ConflictError(
                    f"{place.store.url} was changed while this write was going to replace it. Its dataset stays. "
                    "Write again."
                )
            place.done = set(files)
            return place.commit(Edit("append", entries, lengths))
        if newest is None:
            text = with_lengths(index_text(entries), lengths)
            with suppress(FileExistsError):  # another writer made a dataset meanwhile
                place.swap(INDEX_NAME, with_first_key(text, self.key) if self.key else text)
                return True
        if self.if_exists == "error":
            raise _exists(place.store)
        if self.if_exists == "ignore":
            return False
        place.begin("append")
        place.done = set(files)
        assert place.base is not None
        if self.key in read_newest(place.store).keys:
            self._check_repeated(place.store, Index.from_bytes(index_text(entries), place.store.url))
        check_appendable(place.base, "mds", self.columns, lengths if entries else place.base.lengths)
        return place.commit(Edit("append", entries, lengths, self.message, self.key))

    def _check_repeated(self, store: Store, added: Index) -> None:
        """Raise OtherChangeError if the change of this key has as many rows, but others. Their order does not count."""
        _, there = change_of(store, self.key)
        hashes, known_hashes = [sorted(str(entry.raw.hashes) for entry in index) for index in (added, there)]
        if there.num_samples != added.num_samples or (hashes == known_hashes and all(s.hashes for s in added.schemas)):
            return  # other numbers of rows are an error of the commit
        with suppress(NotFoundError):  # its shards were compacted
            if self._rows(added) != self._rows(there):
                raise OtherChangeError(
                    f"a change that is made again under its key must be the same one; that of {self.key!r} in "
                    f"{store.url} has as many rows, but others. Nothing was changed. Pass another key; a stream whose "
                    "checkpoint is older than the dataset needs a new checkpointLocation. Where a column is random, as "
                    "of uuid(), each attempt has other rows: make it of the row's own values"
                )

    def _rows(self, index: Index) -> Counter[int]:
        """How often there is each row of some shards, by a hash of its values as they are stored."""
        raw = {name for name, kind in index.columns.items() if getattr(get_encoding(kind), "layout", None) is None}
        config = ReaderConfig(decoders=dict.fromkeys(raw, bytes))
        rows: Counter[int] = Counter()
        with temporary_reader(str(self.out), self.store_options, index=index, config=config) as reader:
            for begin in range(0, index.num_samples, _ROWS):
                batch = reader.batch(np.arange(begin, min(begin + _ROWS, index.num_samples)))
                columns = [
                    values if name in raw else [value.tobytes() for value in values]
                    for name, values in sorted(batch.items())
                ]
                rows.update(map(hash, zip(*columns, strict=True)))
        return rows


@dataclass(frozen=True)
class SinkMessage(api.WriterCommitMessage):  # type: ignore[misc,unused-ignore]
    """What a task tells the driver."""

    job: SinkJob
    receipt: Receipt


class MDSStreamSink(getattr(api, "DataSourceStreamArrowWriter", object)):  # type: ignore[misc]
    """Writes the micro-batches of a streaming query: each is one change, whose key is the query and the batch."""

    def __init__(self, job: SinkJob) -> None:
        self._job = job

    def write(self, iterator: Iterator[Any]) -> SinkMessage:
        context = TaskContext.get()
        query, batch = [None if context is None else context.getLocalProperty(name) for name in (_QUERY, _BATCH)]
        begin = digest_of(f"{query} {batch}".encode())
        job = replace(self._job, key=f"spark-{query}", job=f"job-{begin}-{self._job.job[-8:]}")
        return job.write(iterator)

    def commit(self, messages: list[Any], batchId: int) -> None:  # noqa: N803 - Spark's name
        """Commit a micro-batch, unless that was done. One without rows changes nothing."""
        if any(message.receipt.num_samples or not message.receipt.is_good for message in messages):
            job = messages[0].job
            replace(job, key="" if job.overwrite else f"{job.key}-{batchId}").commit(messages)

    def abort(self, messages: list[Any], batchId: int) -> None:  # noqa: ARG002, N803 - Spark's name
        for message in messages:
            if message is not None:
                message.job.abort(messages)
                return


def _check_units(schema: Any, columns: Mapping[str, str]) -> None:
    """Raise ValueError for days or microseconds that would be numbers of another unit in the dataset."""
    for name, natural in mds_columns(schema, {}).items():
        is_time = kind_of(schema[name].dataType) in ("DateType", "TimestampType", "TimestampNTZType")
        if is_time and columns[name] not in (natural, "str", "json"):
            raise ValueError(
                f"column {name!r} holds {schema[name].dataType.simpleString()}, written as {natural}, but the dataset "
                f"has {columns[name]}: of another unit. Cast the column to what the dataset's numbers mean."
            )


def _newest(store: Store) -> Index | None:
    with suppress(NotFoundError):
        return read_newest(store).index
    return None


def _exists(store: Store) -> FileExistsError:
    return FileExistsError(
        f"{store.url} holds a dataset, and the option if_exists is 'error'. Write to a new place, or replace the "
        "dataset by mode('overwrite')."
    )


def _refuse_other_files(store: Store) -> None:
    with suppress(NotFoundError):
        other = next((entry.name for entry in store.list("") if not _JOB.fullmatch(entry.name)), None)
        if other is not None:
            raise FileExistsError(
                f"{store.url} is no dataset and not empty: it holds {other!r}. Write to a new place, or pass "
                "mode('overwrite'), which leaves files of other programs there."
            )


def _clean(store: Store, prefix: str, keep: Collection[str] | None = None) -> None:
    """Delete the files that begin with `prefix`, except those to keep: None for those that the newest version lists.

    What cannot be deleted is logged: no index lists it.
    """
    try:
        newest = _newest(store) if keep is None else None
        needed = set(keep or ()) | (set() if newest is None else listed_files(newest.data))
        for entry in list(store.list(prefix)):
            if entry.name not in needed:
                store.delete(entry.name)
    except (StoreError, FormatError) as error:
        _LOG.warning("files of attempts that do not count may remain below %s/%s: %s", store.url, prefix, error)
    if isinstance(store, LocalStore):
        for folder in sorted(store.folder.glob(f"{prefix}*/**/"), reverse=True):
            sweep_drafts(folder)
            with suppress(OSError):  # not empty
                folder.rmdir()
