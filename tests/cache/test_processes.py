"""Several processes on one cache folder: one fetch, one failure for all, nothing lost to a kill."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import subprocess
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from servers.fault_proxy import FaultProxy, Plan
from servers.shards import bytes_in, make_dataset, shard_content
from servers.web import WebServer
from servers.workers import read_all

from lightning_stream.cache import CacheConfig, ShardCache, Spaces
from lightning_stream.errors import CacheError, CacheFullError, LockTimeoutError
from lightning_stream.formats.index import Index
from lightning_stream.stores import LocalStore, open_store

SPAWN = multiprocessing.get_context("spawn")
SHARD_BYTES = 50_000
QUICK = {"first_pause_s": 0.01, "timeout_s": 60.0}


@pytest.fixture
def remote(tmp_path: Path) -> Iterator[WebServer]:
    make_dataset(tmp_path / "dataset", num_shards=12, shard_bytes=SHARD_BYTES, compression="zstd")
    with WebServer() as server:
        for path in (tmp_path / "dataset").iterdir():
            server.objects[f"/{path.name}"] = path.read_bytes()
        yield server


def start(server: WebServer, folder: Path, config: CacheConfig, said: Any, seed: int, epochs: int = 1) -> Any:
    arguments = (server.url, QUICK, folder, config, SHARD_BYTES, seed, epochs, said)
    process = SPAWN.Process(target=read_all, args=arguments)
    process.start()
    return process


def final_files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file() and ".lightning_stream" not in path.parts]


def test_eight_processes_cause_one_get_per_object(remote: WebServer, tmp_path: Path) -> None:
    said = SPAWN.Queue()
    workers = [start(remote, tmp_path / "cache", CacheConfig(), said, seed) for seed in range(8)]
    messages = [said.get(timeout=60) for _ in range(8 * 13)]
    for worker in workers:
        worker.join()
    assert Counter(kind for kind, *_ in messages) == {"read": 96, "end": 8}
    assert all(message[3] for message in messages if message[0] == "read")
    asked = Counter(path for _, path in remote.asked)
    assert sum(asked.pop(path) for path in list(asked) if "/versions/" in path) == 1  # whether there is a newer version
    assert asked == dict.fromkeys(remote.objects, 1)


def test_a_shard_that_cannot_be_had_is_an_error_in_every_process(remote: WebServer, tmp_path: Path) -> None:
    for name in [name for name in remote.objects if "shard" in name]:
        del remote.objects[name]
    said = SPAWN.Queue()
    workers = [start(remote, tmp_path / "cache", CacheConfig(), said, seed=0) for _ in range(3)]
    messages = [said.get(timeout=60) for _ in workers]
    for worker in workers:
        worker.join()
    assert {message[:1] + message[2:3] for message in messages} == {("error", "NotFoundError")}
    assert final_files(tmp_path / "cache") == [tmp_path / "cache" / "index.json"]


def test_killed_at_any_instant_they_leave_nothing_wrong(remote: WebServer, tmp_path: Path) -> None:
    cache, said, rng = tmp_path / "cache", SPAWN.Queue(), random.Random(1)
    config = CacheConfig(limit_bytes=4 * SHARD_BYTES)
    for seed in range(4):
        victim = start(remote, cache, config, said, seed, epochs=50)
        for _ in range(rng.randrange(1, 25)):
            assert said.get(timeout=60)[0] == "read"
        os.kill(victim.pid, signal.SIGKILL)
        victim.join()
        for path in final_files(cache):
            if path.suffix == ".mds":
                assert path.read_bytes() == shard_content(int(path.name.split(".")[1]), SHARD_BYTES)
        said = SPAWN.Queue()  # a kill may leave the old one's pipe with half a message
    survivor = start(remote, cache, config, said, seed=99)
    messages = [said.get(timeout=60) for _ in range(13)]
    survivor.join()
    assert [message[0] for message in messages] == ["read"] * 12 + ["end"]
    assert all(message[3] for message in messages[:-1])
    assert sum(path.stat().st_size for path in final_files(cache) if path.suffix == ".mds") <= config.limit_bytes
    assert list((cache / ".lightning_stream" / "drafts").iterdir()) == []


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(disk)]
    if os.getuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("cannot mount a small tmpfs: run as root")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def test_a_full_disk_is_an_error_that_says_how_much_and_leaves_what_was_there(small_disk: Path, tmp_path: Path) -> None:
    index = make_dataset(tmp_path / "d", num_shards=6, shard_bytes=SHARD_BYTES)
    cache = ShardCache(LocalStore(tmp_path / "d"), small_disk / "cache")
    with pytest.raises(CacheFullError, match=r"50,000 bytes are needed, [\d,]+ are free.*unchanged"):
        list(map(cache.ensure, map(index.entry, range(6))))
    here = final_files(small_disk / "cache")
    assert len(here) in (3, 4)
    for path in here:
        assert path.read_bytes() == shard_content(int(path.name.split(".")[1]), SHARD_BYTES)
    here[0].unlink()
    cache.ensure(index.entry(5))


def test_a_disk_that_fills_while_decompressing_is_the_same_error(small_disk: Path, tmp_path: Path) -> None:
    index = make_dataset(tmp_path / "d", num_shards=1, shard_bytes=120_000, compression="zstd")
    cache = ShardCache(LocalStore(tmp_path / "d"), small_disk)
    filler = small_disk / "filler"

    class Filling(LocalStore):
        def get(self, name: str, to: Any, num_bytes: int | None = None, connections: int = 1) -> int:
            written = super().get(name, to)
            filler.write_bytes(bytes(100_000))
            return written

    cache.store = Filling(tmp_path / "d")
    with pytest.raises(CacheFullError, match="are needed"):
        cache.ensure(index.entry(0))
    assert [path.name for path in final_files(small_disk)] == ["filler"]
    filler.unlink()
    cache.store = LocalStore(tmp_path / "d")
    cache.ensure(index.entry(0))


def as_another_user(dataset: Path, folder: Path, config: CacheConfig, said: Any) -> None:
    os.setgid(65534)
    os.setuid(65534)
    try:
        index = Index.from_bytes((dataset / "index.json").read_bytes(), str(dataset))
        cache = ShardCache(LocalStore(dataset), folder, config)
        for shard in range(index.num_shards):
            cache.ensure(index.entry(shard))
        said.put("all read")
    except CacheError as error:
        said.put(str(error))


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize("shared", [False, True])
def test_two_users_on_one_folder(shared: bool) -> None:
    with tempfile.TemporaryDirectory() as top:  # pytest's own folders are closed to others
        Path(top).chmod(0o755)
        dataset, folder = Path(top, "d"), Path(top, "cache")
        index = make_dataset(dataset)
        if shared:
            folder.mkdir()
            folder.chmod(0o777)
        config = CacheConfig(shared=shared, limit_bytes=20_000)
        ShardCache(LocalStore(dataset), folder, config).ensure(index.entry(0))
        fork = multiprocessing.get_context("fork")
        said = fork.Queue()
        child = fork.Process(target=as_another_user, args=(dataset, folder, config, said))
        child.start()
        answer = said.get(timeout=30)
        child.join()
        if shared:
            assert answer == "all read"
            for shard in range(4):
                ShardCache(LocalStore(dataset), folder, config).ensure(index.entry(shard))
        else:
            assert "belongs to root (mode 700)" in answer
            assert "choose another `local`" in answer


def stalled(server: WebServer, folder: Path, said: Any, count: int) -> list[Any]:
    options = {**QUICK, "timeout_s": 0.3, "retries": 1}
    arguments = (server.url, options, folder, CacheConfig(), SHARD_BYTES, 0, 1, said)
    workers = [SPAWN.Process(target=read_all, args=arguments) for _ in range(count)]
    for worker in workers:
        worker.start()
    return workers


def test_a_store_that_falls_silent_is_an_error_in_every_process_and_a_hang_in_none(
    remote: WebServer, tmp_path: Path
) -> None:
    said = SPAWN.Queue()
    with FaultProxy(remote.url, Plan(probability={"stall": 1.0})) as proxy:
        remote.url = proxy.url
        workers = stalled(remote, tmp_path / "cache", said, 3)
        messages = [said.get(timeout=60) for _ in workers]
    for worker in workers:
        worker.join()
    assert {message[:1] + message[2:3] for message in messages} == {("error", "UnavailableError")}
    assert all("shard.000" in message[3] for message in messages)


def test_waiting_for_another_process_ends_at_its_own_deadline(remote: WebServer, tmp_path: Path) -> None:
    index = Index.from_bytes(remote.objects["/index.json"], "here")
    cache = ShardCache(open_store(remote.url, QUICK), tmp_path / "cache", CacheConfig(wait_s=0.1))
    cache._place.prepare()
    with (
        cache._place.lock(index.entry(0).raw.basename),  # as another that fetches for ever would hold it
        pytest.raises(LockTimeoutError, match=r"waited 0\.1 s for the lock .*held by process"),
    ):
        cache.ensure(index.entry(0))
    cache.ensure(index.entry(0))


def read_in_child(cache: ShardCache, dataset: Path, said: Any) -> None:
    index = Index.from_bytes((dataset / "index.json").read_bytes(), str(dataset))
    for number in range(index.num_shards):
        with cache.lease(index.entry(number)) as lease:
            content = (lease.folder / index.entry(number).raw.basename).read_bytes()
        said.put(content == shard_content(number, SHARD_BYTES))


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_child_forked_while_threads_fetch_can_fetch_too(tmp_path: Path) -> None:
    index = make_dataset(tmp_path / "d", num_shards=8, shard_bytes=SHARD_BYTES)
    cache = ShardCache(LocalStore(tmp_path / "d"), tmp_path / "cache", CacheConfig(limit_bytes=5 * SHARD_BYTES))
    stop, fork = threading.Event(), multiprocessing.get_context("fork")
    said = fork.SimpleQueue()

    def fetch(first: int) -> None:
        number = first
        while not stop.is_set():
            cache.ensure(index.entry(number % 8))
            number += 1

    threads = [threading.Thread(target=fetch, args=(first,)) for first in (0, 4)]
    for thread in threads:
        thread.start()
    children = [fork.Process(target=read_in_child, args=(cache, tmp_path / "d", said)) for _ in range(6)]
    for child in children:
        child.start()
    answers = [said.get() for _ in range(6 * 8)]
    stop.set()
    for worker in (*threads, *children):
        worker.join(30)
    assert answers == [True] * 48
    assert [child.exitcode for child in children] == [0] * 6


def test_sixteen_threads_and_a_small_limit_lose_nothing(tmp_path: Path) -> None:
    index = make_dataset(tmp_path / "d", num_shards=20, shard_bytes=5000)
    cache = ShardCache(LocalStore(tmp_path / "d"), tmp_path / "cache", CacheConfig(limit_bytes=18 * 5000))

    def read(seed: int) -> int:
        right = 0
        for number in random.Random(seed).choices(range(20), k=60):
            with cache.lease(index.entry(number)) as lease:
                right += (lease.folder / f"shard.{number:05}.mds").read_bytes() == shard_content(number, 5000)
            assert bytes_in(cache._space) <= 18 * 5000
        return right

    with ThreadPoolExecutor(16) as pool:
        assert list(pool.map(read, range(16))) == [60] * 16
    held = {f"shard.{number:05}.mds" for number in range(20) if cache.present(index.entry(number))}
    assert bytes_in(cache._space) == 5000 * len(held) == sum(path.stat().st_size for path in final_files(cache.folder))


def beside_that_of_another_user(dataset: Path, top: Path, said: Any) -> None:
    os.setgid(65534)
    os.setuid(65534)
    index = Index.from_bytes((dataset / "index.json").read_bytes(), str(dataset))
    together = Spaces()
    config = CacheConfig(limit_bytes=30_000)
    theirs, ours = (ShardCache(LocalStore(dataset), top / name, config, together=together) for name in ("a", "b"))
    for shard in range(index.num_shards):
        ours.ensure(index.entry(shard))
    said.put([(theirs.present(entry), ours.present(entry)) for entry in map(index.entry, range(4))])


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize("closed", ["", ".lightning_stream", ".lightning_stream/held"])
def test_a_folder_of_another_user_does_not_count_for_the_limit(closed: str) -> None:
    with tempfile.TemporaryDirectory() as top:
        folder = Path(top, "a")
        index = make_dataset(Path(top, "d"))
        folder.mkdir()
        for shard in range(2):
            ShardCache(LocalStore(f"{top}/d"), folder, CacheConfig()).ensure(index.entry(shard))
        for path in (Path(top, "d"), folder, *folder.rglob("*")):
            if not path.is_symlink():
                path.chmod(0o755)
        Path(top).chmod(0o777)
        (folder / closed).chmod(0o755 if not closed else 0o700)
        fork = multiprocessing.get_context("fork")
        said = fork.Queue()
        child = fork.Process(target=beside_that_of_another_user, args=(Path(top, "d"), Path(top), said))
        child.start()
        answer = said.get(timeout=30)
        child.join()
        assert answer == [(True, False), (True, True), (False, True), (False, True)]
