"""Work that leaves the caller's thread, in bounded number, with its results in order."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

T = TypeVar("T")


class Pipeline(Generic[T]):
    """Runs jobs in threads; while ``max_workers`` run, `submit` blocks.

    Args:
        max_workers: Threads; 0 to run each job in `submit` itself.
    """

    def __init__(self, max_workers: int) -> None:
        if max_workers < 0:
            raise ValueError(f"max_workers must be 0 or more; got {max_workers}.")
        self._count = max_workers
        self._slots = threading.BoundedSemaphore(max(1, max_workers))
        self._pool: ThreadPoolExecutor | None = None
        self._futures: list[Future[T]] = []
        self._checked = 0  # futures before this one are known to be well

    def submit(self, job: Callable[[], T]) -> None:
        """Hand over a job. Blocks while the pipeline is full.

        Raises:
            Exception: Whatever an earlier job raised.
        """
        self._raise_first_error()
        if self._count == 0:
            done: Future[T] = Future()
            done.set_result(job())
            self._futures.append(done)
            return
        self._slots.acquire()
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._count, thread_name_prefix="shard-writer")
        future = self._pool.submit(job)
        future.add_done_callback(lambda _: self._slots.release())
        self._futures.append(future)

    def finish(self) -> list[T]:
        """Wait for all jobs; their results in the order of `submit`.

        Raises:
            Exception: What the first failing job raised; jobs not yet begun are then dropped.
        """
        try:
            return [future.result() for future in self._futures]
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Drop the jobs not yet begun and wait for those that run."""
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)

    def _raise_first_error(self) -> None:
        while self._checked < len(self._futures) and self._futures[self._checked].done():
            self._futures[self._checked].result()
            self._checked += 1
