"""The workers of a node want the same shards first: they fetch them together, none waits in another's place."""

from __future__ import annotations

import multiprocessing
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from servers.web import Handler, WebServer  # noqa: E402

from lightning_stream import MDSWriter, StreamingDataLoader, StreamingDataset  # noqa: E402
from lightning_stream.cache import ShardCache  # noqa: E402
from lightning_stream.errors import NotFoundError  # noqa: E402

NUM_SAMPLES, WORKERS, THREADS = 320, 2, 4


class Gathering(WebServer):
    """Answers for shards once so many different ones are asked for at the same time."""

    def __init__(self) -> None:
        super().__init__()
        self.together = threading.Barrier(WORKERS * THREADS)

    def handler(self) -> type[Handler]:
        return _GatheringHandler


class _GatheringHandler(Handler):
    def answer(self) -> None:
        if "shard" in self.where and not self.owner.together.broken:
            try:
                self.owner.together.wait(20)
                self.owner.together.abort()  # the others may come as they like
            except threading.BrokenBarrierError:
                pass
        super().answer()


def write(folder: Path, server: WebServer) -> None:
    with MDSWriter(out=folder, columns={"id": "int", "x": "ndarray:float32:8"}, size_limit=1000) as writer:
        for number in range(NUM_SAMPLES):
            writer.write({"id": number, "x": np.full(8, number, np.float32)})
    for path in folder.iterdir():
        server.objects[f"/{path.name}"] = path.read_bytes()


def test_two_workers_fetch_eight_shards_at_once(tmp_path: Path) -> None:
    with Gathering() as server:
        write(tmp_path / "data", server)
        met: list[int] = []
        server.together = threading.Barrier(WORKERS * THREADS, action=lambda: met.append(1))
        dataset = StreamingDataset(remote=server.url, local=tmp_path / "cache", shuffle=True)
        loader = StreamingDataLoader(dataset, 16, num_workers=WORKERS)
        seen = [number for batch in loader for number in batch["id"].tolist()]
        assert sorted(seen) == list(range(NUM_SAMPLES))
        assert met  # with fewer at once, they had waited in vain
        asked = [path for _, path in server.asked if "shard" in path]
        assert len(asked) == len(set(asked)) == dataset.snapshot.num_shards


@pytest.mark.parametrize("num_workers", [0, WORKERS])
def test_a_start_asks_once_for_the_index_and_once_whether_there_is_a_newer_version(
    tmp_path: Path, num_workers: int
) -> None:
    with WebServer() as server:
        write(tmp_path / "data", server)
        for is_first in (True, False):  # the second start finds the shards in the cache
            server.asked.clear()
            dataset = StreamingDataset(remote=server.url, local=tmp_path / "cache", shuffle=True)
            assert (
                sum(len(batch["id"]) for batch in StreamingDataLoader(dataset, 16, num_workers=num_workers))
                == NUM_SAMPLES
            )
            root = dataset.snapshot.stream_digests[0][:16]
            asked = Counter(path for _, path in server.asked if "shard" not in path)
            assert asked == {"/index.json": 1, f"/versions/{root}/00000001.json": 1}
            num_shards = dataset.snapshot.num_shards if is_first else 0
            assert server.count("GET", "shard") == len(server.asked) - 2 == num_shards


@pytest.mark.parametrize("reads_ahead", [True, False])
def test_a_batch_fetches_all_its_shards_at_once(tmp_path: Path, reads_ahead: bool) -> None:
    with Gathering() as server:
        write(tmp_path / "data", server)
        met: list[int] = []
        server.together = threading.Barrier(3 * THREADS, action=lambda: met.append(1))
        dataset = StreamingDataset(remote=server.url, local=tmp_path / "cache", shuffle=True, num_canonical_nodes=16)
        if reads_ahead:
            batch = next(iter(StreamingDataLoader(dataset, 64)))
        else:
            batch = dataset.read_batch(np.arange(0, NUM_SAMPLES, 10))
        assert len(batch["id"]) == (64 if reads_ahead else NUM_SAMPLES // 10)
        assert met


def test_what_fails_for_one_worker_fails_for_the_other(tmp_path: Path) -> None:
    with WebServer() as server:
        write(tmp_path / "data", server)
        del server.objects["/shard.00003.mds"]
        dataset = StreamingDataset(remote=server.url, local=tmp_path / "cache", shuffle=True)
        with pytest.raises(NotFoundError, match=r"shard\.00003\.mds"):
            list(StreamingDataLoader(dataset, 16, num_workers=WORKERS))


def hold(cache: ShardCache, name: str, is_held: Any) -> None:
    assert cache._place.lock(name).try_acquire()
    is_held.set()
    time.sleep(60)


@pytest.mark.parametrize("dies", [False, True])
def test_what_another_process_fetches_comes_also_where_that_process_dies(tmp_path: Path, dies: bool) -> None:
    """While it lives, one thread looks for its shard; a thread that needs the shard takes over from a dead one."""
    with WebServer() as server:
        write(tmp_path / "data", server)
        dataset = StreamingDataset(remote=server.url, local=tmp_path / "cache", shuffle=False)
        reader, name = dataset.reader, dataset.reader.entry(0)[1].raw.basename
        reader.caches[0]._place.prepare()
        context = multiprocessing.get_context("fork")
        is_held = context.Event()
        other = context.Process(target=hold, args=(reader.caches[0], name, is_held))
        other.start()
        try:
            assert is_held.wait(30)
            want = reader.read_ahead(np.arange(4))
            (fetch,) = reader.shards.pool.fetches.values()
            assert fetch.result(30) is None
            assert fetch.is_elsewhere
            if dies:
                other.kill()
                assert reader.batch(np.arange(4))["id"].tolist() == [0, 1, 2, 3]
            else:
                (tmp_path / "cache" / name).write_bytes(server.objects[f"/{name}"])
                while not fetch.has_come():
                    time.sleep(0.01)
                assert fetch.arrived or reader.batch(np.arange(4))["id"].tolist() == [0, 1, 2, 3]
            want.drop()
            assert not reader.shards.pool.fetches
        finally:
            other.kill()
            other.join()
