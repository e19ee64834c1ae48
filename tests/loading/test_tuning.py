"""How shards are fetched may change while batches are made: order and batches stay the same."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from time import perf_counter
from typing import Any

import pytest
from servers.fault_proxy import FaultProxy, Plan
from servers.web import WebServer
from support.metered_loading import BATCH, loader_over, served, spend, write_metered

from lightning_stream.loading.tuning import Tuner
from lightning_stream.loading.verdict import LiveChange
from lightning_stream.threads import DaemonPool
from lightning_stream.trainers import monitor as trainers_monitor
from lightning_stream.trainers.monitor import DataMonitor

LONGEST_S = 60
FURTHER = LiveChange("predownload", 8, 256, 0.05)


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


def test_a_change_that_helps_is_kept() -> None:
    tuner = Tuner()
    assert tuner.decide(FURTHER, 0.38, 1200) is None
    assert tuner.settings == {"predownload": 256}
    said = tuner.decide(FURTHER, 0.04, 1500)
    assert said == (
        "Raised predownload from 8 to 256 at step 1,200: waiting fell from 38% to 4% of the time (predicted: 5%)."
    )
    assert tuner.settings == {"predownload": 256}


def test_a_change_that_does_not_help_is_put_back_and_not_tried_again() -> None:
    tuner = Tuner()
    assert tuner.decide(LiveChange("fetch_threads", 4, 8, 0.2), 0.4, 100) is None
    assert tuner.decide(None, 0.2, 200) is not None
    more = LiveChange("fetch_threads", 8, 16, 0.1)
    assert tuner.decide(more, 0.2, 300) is None
    said = tuner.decide(None, 0.19, 400)
    assert said is not None
    assert said.startswith("Raised fetch_threads from 8 to 16 at step 300, and put it back: waiting went from 20% to ")
    assert tuner.settings == {"fetch_threads": 8}
    assert tuner.decide(more, 0.2, 500) is None
    assert tuner.settings == {"fetch_threads": 8}


@pytest.mark.parametrize("num_workers", [0, 1])
def test_the_monitor_raises_what_is_too_low(
    data: Path, tmp_path: Path, server: WebServer, num_workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainers_monitor, "_CHECKED_S", 0.0)
    monkeypatch.setattr(trainers_monitor, "_WORTH_S", 0.0)
    said: list[str] = []
    monitor = DataMonitor(said.append, "tune", watch_after_s=None)
    expected = ids(loader_over(data, tmp_path / "other", shuffle=False))
    with FaultProxy(server.url, Plan()) as proxy:
        loader = loader_over(f"{proxy.url}/data", tmp_path, num_workers, shuffle=False, predownload=BATCH)
        assert loader.num_samples  # the index is here
        proxy.plan.latency_s = 0.1
        monitor.attach(loader)
        found = []
        for step, batch in enumerate(loader):
            found += ids([batch])
            spend(0.02)
            if step % 16 == 15:
                monitor.metrics(step)
    assert found == expected
    raised = [one for one in said if one.startswith("Raised predownload from 16 to ")]
    assert len(raised) == 1, said
    assert re.search(r"at step \d+: waiting fell from ", raised[0])
    other = loader_over(data, tmp_path, shuffle=False, predownload=BATCH)
    monitor.attach(other)  # as a trainer does that makes a loader for each epoch
    assert other.loading_settings().predownload > BATCH
    monitor.detach()


def test_the_monitor_changes_nothing_by_default(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainers_monitor, "_CHECKED_S", 0.0)
    monkeypatch.setattr(trainers_monitor, "_WORTH_S", 0.0)
    loader = loader_over(data, tmp_path, predownload=1)
    monitor = DataMonitor([].append, watch_after_s=None)
    monitor.attach(loader)
    for step, _ in enumerate(loader):
        monitor.metrics(step)
    assert not loader.meter.live_settings.any()


def test_the_monitor_names_the_modes_that_it_has() -> None:
    with pytest.raises(ValueError, match="monitor= is True, False or \"tune\"; found 'tuned'"):
        DataMonitor(print, "tuned")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="watch_after_s= is positive, or None for no watch; found 0"):
        DataMonitor(print, watch_after_s=0)
