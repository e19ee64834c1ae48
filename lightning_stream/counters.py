"""What one process has counted about its data: requests, bytes, retries, cache hits, bad samples.

A worker's counters are in memory that its trainer maps too, so that they can be read while a batch is being made.
"""

from __future__ import annotations

import sysconfig
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from time import perf_counter
from typing import Any

import numpy as np

from lightning_stream.threads import lock_over_forks

NAMES = (
    "requests",  # to the stores
    "first_byte_s",  # from the requests to the first bytes of the answers, added up
    "fetched_bytes",  # that have arrived
    "download_s",  # of the threads that fetch shards, retries and pauses included
    "verify_s",  # of these threads: hashing
    "decompress_s",  # of these threads
    "convert_s",  # of these threads: from another format, download included
    "retries",  # requests that failed and were sent again
    "corrupt",  # of these, those whose answers did not have the bytes that the index promises
    "retry_s",  # pauses before these
    "throttled",  # answers that ask for fewer requests (status 429 and 503)
    "shards_fetched",
    "shards_fetched_again",  # by the same process: they were evicted in between
    "shards_here",  # that were in the cache already
    "evictions",  # shards that were deleted to make space
    "bad_samples",  # found since the process began
)
# With a GIL no lock is needed: nothing else runs in the one call of numpy that adds one number.
_adding = lock_over_forks() if sysconfig.get_config_var("Py_GIL_DISABLED") else nullcontext()
_INDICES = {name: index for index, name in enumerate(NAMES)}


class _OfThread(threading.local):
    """What a thread notes that makes batches: seconds that it waited for shards, or spent in functions of the user.

    `unverified` has the samples of the batch in progress that were taken before their shards were verified; None where
    no batch is made.
    """

    waited_s = transform_s = collate_s = 0.0
    unverified: list[Any] | None = None


class Counters:
    """The counters of one reader in one process, in the order of `NAMES`.

    Threads may count at the same time. A pickled copy begins at zero.

    Attributes:
        values: The numbers, float64[len(NAMES)]; a worker puts memory here that its trainer maps too.
        of_thread: `waited_s`, `transform_s` and `collate_s` of the thread that asks: seconds that it has waited for
            shards, spent in the user's transform, and in collating.
    """

    def __init__(self) -> None:
        self.values = np.zeros(len(NAMES))
        self.of_thread = _OfThread()

    def __reduce__(self) -> tuple[type[Counters], tuple[()]]:
        return Counters, ()

    def add(self, name: str, amount: float = 1) -> None:
        """Add to a counter."""
        index = _INDICES[name]
        value = self.values[index : index + 1]
        with _adding:
            np.add(value, float(amount), value)

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Add the seconds that the block takes to a counter."""
        began = perf_counter()
        try:
            yield
        finally:
            self.add(name, perf_counter() - began)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the seconds of the block as waiting for shards."""
        began = perf_counter()
        try:
            yield
        finally:
            self.of_thread.waited_s += perf_counter() - began
