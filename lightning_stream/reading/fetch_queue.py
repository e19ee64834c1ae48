"""The threads that fetch shards: first those that a batch waits for."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress

from lightning_stream.cache import InUseError, Lease, ShardCache
from lightning_stream.errors import LightningStreamError, LockTimeoutError
from lightning_stream.formats.model import ShardEntry
from lightning_stream.shared_files import backoff
from lightning_stream.stores import is_remote
from lightning_stream.threads import DaemonPool, Lock

_MOST_FETCHERS = 16  # one for each canonical node that the default order has: the first batch needs a shard of each
_FIRST, _NEXT, _LATER = range(3)  # ranks: a batch waits for it; of the first batch; of others
# Between looks for shards that other processes fetch: 200 files a second at most
_LOOK_S = 0.025
_LOOK_EACH_S = 0.005


class Fetch(Future["Lease | None"]):
    """A shard that a thread fetches, or will; the result is None where another process fetches it.

    `arrived` is its lease then, once it is here. Of several, those of the lowest `rank` are fetched first.
    """

    def __init__(self, cache: ShardCache, entry: ShardEntry) -> None:
        super().__init__()
        self.cache = cache
        self.entry = entry
        self.rank = _LATER
        self.is_asked = self.is_elsewhere = False  # whether a thread was asked for it, and left it to another process
        self.is_dropped = False
        self.arrived: Lease | None = None

    def has_come(self) -> bool:
        """Whether the shard is here, or will not come."""
        return self.done() and not self.is_elsewhere


def urgent_threads(num_threads: int, num_awaited: int) -> int:
    """The threads that fetch from now on, where a batch waits for so many shards; never fewer than before."""
    return max(num_threads, min(num_awaited, _MOST_FETCHERS))


class FetchQueue:
    """Fetches shards in threads: first those that a batch waits for, then the others as they were added.

    Those of later batches begin once the first batch has what it needs: else they would take their share of the
    network. What another process fetches already is left to it, since the workers of a node need the same shards first;
    one thread looks for all of these.
    """

    def __init__(self, num_threads: int) -> None:
        self._num_threads = num_threads
        self._lock = Lock()
        self._highest_rank = _NEXT  # of those that may begin
        self._waiting: list[Fetch] = []
        self._elsewhere: list[Fetch] = []
        self._num_running = 0
        self._fetchers = DaemonPool(num_threads, "fetch")
        self._looker = DaemonPool(1, "look")
        self.pools = [self._fetchers, self._looker]

    def add(self, fetches: Sequence[Fetch]) -> None:
        """Begin to fetch shards, in this order; later, while those of the first call are being fetched."""
        with self._lock:
            rank = _LATER if self._is_busy() else _NEXT
            self._waiting += fetches
            self._ask(fetches, rank)

    def first(self, fetches: Sequence[Fetch]) -> None:
        """Fetch these before all others, and all at once: with more threads, if it takes more for a network."""
        with self._lock:
            threads = urgent_threads(self._fetchers.num_threads, len(fetches))
            # Those that are made from files of this machine take processors, and memory of each thread.
            if threads > self._fetchers.num_threads and any(
                fetch.entry.raw.origin is None or is_remote(fetch.cache.store.url) for fetch in fetches
            ):
                self._fetchers.grow(threads)
            self._ask(fetches, _FIRST)

    def start_later(self) -> None:
        """Begin to fetch what waits: the first batch has what it needs."""
        if self._highest_rank < _LATER:
            with self._lock:
                self._highest_rank = _LATER
                self._ask((), _LATER)

    def drop(self, fetch: Fetch) -> None:
        """Do not fetch this one; if that has begun, it ends with a lease that nobody keeps."""
        with self._lock:
            fetch.is_dropped = True
            for fetches in (self._waiting, self._elsewhere):
                if fetch in fetches:
                    fetches.remove(fetch)
                    fetch.cancel()
            self._end()

    def has_idle_threads(self) -> bool:
        """Whether shards are waited for while threads are idle."""
        return self._is_busy() and self._num_running + len(self._waiting) < self._fetchers.num_threads

    def close(self) -> None:
        """Fetch no more, without waiting for what has begun."""
        with self._lock:
            for fetch in self._waiting:
                fetch.cancel()
            self._waiting = []
            self._elsewhere = []
        for pool in self.pools:
            pool.close()

    def _may_begin(self, fetch: Fetch) -> bool:
        return fetch.rank <= self._highest_rank

    def _is_busy(self) -> bool:
        return bool(self._num_running or self._elsewhere or any(map(self._may_begin, self._waiting[:1])))

    def _ask(self, fetches: Sequence[Fetch], rank: int) -> None:
        """Give fetches this rank; for each that may begin now, a thread is asked, once."""
        for fetch in fetches:
            fetch.rank = rank
        self._waiting = sorted(self._waiting, key=lambda fetch: fetch.rank)
        for fetch in self._waiting:
            if self._may_begin(fetch) and not fetch.is_asked:
                self._fetchers.submit(self._fetch_next)
                fetch.is_asked = True

    def _lease(self, fetch: Fetch, share: int) -> Lease:
        """The lease of a shard. One of later batches waits for room; a batch that waits for its shard does that."""
        for _ in backoff(math.inf):
            if fetch.rank == _FIRST or fetch.is_dropped:
                break
            with suppress(InUseError):
                return fetch.cache.lease(fetch.entry, 0, share)
        return fetch.cache.lease(fetch.entry, 0, share)

    def _fetch_next(self) -> None:
        # No list of fetches in this frame, nor in an error's traceback: it would keep the leases of those that nobody
        # wants any more, while this thread waits for their room.
        fetch, share = self._taken()
        if fetch is None:
            return
        try:
            fetch.set_result(self._lease(fetch, share))
        except LockTimeoutError:
            self._leave(fetch)
        except BaseException as error:  # noqa: BLE001 - raised where the shard is needed
            fetch.set_exception(error)
        with self._lock:
            self._num_running -= 1
            self._end()

    def _taken(self) -> tuple[Fetch | None, int]:
        """The next fetch, and its share of the connections; None if the one that a thread was asked for was dropped."""
        with self._lock:
            # With fewer shards wanted than threads, the connections of the idle ones help with these.
            num_next = sum(map(self._may_begin, self._waiting[: self._num_threads]))
            if not num_next:
                return None, 0
            share = max(1, self._num_threads // (self._num_running + num_next))
            self._num_running += 1
            return self._waiting.pop(0), share

    def _end(self) -> None:
        if not self._is_busy():
            self.start_later()

    def _leave(self, fetch: Fetch) -> None:
        """Leave a shard to the process that fetches it."""
        with self._lock:
            fetch.is_elsewhere = not fetch.is_dropped  # which would be looked for without an end
            fetch.set_result(None)
            if fetch.is_elsewhere:
                self._elsewhere.append(fetch)
                if len(self._elsewhere) == 1:
                    self._looker.submit(self._look)

    def _look(self) -> None:
        """Take leases of shards that other processes fetch, as these come."""
        while self._elsewhere:
            self._take_arrived()
            time.sleep(max(_LOOK_S, _LOOK_EACH_S * len(self._elsewhere)))

    def _take_arrived(self) -> None:
        # In a frame of its own: one that sleeps would keep the leases of fetches that were dropped meanwhile.
        for fetch in list(self._elsewhere):
            if fetch.is_dropped or not fetch.cache.present(fetch.entry):
                continue
            with suppress(LightningStreamError, OSError):  # the thread that needs the shard asks again, and raises it
                fetch.arrived = fetch.cache.lease(fetch.entry, 0)
            fetch.is_elsewhere = False
            self.drop(fetch)
