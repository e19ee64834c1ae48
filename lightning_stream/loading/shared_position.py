"""Where the next iteration starts, in a value that living worker processes see too.

The value is shared memory without a name: nothing outlives the run or meets another job's. Forked workers inherit it,
spawned ones get its descriptor; a plain copy (pickle, deepcopy) is a value of its own.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing import context, reduction
from typing import Any

import numpy as np

from lightning_stream.order import Position
from lightning_stream.order.rows import CountedWindows
from lightning_stream.threads import lock_over_forks

_MAX_WORKERS = 1024
_MAX_ITERATIONS = 64
_START = ("start", np.int64, 2)  # an epoch and a position
_ITERATION = np.dtype([("key", np.int64), _START, ("begun", np.bool_, _MAX_WORKERS)])
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


class SharedPosition:
    """The start of the next iteration over a dataset, agreed upon by all workers of that iteration.

    Each worker begins every iteration once, all with a key that no other iteration has. The first one takes the next
    start and moves it to the next epoch; the others join it, also where other iterations began since, or the start was
    set. A worker that begins a second time under its key, as persistent ones do, begins another iteration.
    """

    _fd = -1

    def __init__(self, start: Start | None = None, fd: int | None = None) -> None:
        self._fd = memory_file("position", _SHARED.itemsize) if fd is None else fd
        self._values: Any = np.frombuffer(mmap.mmap(self._fd, _SHARED.itemsize), dtype=_SHARED)
        if start is not None:
            self.upcoming = start

    def __reduce__(self) -> tuple[Callable[..., SharedPosition], tuple[Any, ...]]:
        if context.get_spawning_popen() is not None:  # on its way to a worker process
            return _attach, (reduction.DupFd(self._fd),)
        return SharedPosition, (self.upcoming,)

    def __del__(self, _close: Callable[[int], None] = os.close) -> None:  # at exit modules are gone
        if self._fd >= 0:
            _close(self._fd)

    @contextmanager
    def _locked(self) -> Iterator[Any]:
        # lockf holds between processes and dies with its owner; the thread lock holds within one.
        with _threads:
            fcntl.lockf(self._fd, fcntl.LOCK_EX)
            try:
                yield self._values[0]
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


def _attach(handle: Any) -> SharedPosition:
    return SharedPosition(fd=handle.detach())
