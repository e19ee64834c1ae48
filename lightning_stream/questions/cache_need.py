"""How much the cache of a node must hold so that no shard is fetched twice, computed from the order alone."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from lightning_stream.order.arrays import Ints
from lightning_stream.order.config import SAMPLER, UNIFORM
from lightning_stream.order.orders import ceil_div
from lightning_stream.order.run import RunOrder
from lightning_stream.order.snapshot import max_active
from lightning_stream.order.world import World


@dataclass(frozen=True)
class ReadAhead:
    """What the workers of one rank may have begun to fetch before it is trained on."""

    workers: int
    batches: int  # micro-batches that each of them looks ahead
    finished: int  # finished micro-batches that may wait in each of them

    @property
    def span(self) -> int:
        """Micro-batches from the first not yet taken to the last whose shards are being fetched."""
        return self.workers * (self.batches + 1 + self.finished)


@dataclass(frozen=True)
class CacheNeed:
    """What the cache of one node must hold at once, so that nothing is fetched twice."""

    active_shards: int  # what the order keeps active, also of those cut: used before, and to be used again
    active_bytes: int
    entering_shards: int  # what the look-ahead may fetch in the meantime
    entering_bytes: int  # with the compressed files, until they are unpacked

    @property
    def num_bytes(self) -> int:
        """All of it."""
        return self.active_bytes + self.entering_bytes


def need_of_node(
    run: RunOrder,
    raw_bytes: Ints,
    ahead: ReadAhead,
    *,
    device_batch_size: int,
    world: World,
    packed: float,
    cached: float,
) -> CacheNeed:
    """The bytes that a node's cache must hold at once, from those of all shards: int64[shards].

    ``packed`` and ``cached`` are compressed bytes for each raw one: of what is fetched, and of what stays in the cache.
    """
    here, nodes = _canonical_nodes_of_machine(run, world.num_nodes)
    sizes = np.sort(raw_bytes)[::-1]
    active = min(run.active_shards() + _cut_shards(run), len(sizes))
    order = run.epoch(0)
    span = order.order.samples_in(ahead.span * device_batch_size * world.num_replicas)
    together = order.order.unchanged_from(1)
    if together > 1:  # the shards of a window stay in use until its last batch
        span = (ceil_div(span, together) + 1) * together
    entering = min(_entering(run, span), len(sizes) - active)
    return CacheNeed(
        ceil_div(active * here, nodes),
        int((1 + cached) * sizes[:active].sum()) * here // nodes,
        ceil_div(entering * here, nodes),
        int((1 + packed) * sizes[active : active + entering].sum()) * here // nodes,
    )


def _canonical_nodes_of_machine(run: RunOrder, num_machines: int) -> tuple[int, int]:
    """How many canonical nodes a machine reads from at most, and their number: their row is cut evenly, anywhere."""
    config = run.config
    has_nodes = config.mosaic is not None or (config.shuffle and config.algorithm not in (UNIFORM, SAMPLER))
    count = config.canonical_nodes if has_nodes else 1
    edges = [machine * count for machine in range(num_machines + 1)]  # in parts of a canonical node
    read = [ceil_div(end, num_machines) - begin // num_machines for begin, end in pairwise(edges)]
    return max(read), count


def _cut_shards(run: RunOrder) -> int:
    """Shards that a border of canonical nodes cuts: between the uses in one node and in its neighbour, each is kept."""
    config = run.config
    if config.mosaic is not None or not config.shuffle:
        return 0
    return (config.canonical_nodes - 1) * len(config.batching.shard_groups(run.snapshot))


def _entering(run: RunOrder, num_samples: int) -> int:
    """Shards that may become active within so many samples: in the worst moment, at once in all canonical nodes.

    Where shards are smaller, as the last one of a dataset, another one becomes active earlier. A cut one is smaller,
    too, but is in use then, and `_cut_shards` has counted it.
    """
    snapshot = run.snapshot
    config = run.config
    if config.mosaic is not None:
        shards = snapshot.shards_of(run.epoch(0).ids(0, run.num_samples))
        return max_active(shards, num_samples) - max_active(shards)
    nodes = config.canonical_nodes if config.shuffle else 1
    groups = config.batching.shard_groups(snapshot)
    entering = 0
    for sizes in groups:
        mean = max(1.0, float(np.mean(sizes)))
        is_uneven = bool((sizes < mean).any())
        entering += min(len(sizes), nodes * math.ceil(num_samples / nodes / mean) + is_uneven)
    return entering
