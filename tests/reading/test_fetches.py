"""Where fewer shards are missing than a worker has connections, the idle ones help: a shard comes as several ranges."""

from __future__ import annotations

import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from servers.shards import make_dataset, shard_content
from support.data import write_ids

from lightning_stream import StreamingDataset
from lightning_stream.cache import InUseError, Lease, ShardCache
from lightning_stream.counters import Counters
from lightning_stream.dataset import source_of
from lightning_stream.errors import LockTimeoutError, NotFoundError
from lightning_stream.loading.shared_position import Start
from lightning_stream.order import World
from lightning_stream.reading.fetch_queue import Fetch, FetchQueue
from lightning_stream.reading.look_ahead import read_ahead
from lightning_stream.reading.reader import SampleReader
from lightning_stream.reading.shard_pool import ShardPool, Want
from lightning_stream.reading.shard_table import ReaderConfig
from lightning_stream.stores import LocalStore, ObjectStream, RetryingStore, StoreTraits, retry

SHARD_BYTES = 100_000


class Bucket(LocalStore):
    """A folder that stands for a bucket, and notes the ranges it is asked for."""

    def __init__(self, folder: Path, cuts: bool) -> None:
        super().__init__(folder)
        self.traits = StoreTraits(ranges=cuts)
        self.asked: list[tuple[int, int | None]] = []

    def open(self, name: str, begin: int = 0, end: int | None = None) -> ObjectStream:
        self.asked.append((begin, end))
        return super().open(name, begin, end)


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retry, "_LEAST_PART_BYTES", 20_000)


@pytest.mark.parametrize(
    ("cuts", "connections", "expected"),
    [
        (True, 1, [(0, None)]),
        (True, 2, [(0, 50_000), (50_000, 100_000)]),
        (True, 3, [(0, 33_334), (33_334, 66_668), (66_668, 100_000)]),
        (True, 64, [(20_000 * k, 20_000 * (k + 1)) for k in range(5)]),  # none smaller than is worth a request
        (False, 4, [(0, None)]),  # a server that may send the whole for each range
    ],
)
def test_a_shard_comes_as_ranges_over_the_connections_there_are_to_spare(
    tmp_path: Path, cuts: bool, connections: int, expected: list[tuple[int, int | None]]
) -> None:
    index = make_dataset(tmp_path / "d", num_shards=1, shard_bytes=SHARD_BYTES)
    store = Bucket(tmp_path / "d", cuts)
    cache = ShardCache(RetryingStore(store), tmp_path / "cache")
    with cache.lease(index.entry(0), None, connections) as lease:
        assert (lease.folder / index.entry(0).raw.basename).read_bytes() == shard_content(0, SHARD_BYTES)
    assert sorted(store.asked, key=lambda asked: asked[0]) == expected


@pytest.mark.parametrize(("num_shards", "connections"), [(1, 4), (2, 2), (3, 1), (8, 1)])
def test_a_worker_shares_its_connections_among_the_shards_it_waits_for(num_shards: int, connections: int) -> None:
    given, all_began = [], threading.Barrier(min(4, num_shards), timeout=30)

    class Cache:
        def lease(self, entry: int, wait_s: float, connections: int) -> Lease:
            given.append(connections)
            all_began.wait()
            return Lease(Path(), None)

    queue, cache = FetchQueue(4), Cache()
    fetches = added(queue, cache, *range(num_shards))
    for fetch in fetches:
        fetch.result(30)
    assert given[: min(4, num_shards)] == [connections] * min(4, num_shards)
    queue.close()


def test_a_fetch_waits_for_room_until_a_batch_waits_for_it_or_it_is_dropped() -> None:
    asked: Counter[int] = Counter()

    class Cache:
        def lease(self, entry: Any, wait_s: float, connections: int) -> Lease:
            asked[entry.number] += 1
            if entry.number == 0 and asked[0] > 3:
                return Lease(Path(), None)
            raise InUseError("no room")

    origin = SimpleNamespace(origin="rows")
    cache: Any = Cache()
    cache.store = SimpleNamespace(url="/data")
    queue = FetchQueue(4)
    later, urgent, dropped = added(queue, cache, *(SimpleNamespace(number=k, raw=origin) for k in range(3)))
    later.result(10).close()  # type: ignore[union-attr]
    until(lambda: asked[1] > 3 < asked[2])
    assert not urgent.done()
    queue.first([urgent])
    queue.drop(dropped)
    for fetch in (urgent, dropped):
        assert isinstance(fetch.exception(10), InUseError)
    queue.close()


def added(queue: FetchQueue, cache: Any, *numbers: Any) -> list[Fetch]:
    fetches = [Fetch(cache, number) for number in numbers]
    queue.add(fetches)
    return fetches


def until(is_so: Callable[[], object]) -> None:
    """Wait until something is so that soon is."""
    deadline = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def pool_of(cache: Any) -> ShardPool:
    """A pool of eight shards, which fetches with four threads."""
    shards: Any = SimpleNamespace(
        num_shards=8,
        num_joined=0,
        is_limited=False,
        config=ReaderConfig(),
        counters=Counters(),
        entry=lambda number: (cache, number),
    )
    return ShardPool(shards)


def test_more_is_worth_fetching_while_shards_are_waited_for_and_threads_are_idle() -> None:
    go = threading.Event()

    class Cache:
        def present(self, entry: int) -> bool:
            return go.is_set()

        def lease(self, entry: int, wait_s: float | None = None, connections: int = 1) -> Lease:
            if wait_s == 0 and entry == 9 and not go.is_set():
                raise LockTimeoutError("another process fetches it")
            assert go.wait(30)
            return Lease(Path(), None)

    queue = FetchQueue(2)
    assert not queue.has_idle_threads()  # nothing is missing
    (elsewhere,) = added(queue, Cache(), 9)
    assert queue.has_idle_threads()  # what another process fetches takes no connection of ours
    until(elsewhere.done)
    assert not elsewhere.has_come()
    until(queue.has_idle_threads)  # the answer comes a little before its thread is free
    (first,) = added(queue, Cache(), 0)
    until(queue.has_idle_threads)  # the thread that asked for the other one may still be busy
    (second,) = added(queue, Cache(), 1)
    until(lambda: not queue.has_idle_threads())  # both threads are at work
    assert not second.done()
    go.set()
    until(elsewhere.has_come)
    assert elsewhere.arrived is not None
    assert first.result(30)
    assert second.result(30)
    until(lambda: not queue.has_idle_threads())
    queue.close()


def test_the_lease_of_a_shard_that_was_dropped_as_it_came_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_stream.reading.fetch_queue._LOOK_S", 60)  # between two looks
    leases = []
    go = threading.Event()

    class Cache:
        def present(self, entry: int) -> bool:
            assert go.wait(30)
            return entry == 0

        def lease(self, entry: int, wait_s: float | None = None, connections: int = 1) -> Lease:
            if not go.is_set():
                raise LockTimeoutError("another process fetches it")
            queue.drop(fetches[0])
            lease = Lease(Path(), None)
            leases.append(weakref.ref(lease))
            return lease

    queue = FetchQueue(1)
    fetches = added(queue, Cache(), 0, 1)
    until(lambda: fetches[0].done() and fetches[1].done())
    go.set()
    until(lambda: leases)
    fetches.clear()
    until(lambda: leases[0]() is None)
    queue.close()


def test_a_shard_that_is_dropped_while_another_process_fetches_it_is_not_looked_for() -> None:
    class Cache:
        def lease(self, *_: Any) -> Lease:
            until(lambda: fetches)
            queue.drop(fetches[0])
            raise LockTimeoutError("another process fetches it")

    fetches: list[Fetch] = []
    queue = FetchQueue(2)
    fetches += added(queue, Cache(), 0)
    until(fetches[0].done)
    until(lambda: not queue.has_idle_threads())
    queue.close()


class Gate:
    """A cache whose shards come once `go` is set; it notes which were asked for, and `fails` for some."""

    def __init__(self, *fails: int) -> None:
        self.go, self.fails = threading.Event(), fails
        self.asked: list[int] = []

    def lease(self, entry: int, wait_s: float | None = None, connections: int = 1) -> Lease:
        self.asked.append(entry)
        assert self.go.wait(30)
        if entry in self.fails:
            raise NotFoundError(f"no shard {entry}")
        return Lease(Path(), None)


@pytest.mark.parametrize("fails", [(), (0,)])
def test_shards_of_later_batches_are_fetched_once_those_of_the_first_have_come(fails: tuple[int, ...]) -> None:
    cache = Gate(*fails)
    pool = pool_of(cache)
    pool.want([0, 1])
    later, unused = pool.want([2, 3]), pool.want([4])
    fetches = dict(pool.fetches)
    pool.drop(unused.shard_ids)
    assert not pool.queue.has_idle_threads()
    until(lambda: len(cache.asked) == 2)
    with pytest.raises(TimeoutError):
        fetches[2].result(0.2)
    assert sorted(cache.asked) == [0, 1]
    pool.fetch_first([3])  # a sample that is read now
    until(lambda: len(cache.asked) == 3)
    assert sorted(cache.asked) == [0, 1, 3]
    cache.go.set()
    fetches[2].result(30)
    assert fetches[4].cancelled()
    assert sorted(cache.asked) == [0, 1, 2, 3]
    pool.want([5, 6])
    for number in (5, 6):
        pool.fetches[number].result(30)
    pool.drop(later.shard_ids)
    pool.close()


def test_shards_of_later_batches_are_fetched_once_the_first_one_has_what_it_needs() -> None:
    """Also where that came before its shards were whole."""
    cache = Gate()
    pool = pool_of(cache)
    pool.want([0, 1])
    pool.want([2])
    pool.queue.start_later()
    until(lambda: len(cache.asked) == 3)
    assert sorted(cache.asked) == [0, 1, 2]
    cache.go.set()
    pool.close()


def test_what_a_batch_waits_for_is_fetched_before_what_waits_for_a_thread() -> None:
    cache, queue = Gate(), FetchQueue(1)
    fetches = added(queue, cache, 0, 1, 2, 3)
    until(lambda: cache.asked)
    queue.first(fetches[3:])
    cache.go.set()
    for fetch in fetches:
        fetch.result(30)
    assert cache.asked == [0, 3, 1, 2]
    queue.close()


def test_a_fetch_that_waits_for_room_keeps_no_shard_that_nobody_wants_any_more() -> None:
    go = threading.Event()
    came: list[weakref.ref[Lease]] = []

    class Cache:
        def lease(self, entry: int, wait_s: float | None = None, connections: int = 1) -> Lease:
            lease = Lease(Path(), None)
            if entry == 0:
                assert go.wait(30)
            else:
                came.append(weakref.ref(lease))
            return lease

    pool = pool_of(Cache())
    batch = pool.want([0, 1])
    until(pool.fetches[1].done)
    batch.drop()
    until(lambda: came[0]() is None)
    go.set()
    pool.close()


def test_a_process_that_is_closed_fetches_no_shards_of_later_batches() -> None:
    cache = Gate()
    pool = pool_of(cache)
    for number in (0, 1):
        pool.want([number])
    first, second = pool.fetches[0], pool.fetches[1]
    until(lambda: cache.asked)
    pool.close()
    cache.go.set()
    first.result(30)
    assert second.cancelled()
    assert cache.asked == [0]


@pytest.mark.parametrize(
    ("predownload", "cache_limit", "idle", "expected"),
    [(None, None, False, 9), (None, None, True, 50), (16, None, True, 3), (None, "1mb", True, 9)],
)
def test_with_idle_connections_is_read_further_ahead_unless_predownload_or_a_limit_says_how_far(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    predownload: int | None,
    cache_limit: str | None,
    idle: bool,
    expected: int,
) -> None:
    write_ids(tmp_path / "d", range(400), size_limit=1000)
    monkeypatch.setattr(FetchQueue, "has_idle_threads", lambda _: idle)
    seen: list[int] = []

    def note(reader: SampleReader, ids: NDArray[np.int64]) -> Want:
        seen.extend(ids.tolist())
        return Want(reader.shards.pool, [])

    monkeypatch.setattr(SampleReader, "read_ahead", note)
    dataset = StreamingDataset(remote=tmp_path / "d", local=tmp_path / "cache", cache_limit=cache_limit, batch_size=8)
    source = source_of(dataset)
    batches = source.settings(World(), 8, 1, "pad").micro_batches(source, Start())
    next(read_ahead(source.reader, batches.plan, batches.walk(), predownload, 8))
    assert len(seen) == 8 * expected


def test_a_shard_that_a_slower_worker_may_need_is_not_done_with_however_many_batches_wait(tmp_path: Path) -> None:
    write_ids(tmp_path / "d", range(400), size_limit=1000)
    dataset = StreamingDataset(remote=tmp_path / "d", local=tmp_path / "cache", cache_limit="1mb", batch_size=8)
    source = source_of(dataset)
    batches = source.settings(World(), 8, 1, "pad").micro_batches(source, Start())
    end = 400
    for num_waiting, may_be_needed in ((2, False), (20, True)):
        ahead = read_ahead(source.reader, batches.plan, batches.walk(), 8, 8, num_workers=2, num_waiting=num_waiting)
        for _ in range(30):
            next(ahead)
        (next_use,) = source.reader.shards.pool.plans.values()
        assert (end <= next_use(1) < end + 1) == may_be_needed  # else its next use is in the next epoch
        ahead.close()
