"""How well an order shuffles, and what it needs for that: computed before training, for any settings.

The score is how many of 100 disk segments (equal ranges of sample ids, so of rows on disk) one global batch touches. A
truly random batch of 256 touches 92.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lightning_stream.order.arrays import Ints
from lightning_stream.order.batches import BatchPlan
from lightning_stream.order.run import RunOrder

NUM_SEGMENTS = 100
_EVENLY = 32
_AT_ENDS = 8
_END = 16  # the first and the last window are a sixteenth of the epoch each


@dataclass(frozen=True)
class Quality:
    """The score of an order, that of a perfect shuffle, and the shards that the order needs at once.

    Args:
        random: The score of a truly random order with this batch size.
        mean: The order's score: the mean over batches spread evenly over the epoch.
        minimum: The lowest score of all measured batches, those at both ends of the epoch included.
        first, last: Means over the epoch's first and last sixteenth.
        active_shards, cache_bytes: Shards in use at once over all nodes, and their bytes at most.

    Example::

        str(measure(run, batch_size=256))
        # 'Shuffle quality 88/100 (perfect shuffle: 92). Cache needed: 512 MB for 128 active shards.'
    """

    random: float
    mean: float
    minimum: int
    first: float
    last: float
    active_shards: int
    cache_bytes: int

    def __str__(self) -> str:
        """One line for a log."""
        return (
            f"Shuffle quality {self.mean:.0f}/{NUM_SEGMENTS} (perfect shuffle: {self.random:.0f}). Cache needed: "
            f"{self.cache_bytes / 1e6:.0f} MB for {self.active_shards} active shards."
        )


def measure(run: RunOrder, *, batch_size: int, shard_bytes: Ints | None = None) -> Quality:
    """Score the first epoch's order by some of its batches, in less than a second for any amount of data.

    ``shard_bytes``, int64[shards], is for the cache; None counts every sample as one byte.
    """
    order = run.epoch(0)
    snapshot = run.snapshot
    batch_size = order.order.samples_in(batch_size)
    plan = BatchPlan(order.documents, batch_size=batch_size, tail="pad")
    count = plan.num_batches
    edge = max(1, plan.num_batches // _END)
    evenly = _picks(0, count, _EVENLY)
    first = _picks(0, edge, _AT_ENDS)
    last = _picks(count - edge, count, _AT_ENDS)
    scores = {k: score(plan.ids(k), snapshot.num_samples) for k in sorted({0, *evenly, *first, *last})}
    active = run.active_shards()
    sizes = np.sort(snapshot.sizes if shard_bytes is None else shard_bytes)[::-1]
    return Quality(
        random=random_score(batch_size),
        mean=float(np.mean([scores[k] for k in evenly])),
        minimum=min(scores.values()),
        first=float(np.mean([scores[k] for k in first])),
        last=float(np.mean([scores[k] for k in last])),
        active_shards=active,
        cache_bytes=int(sizes[:active].sum()),
    )


def score(ids: Ints, num_samples: int) -> int:
    """How many disk segments these samples of ``num_samples`` touch."""
    return len(np.unique(ids * NUM_SEGMENTS // num_samples))


def random_score(batch_size: int) -> float:
    """How many disk segments a truly random batch touches on average."""
    return NUM_SEGMENTS * (1 - (1 - 1 / NUM_SEGMENTS) ** batch_size)


def _picks(begin: int, end: int, count: int) -> list[int]:
    """At most ``count`` numbers spread evenly over [begin, end)."""
    return sorted({begin + (end - begin) * i // count for i in range(count)} if end > begin else set())
