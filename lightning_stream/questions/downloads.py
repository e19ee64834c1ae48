"""Which shards each node will download in an epoch, computed from the order alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from lightning_stream.order.arrays import Ints
from lightning_stream.order.batches import BatchPlan, Tail
from lightning_stream.order.orders import positions_of
from lightning_stream.order.run import RunOrder
from lightning_stream.order.world import World

FACTOR_WORTH_A_WARNING = 1.05
_CHUNK = 1 << 18
_ESTIMATED_BATCHES = 64  # or fewer, of so many positions in all
_ESTIMATED_POSITIONS = 1 << 20


@dataclass(frozen=True, eq=False)
class DownloadPlan:
    """What the nodes download in an epoch, each shard once per node that needs it."""

    shards: tuple[Ints, ...]  # one int64 array per data node: the shards it needs
    num_bytes: Ints  # int64[nodes], the bytes of those
    union_bytes: int  # bytes of all shards needed anywhere
    warning: str | None = None  # what to change, if much is downloaded more than once
    is_estimated: bool = False  # whether the numbers are those of an even share, and ``shards`` is empty

    @property
    def factor(self) -> float:
        """How often a byte is downloaded on average; 1.0 is perfect."""
        return int(self.num_bytes.sum()) / self.union_bytes if self.union_bytes else 1.0


def plan_downloads(
    run: RunOrder,
    *,
    epoch: int,
    batch_size: int,
    world: World,
    tail: Tail = "pad",
    shard_bytes: Ints | None = None,
) -> DownloadPlan:
    """What each node will download in an epoch, exactly. O(samples).

    The rank of ``world`` does not matter. ``shard_bytes`` is int64[shards]; None counts every sample as one byte.

    Example: ``plan_downloads(run, epoch=0, batch_size=256, world=World(num_ranks=16, ranks_per_node=8)).factor``.
    """
    needed = np.zeros((world.num_nodes, run.snapshot.num_shards), dtype=np.bool_)
    readers = _readers(world)
    order = run.epoch(epoch)
    plans = BatchPlan(order, batch_size=batch_size, world=world, tail=tail).of_replicas()
    for replica, ids in _reads_of(plans):
        shards = np.unique(run.snapshot.shards_of(ids.reshape(-1)))
        for node in readers[replica]:
            needed[node, shards] = True
    sizes = run.snapshot.sizes if shard_bytes is None else shard_bytes
    per_node = np.array([int(sizes[row].sum()) for row in needed], dtype=np.int64)
    union = int(sizes[needed.any(axis=0)].sum())
    plan = DownloadPlan(tuple(map(np.flatnonzero, needed)), per_node, union)
    return replace(plan, warning=warning_about(run, batch_size=batch_size, world=world, factor=plan.factor))


def estimate_factor(run: RunOrder, *, epoch: int, batch_size: int, world: World) -> float:
    """How often a byte will be downloaded on average, estimated from the canonical nodes that each node reads."""
    order = run.epoch(epoch)
    plan = BatchPlan(order, batch_size=batch_size, world=world, tail="drop")
    if run.config.mosaic is not None or not plan.is_whole(0):
        return 1.0
    readers = _readers(world)
    replicas = world.num_replicas
    count = min(_ESTIMATED_BATCHES, max(1, _ESTIMATED_POSITIONS // batch_size))
    pairs: set[int] = set()
    for k in filter(plan.is_whole, range(count)):
        nodes = np.sort(order.canonical(*plan.bounds(k)))
        pairs.update(np.unique(nodes * replicas + np.arange(len(nodes)) * replicas // len(nodes)).tolist())
    reads = {(pair // replicas, node) for pair in pairs for node in readers[pair % replicas]}
    return len(reads) / len({canonical for canonical, _ in reads})


def estimate_downloads(run: RunOrder, *, epoch: int, batch_size: int, world: World, shard_bytes: Ints) -> DownloadPlan:
    """What each node will download in an epoch, estimated in less than a second for any amount of data."""
    factor = estimate_factor(run, epoch=epoch, batch_size=batch_size, world=world)
    total = int(shard_bytes.sum())
    per_node = np.full(world.num_nodes, int(total * factor) // world.num_nodes)
    warning = warning_about(run, batch_size=batch_size, world=world, factor=factor)
    return DownloadPlan((), per_node, total, warning, is_estimated=True)


def warning_about(run: RunOrder, *, batch_size: int, world: World, factor: float) -> str | None:
    """What to change where much would be downloaded more than once (a factor above 1.05); else None."""
    if factor <= FACTOR_WORTH_A_WARNING:
        return None
    config = run.config
    nodes = world.num_nodes
    cost = (
        f"With num_canonical_nodes={config.canonical_nodes} on {nodes} nodes and batches of {batch_size} samples, "
        f"{factor:.2f} times the data will be downloaded."
    )
    if not config.shuffle:
        return f"{cost} Index order needs nearly every shard on every node: set shuffle=True if the order may change."
    mixed = config.batching.mixes_streams and run.snapshot.num_streams > 1
    better = better_canonical_nodes(batch_size, nodes, mixed=mixed)
    if better is None:
        return f"{cost} Choose a global batch size that is a multiple of {nodes}, and num_canonical_nodes={nodes}."
    if better != config.canonical_nodes:
        return f"{cost} num_canonical_nodes={better} fits best; set it when a run starts."
    return f"{cost} The cause is the mixture of streams or the small number of shards: write smaller shards."


def better_canonical_nodes(batch_size: int, num_nodes: int, *, mixed: bool = False) -> int | None:
    """The C with which fewest shards are downloaded twice: a multiple of the nodes that divides B, at most about 16.

    Batches that mix streams (``mixed``) fill their canonical nodes unequally, and both nodes at a border read some;
    then more canonical nodes, up to 128, waste less.
    """
    most = max(128 if mixed else 16, num_nodes)
    return max((c for c in range(num_nodes, most + 1, num_nodes) if batch_size % c == 0), default=None)


def _readers(world: World) -> list[list[int]]:
    """The data nodes that read each replica's share: more than one where a group of ranks spans machines unevenly."""
    readers: list[set[int]] = [set() for _ in range(world.num_replicas)]
    for member in (replace(world, rank=rank) for rank in range(world.num_ranks)):
        readers[member.replica].add(member.node)
    return [sorted(nodes) for nodes in readers]


def _reads_of(plans: Sequence[BatchPlan]) -> Iterator[tuple[int, Ints]]:
    """What all replicas read in an epoch, a part after another: the replica, and sample ids that it reads.

    ``plans`` cut one order into the same batches, one for each replica. Whole batches are read once for all replicas:
    their `shares` would read them for each, which takes 45 times as long for 64 replicas.
    """
    plan = plans[0]
    size = plans[0].batch_size
    replicas = range(len(plans))
    num_whole = plan.num_whole_batches if plan.splits_samples else 0
    step = max(1, _CHUNK // size)
    for k in range(0, num_whole, step):
        at = positions_of(plan.bounds(k)[0], plan.bounds(min(k + step, num_whole) - 1)[1])
        ids = plan.order.order.ids(at)[plan.offsets_in(at, replicas)]
        yield from ((replica, ids[:, replica]) for replica in replicas)
    for k in range(num_whole, plan.num_batches):
        yield from ((replica, replica_plan.share(k).sample_ids) for replica, replica_plan in enumerate(plans))
