"""When each shard is needed next: a cache under a limit evicts first what is needed last."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from lightning_stream.order import EpochOrder, Snapshot

# Begin and end of the positions, their shards ascending, and the positions of each shard ascending.
_Part = tuple[int, int, NDArray[np.int64], NDArray[np.int64]]
_HORIZON = 1 << 20  # positions; what is needed beyond it counts as never needed


class NextUse:
    """The position in an epoch at which a shard is needed next, by any rank, within a ``horizon`` of positions.

    It looks up a part of the order at a time: a fraction of a second for a million samples.

    Attributes:
        position: Of the run: everything before it is done.
    """

    def __init__(self, order: EpochOrder, snapshot: Snapshot, horizon: int = _HORIZON) -> None:
        self._order, self._snapshot, self._horizon = (
            order,
            snapshot,
            max(1, horizon // order.order.samples_per_position),
        )
        nothing = np.zeros(0, np.int64)
        self._part: _Part = (0, 0, nothing, nothing)  # replaced as one, since several threads ask
        self.position = 0

    def __call__(self, shard: int) -> float:
        """The position of the shard's next use; infinite if there is none within the horizon."""
        at = self.position
        _, _, shards, positions = self._looked_up(at)
        first, end = np.searchsorted(shards, [shard, shard + 1])
        uses = positions[first:end]
        place = np.searchsorted(uses, at)
        return float(uses[place]) if place < len(uses) else math.inf

    def _looked_up(self, at: int) -> _Part:
        begin, end = self._part[:2]
        if at < begin or (self._order.exists(end) and at + self._horizon // 2 > end):
            begin, end = at, at + self._horizon
            end = end if self._order.exists(end - 1) else self._order.num_samples
            ids, positions = self._order.samples(begin, end)
            shards = self._snapshot.shards_of(ids)
            by_shard = np.argsort(shards, kind="stable")
            self._part = (begin, end, shards[by_shard], positions[by_shard])
        return self._part


def next_use_of_file(numbers: Mapping[str, int], plans: Mapping[int, NextUse], basename: str) -> float | None:
    """In how many positions a file (``numbers``: its shard) is needed next, by any plan; None where that is unknown."""
    shard = numbers.get(basename)
    if shard is None:
        return None
    return min((plan(shard) - plan.position for plan in list(plans.values())), default=None)
