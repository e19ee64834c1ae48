"""The order of an epoch and its global batches: what all batching methods share, and ``random``, which adds least."""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from numpy.typing import NDArray

from lightning_stream.order.rank_split import TAILS, ReplicaBatch, Tail, num_micro_batches, split
from lightning_stream.order.world import World

if TYPE_CHECKING:
    from lightning_stream.order.config import OrderConfig
    from lightning_stream.order.plan import RunOrder
    from lightning_stream.order.snapshot import Snapshot

_ALL_STREAMS = 2**32  # the key of the one order over all streams together


class BatchPlan:
    """The global batches of one epoch from a position on, and this world's share of each.

    Args:
        order: The epoch's order, whose ``plan_type`` is the class of the plan.
        batch_size: B, samples of a global batch (one optimizer step over all replicas, accumulation included).
        world: This process among all. Only :meth:`share` depends on it, and with ``tail="exact"`` the border between
            the last two batches; in the orders of mosaicml-streaming, the batches do too.
        tail: What happens to the last partial batch: ``"pad"`` fills it up with repeats, ``"drop"`` omits it,
            ``"exact"`` splits it unevenly, with samples of the batch before where it has fewer than there are replicas.
        start: The position that the plan starts from; any, since B may have changed.

    Raises:
        ValueError: B does not divide over the replicas, contradicts the order, or ``start`` is outside the epoch.

    Example::

        plan = BatchPlan(run.epoch(0), batch_size=8, world=World(rank=1, num_ranks=2))
        plan.bounds(3)     # (24, 32)
        plan.share(3).ids  # the four sample ids of rank 1 in the fourth step
    """

    def __new__(cls, order: EpochOrder, **_: object) -> BatchPlan:  # noqa: PYI034 (a subclass)
        return super().__new__(order.plan_type)

    def __init__(
        self, order: EpochOrder, *, batch_size: int, world: World | None = None, tail: Tail = "pad", start: int = 0
    ) -> None:
        self.order, self.batch_size, self.tail, self.start = order, batch_size, tail, start
        self.world = World() if world is None else world
        if problems := self._problems():
            raise ValueError("The batches of an epoch cannot be planned. " + " ".join(problems))
        self._cut()

    def __reduce__(self) -> tuple[partial[BatchPlan], tuple[EpochOrder]]:
        """Pickle what the plan was made of, not what was computed from it."""
        given = {"batch_size": self.batch_size, "world": self.world, "tail": self.tail, "start": self.start}
        return partial(BatchPlan, **given), (self.order,)  # type: ignore[arg-type]

    def _cut(self) -> None:
        # This many batches, from the first on, have exactly B samples; those of the epoch's remainder follow.
        self.num_whole_batches = max(0, self.order.full_end - self.start) // self.batch_size
        at = self.start + self.num_whole_batches * self.batch_size
        self._ends: tuple[int, ...] = ()  # of the batches behind them
        if self.tail != "drop" and at < self.order.num_samples:
            self._ends = self._remainder_ends(at)

    def _remainder_ends(self, at: int, least: int = 0) -> tuple[int, ...]:
        """The ends of the batches behind position ``at``, where no full batch is left before ``full_end``.

        ``"exact"`` moves the last border back, to ``least`` at most, where fewer samples than replicas lie behind it.
        """
        total = self.order.num_samples
        ends = (*range(at + self.batch_size, total, self.batch_size), total)
        border, is_alone = total - self.world.num_replicas, len(ends) == 1 and not self.num_whole_batches
        if self.tail != "exact" or is_alone or border < least or border >= (at, *ends)[-2]:
            return ends
        self.num_whole_batches -= len(ends) == 1
        return (*ends[:-2], border, ends[-1])

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
        if not 0 <= k < self.num_batches:
            raise ValueError(f"Global batches count from 0 to {self.num_batches - 1} here; found {k}.")
        first = self.start + min(k, self.num_whole_batches) * self.batch_size
        if k < self.num_whole_batches:
            return first, first + self.batch_size
        at = k - self.num_whole_batches
        return (self._ends[at - 1] if at else first), self._ends[at]

    def ids(self, k: int) -> NDArray[np.int64]:
        """Sample ids of global batch ``k`` in position order, padding excluded."""
        return self.order.ids(*self.bounds(k))

    def share(self, k: int) -> ReplicaBatch:
        """This replica's part of global batch ``k``."""
        begin, end = self.bounds(k)
        world = self.world
        canonical = self.order.canonical(begin, end)
        offsets, filler = split(canonical, world.num_replicas, world.replica, equal=self.tail != "exact")
        return ReplicaBatch(self.order.ids(begin, end)[offsets], begin + offsets, filler)

    def shares(self, ks: Sequence[int]) -> list[ReplicaBatch]:
        """As :meth:`share` of each, ascending, but full ones are planned together: 16 of 1024 in 60 % of the time."""
        for k in (*ks[:1], *ks[-1:]):
            self.bounds(k)
        count = bisect_left(ks, self.num_whole_batches)
        if count < 2 or not self.order.splits_samples:
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
        problems, total = [], self.order.num_samples
        batch_size, replicas = self.batch_size, self.world.num_replicas
        if self.tail not in TAILS:
            problems.append(f"tail must be one of {', '.join(TAILS)}, not {self.tail!r}.")
        if not 0 <= self.start <= total:
            problems.append(f"start must be within the epoch, [0, {total}], not {self.start}.")
        if batch_size < 1:
            problems.append(f"batch_size (B) must be at least 1, not {batch_size}.")
        elif batch_size % replicas:
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
    # Whether a whole global batch is grouped by canonical node and split over the replicas sample by sample.
    splits_samples: ClassVar[bool] = True
    plan_type: ClassVar[type[BatchPlan]] = BatchPlan  # how the epoch is cut into global batches

    @classmethod
    def stretch_length_of(cls, config: OrderConfig) -> int:  # noqa: ARG003
        """Consecutive samples of one stream that stay together, where the method keeps any."""
        return 1

    def __init__(self, run: RunOrder, epoch: int) -> None:
        self.epoch, self.num_samples, self.full_end = epoch, run.num_samples, run.num_samples

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

    @abstractmethod
    def canonical(self, begin: int, end: int) -> NDArray[np.int64]:
        """The canonical node of each position in [begin, end): what ranks are grouped by."""

    def check_range(self, begin: int, end: int) -> None:
        """Raise ValueError for positions outside the epoch."""
        if not 0 <= begin <= end <= self.num_samples:
            raise ValueError(f"Positions must be within the epoch, [0, {self.num_samples}); found [{begin}, {end}).")


class RandomOrder(EpochOrder):
    """``random``: one order over the shards of all streams, cut anywhere."""

    def __init__(self, run: RunOrder, epoch: int) -> None:
        super().__init__(run, epoch)
        self._samples = run.sample_order(epoch, tuple(range(run.snapshot.num_streams)), _ALL_STREAMS)

    @classmethod
    def shard_groups(cls, snapshot: Snapshot) -> Sequence[NDArray[np.int64]]:
        return (snapshot.sizes,)  # all shards are one group

    def ids(self, begin: int, end: int) -> NDArray[np.int64]:
        self.check_range(begin, end)
        return self._samples.ids(begin, end)

    def canonical(self, begin: int, end: int) -> NDArray[np.int64]:
        self.check_range(begin, end)
        return self._samples.canonical(begin, end)
