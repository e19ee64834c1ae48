"""The micro-batches of one rank over a `BatchPlan`, by number or one after another: pure arithmetic."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, islice

import numpy as np
from numpy.typing import NDArray

from lightning_stream.order.batching.base import BatchPlan
from lightning_stream.order.ledger import Substitution
from lightning_stream.order.rank_split import ReplicaBatch

_PLANNED_SAMPLES = 1 << 14  # planned together: fewer cost more each, more would keep the first batch waiting


@dataclass(frozen=True)
class Place:
    """Where a micro-batch stands in its epoch; known without planning a sample.

    Attributes:
        epoch: The epoch it belongs to.
        begin, end: The positions [begin, end) of its global batch, i.e. of its optimizer step.
        completes_step, ends_epoch: Whether it is the last micro-batch of that step, or of the epoch, on this rank.
    """

    epoch: int
    begin: int
    end: int
    completes_step: bool
    ends_epoch: bool


@dataclass(frozen=True)
class MicroBatch(Place):
    """What a micro-batch is made of, and where it stands in the epoch.

    Attributes:
        ids: Sample ids, int64[n].
        positions: Their positions in the epoch, int64[n].
        filler: bool[n]; True where a sample is padding: a repeat that must not count.
        substitutions: Where another sample was delivered than `ids` says, because that one could not be read.
    """

    ids: NDArray[np.int64]
    positions: NDArray[np.int64]
    filler: NDArray[np.bool_]
    substitutions: tuple[Substitution, ...] = ()

    @property
    def delivered(self) -> NDArray[np.int64]:
        """int64[n]: the sample ids that are delivered, after substitutions."""
        if not self.substitutions:
            return self.ids
        instead = {(one.position, one.drawn): one.delivered for one in self.substitutions}
        pairs = zip(self.positions.tolist(), self.ids.tolist(), strict=True)
        return np.array([instead.get(pair, pair[1]) for pair in pairs], np.int64)

    @property
    def num_samples(self) -> int:
        """Samples that count: padding excluded."""
        return int(self.filler.size - np.count_nonzero(self.filler))

    @property
    def num_substituted(self) -> int:
        """Samples that another one was delivered for: padding excluded."""
        return int(np.count_nonzero((self.delivered != self.ids) & ~self.filler)) if self.substitutions else 0

    def without_padding(self) -> MicroBatch:
        """The samples that count; one row of padding where there are none, since a batch cannot be empty."""
        if not self.filler.any():
            return self
        keep = ~self.filler if self.num_samples else np.arange(self.filler.size) == 0
        return replace(self, ids=self.ids[keep], positions=self.positions[keep], filler=self.filler[keep])


class MicroBatches:
    """The micro-batches of one rank from a plan's start to the end of its epoch.

    Args:
        plan: The global batches.
        device_batch_size: Samples of a micro-batch on one device.
        padding: Whether padding is delivered where a rank has samples of its own, so that all shapes are equal.

    Example::

        batches = MicroBatches(BatchPlan(run.epoch(0), batch_size=32), device_batch_size=8)
        assert len(batches) == 4 * batches.plan.num_batches
        batches[5].ids  # the sample ids of the sixth micro-batch, planned on its own
    """

    def __init__(self, plan: BatchPlan, device_batch_size: int, padding: bool = True) -> None:
        self.plan, self._size, self._padding = plan, device_batch_size, padding
        self._pieces = plan.num_micro_batches(0, device_batch_size) if plan.num_whole_batches else 0
        self._num_whole = plan.num_whole_batches * self._pieces

    @cached_property
    def _rest_ends(self) -> list[int]:
        """Numbers behind the last micro-batch of each global batch that is not whole."""
        plan = self.plan
        rests = (plan.num_micro_batches(k, self._size) for k in range(plan.num_whole_batches, plan.num_batches))
        return [self._num_whole + end for end in accumulate(rests)]

    def __len__(self) -> int:
        return self._rest_ends[-1] if self._rest_ends else self._num_whole

    def _locate(self, j: int) -> tuple[int, int, int]:
        """Global batch of micro-batch j, its number within that batch, and how many the batch has."""
        if not 0 <= j < len(self):
            raise IndexError(f"micro-batches count from 0 to {len(self) - 1} here; {j} was asked")
        if j < self._num_whole:
            return j // self._pieces, j % self._pieces, self._pieces
        rest = bisect_right(self._rest_ends, j)
        first = self._rest_ends[rest - 1] if rest else self._num_whole
        return self.plan.num_whole_batches + rest, j - first, self._rest_ends[rest] - first

    def place(self, j: int) -> Place:
        """Where micro-batch j stands. O(1)."""
        k, piece, count = self._locate(j)
        return self._place(k, is_last_piece=piece == count - 1)

    def __getitem__(self, j: int) -> MicroBatch:
        """Micro-batch j, planned on its own. O(samples of its global batch)."""
        k, piece, count = self._locate(j)
        return self._made(k, self.plan.share(k).micro_batches(count)[piece], piece == count - 1)

    def walk(self, first: int = 0, step: int = 1) -> Iterator[MicroBatch]:
        """Yield micro-batches first, first + step, ...: many are planned together, which costs less than one by one.

        Worker w of n delivers those from w on in steps of n, as torch asks.
        """
        together = max(1, _PLANNED_SAMPLES // (self.plan.batch_size * step))
        own = self._own(first, step)
        while some := list(islice(own, together)):
            shares = self.plan.shares([k for k, _, _ in some])
            for (k, piece, count), share in zip(some, shares, strict=True):
                parts = share.micro_batches(count)
                for number in range(piece, count, step):
                    yield self._made(k, parts[number], is_last_piece=number == count - 1)

    def _own(self, first: int, step: int) -> Iterator[tuple[int, int, int]]:
        """The global batches that a walk comes by: which, its first micro-batch in it, and how many that has."""
        j = first
        while j < len(self):
            k, piece, count = self._locate(j)
            yield k, piece, count
            j += -(-(count - piece) // step) * step

    def _place(self, k: int, *, is_last_piece: bool) -> Place:
        begin, end = self.plan.bounds(k)
        return Place(self.plan.order.epoch, begin, end, is_last_piece, is_last_piece and k == self.plan.num_batches - 1)

    def _made(self, k: int, share: ReplicaBatch, is_last_piece: bool) -> MicroBatch:
        place = self._place(k, is_last_piece=is_last_piece)
        made = MicroBatch(**vars(place), ids=share.ids, positions=share.positions, filler=share.filler)
        return made if self._padding else made.without_padding()
