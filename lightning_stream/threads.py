"""Threads that move bytes, and that a process does not wait for when it ends.

The standard library's pool joins its threads as the interpreter exits: one stuck in a dead connection would keep a job
that was stopped, or a loader's worker, alive until its timeout. A fetch that is killed leaves only a draft.
"""

from __future__ import annotations

import _thread
import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from typing import Self

T = TypeVar("T")
_LOOK_S = 1.0
_Call = tuple["Future[Any]", Callable[..., Any], tuple[Any, ...]]


if sys.version_info[:2] == (3, 14):

    class Lock(_thread.RLock):
        """A lock that a thread may take again, and that Ctrl-C does not leave taken.

        The `with` of Python 3.14 does not release one that was taken just before (CPython issue 148874).
        """

        __slots__ = ()

        def __enter__(self) -> bool:
            before = self._recursion_count()
            try:
                return self.acquire()
            except BaseException:
                if self._recursion_count() > before:
                    self.release()
                raise

else:
    Lock = threading.RLock


class DaemonPool:
    """Runs calls in at most `num_threads` daemon threads, in the order they were given. A context manager."""

    def __init__(self, num_threads: int, name: str) -> None:
        self.num_threads = num_threads
        self._name = name
        self._calls: SimpleQueue[_Call | None] = SimpleQueue()
        self._unfinished: set[Future[Any]] = set()
        self._guard = Lock()
        self._started = 0
        self._closed = False
        self._pid = os.getpid()

    def submit(self, call: Callable[..., T], *args: Any) -> Future[T]:
        """Run a call in a thread; its result or error is the future's."""
        future: Future[T] = Future()
        with self._guard:
            if self._closed:
                raise RuntimeError("this pool is closed")
            self._unfinished.add(future)
            self._grow()
            self._calls.put((future, call, args))
        return future

    def map(self, call: Callable[..., T], items: Iterable[Any]) -> list[T]:
        """Run a call with each item, at once; return the results in the order of the items."""
        return [future.result() for future in [self.submit(call, item) for item in items]]

    def _grow(self) -> None:
        """Start threads until each call that has not ended has one, or there are as many as there may be.

        Where the system grants no more, those that run do all. RuntimeError if none runs.
        """
        while self._started < min(self.num_threads, len(self._unfinished)):
            self._started += 1  # before it starts: Ctrl-C may come between, and nobody would end it
            name = f"{self._name}-{self._started}"
            thread = threading.Thread(target=_serve, args=(self._calls, self._unfinished), name=name, daemon=True)
            try:
                thread.start()
            except RuntimeError as error:
                self._started -= 1
                if self._started:
                    return
                raise RuntimeError(
                    f"a thread is needed to read, and the system starts none ({error}). Allow more threads (`ulimit "
                    "-u`, or pids of the container) or addresses (`ulimit -v`), or use fewer workers"
                ) from error

    def grow(self, num_threads: int) -> None:
        """Run calls in so many threads at once from now on, which are more than before."""
        with self._guard:
            if not self._closed:
                self.num_threads = num_threads
                self._grow()

    def rest(self) -> None:
        """End the threads after the calls that were given before; a later call starts others."""
        with self._guard:
            for _ in range(self._started):
                self._started -= 1
                self._calls.put(None)

    def close(self) -> None:
        """Cancel calls that have not begun; those in progress continue. A second close does nothing."""
        with self._guard:
            if self._closed:
                return
            self._closed = True
            ending = self._started
            with contextlib.suppress(Empty):
                while True:
                    waiting = self._calls.get_nowait()
                    if waiting is None:
                        ending += 1  # a thread that has yet to end, see `rest`
                    else:
                        waiting[0].cancel()
            for _ in range(ending):
                self._calls.put(None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __del__(self, _ends: Callable[[], bool] = sys.is_finalizing, _getpid: Callable[[], int] = os.getpid) -> None:
        # At the interpreter's exit modules are gone; in a forked child the threads are, and their locks may be held.
        if not _ends() and _getpid() == self._pid:
            self.close()


def wait_briefly(wait: Callable[[float], T], timeout_s: float) -> T:
    """Return what `wait` returns once it is true, or what it returned last after so many seconds; 0 for ever.

    It is given the seconds that it may wait, which are few: Python does not see a signal such as Ctrl-C that comes just
    before a wait until that wait is over.
    """
    end = time.monotonic() + (timeout_s or float("inf"))
    while not (result := wait(max(0.0, min(_LOOK_S, end - time.monotonic())))) and time.monotonic() < end:
        pass
    return result


def lock_over_forks() -> Lock:
    """A lock for a module, which a fork waits for: a forked process never has a copy that a thread it lacks holds."""
    lock = Lock()
    os.register_at_fork(before=lock.acquire, after_in_parent=lock.release, after_in_child=lock.release)
    return lock


def _serve(calls: SimpleQueue[_Call | None], unfinished: set[Future[Any]]) -> None:
    """A thread's life. It knows its queue, not its pool, which may so be forgotten without being closed."""
    while (call := calls.get()) is not None:
        _run(*call)
        unfinished.discard(call[0])
        del call  # not held while waiting: a call may refer to much


def _run(future: Future[Any], call: Callable[..., Any], args: tuple[Any, ...]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(call(*args))
    except BaseException as error:  # noqa: BLE001 - the caller of result() gets it
        future.set_exception(error)
        del future  # its error's traceback refers to this frame: the cycle would keep its memory for a while
