"""When each shard is needed next, as far ahead as matters: what a cache under a limit evicts last."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

from lightning_stream.order import Snapshot
from lightning_stream.order.mix import EpochOrder

_HORIZON = 1 << 20  # positions; beyond it the future is told in the same breath as never


class NextUse:
    """Says of a shard at which position of the epoch it is needed next, by any rank.

    Looks a stretch of the order up at a time: O(samples of the stretch), a fraction of a second for a million.

    Args:
        order: The epoch.
        snapshot: Its data.
        horizon: Positions looked ahead at most.
    """

    def __init__(self, order: EpochOrder, snapshot: Snapshot, horizon: int = _HORIZON) -> None:
        self._order = order
        self._snapshot = snapshot
        self._horizon = horizon
        nothing = np.zeros(0, np.int64)
        # Replaced as one, since several threads ask: begin, end, shards ascending, and the positions of each ascending.
        self._stretch: tuple[int, int, NDArray[np.int64], NDArray[np.int64]] = (0, 0, nothing, nothing)
        self._at = 0

    def advance(self, position: int) -> None:
        """Say where the run is: what comes before is done."""
        self._at = position

    def __call__(self, shard: int) -> float:
        """The position of the shard's next use; infinite where it is not needed any more within the horizon."""
        at = self._at
        _, _, shards, positions = self._looked_up(at)
        first, end = np.searchsorted(shards, [shard, shard + 1]).tolist()
        found = first + int(np.searchsorted(positions[first:end], at))
        return float(positions[found]) if found < end else math.inf

    def _looked_up(self, at: int) -> tuple[int, int, NDArray[np.int64], NDArray[np.int64]]:
        begin, end = self._stretch[:2]
        num_samples = self._order.num_samples
        if at < begin or (end < num_samples and at + self._horizon // 2 > end):
            begin, end = at, min(at + self._horizon, num_samples)
            shards = self._snapshot.shards_of(self._order.ids(begin, end))
            by_shard = np.argsort(shards, kind="stable")
            self._stretch = (begin, end, shards[by_shard], by_shard + begin)
        return self._stretch


def next_use_of_file(numbers: Mapping[str, int], next_use: Callable[[int], float], basename: str) -> float | None:
    """When a file is needed next; None for what is not of this dataset, of which nothing is known.

    Args:
        numbers: Shard number by file.
        next_use: When a shard is needed next, by its number.
        basename: The file.
    """
    number = numbers.get(basename)
    return None if number is None else next_use(number)
