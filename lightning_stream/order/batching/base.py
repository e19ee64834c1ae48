"""The order of an epoch and its global batches: what all batching methods share, and ``random``, which adds least."""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from lightning_stream.order.balance import Balance, balanced_split
from lightning_stream.order.rank_split import TAILS, ReplicaBatch, Tail, num_micro_batches, split
from lightning_stream.order.world import World

if TYPE_CHECKING:
    from lightning_stream.order.batching.packed import Landmark, Samples
    from lightning_stream.order.config import OrderConfig
    from lightning_stream.order.packing import RowSpans
    from lightning_stream.order.plan import RunOrder
    from lightning_stream.order.snapshot import Snapshot

_ALL_STREAMS = 2**32  # the key of the one order over all streams together
_SEARCHED = 1 << 20  # positions at once


class BatchPlan:
    """The global batches of one epoch from a position on, and this world's share of each.

    Args:
        order: The epoch's order, whose ``plan_type`` is the class of the plan.
        batch_size: B, samples of a global batch (one optimizer step over all replicas, accumulation included).
        world: This process among all. Only :meth:`share` depends on it, and with ``tail="exact"`` the border between
            the last two batches; in the orders of mosaicml-streaming, the batches do too.
        tail: What happens to the last partial batch: ``"pad"`` fills it up with repeats, ``"drop"`` omits it,
            ``"exact"`` splits it unevenly; where it has fewer samples than there are replicas, it takes some of the
            batch before.
        start: The position that the plan starts from; any, since B may have changed.
        balance: Gives every replica samples of nearly equal cost; None splits without regard to costs.
        accumulate: Micro-batches of a step. Batches of a budget of tokens, which differ in size, are cut into so many;
            all others by the samples of a micro-batch.

    Raises:
        ValueError: B does not divide over the replicas, contradicts the order, or ``start`` is outside the epoch.

    Example::

        plan = BatchPlan(run.epoch(0), batch_size=8, world=World(rank=1, num_ranks=2))
        plan.bounds(3)     # (24, 32)
        plan.share(3).ids  # the four sample ids of rank 1 in the fourth step
    """

    must_divide: ClassVar[bool] = True  # whether every batch must give all replicas equally many samples

    def __new__(cls, order: EpochOrder, **_: object) -> BatchPlan:  # noqa: PYI034 (a subclass)
        return super().__new__(order.plan_type)

    def __init__(
        self,
        order: EpochOrder,
        *,
        batch_size: int,
        world: World | None = None,
        tail: Tail = "pad",
        start: int = 0,
        balance: Balance | None = None,
        accumulate: int = 1,
    ) -> None:
        self.order, self.batch_size, self.tail, self.start = order, batch_size, tail, start
        self.balance, self.accumulate = balance, accumulate
        self.world = World() if world is None else world
        if problems := self._problems():
            raise ValueError("The batches of an epoch cannot be planned. " + " ".join(problems))

    def __reduce__(self) -> tuple[partial[BatchPlan], tuple[EpochOrder]]:
        """Pickle what the plan was made of, not what was computed from it."""
        return partial(BatchPlan, **self._arguments), (self.order,)

    def of(self, world: World, balance: Balance | None) -> BatchPlan:
        """The same global batches, for another rank or another balance."""
        return BatchPlan(self.order, **{**self._arguments, "world": world, "balance": balance})

    @property
    def _arguments(self) -> dict[str, Any]:
        names = ("batch_size", "world", "tail", "start", "balance", "accumulate")
        return {name: getattr(self, name) for name in names}

    @cached_property
    def _cuts(self) -> tuple[int, tuple[int, ...]]:
        return self._cut()

    @property
    def num_whole_batches(self) -> int:
        """How many batches, from the first on, have exactly B samples; those of the epoch's remainder follow."""
        return self._cuts[0]

    @property
    def _ends(self) -> tuple[int, ...]:
        """The ends of the batches of the remainder."""
        return self._cuts[1]

    def _cut(self) -> tuple[int, tuple[int, ...]]:
        whole = max(0, self.order.full_end - self.start) // self.batch_size
        at = self.start + whole * self.batch_size
        ends = self._remainder_ends(at, whole) if self.tail != "drop" and at < self.order.num_samples else ()
        return whole - (bool(ends) and ends[0] <= at), ends

    def _remainder_ends(self, at: int, whole: int, least: int = 0) -> tuple[int, ...]:
        """The ends of the batches behind position ``at``, where no full batch is left before ``full_end``.

        ``"exact"`` moves the last border back, to ``least`` at most, where fewer samples than replicas lie behind it;
        an end at ``at`` or before it is that of the last of the ``whole`` batches.
        """
        total = self.order.num_samples
        ends = (*range(at + self.batch_size, total, self.batch_size), total)
        border, is_alone = total - self.world.num_replicas, len(ends) == 1 and not whole
        if self.tail != "exact" or is_alone or border < least or border >= (at, *ends)[-2]:
            return ends
        return (*ends[:-2], border, ends[-1])

    def is_whole(self, k: int) -> bool:
        """Whether global batch ``k`` has the regular size, and no tail changes it. Cheap far from the epoch's end."""
        margin = self.world.num_replicas if self.tail == "exact" else 0
        return self.order.reaches(self.start + (k + 1) * self.batch_size + margin) or k < self.num_whole_batches

    def has(self, k: int) -> bool:
        """Whether there is a global batch ``k``. Cheap far from the epoch's end."""
        return self.is_whole(k) or k < self.num_batches

    @property
    def num_batches(self) -> int:
        """Global batches from ``start`` on."""
        return self.num_whole_batches + len(self._ends)

    @property
    def end(self) -> int:
        """The position behind the last batch: N, or less with ``tail="drop"``."""
        return self._ends[-1] if self._ends else self.start + self.num_whole_batches * self.batch_size

    @property
    def follows_order(self) -> bool:
        """Whether the batches hold the order's samples in its places: only mosaicml-streaming's may hold others."""
        return True

    def bounds(self, k: int) -> tuple[int, int]:
        """First position of global batch ``k`` (counted from ``start``), and the one behind its last."""
        if k >= 0 and self.is_whole(k):
            first = self.start + k * self.batch_size
            return first, first + self.batch_size
        if not 0 <= k < self.num_batches:
            raise ValueError(f"Global batches count from 0 to {self.num_batches - 1} here; found {k}.")
        first = self.start + self.num_whole_batches * self.batch_size
        at = k - self.num_whole_batches
        return (self._ends[at - 1] if at else first), self._ends[at]

    def ids(self, k: int) -> NDArray[np.int64]:
        """Sample ids of global batch ``k`` in position order, padding excluded."""
        return self.order.ids(*self.bounds(k))

    def share(self, k: int) -> ReplicaBatch:
        """This replica's part of global batch ``k``."""
        begin, end = self.bounds(k)
        places = self.places(k)
        ids, rows = self.order.select(begin, end, places.positions - begin)
        return replace(places, ids=ids, rows=rows)

    def places(self, k: int) -> ReplicaBatch:
        """As :meth:`share`, with positions in the place of ids: far from those planned last, ids cost much more."""
        begin, end = self.bounds(k)
        world = self.world
        canonical, equal = self.order.canonical(begin, end), self.tail != "exact"
        ends: tuple[int, ...] | None = None
        if self.balance is None:
            offsets, filler = split(canonical, world.num_replicas, world.replica, equal=equal)
        else:
            size = self.balance.device_batch_size
            costs, count = self.balance.costs_of(self.order, begin, end), self.num_micro_batches(k, size)
            offsets, filler, ends = balanced_split(canonical, costs, world, equal=equal, num_micro_batches=count)
        at = begin + offsets
        return ReplicaBatch(at, at, filler, ends=ends)

    def shares(self, ks: Sequence[int]) -> list[ReplicaBatch]:
        """As :meth:`share` of each, ascending, but full ones are planned together: 16 of 1024 in 60 % of the time."""
        for k in (*ks[:1], *ks[-1:]):
            self.bounds(k)
        together = len(ks) > 1 and self.order.splits_samples and self.balance is None
        count = bisect_left(ks, self.num_whole_batches) if together else 0
        if count < 2:
            return [self.share(k) for k in ks]
        size, replicas, replica = self.batch_size, self.world.num_replicas, self.world.replica
        first, end = self.start + ks[0] * size, self.start + (ks[count - 1] + 1) * size
        begins = (np.array(ks[:count], dtype=np.int64)[:, None] - ks[0]) * size
        canonical = self.order.canonical(first, end)[begins + np.arange(size)]
        if (canonical == canonical[0]).all():
            canonical = canonical[:1]  # usually C divides B, and all batches are grouped alike
        grouped = np.argsort(canonical, axis=1, kind="stable")
        offsets = begins + grouped[:, size * replica // replicas : size * (replica + 1) // replicas]
        filler = np.zeros(offsets.shape, dtype=np.bool_)
        full = map(ReplicaBatch, self.order.ids(first, end)[offsets], first + offsets, filler)
        return [*full, *map(self.share, ks[count:])]

    def num_micro_batches(self, k: int, device_batch_size: int) -> int:
        """How many micro-batches of at most ``device_batch_size`` samples, padding included, every replica cuts its
        share of global batch ``k`` into. Raises ValueError where they would cut the blocks of ``device_per_stream``.
        """
        begin, end = self.bounds(k)
        return num_micro_batches(end - begin, device_batch_size, self.world.num_replicas)

    def _problems(self) -> list[str]:
        """One sentence for each reason why this order cannot be cut this way."""
        problems = []
        batch_size, replicas = self.batch_size, self.world.num_replicas
        if self.tail not in TAILS:
            problems.append(f"tail must be one of {', '.join(TAILS)}, not {self.tail!r}.")
        if self.start < 0 or not (self.order.reaches(self.start) or self.start <= self.order.num_samples):
            problems.append(f"start must be within the epoch, [0, {self.order.num_samples}], not {self.start}.")
        if self.balance is not None and not self.order.can_be_balanced:
            problems.append(
                "This order assigns samples to replicas itself, so balance must be None. Omit it, or choose another "
                "batching_method or shuffle_algo."
            )
        if batch_size < 1:
            problems.append(f"batch_size (B) must be at least 1, not {batch_size}.")
        elif batch_size % replicas and self.must_divide:
            near = [b for b in (batch_size // replicas * replicas, -(-batch_size // replicas) * replicas) if b]
            problems.append(
                f"A global batch must divide evenly over the data replicas, but {batch_size} samples over {replicas} "
                f"replicas leave {batch_size % replicas}: use {' or '.join(map(str, near))} samples, or a number of "
                f"replicas that divides {batch_size}."
            )
        return problems


class EpochOrder(ABC):
    """All sample ids of one epoch, in order, readable at any position.

    Attributes:
        epoch: Counts from 0.
        num_samples: N, all positions.
        full_end: Positions [0, full_end) are cut into global batches of B one after another; behind them lie the
            remainders of the streams.

    Example::

        order = run.epoch(3)
        order.ids(1000, 1008)  # eight sample ids of epoch 3, without computing those before
    """

    # Batch sizes that the order keeps from its first start: the setting, and the message where it is None.
    fixes: ClassVar[Mapping[str, str]] = {}
    # Whether every global batch holds samples of several streams, each in an order of its own.
    mixes_streams: ClassVar[bool] = False
    # Whether global batches of B samples are grouped by canonical node and split over the replicas one by one.
    splits_samples: ClassVar[bool] = True
    can_be_packed: ClassVar[bool] = True  # whether its samples can be packed into rows
    can_switch: ClassVar[bool] = False  # whether a run may switch versions of its data
    can_be_balanced: ClassVar[bool] = True  # whether costs may decide which replica gets which sample
    plan_type: ClassVar[type[BatchPlan]] = BatchPlan  # how the epoch is cut into global batches
    samples_per_position: int = 1  # about so many, where samples are packed into rows
    arranged_together: int = 1  # samples of `drawn` whose places depend on each other

    @classmethod
    def stretch_length_of(cls, config: OrderConfig) -> int:  # noqa: ARG003
        """Consecutive samples of one stream that stay together, where the method keeps any."""
        return 1

    def __init__(self, run: RunOrder, epoch: int) -> None:
        self.epoch, self.num_samples, self.full_end = epoch, run.num_samples, run.num_samples

    @property
    def documents(self) -> EpochOrder:
        """The order of samples: this one, unless they are packed into rows."""
        return self

    @property
    def drawn(self) -> EpochOrder:
        """The order below, where samples are packed or rearranged in windows; else this one."""
        return self.documents

    def samples_in(self, num_positions: int) -> int:
        """About how many samples global batches have that count as so many positions."""
        return num_positions * self.samples_per_position

    @classmethod
    def shard_groups(cls, snapshot: Snapshot) -> Sequence[NDArray[np.int64]]:
        """The shard sizes of each set of shards that has an order of its own: here each stream."""
        return snapshot.shard_sizes

    @classmethod
    def active_shards(cls, run: RunOrder) -> int:
        """Shards in use at once: w for each canonical node of each group."""
        most = run.config.canonical_nodes * run.config.window if run.config.shuffle else 1
        return sum(min(most, len(sizes)) for sizes in cls.shard_groups(run.snapshot))

    @abstractmethod
    def ids(self, begin: int, end: int) -> NDArray[np.int64]:
        """Sample ids at positions [begin, end): int64[end - begin]. O(range + window)."""

    def ids_at(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Sample ids at positions that lie near each other: int64[len(positions)]."""
        begin = int(positions.min())
        return self.ids(begin, int(positions.max()) + 1)[positions - begin]

    def reaches(self, position: int) -> bool:
        """Whether the positions before this one are cut into global batches of B one after another.

        Where samples are packed into rows, the number of all rows is not known before: then this is far cheaper.
        """
        return position <= self.full_end

    def exists(self, position: int) -> bool:
        """Whether the epoch has this position."""
        return position < self.num_samples

    def select(self, begin: int, end: int, offsets: NDArray[np.int64]) -> tuple[NDArray[np.int64], RowSpans | None]:
        """The ids of some positions in [begin, end), counted from ``begin``; and what their rows hold, if packed."""
        return self.ids(begin, end)[offsets], None

    def rows(self, begin: int, end: int) -> RowSpans | None:
        """What the rows at positions [begin, end) hold; None where positions are samples."""
        return None

    def version_at(self, position: int) -> int:
        """The number of the version of the data at a position, where a run switches between several."""
        return 0

    def samples(self, begin: int, end: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The samples that positions [begin, end) need, and the position of each."""
        return self.ids(begin, end), np.arange(begin, end, dtype=np.int64)

    def alternatives(self, position: int, seed: int) -> RowSpans:
        """Rows to try where the one at a position cannot be read: 16 of its window at random, or none."""
        raise TypeError("Only packed rows have alternatives.")

    def sequences(self, least: int) -> Sequence[Samples]:
        """The sequences that are packed separately, of at least so many samples each if there are several."""
        return [self]

    def batches_before(self, position: int) -> int | None:
        """Global batches that end at or before a position; None where all have the size that the run gives them."""
        return None

    def settled(self, position: int) -> int:
        """The first position of :attr:`drawn` that changes nothing before a position of this order."""
        return position

    def landmark(self, position: int) -> Landmark | None:
        """What a state holds so that a resume at this position is fast; None where every position is."""
        return None

    def learn(self, landmark: Landmark) -> None:  # noqa: B027 - most have nothing to learn
        """Use a landmark of this epoch."""

    @abstractmethod
    def canonical(self, begin: int, end: int) -> NDArray[np.int64]:
        """The canonical node of each position in [begin, end): what ranks are grouped by."""

    def positions(self, sample_id: int) -> list[int]:
        """All positions of a sample, ascending: the inverse of :meth:`ids`. Here O(samples), by a search."""
        found: list[int] = []
        for begin in range(0, self.num_samples, _SEARCHED):
            ids = self.ids(begin, min(begin + _SEARCHED, self.num_samples))
            found += (begin + np.flatnonzero(ids == sample_id)).tolist()
        return found

    def check_range(self, begin: int, end: int) -> None:
        """Raise ValueError for positions outside the epoch."""
        if not 0 <= begin <= end <= self.num_samples:
            raise ValueError(f"Positions must be within the epoch, [0, {self.num_samples}); found [{begin}, {end}).")


class RandomOrder(EpochOrder):
    """``random``: one order over the shards of all streams, cut anywhere."""

    can_switch: ClassVar[bool] = True

    def __init__(self, run: RunOrder, epoch: int) -> None:
        super().__init__(run, epoch)
        self._samples = run.sample_order(epoch, tuple(range(run.snapshot.num_streams)), _ALL_STREAMS)

    @classmethod
    def shard_groups(cls, snapshot: Snapshot) -> Sequence[NDArray[np.int64]]:
        return (snapshot.sizes,)  # all shards are one group

    def sequences(self, least: int) -> Sequence[Samples]:
        return self._samples.split(max(1, self.num_samples // least))

    def ids(self, begin: int, end: int) -> NDArray[np.int64]:
        self.check_range(begin, end)
        return self._samples.ids(begin, end)

    def ids_at(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        return self._samples.ids_at(positions)

    def canonical(self, begin: int, end: int) -> NDArray[np.int64]:
        self.check_range(begin, end)
        return self._samples.canonical(begin, end)

    def positions(self, sample_id: int) -> list[int]:
        return self._samples.positions(sample_id)
