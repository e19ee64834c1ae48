"""A worker outlives the signals of a whole job, ends when its trainer asks or is gone, and passes nothing on."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from lightning_stream import MDSWriter

METHODS = pytest.mark.parametrize(
    "method", ["fork", *(pytest.param(name, marks=pytest.mark.slow) for name in ("spawn", "forkserver"))]
)
TRAINER = """
import multiprocessing, os, signal, subprocess, sys, time
from torch.utils.data import DataLoader, IterableDataset
from lightning_stream.loading import worker_signals
from lightning_stream.loading.worker_signals import leave_signals_to_the_trainer, let_terminate_end_at_once

class Batches(IterableDataset):
    def __init__(self, work, grace_s):
        self.trainer, self.work, self.grace_s = os.getpid(), work, grace_s
    def __iter__(self):
        worker_signals._GRACE_S = self.grace_s
        leave_signals_to_the_trainer(self.trainer)
        leave_signals_to_the_trainer(self.trainer)
        while True:
            yield os.getpid(), self.work()

def nothing():
    pass

def stop_a_process():
    child = subprocess.Popen(["sleep", "600"])
    child.send_signal(signal.SIGTERM)
    code = child.wait(60)
    child = subprocess.Popen(["sleep", "600"])
    child.send_signal(signal.SIGINT)
    return code, child.wait(60)

def stop_a_fork():
    if (child := os.fork()) == 0:
        time.sleep(600)
        os._exit(1)
    os.kill(child, signal.SIGTERM)
    return os.waitpid(child, 0)[1]

def start(work, method, grace_s=3600):
    batches = iter(DataLoader(Batches(work, grace_s), batch_size=None, num_workers=1, multiprocessing_context=method))
    let_terminate_end_at_once(batches._workers)
    return batches

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where the tests run in the background
"""


@contextmanager
def trainer(tmp_path: Path, body: str) -> Iterator[subprocess.Popen[str]]:
    """Run a trainer whose main part is the body."""
    script = tmp_path / "trainer.py"
    script.write_text(TRAINER + textwrap.indent(body, "    "))
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def wait_for_end(pid: int, timeout_s: float) -> bool:
    """Whether a process, which may be nobody's child here, ends in time."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        events = select.poll()  # unlike select, for any number of open files
        events.register(fd, select.POLLIN)
        return bool(events.poll(timeout_s * 1000))
    finally:
        os.close(fd)


LIFE = """
batches = start(nothing, {method!r})
worker, _ = next(batches)
for number in (signal.SIGINT, signal.SIGTERM):
    subprocess.run(["kill", f"-{{int(number)}}", str(worker)], check=True)
    for _ in range(5):
        assert next(batches)[0] == worker
(process,) = [one for one in multiprocessing.active_children() if one.pid == worker]
process.terminate()
process.join(60)  # much less than the grace period
print("ended", process.exitcode, flush=True)
batches._shutdown_workers()
last = start(nothing, {method!r})
print(next(last)[0], flush=True)
time.sleep(600)
"""


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="asks Linux when a process ends")
@METHODS
def test_a_worker_outlives_a_jobs_signals_and_ends_when_its_trainer_asks_or_is_gone(
    tmp_path: Path, method: str
) -> None:
    with trainer(tmp_path, LIFE.format(method=method)) as process:
        assert line(process) == "ended 0"
        worker = int(line(process))
        process.kill()
        process.wait()
        assert wait_for_end(worker, 60)


OTHERS = """
for work in (stop_a_process, stop_a_fork):
    batches = start(work, "fork")
    print(next(batches)[1], flush=True)
    batches._shutdown_workers()

batches = start(nothing, "fork", grace_s=0.5)
worker, _ = next(batches)
(process,) = multiprocessing.active_children()
os.kill(worker, signal.SIGTERM)
process.join(60)
print("after grace", process.exitcode, flush=True)
batches._shutdown_workers()

gone = subprocess.Popen(["true"])
gone.wait()
if (worker := os.fork()) == 0:
    leave_signals_to_the_trainer(gone.pid)
    time.sleep(600)
    os._exit(1)
print("no trainer", os.waitpid(worker, 0)[1], flush=True)
"""


def test_what_a_worker_starts_ends_by_signals_and_the_worker_after_its_grace_or_without_a_trainer(
    tmp_path: Path,
) -> None:
    with trainer(tmp_path, OTHERS) as process:
        assert [line(process) for _ in range(4)] == ["[-15, -2]", "15", "after grace 0", "no trainer 0"]


JOB = """
import os, signal, sys, time
from pathlib import Path
import numpy as np
from lightning_stream import StreamingDataLoader, StreamingDataset

def slow(sample):
    time.sleep(0.005)
    return sample

def own_handler(worker):
    signal.signal(signal.SIGUSR1, lambda *_: Path({folder!r}, f"worker{{worker}}").touch())

if __name__ == "__main__":
    trainer, got = os.getpid(), []
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, lambda number, _: got.append((os.getpid(), number)))
    dataset = StreamingDataset({data!r}, transform=slow)
    loader = StreamingDataLoader(
        dataset, 4, num_workers=2, multiprocessing_context={method!r}, worker_init_fn={init}
    )
    seen, batches = [], iter(loader)
    print("starts", flush=True)
    for batch in batches:
        seen += batch["x"].tolist()
        if len(seen) == 4:
            print("goes on", flush=True)
            sys.stdin.readline()
    assert sorted(seen) == list(range(200)), seen
    assert {{pid for pid, _ in got}} == {{trainer}}, got
    print(*sorted({{int(number) for _, number in got}}), flush=True)
"""


@METHODS
def test_the_signals_of_a_job_reach_its_trainer_alone(tmp_path: Path, method: str) -> None:
    with MDSWriter(out=tmp_path / "data", columns={"x": "int"}, size_limit=1000) as writer:
        for number in range(200):
            writer.write({"x": number})
    init = "own_handler" if method == "fork" else "None"
    script = JOB.format(data=str(tmp_path / "data"), method=method, folder=str(tmp_path), init=init)
    (tmp_path / "job.py").write_text(script)
    pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    command = [sys.executable, str(tmp_path / "job.py")]
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
    with subprocess.Popen(command, text=True, start_new_session=True, **pipes) as job:
        try:
            assert line(job) == "starts"
            for _ in range(20):  # while the workers start, too
                os.killpg(job.pid, signal.SIGUSR1)
                time.sleep(0.01)
            assert line(job) == "goes on"
            for number in numbers:
                os.killpg(job.pid, number)
            assert job.stdin is not None
            job.stdin.write("\n")
            out, err = job.communicate(timeout=120)
        finally:
            job.kill()
    assert [int(number) for number in out.split()] == sorted(map(int, numbers)), err
    assert not err
    handled = {f"worker{number}" for number in range(2)} if method == "fork" else set()
    assert {path.name for path in tmp_path.glob("worker*")} == handled


POOL = """
import os, signal, time
from lightning_stream.processes import ShardRange, run_partitions

def work(partition):
    print("works", flush=True)
    time.sleep(1)
    return os.getpid()

if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, lambda *_: None)
    print("starts", flush=True)
    done = run_partitions(work, [ShardRange(number, 0, 1) for number in range(4)], 2, lambda _: None)
    print(len(set(done.values())), "processes", flush=True)
"""


def test_a_pool_of_processes_outlives_the_signals_of_its_job(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(POOL)
    command = [sys.executable, str(tmp_path / "job.py")]
    pipes: dict[str, Any] = dict.fromkeys(("stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen(command, text=True, start_new_session=True, **pipes) as job:
        try:
            assert line(job) == "starts"
            os.killpg(job.pid, signal.SIGUSR2)  # while its processes start, too
            assert line(job) == "works"
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
                os.killpg(job.pid, number)
            out, err = job.communicate(timeout=120)
        finally:
            job.kill()
    assert (out.splitlines()[-1], err) == ("2 processes", "")
