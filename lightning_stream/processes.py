"""Partitions are worked on in several processes, or by Spark. One whose process dies is done again."""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]
import math
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context, resource_tracker
from multiprocessing.connection import Connection
from pathlib import Path, PurePosixPath
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeAlias

from lightning_stream.errors import LightningStreamError, has_terminal, write_stderr
from lightning_stream.spark_jobs import run_in_spark

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    Workers: TypeAlias = int | SparkSession  # the most processes of this machine, or a cluster

# What terminals, schedulers and `timeout` send to all processes of a job: they are for the one that the user started.
JOB_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_PARENT = "LIGHTNING_STREAM_PARENT"
_MAX_TRIES = 3
_GROUPS_OF_PROCESS = Path("/proc/self/cgroup")
_CONTROL_GROUPS = "/sys/fs/cgroup"
_task: Any = None  # in a worker process: what it does with each partition


class WorkersDiedError(LightningStreamError):
    """Worker processes died several times at one partition; the same call continues with those that are done."""


@dataclass(frozen=True)
class ShardRange:
    """Whole shards that a process works on at a time: those of numbers [begin, end)."""

    partition_id: int
    begin: int
    end: int

    def __str__(self) -> str:
        return f"shards [{self.begin}, {self.end})"


def run_partitions(
    task: Callable[[Any], Any],
    partitions: Sequence[Any],
    workers: Workers,
    report: Callable[[Any], None],
    remedy: str = "use fewer num_workers or smaller partition_bytes; num_workers=1 shows what happens in this process",
) -> dict[int, Any]:
    """Do a picklable task for all partitions, in this process if one is enough; return the results by partition id.

    Args:
        task: Called with a partition, which has a `partition_id`.
        partitions: The partitions to do.
        workers: Where: in at most so many processes, or in the executors of a Spark session.
        report: Called with each result.
        remedy: What the user can do if memory ran out.

    Raises:
        WorkersDiedError: Processes died several times at one partition.
    """
    done: dict[int, Any] = {}

    def take(partition: Any, result: Any) -> None:
        done[partition.partition_id] = result
        report(result)

    if not isinstance(workers, int):
        run_in_spark(workers, task, partitions, take)
        return done
    if min(workers, len(partitions)) <= 1:
        for partition in partitions:
            take(partition, task(partition))
        return done
    data = pickled(task)
    tries = Counter[int]()
    while missing := [partition for partition in partitions if partition.partition_id not in done]:
        running: dict[Future[Any], Any] = {}
        try:
            _run_pool(data, missing, min(workers, len(missing)), running, take)
        except BrokenProcessPool:
            tries.update(partition.partition_id for partition in running.values())
            suspects = [str(partition) for partition in running.values() if tries[partition.partition_id] == _MAX_TRIES]
            if suspects:
                raise WorkersDiedError(
                    f"worker processes died {_MAX_TRIES} times while they worked on {' or '.join(suspects)}. If memory "
                    f"ran out, {remedy}. The partitions that are done stay: the same call continues from there."
                ) from None
    return done


def _run_pool(
    data: bytes, queue: list[Any], count: int, running: dict[Future[Any], Any], take: Callable[[Any, Any], None]
) -> None:
    """Do the queued partitions, at most ``count`` at a time; ``running`` has those in progress when a process dies."""
    start_resource_tracker()
    context = get_context("spawn")
    alive, stop = context.Pipe(duplex=False)
    pool = ProcessPoolExecutor(count, mp_context=context, initializer=_begin_worker, initargs=(data, alive))
    try:
        while queue or running:
            while queue and len(running) < count:
                packed = pickle.dumps(queue[0])
                with _as_worker(needs_main=b"__main__" in data or b"__main__" in packed):
                    running[pool.submit(_run_one, packed)] = queue[0]
                del queue[0]
            for future in wait(running, return_when=FIRST_COMPLETED)[0]:
                result = future.result()
                if isinstance(result, _Failure):
                    raise LightningStreamError(f"a worker failed:\n{result}")
                take(running.pop(future), result)
        pool.shutdown()
    finally:
        stop.close()  # ends the workers that are still at work
        pool.shutdown(cancel_futures=True)
        alive.close()


def num_cores() -> int:
    """Processor cores that this process may use: those it is bound to, or fewer where its container has a quota."""
    bound_to = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quotas = [int(quota) // int(period) for quota, period in _cpu_quotas()]
    return max(1, min([bound_to, *quotas]))


def memory_limit() -> float:
    """Bytes that this process and others of its container may use; infinite where nothing limits them."""
    limits = [math.inf]
    for group in _control_groups("memory"):
        # Of version 2, and of version 1.
        texts = _text(group / "memory.max"), _text(group / "memory.limit_in_bytes")
        limits += [float(text) for text in texts if text not in ("", "max")]
    return min(limits)


def _cpu_quotas() -> Iterator[tuple[str, str]]:
    """The quotas of the groups that this process is in, each with its period."""
    for group in _control_groups("cpu"):
        quota, _, period = _text(group / "cpu.max").partition(" ")
        if not quota:  # version 1
            quota = _text(group / "cpu.cfs_quota_us")
            period = _text(group / "cpu.cfs_period_us")
        if quota not in ("", "max", "-1"):
            yield quota, period


def _control_groups(controller: str) -> Iterator[Path]:
    """The control groups that bound this process: its own, and all that hold this one.

    A container sees its own group as the root, often without the path that the process has in it.
    """
    for line in _text(_GROUPS_OF_PROCESS).splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers or controller in controllers.split(","):
            group = PurePosixPath(path)
            for holder in (group, *group.parents):
                yield Path(_CONTROL_GROUPS, controllers, holder.relative_to("/"))


def _text(path: Path) -> str:
    """The text of a file of the kernel; none where there is no such file."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def num_processes(num_workers: int | None) -> int:
    """Return the number of processes that ``num_workers`` asks for; None asks for one per processor."""
    if num_workers is None:
        return num_cores()
    if num_workers < 1:
        raise ValueError(f"num_workers must be 1 or more (1 uses this process); got {num_workers}.")
    return num_workers


def refuse_in_worker(what: str) -> None:
    """Raise RuntimeError if this process was started by `run_partitions`."""
    if os.environ.get(_PARENT, str(os.getpid())) != str(os.getpid()):
        raise RuntimeError(
            f"a worker process imports the script that its functions are in, and {what} ran there again. Put what "
            "the script does under: if __name__ == '__main__'."
        )


def leave_job_signals_to_the_parent() -> None:
    """Let this process outlive the signals of its job; its parent ends it. What it executes has the default handlers.

    A handler in Python, unlike a signal that is ignored, ends with exec. What is ignored already, as `nohup` and ``&``
    of a shell leave it, stays so.
    """
    for signal_number in JOB_SIGNALS:
        if signal.getsignal(signal_number) is not signal.SIG_IGN:
            signal.signal(signal_number, do_nothing)
            signal.siginterrupt(signal_number, False)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, JOB_SIGNALS)


def do_nothing(*_: object) -> None:
    """The handler of a signal that is for another process."""


@contextmanager
def job_signals_wait() -> Iterator[None]:
    """Start processes in which the signals of the job wait until they call `leave_job_signals_to_the_parent`."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())  # as it is: a handler may raise as soon as it is changed
    try:
        signal.pthread_sigmask(signal.SIG_BLOCK, JOB_SIGNALS)
        yield
    finally:
        _signal.pthread_sigmask(signal.SIG_SETMASK, before)  # which is in C: no handler runs before it has


def start_resource_tracker() -> None:
    """Start the process in which multiprocessing counts what spawned processes share, so that job signals spare it.

    Python 3.11 unblocks signals when it starts it, so it is not started together with other processes.
    """
    with job_signals_wait():
        resource_tracker.ensure_running()


@contextmanager
def _as_worker(needs_main: bool) -> Iterator[None]:
    """Start processes that know what they are, and that import the user's script only if its functions are needed.

    Otherwise multiprocessing imports it always, and then every script would need a guard.
    """
    main = sys.modules["__main__"]
    os.environ[_PARENT] = str(os.getpid())
    if not needs_main:
        sys.modules["__main__"] = ModuleType("__main__")
    try:
        with job_signals_wait():
            yield
    finally:
        sys.modules["__main__"] = main
        os.environ.pop(_PARENT, None)


def _begin_worker(data: bytes, alive: Connection) -> None:
    global _task
    leave_job_signals_to_the_parent()  # which ends its workers
    threading.Thread(target=_end_with, args=(alive,), daemon=True).start()
    _task = pickle.loads(data)  # noqa: S301 - our own


def _end_with(alive: Connection) -> None:
    """End this process when the parent closes its end of the pipe, or dies."""
    try:
        alive.recv_bytes()
    except (EOFError, OSError):
        os._exit(1)


class _Failure(str):
    """The text of an error."""


def _run_one(partition: bytes) -> Any:
    """Do a partition. An error that cannot be sent to the parent is returned as text."""
    try:
        return _task(pickle.loads(partition))  # noqa: S301 - our own
    except Exception as error:
        try:
            pickle.loads(pickle.dumps(error))  # noqa: S301 - our own
        except Exception:  # noqa: BLE001 - a class of the user's may refuse in any way
            return _Failure("".join(traceback.format_exception(error)))
        raise


def pickled(task: Callable[[Any], Any]) -> bytes:
    """The task as bytes; with cloudpickle where its functions cannot be imported. Raises ValueError if it cannot be."""
    failure: Exception | None = None
    try:
        data = pickle.dumps(task)
        main = sys.modules["__main__"]
        path = getattr(main, "__file__", None)
        if b"__main__" not in data or getattr(main, "__spec__", None) or (path is not None and Path(path).is_file()):
            return data
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        failure = error
    try:
        import cloudpickle  # type: ignore[import-not-found,unused-ignore]
    except ImportError:
        raise ValueError(
            "worker processes must be able to import your functions. Put them into a module (not into a notebook, "
            "another function, or a lambda), or install cloudpickle, or pass num_workers=1."
        ) from failure
    return bytes(cloudpickle.dumps(task))


class Progress:
    """A line on stderr that counts partitions and rows; on a terminal it is updated in place."""

    def __init__(self, num_partitions: int, phase: str) -> None:
        self._num_partitions = num_partitions
        self._phase = phase
        self._begin = time.monotonic()
        self._done = self._rows = 0

    def __call__(self, num_rows: int) -> None:
        """Count a partition."""
        self._done += 1
        self._rows += num_rows
        is_last = self._done == self._num_partitions
        is_terminal = has_terminal()
        if is_last or is_terminal:
            speed = self._rows / max(time.monotonic() - self._begin, 1e-9)
            line = f"{self._phase}: {self._done:,} of {self._num_partitions:,} partitions, {self._rows:,} rows"
            begin, end = ("\r", "\n" if is_last else "\x1b[K") if is_terminal else ("", "\n")
            write_stderr(f"{begin}{line}, {speed:,.0f} rows/s{end}")
