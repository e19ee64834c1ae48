"""What one process has of the shards of streams: those that it has open, and what it delivered before they came."""

from __future__ import annotations

import atexit
import logging
import os
import sys
from collections.abc import Sequence
from multiprocessing import parent_process
from multiprocessing.util import Finalize
from time import monotonic
from typing import Any

from lightning_stream.errors import LightningStreamError
from lightning_stream.reading.proofs import UnverifiedRead, difference
from lightning_stream.reading.shard_pool import ShardPool
from lightning_stream.reading.shard_table import ReaderConfig, ShardTable
from lightning_stream.reading.stream import CacheDefaults, Stream

_PAUSE_S = 0.05  # between looks for shards that have come
_log = logging.getLogger(__name__)


class StreamShards(ShardTable):
    """The shards of streams, and what one process has of them. Picklable."""

    def __init__(
        self,
        streams: Sequence[Stream],
        defaults: CacheDefaults | None = None,
        config: ReaderConfig | None = None,
    ) -> None:
        super().__init__(streams, defaults, config)
        self.delivered = Deliveries(self)
        self._pools: dict[int, ShardPool] = {}  # by process

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_pools": {}}  # another process maps the files itself

    @property
    def pool(self) -> ShardPool:
        """The shards that this process has open; a forked child starts with none."""
        pid = os.getpid()
        if (pool := self._pools.get(pid)) is None:
            pool = self._pools.setdefault(pid, ShardPool(self))  # that of the first thread which asks
            for parent in self._pools.keys() - {pid}:
                self._pools.pop(parent, None)
        return pool

    def release(self) -> None:
        """Close the shards that this process has open, and end its threads: what is read again starts others."""
        self.pool.release()
        for threads in self.pool.queue.pools:
            threads.rest()

    def close(self) -> None:
        """Close every mapped shard of this process."""
        if (pool := self._pools.pop(os.getpid(), None)) is not None:
            pool.close()


class Deliveries:
    """The unverified samples of batches that were handed out, until they are compared; of one process.

    Thread-safe without a lock, which a forked child could find taken: what is noted changes in single steps.
    """

    def __init__(self, shards: StreamShards) -> None:
        self._shards = shards
        self._reads: dict[object, tuple[str, UnverifiedRead]] = {}  # with their batches
        self._looked = 0.0

    def __reduce__(self) -> tuple[type[Deliveries], tuple[StreamShards]]:
        return Deliveries, (self._shards,)

    def add(self, reads: Sequence[UnverifiedRead], batch: str) -> None:
        """Note the unverified samples of a batch, and where it is in the run."""
        self._reads.update({object(): (batch, read) for read in reads})
        _undecided[id(self)] = os.getpid(), self
        if parent_process() is not None:  # a process that `multiprocessing` forked runs no other exit hooks
            Finalize(None, _compare_at_exit, exitpriority=0)

    def forget(self) -> None:
        """Forget what was delivered: the run continues from before it."""
        self._reads.clear()
        _undecided.pop(id(self), None)

    def compare_arrived(self) -> None:
        """Compare what was delivered of shards that have come; to be called for each batch."""
        if self._reads and monotonic() - self._looked >= _PAUSE_S:
            self.compare(wait=False)

    def compare(self, *, wait: bool = True) -> None:
        """Compare what was delivered with the verified shards: with all, or with those that are here.

        Raises:
            StoreError: A sample has other bytes; again at each later call.
            StoreError, FormatError, CacheError: A shard cannot be fetched.
        """
        delivered = list(self._reads.items())
        if not delivered:
            return
        self._looked = monotonic()
        agreeing = self._shards.pool.agreements([read for _, (_, read) in delivered], wait=wait)
        for key, (_, read) in delivered:
            if agreeing.get(read):
                self._reads.pop(key, None)
        wrong = [(batch, read) for _, (batch, read) in delivered if agreeing.get(read) is False]
        if wrong or not self._reads:
            _undecided.pop(id(self), None)  # if wrong, the caller gets the error
        if wrong:
            shard_id = wrong[0][1].shard_id
            reads = [read for _, read in wrong if read.shard_id == shard_id]
            raise difference(self._shards.url_of(shard_id), reads, list(dict.fromkeys(batch for batch, _ in wrong)))
        if self._reads:  # also what another thread has noted meanwhile
            _undecided[id(self)] = os.getpid(), self


_undecided: dict[int, tuple[int, Deliveries]] = {}  # of this process, and not compared yet


def _compare_at_exit() -> None:
    """Compare what iterations have delivered that were abandoned; the program fails where samples were wrong.

    No error leaves a destructor, so the end of the program is the last place that can tell its caller.
    """
    if hasattr(sys, "last_value") or sys.exc_info()[1] is not None:  # it fails already
        return
    try:
        for pid, deliveries in list(_undecided.values()):
            if pid == os.getpid():
                deliveries.compare()
    except (LightningStreamError, OSError) as error:
        try:
            _log.error("Samples that were delivered unverified cannot be shown to be right: %s", error)
            logging.shutdown()
            print(end="", flush=True)  # there may be no stdout
        finally:
            os._exit(1)


atexit.register(_compare_at_exit)
