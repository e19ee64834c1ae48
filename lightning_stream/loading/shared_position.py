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
from lightning_stream.order.batching.packed import Landmark
from lightning_stream.threads import lock_over_forks

_MAX_WORKERS = 1024
_NEXT, _CURRENT, _KEY, _BEGUN = slice(0, 2), slice(2, 4), 4, slice(5, 5 + _MAX_WORKERS)  # an epoch and a position each
_NUM_BYTES = _BEGUN.stop * 8


@dataclass(frozen=True)
class Start:
    """Where an iteration starts: an epoch, and samples of it that were consumed already (all replicas).

    A landmark makes a start inside an epoch of packed rows fast; a `SharedPosition` does not keep it.
    """

    epoch: int = 0
    position: int = 0
    landmark: Landmark | None = field(default=None, compare=False)

    @classmethod
    def of(cls, position: Position) -> Start:
        """Where a run at this position continues."""
        return cls(position.epoch, position.position, position.landmark)


_threads = lock_over_forks()


class SharedPosition:
    """The start of the next iteration over a dataset, agreed upon by all workers of that iteration.

    Each worker begins every iteration once, all with the same key. The first one takes the next start and moves it to
    the next epoch; the others join it. A worker that begins a second time begins another iteration.
    """

    _fd = -1

    def __init__(self, start: Start | None = None, fd: int | None = None) -> None:
        self._fd = memory_file("position", _NUM_BYTES) if fd is None else fd
        self._values: Any = np.frombuffer(mmap.mmap(self._fd, _NUM_BYTES), dtype=np.int64)
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
                yield self._values
            finally:
                fcntl.lockf(self._fd, fcntl.LOCK_UN)

    @property
    def upcoming(self) -> Start:
        """Where the next iteration will start."""
        with self._locked() as values:
            return Start(*values[_NEXT].tolist())

    @upcoming.setter
    def upcoming(self, start: Start) -> None:
        with self._locked() as values:
            values[_NEXT] = start.epoch, start.position
            values[_BEGUN] = 0

    @property
    def current(self) -> Start | None:
        """Where the latest iteration started; None if none has begun since the start was last set."""
        with self._locked() as values:
            return Start(*values[_CURRENT].tolist()) if values[_BEGUN].any() else None

    def begin(self, key: int, worker: int = 0) -> Start:
        """Begin an iteration, or join the one that another worker (0-based) began under the same key.

        All workers of one iteration have the same key, e.g. torch's base seed.
        """
        if not 0 <= worker < _MAX_WORKERS:
            raise ValueError(f"at most {_MAX_WORKERS} workers share a position; this is worker {worker}")
        with self._locked() as values:
            begun = values[_BEGUN]
            if begun[worker] or not begun.any() or values[_KEY] != key:
                values[_CURRENT] = values[_NEXT]
                values[_NEXT] = values[_CURRENT][0] + 1, 0
                values[_KEY], begun[:] = key, 0
            begun[worker] = 1
            return Start(*values[_CURRENT].tolist())


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
