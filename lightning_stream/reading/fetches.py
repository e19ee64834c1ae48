"""What a reader holds in one process: mapped shards, and threads that fetch the next ones."""

from __future__ import annotations

import os
import threading
import weakref
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import NamedTuple

from lightning_stream.cache import Lease, ShardCache
from lightning_stream.errors import LockTimeoutError
from lightning_stream.formats.index.schema import ShardEntry
from lightning_stream.reading.next_use import NextUse
from lightning_stream.reading.open_shards import OpenShards
from lightning_stream.reading.range_reads import SampleRanges
from lightning_stream.threads import DaemonPool, follow

_WAITERS = 32  # threads that wait for other processes' fetches
_LOCK_S = 1.0  # the lock is held for microseconds


class Announced(NamedTuple):
    """Shards that one batch needs, in the process where that was announced."""

    process: ReaderProcess
    numbers: list[int]


class Fetch(Future[Lease]):
    """A shard on its way; `queued` is the thread pool's call, for as long as the pool has it."""

    queued: weakref.ref[Future[None]]


class ReaderProcess:
    """Mapped shards and fetches of one process. Its tables change under `lock`, which nobody holds while reading.

    Args:
        num_shards: All shards there are.
        fetch_threads: Shards fetched at the same time.
        ranges: What reads samples of shards that are not here.
        max_open_shards: Shards that stay mapped.
        is_limited: Whether a cache limit asks for shards to be closed as soon as no announced batch needs them: what
            is open cannot be evicted, and without a plan nobody knows when it will be read again.
    """

    def __init__(
        self,
        num_shards: int,
        fetch_threads: int,
        ranges: SampleRanges,
        max_open_shards: int = 256,
        is_limited: bool = False,
    ) -> None:
        self.pid = os.getpid()
        self.lock = threading.RLock()
        self.repairs = threading.RLock()  # held while a damaged shard is fetched again
        self.num_fetched_again = 0
        self.open = OpenShards(num_shards)
        self.fetches: dict[int, Fetch] = {}
        self.awaited: Counter[int] = Counter()  # batches that are being read, or were announced, by shard
        self.plans: dict[int, NextUse] = {}  # of the iterations that live, by id
        self.ranges = ranges
        self._max_open_shards = max_open_shards
        self._is_limited = is_limited
        self._taken_back: deque[list[int]] = deque()
        self._fetch_threads = fetch_threads
        self._wanted = 0  # shards that this process is to fetch, or fetches
        self._unfinished = 0  # those, and what other processes fetch
        self._counting = threading.Lock()
        self._fetchers = DaemonPool(fetch_threads, "fetch")
        self._waiters = DaemonPool(_WAITERS, "wait")
        # A forked child must not finalize its parent's pools: their locks may be held for ever there.
        self.pools: list[object] = [self._fetchers, self._waiters, ranges]

    def announce(self, numbers: list[int]) -> Announced:
        """Note that a batch needs these shards, until it is taken back. The caller holds the lock."""
        self._settle()
        self.awaited.update(numbers)
        return Announced(self, numbers)

    def take_back(self, numbers: list[int]) -> None:
        """Undo one `announce`: what no other batch needs is not fetched any more and, under a limit, closed.

        A garbage collector may call this in any thread, so it never waits long for the lock: what is left here is
        settled by the next call.
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
        """Do not begin a fetch that waits for a thread; the lease that another brings ends as nobody refers to it."""
        fetch = self.fetches.pop(number, None)
        if fetch is not None and (queued := fetch.queued()) is not None:
            queued.cancel()

    @contextmanager
    def reading(self, numbers: list[int]) -> Iterator[None]:
        """Keep these shards for as long as it takes to open them; closes what is over the bound afterwards."""
        with self.lock:
            self.announce(numbers)
        try:
            yield
        finally:
            self.take_back(numbers)
            with self.lock:
                self.open.close_all_but(self._max_open_shards)

    def fetch(self, shards: Sequence[tuple[ShardCache, ShardEntry]]) -> list[Fetch]:
        """Begin to fetch shards, in this order.

        What another process is fetching already is waited for in threads of their own: the workers of a node want the
        same shards first, and would all wait for the few that one of them fetches.
        """
        self._count(len(shards), len(shards))
        return [self._fetch(cache, entry) for cache, entry in shards]

    def _fetch(self, cache: ShardCache, entry: ShardEntry) -> Fetch:
        promise = Fetch()

        def unless_busy() -> None:
            try:
                # With fewer shards wanted than threads, the connections of the idle ones help with these.
                promise.set_result(cache.lease(entry, 0, max(1, self._fetch_threads // max(1, self._wanted))))
            except LockTimeoutError:
                follow(promise, self._waiters.submit(cache.lease, entry))
            except BaseException as error:  # noqa: BLE001 - raised where the shard is asked for
                promise.set_exception(error)

        promise.add_done_callback(lambda _: self._count(0, -1))
        queued = self._fetchers.submit(unless_busy)
        promise.queued = weakref.ref(queued)
        queued.add_done_callback(lambda _: self._count(-1, 0))
        follow(promise, queued, only_failures=True)
        return promise

    def could_fetch_more(self) -> bool:
        """Whether shards are waited for while threads are idle."""
        return self._unfinished > 0 and self._wanted < self._fetch_threads

    def _count(self, wanted: int, unfinished: int) -> None:
        with self._counting:
            self._wanted += wanted
            self._unfinished += unfinished

    def close(self) -> None:
        """Let go of everything; what has begun is not waited for."""
        self._fetchers.close()
        self._waiters.close()
        with self.lock:
            for number in list(self.fetches):
                self._give_up(number)
            self.open.close_all_but(0)
