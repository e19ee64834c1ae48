"""How much the cache of a node must hold so that no shard is fetched twice, computed from the order alone."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from lightning_stream.order.arrays import Ints, starts_of
from lightning_stream.order.batches import EpochOrder
from lightning_stream.order.config import SAMPLER, UNIFORM
from lightning_stream.order.orders import ceil_div, positions_of
from lightning_stream.order.rows import PackedRows
from lightning_stream.order.run import RunOrder
from lightning_stream.order.snapshot import max_active
from lightning_stream.order.world import World

_LOOKED_AT = 1 << 14  # samples


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
    sizes = np.sort(raw_bytes)[::-1]
    order = run.epoch(0).order
    batch_size = device_batch_size * world.num_replicas
    span = order.samples_in(ahead.span * batch_size)
    together = order.unchanged_from(1)
    if together > 1:  # the shards of a window stay in use until its last batch
        span = (ceil_div(span, together) + 1) * together
    if run.config.mosaic is None:
        of_machine = _of_windows(run, world.num_nodes, span, batch_size)
    else:
        of_machine = _of_listed(run, world.num_nodes, span)
    counts = _Counts(*(min(count, len(sizes)) for count in of_machine))
    entering = counts.together - counts.active
    unpacked = min(counts.begun - entering, counts.active)  # shards that begin, and are among the active ones
    entering_bytes = (1 + packed) * sizes[counts.active : counts.together].sum()
    return CacheNeed(
        counts.active,
        int((1 + cached) * sizes[: counts.active].sum()),
        entering,
        int(entering_bytes + (packed - cached) * sizes[:unpacked].sum()),
    )


class _Counts(NamedTuple):
    """Shards of one machine: in use at once, these and those read ahead, and how many begin in what is read ahead."""

    active: int
    together: int
    begun: int


def _of_windows(run: RunOrder, num_machines: int, num_samples: int, batch_size: int) -> list[int]:
    """Counts where each canonical node has a window of shards, and so many samples of all machines are read ahead.

    A shard that a border of two nodes cuts stays in use between the uses in the one and in the other. Where shards
    are smaller, as the last one of a dataset, another one becomes active earlier.
    """
    config = run.config
    nodes = config.canonical_nodes
    window = config.window
    if not config.shuffle or config.algorithm in (UNIFORM, SAMPLER):
        nodes = 1
        window = run.snapshot.num_shards if config.shuffle else 1
    here = _nodes_of_machine(run.epoch(0), nodes, batch_size, num_machines)
    counts = np.zeros(3, np.int64)
    for drawn in run.drawn_together():
        begins = starts_of(drawn.count)
        edges = np.arange(nodes + 1) * begins[-1] // nodes
        of_nodes = begins.searchsorted(edges[1:]) - begins.searchsorted(edges[:-1], "right") + 1
        num_shards = min(len(drawn.count), int(np.sort(of_nodes)[-here:].sum()))
        mean = max(1.0, begins[-1] / max(1, len(drawn.count)))
        is_uneven = bool((drawn.count < mean).any())
        active = min(here * window + here - 1, num_shards)
        begun = min(here * math.ceil(num_samples / nodes / mean) + is_uneven, num_shards)
        counts += active, min(active + begun, num_shards), begun
    if run.forgotten is not None:  # others are read in their places, of any shard
        counts += ceil_div(num_samples * len(run.forgotten.ids), run.num_samples)
    return counts.tolist()


def _nodes_of_machine(epoch: EpochOrder, num_nodes: int, batch_size: int, num_machines: int) -> int:
    """How many of the canonical nodes a machine reads from at most.

    Each batch is sorted by nodes and cut evenly: anywhere, if the machines do not divide the nodes, or the nodes not a
    batch. This looks at the first batches.
    """
    order = epoch.order
    of_order = order.num_sequences if isinstance(order, PackedRows) else num_nodes
    count = max(1, _LOOKED_AT // order.samples_in(batch_size))
    while count and not epoch.exists(count * batch_size - 1):
        count //= 2
    if not count:
        return num_nodes
    nodes = np.sort(order.nodes(positions_of(0, count * batch_size)).reshape(count, batch_size))
    edges = np.arange(num_machines + 1) * batch_size // num_machines
    spans = 1 + nodes[:, edges[1:] - 1].max(axis=0) - nodes[:, edges[:-1]].min(axis=0)
    return ceil_div(int(spans.max()) * num_nodes, of_order)


def _of_listed(run: RunOrder, num_machines: int, num_samples: int) -> list[int]:
    """Counts of the first epoch, where its samples are listed."""
    order = run.order_of_samples(0)
    at = positions_of(0, order.size)
    shards = run.snapshot.shards_of(order.ids(at))
    machines = order.nodes(at) * num_machines // run.config.canonical_nodes
    ahead = ceil_div(num_samples, num_machines)
    of_machines = []
    for machine in range(num_machines):
        here = shards[machines == machine]
        begins = np.sort(np.unique(here, return_index=True)[1])
        begun = begins.searchsorted(begins + ahead) - np.arange(len(begins))
        of_machines.append((max_active(here), max_active(here, ahead), int(begun.max(initial=0))))
    return list(map(max, zip(*of_machines, strict=True)))
