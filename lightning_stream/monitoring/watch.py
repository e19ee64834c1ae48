"""`Watch`: a thread that reports while the first shards arrive, and where everything stands if no batch comes."""

from __future__ import annotations

import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager
from multiprocessing import active_children
from time import perf_counter
from typing import Protocol
from weakref import ref

from lightning_stream.errors import write_stderr
from lightning_stream.monitoring.meter import Meter
from lightning_stream.monitoring.stats import LoaderStats
from lightning_stream.stores.retry import requests_in_flight

_LOOK_S = 1.0
_FIRST_WORD_S = 5.0
_RARER = 3.0  # each message about the first batch comes after so many times the wait of the one before
REPORT = signal.SIGRTMAX - 1 if hasattr(signal, "SIGRTMAX") else None  # asks a worker where it stands


class Watched(Protocol):
    """A loader."""

    @property
    def meter(self) -> Meter:
        """What this process measures at it."""

    def stats(self) -> LoaderStats:
        """What was measured so far, with what workers have counted."""


class Watch(AbstractContextManager["Watch"]):
    """Looks once a second whether a loader's consumer waits for a batch, until it is closed. A context manager.

    Args:
        loader, after_s, say: See `StreamingDataLoader.watch`. A loader that is no longer used is not watched.
    """

    def __init__(self, loader: Watched, after_s: float, say: Callable[[str], object]) -> None:
        if not after_s > 0:
            raise ValueError(f"after_s must be positive; found {after_s}. Pass the seconds to wait for a batch")
        self._loader = ref(loader)
        self._after_s = after_s
        self._say = say
        self._closed = threading.Event()
        self._next_word_s = _FIRST_WORD_S
        self._reported: float | None = None  # the wait that was reported, by its beginning
        self._thread = threading.Thread(target=self._run, name="data-watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self._closed.set()

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _run(self) -> None:
        while not self._closed.wait(min(_LOOK_S, self._after_s)):
            loader = self._loader()
            if loader is None:
                return
            since = loader.meter.waiting_since
            if since is not None:
                self._look(loader, since, perf_counter() - since)
            del loader  # it is not kept alive

    def _look(self, loader: Watched, since: float, waited_s: float) -> None:
        if waited_s >= self._next_word_s and loader.stats().num_batches == 0:
            self._next_word_s = _RARER * waited_s
            self._say(_first_word(loader, waited_s))
        if waited_s >= self._after_s and self._reported != since:
            self._reported = since
            _report(loader, waited_s)
            self._say(f"No batch came for {waited_s:.0f} s: stderr has the stacks of all threads.")


def _first_word(loader: Watched, waited_s: float) -> str:
    counted = loader.stats().counters
    failed = f"; {counted['retries']:,.0f} requests failed and were sent again" if counted["retries"] else ""
    return (
        f"Waiting {waited_s:.0f} s for the first batch: {counted['fetched_bytes'] / 1e6:,.1f} MB and "
        f"{counted['shards_fetched']:,.0f} whole shards have arrived so far{failed}."
    )


def _report(loader: Watched, waited_s: float) -> None:
    """Write where this process and its workers stand. The signal does not end a worker, see `worker_signals`."""
    alive = {child.pid for child in active_children()}
    workers = [pid for pid in loader.meter.worker_pids() if pid in alive]
    requests = "; ".join(requests_in_flight()) or "none"
    text = f"No batch came for {waited_s:.0f} s. Requests in flight in this process: {requests}.\n{_stacks()}\n"
    text += f"The stacks of {len(workers)} workers follow.\n" if workers else ""
    write_stderr(text)
    for pid in workers:
        if REPORT is not None:
            os.kill(pid, REPORT)


def _stacks() -> str:
    """The stacks of all threads of this process."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    frames = sys._current_frames().items()  # noqa: SLF001 - it is documented
    stacks = ((names.get(ident, str(ident)), traceback.format_stack(frame)) for ident, frame in frames)
    return "\n".join(f"Thread {name}:\n{''.join(lines)}" for name, lines in stacks)
