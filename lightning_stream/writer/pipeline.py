"""Work that leaves the caller's thread, in bounded number, with its results in order. No failure is ever forgotten."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

T = TypeVar("T")


class Pipeline(Generic[T]):
    """Runs jobs in ``max_workers`` threads (0: in `submit` itself); while all are busy, `submit` blocks.

    After any failure, also one in `submit` itself, every later call raises it again.
    """

    def __init__(self, max_workers: int) -> None:
        if max_workers < 0:
            raise ValueError(f"max_workers must be 0 or more; got {max_workers}.")
        self._count = max_workers
        self._slots = threading.BoundedSemaphore(max(1, max_workers))
        self._pool: ThreadPoolExecutor | None = None
        self._futures: list[Future[T]] = []
        self._checked = 0  # futures before this one have succeeded
        self._failure: BaseException | None = None

    @property
    def first(self) -> Future[T] | None:
        """What becomes of the first job; None before it."""
        return self._futures[0] if self._futures else None

    def submit(self, job: Callable[[], T]) -> None:
        """Hand over a job; raise whatever an earlier one raised, or this one where it runs here."""
        self._raise_failure()
        try:
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
        except BaseException as error:
            self.fail(error)
            raise

    def fail(self, error: BaseException) -> None:
        """Have every later call raise this error, unless there was one before."""
        self._failure = self._failure or error

    def finish(self) -> list[T]:
        """Wait for all jobs; return their results in the order of `submit`, or raise the first failure."""
        try:
            self._raise_failure()
            return [future.result() for future in self._futures]
        except BaseException as error:
            self.fail(error)
            raise
        finally:
            self.close()

    def close(self) -> None:
        """Drop the jobs that have not begun, and wait for those that run."""
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure
        while self._checked < len(self._futures) and self._futures[self._checked].done():
            self._futures[self._checked].result()
            self._checked += 1
