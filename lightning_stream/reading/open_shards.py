"""The shards that one process has mapped."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lightning_stream.cache import Lease
from lightning_stream.formats.mds.gather import SpanTable
from lightning_stream.formats.shard import Batch, Buffers, Shard


@dataclass
class _OpenShard:
    shard: Shard
    lease: Lease  # keeps it from being evicted


class OpenShards:
    """Mapped shards by number, and when each was used last. Reading is thread-safe; changes need the caller's lock.

    Args:
        num_shards: All shards there are.
    """

    def __init__(self, num_shards: int) -> None:
        self._held: dict[int, _OpenShard] = {}
        self._table = SpanTable(num_shards)
        self._used: NDArray[np.int64] = np.zeros(num_shards, np.int64)  # by a clock of uses
        self._is_open: NDArray[np.bool_] = np.zeros(num_shards, np.bool_)
        self._clock = 0

    def __contains__(self, number: int) -> bool:
        return number in self._held

    def __len__(self) -> int:
        return len(self._held)

    def add(self, number: int, shard: Shard, lease: Lease) -> Shard:
        """Keep a shard that was opened, and its lease; where another thread was first, give that one's shard."""
        if (held := self._held.get(number)) is not None:
            if lease is not held.lease:
                lease.close()
            return held.shard
        self._held[number] = _OpenShard(shard, lease)
        self._clock += 1
        self._used[number] = self._clock
        self._is_open[number] = True
        self._table.add(number, shard.mapped)
        return shard

    def get(self, number: int) -> Shard | None:
        """A shard to read from, which stays mapped while it is referred to; None if it is not open."""
        held = self._held.get(number)
        if held is None:
            return None
        self._clock += 1
        self._used[number] = self._clock
        return held.shard

    def lease(self, number: int, shard: Shard) -> Lease | None:
        """The lease of an open shard; None where `shard` is not what is open under the number."""
        held = self._held.get(number)
        return held.lease if held is not None and held.shard is shard else None

    def has(self, numbers: NDArray[np.int64]) -> bool:
        """Whether all of these are open."""
        return bool(self._is_open.take(numbers).all())

    def gather(self, numbers: NDArray[np.int64], indices: NDArray[np.int64], out: Buffers | None) -> Batch | None:
        """A batch gathered at once: row k is sample ``indices[k]`` of shard ``numbers[k]``.

        Returns:
            None where not all of these shards are open, mapped, and of the same columns.
        """
        batch = self._table.gather(numbers, indices, out)
        if batch is not None:
            self._clock += 1
            self._used[numbers] = self._clock
        return batch

    def close(self, number: int) -> None:
        """Forget a shard, if it is open; it stays mapped for those that are reading it."""
        held = self._held.pop(number, None)
        if held is not None:
            self._is_open[number] = False
            self._table.remove(number)
            held.lease.close()

    def close_all_but(self, count: int) -> None:
        """Forget the shards used longest ago."""
        if len(self._held) > count:
            for number in sorted(self._held, key=self._used.__getitem__)[: len(self._held) - count]:
                self.close(number)
