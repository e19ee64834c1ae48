"""What all ranks measure becomes one answer: that of the rank which all others wait for."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from support.warm import python

torch = pytest.importorskip("torch")

import numpy as np  # noqa: E402

from lightning_stream import MDSWriter, StreamingDataLoader, StreamingDataset  # noqa: E402
from lightning_stream.monitoring.verdict import Verdict  # noqa: E402
from lightning_stream.trainers import monitor as trainers_monitor  # noqa: E402
from lightning_stream.trainers.monitor import DataMonitor  # noqa: E402

BATCH, NUM_SAMPLES = 8, 128
RANK = """
import json, os, sys, time, torch
from lightning_stream import StreamingDataLoader, StreamingDataset
from lightning_stream.loading import batches
from lightning_stream.monitoring.verdict import verdict_of
from lightning_stream.trainers.monitor import DataMonitor
batches._queued_s = lambda: 0.0  # a core that other programs use is a cause of its own
rank, said, seen = int(sys.argv[2]), [], []
torch.distributed.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=rank, world_size=2)
def slow(sample):  # rank 1 is late from its fifth batch on
    seen.append(0)
    end = time.perf_counter() + 0.05 * (rank and len(seen) > 4 * 8)
    while time.perf_counter() < end:
        pass
    return sample
loader = StreamingDataLoader(StreamingDataset(remote=sys.argv[3], transform=slow), 8)
monitor = DataMonitor(said.append)
monitor.attach(loader)
began = time.perf_counter()
for step, batch in enumerate(loader):
    end = time.perf_counter() + 0.01
    while time.perf_counter() < end:
        pass
    torch.distributed.barrier()
    if step in (1, 3, 5):
        before = monitor.stats()
        monitor.metrics(step)
loop_s, metrics, whole = time.perf_counter() - began, monitor.metrics(8), monitor.stats()
monitor.end()
stats = whole - before
parts = (whole.wait_s + whole.training_s + sum(whole.pauses.values())) / loop_s
found = metrics, stats.wait_share, [stats.num_samples, stats.elapsed_s], whole.pauses["other_ranks"], whole.wait_s
print(json.dumps([*found, verdict_of(whole).cause, parts, said]), flush=True)
torch.distributed.barrier()
os._exit(0)  # gloo's own end may abort where the other rank has ended already
"""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("monitored") / "data"
    with MDSWriter(out=str(folder), columns={"x": "ndarray:int32:8"}) as writer:
        for number in range(NUM_SAMPLES):
            writer.write({"x": np.full(8, number, np.int32)})
    return folder


@pytest.mark.distributed
def test_ranks_log_the_same_values_and_name_the_rank_that_waits(tmp_path: Path, data: Path) -> None:
    processes = [
        subprocess.Popen(
            [python(), "-W", "ignore", "-c", RANK, str(tmp_path / "meeting"), str(rank), str(data)],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        for rank in range(2)
    ]
    found = [json.loads(process.communicate(timeout=120)[0]) for process in processes]
    assert found[0][0] == found[1][0]
    metrics = found[0][0]
    assert metrics["data/wait_share"] == pytest.approx(max(share for _, share, *_ in found), rel=0.05)
    slowest_s = max((share, elapsed_s) for _, share, (_, elapsed_s), *_ in found)[1]
    num_samples = sum(count for _, _, (count, _), *_ in found)
    assert metrics["data/samples_per_s"] == pytest.approx(num_samples / slowest_s, rel=0.05)
    later_s = found[1][4] - found[0][4]  # that rank 1 got its batches, and that rank 0 waited for it
    assert found[0][3] == pytest.approx(later_s, rel=0.2)
    assert found[0][3] >= 4 * 8 * 0.05 > found[1][3] + 1
    assert [one[5] for one in found] == ["other_ranks", "transform"]
    for *_, parts, said in found:
        assert parts == pytest.approx(1.0, abs=0.02)  # of the time of the loop
        assert len(said) == 1
        assert said[0].startswith("Rank 1: Input-bound")
        assert "the transform takes" in said[0]


@pytest.mark.parametrize("late_from", [0, 4, 6])
def test_a_verdict_says_since_when_the_other_ranks_wait(
    data: Path, monkeypatch: pytest.MonkeyPatch, late_from: int
) -> None:
    ranks = np.zeros((2, len(trainers_monitor._NAMES)))
    monkeypatch.setattr(trainers_monitor, "gathered_numbers", lambda _: ranks.copy())
    said: list[str] = []
    monitor = DataMonitor(said.append)
    waited = trainers_monitor._WAITED
    for step in range(10):
        ranks[:, trainers_monitor._COMPUTED] += 1.0
        ranks[0, waited] += 0.02  # less than what makes a rank late
        ranks[1, waited] += 3.0 if step >= late_from else 0.03
        if step % 2:
            monitor.metrics(step)
    monitor.end()
    assert len(said) == 1
    assert said[0].startswith("Rank 1: ")
    since = f" The other ranks have waited for it since about step {late_from - 1}." if late_from else ""
    assert ("The other ranks" in said[0], said[0].endswith(since)) == (late_from > 0, True)


def test_a_cause_is_told_once_while_training_and_again_at_the_end(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(trainers_monitor, "_CHECKED_S", 0.0)
    monkeypatch.setattr(trainers_monitor, "_WORTH_S", 0.0)
    monkeypatch.setattr(trainers_monitor, "_WORTH_AT_END_S", 0.0)
    monkeypatch.setattr(trainers_monitor, "verdict_of", lambda _: Verdict("transform", "Input-bound 50%: why.", "Do."))
    monitor, loader = DataMonitor(said.append), StreamingDataLoader(StreamingDataset(remote=data), BATCH)
    monitor.attach(loader)
    for step, _ in enumerate(loader):
        monitor.metrics(step)
    assert said == ["Input-bound 50%: why. Do."]
    monitor.end()
    assert said == 2 * ["Input-bound 50%: why. Do."]
    monitor.detach()
    assert monitor.stats().num_samples == NUM_SAMPLES


def test_what_is_logged_is_about_the_time_since_it_was_logged_last(data: Path) -> None:
    monitor, loader = DataMonitor(print, watch_after_s=None), StreamingDataLoader(StreamingDataset(remote=data), BATCH)
    monitor.attach(loader)
    batches = iter(loader)
    for _ in range(3):
        next(batches)
    monitor.metrics(3)
    before = monitor.stats()
    next(batches)
    waited_s = monitor.stats().wait_s - before.wait_s
    assert monitor.metrics(4)["data/wait_ms"] == pytest.approx(1000 * waited_s)  # of one batch
