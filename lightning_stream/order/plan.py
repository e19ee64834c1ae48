"""From a run's settings to each rank's samples of each global batch: all that the torch floor needs of this room."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from lightning_stream.order.config import OrderConfig
from lightning_stream.order.draw import Draw, StreamWeights, Units, choose_per_stream
from lightning_stream.order.mix import EpochOrder, MixedOrder, RandomOrder
from lightning_stream.order.permutation import stable_argsort
from lightning_stream.order.rank_split import TAILS, Share, Tail, split, split_blocks
from lightning_stream.order.snapshot import Snapshot
from lightning_stream.order.spread import deal_shards
from lightning_stream.order.window import SequentialSource, Source, WindowSource
from lightning_stream.order.world import World

_KEPT_EPOCHS = 2
_ALL_STREAMS = 2**32  # the key of the one order over all streams together


class RunOrder:
    """The order of a run: every epoch's samples as a pure function of the arguments.

    Args:
        snapshot: The data.
        weights: One per stream.
        config: The order settings.

    Raises:
        ValueError: The weights cannot be met.
    """

    def __init__(self, snapshot: Snapshot, weights: Sequence[StreamWeights], config: OrderConfig) -> None:
        self.snapshot, self.weights, self.config = snapshot, tuple(weights), config
        chosen = choose_per_stream(snapshot, self.weights, config.epoch_size, config.seed)
        balanced = config.sampling_method == "balanced"
        self._draw = Draw(snapshot, chosen, config.seed, balanced, config.sampling_granularity)
        self._shard_places: NDArray[np.int64] | None = None
        self._constant_units: dict[tuple[int, ...], Units] = {}
        self._epochs: dict[int, EpochOrder] = {}

    def __reduce__(self) -> tuple[type[RunOrder], tuple[Snapshot, tuple[StreamWeights, ...], OrderConfig]]:
        """Pickle the settings, not what was computed from them."""
        return RunOrder, (self.snapshot, self.weights, self.config)

    @property
    def num_samples(self) -> int:
        """Samples drawn per epoch."""
        return sum(self._draw.chosen)

    @property
    def samples_per_stream(self) -> tuple[int, ...]:
        """Samples drawn from each stream per epoch."""
        return self._draw.chosen

    def epoch(self, epoch: int) -> EpochOrder:
        """The order of one epoch; the last few are kept. O(parts)."""
        found = self._epochs.get(epoch)
        if found is None:
            found = self._epochs[epoch] = self._make_epoch(epoch)
            for old in list(self._epochs)[:-_KEPT_EPOCHS]:
                self._epochs.pop(old, None)
        return found

    def _make_epoch(self, epoch: int) -> EpochOrder:
        if epoch < 0:
            raise ValueError(f"Epochs count from 0; {epoch} was asked.")
        config = self.config
        streams = range(self.snapshot.num_streams)
        if config.batching_method == "random":
            return RandomOrder(epoch, self._source(epoch, tuple(streams), _ALL_STREAMS))
        sources = [self._source(epoch, (stream,), stream) for stream in streams]
        if config.batching_method == "stratified":
            return MixedOrder(epoch, sources, unit=1, seed=None)
        seed = config.seed if config.shuffle else None
        if config.batching_method == "per_stream":
            return MixedOrder(epoch, sources, unit=config.batch_size or 1, seed=seed, per_batch=True)
        return MixedOrder(epoch, sources, unit=config.block or 1, seed=seed)

    def _source(self, epoch: int, streams: tuple[int, ...], key: int) -> Source:
        units = self._units(epoch, streams)
        if not self.config.shuffle:
            return SequentialSource(self._draw, epoch, units)
        config = self.config
        return WindowSource(
            self._draw, epoch, units, stream=key, canonical_nodes=config.canonical_nodes, window=config.window
        )

    def _units(self, epoch: int, streams: tuple[int, ...]) -> Units:
        """The drawn units in the run-constant order of shards (index order without shuffling)."""
        found = self._constant_units.get(streams)
        if found is not None:
            return found
        units = self._draw.units(epoch, streams)
        if self.config.shuffle:
            order = stable_argsort(self._places()[units.shard])
            units = Units(units.shard[order], units.count[order])
        if self._draw.constant:
            self._constant_units[streams] = units
        return units

    def _places(self) -> NDArray[np.int64]:
        """Each shard's place in the run-constant order that is cut into canonical nodes."""
        if self._shard_places is None:
            config = self.config
            self._shard_places = deal_shards(config.seed, self.snapshot.num_shards, config.canonical_nodes)
        return self._shard_places


class BatchPlan:
    """The global batches of one epoch from a position on, and this world's shares of them.

    Args:
        order: The epoch's order.
        batch_size: B, samples of a global batch (one optimizer step over all replicas, accumulation included).
        world: This process among all; only :meth:`share` depends on it, and with ``tail="exact"`` where a rest joins.
        tail: What happens to the rest of the epoch: ``"pad"`` repeats samples of it as filler, ``"drop"`` leaves it
            out whole, ``"exact"`` splits it unevenly; a rest smaller than the replicas then joins the batch before.
        start: Position the plan starts from; need not be a multiple of B (B may have changed).

    Raises:
        ValueError: B does not divide over the replicas, contradicts the order, or ``start`` is outside the epoch.
    """

    def __init__(
        self, order: EpochOrder, *, batch_size: int, world: World | None = None, tail: Tail = "pad", start: int = 0
    ) -> None:
        self.order, self.batch_size, self.tail, self.start = order, batch_size, tail, start
        self.world = World() if world is None else world
        problems = _plan_problems(order, batch_size, self.world, tail, start)
        if problems:
            raise ValueError("The batches of an epoch cannot be planned. " + " ".join(problems))
        self._num_whole = max(0, order.layout.whole - start) // batch_size
        at = start + self._num_whole * batch_size
        self._tail_ends = _tail_ends(order, batch_size, tail, at)
        if tail == "exact" and order.layout.batch_size is None:
            self._join_small_rest(at)

    @property
    def num_batches(self) -> int:
        """Global batches from ``start`` on."""
        return self._num_whole + len(self._tail_ends)

    @property
    def num_whole_batches(self) -> int:
        """Global batches of exactly B samples that come before the tail's."""
        return self._num_whole

    @property
    def end(self) -> int:
        """The position behind the last batch: N, or less with ``tail="drop"``."""
        return self._tail_ends[-1] if self._tail_ends else self.start + self._num_whole * self.batch_size

    def bounds(self, k: int) -> tuple[int, int]:
        """First position of global batch ``k`` (counted from ``start``), and the one behind its last."""
        if not 0 <= k < self.num_batches:
            raise ValueError(f"Global batches count from 0 to {self.num_batches - 1} here; {k} was asked.")
        if k < self._num_whole:
            return self.start + k * self.batch_size, self.start + (k + 1) * self.batch_size
        first = self.start + self._num_whole * self.batch_size
        tail = k - self._num_whole
        return (self._tail_ends[tail - 1] if tail else first), self._tail_ends[tail]

    def ids(self, k: int) -> NDArray[np.int64]:
        """Sample ids of global batch ``k`` in position order, filler excluded."""
        return self.order.ids(*self.bounds(k))

    def share(self, k: int) -> Share:
        """This world's replica's part of global batch ``k``."""
        begin, end = self.bounds(k)
        replicas, replica = self.world.num_replicas, self.world.replica
        canonical = self.order.canonical(begin, end)
        block = self.order.layout.block
        streams = self.order.streams(begin, end)
        if streams is None or (self.tail == "exact" and k >= self._num_whole):
            block = 1
            offsets, filler = split(canonical, replicas, replica, equal=self.tail != "exact")
        else:
            offsets, filler = split_blocks(canonical, streams, block, replicas, replica)
        return Share(self.order.ids(begin, end)[offsets], begin + offsets, filler, block)

    def _join_small_rest(self, at: int) -> None:
        """Let a rest smaller than the replicas join the batch before it, where there is one."""
        edges = (at, *self._tail_ends)
        if len(edges) < 2 or edges[-1] - edges[-2] >= self.world.num_replicas:
            return
        if len(edges) > 2:
            self._tail_ends = (*edges[1:-2], edges[-1])
        elif self._num_whole:
            self._num_whole -= 1


def _tail_ends(order: EpochOrder, batch_size: int, tail: Tail, at: int) -> tuple[int, ...]:
    """Ends of the batches behind position ``at``, from which on no whole batch follows."""
    layout = order.layout
    total = layout.num_samples
    if tail == "drop" or at >= total:
        return ()
    if layout.batch_size is not None:
        return tuple(end for end in layout.rests if end > at)
    if layout.block > 1 and tail == "pad":
        edges = [*range(at + layout.block, layout.whole + 1, layout.block), *layout.rests]
        edges = [end for end in edges if end > at]
        per_batch = batch_size // layout.block
        return (*edges[per_batch - 1 :: per_batch], *edges[len(edges) // per_batch * per_batch :][-1:])
    return (*range(at + batch_size, total, batch_size), total)


def _plan_problems(order: EpochOrder, batch_size: int, world: World, tail: str, start: int) -> list[str]:
    problems = []
    layout = order.layout
    if tail not in TAILS:
        problems.append(f"tail must be one of {', '.join(TAILS)}, not {tail!r}.")
    if not 0 <= start <= layout.num_samples:
        problems.append(f"start must be within the epoch, [0, {layout.num_samples}], not {start}.")
    if batch_size < 1:
        return [*problems, f"batch_size (B) must be at least 1, not {batch_size}."]
    replicas = world.num_replicas
    if batch_size % replicas:
        near = [b for b in (batch_size // replicas * replicas, -(-batch_size // replicas) * replicas) if b]
        problems.append(
            f"A global batch must divide evenly over the data replicas, but {batch_size} samples over {replicas} "
            f"replicas leave {batch_size % replicas}: use {' or '.join(map(str, near))} samples, or a number of "
            f"replicas that divides {batch_size}."
        )
    elif batch_size // replicas % layout.block:
        problems.append(
            f"device_per_stream deals blocks of {layout.block} samples, so a replica's part of a global batch must be "
            f"a multiple of that, but {batch_size} samples over {replicas} replicas are {batch_size // replicas} each."
        )
    if layout.batch_size not in (None, batch_size):
        problems.append(
            f"per_stream fixes the global batch at the run's start: {layout.batch_size} samples then, {batch_size} "
            "now. Keep it, or choose another batching_method."
        )
    return problems


def prefetch_shards(plan: BatchPlan, snapshot: Snapshot, k_begin: int, k_end: int) -> NDArray[np.int64]:
    """Shards this rank needs for global batches [k_begin, k_end), in the order of first use."""
    if k_begin >= k_end:
        return np.empty(0, dtype=np.int64)
    shards = np.concatenate([snapshot.shards_of(plan.share(k).ids) for k in range(k_begin, k_end)])
    _, first = np.unique(shards, return_index=True)
    first.sort()
    return shards[first]
