"""What a reader holds in one process: mapped shards, and threads that fetch the next ones."""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future

from lightning_stream.cache import Lease, ShardCache
from lightning_stream.errors import LockTimeoutError
from lightning_stream.formats.schema import ShardEntry
from lightning_stream.reading.open_shards import OpenShards
from lightning_stream.reading.range_reads import SampleRanges
from lightning_stream.storage.threads import DaemonPool, follow

_WAITERS = 32  # threads that wait for other processes' fetches


class ReaderProcess:
    """Mapped shards and fetches of one process; all but `fetch` under `lock`.

    Args:
        num_shards: All shards there are.
        fetch_threads: Shards fetched at the same time.
        ranges: What reads samples of shards that are not here.
    """

    def __init__(self, num_shards: int, fetch_threads: int, ranges: SampleRanges) -> None:
        self.pid = os.getpid()
        self.lock = threading.RLock()
        self.open = OpenShards(num_shards)
        self.fetches: dict[int, Future[Lease]] = {}
        self.awaited: Counter[int] = Counter()  # batches announced by read_ahead that still need the shard
        self.ranges = ranges
        self._fetch_threads = fetch_threads
        self._wanted = 0  # shards that this process is to fetch, or fetches
        self._unfinished = 0  # those, and what other processes fetch
        self._counting = threading.Lock()
        self._fetchers = DaemonPool(fetch_threads, "fetch")
        self._waiters = DaemonPool(_WAITERS, "wait")

    def fetch(self, shards: Sequence[tuple[ShardCache, ShardEntry]]) -> list[Future[Lease]]:
        """Begin to fetch shards, in this order.

        What another process is fetching already is waited for in threads of their own: the workers of a node want the
        same shards first, and would all wait for the few that one of them fetches.
        """
        self._count(len(shards), len(shards))
        return [self._fetch(cache, entry) for cache, entry in shards]

    def _fetch(self, cache: ShardCache, entry: ShardEntry) -> Future[Lease]:
        promise: Future[Lease] = Future()

        def unless_busy() -> None:
            try:
                # With fewer shards wanted than threads, the connections of the idle ones help with these.
                promise.set_result(cache.lease(entry, 0, max(1, self._fetch_threads // self._wanted)))
            except LockTimeoutError:
                follow(promise, self._waiters.submit(cache.lease, entry))
            except BaseException as error:  # noqa: BLE001 - whoever asks for the shard gets it
                promise.set_exception(error)
            finally:
                self._count(-1, 0)

        promise.add_done_callback(lambda _: self._count(0, -1))
        follow(promise, self._fetchers.submit(unless_busy), only_failures=True)
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
        while self.fetches:
            self.fetches.popitem()[1].add_done_callback(_let_go)
        self.open.close_all_but(0)


def _let_go(fetch: Future[Lease]) -> None:
    """What was fetched for nobody may be evicted."""
    if not fetch.cancelled() and fetch.exception() is None:
        fetch.result().close()
