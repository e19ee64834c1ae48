"""From sample ids to samples and columns: streams, their shards, and reading ahead.

A `Stream` is one dataset (one index.json) in a mix. A `SampleReader` joins streams into one space of sample ids
(streams one after another, shards in index order), keeps a bounded number of shards mapped, and fetches those that
are needed soon in threads of its own.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_stream.cache import CacheConfig, ShardCache
from lightning_stream.formats.columns import gather, gather_mixed
from lightning_stream.formats.index import INDEX_NAME, Index, ShardEntry
from lightning_stream.formats.mds import MdsShard
from lightning_stream.formats.shard import Shard, open_shard
from lightning_stream.order import Snapshot, StreamWeights
from lightning_stream.reading.fetches import ReaderProcess
from lightning_stream.reading.file_limit import is_limit_reached, make_room_for, too_many
from lightning_stream.reading.next_use import next_use_of_file
from lightning_stream.reading.range_reads import SampleRanges
from lightning_stream.storage import Store, open_store
from lightning_stream.storage.threads import DaemonPool


class Stream:
    """One dataset in a mix, under the arguments MDS users know.

    Args:
        remote: Folder or URL that holds the dataset; None where `local` is the only copy.
        local: The cache folder; None for a private one chosen from the URL, or for reading a local `remote` in place.
        split: Sub-folder of both, e.g. ``"train"``.
        proportion: Share of the epoch that comes from this stream, relative to the other streams' proportions.
        repeat: How often its samples are drawn per epoch (2.5: each twice, half of them a third time).
        choose: How many samples are drawn from it per epoch.
        download_retry: How often a failed request is tried again; None takes the dataset's.
        download_timeout: Longest silence on a connection, in seconds; None takes the dataset's.
        validate_hash: Name of the hash to check fetched files with, None to check what the index has.
        keep_zip: Whether compressed files stay in the cache after decompression; None takes the dataset's.
        options: Further options of the store, e.g. ``{"endpoint_url": ...}``.

    Raises:
        ValueError: Neither `remote` nor `local`, one of them names the index and not its folder, or more than one of
            proportion, repeat and choose.
    """

    def __init__(
        self,
        *,
        remote: str | os.PathLike[str] | None = None,
        local: str | os.PathLike[str] | None = None,
        split: str | None = None,
        proportion: float | None = None,
        repeat: float | None = None,
        choose: int | None = None,
        download_retry: int | None = None,
        download_timeout: float | None = None,
        validate_hash: str | None = None,
        keep_zip: bool | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        if remote is None and local is None:
            raise ValueError(
                "a stream reads from somewhere: pass remote= (a folder or URL), or local= (a folder), or both"
            )
        for place in (remote, local):
            if place is not None and os.fspath(place).rstrip("/").endswith(f"/{INDEX_NAME}"):
                folder = os.fspath(place).rstrip("/").removesuffix(f"/{INDEX_NAME}")
                raise ValueError(f"a stream is named by its folder, not by its index; found {place}. Pass {folder!r}")
        self.remote = None if remote is None else os.path.expanduser(os.fspath(remote))  # noqa: PTH111 - may be a URL
        self.local = None if local is None else Path(local)
        self.split = split or ""
        self.weights = StreamWeights(proportion=proportion, repeat=repeat, choose=choose)
        self.download_retry = download_retry
        self.download_timeout = download_timeout
        self.validate_hash = validate_hash
        self.keep_zip = keep_zip
        self.options = dict(options or {})

    def __repr__(self) -> str:
        return f"Stream({self.name!r})"

    @property
    def name(self) -> str:
        """Where it comes from, for messages; without secrets."""
        where = self._store().url if self.remote is not None else str(self.local)
        return f"{where}/{self.split}" if self.split and self.remote is None else where

    def cache(self, defaults: CacheDefaults) -> ShardCache:
        """The cache its shards are read through, with the dataset's settings where it has none of its own."""
        folder = None if self.local is None else self.local / self.split
        config = replace(
            defaults.config,
            keep_zip=defaults.config.keep_zip if self.keep_zip is None else self.keep_zip,
            validate_hash=self.validate_hash or defaults.config.validate_hash,
        )
        return ShardCache(self._store(defaults) if self.remote is not None else None, folder, config)

    def _store(self, defaults: CacheDefaults | None = None) -> Store:
        assert self.remote is not None
        retries = self.download_retry if self.download_retry is not None else defaults and defaults.retries
        timeout = self.download_timeout if self.download_timeout is not None else defaults and defaults.timeout_s
        common = {"retries": retries, "timeout_s": timeout}
        url = f"{self.remote.rstrip('/')}/{self.split}" if self.split else self.remote
        return open_store(url, {**{k: v for k, v in common.items() if v is not None}, **self.options})


@dataclass(frozen=True)
class CacheDefaults:
    """What a dataset sets for all its streams."""

    config: CacheConfig = field(default_factory=CacheConfig)
    retries: int | None = None
    timeout_s: float | None = None


@dataclass(frozen=True)
class ReaderConfig:
    """Bounds of what a reader holds at once, per process.

    Attributes:
        max_open_shards: Shards mapped at the same time.
        fetch_threads: Shards fetched at the same time.
        allow_unsafe_types: Whether the ``pkl`` encoding may be decoded: it runs code that the data names.
        decoders: Column name to what turns its stored bytes into a value, instead of its encoding.
        start_by_range: Whether samples of shards that are still on their way may come by ranges of their own.
    """

    max_open_shards: int = 256
    fetch_threads: int = 4
    allow_unsafe_types: bool = False
    decoders: Mapping[str, Callable[[bytes], Any]] | None = None
    start_by_range: bool = False


class SampleReader:
    """Reads samples of several streams by sample id. Picklable; safe under fork and threads.

    Nothing is read or fetched before the first use.
    """

    def __init__(self, streams: Sequence[Stream], defaults: CacheDefaults, config: ReaderConfig) -> None:
        self.streams = tuple(streams)
        self.defaults = defaults
        self.config = config
        self._process: ReaderProcess | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_process": None}

    @cached_property
    def caches(self) -> tuple[ShardCache, ...]:
        """One cache per stream."""
        return tuple(stream.cache(self.defaults) for stream in self.streams)

    @cached_property
    def indexes(self) -> tuple[Index, ...]:
        """One parsed index per stream; fetched on first use."""
        return tuple(
            Index.from_bytes(cache.newest_index(), where=stream.name)
            for stream, cache in zip(self.streams, self.caches, strict=True)
        )

    @cached_property
    def snapshot(self) -> Snapshot:
        """What the data is, as the order needs to know it."""
        return Snapshot.of(
            [index.shard_sizes for index in self.indexes],
            names=[stream.name for stream in self.streams],
            stream_digests=[index.digest for index in self.indexes],
        )

    @cached_property
    def _mixed_columns(self) -> dict[str, bool] | None:
        """All columns, and whether all of the data has them in one encoding; None where all shards have the same."""
        schemas = [schema for index in self.indexes for schema in index.schemas]
        if len({(schema.format, schema.names, schema.encodings) for schema in schemas}) <= 1:
            return None
        encodings = [schema.columns for schema in schemas]
        names = dict.fromkeys(name for columns in encodings for name in columns)
        return {name: len({columns.get(name) for columns in encodings}) == 1 for name in names}

    def require_samples(self) -> None:
        """Raise ValueError where there is nothing to iterate over."""
        if self.snapshot.num_samples == 0:
            names = ", ".join(stream.name for stream in self.streams)
            raise ValueError(
                f"there must be samples to iterate over; {names} has none in {self.snapshot.num_shards} shards. "
                "Check what its writer was given, or which samples were chosen."
            )

    def entry(self, shard: int) -> tuple[ShardCache, ShardEntry]:
        """Cache and index entry of a shard number."""
        stream = int(np.searchsorted(self.snapshot.stream_offsets, shard, side="right")) - 1
        return self.caches[stream], self.indexes[stream].entry(shard - int(self.snapshot.stream_offsets[stream]))

    def sample(self, sample_id: int) -> dict[str, Any]:
        """Read one sample: column name to value."""
        offsets = self.snapshot.shard_offsets
        number = int(offsets.searchsorted(sample_id, side="right")) - 1
        within, process = sample_id - int(offsets[number]), self._mine()
        with process.lock:
            if (shard := process.open.get(number)) is not None:
                return shard.sample(within)
        if part := self._by_range(process, [number], lambda _: np.array([within])):
            return part[number].sample(0)
        with process.lock:
            try:
                return self._shard(process, number).sample(within)
            finally:
                self._let_go(process, [number])

    def open_for(self, sample_id: int) -> None:
        """See that the sample's shard can be had and opened, without reading from it."""
        process, number = self._mine(), int(self.snapshot.shards_of(np.array([sample_id]))[0])
        with process.lock:
            self._shard(process, number)
            self._let_go(process, [number])

    def batch(self, ids: NDArray[np.int64], out: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Gather samples as columns, in the order of `ids`.

        Args:
            ids: Sample ids, int64[n].
            out: Writable buffers (arrays, pinned or shared memory) that fixed-size columns are gathered into.

        Returns:
            Column name to an array of n rows (numbers and arrays of fixed shape) or a list of n values.

            Where streams have different columns: all of them, whatever this batch draws from; columns that not every
            stream has in the same encoding are lists, with None where a sample lacks the column.
        """
        if not len(ids):
            raise ValueError("a batch needs at least one sample id, since its columns are those of its samples")
        of_shard, within = self.snapshot.locate(ids)
        process = self._mine()
        with process.lock:
            columns = None if self._mixed_columns else process.open.gather(of_shard, within, out)
        return columns or self._batch_shard_by_shard(process, of_shard, within, out)

    def _batch_shard_by_shard(
        self,
        process: ReaderProcess,
        of_shard: NDArray[np.int64],
        within: NDArray[np.int64],
        out: Mapping[str, Any] | None,
    ) -> dict[str, Any]:
        """A batch where not all shards are open yet, or not all have the same columns."""
        numbers, which = np.unique(of_shard, return_inverse=True)
        parts = self._by_range(process, numbers.tolist(), lambda k: np.unique(within[which == k]))
        for k in (numbers.searchsorted(number) for number in parts):
            within[which == k] = np.unique(within[which == k], return_inverse=True)[1]
        with process.lock:
            try:
                shards = [parts.get(number) or self._shard(process, number) for number in numbers.tolist()]
                if self._mixed_columns is None:
                    return gather(shards, which, within, out)
                return gather_mixed(shards, which, within, self._mixed_columns, out)
            finally:  # not before, since a batch may span more shards than the bound
                self._let_go(process, numbers.tolist())

    def _let_go(self, process: ReaderProcess, numbers: list[int]) -> None:
        """Close what is over the bound; under a cache limit also these shards, where no announced batch needs them:
        what is open cannot be evicted, and without a plan nobody knows when it will be read again."""
        process.open.close_all_but(self.config.max_open_shards)
        if self.defaults.config.limit_bytes is not None:
            for number in numbers:
                if process.awaited[number] <= 0:
                    process.open.close(number)

    def read_ahead(self, ids: NDArray[np.int64]) -> None:
        """Begin to fetch the shards of `ids` that are not here, in the order of their first use.

        Each call is answered by one of `done_with`, once the samples were read.
        """
        process, is_limited = self._mine(), self.defaults.config.limit_bytes is not None
        with process.lock:
            of_shard = self.snapshot.shards_of(ids)
            if not is_limited and process.open.has(of_shard):
                return
            numbers = dict.fromkeys(of_shard.tolist())
            if is_limited:
                process.awaited.update(list(numbers))
            new = [number for number in numbers if number not in process.open and number not in process.fetches]
            process.fetches.update(zip(new, process.fetch([self.entry(number) for number in new]), strict=True))

    @property
    def has_all_open(self) -> bool:
        """Whether every shard is mapped, and stays so."""
        if self.defaults.config.limit_bytes is not None:
            return False
        return len(self._mine().open) == self.snapshot.num_shards <= self.config.max_open_shards

    def could_fetch_more(self) -> bool:
        """Whether shards are waited for while connections are idle. Never under a cache limit: what it must hold is
        reckoned from how far is read ahead."""
        return self.defaults.config.limit_bytes is None and self._mine().could_fetch_more()

    def done_with(self, ids: NDArray[np.int64]) -> None:
        """Take back what `read_ahead` announced. Under a cache limit, shards that no announced batch needs are let go,
        so that they may be evicted."""
        if self.defaults.config.limit_bytes is None:
            return
        process = self._mine()
        with process.lock:
            for number in set(self.snapshot.shards_of(ids).tolist()):
                process.awaited[number] -= 1
                if process.awaited[number] <= 0:
                    del process.awaited[number]
                    process.open.close(number)

    def fetch(self, shards: NDArray[np.int64]) -> None:
        """Have shards in the cache, several fetched at once; returns when all were, raises the first failure."""
        with DaemonPool(self.config.fetch_threads, "fetch") as pool:
            for fetch in [pool.submit(cache.ensure, entry) for cache, entry in map(self.entry, shards.tolist())]:
                fetch.result()

    def plan(self, next_use: Callable[[int], float]) -> None:
        """Under a cache limit: evict what is needed latest, by shard number; without one nothing is evicted."""
        if self.defaults.config.limit_bytes is None:
            return
        for stream, (cache, index) in enumerate(zip(self.caches, self.indexes, strict=True)):
            first = int(self.snapshot.stream_offsets[stream])
            numbers = {index.entry(shard).raw.basename: first + shard for shard in range(index.num_shards)}
            cache.plan(partial(next_use_of_file, numbers, next_use))

    def close(self) -> None:
        """Let go of every mapped shard."""
        if self._process is not None and self._process.pid == os.getpid():
            self._process.close()
        self._process = None

    def _mine(self) -> ReaderProcess:
        """This process's handles: those of the process that forked us stay its own."""
        if self._process is None or self._process.pid != os.getpid():
            ranges = SampleRanges(self.config.allow_unsafe_types, self.config.decoders)
            self._process = ReaderProcess(self.snapshot.num_shards, self.config.fetch_threads, ranges)
        return self._process

    def _by_range(
        self, process: ReaderProcess, numbers: list[int], indices: Callable[[int], NDArray[np.int64]]
    ) -> dict[int, MdsShard]:
        """Of shards neither here nor on their way: the samples wanted of the k-th alone, where that is cheaper."""
        if all(cache.in_place for cache in self.caches):
            return {}
        found = {}
        for k, number in enumerate(numbers):
            fetch = process.fetches.get(number)
            is_late = fetch is None or (self.config.start_by_range and not fetch.done())
            if number not in process.open and is_late:
                samples = indices(k)
                if self.ranges_are_cheaper(number, len(samples)):
                    found[number] = (*self.entry(number), samples)
        return process.ranges.shards(found) if found else {}

    def ranges_are_cheaper(self, number: int, num_samples: int) -> bool:
        """Whether so many samples of a shard that is not here cost less by ranges than the shard."""
        return self._mine().ranges.cheaper(number, *self.entry(number), num_samples)

    def _shard(self, process: ReaderProcess, number: int) -> Shard:
        """A mapped shard, fetched where it is not here. The caller holds the process's lock."""
        shard = process.open.get(number)
        if shard is not None:
            return shard
        cache, entry = self.entry(number)
        fetch = process.fetches.pop(number, None)
        make_room_for(len(process.open) + len(process.fetches) + 1)
        try:
            lease = fetch.result() if fetch is not None else cache.lease(entry, None, self.config.fetch_threads)
            shard = open_shard(
                entry,
                lease.folder,
                allow_unsafe_types=self.config.allow_unsafe_types,
                decoders=self.config.decoders,
            )
        except OSError as error:
            if is_limit_reached(error):
                raise too_many(len(process.open)) from error
            raise
        process.ranges.compare(number, shard, f"{cache.store.url}/{entry.raw.basename}")
        process.open.add(number, shard, lease)
        return shard
