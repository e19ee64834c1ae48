"""The order of a training run: every epoch of it as a pure function of data, weights and settings."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property, partial
from typing import Any, Protocol

import numpy as np
from msgspec import structs

from lightning_stream.lazy import cached

from .arrays import Bools, Integers, Ints
from .batches import EpochOrder, divide_by_budget
from .config import SAMPLER, UNIFORM, OrderConfig
from .draw import Draw, ShardDraws, StreamWeights, choose_per_stream, weight_problems
from .forget import Forgotten
from .mixture import Mixture
from .mosaic.epoch import MosaicOrder
from .orders import EvenMerge, Interleave, Listed, Order, Repeated, Windows, positions_of
from .rows import Amounts, ByLength, CountedWindows, PackedRows
from .schedule import Schedule
from .snapshot import Snapshot, max_active
from .spread import deal_shards
from .uniform import Uniform
from .window import Stored, Window

_ALL_STREAMS = 2**32  # the key of the one order over all streams together
_KEPT_EPOCHS = 2
_KEPT_SAMPLES = 1 << 14  # of a stream's own epochs: a batch may have many of a small stream


class Lists(Protocol):
    """Lists the samples of an epoch, each time the same ones."""

    @property
    def num_samples(self) -> int:
        """Samples of an epoch."""

    def epoch(self, epoch: int) -> Ints:
        """The samples of an epoch, in order: int64[num_samples]."""


class RunOrder:
    """The order of a run: every epoch's samples as a pure function of data, weights (one per stream) and settings.

    ``lengths`` has the length of every sample by its id; only ``config.packing`` and ``buckets`` need it. ``amounts``
    are what ``config.even_rows`` names.
    ``forgotten`` are samples in whose places others are delivered; ``config.forgotten`` has their digest. ``lists`` is
    a user's own order, which only the algorithm ``"sampler"`` has.

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
        lengths: Integers | None = None,
        *,
        forgotten: Forgotten | None = None,
        lists: Lists | None = None,
        amounts: Amounts | None = None,
    ) -> None:
        self.snapshot = snapshot
        self.weights = tuple(weights)
        self.config = config
        self.lengths = lengths
        self.forgotten = forgotten
        self.lists = lists
        self.amounts = amounts
        if config.needs_lengths != (lengths is not None):
            raise ValueError(
                "An order that packs samples, or sorts them by length, needs their lengths; no other does; found only "
                "one of both. Read the data by a dataset with the run's pack=, bucket_by= or batch_tokens=."
            )
        if isinstance(config.even_rows, str) != (amounts is not None):
            raise ValueError(f"The rows of this order are even by {config.even_rows!r}: pass these amounts, or none.")
        if config.forgotten != (None if forgotten is None else forgotten.digest):
            raise ValueError(
                f"The forgotten samples of an order must be those of its settings, which have digest "
                f"{config.forgotten}; found {forgotten and forgotten.digest}. Pass the same ones."
            )
        if (config.algorithm == SAMPLER) != (lists is not None):
            raise ValueError("The order of a state that a sampler lists needs that sampler: pass sampler=.")
        if config.switches:
            raise ValueError(
                "The order of a run that switches versions needs the data of all of them. Read it by a dataset with "
                "version=[(step, version), ...]."
            )
        if config.schedule is not None:
            _refuse_schedule(_schedule_problems(config, config.schedule, self.weights, snapshot))
        shared = config.epoch_size if config.schedule is None else None  # a schedule draws whole epochs of each stream
        chosen = choose_per_stream(snapshot, self.weights, shared, config.seed)
        balanced = config.sampling_method == "balanced"
        self._draw = Draw(snapshot, chosen, config.seed, balanced, config.sampling_granularity, forgotten)
        self._constant_draws: dict[tuple[int, ...], ShardDraws] = {}
        self._epochs: dict[tuple[int, Windows], EpochOrder] = {}
        self._own_epochs: dict[int, dict[int, Order]] = {}

    @property
    def of_these_data(self) -> partial[RunOrder]:
        """What makes the order of the same data, of the same samples, from its settings."""
        options: dict[str, Any] = {"forgotten": self.forgotten, "lists": self.lists, "amounts": self.amounts}
        return partial(RunOrder, self.snapshot, self.weights, lengths=self.lengths, **options)

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        """Pickle the data, and the settings."""
        return self.of_these_data, (self.config,)

    def altered(self, **settings: Any) -> RunOrder:
        """The order of the same data, of the same samples, with some other settings."""
        return self.of_these_data(structs.replace(self.config, **settings))

    def forgetting(self, forgotten: Forgotten | None) -> RunOrder:
        """The same run, except that these samples are forgotten, and no others."""
        if self.forgotten is forgotten:
            return self
        config = structs.replace(self.config, forgotten=None if forgotten is None else forgotten.digest)
        return self.of_these_data(config, forgotten=forgotten)

    def first_seen(self, forgotten: Forgotten, end: tuple[int, int]) -> tuple[int, int] | None:
        """The first epoch and position before ``end`` that these samples affect; None if they affect none.

        That is where the first of them was seen; or the begin of its window, where windows are packed or rearranged.
        This is about the order in which nothing is forgotten.
        """
        run = self.forgetting(None)
        for epoch in range(end[0] + 1):
            order = run.epoch(epoch)
            last = end[1] if epoch == end[0] else order.num_samples
            first = forgotten.first_in(order.order.below, order.order.unchanged_from(last))
            if first is not None:
                return epoch, bisect_right(range(last), first, key=lambda at: order.order.unchanged_from(at + 1))
        return None

    @property
    def origin(self) -> Snapshot:
        """The data that the run began with, by which a state knows it."""
        return self.snapshot

    @property
    def num_samples(self) -> int:
        """Samples drawn per epoch."""
        if self.lists is not None:
            return self.lists.num_samples
        epoch_size = None if self.config.schedule is None else self.config.epoch_size
        return sum(self._draw.chosen) if epoch_size is None else epoch_size

    @property
    def num_drawn(self) -> tuple[int, ...]:
        """Samples drawn per epoch from each stream; with a schedule, those of its own epochs."""
        return self._draw.chosen

    @cached_property
    def mixture(self) -> Mixture:
        """The streams of all samples of a run with a schedule, counted through its epochs."""
        config = self.config
        assert config.schedule is not None
        length = config.block_length
        sizes = self.snapshot.stream_samples.tolist()
        step = config.batch_size or 1
        if config.packing is not None:
            step *= config.packing.row_length  # of tokens
        return Mixture(config.schedule, sizes, block_length=length, step_length=step)

    def epoch(self, epoch: int, counted: CountedWindows | None = None) -> EpochOrder:
        """The order of one epoch; the last few are kept. O(parts).

        ``counted`` is what a state of the same settings has counted of packed rows or batches of a budget: counting
        begins there. That of another epoch is ignored.
        """
        if epoch < 0 or epoch % 1:
            raise ValueError(f"Epochs count from 0; found {epoch}.")
        windows = () if counted is None or counted.epoch != epoch else counted.windows
        from_begin = self._epochs.get((epoch, ()))
        if from_begin is not None and from_begin.order.is_counted:
            windows = ()  # nothing is left to count
        return cached(self._epochs, (epoch, windows), self._epoch, _KEPT_EPOCHS)

    def following(self, epoch: int) -> Callable[[], EpochOrder] | None:
        """What makes the order of the epoch behind this one; None where a sampler must be asked for it."""
        return partial(self.epoch, epoch + 1) if self.lists is None else None

    def _epoch(self, key: tuple[int, Windows]) -> EpochOrder:
        epoch, counted = key
        config = self.config
        order = self.order_of_samples(epoch)
        random_key = (config.seed, epoch) if config.shuffle else None
        if self.lengths is not None and config.packing is not None:
            even = self.amounts or bool(config.even_rows)
            order = PackedRows(order, self.lengths, config.packing, random_key, counted, even)
        if self.lengths is not None and config.buckets is not None:
            order = ByLength(order, self.lengths, config.buckets, self.snapshot.streams_of, random_key, counted)
        nodes = order.num_sequences if isinstance(order, PackedRows) else config.canonical_nodes
        divide = divide_by_budget if config.has_budget else config.batching.divide
        return EpochOrder(epoch, order, divide, nodes if config.sticky else None)

    def order_of_samples(self, epoch: int) -> Order:
        """The samples of an epoch, before they are packed or sorted by length."""
        method = self.config.batching
        if self.lists is not None:
            return Listed(self._draw.delivered(epoch, self.lists.epoch(epoch)))
        if self.config.mosaic is not None:
            return MosaicOrder(self.snapshot, self.weights, self.config, epoch)
        if self.config.schedule is not None:
            return self._scheduled(epoch)
        if method.is_mixed:
            return self._mixed(epoch)
        return self._window(epoch, tuple(range(self.snapshot.num_streams)), _ALL_STREAMS)

    def _mixed(self, epoch: int) -> Order:
        """The drawn samples of all streams, interleaved evenly."""
        method = self.config.batching
        config = self.config
        orders = [self._window(epoch, (stream,), stream) for stream in range(self.snapshot.num_streams)]
        block = config.block_length
        counts, remainders = np.divmod(np.array([order.size for order in orders], np.int64), block)
        merge = EvenMerge(counts, epoch, config.seed if method.jitter and config.shuffle else None)
        return Interleave(orders, merge, counts, remainders, block, 0, int(counts.sum()))

    def _scheduled(self, epoch: int) -> Order:
        """What a schedule takes of each stream's endless sequence of own epochs."""
        block = self.config.block_length
        per_epoch = self.num_samples // block
        begin = epoch * per_epoch
        end = begin + per_epoch if self.mixture.end is None else min(begin + per_epoch, self.mixture.end)
        end = max(begin, end)
        firsts = self.mixture.ends(begin)
        counts = self.mixture.ends(end)
        orders = []
        for stream, size in enumerate(self.snapshot.stream_samples.tolist()):
            bounds = int(firsts[stream]) * block, int(counts[stream]) * block
            orders.append(Repeated(partial(self._own_epoch, stream), max(size, 1), *bounds))
        return Interleave(orders, self.mixture, counts, np.zeros_like(counts), block, begin, end)

    def where(self, sample_id: int, epoch: int) -> Ints:
        """All positions of an epoch that have this sample, ascending: int64[n], without planning the epoch.

        Of rows, each that holds it, once. Packed rows plan the windows before it, and orders of mosaicml-streaming and
        runs that switch versions search.

        Raises:
            ValueError: There is no such sample or epoch.

        Example: ``run.epoch(0).ids(p, p + 1)`` is ``[7]`` for each ``p`` of ``run.where(7, epoch=0)``.
        """
        if not 0 <= sample_id < self.snapshot.num_samples:
            raise ValueError(f"Sample ids count from 0 to {self.snapshot.num_samples - 1} here; found {sample_id}.")
        return np.array(self.epoch(epoch).order.find(sample_id), np.int64)

    def settled(self, epoch: int, position: int) -> int:
        """The first sample, counted through all epochs, that may change without a change of what comes before.

        ``position`` may lie behind the epoch, in a later one.
        """
        while position and not (order := self.epoch(epoch)).reaches(position) and order.num_samples:
            epoch = epoch + 1
            position = position - order.num_samples
        changed = self.epoch(epoch).order.unchanged_from(position) if position else 0
        return epoch * self.num_samples + changed

    def next_change(self, seen: Iterable[tuple[int, int]]) -> int:
        """The first sample from which on the mixture may change, where these epochs and positions were reached."""
        assert self.config.schedule is not None
        earliest = [self.settled(*place) for place in seen]
        return max(earliest + [change.at for change in self.config.schedule.changes])

    def active_shards(self) -> int:
        """Shards in use at once, over all nodes: w for each canonical node of each group; O(samples) for Mosaic's."""
        config = self.config
        if config.mosaic is not None:
            order = self.order_of_samples(0)
            return max_active(self.snapshot.shards_of(order.ids(positions_of(0, order.size))))
        most = config.canonical_nodes * config.window if config.shuffle else 1
        most = self.snapshot.num_shards if config.algorithm == UNIFORM else most
        return sum(min(most, len(sizes)) for sizes in config.batching.shard_groups(self.snapshot))

    def samples_on(self, is_here: Bools) -> tuple[int, ...]:
        """The samples of each canonical node in the shards that are here (bool[shards]), about as in each epoch."""
        count = self.config.canonical_nodes
        samples = np.zeros(count, np.int64)
        for drawn in self.drawn_together():
            parts_of_nodes = [drawn.parts.of_node(node, count) for node in range(count)]
            samples += [int(node_parts.sizes[is_here[node_parts.shard]].sum()) for node_parts in parts_of_nodes]
        return tuple(samples.tolist())

    def drawn_together(self) -> list[ShardDraws]:
        """What the first epoch draws from each set of shards that has an order of its own."""
        streams = range(self.snapshot.num_streams)
        groups = [(stream,) for stream in streams] if self.config.batching.is_mixed else [tuple(streams)]
        return [self._drawn_shards(0, group) for group in groups]

    def _window(self, epoch: int, streams: tuple[int, ...], key: int) -> Order:
        """The order of the drawn samples of some streams; ``key`` is part of its random keys."""
        config = self.config
        drawn = self._drawn_shards(epoch, streams)
        if not config.shuffle:
            return Stored(self._draw, epoch, drawn)
        keys = config.seed, epoch, key
        if config.algorithm == UNIFORM:
            return Uniform(self._draw, epoch, drawn, keys)
        return Window(self._draw, epoch, drawn, keys, config.canonical_nodes, config.window, config.quick_start)

    def _own_epoch(self, stream: int, epoch: int) -> Order:
        """The order of a stream's own epoch, of each of its samples once; the last few are kept."""
        orders = self._own_epochs.setdefault(stream, {})
        count = _KEPT_EPOCHS + _KEPT_SAMPLES // max(1, int(self.snapshot.stream_samples[stream]))
        return cached(orders, epoch, lambda epoch: self._window(epoch, (stream,), stream), count)

    def _drawn_shards(self, epoch: int, streams: tuple[int, ...]) -> ShardDraws:
        """What is drawn, in the run-constant order of shards (index order without shuffling)."""
        if streams in self._constant_draws:
            return self._constant_draws[streams]
        drawn = self._draw.shards(epoch, streams)
        if self.config.shuffle:
            drawn = drawn.take(np.argsort(self._places[drawn.shard]))
        if self._draw.constant:
            self._constant_draws[streams] = drawn
        return drawn

    @cached_property
    def _places(self) -> Ints:
        """Each shard's place in the run-constant order that is cut into canonical nodes."""
        return deal_shards(self.config.seed, self.snapshot.num_shards, self.config.canonical_nodes)


def check_weights(config: OrderConfig, names: Sequence[str], weights: Sequence[StreamWeights]) -> None:
    """Raise ValueError for weights of streams that contradict the settings, whatever is in the streams."""
    if config.schedule is not None:
        _refuse_schedule(_schedule_problems(config, config.schedule, weights))
    elif problems := weight_problems(names, weights, config.epoch_size):
        raise ValueError("The weights of the streams cannot be met. " + " ".join(problems))


def _schedule_problems(
    config: OrderConfig, schedule: Schedule, weights: Sequence[StreamWeights], snapshot: Snapshot | None = None
) -> Iterator[str]:
    """What of a schedule contradicts the settings, or the data where it is given."""
    counts_tokens = schedule.counts_tokens(is_packed=config.packing is not None)
    if schedule.unit == "steps" and schedule.mean_lengths and not counts_tokens:
        yield "Its steps count samples, so omit mean_lengths."
    if any(weight != StreamWeights() for weight in weights):
        yield "The streams have a proportion, repeat or choose of their own: omit these."
    if snapshot is None:
        return
    if counts_tokens and not schedule.mean_lengths:
        yield "It counts tokens, so it needs mean_lengths."
    names = schedule.streams
    if len(names) != snapshot.num_streams:
        yield f"It has weights for {len(names)} streams, but there are {snapshot.num_streams}."
    all_weights = [weights for _, weights in schedule.points] + [change.weights or {} for change in schedule.changes]
    used = {name for weights in all_weights for name, weight in weights.items() if weight}
    for name, size in sorted(zip(names, snapshot.stream_samples.tolist(), strict=False)):
        if name in used and not size:
            yield f"Stream {name!r} has no samples, but a weight above 0."


def _refuse_schedule(problems: Iterator[str]) -> None:
    if sentences := " ".join(problems):
        raise ValueError(f"A schedule must suit the streams. {sentences}")
