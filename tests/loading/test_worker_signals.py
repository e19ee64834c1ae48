"""A worker outlives the signals of a whole job, ends when its trainer asks or is gone, and passes nothing on."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

pytest.importorskip("torch")

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
@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow), "forkserver"])
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
