"""Versions of a dataset that others can read meanwhile: its log, deleted samples, and index.json for other readers.

Samples are appended by `MDSWriter(append=True)`; `Stream(version=...)` reads a version. docs/storage.md explains both.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_stream.cache import ShardCache
from lightning_stream.errors import AlreadyExistsError, ConflictError
from lightning_stream.formats.hashing import digest
from lightning_stream.formats.index import FileEntry, Index, ShardEntry
from lightning_stream.formats.index.schema import MAX_FILE_BYTES
from lightning_stream.formats.mds.encode import MdsEncoder
from lightning_stream.formats.mds.shard import MdsShard
from lightning_stream.formats.shard import open_shard
from lightning_stream.order.bitmap import Bitmap, as_ids
from lightning_stream.reading.bad_samples import bad_data
from lightning_stream.reading.deleted import deleted_samples
from lightning_stream.reading.filters import Evaluation
from lightning_stream.reading.lengths import read_lengths
from lightning_stream.reading.reader import SampleReader
from lightning_stream.reading.stream import CacheDefaults, Stream
from lightning_stream.reading.stream_shards import ReaderConfig
from lightning_stream.stores import open_store
from lightning_stream.version_log import Edit, Version, commit, read_log, read_newest
from lightning_stream.version_log import publish as publish_version
from lightning_stream.writer.base import finalize_shard
from lightning_stream.writer.lengths import put_lengths
from lightning_stream.writer.place import DatasetPlace
from lightning_stream.writer.shard_buffer import Pool, ShardBuffer

_HASH = "xxh3_128"


@dataclass(frozen=True)
class LogEntry:
    """One version in the log of a dataset.

    Attributes:
        number, digest: What `Stream(version=...)` takes; of the digest, 6 digits or more.
        operation: ``"write"``, ``"append"``, ``"lengths"``, ``"delete"`` or ``"compact"``.
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
        LogEntry(one.number, one.digest, one.operation, one.time, one.samples, one.num_shards, one.message, one.key)
        for one in changes
    ]
    return [first, *entries]


def publish(out: str | os.PathLike[str], *, store_options: Mapping[str, Any] | None = None) -> None:
    """Put index.json as the newest version has it, for other MDS readers, which do not know the log.

    Each append to a dataset of up to about 3,000 shards does so; of a larger one, each 128th append.
    """
    store = open_store(os.fspath(out), store_options)
    publish_version(store, read_newest(store))


def delete_rows(
    out: str | os.PathLike[str],
    ids: Iterable[int] | NDArray[np.int64] | None = None,
    *,
    where: Callable[[dict[str, Any]], bool] | None = None,
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
        where: Function of a sample (a dict) that returns whether it is deleted; the samples of the newest version are
            read once, in parallel. Pass either this or `ids`.
        message: A note, which ``lightning-stream log`` shows.
        key: A name of this deletion; it is not made again if the dataset has a change of this key.
        store_options: Options of the store.
        allow_unsafe_types: Whether to decode the ``pkl`` encoding, which runs code that the data names.

    Returns:
        The number of samples that were deleted and had not been before.

    Raises:
        ValueError: Not exactly one of `ids` and `where`, or an id that is unknown.
        ConflictError: The dataset was overwritten meanwhile.
    """
    if (ids is None) == (where is None):
        raise ValueError("delete_rows takes either ids or where; pass one of them.")
    store = open_store(os.fspath(out), store_options)
    base = read_newest(store)
    if where is None:
        given = _checked(ids, base.index)
    else:
        stream = Stream(out, version=base.index.digest, options=store_options)
        given = _matching(stream, where, allow_unsafe_types)
    counts = [0]

    def edit(version: Version) -> Edit:
        texts = (version.index.text(shard) for shard in range(len(version.index)))
        if not all(text == base.index.text(shard) for shard, text in zip(range(len(base.index)), texts, strict=False)):
            raise ConflictError(f"{store.url} was compacted meanwhile: its samples have other ids. Delete them again.")
        before = deleted_samples(ShardCache(store), version.index)
        all_deleted = np.union1d(before, given).astype("<i8")
        counts[0] = len(all_deleted) - len(before)
        data = all_deleted.tobytes()
        found = digest(_HASH, data)
        file = FileEntry(f"deleted.{found[:16]}.bin", len(data), {_HASH: found})
        store.put(file.basename, data)
        return Edit("delete", (), {}, message, key or "", file)

    if len(given) or key:
        try:
            publish_version(store, commit(store, base, edit), always=False)
        except AlreadyExistsError:  # the change of this key
            return 0
    return counts[0]


def compact(out: str | os.PathLike[str], *, message: str = "", store_options: Mapping[str, Any] | None = None) -> int:
    """Write the shards that have deleted samples again, without them, as a new version, and publish that.

    So other MDS readers do not see the deleted samples any more. The samples keep their order, but the ids of those
    behind a deleted one change. The versions before keep their shards.

    Example: ``versions.compact("s3://bucket/train")``

    Returns:
        The number of shards that were written again.

    Raises:
        ValueError: A shard with deleted samples is not of the MDS format.
        ConflictError: Another writer changed the dataset meanwhile; it stays as it is.
    """
    place = DatasetPlace(os.fspath(out), store_options=store_options)
    place.begin("edit")
    index, cache = place.base, ShardCache(place.store)
    if index is None or index.deleted is None:
        return 0
    ends = np.cumsum(index.shard_sizes)
    groups = np.split(gone := deleted_samples(cache, index), np.searchsorted(gone, ends)[:-1])
    entries, num_written = list[bytes](), 0
    for shard, ids in enumerate(groups):
        if not len(ids):
            entries.append(index.text(shard))
            continue
        num_written += 1
        kept = np.setdiff1d(np.arange(index.shard_sizes[shard]), ids - (ends[shard] - index.shard_sizes[shard]))
        if len(kept):
            name = f"shard.{place.next_shard + num_written - 1:05}.mds"
            entry = _written_again(place, name, cache, index.entry(shard), kept)
            entries.append(json.dumps(entry, sort_keys=True).encode())
    mask = np.ones(index.num_samples, dtype=np.bool_)
    mask[gone] = False
    lengths = {name: read_lengths([cache], [index], name)[mask] for name in index.lengths}
    files = put_lengths(place, lengths, index.schemas[0].hashes, {})
    place.commit_edit(Edit("compact", entries, files, message))
    publish_version(place.store, read_newest(place.store))
    return num_written


def _written_again(
    place: DatasetPlace, name: str, cache: ShardCache, entry: ShardEntry, kept: NDArray[np.int64]
) -> dict[str, Any]:
    """Put a shard of some samples of another one, with the bytes that they have there; return its index entry."""
    schema = entry.schema
    with cache.lease(entry) as lease:
        shard = open_shard(entry, lease.folder, allow_unsafe_types=True)  # no value is decoded
        if not isinstance(shard, MdsShard):
            raise ValueError(f"only shards of the MDS format can be compacted; {entry.raw.basename} is {entry.format}.")
        encoder = MdsEncoder(schema.columns, schema.compression, schema.hashes, schema.size_limit)
        buffer = ShardBuffer(Pool(), encoder.header_bytes)
        for number in kept.tolist():
            buffer.add_sample([bytes(shard.stored(number))], encoder.per_sample_overhead, MAX_FILE_BYTES)
        shard.close()
    return finalize_shard(name, encoder, buffer, place)


def _checked(ids: Any, index: Index) -> NDArray[np.int64]:
    found = as_ids(ids, "ids")
    if (unknown := found[(found < 0) | (found >= index.num_samples)]).size:
        raise ValueError(
            f"ids are those of samples, 0 to {index.num_samples - 1}; found {unknown.size:,} others, e.g. "
            f"{unknown[:3].tolist()}. Check which data they were noted for."
        )
    return np.unique(found.astype(np.int64))


def _matching(stream: Stream, where: Callable[[dict[str, Any]], bool], allow_unsafe_types: bool) -> NDArray[np.int64]:
    """The ids of the samples of a version for which a function returns True."""
    reader = SampleReader([stream], CacheDefaults(), ReaderConfig(allow_unsafe_types=allow_unsafe_types))
    try:
        everything = Bitmap.of_mask(np.ones(reader.snapshot.num_samples, dtype=np.bool_))
        mask = Evaluation(reader, everything, where, bad_data("raise", "raise", None, 0)).mask()
        return reader.original_ids(np.flatnonzero(mask))
    finally:
        reader.close()
