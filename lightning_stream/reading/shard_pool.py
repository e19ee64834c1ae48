"""The shards that one process has open, and those that it fetches."""

from __future__ import annotations

import errno
import os
import resource
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import NamedTuple, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from lightning_stream.cache import InUseError, Lease, check_limit
from lightning_stream.errors import CacheError, FormatError
from lightning_stream.formats.encodings.base import FlatArrays
from lightning_stream.formats.mds.gather import SpanTable, flat_arrays, gather_rows
from lightning_stream.formats.memory import Int64s
from lightning_stream.formats.shard import Batch, Buffers, Shard
from lightning_stream.reading.fetch_queue import Fetch, FetchQueue
from lightning_stream.reading.next_use import NextUse
from lightning_stream.reading.partial import PartialShards, ranges_of
from lightning_stream.reading.proofs import UnverifiedRead, UnverifiedReads
from lightning_stream.reading.shard_table import ShardTable
from lightning_stream.shared_files import jitter
from lightning_stream.threads import Lock

T = TypeVar("T")
UseFlat: TypeAlias = Callable[[Mapping[str, FlatArrays], memoryview], T]
"""A function of 1-d arrays as they lie in memory, and of that memory, which it must not keep."""

_PATIENCE_S = 1.0  # of a batch that waits for room, before it lets go of the shards that it has
_LOCK_S = 1.0  # the lock is held for microseconds
_FILES_PER_SHARD = 2  # one for its lock and, before Python 3.13, one for its mapping
_OTHER_FILES = 256  # connections, logs, and what the trainer has open


class OpenShards:
    """Mapped shards by id, each with the lease that protects it from eviction, and when each was used last.

    `ShardTable` explains the ids. Reading is thread-safe; changes need the caller's lock.
    """

    def __init__(self, num_shards: int, num_joined: int) -> None:
        self._leased: dict[int, tuple[Shard, Lease]] = {}
        self._num_shards = num_shards
        self._tables = [SpanTable(num_shards) for _ in range(1 + num_joined)]
        size = num_shards * len(self._tables)
        self._used: Int64s = np.zeros(size, np.int64)  # by a clock of uses
        self._is_open: NDArray[np.bool_] = np.zeros(size, np.bool_)
        self._clock = 0

    def __contains__(self, shard_id: int) -> bool:
        return shard_id in self._leased

    def __iter__(self) -> Iterator[int]:
        return iter(self._leased)

    def __len__(self) -> int:
        return len(self._leased)

    def add(self, shard_id: int, shard: Shard, lease: Lease) -> Shard:
        """Keep a shard that was opened, and its lease; where another thread was first, return that one's shard."""
        if (leased := self._leased.get(shard_id)) is not None:
            if lease is not leased[1]:
                lease.close()
            return leased[0]
        self._leased[shard_id] = shard, lease
        self._use(shard_id)
        self._is_open[shard_id] = True
        table, within = divmod(shard_id, self._num_shards)
        self._tables[table].add(within, shard.mapped)
        return shard

    def get(self, shard_id: int) -> Shard | None:
        """A shard to read from, which stays mapped while it is referred to; None if it is not open."""
        if (leased := self._leased.get(shard_id)) is None:
            return None
        self._use(shard_id)
        return leased[0]

    def lease(self, shard_id: int, shard: Shard) -> Lease | None:
        """The lease of an open shard; None where another shard or none is open under the id."""
        leased = self._leased.get(shard_id)
        return leased[1] if leased is not None and leased[0] is shard else None

    def has(self, shard_ids: Int64s) -> bool:
        """Whether all of these are open."""
        return int(np.count_nonzero(self._is_open.take(shard_ids))) == len(shard_ids)

    def gather(
        self,
        shard_ids: Int64s,
        indices: Int64s,
        out: Buffers | None,
        joined: int = 0,
        names: Collection[str] | None = None,
    ) -> Batch | None:
        """Row k is sample ``indices[k]`` of shard ``shard_ids[k]``; None if these are not all open and of one layout.

        With `joined` = 1, 2...: of the first, the second... of the shards that are joined to it. Of `names`, only these
        columns are read.
        """
        rows = self._tables[joined].find(shard_ids, indices)
        if rows is None:
            return None
        self._use(shard_ids if joined == 0 else shard_ids + joined * self._num_shards)
        return gather_rows(rows, out, names)

    def flat_arrays(self, shard_ids: Int64s, indices: Int64s, names: Sequence[str], use: UseFlat[T]) -> T | None:
        """The result of ``use`` with where the numbers of some columns lie; None if they cannot be used there."""

        rows = self._tables[0].find(shard_ids, indices)
        arrays = None if rows is None else flat_arrays(rows, names)
        if rows is None or arrays is None:
            return None
        self._use(shard_ids)
        return use(arrays, rows.window.view)

    def _use(self, shard_ids: int | Int64s) -> None:
        self._clock += 1
        self._used[shard_ids] = self._clock

    def close(self, shard_id: int) -> None:
        """Forget a shard, if it is open; it stays mapped for those that are reading it."""
        if (leased := self._leased.pop(shard_id, None)) is not None:
            self._is_open[shard_id] = False
            table, within = divmod(shard_id, self._num_shards)
            self._tables[table].remove(within)
            leased[1].close()

    def close_all_but(self, count: int) -> None:
        """Forget the shards used longest ago."""
        if len(self._leased) > count:
            for shard_id in sorted(self._leased, key=self._used.__getitem__)[: len(self._leased) - count]:
                self.close(shard_id)


class Want(NamedTuple):
    """The shards that one batch needs, until it drops them, or the end of a block: ``with reader.read_ahead(ids):``."""

    pool: ShardPool
    shard_ids: list[int]

    def drop(self) -> None:
        """Once: shards that no other batch needs are not fetched any more and, under a cache limit, closed."""
        if self.shard_ids and self.pool.pid == os.getpid():
            self.pool.drop(self.shard_ids)

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        self.drop()


class ShardPool:
    """The shards that one process has open, and those that it fetches. They change under `lock`, which no reader holds.

    With a cache limit a shard is closed as soon as no batch wants it, because open shards cannot be evicted.
    """

    def __init__(self, shards: ShardTable) -> None:
        self.pid = os.getpid()
        self.lock = Lock()
        self.open = OpenShards(shards.num_shards, shards.num_joined)
        self.fetches: dict[int, Fetch] = {}
        self.wanted: Counter[int] = Counter()  # the batches that want a shard, or read it, by its id
        self.plans: dict[int, NextUse] = {}  # of the running iterations, by id
        self.partial = PartialShards(shards)
        self.unverified = UnverifiedReads()
        self.spare_requests = 0  # for ranges of shards that are being fetched anyway
        self.num_fetched_again = 0
        self._repairs = Lock()  # held while a damaged shard is fetched again
        self._shards = shards
        self._config = shards.config
        self._counters = shards.counters
        self._dropped: deque[list[int]] = deque()
        self.queue = FetchQueue(self._config.fetch_threads)

    def want(self, shard_ids: list[int], *, fetch: bool = True) -> Want:
        """Note that a batch needs these shards, until they are dropped, and begin to fetch them."""
        with self.lock:
            self._settle()
            self.wanted.update(shard_ids)
            if fetch:
                self._begin(shard_ids)
        return Want(self, shard_ids)

    def has_all_open(self) -> bool:
        """Whether every shard is mapped, and stays so: nothing is fetched or evicted any more."""
        is_whole = len(self.open) == self._shards.num_files <= self._config.max_open_shards
        return is_whole and not self._shards.is_limited

    def drop(self, shard_ids: list[int]) -> None:
        """Undo one `want`: a shard that no other batch wants is not fetched any more and, under a limit, closed.

        The garbage collector may call this in any thread, so it does not wait long for the lock: the next call does
        what this one could not.
        """
        self._dropped.append(shard_ids)
        if self.lock.acquire(timeout=_LOCK_S):
            try:
                self._settle()
            finally:
                self.lock.release()

    def _settle(self) -> None:
        while self._dropped:
            for shard_id in self._dropped.popleft():
                self.wanted[shard_id] -= 1
                if self.wanted[shard_id] <= 0:
                    del self.wanted[shard_id]
                    self._drop_fetch(shard_id)
                    if self._shards.is_limited:
                        self.open.close(shard_id)

    def _drop_fetch(self, shard_id: int) -> None:
        if (fetch := self.fetches.pop(shard_id, None)) is not None:
            self.queue.drop(fetch)

    @contextmanager
    def reading(self, shard_ids: list[int]) -> Iterator[None]:
        """Keep these shards while they are opened; afterwards, close those above the bound."""
        try:
            with self.want(shard_ids, fetch=False):
                yield
        finally:
            with self.lock:
                self.open.close_all_but(self._config.max_open_shards)

    def _begin(self, shard_ids: Sequence[int]) -> None:
        """Begin to fetch the shards that are neither open nor being fetched. The caller holds the lock."""
        missing = [shard_id for shard_id in shard_ids if shard_id not in self.fetches and shard_id not in self.open]
        if missing:
            new = {shard_id: Fetch(*self._shards.entry(shard_id)) for shard_id in missing}
            self.queue.add(list(new.values()))
            self.fetches |= new  # not before: Ctrl-C may come between, and nobody would fetch them

    def fetch_first(self, shard_ids: Sequence[int]) -> None:
        """Fetch all shards at once that a batch waits for, before those of later batches."""
        with self.lock:
            self._begin(shard_ids)
            fetches = [fetch for shard_id in shard_ids if (fetch := self.fetches.get(shard_id)) and not fetch.done()]
            self.queue.first(fetches)

    def is_present(self, shard_id: int) -> bool:
        """Whether a shard is here, verified."""
        cache, entry = self._shards.entry(shard_id)
        return cache.present(entry)

    def release(self, shard_ids: Iterable[int] | None = None) -> None:
        """Close these shards, or all, so that others may evict them; but for those that are being fetched.

        Threads that read from them have them mapped.
        """
        with self.lock:
            for shard_id in {*self.fetches, *self.open} if shard_ids is None else shard_ids:
                if shard_id not in self.fetches or self.fetches[shard_id].has_come():
                    self._drop_fetch(shard_id)
                    self.open.close(shard_id)

    def close(self) -> None:
        """Close everything, without waiting for fetches that have begun."""
        self.queue.close()
        with self.lock:
            for shard_id in list(self.fetches):
                self._drop_fetch(shard_id)
            self.open.close_all_but(0)

    def of_batch(
        self, shard_ids: list[int], wanted: Mapping[int, Int64s]
    ) -> dict[int, tuple[Shard, UnverifiedRead | None]]:
        """The shards of a batch by id, opened; of those that are not, the `wanted` samples alone may come.

        Where the limit leaves no room, what this process holds is let go of, and the batch begins again: two processes
        would else wait for each other, each with a part of its batch. InUseError if there is no room for long.
        """
        wait_s = self._shards.entry(shard_ids[0])[0].config.room_wait_s
        patience_s = min(wait_s, _PATIENCE_S)
        end = time.monotonic() + wait_s
        while True:
            try:
                return self._of_batch(shard_ids, wanted, jitter.uniform(patience_s / 2, patience_s))
            except InUseError:
                if time.monotonic() >= end:
                    raise
            self.release()
            time.sleep(jitter.uniform(0, patience_s))

    def _of_batch(
        self, shard_ids: list[int], wanted: Mapping[int, Int64s], patience_s: float
    ) -> dict[int, tuple[Shard, UnverifiedRead | None]]:
        soon = {shard_id for shard_id in wanted if self.partial.comes_soon(shard_id, int(wanted[shard_id][-1]))}
        ranged, awaited = self._by_range(wanted, soon)
        missing = [shard_id for shard_id in shard_ids if shard_id not in ranged]
        if self._shards.is_limited:
            check_limit(map(self._shards.entry, missing))
        shards: dict[int, tuple[Shard, UnverifiedRead | None]] = {}
        with self.reading(shard_ids):
            # This thread may as well fetch the only one that is missing, if nobody does yet and it comes whole: that
            # saves a change of threads, 40 us of a sample in a shard on the disk.
            if len(missing) > 1 or any(shard_id in self.fetches or shard_id in soon for shard_id in missing):
                self.fetch_first(missing)
            with self._counters.waiting():
                shards |= self.partial.by_range({shard_id: wanted[shard_id] for shard_id in ranged}, awaited)
                for shard_id in soon.intersection(missing):
                    fetch = self.fetches.get(shard_id)
                    if fetch and (part := self.partial.arriving(shard_id, wanted[shard_id], fetch.has_come)):
                        shards[shard_id] = part
            for shard_id in shard_ids:
                if shard_id not in shards:
                    shards[shard_id] = self.shard(shard_id, patience_s), None
        self.queue.start_later()
        return shards

    def _by_range(self, wanted: Mapping[int, Int64s], soon: set[int]) -> tuple[set[int], set[int]]:
        """Shards that are not here whose wanted samples are cheaper alone; and all that this batch would wait for.

        What is fetched anyway is requested beside that only where the batch comes earlier: where it waits for no other
        shard then, and its samples do not come `soon` by themselves.
        """
        starts = self._config.start_by_range
        spare = self.spare_requests - self.partial.num_requests
        cheaper = set[int]()
        awaited = set[int]()
        for shard_id, indices in wanted.items():
            fetch = self.fetches.get(shard_id)
            if shard_id in self.open or (fetch and fetch.has_come()):
                continue
            if fetch and not self.is_present(shard_id):  # else it is opened soon
                awaited.add(shard_id)
            if self.partial.is_cheaper(shard_id, indices):
                cheaper.add(shard_id)
        if starts is None:
            ranges = (
                1 + ranges_of(self._shards.entry(shard_id)[1], wanted[shard_id])[0] for shard_id in awaited & cheaper
            )
            starts = cheaper >= awaited and not soon >= awaited and sum(ranges) <= spare
        return cheaper if starts else cheaper - awaited, awaited

    def shard(self, shard_id: int, room_wait_s: float | None = None) -> Shard:
        """A mapped shard, fetched where it is not here. The caller is `reading` it, and waits so long for room."""
        while True:
            with self.lock:
                if (shard := self.open.get(shard_id)) is not None:
                    return shard
                fetch = self.fetches.get(shard_id)
                before = self.num_fetched_again
            try:
                opened = self._opened(shard_id, fetch, before, room_wait_s)
            finally:
                with self.lock:  # a failed one is fetched again at its next use
                    if fetch is not None and self.fetches.get(shard_id) is fetch:
                        self._drop_fetch(shard_id)
            if opened is None:
                continue
            shard, lease = opened
            self.partial.drop(shard_id)
            self.unverified.compare(shard, shard_id, self._shards.url_of)
            with self.lock:
                # Threads that wait for one fetch share its lease, which another one may have closed with its shard.
                if lease.is_held and lease.is_current():
                    return self.open.add(shard_id, shard, lease)
            lease.close()  # it was fetched again meanwhile: this is the damaged one, or one of another job's index

    def _opened(
        self, shard_id: int, fetch: Fetch | None, before: int, room_wait_s: float | None
    ) -> tuple[Shard, Lease] | None:
        """A shard with its lease; None where another attempt is worthwhile: it was fetched again, or others closed."""
        cache, entry = self._shards.entry(shard_id)
        self._raise_file_limit()
        try:
            with self._counters.waiting():
                lease = None
                with suppress(InUseError):  # there may be room now
                    lease = None if fetch is None else fetch.result() or fetch.arrived
                if lease is None:
                    lease = cache.lease(entry, None, self._config.fetch_threads, room_wait_s)
            try:
                return self._shards.open(shard_id, entry, lease.folder), lease
            except (FormatError, FileNotFoundError):  # damaged on the disk, or deleted
                if not self.fetched_again(shard_id, lease, before):
                    raise
        except OSError as error:
            if error.errno == errno.ENOMEM and len(self.open):
                with self.lock:  # their addresses are free once nobody reads from them
                    self.open.close_all_but(0)
                return None
            if error.errno == errno.ENOMEM:
                raise CacheError(
                    f"a shard that is read takes addresses, as threads do, and this process has none left ({error}). "
                    "Raise the limit (`ulimit -v`, or vm.max_map_count), or write smaller shards"
                ) from error
            if error.errno != errno.EMFILE:
                raise
            raise CacheError(
                f"each open shard takes up to {_FILES_PER_SHARD} open files, but this process may have "
                f"{resource.getrlimit(resource.RLIMIT_NOFILE)[0]} in all and has {len(self.open)} shards open already. "
                "Raise the limit (`ulimit -n`), write larger shards, or read from fewer at once: a smaller window= or "
                "batch"
            ) from error
        return None

    def fetched_again(self, shard_id: int, lease: Lease | None, before: int) -> bool:
        """Whether another attempt is worthwhile, because a shard that was damaged in the cache was fetched again.

        The shard was read under ``lease`` (None if that is closed already), when `num_fetched_again` was ``before``.
        """
        cache, entry = self._shards.entry(shard_id)
        with self._repairs:
            if self.num_fetched_again != before:  # by another thread meanwhile, perhaps this one
                return True
            again = cache.fetch_again(entry, lease)
            if again is None:
                return False
            with self.lock:
                self.open.close(shard_id)
                self.fetches.pop(shard_id, None)  # which may have got the damaged files
                self.num_fetched_again += 1
            again.close()
        return True

    def agreements(self, reads: Sequence[UnverifiedRead], *, wait: bool) -> dict[UnverifiedRead, bool]:
        """Whether unverified reads have the bytes of their verified shards; without `wait`, where these are here.

        Samples of shards that nobody fetches are read by ranges a second time instead.

        Raises:
            StoreError, FormatError, CacheError: A shard cannot be fetched.
        """
        by_shard: dict[int, list[UnverifiedRead]] = {}
        for read in reads:
            by_shard.setdefault(read.shard_id, []).append(read)
        here = set(filter(self.is_present, by_shard))
        alone = by_shard.keys() - here - {read.shard_id for read in reads if read.is_awaited}
        if wait:
            self.fetch_first(sorted(by_shard.keys() - here - alone))
        agreements: dict[UnverifiedRead, bool] = {}
        for shard_id in sorted(by_shard if wait else here):
            indices = np.unique(np.concatenate([read.indices for read in by_shard[shard_id]]))
            with self.reading([shard_id]):
                again = self.partial.by_range({shard_id: indices} if shard_id in alone else {}, ()).get(shard_id)
                shard, row_of = (again[0], indices.searchsorted) if again else (self.shard(shard_id), int)
                agreements |= {read: read.agrees(shard, row_of) for read in by_shard[shard_id]}
        return agreements

    def _raise_file_limit(self) -> None:
        """Let this process open the files of one more shard: many systems allow 1,024 unless asked for more."""
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        try:
            pipe = os.pipe()  # the lowest free numbers: other datasets have shards open, too
            num_open = max(pipe)  # a mapping keeps the second one of a file, and the first is free again
            os.close(pipe[0])
            os.close(pipe[1])
        except OSError:
            num_open = soft
        num_open = max(num_open, len(self.open) * _FILES_PER_SHARD)
        wanted = num_open + (len(self.fetches) + 1) * _FILES_PER_SHARD + _OTHER_FILES
        if soft != resource.RLIM_INFINITY and wanted > soft:
            most = max(2 * soft, wanted)  # so that it is seldom raised again
            limit = most if hard == resource.RLIM_INFINITY else min(most, hard)
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
