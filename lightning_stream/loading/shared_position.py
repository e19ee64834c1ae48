"""Where the next iteration starts, in a value that living worker processes see too.

The value is an anonymous shared mapping: it has no name that could outlive the run or meet another job's. Forked
workers inherit it, spawned ones are handed its descriptor; a plain copy (pickle, deepcopy) gets a value of its own.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import context, reduction
from threading import Lock
from typing import Any

import numpy as np

from lightning_stream.order import Position

_NUM_BYTES = 4096
_MAX_WORKERS = 1024
_NEXT_EPOCH, _NEXT_POSITION, _EPOCH, _POSITION, _BEGAN, _KEY, _WORKERS = range(7)


@dataclass(frozen=True)
class Start:
    """Where an iteration starts: an epoch, and samples of it that were consumed already (all replicas)."""

    epoch: int = 0
    position: int = 0

    @classmethod
    def of(cls, position: Position) -> Start:
        """Where a run at this position goes on."""
        return cls(position.epoch, position.position)


class SharedPosition:
    """The start of the next iteration over a dataset, agreed upon by all workers of that iteration.

    Every iteration is begun by each of its workers once, all with the same key. The first to come takes the next
    start and moves it on by an epoch; the others join it. A worker that comes a second time begins anew.
    """

    def __init__(self, start: Start | None = None, descriptor: int | None = None) -> None:
        if descriptor is None:
            with tempfile.TemporaryFile() as file:
                descriptor = os.dup(file.fileno())
            os.ftruncate(descriptor, _NUM_BYTES)
        self._descriptor = descriptor
        self._values: Any = np.frombuffer(mmap.mmap(descriptor, _NUM_BYTES), dtype=np.int64)
        self._threads = Lock()
        if start is not None:
            self.upcoming = start

    def __reduce__(self) -> tuple[Callable[..., SharedPosition], tuple[Any, ...]]:
        if context.get_spawning_popen() is not None:  # on its way to a worker process: share
            return _attached, (reduction.DupFd(self._descriptor),)
        return SharedPosition, (self.upcoming,)

    def __del__(self) -> None:
        os.close(self._descriptor)

    @contextmanager
    def _alone(self) -> Iterator[Any]:
        # lockf holds between processes and dies with its owner; the thread lock holds within one.
        with self._threads:
            fcntl.lockf(self._descriptor, fcntl.LOCK_EX)
            try:
                yield self._values
            finally:
                fcntl.lockf(self._descriptor, fcntl.LOCK_UN)

    @property
    def upcoming(self) -> Start:
        """Where the next iteration will start."""
        with self._alone() as values:
            return Start(int(values[_NEXT_EPOCH]), int(values[_NEXT_POSITION]))

    @upcoming.setter
    def upcoming(self, start: Start) -> None:
        with self._alone() as values:
            values[[_NEXT_EPOCH, _NEXT_POSITION, _BEGAN, _KEY]] = start.epoch, start.position, 0, 0

    @property
    def current(self) -> Start | None:
        """Where the latest iteration started; None if none has begun since the start was last set."""
        with self._alone() as values:
            return Start(int(values[_EPOCH]), int(values[_POSITION])) if values[_BEGAN] else None

    def begin(self, key: int, worker: int = 0) -> Start:
        """Begin an iteration, or join the one that another worker began under the same key.

        Args:
            key: The same for all workers of one iteration, e.g. torch's base seed; not 0.
            worker: This worker, 0-based.
        """
        if not 0 <= worker < _MAX_WORKERS:
            raise ValueError(f"at most {_MAX_WORKERS} workers share a position; this is worker {worker}")
        word, bit = _WORKERS + worker // 62, 1 << (worker % 62)
        with self._alone() as values:
            joins = values[_BEGAN] and values[_KEY] == key and not values[word] & bit
            if not joins:
                values[[_EPOCH, _POSITION]] = values[[_NEXT_EPOCH, _NEXT_POSITION]]
                values[[_NEXT_EPOCH, _NEXT_POSITION, _BEGAN, _KEY]] = values[_EPOCH] + 1, 0, 1, key
                values[_WORKERS:] = 0
            values[word] |= bit
            return Start(int(values[_EPOCH]), int(values[_POSITION]))


def _attached(handle: Any) -> SharedPosition:
    return SharedPosition(descriptor=handle.detach())
