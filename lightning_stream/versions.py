"""Versions of a dataset that others can read meanwhile: its log, deleted samples, and index.json for other readers.

Samples are appended by `MDSWriter(append=True)`; `Stream(version=...)` reads a version. docs/storage.md explains both.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .cache import ShardCache
from .errors import ConflictError, checking
from .formats.encodings import plain_values
from .formats.encodings.base import BinaryColumn
from .formats.hashing import digest, digest_parts, hashes_to_write
from .formats.index import FileEntry, Index, ShardEntry
from .formats.mds.encode import MdsEncoder
from .formats.model import MAX_FILE_BYTES, to_text
from .formats.shard import open_shard
from .order.bitmap import as_ids, ids_below
from .reading.bad_samples import BadData
from .reading.filters import Evaluation
from .reading.lengths import read_lengths
from .reading.reader import SampleReader
from .reading.shard_table import ReaderConfig, deleted_samples
from .reading.stream import Stream
from .reading.stream_shards import StreamShards
from .stores import open_store
from .version_log import Edit, Version, read_log, read_newest, read_version
from .version_log import publish as publish_version
from .writer.base import finalize_shard
from .writer.batch import batch_columns
from .writer.lengths import put_lengths
from .writer.pipeline import Pipeline
from .writer.place import Transaction, begun

_NAMING_HASH = "xxh3_128"  # of files of deleted samples
_PUTS = 8  # shards of a column that are put at the same time


@dataclass(frozen=True)
class LogEntry:
    """One version in the log of a dataset.

    Attributes:
        number, digest: What `Stream(version=...)` takes; of the digest, 6 digits or more.
        operation: ``"write"``, ``"append"``, ``"lengths"``, ``"delete"``, ``"column"`` or ``"compact"``.
        time: When it was made, in UTC; empty for version 0.
        num_samples, num_shards: Those of the version; None for a version 0 that is not the newest.
        message, key: What its writer noted.
    """

    number: int
    digest: str
    operation: str
    time: str = ""
    num_samples: int | None = None
    num_shards: int | None = None
    message: str = ""
    key: str = ""


def log(out: str | os.PathLike[str], *, store_options: Mapping[str, Any] | None = None) -> list[LogEntry]:
    """List the versions of a dataset, from the oldest to the newest.

    Example::

        for entry in versions.log("s3://bucket/train"):
            print(entry.number, entry.digest[:16], entry.num_samples, entry.message)

    Args:
        out: Folder or URL of the dataset.
        store_options: Options of its store.

    Raises:
        NotFoundError: There is no dataset.
    """
    published, changes = read_log(open_store(os.fspath(out), store_options))
    first = LogEntry(0, published.root, "write")
    if published.number == 0:
        index = published.index
        first = LogEntry(0, index.digest, "write", "", index.num_samples, index.num_shards)
    entries = [
        LogEntry(
            change.number,
            change.digest,
            change.operation,
            change.time,
            change.samples,
            change.num_shards,
            change.message,
            change.key,
        )
        for change in changes
    ]
    return [first, *entries]


def publish(out: str | os.PathLike[str], *, store_options: Mapping[str, Any] | None = None) -> None:
    """Put index.json as the newest version has it, for other MDS readers, which do not know the log.

    Each append to a dataset of up to about 3,000 shards does so; of a larger one, each 128th append.
    """
    store = open_store(os.fspath(out), store_options)
    publish_version(store, read_newest(store))


@checking
def delete_rows(
    out: str | os.PathLike[str],
    ids: Iterable[int] | NDArray[np.int64] | None = None,
    *,
    where: Callable[[dict[str, Any]], bool] | None = None,
    version: int | str | None = None,
    message: str = "",
    key: str | None = None,
    store_options: Mapping[str, Any] | None = None,
    allow_unsafe_types: bool = False,
) -> int:
    """Delete samples: a new version of the dataset does not have them. No shard is changed.

    The versions before keep the samples, and their bytes stay in the shards. Other MDS readers see them until
    `compact`. Several writers may delete and append at the same time.

    Example::

        versions.delete_rows("s3://bucket/train", where=lambda sample: sample["label"] < 0, message="no label")
        versions.delete_rows("s3://bucket/train", [17, 290])

    Args:
        out: Folder or URL of the dataset.
        ids: Ids of the samples as in the shards, which `StreamingDataset.original_ids` gives and which no deletion
            changes.
        where: Function of a sample (a dict) that returns whether it is deleted; the samples of the version are read
            once, in parallel. Pass either this or `ids`.
        version: The one whose samples these are, as `Stream` takes it, by default the newest: pass it where others may
            `compact` the dataset after you noted the ids.
        message: A note, which ``lightning-stream log`` shows.
        key: A name of this deletion; it is not made again if the dataset has a change of this key.
        store_options: Options of the store.
        allow_unsafe_types: Whether to decode the ``pkl`` encoding, which runs code that the data names.

    Returns:
        The number of samples that were deleted and had not been before.

    Raises:
        ValueError: Not exactly one of `ids` and `where`, or an id that is unknown.
        ConflictError: The dataset was overwritten or compacted after that version.
        NotFoundError: There is no dataset, or no such version.
    """
    if (ids is None) == (where is None):
        raise ValueError("delete_rows takes either ids or where; pass one of them.")
    if callable(ids) or not (where is None or callable(where)):
        raise TypeError("delete_rows takes a function of a sample as where=, and ids without a name.")
    place, base = _begun(out, version, store_options)
    if where is None:
        assert ids is not None
        deleted = np.unique(ids_below(as_ids(ids, "ids"), base.num_samples, "ids"))
    else:
        stream = Stream(out, version=base.digest, options=store_options)
        deleted = _matching(stream, where, allow_unsafe_types)
    counts = [0]

    def edit(version: Version) -> Edit:
        index = version.index
        _refuse_compacted(base, index)
        before = deleted_samples(ShardCache(place.store), index)
        all_deleted = np.union1d(before, deleted).astype("<i8")
        counts[0] = len(all_deleted) - len(before)
        data = all_deleted.tobytes()
        hashes = hashes_to_write([name for schema in index.schemas for name in schema.hashes] or None)
        name = f"deleted.{digest(_NAMING_HASH, data)[:16]}.bin"
        file = FileEntry(name, len(data), digest_parts(hashes, [data]), len(all_deleted))
        place.store.put(file.basename, data)
        return Edit("delete", (), {}, message, key or "", file)

    is_new = (len(deleted) or key) and place.commit(edit)
    return counts[0] if is_new else 0


@checking
def add_column(
    out: str | os.PathLike[str],
    name: str,
    encoding: str,
    values: Callable[[dict[str, Any]], Any] | Iterable[Any] | NDArray[Any],
    *,
    version: int | str | None = None,
    message: str = "",
    store_options: Mapping[str, Any] | None = None,
    allow_unsafe_types: bool = False,
) -> int:
    """Add a column to all samples: a new version of the dataset has it. No shard is changed.

    The values are put in shards of their own, one beside each shard, which readers join to it by the number of the
    sample; readers that do not want the column do not fetch them. Ids and order of the samples stay the same. Samples
    that are appended later need the column, too. Other MDS readers see it after `compact`.

    Example::

        versions.add_column("s3://bucket/train", "length", "int", lambda sample: len(sample["text"]))
        newest = versions.log("s3://bucket/train")[-1].digest
        scores = [score(sample) for sample in StreamingDataset("s3://bucket/train", version=newest)[:]]
        versions.add_column("s3://bucket/train", "score", "float32", scores, version=newest, message="scored by v3")

    Args:
        out: Folder or URL of the dataset.
        name, encoding: The column, and its encoding as in `MDSWriter(columns=...)`.
        values: A value per sample of the version, in its order, as ``dataset[i]`` has it without a filter; or a
            function of a sample (a dict), which reads all samples of the newest version once.
        version: The one that has a sample for each value, as `Stream` takes it, by default the newest: pass it where
            others may change the dataset while you compute them. Samples that were deleted since do no harm.
        message: A note, which ``lightning-stream log`` shows; by default the name.
        store_options: Options of the store.
        allow_unsafe_types: Whether to decode the ``pkl`` encoding, which runs code that the data names.

    Returns:
        The number of samples that got a value.

    Raises:
        FileExistsError: The dataset has such a column.
        ValueError: Another number of values, values that the encoding does not take, or an unknown encoding.
        ConflictError: Samples were appended after that version for which there are no values, or the dataset was
            compacted.
        NotFoundError: There is no dataset, or no such version.
    """
    place, base = _begun(out, version, store_options)
    url = place.store.url
    shards = list[bytes]()
    counts = [0]

    def edit(version: Version) -> Edit:
        index = version.index
        _refuse_compacted(base, index)
        if index.num_samples == index.num_deleted:
            raise ValueError(f"add_column needs a dataset with samples; {url} has none.")
        if any(name in columns for columns in index.column_sets):
            raise FileExistsError(f"{url} has a column {name!r} already. Choose another name.")
        if len(index) > len(shards):
            if len(index) > len(base) and not callable(values):
                raise ConflictError(f"{url} got new samples meanwhile, which have no values of {name!r}")
            source = index if callable(values) else base
            stream = Stream(out, version=source.digest, options=store_options)
            with closing(_reader(stream, allow_unsafe_types)) as reader:
                counts[0] += _put_column(place, reader, {name: encoding}, values, shards)
        return Edit("column", shards, {}, message or name)

    place.commit(edit)
    return counts[0]


def compact(out: str | os.PathLike[str], *, message: str = "", store_options: Mapping[str, Any] | None = None) -> int:
    """Write the shards with deleted samples or added columns again, as plain shards of a new version; publish that.

    So other MDS readers do not see the deleted samples any more, and see the columns that were added. The samples keep
    their order, but the ids of those behind a deleted one change. The versions before keep their shards.

    Example: ``versions.compact("s3://bucket/train")``

    Returns:
        The number of shards that were written again.

    Raises:
        ValueError: A shard with deleted samples or added columns is not of the MDS format.
        ConflictError: Another writer changed the dataset meanwhile; it stays as it is.
    """
    place, index = begun(out, "edit", store_options)
    if index.deleted is None and not index.joined:
        return 0
    cache = ShardCache(place.store)
    mask = np.ones(index.num_samples, dtype=np.bool_)
    mask[deleted_samples(cache, index)] = False
    entries = list[bytes]()
    num_written = 0
    offsets = np.cumsum(index.shard_sizes) - index.shard_sizes
    for shard, is_live in enumerate(np.split(mask, offsets)[1:]):
        if is_live.all() and len(index.entries(shard)) == 1:
            entries.append(index.text(shard))
            continue
        name = f"shard.{place.next_shard + num_written:05}.mds"
        num_written += 1
        if is_live.any():
            again = _written_again(place, name, cache, index.entries(shard), np.flatnonzero(is_live))
            entries.append(to_text(again))
    lengths = {name: read_lengths([cache], [index], name)[mask] for name in index.lengths}
    files = put_lengths(place, lengths, index.schemas[0].hashes if index.schemas else ())
    place.commit(Edit("compact", entries, files, message))
    publish(out, store_options=store_options)
    return num_written


def _written_again(
    place: Transaction, name: str, cache: ShardCache, entries: Sequence[ShardEntry], rows: NDArray[np.int64]
) -> ShardEntry:
    """Put a shard of some samples of others that are joined, with the bytes that they have there; return its entry."""
    schema = entries[0].schema
    stored = dict[str, BinaryColumn]()
    for entry in entries:
        if entry.format != "mds":
            raise ValueError(f"only shards of the MDS format can be compacted; {entry.raw.basename} is {entry.format}.")
        as_stored = dict.fromkeys(entry.schema.names, bytes)
        with cache.lease(entry) as lease, closing(open_shard(entry, lease.folder, decoders=as_stored)) as shard:
            for column, values in shard.columns(rows).items():
                stored[column] = BinaryColumn(values)
                stored[column].encoding = entry.schema.columns[column]
    encodings = {column: values.encoding for column, values in stored.items()}
    encoder = MdsEncoder(encodings, schema.compression, schema.hashes, schema.size_limit)
    return _put_rows(place, name, encoder, stored, len(rows))


def _put_rows(
    place: Transaction, name: str, encoder: MdsEncoder, columns: Mapping[str, Any], num_rows: int
) -> ShardEntry:
    """Put a shard of these rows; return its entry."""
    encoded = encoder.encode_batch(dict(columns), num_rows)
    if encoder.header_bytes + int(encoded.sizes.sum()) + 4 * num_rows > MAX_FILE_BYTES:
        raise ValueError(f"a shard must stay under 4 GiB; {name} has more. Write the dataset again with a size_limit.")
    return finalize_shard(name, encoder, encoded.sizes.tolist(), list(encoded.chunks()), place)


def _matching(stream: Stream, where: Callable[[dict[str, Any]], bool], allow_unsafe_types: bool) -> NDArray[np.int64]:
    """The ids of the samples of a version for which a function returns True."""
    with closing(_reader(stream, allow_unsafe_types)) as reader:
        mask = Evaluation(reader, where, BadData()).mask()
        return reader.original_ids(np.flatnonzero(mask))


def _reader(stream: Stream, allow_unsafe_types: bool) -> SampleReader:
    """A reader of a version: what is written must come from verified shards."""
    config = ReaderConfig(allow_unsafe_types=allow_unsafe_types, start_by_range=False)
    return SampleReader(StreamShards([stream], config=config))


def _begun(
    out: str | os.PathLike[str], version: int | str | None, store_options: Mapping[str, Any] | None
) -> tuple[Transaction, Index]:
    """Begin a change; return it with the index of the version whose samples are meant."""
    wanted = Stream(out, version=version, options=store_options).version
    place, newest = begun(out, "append", store_options)
    return place, newest if wanted is None else read_version(place.store, wanted).index


def _refuse_compacted(base: Index, now: Index) -> None:
    """Raise ConflictError unless the samples of a version have the same ids in a later one."""
    if not now.begins_with(base):
        raise ConflictError(
            f"{now.where} was compacted meanwhile, so its samples have other ids. Look the samples up in its newest "
            "version, and call this again."
        )


def _put_column(
    place: Transaction, reader: SampleReader, column: Mapping[str, str], values: Any, shards: list[bytes]
) -> int:
    """Put a shard with a further column for each shard of a version from ``len(shards)`` on, and list them there.

    Returns the number of samples that got a value.
    """
    (index,) = reader.indexes
    (name,) = column
    ends = reader.snapshot.shard_offsets
    schema = index.schemas[0]
    total = reader.snapshot.num_samples
    encoder = MdsEncoder(column, schema.compression, schema.hashes or hashes_to_write(None), None)
    take = partial(_computed, values, reader)
    if not callable(values):
        columns, count = batch_columns({name: list(values) if isinstance(values, Iterator) else values})
        if count != total:
            deleted = f" (without {index.num_deleted:,} deleted ones)" if index.num_deleted else ""
            raise ValueError(f"add_column takes a value per sample, {total:,}{deleted}; got {count:,}.")
        take = partial(_take, plain_values(columns[name]))
    begin = len(shards)
    pipeline = Pipeline[ShardEntry](_PUTS)
    firsts = np.cumsum(index.shard_sizes) - index.shard_sizes
    try:
        for shard in range(begin, len(index)):
            # Deleted samples get the value of another one, which no version shows.
            ids = np.arange(ends[shard], ends[shard + 1]) if ends[shard] < ends[shard + 1] else np.zeros(1, np.int64)
            all_rows = firsts[shard] + np.arange(index.shard_sizes[shard])
            rows = np.searchsorted(reader.original_ids(ids), all_rows).clip(max=len(ids) - 1)
            column_values = {name: _take(take(ids), rows)}
            pipeline.submit(partial(_put_rows, place, f"shard.{shard:05}.mds", encoder, column_values, len(rows)))
        shards += map(to_text, pipeline.finish())
    finally:
        pipeline.close()
    return total - int(ends[begin])


def _computed(function: Callable[[dict[str, Any]], Any], reader: SampleReader, ids: NDArray[np.int64]) -> list[Any]:
    with reader.read_ahead(ids):
        return [function(reader.sample(sample)) for sample in ids.tolist()]


def _take(values: Any, rows: NDArray[np.int64]) -> Any:
    """Some values of a column."""
    if isinstance(values, np.ndarray):
        return values[rows]
    return [values[row] for row in rows.tolist()]
