"""Versions of a dataset that others can read meanwhile: its log, deleted samples, and index.json for other readers.

Samples are appended by `MDSWriter(append=True)`; `Stream(version=...)` reads a version. docs/storage.md explains both.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_stream.cache import ShardCache
from lightning_stream.errors import AlreadyExistsError
from lightning_stream.formats.hashing import digest
from lightning_stream.formats.index import FileEntry, Index
from lightning_stream.order.bitmap import Bitmap
from lightning_stream.reading.bad_samples import bad_data
from lightning_stream.reading.deleted import deleted_samples
from lightning_stream.reading.filters import Evaluation
from lightning_stream.reading.reader import ReaderConfig, SampleReader
from lightning_stream.reading.stream import CacheDefaults, Stream
from lightning_stream.stores import open_store
from lightning_stream.version_log import Edit, Version, commit, read_log, read_newest
from lightning_stream.version_log import publish as publish_version

_HASH = "xxh3_128"


@dataclass(frozen=True)
class LogEntry:
    """One version in the log of a dataset.

    Attributes:
        number, digest: What `Stream(version=...)` takes; of the digest, 6 digits or more.
        operation: ``"write"``, ``"append"``, ``"lengths"`` or ``"delete"``.
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

    The versions before keep the samples, and their bytes stay in the shards. Other MDS readers ignore deletions.
    Several writers may delete and append at the same time.

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


def _checked(ids: Any, index: Index) -> NDArray[np.int64]:
    found = np.asarray(ids if isinstance(ids, np.ndarray) else list(ids))
    if found.size and found.dtype.kind not in "iu":
        raise TypeError(f"ids are whole numbers; found {found.dtype} values like {found.ravel()[0]!r}.")
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
