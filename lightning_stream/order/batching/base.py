"""What every batching method is made of: the order of an epoch, and its global batches.

A method is one file with one subclass of `EpochOrder` (and of `GlobalBatches`, where it deals batches otherwise), and
one line in `METHODS`. Nothing else compares the method's name.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from numpy.typing import NDArray

from lightning_stream.order.rank_split import TAILS, ReplicaBatch, Tail, num_micro_batches, split
from lightning_stream.order.world import World

if TYPE_CHECKING:
    from lightning_stream.order.config import OrderConfig
    from lightning_stream.order.plan import RunOrder
    from lightning_stream.order.snapshot import Snapshot


class EpochOrder(ABC):
    """All sample ids of one epoch, in order, readable at any position.

    Attributes:
        epoch: Counts from 0.
        num_samples: N, all positions.
        full_end: Positions [0, full_end) are cut into global batches of B one after another; behind them lie the
            remainders of the streams.
    """

    mixes_streams: ClassVar[bool] = False
    """Whether every global batch holds samples of several streams, each in an order of its own."""

    splits_samples: ClassVar[bool] = True
    """Whether a whole global batch is grouped by canonical node and split over the replicas sample by sample."""

    def __init__(self, epoch: int, num_samples: int, full_end: int) -> None:
        self.epoch, self.num_samples, self.full_end = epoch, num_samples, full_end

    @classmethod
    def fixed_settings(cls, batch_size: int | None, device_batch_size: int | None) -> dict[str, int | None]:  # noqa: ARG003
        """Order settings that this method fixes at the first start of a training run, from its batch sizes."""
        return {}

    @classmethod
    def setting_problems(cls, config: OrderConfig) -> list[str]:  # noqa: ARG003
        """Sentences on settings that this method lacks; empty if none is missing."""
        return []

    @classmethod
    def shard_groups(cls, snapshot: Snapshot) -> Sequence[NDArray[np.int64]]:
        """The shard sizes of each set of shards that has an order of its own: here each stream."""
        return snapshot.shard_sizes

    @classmethod
    def active_shards(cls, run: RunOrder) -> int:
        """Shards that must be at hand at once: w for each canonical node of each group."""
        most = run.config.canonical_nodes * run.config.window if run.config.shuffle else 1
        return sum(min(most, len(sizes)) for sizes in cls.shard_groups(run.snapshot))

    @classmethod
    @abstractmethod
    def make(cls, run: RunOrder, epoch: int) -> EpochOrder:
        """The order of one epoch of a run."""

    @abstractmethod
    def ids(self, begin: int, end: int) -> NDArray[np.int64]:
        """Sample ids at positions [begin, end): int64[end - begin]. O(range + window)."""

    @abstractmethod
    def canonical(self, begin: int, end: int) -> NDArray[np.int64]:
        """The canonical node of each position in [begin, end): what ranks are grouped by."""

    def cut(self, batch_size: int, world: World, tail: Tail, start: int) -> GlobalBatches:
        """Cut the epoch into global batches, see `BatchPlan`."""
        return GlobalBatches(self, batch_size, world, tail, start)

    def check_range(self, begin: int, end: int) -> None:
        """Refuse positions outside the epoch."""
        if not 0 <= begin <= end <= self.num_samples:
            raise ValueError(
                f"Positions must be within the epoch, [0, {self.num_samples}); [{begin}, {end}) was asked."
            )


class GlobalBatches:
    """The global batches of an epoch from a position on, and one replica's part of each; see `BatchPlan`.

    With ``tail="exact"`` a remainder smaller than the replicas takes from the batch before it what they lack, so that
    none of them repeats a sample.

    Raises:
        ValueError: The order cannot be cut like this; every problem is named.
    """

    def __init__(self, order: EpochOrder, batch_size: int, world: World, tail: Tail, start: int) -> None:
        self._order, self._batch_size, self._world, self._tail, self._start = order, batch_size, world, tail, start
        problems = self._problems()
        if problems:
            raise ValueError("The batches of an epoch cannot be planned. " + " ".join(problems))
        self._cut()

    def _cut(self) -> None:
        self.num_full = max(0, self._order.full_end - self._start) // self._batch_size
        at = self._start + self.num_full * self._batch_size
        self._ends: tuple[int, ...] = ()  # of the batches behind the full ones
        if self._tail != "drop" and at < self._order.num_samples:
            self._ends = self._remainder_ends(at)

    def _remainder_ends(self, at: int) -> tuple[int, ...]:
        """Ends of the batches behind position ``at``, where no full batch is left before ``full_end``."""
        total = self._order.num_samples
        ends = (*range(at + self._batch_size, total, self._batch_size), total)
        return self._level(at, ends) if self._tail == "exact" else ends

    def _level(self, at: int, ends: tuple[int, ...], least: int = 0) -> tuple[int, ...]:
        """Move the last border back, to ``least`` at most, where fewer samples than replicas lie behind it."""
        border = ends[-1] - self._world.num_replicas
        if (len(ends) == 1 and not self.num_full) or border < least or border >= (at, *ends)[-2]:
            return ends
        self.num_full -= len(ends) == 1
        return (*ends[:-2], border, ends[-1])

    @property
    def num_batches(self) -> int:
        """Global batches."""
        return self.num_full + len(self._ends)

    @property
    def end(self) -> int:
        """The position behind the last batch."""
        return self._ends[-1] if self._ends else self._start + self.num_full * self._batch_size

    @property
    def follows_order(self) -> bool:
        """Whether the batches hold the samples of the order in its places."""
        return True

    def bounds(self, k: int) -> tuple[int, int]:
        """First position of global batch ``k``, and the one behind its last."""
        first = self._start + min(k, self.num_full) * self._batch_size
        if k < self.num_full:
            return first, first + self._batch_size
        at = k - self.num_full
        return (self._ends[at - 1] if at else first), self._ends[at]

    def ids(self, k: int) -> NDArray[np.int64]:
        """Sample ids of global batch ``k`` in position order."""
        return self._order.ids(*self.bounds(k))

    def share(self, k: int) -> ReplicaBatch:
        """This replica's part of global batch ``k``."""
        begin, end = self.bounds(k)
        world = self._world
        canonical = self._order.canonical(begin, end)
        offsets, filler = split(canonical, world.num_replicas, world.replica, equal=self._tail != "exact")
        return ReplicaBatch(self._order.ids(begin, end)[offsets], begin + offsets, filler)

    def shares(self, ks: Sequence[int]) -> list[ReplicaBatch]:
        """This replica's part of each of these batches, ascending: as :meth:`share`, but full ones planned together."""
        count = bisect_left(ks, self.num_full)
        if count < 2:
            return [self.share(k) for k in ks]
        size, replicas, replica = self._batch_size, self._world.num_replicas, self._world.replica
        first, end = self._start + ks[0] * size, self._start + (ks[count - 1] + 1) * size
        begins = (np.array(ks[:count], dtype=np.int64)[:, None] - ks[0]) * size
        canonical = self._order.canonical(first, end)[begins + np.arange(size)]
        if (canonical == canonical[0]).all():
            canonical = canonical[:1]  # usually C divides B, and all batches are grouped alike
        grouped = np.argsort(canonical, axis=1, kind="stable")
        offsets = begins + grouped[:, size * replica // replicas : size * (replica + 1) // replicas]
        filler = np.zeros(offsets.shape, dtype=np.bool_)
        full = map(ReplicaBatch, self._order.ids(first, end)[offsets], first + offsets, filler)
        return [*full, *map(self.share, ks[count:])]

    def num_micro_batches(self, k: int, device_batch_size: int) -> int:
        """See `BatchPlan.num_micro_batches`."""
        begin, end = self.bounds(k)
        return num_micro_batches(end - begin, device_batch_size, self._world.num_replicas)

    def _problems(self) -> list[str]:
        """Sentences on what forbids cutting this order this way; empty if nothing does."""
        problems, total = [], self._order.num_samples
        batch_size, replicas = self._batch_size, self._world.num_replicas
        if self._tail not in TAILS:
            problems.append(f"tail must be one of {', '.join(TAILS)}, not {self._tail!r}.")
        if not 0 <= self._start <= total:
            problems.append(f"start must be within the epoch, [0, {total}], not {self._start}.")
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
