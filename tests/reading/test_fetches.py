"""Where fewer shards are missing than a worker has connections, the idle ones help: a shard comes as several ranges."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
from servers.shards import make_dataset, shard_content
from support.data import write_ids

from lightning_stream import StreamingDataset
from lightning_stream.cache import Lease, ShardCache
from lightning_stream.dataset import source_of
from lightning_stream.errors import LockTimeoutError, NotFoundError
from lightning_stream.formats.shard import open_shard
from lightning_stream.loading.shared_position import Start
from lightning_stream.order import World
from lightning_stream.reading.fetches import ReaderProcess
from lightning_stream.reading.look_ahead import read_ahead
from lightning_stream.reading.reader import SampleReader
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

    process = ReaderProcess(8, 4, lambda number, entry, folder: open_shard(entry, folder))
    shards: list[Any] = [(Cache(), number) for number in range(num_shards)]
    for fetch in process.fetch(shards):
        fetch.result(30)
    assert given[: min(4, num_shards)] == [connections] * min(4, num_shards)
    process.close()


def test_more_is_worth_fetching_while_shards_are_waited_for_and_threads_are_idle() -> None:
    go = threading.Event()

    class Cache:
        def lease(self, entry: int, wait_s: float | None = None, connections: int = 1) -> Lease:
            if wait_s == 0 and entry == 9:
                raise LockTimeoutError("another process fetches it")
            assert go.wait(30)
            return Lease(Path(), None)

    def shards(*numbers: int) -> list[Any]:
        return [(Cache(), number) for number in numbers]

    process = ReaderProcess(8, 2, lambda number, entry, folder: open_shard(entry, folder))
    assert not process.could_fetch_more()  # nothing is missing
    fetches = process.fetch(shards(9))
    assert process.could_fetch_more()  # what another process fetches takes no connection of ours
    fetches += process.fetch(shards(0))
    deadline = time.monotonic() + 30
    while not process.could_fetch_more():  # until a thread has found that out
        assert time.monotonic() < deadline
        time.sleep(0.001)
    fetches += process.fetch(shards(1))
    with pytest.raises(TimeoutError):
        fetches[-1].result(0.2)
    assert not process.could_fetch_more()  # both threads are at work
    go.set()
    for fetch in fetches:
        fetch.result(30)
    assert not process.could_fetch_more()
    process.close()


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

    def entry(self, number: int) -> Any:
        return self, number


@pytest.mark.parametrize("fails", [(), (0,)])
def test_shards_of_later_batches_are_fetched_once_those_of_the_first_have_come(fails: tuple[int, ...]) -> None:
    cache = Gate(*fails)
    process = ReaderProcess(8, 4, lambda number, entry, folder: open_shard(entry, folder))
    with process.lock:
        process.announce([0, 1])
        process.begin([0, 1], cache.entry)
        later, unused = process.announce([2, 3]), process.announce([4])
        process.begin([2, 3, 4], cache.entry)
    fetches = dict(process.fetches)
    process.take_back(unused.numbers)
    assert not process.could_fetch_more()
    with pytest.raises(TimeoutError):
        fetches[2].result(0.2)
    assert sorted(cache.asked) == [0, 1]
    process.hurry([3], cache.entry)  # a sample that is read now
    with pytest.raises(TimeoutError):
        fetches[3].result(0.2)
    assert sorted(cache.asked) == [0, 1, 3]
    cache.go.set()
    fetches[2].result(30)
    assert fetches[4].cancelled()
    assert sorted(cache.asked) == [0, 1, 2, 3]
    with process.lock:
        process.begin([5, 6], cache.entry)
    for number in (5, 6):
        process.fetches[number].result(30)
    process.take_back(later.numbers)
    process.close()


def test_a_process_that_is_closed_fetches_no_shards_of_later_batches() -> None:
    cache = Gate()
    process = ReaderProcess(8, 4, lambda number, entry, folder: open_shard(entry, folder))
    first, second = (process.fetch([cache.entry(number)])[0] for number in (0, 1))
    process.fetches.update({0: first, 1: second})
    process.close()
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
    monkeypatch.setattr(ReaderProcess, "could_fetch_more", lambda _: idle)
    seen: list[int] = []
    monkeypatch.setattr(SampleReader, "read_ahead", lambda _, ids: seen.extend(ids))
    dataset = StreamingDataset(remote=tmp_path / "d", local=tmp_path / "cache", cache_limit=cache_limit, batch_size=8)
    source = source_of(dataset)
    batches = source.settings(World(), 8, 1, "pad").micro_batches(source, Start())
    next(read_ahead(source.reader, batches.plan, batches.walk(), predownload, 8))
    assert len(seen) == 8 * expected
