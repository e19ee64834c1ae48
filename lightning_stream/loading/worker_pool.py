"""Worker processes that make a loader's batches.

Each has two pipes: the trainer sends jobs (where to begin) and, for each batch that it takes, that another one may be
made; the worker sends messages of batches, whose bytes are in an `Arena`. A message costs both sides some 15 us of
processor time, where a queue of torch's costs them 90 and 110. A worker ends with its pipe, so also with its trainer.
"""

from __future__ import annotations

import errno
import gc
import multiprocessing
import os
import select
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from itertools import cycle
from multiprocessing import util
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from pickle import PicklingError, loads
from typing import Any

from lightning_stream.formats.encodings import get_encoding
from lightning_stream.loading import torch_private
from lightning_stream.loading.arena import Arena
from lightning_stream.loading.batches import BatchMaker, Delivery
from lightning_stream.loading.shared_position import Start
from lightning_stream.loading.source import BatchSettings
from lightning_stream.loading.worker_signals import can_report, leave_signals_to_the_trainer
from lightning_stream.processes import job_signals_wait
from lightning_stream.threads import wait_briefly

# How a worker's message begins
_BATCH = b"b"
_ERROR = b"e"
_END = b""
# What the trainer sends: a byte, behind which a job follows
_JOB = b"j"
_TAKEN = b"t"
_STOP = b"s"
_SHORTAGES = (errno.EAGAIN, errno.EMFILE, errno.ENFILE, errno.ENOMEM)
_END_S = 5.0  # for a worker to end by itself
_EXIT_PRIORITY = 10  # before multiprocessing ends processes at the interpreter's exit

_trainer_ends: dict[int, Connection] = {}  # of the pipes to the workers of this process, by id


def _close_in_child() -> None:
    """Close the trainer's ends of pipes in a forked process, or a worker would not end with its trainer."""
    for end in _trainer_ends.values():
        end.close()
    _trainer_ends.clear()


os.register_at_fork(after_in_child=_close_in_child)


def late_batch(timeout_s: float) -> RuntimeError:
    """The error where no batch came in time."""
    return RuntimeError(f"no batch came within timeout={timeout_s} s: a shard or the transform is slow")


@dataclass
class WorkerTask:
    """What a worker process does for its whole life.

    Attributes:
        maker, settings: Makes the batches, and how the data is divided into them.
        num_workers: The workers of the loader.
        num_waiting: Batches that may wait for the trainer.
        seed: Of the global random generators, in which workers differ.
        dataset: The value of ``get_worker_info().dataset``.
        init: The user's function, called with the worker's number; None for none.
    """

    maker: BatchMaker
    settings: BatchSettings
    num_workers: int
    num_waiting: int
    seed: int
    dataset: Any
    init: Callable[[int], None] | None


class WorkerPool:
    """The worker processes of one loader: `batches` gives them a job, as often as one wants; `close` ends them.

    Args:
        task: What they do.
        context: How they are started: a context of multiprocessing, or None for the default.
        timeout_s: Seconds to wait for a batch; 0 for ever.

    Attributes:
        settings, arenas: Those of the batches; the memory of the workers.
    """

    def __init__(self, task: WorkerTask, context: Any, timeout_s: float) -> None:
        # What every forked worker would import with its first batch, which takes some 30 ms in each.
        get_encoding("int")
        torch_private.import_nested_tensors()
        context = context or multiprocessing.get_context()
        torch_private.start_servers(context)
        self.settings = task.settings
        self._timeout_s = timeout_s
        self._workers: list[_Worker] = []
        self.close = util.Finalize(self, _end_workers, (self._workers,), exitpriority=_EXIT_PRIORITY)
        try:
            self.arenas = [Arena(task.num_waiting) for _ in range(task.num_workers)]
            with job_signals_wait():
                for index, arena in enumerate(self.arenas):
                    self._workers.append(_Worker(index, task, arena, context))
                    self._workers[-1].start(context.get_start_method())
        except OSError as error:
            if error.errno not in _SHORTAGES:
                raise
            raise RuntimeError(
                f"the system starts no {task.num_workers} workers ({error}). Use fewer num_workers, or allow more: "
                "processes (`ulimit -u`, or pids of the container), open files (`ulimit -n`), addresses (`ulimit -v`)"
            ) from error

    def batches(self, start: Start) -> Generator[Delivery]:
        """The batches from a start to the end of its epoch, of which each worker makes one in turn.

        Raises:
            RuntimeError: A worker ended; or no batch came in time.
        """
        job = bytes(ForkingPickler.dumps(start))
        for worker in self._workers:
            worker.begin(job)
        for worker in cycle(self._workers):
            delivery = worker.take(self._timeout_s)
            if delivery is None:
                return
            yield delivery
            del delivery  # or the memory of a batch would stay in use while the next ones are made

    def stop(self) -> None:
        """End the job in progress: the workers make no further batch of it."""
        for worker in self._workers:
            worker.stop()


def _end_workers(workers: list[_Worker]) -> None:
    for worker in workers:
        worker.hang_up()
    for worker in workers:
        worker.end()


class _Worker:
    """The trainer's side of one worker process."""

    def __init__(self, index: int, task: WorkerTask, arena: Arena, context: Any) -> None:
        self._index = index
        self._arena = arena
        self._is_busy = False
        jobs, self._jobs = context.Pipe(duplex=False)
        self._results, results = context.Pipe(duplex=False)
        for end in (self._jobs, self._results):
            _trainer_ends[id(end)] = end
        self._process = context.Process(target=_work, args=(index, task, arena, jobs, results), daemon=True)
        self._ends_of_worker = jobs, results
        self._events = select.poll()

    def start(self, method: str) -> None:
        """Start the process."""
        try:
            self._process.start()
        except (PicklingError, AttributeError, TypeError) as error:
            raise ValueError(
                f"workers that start by {method!r} get the dataset, its functions and worker_init_fn by pickle; found "
                f"{error}. Define functions and classes at the top of a module, or pass multiprocessing_context='fork'."
            ) from error
        except ChildProcessError as error:
            raise RuntimeError(
                f"workers that start by {method!r} come from a server of one process; this one was forked from that. "
                "Pass multiprocessing_context='fork' or 'spawn'"
            ) from error
        for end in self._ends_of_worker:
            end.close()
        # The kernel looks in this order: what a worker sent before it ended is seen with its end.
        self._events.register(self._process.sentinel, select.POLLIN)
        self._events.register(self._results, select.POLLIN)

    def begin(self, job: bytes) -> None:
        """Give it a job; what it still sends of the last one is dropped."""
        while self._is_busy:
            message = self._receive(0.0)
            if message[:1] == _BATCH:
                self._arena.discard(message[1:])
            self._is_busy = message != _END  # which follows an error, too
        self._send(_JOB, job)
        self._is_busy = True

    def take(self, timeout_s: float) -> Delivery | None:
        """Its next batch; None at the end of the job."""
        message = self._receive(timeout_s)
        self._is_busy = message != _END
        if message == _END:
            return None
        if message[:1] == _ERROR:
            torch_private.raise_error(message[1:])
        delivery: Delivery = self._arena.open(message[1:])
        self._send(_TAKEN)
        return delivery

    def stop(self) -> None:
        """Let it make no further batch of its job."""
        if self._is_busy:
            self._send(_STOP)

    def hang_up(self) -> None:
        """Let it end."""
        _trainer_ends.pop(id(self._jobs), None)
        self._jobs.close()

    def end(self) -> None:
        """Wait for its end."""
        if self._process.pid is not None:  # else its start failed
            self._process.join(_END_S)
            while self._process.is_alive():  # or for an instant, where the kernel told another thread of its end
                self._process.kill()
                self._process.join()
        _trainer_ends.pop(id(self._results), None)
        self._results.close()
        self._process.close()

    def _send(self, kind: bytes, job: bytes | None = None) -> None:
        with suppress(OSError):  # it has ended: `_receive` says so
            os.write(self._jobs.fileno(), kind)
            if job:
                self._jobs.send_bytes(job)

    def _receive(self, timeout_s: float) -> bytes:
        ready = wait_briefly(lambda wait_s: self._events.poll(1000 * wait_s), timeout_s)
        if not ready:
            raise late_batch(timeout_s)
        if self._results.fileno() in dict(ready):
            with suppress(EOFError, OSError):
                return self._results.recv_bytes()  # type: ignore[no-any-return]  # bytes
        self._process.join(_END_S)
        code = self._process.exitcode
        reason = " It was killed: perhaps memory ran out, then use fewer num_workers." if code == -9 else ""
        raise RuntimeError(
            f"a worker process lives as long as its iteration; worker {self._index} (process {self._process.pid}) "
            f"ended with exit code {code}.{reason}"
        )


def _work(index: int, task: WorkerTask, arena: Arena, jobs: Connection, results: Connection) -> None:
    """The life of a worker process."""
    leave_signals_to_the_trainer(jobs.fileno())
    gc.freeze()  # each collection would visit the trainer's objects, and so copy a forked worker's memory
    with suppress(EOFError, OSError):  # the trainer is gone, or needs no more
        while kind := os.read(jobs.fileno(), 1):
            if kind != _JOB:  # about the last one, which is over
                continue
            _send_batches(_messages(index, task, arena, jobs.recv_bytes()), results, jobs, task.num_waiting)
            results.send_bytes(_END)


def _send_batches(messages: Iterator[bytes], results: Connection, jobs: Connection, most_waiting: int) -> None:
    """Send those of a job, of which so many wait at most, until the job ends or the trainer stops it."""
    for num_sent, message in enumerate(messages, 1):
        results.send_bytes(message)
        if num_sent >= most_waiting and os.read(jobs.fileno(), 1) != _TAKEN:
            return


def _messages(index: int, task: WorkerTask, arena: Arena, job: bytes) -> Generator[bytes]:
    """Those of the batches of a job, or of an error."""
    try:
        if task.maker.memory is None:  # before the first batch
            torch_private.become_worker(index, task.num_workers, task.seed, task.dataset)
            task.maker.source.reader.counters.values = arena.counters
            arena.pid[0] = os.getpid() if can_report() else 0
            if task.init is not None:
                task.init(index)
            task.maker.memory = arena.empty
        start = loads(job)  # noqa: S301 - our own
        with closing(task.maker.batches(task.settings, start, index, task.num_workers, task.num_waiting)) as batches:
            for delivery in batches:
                yield _BATCH + arena.seal(delivery)
                del delivery
    except Exception as error:  # noqa: BLE001 - the trainer raises it
        yield _ERROR + torch_private.pickled_error(error, index)
