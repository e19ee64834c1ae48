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
    "method",
    ["fork", pytest.param("forkserver", marks=pytest.mark.slow), pytest.param("spawn", marks=pytest.mark.nightly)],
)
TRAINER = """
import multiprocessing, os, signal, subprocess, sys, time
from lightning_stream import MDSWriter, StreamingDataLoader, StreamingDataset

class Worker:
    def __init__(self, work):
        self.work = work
    def __call__(self, sample):
        return os.getpid(), self.work()

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

def sleep():
    print(os.getpid(), flush=True)
    time.sleep(600)

def only(samples):
    return samples[0]

def start(work, method):
    dataset = StreamingDataset({data!r}, transform=Worker(work))
    options = dict(num_workers=1, prefetch_factor=1, multiprocessing_context=method, collate_fn=only)
    return iter(StreamingDataLoader(dataset, 1, **options))

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where the tests run in the background
"""


@contextmanager
def trainer(tmp_path: Path, body: str) -> Iterator[subprocess.Popen[str]]:
    """Run a trainer whose main part is the body."""
    script = tmp_path / "trainer.py"
    with MDSWriter(out=tmp_path / "data", columns={"x": "int"}) as writer:
        for number in range(100):
            writer.write({"x": number})
    script.write_text(TRAINER.format(data=str(tmp_path / "data")) + textwrap.indent(body, "    "))
    command = [sys.executable, str(script)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        try:
            yield process
        finally:
            os.killpg(process.pid, signal.SIGKILL)  # of what it has forked, too


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
batches.close()
print("left", len(multiprocessing.active_children()), flush=True)
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
        assert line(process) == "left 0"
        worker = int(line(process))
        process.kill()
        process.wait()
        assert wait_for_end(worker, 60)


BUSY = """
others = start(nothing, "fork")
next(others)
batches = start(sleep, "fork")
if os.fork() == 0:
    time.sleep(600)  # it has inherited all that the trainer had open
if os.fork() == 0:
    os.close(1)
    time.sleep(600)
next(batches)
"""


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="asks Linux when a process ends")
def test_a_worker_in_a_long_transform_ends_with_its_trainer_also_where_other_children_of_that_live(
    tmp_path: Path,
) -> None:
    with trainer(tmp_path, BUSY) as process:
        worker = int(line(process))
        assert not wait_for_end(worker, 0.2)
        process.kill()
        process.wait()
        assert wait_for_end(worker, 60)


OTHERS = """
for work in (stop_a_process, stop_a_fork):
    batches = start(work, "fork")
    print(next(batches)[1], flush=True)
    batches.close()
"""


def test_what_a_worker_starts_ends_by_signals(tmp_path: Path) -> None:
    with trainer(tmp_path, OTHERS) as process:
        assert [line(process) for _ in range(2)] == ["(-15, -2)", "15"]


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
        if len(seen) == 8:  # a batch of each worker: it has been set up
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
from pathlib import Path
from lightning_stream.processes import ShardRange, run_partitions

def work(partition):
    Path({folder!r}, f"works{{partition.partition_id}}").touch()
    print("works", flush=True)
    while not Path({folder!r}, f"works{{partition.partition_id ^ 1}}").exists():
        time.sleep(0.01)  # for the other process
    time.sleep(0.5)
    return os.getpid()

if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, lambda *_: None)
    print("starts", flush=True)
    done = run_partitions(work, [ShardRange(number, 0, 1) for number in range(4)], 2, lambda _: None)
    print(len(set(done.values())), "processes", flush=True)
"""


def test_a_pool_of_processes_outlives_the_signals_of_its_job(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(POOL.format(folder=str(tmp_path)))
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
