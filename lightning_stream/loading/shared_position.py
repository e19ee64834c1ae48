"""Where the next iteration starts, in a value that living worker processes see too.

The value is shared memory without a name: nothing outlives the run or meets another job's. Forked workers inherit it,
spawned ones get its descriptor; a plain copy (pickle, deepcopy) is a value of its own. Ranks that a launcher forks or
spawns get it too, and each of them is a trainer of its own: it has a record of its own, which its workers share.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing import context, reduction
from typing import Any
from weakref import WeakSet

import numpy as np

from lightning_stream.order import Position
from lightning_stream.order.rows import CountedWindows
from lightning_stream.threads import lock_over_forks

_MAX_WORKERS = 1024
_MAX_ITERATIONS = 64
_MAX_TRAINERS = 1024  # at once; memory is taken only for those that iterate
_START = ("start", np.int64, 2)  # an epoch and a position
_ITERATION = np.dtype([("key", np.int64), _START, ("begun", np.bool_, _MAX_WORKERS)])
_RECORD = np.dtype([_START, ("num_begun", np.int64), ("is_set", np.bool_), ("latest", _ITERATION, _MAX_ITERATIONS)])
_TABLE = [("num_trainers", np.int64), ("trainers", np.int64, _MAX_TRAINERS), ("records", _RECORD, _MAX_TRAINERS)]
_SHARED = np.dtype(_TABLE)


@dataclass(frozen=True)
class Start:
    """Where an iteration starts: an epoch, and samples of it that were consumed already (all replicas).

    Counted windows make a start inside an epoch of packed rows fast; a `SharedPosition` does not keep them.
    """

    epoch: int = 0
    position: int = 0
    counted_windows: CountedWindows | None = field(default=None, compare=False)

    @classmethod
    def of(cls, position: Position) -> Start:
        """Where a run at this position continues."""
        return cls(position.epoch, position.position, position.landmark)


_threads = lock_over_forks()


class SharedPosition:
    """The start of the next iteration over a dataset, agreed upon by all workers of that iteration.

    Each worker begins every iteration once, all with a key that no other iteration has. The first one takes the next
    start and moves it to the next epoch; the others join it, also where other iterations began since, or the start was
    set. A worker that begins a second time under its key, as persistent ones do, begins another iteration.

    A process that was forked or spawned is a worker of the one before, or a trainer of its own: `of_trainer`.
    """

    _fd = -1

    def __init__(self, start: Start | None = None, current: Start | None = None, fd: int | None = None) -> None:
        self._fd = memory_file("position", _SHARED.itemsize) if fd is None else fd
        self._values: Any = np.frombuffer(mmap.mmap(self._fd, _SHARED.itemsize), dtype=_SHARED)
        self._record = 0
        self._begins_at = start or Start(), current  # of this process as a trainer
        self._trainer = self._parent = _new_id()  # this process as a trainer, and the one that it comes from
        if fd is None:
            self.of_trainer(is_worker=False)
        _all.add(self)

    def __reduce__(self) -> tuple[Callable[..., SharedPosition], tuple[Any, ...]]:
        if context.get_spawning_popen() is not None:  # on its way to another process
            handle = reduction.DupFd(self._fd)
            return _attach, (handle, self._record, self._trainer, self.upcoming, self.current)
        return SharedPosition, (self.upcoming, self.current)

    def __del__(self, _close: Callable[[int], None] = os.close) -> None:  # at exit modules are gone
        if self._fd >= 0:
            _close(self._fd)

    def of_trainer(self, *, is_worker: bool) -> SharedPosition:
        """This value with the record of this process, or of the one whose worker it is.

        A trainer's first one begins where the process that it comes from stood when it was forked or spawned.
        """
        trainer = self._parent if is_worker else self._trainer
        if self._values["trainers"][0][self._record] == trainer:
            return self
        with self._locked():
            table = self._values[0]
            known = np.flatnonzero(table["trainers"] == trainer)
            if len(known):
                self._record = int(known[0])
                return self
            self._record = int(table["num_trainers"]) % _MAX_TRAINERS
            upcoming, current = self._begins_at
            record = table["records"][self._record]
            record["start"] = upcoming.epoch, upcoming.position
            record["is_set"] = current is None
            record["num_begun"] = current is not None
            record["latest"][0] = (0, (current.epoch, current.position) if current else 0, False)
            table["trainers"][self._record] = trainer
            table["num_trainers"] += 1
        return self

    def follow_fork(self) -> None:
        """Take note, in a forked process, of the process before, and of where that one stands."""
        if self._values["trainers"][0][self._record] == self._trainer:
            self._begins_at = self.upcoming, self.current
        self._parent = self._trainer
        self._trainer = _new_id()

    @contextmanager
    def _locked(self) -> Iterator[Any]:
        # lockf holds between processes and dies with its owner; the thread lock holds within one.
        with _threads:
            fcntl.lockf(self._fd, fcntl.LOCK_EX)
            try:
                yield self._values["records"][0, self._record]
            finally:
                fcntl.lockf(self._fd, fcntl.LOCK_UN)

    @property
    def upcoming(self) -> Start:
        """Where the next iteration will start."""
        with self._locked() as values:
            return Start(*values["start"].tolist())

    @upcoming.setter
    def upcoming(self, start: Start) -> None:
        with self._locked() as values:
            values["start"] = start.epoch, start.position
            values["is_set"] = True

    @property
    def current(self) -> Start | None:
        """Where the latest iteration started; None if none has begun since the start was last set."""
        with self._locked() as values:
            if values["is_set"] or not values["num_begun"]:
                return None
            latest = values["latest"][(values["num_begun"] - 1) % _MAX_ITERATIONS]
            return Start(*latest["start"].tolist())

    def begin(self, key: int, worker: int = 0) -> Start:
        """Begin an iteration, or join the one that another worker (0-based) began under the same key.

        All workers of one iteration have the same key, see `torch_private.iteration_key`.
        """
        if not 0 <= worker < _MAX_WORKERS:
            raise ValueError(f"at most {_MAX_WORKERS} workers share a position; this is worker {worker}")
        with self._locked() as values:
            latest = values["latest"]
            joined = np.flatnonzero((latest["key"] == key) & latest["begun"].any(axis=1) & ~latest["begun"][:, worker])
            if len(joined):
                slot = joined[0]
            else:
                slot = values["num_begun"] % _MAX_ITERATIONS
                latest[slot] = key, values["start"], False
                values["start"] = values["start"][0] + 1, 0
                values["num_begun"] += 1
                values["is_set"] = False
            latest["begun"][slot, worker] = True
            return Start(*latest["start"][slot].tolist())


def memory_file(name: str, num_bytes: int) -> int:
    """Descriptor of zeroed memory; its name is only for people."""
    if hasattr(os, "memfd_create"):
        fd: int = os.memfd_create(name)
    else:
        with tempfile.TemporaryFile() as file:
            fd = os.dup(file.fileno())
    os.ftruncate(fd, num_bytes)
    return fd


def _attach(handle: Any, record: int, parent: int, start: Start, current: Start | None) -> SharedPosition:
    shared = SharedPosition(start, current, handle.detach())
    shared._record = record  # noqa: SLF001
    shared._parent = parent  # noqa: SLF001
    return shared


def _new_id() -> int:
    return secrets.randbits(62) + 1


def _follow_fork() -> None:
    for shared in list(_all):
        shared.follow_fork()


_all: WeakSet[SharedPosition] = WeakSet()
os.register_at_fork(after_in_child=_follow_fork)
