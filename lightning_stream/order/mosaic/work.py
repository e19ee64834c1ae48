"""A whole epoch of mosaicml-streaming 0.13 as one array, for its four batching methods."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.random import default_rng
from numpy.typing import NDArray

from lightning_stream.order.mosaic.partitions import PADDING, deal_global_batches, global_batches, partition
from lightning_stream.order.mosaic.resample import Draws, Sampler
from lightning_stream.order.mosaic.shuffles import shuffle as shuffled
from lightning_stream.order.mosaic.stream_weights import StreamDraws

Ids = NDArray[np.int64]


@dataclass(frozen=True)
class WorkPlan:
    """All that an epoch's array depends on but the resume point.

    Args:
        draws: What each stream gives.
        sampler: Draws the samples of an epoch.
        shuffle: Whether to shuffle; if not, ids stay in order within a canonical node.
        shuffle_algo: See `shuffle`.
        shuffle_seed: The run's seed.
        shuffle_block_size: See `shuffle`; split over streams by their proportions where batches keep them apart.
        partition_algo: See `partition`.
        num_canonical_nodes: See `partition`.
        world: Nodes, ranks per node, workers per rank.
        batch_size: Samples of a rank's batch.
        initial_physical_nodes: Nodes that began the run, if known.
    """

    draws: StreamDraws
    sampler: Sampler
    shuffle: bool
    shuffle_algo: str
    shuffle_seed: int
    shuffle_block_size: int
    partition_algo: str
    num_canonical_nodes: int
    world: tuple[int, int, int]
    batch_size: int
    initial_physical_nodes: int | None

    @property
    def num_ranks(self) -> int:
        """Ranks of all nodes."""
        return self.world[0] * self.world[1]

    @property
    def global_batch(self) -> int:
        """Samples that all ranks take in one step."""
        return self.num_ranks * self.batch_size

    def mixing(self, epoch: int) -> np.random.Generator:
        """Give the generator that mixes the batches of streams over time."""
        return default_rng(self.shuffle_seed + epoch * (self.shuffle and self.sampler.balanced))

    def order(self, drawn: Draws, epoch: int, block_size: int) -> Ids:
        """Give the sample id at each position of the drawn samples."""
        if not self.shuffle:
            return drawn.ids
        nodes, seed = self.num_canonical_nodes, self.shuffle_seed
        return drawn.ids[shuffled(self.shuffle_algo, drawn.sizes, nodes, seed, epoch, block_size)]

    def stream_order(self, stream: int, epoch: int) -> Ids:
        """Give the same for one stream alone, with its share of the block."""
        return self.order(self.sampler.draw(epoch, [stream]), epoch, self.block_share(stream))

    def block_share(self, stream: int) -> int:
        """Give the samples of a shuffle block of one stream alone."""
        return int(self.shuffle_block_size * self.draws.proportion[stream])

    def partition(self, num_samples: int, batch_size: int, drop_first: int = 0) -> Ids:
        """Partition positions over this world."""
        return partition(
            self.partition_algo,
            num_samples,
            self.num_canonical_nodes,
            *self.world,
            batch_size,
            drop_first,
            self.initial_physical_nodes,
        )

    def turns(self, num_samples: int) -> Ids:
        """Positions as the canonical nodes give them, one of each in turn."""
        ranks = self.world[1]
        rows = partition(self.partition_algo, num_samples, self.num_canonical_nodes, 1, ranks, 1, 1)
        return global_batches(rows).reshape(-1)

    def deal(self, batches: Ids, sample_in_epoch: int) -> Ids:
        """Skip the global batches that are used up and deal the rest to the world."""
        rest = batches[sample_in_epoch // self.global_batch :]
        return deal_global_batches(rest, (*self.world, self.batch_size))


def _random(plan: WorkPlan, epoch: int, sample_in_epoch: int) -> Ids:
    drawn = plan.sampler.draw(epoch, range(len(plan.draws.choose)))
    positions = plan.partition(len(drawn.ids), plan.batch_size, sample_in_epoch)
    return _take(plan.order(drawn, epoch, plan.shuffle_block_size), positions)


def _stratified(plan: WorkPlan, epoch: int, sample_in_epoch: int) -> Ids:
    portions = _portions(plan.draws.proportion, plan.global_batch)
    columns = []
    for stream, portion in enumerate(portions):
        ids = plan.stream_order(stream, epoch)
        columns.append((ids[plan.turns(len(ids))], portion))
    steps = min(len(ids) // portion for ids, portion in columns)
    batches = [ids[: steps * portion].reshape(steps, portion) for ids, portion in columns]
    return plan.deal(np.concatenate(batches, axis=1), sample_in_epoch)


def _per_stream(plan: WorkPlan, epoch: int, sample_in_epoch: int) -> Ids:
    pools = []
    for stream in range(len(plan.draws.choose)):
        ids = plan.stream_order(stream, epoch)
        batches = global_batches(plan.partition(len(ids), plan.batch_size))
        whole = batches[(batches != PADDING).all(axis=1)]
        _require_batches(stream, len(ids), len(whole), plan.global_batch)
        pools.append(_take(ids, whole))
    return plan.deal(_mixed(pools, plan.mixing(epoch)), sample_in_epoch)


def _device_per_stream(plan: WorkPlan, epoch: int, sample_in_epoch: int) -> Ids:
    nodes, ranks, _ = plan.world
    canonical, size = plan.num_canonical_nodes, plan.batch_size
    if canonical % nodes:
        raise ValueError(
            f"device_per_stream needs the nodes to divide num_canonical_nodes; found {nodes} and {canonical}; "
            f"set num_canonical_nodes to a multiple of {nodes}"
        )
    pools = []
    _require_blocks(plan)
    for stream in range(len(plan.draws.choose)):
        ids = plan.stream_order(stream, epoch)
        rows = partition(plan.partition_algo, len(ids), canonical, canonical, ranks, 1, 1)
        own = global_batches(rows).reshape(-1, nodes, canonical // nodes * ranks).transpose(1, 0, 2).reshape(nodes, -1)
        count = own.shape[1] // size
        _require_batches(stream, len(ids), count, size)
        pools.append(_take(ids, own[:, : count * size].reshape(nodes, count, size)))
    rng = plan.mixing(epoch)
    mixed = np.stack([_mixed([pool[node] for pool in pools], rng) for node in range(nodes)], axis=1)
    padding = np.full((plan.num_ranks - len(mixed) % plan.num_ranks, nodes, size), PADDING, dtype=np.int64)
    batches = np.concatenate([mixed, padding]).reshape(-1, plan.global_batch)
    return plan.deal(batches, sample_in_epoch)


def _take(ids: Ids, positions: Ids) -> Ids:
    """Look up positions, leaving padding as it is."""
    return np.where(positions == PADDING, PADDING, ids[positions])


def _portions(proportions: Sequence[float], global_batch: int) -> list[int]:
    """Split a global batch by proportions: rounded down, then the largest remainders up."""
    exact = np.asarray(proportions) * global_batch
    portions = np.floor(exact).astype(np.int64)
    short = global_batch - int(portions.sum())
    if short:
        # Equal remainders fall as numpy's default sort leaves them (on the processor at hand), as in the original.
        portions[np.argsort(exact - portions)[-short:]] += 1
    for stream in np.flatnonzero(portions == 0).tolist():
        raise ValueError(
            f"stratified batches hold a sample of every stream; stream {stream} has no place in a global batch of "
            f"{global_batch}; raise the batch size or its proportion"
        )
    result: list[int] = portions.tolist()
    return result


def _mixed(pools: Sequence[Ids], rng: np.random.Generator) -> Ids:
    """Interleave the batches of streams in random order, each stream's own in their order."""
    turns = np.repeat(np.arange(len(pools)), [len(pool) for pool in pools])
    rng.shuffle(turns)
    mixed = np.empty((len(turns), *pools[0].shape[1:]), dtype=np.int64)
    for stream, pool in enumerate(pools):
        mixed[turns == stream] = pool
    return mixed


def _require_blocks(plan: WorkPlan) -> None:
    for stream in range(len(plan.draws.choose)):
        if plan.shuffle and not plan.block_share(stream):
            raise ValueError(
                f"device_per_stream splits a shuffle block over streams by proportion; stream {stream} gets none of "
                f"{plan.shuffle_block_size}; raise shuffle_block_size or the stream's proportion"
            )


def _require_batches(stream: int, num_samples: int, num_batches: int, batch_size: int) -> None:
    if not num_batches:
        raise ValueError(
            f"each stream must fill at least one batch of its own; stream {stream} draws {num_samples} samples for "
            f"batches of {batch_size}; lower the batch size, raise its weight, or leave it out"
        )


_METHODS: dict[str, Callable[[WorkPlan, int, int], Ids]] = {
    "random": _random,
    "stratified": _stratified,
    "per_stream": _per_stream,
    "device_per_stream": _device_per_stream,
}
BATCHING_METHODS = tuple(_METHODS)


def work_of(plan: WorkPlan, batching_method: str, epoch: int, sample_in_epoch: int) -> Ids:
    """Give the rest of an epoch: int64[nodes, ranks per node, workers per rank, batches, batch size], -1 for padding.

    Args:
        plan: The run, in one world.
        batching_method: One of `BATCHING_METHODS`.
        epoch: The epoch, counted from 0.
        sample_in_epoch: Samples of it that all ranks together have used up.

    Raises:
        ValueError: Streams or worlds that cannot fill what is asked.
    """
    return _METHODS[batching_method](plan, epoch, sample_in_epoch)
