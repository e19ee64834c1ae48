"""``random``: the shards of all streams in one order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from lightning_stream.order.batching.base import EpochOrder

if TYPE_CHECKING:
    from lightning_stream.order.plan import RunOrder
    from lightning_stream.order.snapshot import Snapshot

_ALL_STREAMS = 2**32  # the key of the one order over all streams together


class RandomOrder(EpochOrder):
    """One order over the shards of all streams; any run of B positions is a global batch."""

    def __init__(self, run: RunOrder, epoch: int) -> None:
        super().__init__(run, epoch)
        self._samples = run.sample_order(epoch, tuple(range(run.snapshot.num_streams)), _ALL_STREAMS)

    @classmethod
    def shard_groups(cls, snapshot: Snapshot) -> Sequence[NDArray[np.int64]]:
        """All shards are one group."""
        return (snapshot.sizes,)

    def ids(self, begin: int, end: int) -> NDArray[np.int64]:
        """Sample ids at positions [begin, end)."""
        self.check_range(begin, end)
        return self._samples.ids(begin, end)

    def canonical(self, begin: int, end: int) -> NDArray[np.int64]:
        """The canonical node of each position in [begin, end)."""
        self.check_range(begin, end)
        return self._samples.canonical(begin, end)
