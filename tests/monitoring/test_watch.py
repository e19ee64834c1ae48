"""Where no batch comes, the stacks of all processes and the requests in flight are shown."""

from __future__ import annotations

import multiprocessing
import re
from pathlib import Path
from time import sleep
from typing import Any

import pytest
from servers.fault_proxy import FaultProxy, Plan
from support.metered_loading import served, write_metered

from lightning_stream import StreamingDataLoader, StreamingDataset
from lightning_stream.monitoring import watch as watching

LONGEST_S = 60


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_metered(tmp_path_factory.mktemp("watched") / "data", 256)


class StuckTransform:
    """Holds a sample until the test has seen the report."""

    def __init__(self, sample: int) -> None:
        self.sample, self.seen = sample, multiprocessing.Event()

    def __call__(self, sample: dict[str, Any]) -> dict[str, Any]:
        if sample["x"][0] == self.sample:
            assert self.seen.wait(LONGEST_S)
        return sample


@pytest.mark.usefixtures("workers_by_fork")
@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_stuck_transform_is_shown(data: Path, capfd: pytest.CaptureFixture[str], num_workers: int) -> None:
    stuck, said = StuckTransform(40), list[str]()
    loader = StreamingDataLoader(StreamingDataset(local=data, transform=stuck), 16, num_workers=num_workers)

    def say(sentence: str) -> None:
        said.append(sentence)
        # capfd's own reading truncates the file, and would lose what a worker writes at that moment
        while Path("/proc/self/fd/2").read_bytes().count(b"Requests in flight in worker") < num_workers:
            sleep(0.01)
        watch.close()  # a later wait on a busy machine would be reported too
        stuck.seen.set()

    batches = iter(loader)
    first = [next(batches) for _ in range(2)]  # all workers have begun
    with loader.watch(after_s=0.5, say=say) as watch:
        num_samples = sum(len(batch["x"]) for batch in (*first, *batches))
    assert num_samples == 256  # the report ends no worker
    assert any(one.startswith("No batch came for ") for one in said)
    text = capfd.readouterr().err
    assert "Thread MainThread:" in text
    assert "in __call__" in text
    assert f"The stacks of {num_workers} workers follow." in text or not num_workers
    assert text.count("Requests in flight in worker") == num_workers


def test_the_requests_in_flight_are_shown_and_a_word_comes_before_the_first_batch(
    data: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watching, "_FIRST_WORD_S", 0.2)
    monkeypatch.setattr(watching, "_LOOK_S", 0.1)
    said: list[str] = []

    def say(sentence: str) -> None:
        said.append(sentence)
        if sentence.startswith("No batch came"):
            proxy.plan.latency_s = 0.0

    with served(data) as server, FaultProxy(server.url, Plan(latency_s=0.0)) as proxy:
        dataset = StreamingDataset(remote=f"{proxy.url}/data", local=tmp_path / "cache")
        loader = StreamingDataLoader(dataset, 16)
        assert dataset.num_samples == 256  # the index is here
        proxy.plan.latency_s = LONGEST_S
        with loader.watch(after_s=0.6, say=say):
            next(iter(loader))
    first = [one for one in said if one.startswith("Waiting ")]
    assert "s for the first batch: 0.0 MB and 0 whole shards have arrived so far." in first[0]
    shown = capfd.readouterr().err
    assert re.search(rf"{proxy.url}/data/shard\.00000\.mds for \d", shown)


def test_nothing_is_said_while_batches_come(data: Path, capfd: pytest.CaptureFixture[str]) -> None:
    said: list[str] = []
    loader = StreamingDataLoader(StreamingDataset(local=data), 16)
    with loader.watch(after_s=30.0, say=said.append) as watch:
        for _ in loader:
            pass
    watch._thread.join(LONGEST_S)
    assert not watch._thread.is_alive()
    assert said == []
    assert capfd.readouterr().err == ""


def test_a_loader_that_is_no_longer_used_is_not_watched(data: Path) -> None:
    loader = StreamingDataLoader(StreamingDataset(local=data), 16)
    watch = loader.watch(after_s=0.05)
    del loader
    watch._thread.join(LONGEST_S)
    assert not watch._thread.is_alive()


@pytest.mark.parametrize("after_s", [0, float("nan")])
def test_the_time_to_wait_is_positive(data: Path, after_s: float) -> None:
    loader = StreamingDataLoader(StreamingDataset(local=data), 16)
    with pytest.raises(ValueError, match=f"after_s must be positive; found {after_s}"):
        loader.watch(after_s=after_s)
