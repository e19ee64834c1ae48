"""When a shard is needed next, in an order: under a limit, a cache evicts first what is needed last."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from lightning_stream.formats.memory import Int64s
from lightning_stream.order import EpochOrder, Snapshot

_HORIZON = 1 << 20  # positions whose uses of shards are looked up at once


class _Part(NamedTuple):
    """The uses of shards in a part of the order: the shards ascending, and the positions of each ascending."""

    begin: int
    end: int
    shards: Int64s
    positions: Int64s
    has_rest: bool  # of the epoch; then the beginning of the next epoch follows


class NextUse:
    """The position at which a shard is needed next, by any rank; those of the next epoch count on from this one's.

    It looks up ``horizon`` positions at a time: a fraction of a second for a million samples. What it knows of a shard
    without a use among them is whether it was read in this epoch, which is done with it then, or is still to come.

    Other processes may be ``lag`` positions behind: what is used there is done with last, the latest use at the end.

    Attributes:
        position: Of the run: everything before it is done.
    """

    def __init__(self, order: EpochOrder, snapshot: Snapshot, horizon: int = _HORIZON, lag: int = 0) -> None:
        self._order = order
        self._snapshot = snapshot
        self._lag = lag
        self._horizon = max(1, horizon // order.order.samples_per_position)
        self._part: _Part | None = None  # replaced as one, since several threads ask
        self._began_at = time.time()
        self.position = 0

    def __call__(self, shard: int, last_used: float = 0.0) -> float:
        """The position of the next use of a shard that was read last at this time; infinite if it is done with."""
        at = self.position
        part = self._looked_up(at)
        first, end = np.searchsorted(part.shards, [shard, shard + 1])
        uses = part.positions[first:end]
        place = np.searchsorted(uses, at)
        if place < len(uses) and uses[place] < part.end:
            return float(uses[place])
        if place and at - uses[place - 1] <= self._lag:
            return float(part.end + (at - uses[place - 1]) / (self._lag + 1))
        if place < len(uses):
            return float(uses[place])
        return math.inf if part.has_rest or last_used >= self._began_at else float(part.end)

    def _looked_up(self, at: int) -> _Part:
        part = self._part
        begin = max(0, at - self._lag)
        if part is None or begin < part.begin or (not part.has_rest and at + self._horizon // 2 > part.end):
            end, shards, positions = self._uses(self._order, begin, at + self._horizon)
            has_rest = not self._order.exists(end)
            if has_rest and self._order.following is not None:
                _, later, places = self._uses(self._order.following(), 0, self._horizon // 2)
                shards = np.append(shards, later)
                positions = np.append(positions, places + end)
            by_shard = np.argsort(shards, kind="stable")
            self._part = part = _Part(begin, end, shards[by_shard], positions[by_shard], has_rest)
        return part

    def _uses(self, order: EpochOrder, begin: int, end: int) -> tuple[int, Int64s, Int64s]:
        """The shards of the samples from a position on, and their positions; and where they end."""
        end = end if order.exists(end - 1) else order.num_samples
        ids, positions = order.samples(begin, end)
        return end, self._snapshot.shards_of(ids), positions


def next_use_of_file(
    shards: Mapping[str, int],
    plans: Mapping[int, NextUse],
    basename: str,
    last_used: Callable[[str], float] = lambda _: 0.0,
) -> float | None:
    """In how many positions a file (``shards``: its shard) is needed next, by any plan; None where that is unknown."""
    shard = shards.get(basename)
    if shard is None:
        return None
    used = last_used(basename)
    return min((plan(shard, used) - plan.position for plan in list(plans.values())), default=None)
