"""What a reader holds in one process: the shards that are mapped, and threads that fetch the next ones."""

from __future__ import annotations

import errno
import os
import resource
import threading
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import NamedTuple, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from lightning_stream.cache import Lease, ShardCache
from lightning_stream.counters import Counters
from lightning_stream.errors import CacheError, LockTimeoutError
from lightning_stream.formats.encodings.base import FlatArrays
from lightning_stream.formats.mds.gather import SpanTable, flat_arrays
from lightning_stream.formats.model import ShardEntry
from lightning_stream.formats.shard import Batch, Buffers, Shard
from lightning_stream.reading.next_use import NextUse
from lightning_stream.reading.proofs import EarlyReads
from lightning_stream.reading.range_reads import OpenShard, SampleRanges
from lightning_stream.reading.shard_heads import ShardHeads
from lightning_stream.threads import DaemonPool, follow

T = TypeVar("T")
UseFlat: TypeAlias = Callable[[Mapping[str, FlatArrays], memoryview], T]
"""A function of 1-d arrays as they lie in memory, and of that memory, which it must not keep."""

_WAITERS = 32  # threads that wait for other processes' fetches
_MOST_FETCHERS = 16  # one for each canonical node that the default order has: the first batch needs a shard of each
_LOCK_S = 1.0  # the lock is held for microseconds
_FILES_PER_SHARD = 2  # one for its lock and, before Python 3.13, one for its mapping
_OTHER_FILES = 256  # connections, logs, and what the trainer has open


class OpenShards:
    """Mapped shards by number, each with the lease that protects it from eviction, and when each was used last.

    `StreamShards` explains the numbers. Reading is thread-safe; changes need the caller's lock.
    """

    def __init__(self, num_shards: int, num_joined: int = 0) -> None:
        self._held: dict[int, tuple[Shard, Lease]] = {}
        self._num_shards = num_shards
        self._tables = [SpanTable(num_shards) for _ in range(1 + num_joined)]
        numbers = num_shards * len(self._tables)
        self._used: NDArray[np.int64] = np.zeros(numbers, np.int64)  # by a clock of uses
        self._is_open: NDArray[np.bool_] = np.zeros(numbers, np.bool_)
        self._clock = 0

    def __contains__(self, number: int) -> bool:
        return number in self._held

    def __len__(self) -> int:
        return len(self._held)

    def add(self, number: int, shard: Shard, lease: Lease) -> Shard:
        """Keep a shard that was opened, and its lease; where another thread was first, return that one's shard."""
        if (held := self._held.get(number)) is not None:
            if lease is not held[1]:
                lease.close()
            return held[0]
        self._held[number] = shard, lease
        self._use(number)
        self._is_open[number] = True
        table, within = divmod(number, self._num_shards)
        self._tables[table].add(within, shard.mapped)
        return shard

    def get(self, number: int) -> Shard | None:
        """A shard to read from, which stays mapped while it is referred to; None if it is not open."""
        if (held := self._held.get(number)) is None:
            return None
        self._use(number)
        return held[0]

    def lease(self, number: int, shard: Shard) -> Lease | None:
        """The lease of an open shard; None where another shard or none is open under the number."""
        held = self._held.get(number)
        return held[1] if held is not None and held[0] is shard else None

    def has(self, numbers: NDArray[np.int64]) -> bool:
        """Whether all of these are open."""
        return bool(self._is_open.take(numbers).all())

    def gather(
        self, numbers: NDArray[np.int64], indices: NDArray[np.int64], out: Buffers | None, joined: int = 0
    ) -> Batch | None:
        """Row k is sample ``indices[k]`` of shard ``numbers[k]``; None if these are not all open and of one layout.

        With `joined` = 1, 2...: of the first, the second... of the shards that are joined to it.
        """
        batch = self._tables[joined].gather(numbers, indices, out)
        if batch is not None:
            self._use(numbers if joined == 0 else numbers + joined * self._num_shards)
        return batch

    def flat_arrays(
        self, numbers: NDArray[np.int64], indices: NDArray[np.int64], names: Sequence[str], use: UseFlat[T]
    ) -> T | None:
        """The result of ``use`` with where the numbers of some columns lie; None if they cannot be used there."""

        rows = self._tables[0].find(numbers, indices)
        found = None if rows is None else flat_arrays(rows, names)
        result = None if rows is None or found is None else use(found, rows.window.view)
        self._use(numbers)
        return result

    def _use(self, numbers: int | NDArray[np.int64]) -> None:
        self._clock += 1
        self._used[numbers] = self._clock

    def close(self, number: int) -> None:
        """Forget a shard, if it is open; it stays mapped for those that are reading it."""
        if (held := self._held.pop(number, None)) is not None:
            self._is_open[number] = False
            table, within = divmod(number, self._num_shards)
            self._tables[table].remove(within)
            held[1].close()

    def close_all_but(self, count: int) -> None:
        """Forget the shards used longest ago."""
        if len(self._held) > count:
            for number in sorted(self._held, key=self._used.__getitem__)[: len(self._held) - count]:
                self.close(number)


class Announced(NamedTuple):
    """The shards that one batch needs, in the process that announced it."""

    process: ReaderProcess
    numbers: list[int]


class Fetch(Future[Lease]):
    """A shard that is being fetched; `queued` is the thread pool's call, for as long as the pool has it."""

    queued: weakref.ref[Future[None]] | None = None  # None: it has not been started


def hurried_threads(num_threads: int, num_waited: int) -> int:
    """The threads that fetch from now on, where a batch waits for so many shards; never fewer than before."""
    return max(num_threads, min(num_waited, _MOST_FETCHERS))


class ReaderProcess:
    """Mapped shards and fetches of one process. Its tables change under `lock`, which nobody holds while reading.

    `ranges` reads samples of shards that are not here, and `heads` of shards that are arriving: the `early` ones. With
    a cache limit (``is_limited``) a shard is closed as soon as no announced batch needs it, because open shards cannot
    be evicted.
    """

    def __init__(
        self,
        num_shards: int,
        fetch_threads: int,
        open_shard: OpenShard,
        max_open_shards: int = 256,
        is_limited: bool = False,
        num_joined: int = 0,
        counters: Counters | None = None,
    ) -> None:
        self.pid = os.getpid()
        self.lock = threading.RLock()
        self.repairs = threading.RLock()  # held while a damaged shard is fetched again
        self.num_fetched_again = 0
        self.open = OpenShards(num_shards, num_joined)
        self.fetches: dict[int, Fetch] = {}
        self.awaited: Counter[int] = Counter()  # the batches that are read or announced, by shard
        self.plans: dict[int, NextUse] = {}  # of the running iterations, by id
        self.ranges, self.heads = SampleRanges(open_shard), ShardHeads(open_shard)
        self.early = EarlyReads()
        self.spare_requests = 0  # for ranges of shards that are being fetched anyway
        self._max_open_shards = max_open_shards
        self._is_limited = is_limited
        self._taken_back: deque[list[int]] = deque()
        self._fetch_threads = fetch_threads
        self._counters = counters or Counters()
        self._wanted = 0  # shards that this process is to fetch, or fetches
        self._unfinished = 0  # these, and those that other processes fetch
        # Until the first batch's shards have come, those of later batches: they would take their share of the network.
        self._later: list[tuple[Fetch, ShardCache, ShardEntry]] | None = []
        self._counting = threading.Lock()
        self._fetchers = DaemonPool(fetch_threads, "fetch")
        self._waiters = DaemonPool(_WAITERS, "wait")
        # A forked child must not finalize its parent's pools: their locks may never be released there.
        self.pools: list[object] = [self._fetchers, self._waiters, self.ranges]

    def announce(self, numbers: list[int]) -> Announced:
        """Note that a batch needs these shards, until it is taken back. The caller holds the lock."""
        self._settle()
        self.awaited.update(numbers)
        return Announced(self, numbers)

    def take_back(self, numbers: list[int]) -> None:
        """Undo one `announce`: a shard that no other batch needs is not fetched any more and, under a limit, closed.

        The garbage collector may call this in any thread, so it does not wait long for the lock: the next call does
        what this one could not.
        """
        self._taken_back.append(numbers)
        if self.lock.acquire(timeout=_LOCK_S):
            try:
                self._settle()
            finally:
                self.lock.release()

    def _settle(self) -> None:
        while self._taken_back:
            for number in self._taken_back.popleft():
                self.awaited[number] -= 1
                if self.awaited[number] <= 0:
                    del self.awaited[number]
                    self._give_up(number)
                    if self._is_limited:
                        self.open.close(number)

    def _give_up(self, number: int) -> None:
        """Cancel a fetch that waits for a thread; one that runs ends with a lease that nobody keeps."""
        fetch = self.fetches.pop(number, None)
        if fetch is not None and (waiting := fetch.queued() if fetch.queued else fetch) is not None:
            waiting.cancel()

    @contextmanager
    def reading(self, numbers: list[int]) -> Iterator[None]:
        """Keep these shards while they are opened; afterwards, close those above the bound."""
        with self.lock:
            self.announce(numbers)
        try:
            yield
        finally:
            self.take_back(numbers)
            with self.lock:
                self.open.close_all_but(self._max_open_shards)

    def fetch(self, shards: Sequence[tuple[ShardCache, ShardEntry]]) -> list[Fetch]:
        """Begin to fetch shards, in this order; later, while the shards of the first call are being fetched.

        Other threads wait for what another process fetches already: the workers of a node need the same shards first,
        and would all wait for the few that one of them fetches.
        """
        fetches = [(Fetch(), *shard) for shard in shards]
        with self.lock:
            if self._later is not None and self._unfinished:
                self._later += fetches
            else:
                self._start(fetches)
        return [fetch for fetch, _, _ in fetches]

    def _start(self, fetches: list[tuple[Fetch, ShardCache, ShardEntry]]) -> None:
        fetches = [one for one in fetches if not one[0].cancelled() and one[0].queued is None]
        self._count(len(fetches), len(fetches))
        for promise, cache, entry in fetches:
            promise.add_done_callback(lambda _: self._count(0, -1))
            queued = self._fetchers.submit(self._fetch_unless_busy, promise, cache, entry)
            promise.queued = weakref.ref(queued)
            queued.add_done_callback(lambda _: self._count(-1, 0))
            follow(promise, queued, only_failures=True)

    def _fetch_unless_busy(self, promise: Fetch, cache: ShardCache, entry: ShardEntry) -> None:
        try:
            # With fewer shards wanted than threads, the connections of the idle ones help with these.
            promise.set_result(cache.lease(entry, 0, max(1, self._fetch_threads // max(1, self._wanted))))
        except LockTimeoutError:
            follow(promise, self._waiters.submit(cache.lease, entry))
        except BaseException as error:  # noqa: BLE001 - raised where the shard is needed
            promise.set_exception(error)

    def begin(self, numbers: Sequence[int], entry: Callable[[int], tuple[ShardCache, ShardEntry]]) -> None:
        """Begin to fetch the shards that are neither open nor being fetched. The caller holds the lock."""
        new = [number for number in numbers if number not in self.open and number not in self.fetches]
        self.fetches.update(zip(new, self.fetch(list(map(entry, new))), strict=True))

    def hurry(self, numbers: Sequence[int], entry: Callable[[int], tuple[ShardCache, ShardEntry]]) -> None:
        """Fetch all shards at once that a batch waits for: with more connections than those of later batches."""
        with self.lock:
            self.begin(numbers, entry)
            awaited = [fetch for number in numbers if (fetch := self.fetches.get(number)) and not fetch.done()]
            self._start([one for one in self._later or () if one[0] in awaited])
        if (threads := hurried_threads(self._fetchers.num_threads, len(awaited))) > self._fetchers.num_threads:
            self._fetchers.resize(threads)

    def could_fetch_more(self) -> bool:
        """Whether shards are waited for while threads are idle."""
        return self._unfinished > 0 and self._wanted + len(self._later or ()) < self._fetchers.num_threads

    def _count(self, wanted: int, unfinished: int) -> None:
        with self._counting:
            self._wanted += wanted
            self._unfinished += unfinished
        if self._later is not None and unfinished < 0:
            with self.lock:
                if not self._unfinished and self._later is not None:
                    later, self._later = self._later, None
                    self._start(later)

    def close(self) -> None:
        """Close everything, without waiting for fetches that have begun."""
        self._fetchers.close()
        self._waiters.close()
        with self.lock:
            self._later = None
            for number in list(self.fetches):
                self._give_up(number)
            self.open.close_all_but(0)

    def fetched_again(
        self, number: int, cache: ShardCache, entry: ShardEntry, lease: Lease | None, before: int
    ) -> bool:
        """Whether another attempt is worthwhile, because a shard that was damaged in the cache was fetched again.

        The shard was read under ``lease`` (None if that is closed already), when `num_fetched_again` was ``before``.
        """
        with self.repairs:
            if self.num_fetched_again != before:  # by another thread meanwhile, perhaps this one
                return True
            again = cache.fetch_again(entry, lease)
            if again is None:
                return False
            with self.lock:
                self.open.close(number)
                self.fetches.pop(number, None)  # which may have got the damaged files
                self.num_fetched_again += 1
            again.close()
        return True

    def raise_file_limit(self) -> None:
        """Let this process open the files of one more shard: many systems allow 1,024 unless asked for more."""
        wanted = (len(self.open) + len(self.fetches) + 1) * _FILES_PER_SHARD + _OTHER_FILES
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft != resource.RLIM_INFINITY and wanted > soft:
            most = max(2 * soft, wanted)  # so that it is seldom raised again
            limit = most if hard == resource.RLIM_INFINITY else min(most, hard)
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))

    def explain_file_limit(self, error: OSError) -> None:
        """Raise CacheError if the limit of open files is why a file could not be opened."""
        if error.errno == errno.EMFILE:
            raise CacheError(
                f"each open shard takes up to {_FILES_PER_SHARD} open files, but this process may have "
                f"{resource.getrlimit(resource.RLIMIT_NOFILE)[0]} in all and has {len(self.open)} shards open already. "
                "Raise the limit (`ulimit -n`), write larger shards, or read from fewer at once: a smaller window= or "
                "batch"
            ) from error
