"""An epoch of mosaicml-streaming 0.13 in one world: the samples it draws, and its global batches as an array."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.random import default_rng

from lightning_stream.order.arrays import Ints, ranges, starts_of
from lightning_stream.order.draw import StreamWeights
from lightning_stream.order.snapshot import Snapshot

from .partitions import PADDING, partition
from .shuffles import DEFAULT_BLOCK_SIZE, shuffle

if TYPE_CHECKING:
    from lightning_stream.order.config import OrderConfig


_SAMPLES_IN_BLOCKS = 4_000_000


class Drawn(NamedTuple):
    """Drawn samples: of each shard every repeat of it, then what is drawn of it in part."""

    sizes: Ints  # int64[n], samples of each repeat or part
    ids: Ints  # int64[sum of sizes], the sample id of each drawn sample


def chosen(
    snapshot: Snapshot, weights: Sequence[StreamWeights], epoch_size: int | None, seed: int
) -> tuple[list[int], list[float]]:
    """How many samples each stream gives to an epoch, and each stream's proportion of it.

    `choose_per_stream` has accepted the weights; the seed picks the streams that give the samples lost by rounding.
    Raises ValueError where the epoch would be empty, or a stream without samples would have to give some.
    """
    sizes = snapshot.stream_samples
    if epoch_size is not None or any(weight.proportion is not None for weight in weights):
        pairs = zip(weights, sizes.tolist(), strict=True)
        parts = np.array(
            [have if weight.proportion is None else weight.proportion for weight, have in pairs], dtype=float
        )
        total = int(sizes.sum()) if epoch_size is None else epoch_size
        proportion = parts / max(parts.sum(), np.finfo(np.float64).tiny)
        choose = (total * proportion).astype(np.int64)
        choose[default_rng(seed).choice(len(sizes), total - int(choose.sum()), replace=False)] += 1
    else:
        choose = np.array(
            [weight.absolute(have) for weight, have in zip(weights, sizes.tolist(), strict=True)], np.int64
        )
        proportion = choose / max(int(choose.sum()), 1)
    bad = np.flatnonzero((sizes == 0) & (choose > 0)).tolist()
    if bad or not choose.sum():
        raise ValueError(
            f"an epoch needs samples, each from a stream that has some; found {int(choose.sum())} in all, and {bad} "
            "as streams without any; raise the weights, or omit those streams"
        )
    return choose.tolist(), proportion.tolist()


def _drawn(begins: Ints, sizes: Ints, per_shard: Ints, rng: np.random.Generator) -> Drawn:
    """So many samples of each shard, whose first sample ids are ``begins``."""
    repeats, rest = np.divmod(per_shard, np.maximum(sizes, 1))
    times = repeats + (rest > 0)
    shard = np.repeat(np.arange(len(sizes)), times)
    lengths = sizes[shard]
    partial = np.cumsum(times)[rest > 0] - 1
    lengths[partial] = rest[rest > 0]
    ids = ranges(begins[shard], lengths)
    starts = starts_of(lengths)
    for part in partial.tolist():
        picks = rng.choice(int(sizes[shard[part]]), int(lengths[part]), replace=False)
        ids[starts[part] : starts[part + 1]] = begins[shard[part]] + np.sort(picks)
    return Drawn(lengths, ids)


def sampling(sizes: Ints, choose: int, granularity: int, seed: int, epoch: int, use_epoch: bool) -> Ints:
    """How many samples to draw from each shard of ``sizes`` samples: int64[shards], with sum ``choose``.

    Whole repeats of the stream come first. Then ``granularity`` samples of a shard at a time (the last pick may be
    smaller) are picked in a random order, another one in each epoch if ``use_epoch``.
    """
    total = int(sizes.sum())
    if not total:
        return np.zeros(len(sizes), np.int64)
    repeats, left = divmod(choose, total)
    drawn = sizes * repeats
    if not left:
        return drawn
    pieces = -(-sizes // granularity)
    shards = np.repeat(np.arange(len(sizes)), pieces)
    amounts = np.full(len(shards), granularity, np.int64)
    # An empty shard has no last piece, so it resets that of its neighbour: kept, because the original draws so.
    amounts[np.cumsum(pieces) - 1] = sizes - (pieces - 1) * granularity
    order = default_rng(seed + epoch * use_epoch).permutation(len(shards))
    np.add.at(drawn, shards[order], np.diff(np.minimum(np.cumsum(amounts[order]), left), prepend=0))
    return drawn


@dataclass(eq=False)
class EpochInputs:
    """All that an epoch's global batches depend on, except the position of a resume.

    Attributes:
        nodes, ranks, batch_size: This world: its nodes, the ranks of each, and the samples of a rank in a batch.
        global_batch: Samples that all ranks take in one batch.
        block_size: Samples of a shuffle block.
        drawing_epoch, sampling_epoch: What the seed of draws moves by; and that of samplings and of mixed batches.
    """

    snapshot: Snapshot
    weights: Sequence[StreamWeights]
    config: OrderConfig
    epoch: int
    nodes: int
    ranks: int
    batch_size: int

    def __post_init__(self) -> None:
        config = self.config
        assert config.mosaic is not None
        self.mosaic = config.mosaic
        self.choose, self.proportions = chosen(self.snapshot, self.weights, config.epoch_size, config.seed)
        self.global_batch = self.nodes * self.ranks * self.batch_size
        default = max(_SAMPLES_IN_BLOCKS // config.canonical_nodes, DEFAULT_BLOCK_SIZE)
        self.block_size = config.mosaic.shuffle_block_size or default
        self.drawing_epoch = self.epoch * (config.sampling_method == "balanced")
        self.sampling_epoch = self.drawing_epoch * config.shuffle

    def block_share(self, stream: int) -> int:
        """Samples of a shuffle block of one stream alone: its proportion of the whole."""
        return int(self.block_size * self.proportions[stream])

    def draw(self, streams: Sequence[int]) -> Drawn:
        """Draw from some streams. One generator serves them, so all together draw other samples than each alone."""
        config = self.config
        snapshot = self.snapshot
        rng = default_rng(config.seed + self.drawing_epoch)
        parts = []
        for stream in streams:
            sizes = snapshot.shard_sizes[stream]
            settings = config.sampling_granularity, config.seed, self.sampling_epoch, True
            begins = snapshot.shard_offsets[snapshot.stream_offsets[stream] :][: len(sizes)]
            parts.append(_drawn(begins, sizes, sampling(sizes, self.choose[stream], *settings), rng))
        return Drawn(*map(np.concatenate, zip(*parts, strict=True)))

    def order(self, drawn: Drawn, block_size: int) -> Ints:
        """The sample id at each position of the drawn samples."""
        config = self.config
        if not config.shuffle:
            return drawn.ids
        nodes = config.canonical_nodes
        return drawn.ids[shuffle(config.algorithm, drawn.sizes, nodes, config.seed, self.epoch, block_size)]

    def stream_orders(self, draws: Sequence[Drawn]) -> list[Ints]:
        """As :meth:`order`, of each stream alone; refuses an empty one."""
        for stream, drawn in enumerate(draws):
            self.require_batches(stream, len(drawn.ids), self.global_batch)
        return [self.order(drawn, self.block_share(stream)) for stream, drawn in enumerate(draws)]

    def require_batches(self, stream: int, count: int, batch_size: int) -> None:
        """Refuse a stream in which nothing was found to fill a batch with."""
        if not count:
            raise ValueError(
                f"each stream must fill at least one batch of its own; stream {stream} "
                f"({self.snapshot.stream_names[stream]}) draws {self.choose[stream]} samples for batches of "
                f"{batch_size}; lower the batch size, raise its weight, or omit it"
            )

    def positions(self, num_samples: int, nodes: int, batch_size: int, used: int = 0) -> Ints:
        """Positions of an epoch assigned to so many nodes: int64[batches, nodes * ranks * batch size]."""
        mosaic = self.mosaic
        canonical = self.config.canonical_nodes
        world = (nodes, self.ranks, batch_size)
        return partition(mosaic.partition, num_samples, canonical, *world, used, mosaic.initial_physical_nodes)


def epoch_batches(
    data: tuple[Snapshot, Sequence[StreamWeights], OrderConfig], epoch: int, world: Sequence[int], used: int = 0
) -> tuple[Ints, Ints]:
    """The batches of an epoch (as `partition` has them) without its first ``used`` samples, and all ids drawn for it.

    ``world`` is (nodes, ranks of each, samples in a batch of one rank). Raises ValueError where streams cannot fill it.
    """
    inputs = EpochInputs(*data, epoch, *world)
    streams = range(inputs.snapshot.num_streams)
    method = _METHODS.get(inputs.config.batching_method)
    if method is None:  # "random": one generator draws the samples of all streams
        drawn = inputs.draw(streams)
        ids = inputs.order(drawn, inputs.block_size)
        return _take(ids, inputs.positions(len(ids), inputs.nodes, inputs.batch_size, used)), drawn.ids
    draws = [inputs.draw([stream]) for stream in streams]
    batches = method(inputs, draws)[used // inputs.global_batch :]
    return batches, np.concatenate([drawn.ids for drawn in draws])


def _stratified(inputs: EpochInputs, draws: Sequence[Drawn]) -> Ints:
    portions = _portions(inputs.proportions, inputs.global_batch).tolist()
    orders = [ids[inputs.positions(len(ids), 1, 1).reshape(-1)] for ids in inputs.stream_orders(draws)]
    for stream, (ids, portion) in enumerate(zip(orders, portions, strict=True)):
        inputs.require_batches(stream, len(ids) // portion, portion)
    steps = min(len(ids) // portion for ids, portion in zip(orders, portions, strict=True))
    columns = [ids[: steps * portion].reshape(steps, portion) for ids, portion in zip(orders, portions, strict=True)]
    return np.concatenate(columns, axis=1)


def _per_stream(inputs: EpochInputs, draws: Sequence[Drawn]) -> Ints:
    pools = []
    for stream, ids in enumerate(inputs.stream_orders(draws)):
        batches = inputs.positions(len(ids), inputs.nodes, inputs.batch_size)
        full = batches[(batches != PADDING).all(axis=1)]
        inputs.require_batches(stream, len(full), inputs.global_batch)
        pools.append(_take(ids, full))
    return _mixed(pools, default_rng(inputs.config.seed + inputs.sampling_epoch))


def _device_per_stream(inputs: EpochInputs, draws: Sequence[Drawn]) -> Ints:
    nodes = inputs.nodes
    canonical = inputs.config.canonical_nodes
    size = inputs.batch_size
    if canonical % nodes:
        raise ValueError(
            f"device_per_stream needs the nodes to divide num_canonical_nodes; found {nodes} and {canonical}; "
            f"set num_canonical_nodes to a multiple of {nodes}"
        )
    for stream, count in enumerate(inputs.choose):
        if inputs.config.shuffle and count and not inputs.block_share(stream):
            raise ValueError(
                f"device_per_stream splits a shuffle block over streams by proportion; stream {stream} gets none of "
                f"{inputs.block_size}; raise shuffle_block_size or the stream's proportion"
            )
    pools = []
    for stream, ids in enumerate(inputs.stream_orders(draws)):
        positions = inputs.positions(len(ids), canonical, 1)
        of_node = positions.reshape(-1, nodes, canonical // nodes * inputs.ranks).transpose(1, 0, 2).reshape(nodes, -1)
        count = of_node.shape[1] // size
        inputs.require_batches(stream, count, size)
        pools.append(_take(ids, of_node[:, : count * size].reshape(nodes, count, size)))
    rng = default_rng(inputs.config.seed + inputs.sampling_epoch)
    mixed = np.stack([_mixed([pool[node] for pool in pools], rng) for node in range(nodes)], axis=1)
    num_ranks = nodes * inputs.ranks
    padding = np.full((num_ranks - len(mixed) % num_ranks, nodes, size), PADDING, np.int64)
    return np.concatenate([mixed, padding]).reshape(-1, inputs.global_batch)


def _take(ids: Ints, positions: Ints) -> Ints:
    """Look up positions, leaving padding as it is."""
    return np.where(positions == PADDING, PADDING, ids[positions])


def _portions(proportions: Sequence[float], global_batch: int) -> Ints:
    """Split a global batch by proportions: rounded down, then the largest remainders up."""
    exact = np.asarray(proportions) * global_batch
    portions: Ints = np.floor(exact).astype(np.int64)
    short = global_batch - int(portions.sum())
    if short:
        # Equal remainders fall as numpy's default sort leaves them (on this processor), as in the original.
        portions[np.argsort(exact - portions)[-short:]] += 1
    if not portions.all():
        raise ValueError(
            f"stratified batches hold a sample of every stream; stream {portions.argmin()} gets none of a global batch "
            f"of {global_batch}; raise the batch size or its proportion"
        )
    return portions


def _mixed(pools: Sequence[Ints], rng: np.random.Generator) -> Ints:
    """Interleave the batches of streams in random order, each stream's own in their order."""
    streams = np.repeat(np.arange(len(pools)), [len(pool) for pool in pools])
    rng.shuffle(streams)
    mixed = np.empty((len(streams), *pools[0].shape[1:]), np.int64)
    for stream, pool in enumerate(pools):
        mixed[streams == stream] = pool
    return mixed


_METHODS: dict[str, Callable[[EpochInputs, Sequence[Drawn]], Ints]] = {
    "stratified": _stratified,
    "per_stream": _per_stream,
    "device_per_stream": _device_per_stream,
}
"""What makes the batches where each stream is drawn by itself."""
