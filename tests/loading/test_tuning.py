"""How shards are fetched may change while batches are made: order and batches stay the same."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from time import perf_counter
from typing import Any

import pytest
from servers.fault_proxy import FaultProxy, Plan
from servers.web import WebServer
from support.metered_loading import BATCH, loader_over, served, write_metered

from lightning_stream.threads import DaemonPool

LONGEST_S = 60


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_metered(tmp_path_factory.mktemp("tuned") / "data")


@pytest.fixture
def server(data: Path) -> Iterator[WebServer]:
    with served(data) as web:
        yield web


def wait_for(condition: Callable[[], bool]) -> None:
    end = perf_counter() + LONGEST_S
    while not condition():
        assert perf_counter() < end


def ids(batches: Any) -> list[list[int]]:
    return [batch["x"][:, 0].tolist() for batch in batches]


@pytest.mark.parametrize("how", ["here", "fork", "forkserver", "persistent"])
def test_batches_stay_the_same_and_more_is_fetched(data: Path, tmp_path: Path, server: WebServer, how: str) -> None:
    options: dict[str, Any] = {"persistent_workers": how == "persistent", "shuffle": False, "predownload": BATCH}
    options |= {"multiprocessing_context": "forkserver"} if how == "forkserver" else {}
    expected = ids(loader_over(data, tmp_path / "other", shuffle=False))
    loader = loader_over(f"{server.url}/data", tmp_path, 0 if how == "here" else 2, **options)
    batches = iter(loader)
    first = ids(islice(batches, 2))
    num_before = loader.stats().counters["shards_fetched"]
    loader.tune(predownload=1024, fetch_threads=7)
    second = ids(islice(batches, 10))
    wait_for(lambda: loader.stats().counters["shards_fetched"] == len(list(data.glob("shard.*"))))  # of the epoch
    assert num_before < 8
    assert (loader.stats().settings.predownload, loader.stats().settings.fetch_threads) == (1024, 7)
    loader.tune(predownload=0, fetch_threads=1)
    assert first + second + ids(batches) == expected
    assert (loader.stats().settings.predownload, loader.stats().settings.fetch_threads) == (BATCH, 1)
    again = loader_over(data, tmp_path / "other", shuffle=False)
    ids(again)
    assert ids(loader) == ids(again)  # the next epoch
    loader.close()


def test_more_threads_fetch_at_the_same_time(data: Path, tmp_path: Path, server: WebServer) -> None:
    with FaultProxy(server.url, Plan()) as proxy:
        loader = loader_over(f"{proxy.url}/data", tmp_path, shuffle=False, predownload=1024)
        assert loader.streaming.num_samples  # has the index
        loader.tune(fetch_threads=11)
        proxy.plan.latency_s = 2.0
        batches = iter(loader)
        assert ids(islice(batches, 1))  # whose shard is fetched before all others
        proxy.plan.latency_s = 60.0  # also for those that were just asked for
        num_bytes = proxy.counts["bytes"]
        wait_for(lambda: sum(count for (_, path), count in proxy.asked.copy().items() if "shard" in path) >= 1 + 11)
        assert proxy.counts["bytes"] == num_bytes  # none of the eleven is answered yet
        proxy.plan.latency_s = 0.0
        assert ids(batches)


def test_settings_of_a_running_loader_are_not_negative(data: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"settings of a running loader are at least 0; found .*-1"):
        loader_over(data, tmp_path).tune(predownload=-1)


def test_a_pool_grows_and_shrinks_while_it_runs() -> None:
    gate, names = threading.Semaphore(0), list[str]()

    def call() -> None:
        assert gate.acquire(timeout=LONGEST_S)
        names.append(threading.current_thread().name)

    with DaemonPool(1, "grown") as pool:
        calls = [pool.submit(call) for _ in range(4)]
        pool.resize(4)
        wait_for(lambda: not pool._calls.qsize())  # all four run
        pool.resize(2)
        gate.release(4)
        for one in calls:
            one.result(LONGEST_S)
        wait_for(lambda: sum(one.name.startswith("grown") for one in threading.enumerate()) == 2)
        wait_for(lambda: pool._idle._value == 2)
        calls = [pool.submit(call) for _ in range(4)]
        wait_for(lambda: pool._calls.qsize() == 2)
        gate.release(4)
        for one in calls:
            one.result(LONGEST_S)
    assert len(names) == 8
