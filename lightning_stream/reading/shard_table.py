"""The shards of all streams by id, with the shards of added columns that are joined to them.

The shards of the streams have the ids 0 to n - 1, one stream after another. Those with a stream's first added
columns have the ids from n on, in the same order: shard k and shard n + k have the same samples. Those with the
second added columns have the ids from 2n on, and so on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from lightning_stream.cache import ShardCache, Spaces
from lightning_stream.counters import Counters
from lightning_stream.errors import FormatError
from lightning_stream.formats.index import Index, ShardEntry, mixed_columns
from lightning_stream.formats.mds.layout import Decoders
from lightning_stream.formats.memory import Int64s
from lightning_stream.formats.rows import as_mds
from lightning_stream.formats.shard import Shard, open_shard
from lightning_stream.order import Snapshot
from lightning_stream.order.bitmap import Bitmap
from lightning_stream.reading.stream import CacheDefaults, Stream, cache_of, index_of, name_of, with_newest_lengths
from lightning_stream.threads import DaemonPool

T = TypeVar("T")
_STREAMS_AT_ONCE = 16


@dataclass(frozen=True)
class ReaderConfig:
    """Settings of a reader, per process.

    Attributes:
        max_open_shards: Shards mapped at the same time.
        fetch_threads: Shards fetched at the same time.
        allow_unsafe_types: Whether the ``pkl`` encoding may be decoded: it runs code that the data names.
        decoders: By column, a function from its stored bytes to a value, instead of its encoding.
        start_by_range: Whether samples may come by ranges while their shards are being fetched; None: where a whole
            batch may, within the reader's `spare_requests`. False: all come from verified shards alone.
        load_images: Whether images are decoded when they are read, which finds damaged pixels, and not later.
    """

    max_open_shards: int = 256
    fetch_threads: int = 4
    allow_unsafe_types: bool = False
    decoders: Decoders | None = None
    start_by_range: bool | None = None
    load_images: bool = False


class ShardTable:
    """The shards of streams: their caches and indexes. Picklable."""

    def __init__(
        self,
        streams: Sequence[Stream],
        defaults: CacheDefaults | None = None,
        config: ReaderConfig | None = None,
    ) -> None:
        self.streams = tuple(streams)
        self.defaults = defaults or CacheDefaults()
        self.config = config or ReaderConfig()
        self.counters = Counters()

    def __getstate__(self) -> dict[str, Any]:
        state = {**self.__dict__}
        state.pop("entry", None)
        return state

    @cached_property
    def caches(self) -> tuple[ShardCache, ...]:
        """One cache per stream."""
        together = Spaces()
        made = tuple(cache_of(stream, self.defaults, self.counters, together) for stream in self.streams)
        first: tuple[ShardCache, ...] = vars(self).setdefault("caches", made)  # of the threads that ask
        return first

    @cached_property
    def indexes(self) -> tuple[Index, ...]:
        """One parsed index per stream; fetched on first use."""
        return self._of_each(index_of, self.streams, self.caches)

    @cached_property
    def indexes_with_lengths(self) -> tuple[Index, ...]:
        """The indexes that list the lengths: the store is asked once, and workers have those of their trainer."""
        return self._of_each(with_newest_lengths, self.caches, self.indexes)

    def _of_each(self, read: Callable[..., T], *of_streams: Sequence[Any]) -> tuple[T, ...]:
        """What is read of each stream; of several at once, since a store takes some 20 ms to answer."""
        if len(self.streams) == 1:
            return (read(*next(zip(*of_streams, strict=True))),)
        with DaemonPool(min(_STREAMS_AT_ONCE, len(self.streams)), "streams") as pool:
            return tuple(pool.map(lambda values: read(*values), zip(*of_streams, strict=True)))

    @cached_property
    def undeleted(self) -> Bitmap | None:
        """Which of the samples in the shards are not deleted; None if no version has deleted any.

        Raises:
            NotFoundError, DigestError, FormatError: A file of deleted samples is absent or damaged.
        """
        if all(index.deleted is None for index in self.indexes):
            return None
        mask = np.ones(self.snapshot.num_samples, np.bool_)
        begin = 0
        deleted = self._of_each(deleted_samples, self.caches, self.indexes)
        for index, samples in zip(self.indexes, deleted, strict=True):
            mask[begin + samples] = False
            begin += index.num_samples
        return Bitmap.of_mask(mask)

    @cached_property
    def snapshot(self) -> Snapshot:
        """The samples in the shards, also deleted ones."""
        identities = [(index.digest, index.source_digest, index.table_version) for index in self.indexes]
        sizes = [index.shard_sizes for index in self.indexes]
        names = list(map(name_of, self.streams))
        return Snapshot.of(sizes, names, *zip(*identities, strict=True))

    @property
    def is_limited(self) -> bool:
        """Whether the caches have a limit."""
        return self.defaults.config.limit_bytes is not None

    @cached_property
    def num_shards(self) -> int:
        """The shards of the streams, without those that are joined to them."""
        return self.snapshot.num_shards

    @cached_property
    def exists(self) -> NDArray[np.bool_]:
        """Whether there is each shard, which there is, and a first, a second... shard joined to it."""
        num_joined = max((len(index.joined) for index in self.indexes), default=0)
        exists = np.zeros((1 + num_joined, self.num_shards), np.bool_)
        for first, index in zip(self.snapshot.stream_offsets.tolist(), self.indexes, strict=False):
            for row, part in zip(exists, (index, *index.joined), strict=False):
                row[first : first + len(part)] = True
        return exists

    @cached_property
    def num_joined(self) -> int:
        """The most shards that are joined to one."""
        return len(self.exists) - 1

    @cached_property
    def num_files(self) -> int:
        """All shards, also those that are joined to others."""
        return int(self.exists.sum())

    @cached_property
    def merged_columns(self) -> dict[str, bool] | None:
        """All columns, and whether all samples have them in one encoding; None where each shard has just these."""
        columns = mixed_columns(self.indexes)
        if columns is None and self.num_joined:
            return dict.fromkeys((name for index in self.indexes for name in index.columns), True)
        return columns

    def with_joined(self, shards: Int64s) -> Int64s:
        """The ids of shards, each before those that are joined to it."""
        if not self.num_joined:
            return shards
        shard_ids: Int64s = shards + self.num_shards * np.arange(len(self.exists))[:, None]
        present: Int64s = shard_ids.T[self.exists[:, shards].T]
        return present

    def parts(self, of_shard: Int64s) -> list[tuple[int, Int64s]]:
        """0 with all rows; 1, 2... with the rows whose shards (``of_shard``) have a first, a second... joined one."""
        parts = enumerate(np.flatnonzero(exists.take(of_shard)) for exists in self.exists)
        return [(k, rows) for k, rows in parts if len(rows)]

    @cached_property
    def entry(self) -> Callable[[int], tuple[ShardCache, ShardEntry]]:
        """Cache and index entry of a shard: several stages of a batch ask for it, and to parse it takes some 8 us."""
        return lru_cache(256)(self._entry)

    def _entry(self, shard_id: int) -> tuple[ShardCache, ShardEntry]:
        joined, shard = divmod(shard_id, self.num_shards)
        stream = self._stream_of(shard)
        index = self.indexes[stream].joined[joined - 1] if joined else self.indexes[stream]
        return self.caches[stream], index.entry(shard - int(self.snapshot.stream_offsets[stream]))

    def url_of(self, shard_id: int) -> str:
        """Where a shard's file is."""
        cache, entry = self.entry(shard_id)
        return f"{cache.store.url}/{entry.raw.basename}"

    def files(self, stream: int) -> dict[str, int]:
        """The shards of a stream by the names of their files; a joined shard counts as the one that it is joined to."""
        first = int(self.snapshot.stream_offsets[stream])
        index = self.indexes[stream]
        return {as_mds(entry).raw.basename: first + k for k in range(len(index)) for entry in index.entries(k)}

    def open(self, shard_id: int, entry: ShardEntry, folder: Path) -> Shard:
        """Open a shard, to read those of its columns that are chosen."""
        stream = self._stream_of(shard_id % self.num_shards)
        decoders = {name: decoder for name, decoder in self._decoders.items() if name in entry.schema.names}
        return open_shard(
            entry,
            folder,
            allow_unsafe_types=self.config.allow_unsafe_types,
            decoders=decoders,
            columns=self.indexes[stream].chosen,
        )

    def _stream_of(self, shard: int) -> int:
        return int(np.searchsorted(self.snapshot.stream_offsets, shard, side="right")) - 1

    @cached_property
    def _decoders(self) -> Decoders:
        """The decoders of columns; ValueError for those of no column."""
        decoders = self.config.decoders or {}
        known = {name for index in self.indexes for columns in index.column_sets for name in columns}
        if absent := decoders.keys() - known:
            raise ValueError(f"decoders: no column {min(absent)!r}; there are {', '.join(sorted(known))}.")
        return decoders


def deleted_samples(cache: ShardCache, index: Index) -> NDArray[np.int64]:
    """The numbers of a stream's deleted samples, in ascending order: int64[n]."""
    if index.deleted is None:
        return np.empty(0, np.int64)
    deleted = np.fromfile(cache.side_file(index.deleted), "<i8").astype(np.int64, copy=False)
    is_right = len(deleted) == index.num_deleted and (np.diff(deleted, prepend=-1) > 0).all()
    if not is_right or (deleted >= index.num_samples).any():
        raise FormatError(
            f"{cache.store.url}/{index.deleted.basename}: deleted samples must be different numbers below "
            f"{index.num_samples:,}, in ascending order. Restore the file."
        )
    return deleted
