"""``stratified``, ``per_stream`` and ``device_per_stream``: streams, each in its own order, interleaved evenly.

With stretches of 2 samples, streams of 9 and 4 samples, and B = 4::

    positions   0 1 2 3 4 5 6 7 8 9 10 11 | 12
    stream      a a b b a a a a b b a  a  | a       six whole stretches, evenly; then the remainder of each stream
    index       0 1 0 1 2 3 4 5 2 3 6  7  | 8
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from numpy.typing import NDArray

from lightning_stream.order.batching.base import BatchPlan, EpochOrder
from lightning_stream.order.mixture import Mixture
from lightning_stream.order.permutation import MIX_STEP, RngStream, mix64, random_u64
from lightning_stream.order.rank_split import ReplicaBatch, ceil_div
from lightning_stream.order.window import SampleOrder

if TYPE_CHECKING:
    from lightning_stream.order.config import OrderConfig
    from lightning_stream.order.plan import RunOrder


class InterleavedOrder(EpochOrder):
    """Every stream's whole stretches are interleaved evenly (:class:`Interleave`); then comes each stream's remainder.

    ``stretch_length`` consecutive samples of a stream stay together; with 1 there are no remainders. With ``jitter`` a
    shuffled run draws their distances at random; else they are equal.

    With a schedule, that gives the stream of each stretch, and every stream has an endless sequence of own epochs.
    """

    jitter: ClassVar[bool] = True

    def __init__(self, run: RunOrder, epoch: int) -> None:
        super().__init__(run, epoch)
        self._snapshot = run.snapshot
        self.stretch_length = length = self.stretch_length_of(run.config)
        streams = range(run.snapshot.num_streams)
        self._samples: Sequence[SampleOrder | OwnEpochs]
        self._interleave: Interleave | Mixture
        if run.config.schedule is None:
            self._samples = drawn = [run.sample_order(epoch, (stream,), stream) for stream in streams]
            sizes = np.array([one.num_samples for one in drawn], dtype=np.int64)
            self._stretches, remainder = np.divmod(sizes, length)
            self.full_end = int(self._stretches.sum()) * length
            seed = run.config.seed if self.jitter and run.config.shuffle else None
            self._interleave, self._first = Interleave(self._stretches, epoch, seed), 0
        else:
            self._interleave, most = run.mixture, run.num_samples // length
            self._first = epoch * most  # the stretches of the run before this epoch
            end = self._first + most if run.mixture.end is None else min(self._first + most, run.mixture.end)
            self.full_end = self.num_samples = max(0, end - self._first) * length
            # In a stream's own sequence, the epoch has the stretches from `begins` up to `_stretches`.
            begins, self._stretches = run.mixture.ends(self._first), run.mixture.ends(max(end, self._first))
            bounds = zip((begins * length).tolist(), (self._stretches * length).tolist(), strict=True)
            self._samples = [OwnEpochs(run, stream, *one) for stream, one in zip(streams, bounds, strict=True)]
            remainder = np.zeros(len(streams), dtype=np.int64)
        self._remainder_streams = np.flatnonzero(remainder)
        self.remainder_ends = self.full_end + np.cumsum(remainder[self._remainder_streams])
        self._last: tuple[int, int, NDArray[np.int64], NDArray[np.int64]] | None = None

    def start_problems(self, start: int) -> list[str]:
        """Why an epoch cannot start here: a start lies between two stretches, or anywhere in the remainders."""
        if start >= self.full_end or start % self.stretch_length == 0:
            return []
        length = self.stretch_length
        return [f"This order takes {length} samples of one stream at a time, but start={start} lies inside them."]

    def ids(self, begin: int, end: int) -> NDArray[np.int64]:
        return self._gather(begin, end, "ids")

    def canonical(self, begin: int, end: int) -> NDArray[np.int64]:
        return self._gather(begin, end, "canonical")  # by its stream's own index

    def positions(self, sample_id: int) -> list[int]:
        stream = int(self._snapshot.streams_of(np.array([sample_id]))[0])
        found = (self._position_of(stream, index) for index in self._samples[stream].positions(sample_id))
        return sorted(at for at in found if at is not None)

    def _position_of(self, stream: int, index: int) -> int | None:
        """The inverse of :meth:`locate`; None for an index that a mixture skips."""
        stretch, inside = divmod(index, self.stretch_length)
        if stretch < self._stretches[stream]:
            end = self._first + self.full_end // self.stretch_length
            place = self._interleave.find(stream, stretch, self._first, end)
            return None if place is None else (place - self._first) * self.stretch_length + inside
        entry = int(np.searchsorted(self._remainder_streams, stream))
        begin = int(self.remainder_ends[entry - 1]) if entry else self.full_end
        return begin + index - int(self._stretches[stream]) * self.stretch_length

    def locate(self, begin: int, end: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The stream of each position in [begin, end), and its index within that stream."""
        last = self._last
        if last is not None and last[0] == begin and last[1] == end:
            return last[2], last[3]
        length, stop = self.stretch_length, min(end, self.full_end)
        found = [(np.empty(0, np.int64), np.empty(0, np.int64))]
        if begin < stop:
            stream, index = self._interleave.read(self._first + begin // length, self._first + ceil_div(stop, length))
            if length > 1:
                at = np.arange(begin, stop)
                which = at // length - begin // length
                stream, index = stream[which], index[which] * length + at % length
            found.append((stream, index))
        if end > self.full_end:
            found.append(self._locate_remainder(max(begin, self.full_end), end))
        stream, index = found[1] if len(found) == 2 else map(np.concatenate, zip(*found, strict=True))
        self._last = (begin, end, stream, index)
        return stream, index

    def _locate_remainder(self, begin: int, end: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """As :meth:`locate`, behind the whole stretches."""
        at = np.arange(begin, end, dtype=np.int64)
        which = np.searchsorted(self.remainder_ends, at, side="right")
        stream = self._remainder_streams[which]
        starts = np.concatenate([[self.full_end], self.remainder_ends])
        return stream, self._stretches[stream] * self.stretch_length + at - starts[which]

    def _gather(self, begin: int, end: int, what: str) -> NDArray[np.int64]:
        self.check_range(begin, end)
        stream, index = self.locate(begin, end)
        out = np.empty(len(stream), dtype=np.int64)
        order = np.argsort(stream, kind="stable")
        for mine in np.split(order, np.flatnonzero(np.diff(stream[order])) + 1):
            if not len(mine):
                continue
            samples = self._samples[int(stream[mine[0]])]
            read = samples.ids if what == "ids" else samples.canonical
            # a stream's indices rise, without a gap but over the border of whole stretches and remainders
            for piece in np.split(mine, np.flatnonzero(np.diff(index[mine]) > 1) + 1):
                first = int(index[piece[0]])
                out[piece] = read(first, first + len(piece))
        return out


class StratifiedOrder(InterleavedOrder):
    """Samples of all streams one by one: a global batch holds each stream's share, within two or three samples."""

    mixes_streams: ClassVar[bool] = True
    jitter: ClassVar[bool] = False


class _PerStreamBatches(BatchPlan):
    order: PerStreamOrder

    def _remainder_ends(self, at: int, whole: int, least: int = 0) -> tuple[int, ...]:
        """Each stream's remainder is a batch; ``"exact"`` moves no border: the batch before is another stream's."""
        return tuple(end for end in self.order.remainder_ends.tolist() if end > at)

    def _problems(self) -> list[str]:
        problems = [*super()._problems(), *self.order.start_problems(self.start)]
        length = self.order.stretch_length
        if length != self.batch_size:
            problems.append(
                f"per_stream fixes the global batch at the run's start: {length} samples then, {self.batch_size} now. "
                "Keep it, or choose another batching_method."
            )
        return problems


class PerStreamOrder(InterleavedOrder):
    """Global batches of B samples of one stream, interleaved; then each stream's remainder as a batch of its own."""

    plan_type: ClassVar[type[BatchPlan]] = _PerStreamBatches
    can_be_packed: ClassVar[bool] = False  # a batch is of one stream, and rows are of several documents
    fixes: ClassVar[Mapping[str, str]] = {
        "batch_size": "per_stream makes every global batch from one stream: it needs a batch size from the start."
    }

    @classmethod
    def stretch_length_of(cls, config: OrderConfig) -> int:
        return config.batch_size or 1


class _BlockBatches(BatchPlan):
    """Replicas get whole blocks; single samples only where m is 1, or with ``"exact"`` in the remainder."""

    order: DevicePerStreamOrder

    def _remainder_ends(self, at: int, whole: int, least: int = 0) -> tuple[int, ...]:
        order, block = self.order, self.order.stretch_length
        if block == 1 or self.tail == "exact":
            return super()._remainder_ends(at, whole, least if block == 1 else order.full_end)
        edges = [*range(at + block, order.full_end + 1, block), *order.remainder_ends.tolist()]
        edges = [end for end in edges if end > at]
        per_batch = self.batch_size // block
        return (*edges[per_batch - 1 :: per_batch], *edges[len(edges) // per_batch * per_batch :][-1:])

    def _deals_blocks(self, k: int) -> bool:
        return self.order.stretch_length > 1 and (self.tail != "exact" or k < self.num_whole_batches)

    def places(self, k: int) -> ReplicaBatch:
        if not self._deals_blocks(k):
            return super().places(k)
        begin, end = self.bounds(k)
        world, block = self.world, self.order.stretch_length
        streams, _ = self.order.locate(begin, end)
        canonical = self.order.canonical(begin, end)
        offsets, filler = split_blocks(canonical, streams, block, world.num_replicas, world.replica)
        at = begin + offsets
        return ReplicaBatch(at, at, filler, block)

    def num_micro_batches(self, k: int, device_batch_size: int) -> int:
        block = self.order.stretch_length
        if not self._deals_blocks(k):
            return super().num_micro_batches(k, device_batch_size)
        if device_batch_size % block and block % device_batch_size:
            raise ValueError(
                f"device_per_stream keeps blocks of {block} samples, the batch per device that the run began with; a "
                f"batch per device must hold whole blocks or divide one, but it is {device_batch_size}. Choose another."
            )
        # Blocks are filled up, so the share itself is counted.
        length = self.batch_size // self.world.num_replicas if k < self.num_whole_batches else len(self.places(k))
        return ceil_div(length, device_batch_size)

    def _problems(self) -> list[str]:
        problems = [*super()._problems(), *self.order.start_problems(self.start)]
        block = self.order.stretch_length
        per_replica, left = divmod(self.batch_size, self.world.num_replicas)
        if not left and per_replica % block:
            problems.append(
                f"device_per_stream keeps blocks of {block} samples, so a replica's part of a global batch must be a "
                f"multiple of that, but {self.batch_size} samples over {self.world.num_replicas} replicas are "
                f"{per_replica} each."
            )
        return problems


class DevicePerStreamOrder(InterleavedOrder):
    """Device blocks of m samples of one stream, interleaved; then each stream's remainder as a short block."""

    plan_type: ClassVar[type[BatchPlan]] = _BlockBatches
    can_be_packed: ClassVar[bool] = False
    fixes: ClassVar[Mapping[str, str]] = {
        "device_block": "device_per_stream needs the batch size per device from the start."
    }
    mixes_streams: ClassVar[bool] = True
    splits_samples: ClassVar[bool] = False
    can_be_balanced: ClassVar[bool] = False

    @classmethod
    def stretch_length_of(cls, config: OrderConfig) -> int:
        return config.device_block or 1


def split_blocks(
    canonical: NDArray[np.int64], streams: NDArray[np.int64], block: int, num_replicas: int, replica: int
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """As `rank_split.split` with ``equal``, but in blocks of one stream each.

    Within each stream the batch is stably grouped by canonical node and cut into blocks; a short last block is filled
    up. Blocks are ordered by the middle of the canonical nodes they hold, so that neighbours share shards.
    """
    table, filler, rank = [], [], []
    for stream in np.unique(streams).tolist():
        mine = np.flatnonzero(streams == stream)
        mine = mine[np.argsort(canonical[mine], kind="stable")]
        count = ceil_div(len(mine), block)
        fill = count * block - len(mine)
        table.append(np.concatenate([mine, np.full(fill, mine[-1])]).reshape(count, block))
        filler.append((np.arange(count * block) >= len(mine)).reshape(count, block))
        rank.append((np.arange(count) + 0.5) / count)
    order = np.argsort(np.concatenate(rank), kind="stable")
    blocks, fillers = np.concatenate(table)[order], np.concatenate(filler)[order]
    begin, end = len(blocks) * replica // num_replicas, len(blocks) * (replica + 1) // num_replicas
    lacks = ceil_div(len(blocks), num_replicas) - (end - begin)  # then one block comes again, all of it padding
    own = np.concatenate([np.arange(begin, end), np.full(lacks, min(begin, len(blocks) - 1))])
    fillers = fillers[own]
    fillers[end - begin :] = True
    return blocks[own].reshape(-1), fillers.reshape(-1)


class OwnEpochs:
    """A stream's own endless sequence: sample n is at position n mod size of its own epoch n // size.

    [begin, end) are the numbers that one epoch of the run has of it.
    """

    def __init__(self, run: RunOrder, stream: int, begin: int, end: int) -> None:
        self._run, self._stream, self._bounds = run, stream, (begin, end)
        self._size = int(run.snapshot.stream_samples[stream])

    def ids(self, begin: int, end: int) -> NDArray[np.int64]:
        """Sample ids at numbers [begin, end)."""
        return np.concatenate([order.ids(first, stop) for order, first, stop, _ in self._parts(begin, end)])

    def canonical(self, begin: int, end: int) -> NDArray[np.int64]:
        """The canonical node of each number in [begin, end)."""
        return np.concatenate([order.canonical(first, stop) for order, first, stop, _ in self._parts(begin, end)])

    def positions(self, sample_id: int) -> list[int]:
        """All numbers of a sample in the epoch of the run."""
        return [
            before + at
            for order, first, stop, before in self._parts(*self._bounds)
            for at in order.positions(sample_id)
            if first <= at < stop
        ]

    def _parts(self, begin: int, end: int) -> Iterator[tuple[SampleOrder, int, int, int]]:
        """The own epochs of [begin, end): the order of each, its positions [first, stop), and the numbers before it."""
        for epoch in range(begin // self._size, -(-end // self._size)):
            before = epoch * self._size
            order = self._run.own_epoch(epoch, self._stream)
            yield order, max(begin - before, 0), min(end - before, self._size), before


class Interleave:
    """Several sequences merged evenly: entry j of a sequence of n has the key (j + u) / n, ties by sequence.

    u is 1/2, or with a seed a number in [0, 1) of (seed, epoch, sequence, j). Keys are IEEE doubles, whose division is
    correctly rounded everywhere, so equal fractions tie and every machine merges alike. O(sequences + range).
    """

    def __init__(self, lengths: NDArray[np.int64], epoch: int, seed: int | None) -> None:
        self._lengths, self._total = lengths, int(lengths.sum())
        self._salt = None if seed is None else random_u64(RngStream.JITTER, seed, epoch, size=len(lengths))

    def read(self, begin: int, end: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """For entries [begin, end) of the merge: the sequence of each, and its index there."""
        low, high = self._bounds(begin, end)
        counts = high - low
        sequence = np.repeat(np.arange(len(counts)), counts)
        first = np.cumsum(counts) - counts
        index = np.arange(len(sequence)) - (first - low)[sequence]
        order = np.argsort(self._keys(sequence, index), kind="stable")
        skipped = begin - int(low.sum())
        order = order[skipped : skipped + end - begin]
        return sequence[order], index[order]

    def find(self, sequence: int, index: int, begin: int, end: int) -> int:
        """The entry in [begin, end) that has this index of a sequence: near its key times the total, see `_bounds`."""
        key = float(self._keys(np.array([sequence]), np.array([index]))[0])
        near, margin = int(key * self._total), len(self._lengths) + 2
        begin = max(near - margin, begin)
        sequences, indices = self.read(begin, min(near + margin, end))
        return begin + int(np.flatnonzero((sequences == sequence) & (indices == index))[0])

    def _bounds(self, begin: int, end: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Per sequence, a stretch that holds all its entries in [begin, end), all before it being earlier.

        At key t, a sequence of n has between t * n - 1 and t * n + 1 entries below; so all together are within their
        number of t * total.
        """
        margin = len(self._lengths) + 1
        below = (begin - margin) / self._total * self._lengths
        above = (end + margin) / self._total * self._lengths
        low = np.clip(np.floor(below).astype(np.int64) - 1, 0, self._lengths)
        high = np.clip(np.ceil(above).astype(np.int64) + 1, 0, self._lengths)
        return low, high

    def _keys(self, sequence: NDArray[np.int64], index: NDArray[np.int64]) -> NDArray[np.float64]:
        if self._salt is None:
            jitter: NDArray[np.float64] | float = 0.5
        else:
            scattered = mix64(self._salt[sequence] + index.astype(np.uint64) * MIX_STEP)
            jitter = (scattered >> np.uint64(12)).astype(np.float64) * 2.0**-52
        return (index + jitter) / self._lengths[sequence]
