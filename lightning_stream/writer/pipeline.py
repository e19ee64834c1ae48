"""Work in a bounded number of threads, with its results in order. No failure is ever forgotten."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

T = TypeVar("T")


class Pipeline(Generic[T]):
    """Runs jobs in ``max_workers`` threads (0: in `submit` itself); `submit` blocks while all of them are busy.

    After any failure, also one in `submit` itself, every later call raises it again.
    """

    def __init__(self, max_workers: int) -> None:
        if max_workers < 0:
            raise ValueError(f"max_workers must be 0 or more; got {max_workers}.")
        self._slots = threading.BoundedSemaphore(max(1, max_workers))
        self._pool = ThreadPoolExecutor(max_workers, "shard-writer") if max_workers else None
        self._futures: list[Future[T]] = []
        self.first: Future[T] | None = None  # that of the first job, once it was submitted
        self._failure: BaseException | None = None

    def submit(self, job: Callable[[], T]) -> None:
        """Start a job. It raises the failure of an earlier job, or of this one if it runs here."""
        with self:
            self._raise_failure()
            if self._pool is None:
                future: Future[T] = Future()
                future.set_result(job())
            else:
                self._slots.acquire()
                future = self._pool.submit(job)
                future.add_done_callback(self._done)
            self._futures.append(future)
            self.first = self._futures[0]

    def __enter__(self) -> None:
        """Let every later call raise an error of this block."""

    def __exit__(self, _: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self.fail(error)

    def fail(self, error: BaseException) -> None:
        """Let every later call raise this error, unless there was one before."""
        self._failure = self._failure or error

    def finish(self) -> list[T]:
        """Wait for all jobs; return their results in the order of `submit`, or raise the first failure."""
        with self:
            self._raise_failure()
            return [future.result() for future in self._futures]

    def close(self) -> None:
        """Drop the jobs that have not begun, and wait for those that run."""
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)

    def _done(self, future: Future[T]) -> None:
        if not future.cancelled() and (error := future.exception()) is not None:
            self.fail(error)
        self._slots.release()  # last: the next `submit` sees the failure

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure
