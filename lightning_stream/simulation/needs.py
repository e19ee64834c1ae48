"""What the ranks of one node read: the shards of each micro-batch, in the order of first use."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_stream.formats.index import Index
from lightning_stream.order import BatchPlan, RunOrder, World
from lightning_stream.order.downloads import reads_of
from lightning_stream.order.rank_split import Tail, num_micro_batches
from lightning_stream.reading.shard_heads import MOST_OF_SHARD

_EARLY_STEPS = 64  # the first ones: later, shards are here when they are needed, or most of each is needed
_ENTRY_BYTES = 300  # of a shard in an index


class Need(NamedTuple):
    """What a micro-batch of a rank reads."""

    step: int  # number of its global batch, counted from the first one here
    num_samples: int
    shards: Counter[int]  # samples of each shard, in the order of first use
    step_share: float  # its part of the time of an optimizer step
    completes_step: bool
    beginnings: dict[int, float]  # how much of a shard it needs, 0 to 1, where it needs at most half


@dataclass(frozen=True, eq=False)
class Shards:
    """The shards of a run, by number, as far as a simulation needs them.

    Attributes:
        raw_bytes, stored_bytes: int64[shards], uncompressed and as they are downloaded.
        num_samples: int64[shards], samples of each, also of those that are not read.
        has_ranges: bool[shards], whether samples can be read by ranges: of raw MDS files.
        has_equal_sizes: Whether all samples of a shard have one size, so that no range reads their offsets.
        index_bytes: Of the index, which is downloaded first.

    Example: ``Shards.alike(1000, 64 << 20, 500)``.
    """

    raw_bytes: NDArray[np.int64]
    stored_bytes: NDArray[np.int64]
    num_samples: NDArray[np.int64]
    has_ranges: NDArray[np.bool_]
    has_equal_sizes: bool = False
    index_bytes: int = 0

    @classmethod
    def of(cls, indexes: Sequence[Index], index_bytes: int | None = None) -> Shards:
        """Those of some datasets, one after another; None: the bytes of all indexes."""
        raw, stored, counts = (
            np.concatenate([getattr(index, name) for index in indexes])
            for name in ("raw_bytes", "stored_bytes", "shard_sizes")
        )
        first = [schema for index in indexes for schema in index.schemas]
        is_mds = all(one.format == "mds" for one in first)
        equal = all(None not in one.sizes for one in first)
        total = sum(len(index.data) for index in indexes) if index_bytes is None else index_bytes
        return cls(raw, stored, counts, (raw == stored) & is_mds, equal, total)

    @classmethod
    def alike(cls, num_shards: int, num_bytes: int, num_samples: int) -> Shards:
        """Raw MDS shards of one size, of so many samples each."""
        sizes, counts = np.full(num_shards, num_bytes, np.int64), np.full(num_shards, num_samples, np.int64)
        return cls(sizes, sizes, counts, np.ones(num_shards, np.bool_), index_bytes=_ENTRY_BYTES * num_shards)


@dataclass(frozen=True, eq=False)
class Training:
    """A training run over some nodes: its order, and how it is cut into batches.

    Attributes:
        run: The order.
        batch_size: Samples of a global batch.
        device_batch_size: Samples of a micro-batch on one device.
        world: The nodes and devices; the rank does not matter.
        epoch, tail: The epoch that is simulated, and what happens to its last partial batch.
    """

    run: RunOrder
    batch_size: int
    device_batch_size: int
    world: World
    epoch: int = 0
    tail: Tail = "pad"

    def plan(self, rank: int = 0, start: int = 0) -> BatchPlan:
        """The global batches from a position on, with the share of a rank."""
        world = replace(self.world, rank=rank)
        order = self.run.epoch(self.epoch)
        return BatchPlan(order, batch_size=self.batch_size, world=world, tail=self.tail, start=start)

    def needs(self, node: int, start: int, num_steps: int) -> list[list[Need]]:
        """What each rank of a node reads in some global batches from a position on."""
        world = self.world
        first = node * max(world.ranks_per_node, world.replication)
        ranks = range(first, first + world.ranks_per_node)
        first_of_replica = {rank // world.replication: rank for rank in reversed(ranks)}
        plans = [self.plan(rank, start) for rank in first_of_replica.values()]
        found: dict[int, list[Need]] = {replica: [] for replica in first_of_replica}
        replicas = list(first_of_replica)
        for begin, which, ids in reads_of(plans, 0, num_steps):
            for step, own in enumerate(map(self.run.snapshot.locate, ids), begin):
                found[replicas[which]] += self._cut(step, *own, plans[0])
        return [found[rank // world.replication] for rank in ranks]

    def _cut(self, step: int, shards: NDArray[np.int64], within: NDArray[np.int64], plan: BatchPlan) -> list[Need]:
        """One rank's share of a global batch, in micro-batches."""
        begin, end = plan.bounds(step)
        count = min(num_micro_batches(end - begin, self.device_batch_size, self.world.num_replicas), len(shards))
        ends = [len(shards) * k // count for k in range(count + 1)]
        found = []
        for k, (first, last) in enumerate(pairwise(ends)):
            own = shards[first:last]
            beginnings = self._beginnings(own, within[first:last]) if step < _EARLY_STEPS else {}
            found.append(Need(step, len(own), Counter(own.tolist()), 1 / count, k == count - 1, beginnings))
        return found

    def _beginnings(self, shards: NDArray[np.int64], within: NDArray[np.int64]) -> dict[int, float]:
        parts = (within + 1) / self.run.snapshot.sizes[shards]
        found = dict[int, float]()
        for shard, part in zip(shards.tolist(), parts.tolist(), strict=True):
            found[shard] = max(part, found.get(shard, 0.0))
        return {shard: part for shard, part in found.items() if part <= MOST_OF_SHARD}
