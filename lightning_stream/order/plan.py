"""From a run's settings to each rank's samples of each global batch: all that the torch floor needs of this room."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from lightning_stream.order.batching.base import EpochOrder
from lightning_stream.order.config import OrderConfig
from lightning_stream.order.draw import Draw, ShardDraws, StreamWeights, choose_per_stream
from lightning_stream.order.permutation import stable_argsort
from lightning_stream.order.rank_split import ReplicaBatch, Tail
from lightning_stream.order.snapshot import Snapshot
from lightning_stream.order.stratify import deal_shards
from lightning_stream.order.window import IndexOrder, Parts, SampleOrder, WindowOrder
from lightning_stream.order.world import World

_KEPT_EPOCHS = 2


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
        self._constant_draws: dict[tuple[int, ...], ShardDraws] = {}
        self._epochs: dict[int, EpochOrder] = {}

    def __reduce__(self) -> tuple[type[RunOrder], tuple[Snapshot, tuple[StreamWeights, ...], OrderConfig]]:
        """Pickle the settings, not what was computed from them."""
        return RunOrder, (self.snapshot, self.weights, self.config)

    @property
    def num_samples(self) -> int:
        """Samples drawn per epoch."""
        return sum(self._draw.chosen)

    def epoch(self, epoch: int) -> EpochOrder:
        """The order of one epoch; the last few are kept. O(parts)."""
        found = self._epochs.get(epoch)
        if found is None:
            if epoch < 0:
                raise ValueError(f"Epochs count from 0; {epoch} was asked.")
            found = self._epochs[epoch] = self.config.batching.make(self, epoch)
            for old in list(self._epochs)[:-_KEPT_EPOCHS]:
                self._epochs.pop(old, None)
        return found

    def active_shards(self) -> int:
        """Shards that must be at hand at once, over all nodes."""
        return self.config.batching.active_shards(self)

    def sample_order(self, epoch: int, streams: tuple[int, ...], key: int) -> SampleOrder:
        """The order of the drawn samples of some streams; ``key`` tells it from those of other streams."""
        parts, config = Parts(self._draw, epoch, self._drawn_shards(epoch, streams)), self.config
        if not config.shuffle:
            return IndexOrder(parts)
        nodes, window = config.canonical_nodes, config.window
        return WindowOrder(parts, (config.seed, epoch, key), canonical_nodes=nodes, window=window)

    def _drawn_shards(self, epoch: int, streams: tuple[int, ...]) -> ShardDraws:
        """What is drawn, in the run-constant order of shards (index order without shuffling)."""
        found = self._constant_draws.get(streams)
        if found is not None:
            return found
        drawn = self._draw.shards(epoch, streams)
        if self.config.shuffle:
            order = stable_argsort(self._places()[drawn.shard])
            drawn = ShardDraws(drawn.shard[order], drawn.count[order])
        if self._draw.constant:
            self._constant_draws[streams] = drawn
        return drawn

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
        world: This process among all; only :meth:`share` depends on it (see ``tail`` for ``"exact"``), but for the
            orders of mosaicml-streaming, which deal an epoch to the world.
        tail: What happens to the rest of the epoch: ``"pad"`` repeats samples of it as filler, ``"drop"`` leaves it
            out whole, ``"exact"`` splits it unevenly: a rest smaller than the replicas then takes what they lack from
            the batch before, so the border between these two, but no number of steps, depends on the world.
        start: Position the plan starts from; need not be a multiple of B (B may have changed).

    Raises:
        ValueError: B does not divide over the replicas, contradicts the order, or ``start`` is outside the epoch.
    """

    def __init__(
        self, order: EpochOrder, *, batch_size: int, world: World | None = None, tail: Tail = "pad", start: int = 0
    ) -> None:
        self.order, self.batch_size, self.tail, self.start = order, batch_size, tail, start
        self.world = World() if world is None else world
        self._batches = order.cut(batch_size, self.world, tail, start)

    def __reduce__(self) -> tuple[partial[BatchPlan], tuple[EpochOrder]]:
        """Pickle what the plan was made of, not the samples that were dealt by it."""
        given = {"batch_size": self.batch_size, "world": self.world, "tail": self.tail, "start": self.start}
        return partial(BatchPlan, **given), (self.order,)  # type: ignore[arg-type]

    @property
    def num_batches(self) -> int:
        """Global batches from ``start`` on."""
        return self._batches.num_batches

    @property
    def num_whole_batches(self) -> int:
        """How many batches, from the first on, have exactly B samples; those of the epoch's tail follow."""
        return self._batches.num_full

    @property
    def end(self) -> int:
        """The position behind the last batch: N, or less with ``tail="drop"``."""
        return self._batches.end

    @property
    def follows_order(self) -> bool:
        """Whether the rest of the epoch has the samples of the order in its places: always, for a native order.

        The orders of mosaicml-streaming may deal others to a world that the run did not begin in. O(samples).
        """
        return self._batches.follows_order

    def bounds(self, k: int) -> tuple[int, int]:
        """First position of global batch ``k`` (counted from ``start``), and the one behind its last."""
        if not 0 <= k < self.num_batches:
            raise ValueError(f"Global batches count from 0 to {self.num_batches - 1} here; {k} was asked.")
        return self._batches.bounds(k)

    def ids(self, k: int) -> NDArray[np.int64]:
        """Sample ids of global batch ``k`` in position order, filler excluded."""
        self.bounds(k)
        return self._batches.ids(k)

    def share(self, k: int) -> ReplicaBatch:
        """This world's replica's part of global batch ``k``."""
        self.bounds(k)
        return self._batches.share(k)

    def num_micro_batches(self, k: int, device_batch_size: int) -> int:
        """Into how many micro-batches every replica cuts its share of global batch ``k``: the same number on all.

        `ReplicaBatch.micro_batches` then gives pieces of at most ``device_batch_size`` samples, filler included.

        Raises:
            ValueError: The blocks of ``device_per_stream`` neither fill nor divide such a micro-batch.
        """
        self.bounds(k)
        return self._batches.num_micro_batches(k, device_batch_size)

    def shares(self, ks: Sequence[int]) -> list[ReplicaBatch]:
        """This world's replica's part of each of these global batches, ascending: as `share`, but planned together."""
        for k in (*ks[:1], *ks[-1:]):
            self.bounds(k)
        return self._batches.shares(ks)


def prefetch_shards(plan: BatchPlan, snapshot: Snapshot, k_begin: int, k_end: int) -> NDArray[np.int64]:
    """Shards this rank needs for global batches [k_begin, k_end), in the order of first use."""
    if k_begin >= k_end:
        return np.empty(0, dtype=np.int64)
    shards = np.concatenate([snapshot.shards_of(plan.share(k).ids) for k in range(k_begin, k_end)])
    _, first = np.unique(shards, return_index=True)
    first.sort()
    return shards[first]
