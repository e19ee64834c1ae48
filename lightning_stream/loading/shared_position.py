"""Where the next iteration starts, in a value that living worker processes see too.

The value is shared memory without a name: nothing outlives the run or meets another job's. Forked workers inherit it,
spawned ones get its descriptor; a plain copy (pickle, deepcopy) is a value of its own. Ranks that a launcher forks or
spawns get it too, and each of them is a trainer of its own: it has a value of its own, which its workers share.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
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

_FORBIDDEN = (errno.ENOSYS, errno.EPERM)  # as sandboxes and old kernels answer
_MAX_WORKERS = 1024
_MAX_ITERATIONS = 64
_START = ("start", np.int64, 2)  # an epoch and a position
_WORKERS = [(name, np.bool_, _MAX_WORKERS) for name in ("begun", "ended")]
_ITERATION = np.dtype([("key", np.int64), _START, *_WORKERS])
_SHARED = np.dtype([_START, ("num_begun", np.int64), ("is_set", np.bool_), ("latest", _ITERATION, _MAX_ITERATIONS)])


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


class MemoryFile:
    """The descriptor of memory that processes share."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __reduce__(self) -> tuple[Callable[[Any], MemoryFile], tuple[Any]]:
        return _attached, (reduction.DupFd(self.fd),)

    def __del__(self, _close: Callable[[int], None] = os.close) -> None:  # at exit modules are gone
        _close(self.fd)


def _attached(handle: Any) -> MemoryFile:
    return MemoryFile(handle.detach())


def memory_file(name: str, num_bytes: int) -> MemoryFile:
    """Zeroed memory; its name is only for people."""
    try:
        file = MemoryFile(os.memfd_create(name))
    except (AttributeError, OSError) as error:  # AttributeError: this Python lacks it
        if getattr(error, "errno", errno.ENOSYS) not in _FORBIDDEN:
            raise
        with tempfile.TemporaryFile() as temporary:
            file = MemoryFile(os.dup(temporary.fileno()))
    try:
        os.ftruncate(file.fd, num_bytes)
    except OSError as error:
        why = f"{error.strerror}: processes share memory of {num_bytes:,} bytes; allow files of that size (`ulimit -f`)"
        raise OSError(error.errno, why) from error
    return file


class SharedPosition:
    """The start of the next iteration over a dataset, agreed upon by all workers of that iteration.

    Each worker begins every iteration once, all with a key that no other iteration has. The first one takes the next
    start and moves it to the next epoch; the others join it, also where other iterations began since, or the start was
    set. A worker that begins a second time under its key, as persistent ones do, begins another iteration.

    Args:
        start: Where the next iteration starts.
        current: Where the latest one did; None if there was none.
        file: The memory of another process's value, which is the same one.
    """

    def __init__(
        self, start: Start | None = None, current: Start | None = None, file: MemoryFile | None = None
    ) -> None:
        self._file = file or memory_file("position", _SHARED.itemsize)
        self._values: Any = np.frombuffer(mmap.mmap(self._file.fd, _SHARED.itemsize), dtype=_SHARED)
        if start is not None:
            self.upcoming = start
        if current is not None:
            values = self._values[0]
            values["latest"][0] = (0, (current.epoch, current.position), False, False)
            values["num_begun"] = 1
            values["is_set"] = False

    def __reduce__(self) -> tuple[type[SharedPosition], tuple[Any, ...]]:
        if context.get_spawning_popen() is not None:  # on its way to another process
            return SharedPosition, (None, None, self._file)
        return SharedPosition, (self.upcoming, self.current)

    @contextmanager
    def _locked(self) -> Iterator[Any]:
        # lockf holds between processes and dies with its owner; the thread lock holds within one.
        with _threads:
            fcntl.lockf(self._file.fd, fcntl.LOCK_EX)
            try:
                yield self._values[0]
            finally:
                fcntl.lockf(self._file.fd, fcntl.LOCK_UN)

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
            return Start(*_latest(values)["start"].tolist())

    @property
    def was_reset(self) -> bool:
        """Whether the start was set after an iteration began, and none has begun since."""
        with self._locked() as values:
            return bool(values["is_set"] and values["num_begun"])

    @property
    def is_over(self) -> bool:
        """Whether all workers that began the latest iteration are at its end."""
        with self._locked() as values:
            latest = _latest(values)
            return bool(latest["ended"].any() and (latest["begun"] == latest["ended"]).all())

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
                latest[slot] = key, values["start"], False, False
                values["start"] = values["start"][0] + 1, 0
                values["num_begun"] += 1
                values["is_set"] = False
            latest["begun"][slot, worker] = True
            return Start(*latest["start"][slot].tolist())

    def end(self, key: int, worker: int = 0) -> None:
        """Note that a worker has come to the end of the latest iteration, if that is the one of this key."""
        with self._locked() as values:
            latest = _latest(values)
            latest["ended"][worker] |= latest["key"] == key


def _latest(values: Any) -> Any:
    return values["latest"][(values["num_begun"] - 1) % _MAX_ITERATIONS]


class TrainerPosition:
    """The start of the next iteration for this process as a trainer, and for the one whose worker it may be.

    A process that was forked or spawned is a worker of the one before, or a trainer of its own, which begins where that
    one stood then: only what asks knows which of them it is.
    """

    def __init__(self, as_trainer: SharedPosition | None = None, as_worker: SharedPosition | None = None) -> None:
        self._as_trainer = as_trainer or SharedPosition()
        self._as_worker = as_worker or self._as_trainer
        _all.add(self)

    def __reduce__(self) -> tuple[Callable[..., TrainerPosition], tuple[Any, ...]]:
        if context.get_spawning_popen() is not None:
            return _in_child, (self._as_trainer, self._as_trainer.upcoming, self._as_trainer.current)
        return TrainerPosition, (self._as_trainer, self._as_worker)

    def of(self, *, is_worker: bool) -> SharedPosition:
        """That of the process whose worker this one is, or its own."""
        return self._as_worker if is_worker else self._as_trainer

    def follow_fork(self) -> None:
        """Begin, in a forked process, where the process before stands."""
        self._as_worker = self._as_trainer
        self._as_trainer = SharedPosition(self._as_worker.upcoming, self._as_worker.current)


def _in_child(parent: SharedPosition, start: Start, current: Start | None) -> TrainerPosition:
    return TrainerPosition(SharedPosition(start, current), parent)


def _follow_fork() -> None:
    for position in list(_all):
        position.follow_fork()


_all: WeakSet[TrainerPosition] = WeakSet()
os.register_at_fork(after_in_child=_follow_fork)
