"""Threads of one process read at the same time; a forked child reads whatever its parent's threads were at."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from lightning_stream import MDSWriter
from lightning_stream.cache import CacheConfig
from lightning_stream.reading import shard_table, stream_shards
from lightning_stream.reading.proofs import UnverifiedRead
from lightning_stream.reading.reader import SampleReader
from lightning_stream.reading.shard_table import ReaderConfig
from lightning_stream.reading.stream import CacheDefaults, Stream
from lightning_stream.reading.stream_shards import Deliveries, StreamShards
from lightning_stream.stores import LocalStore

NUM_SAMPLES = 400


@pytest.fixture(scope="module", params=["int", "str"])
def shards(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shards")
    value: Callable[[int], Any] = int if request.param == "int" else str
    with MDSWriter(out=folder, columns={"id": request.param}, size_limit=400) as writer:
        for number in range(NUM_SAMPLES):
            writer.write({"id": value(number)})
    return folder


def reader_of(shards: Path, folder: Path | None = None, limit_bytes: int | None = None, **config: Any) -> SampleReader:
    stream = Stream(remote=shards, local=folder)
    defaults = CacheDefaults(CacheConfig(limit_bytes=limit_bytes))
    return SampleReader(StreamShards([stream], defaults, ReaderConfig(**config)))


@contextmanager
def in_thread(call: Callable[[], Any]) -> Iterator[None]:
    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(call)
        yield
        done.result(30)


def test_an_open_shard_is_read_while_another_thread_fetches(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go, get = threading.Event(), threading.Event(), LocalStore.get
    reader = reader_of(shards, tmp_path)
    assert int(reader.sample(0)["id"]) == 0

    def slow(store: LocalStore, *given: Any) -> int:
        begun.set()
        assert go.wait(30)
        return get(store, *given)

    monkeypatch.setattr(LocalStore, "get", slow)
    with in_thread(lambda: reader.sample(NUM_SAMPLES - 1)):
        assert begun.wait(30)
        assert int(reader.sample(1)["id"]) == 1
        assert [int(number) for number in reader.batch(np.array([1, 0]))["id"]] == [1, 0]
        go.set()


@pytest.mark.parametrize("read", [lambda r, k: r.sample(k), lambda r, k: r.batch(np.array([k, k + 1]))])
def test_threads_decode_at_the_same_time(shards: Path, read: Callable[[SampleReader, int], Any]) -> None:
    together = threading.Barrier(2, timeout=30)

    def decode(data: bytes) -> bytes:
        if is_slow.is_set():
            together.wait()
        return data

    is_slow = threading.Event()
    reader = reader_of(shards, decoders={"id": decode})
    reader.batch(np.array([0, NUM_SAMPLES - 2]))
    is_slow.set()
    with in_thread(lambda: read(reader, 0)):
        read(reader, NUM_SAMPLES - 2)


@pytest.mark.parametrize("num_reads", [60, pytest.param(150, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("limit_bytes", [None, 14_000])
def test_shards_that_are_closed_while_they_are_read_stay_mapped(
    shards: Path, tmp_path: Path, limit_bytes: int | None, num_reads: int
) -> None:
    reader = reader_of(shards, tmp_path, limit_bytes, max_open_shards=2)

    def read(seed: int) -> None:
        generator = np.random.default_rng(seed)
        for _ in range(num_reads):
            ids = generator.integers(0, NUM_SAMPLES, 6)
            announced = reader.read_ahead(ids)
            assert [int(number) for number in reader.batch(ids)["id"]] == ids.tolist()
            assert int(reader.sample(int(ids[0]))["id"]) == ids[0]
            announced.drop()

    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(read, seed) for seed in range(4)]:
            done.result(60)
    process = reader.shards.pool
    assert process is not None
    assert len(process.open) <= (2 if limit_bytes is None else 0)
    assert (dict(process.wanted), process.fetches) == ({}, {})


def test_a_child_forked_while_a_thread_reads_reads_too(shards: Path, tmp_path: Path) -> None:
    reader = reader_of(shards, tmp_path, 100_000)
    announced = reader.read_ahead(np.arange(NUM_SAMPLES))
    process = reader.shards.pool
    assert process is not None
    held = [process.lock, process.queue._lock, *(pool._guard for pool in process.queue.pools)]
    is_held, go = threading.Event(), threading.Event()

    def hold() -> None:
        for lock in held:
            lock.acquire()
        is_held.set()
        go.wait(30)
        for lock in held:
            lock.release()

    with in_thread(hold):
        assert is_held.wait(30)
        child = os.fork()
        if not child:
            signal.alarm(20)
            found = None
            try:
                announced.drop()  # as an iterator does that the child inherits and drops
                reader.read_ahead(np.arange(20)).drop()
                found = int(reader.sample(7)["id"])
            finally:
                os._exit(int(found != 7))
        assert os.waitpid(child, 0)[1] == 0
        go.set()
    assert process.wanted.total() == reader.snapshot.num_shards


@pytest.mark.parametrize(
    ("of", "module", "name"), [("pool", stream_shards, "ShardPool"), ("caches", shard_table, "cache_of")]
)
def test_threads_that_ask_first_share_one_pool_and_its_caches(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, of: str, module: ModuleType, name: str
) -> None:
    """With two of either, one thread would not know what the other one has fetched again."""
    reader, together = reader_of(shards, tmp_path), threading.Barrier(2)
    make = getattr(module, name)

    def made(*given: Any) -> Any:
        with suppress(threading.BrokenBarrierError):  # where only one may make it
            together.wait(0.5)
        return make(*given)

    monkeypatch.setattr(module, name, made)
    with ThreadPoolExecutor(2) as threads:
        one, other = threads.map(lambda _: getattr(reader.shards, of), range(2))
    assert one is other is getattr(reader.shards, of)


@pytest.mark.parametrize("as_batch", [False, True])
@pytest.mark.parametrize("begin", [0, 200])
@pytest.mark.parametrize("limit_bytes", [None, 100_000])
@pytest.mark.parametrize("num_threads", [1, 6])
def test_damage_in_the_cache_is_repaired_for_every_thread_under_every_limit(
    tmp_path: Path, num_threads: int, limit_bytes: int | None, begin: int, as_batch: bool
) -> None:
    with MDSWriter(out=tmp_path / "data", columns={"text": "str"}, size_limit=1000, hashes=["xxh3_64"]) as writer:
        for number in range(NUM_SAMPLES):
            writer.write({"text": f"the text of {number:03}"})
    reader = reader_of(tmp_path / "data", tmp_path / "cache", limit_bytes)
    reader.fetch(np.arange(reader.snapshot.num_shards))
    for shard in (tmp_path / "cache").glob("*.mds"):
        with shard.open("r+b") as file:
            file.seek(begin)  # of the table, so that it cannot be opened; of the samples, so that these cannot be read
            file.write(b"\xff" * (shard.stat().st_size - begin))
    together = threading.Barrier(num_threads)

    def read() -> list[str]:
        together.wait(30)
        if not as_batch:
            return [reader.sample(number)["text"] for number in range(NUM_SAMPLES)]
        return [
            text for first in range(0, NUM_SAMPLES, 40) for text in reader.batch(np.arange(first, first + 40))["text"]
        ]

    with ThreadPoolExecutor(num_threads) as pool:
        for done in [pool.submit(read) for _ in range(num_threads)]:
            assert done.result(60) == [f"the text of {number:03}" for number in range(NUM_SAMPLES)]
    reader.close()


def test_what_one_thread_delivers_while_another_compares_is_compared_too() -> None:
    """The worst moment of the other thread: between what was compared, and its change of what is not compared yet."""
    compared: list[UnverifiedRead] = []

    def agreements(reads: list[UnverifiedRead], wait: bool) -> dict[UnverifiedRead, bool]:
        compared.extend(reads)
        return dict.fromkeys(reads, True)

    class Meanwhile(Deliveries):
        def __setattr__(self, name: str, value: object) -> None:
            if compared and later:
                self.add([later.pop()], "second")
            super().__setattr__(name, value)

        def forget(self) -> None:
            if later:
                self.add([later.pop()], "second")
            super().forget()

    first, second = (UnverifiedRead(shard_id, (0,), "", True) for shard_id in (1, 2))
    later = [second]
    delivered = Meanwhile(SimpleNamespace(pool=SimpleNamespace(agreements=agreements)))  # type: ignore[arg-type]
    delivered.add([first], "first")
    delivered.compare()
    later and delivered.add([later.pop()], "second")
    delivered.compare()
    assert compared == [first, second]


def test_released_shards_are_closed_with_their_threads_and_can_be_read_again(shards: Path, tmp_path: Path) -> None:
    reader = reader_of(shards, tmp_path)
    others = set(threading.enumerate())
    for _ in range(2):
        want = reader.read_ahead(np.array([0, NUM_SAMPLES - 1]))
        assert [int(reader.sample(number)["id"]) for number in (0, NUM_SAMPLES - 1)] == [0, NUM_SAMPLES - 1]
        want.drop()
        ours = set(threading.enumerate()) - others
        assert ours
        reader.shards.release()
        assert len(reader.shards.pool.open) == 0
        for thread in ours:
            thread.join(20)
            assert not thread.is_alive()
