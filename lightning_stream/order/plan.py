"""The order of a training run: every epoch of it as a pure function of data, weights and settings."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_stream.lazy import kept
from lightning_stream.order.batching.base import BatchPlan, EpochOrder
from lightning_stream.order.batching.packed import PackedOrder
from lightning_stream.order.config import OrderConfig
from lightning_stream.order.draw import Draw, ShardDraws, StreamWeights, choose_per_stream, weight_problems
from lightning_stream.order.forget import Forgotten
from lightning_stream.order.mixture import Mixture
from lightning_stream.order.permutation import stable_argsort
from lightning_stream.order.schedule import Schedule
from lightning_stream.order.snapshot import Snapshot
from lightning_stream.order.spread import deal_shards
from lightning_stream.order.window import IndexOrder, Parts, SampleOrder, WindowOrder

_KEPT_EPOCHS = 2


class RunOrder:
    """The order of a run: every epoch's samples as a pure function of data, weights (one per stream) and settings.

    ``lengths`` has the length of every sample by its id; only ``config.packing`` and ``buckets`` need it.
    ``forgotten`` are samples in whose places others are delivered; ``config.forgotten`` has their digest.

    Raises:
        ValueError: The weights cannot be met.

    Example::

        run = RunOrder(Snapshot.of([[1000, 1000]]), [StreamWeights()], OrderConfig.resolve(batch_size=8, shuffle=True))
        run.epoch(0).ids(0, 8)  # the sample ids of the first global batch
    """

    def __init__(
        self,
        snapshot: Snapshot,
        weights: Sequence[StreamWeights],
        config: OrderConfig,
        lengths: NDArray[np.integer] | None = None,
        *,
        forgotten: Forgotten | None = None,
    ) -> None:
        self.snapshot, self.weights, self.config = snapshot, tuple(weights), config
        self.lengths, self.forgotten = lengths, forgotten
        if config.needs_lengths != (lengths is not None):
            raise ValueError("An order of rows or buckets needs the lengths of all samples; found only one of both.")
        if config.forgotten != (None if forgotten is None else forgotten.digest):
            raise ValueError(
                f"The forgotten samples of an order must be those of its settings, which have digest "
                f"{config.forgotten}; found {forgotten and forgotten.digest}. Pass the same ones."
            )
        if config.switches:
            raise ValueError(
                "The order of a run that switches versions needs the data of all of them. Read it by a dataset with "
                "version=[(step, version), ...]."
            )
        if config.schedule is not None:
            _check_schedule(config, config.schedule, snapshot, self.weights)
        shared = config.epoch_size if config.schedule is None else None  # a schedule draws whole epochs of each stream
        chosen = choose_per_stream(snapshot, self.weights, shared, config.seed)
        balanced = config.sampling_method == "balanced"
        self._draw = Draw(snapshot, chosen, config.seed, balanced, config.sampling_granularity, forgotten)
        self._constant_draws: dict[tuple[int, ...], ShardDraws] = {}
        self._epochs: dict[int, EpochOrder] = {}
        self._own_epochs: dict[tuple[int, int], SampleOrder] = {}

    def __reduce__(self) -> tuple[partial[RunOrder], tuple[Any, ...]]:
        """Pickle the settings, and the lengths if there are any."""
        return partial(RunOrder, forgotten=self.forgotten), (self.snapshot, self.weights, self.config, self.lengths)

    @property
    def origin(self) -> Snapshot:
        """The data that the run began with, by which a state knows it."""
        return self.snapshot

    @property
    def num_samples(self) -> int:
        """Samples drawn per epoch."""
        own = None if self.config.schedule is None else self.config.epoch_size
        return sum(self._draw.chosen) if own is None else own

    @property
    def num_drawn(self) -> tuple[int, ...]:
        """Samples drawn per epoch from each stream; with a schedule, those of its own epochs."""
        return self._draw.chosen

    @cached_property
    def mixture(self) -> Mixture:
        """The streams of all samples of a run with a schedule, counted through its epochs."""
        config = self.config
        assert config.schedule is not None
        length = config.batching.stretch_length_of(config)
        sizes, step = self.snapshot.stream_samples.tolist(), config.batch_size or 1
        if config.packing is not None:
            step *= config.packing.row_length  # of tokens
        return Mixture(config.schedule, sizes, stretch_length=length, step_length=step)

    def epoch(self, epoch: int) -> EpochOrder:
        """The order of one epoch; the last few are kept. O(parts)."""
        if epoch < 0:
            raise ValueError(f"Epochs count from 0; found {epoch}.")
        return kept(self._epochs, epoch, self._epoch, _KEPT_EPOCHS)

    def _epoch(self, epoch: int) -> EpochOrder:
        order = self.config.batching(self, epoch)
        if self.config.buckets is not None:
            return self.config.buckets.order(self, order)
        return order if self.config.packing is None else PackedOrder(self, order)

    def where(self, sample_id: int, epoch: int) -> NDArray[np.int64]:
        """All positions of an epoch that have this sample, ascending: int64[n], without planning the epoch.

        Of rows, each that holds it, once. Packed rows plan the windows before it, and orders of mosaicml-streaming and
        runs that switch versions search.

        Raises:
            ValueError: There is no such sample or epoch.

        Example: ``run.epoch(0).ids(p, p + 1)`` is ``[7]`` for each ``p`` of ``run.where(7, epoch=0)``.
        """
        if not 0 <= sample_id < self.snapshot.num_samples:
            raise ValueError(f"Sample ids count from 0 to {self.snapshot.num_samples - 1} here; found {sample_id}.")
        return np.array(self.epoch(epoch).positions(sample_id), dtype=np.int64)

    def settled(self, epoch: int, position: int) -> int:
        """The first sample, counted through all epochs, that may change without a change of what comes before.

        ``position`` may lie behind the epoch, in a later one.
        """
        while position and not (order := self.epoch(epoch)).reaches(position) and order.num_samples:
            epoch, position = epoch + 1, position - order.num_samples
        return epoch * self.num_samples + (self.epoch(epoch).settled(position) if position else 0)

    def active_shards(self) -> int:
        """Shards in use at once, over all nodes."""
        return self.config.batching.active_shards(self)

    def sample_order(self, epoch: int, streams: tuple[int, ...], key: int) -> SampleOrder:
        """The order of the drawn samples of some streams; ``key`` is part of its random keys."""
        parts, config = Parts(self._draw, epoch, self._drawn_shards(epoch, streams)), self.config
        if not config.shuffle:
            return IndexOrder(parts)
        nodes, key_of_all, quick = config.canonical_nodes, (config.seed, epoch, key), config.quick_start
        return WindowOrder(parts, key_of_all, canonical_nodes=nodes, window=config.window, quick_start=quick)

    def own_epoch(self, epoch: int, stream: int) -> SampleOrder:
        """The order of a stream's own epoch, of each of its samples once; the last few are kept."""
        make = partial(self.sample_order, epoch, (stream,))
        return kept(self._own_epochs, (epoch, stream), lambda key: make(key[1]), _KEPT_EPOCHS * len(self.weights))

    def _drawn_shards(self, epoch: int, streams: tuple[int, ...]) -> ShardDraws:
        """What is drawn, in the run-constant order of shards (index order without shuffling)."""
        found = self._constant_draws.get(streams)
        if found is not None:
            return found
        drawn = self._draw.shards(epoch, streams)
        if self.config.shuffle:
            order = stable_argsort(self._places[drawn.shard])
            drawn = ShardDraws(drawn.shard[order], drawn.count[order])
        if self._draw.constant:
            self._constant_draws[streams] = drawn
        return drawn

    @cached_property
    def _places(self) -> NDArray[np.int64]:
        """Each shard's place in the run-constant order that is cut into canonical nodes."""
        return deal_shards(self.config.seed, self.snapshot.num_shards, self.config.canonical_nodes)


def check_weights(config: OrderConfig, names: Sequence[str], weights: Sequence[StreamWeights]) -> None:
    """Raise ValueError for weights of streams that contradict the settings, whatever is in the streams."""
    if config.schedule is not None:
        _refuse_schedule(_schedule_problems(config, config.schedule, weights))
    elif problems := weight_problems(names, weights, config.epoch_size):
        raise ValueError("The weights of the streams cannot be met. " + " ".join(problems))


def _schedule_problems(config: OrderConfig, schedule: Schedule, weights: Sequence[StreamWeights]) -> list[str]:
    """Those of settings alone."""
    problems = []
    counts_tokens = schedule.counts_tokens(is_packed=config.packing is not None)
    if schedule.unit == "steps" and schedule.mean_lengths and not counts_tokens:
        problems.append("Its steps count samples, so omit mean_lengths.")
    if any(one != StreamWeights() for one in weights):
        problems.append("The streams have a proportion, repeat or choose of their own: omit these.")
    return problems


def _check_schedule(
    config: OrderConfig, schedule: Schedule, snapshot: Snapshot, weights: Sequence[StreamWeights]
) -> None:
    problems, names = _schedule_problems(config, schedule, weights), schedule.streams
    if schedule.counts_tokens(is_packed=config.packing is not None) and not schedule.mean_lengths:
        problems.append("It counts tokens, so it needs mean_lengths.")
    if len(names) != snapshot.num_streams:
        problems.append(f"It has weights for {len(names)} streams, but there are {snapshot.num_streams}.")
    used = {name for _, points in schedule.points for name, weight in points if weight}
    used |= {name for change in schedule.changes for name, weight in change.weights or () if weight}
    empty = {name for name, size in zip(names, snapshot.stream_samples.tolist(), strict=False) if not size} & used
    _refuse_schedule([*problems, *(f"Stream {name!r} has no samples, but a weight above 0." for name in sorted(empty))])


def _refuse_schedule(problems: Sequence[str]) -> None:
    if problems:
        raise ValueError("A schedule must suit the streams. " + " ".join(problems))


def prefetch_shards(plan: BatchPlan, snapshot: Snapshot, k_begin: int, k_end: int) -> NDArray[np.int64]:
    """The shards that this rank needs for global batches [k_begin, k_end), in the order of first use."""
    if k_begin >= k_end:
        return np.empty(0, dtype=np.int64)
    shards = np.concatenate([snapshot.shards_of(plan.share(k).sample_ids) for k in range(k_begin, k_end)])
    _, first = np.unique(shards, return_index=True)
    first.sort()
    return shards[first]
