"""The micro-batches of one rank over a `BatchPlan`, by number or one after another: pure arithmetic."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import KW_ONLY, dataclass
from functools import cached_property
from itertools import accumulate, islice
from typing import Any

import numpy as np

from .arrays import Ints
from .batches import BatchPlan
from .ledger import Substitution
from .orders import ceil_div
from .shares import ReplicaBatch, Samples

# Planned together, at most: fewer cost more each, more would keep the first batch waiting.
_PLANNED_SAMPLES = 1 << 14
_PLANNED_BATCHES = 64


@dataclass(eq=False)
class MicroBatch(Samples):
    """The samples of a micro-batch, and its place in the epoch."""

    _: KW_ONLY
    epoch: int
    begin: int  # the positions [begin, end) are those of its global batch, i.e. of its optimizer step
    end: int
    completes_step: bool  # whether it is the last micro-batch of that step on this rank
    ends_epoch: bool  # whether it is the last micro-batch of the epoch on this rank
    substitutions: tuple[Substitution, ...] = ()  # delivered in place of some `ids` that could not be read
    version: int = 0  # number of the version of the data in which its global batch begins

    @property
    def label(self) -> str:
        """Its place, for messages."""
        return f"epoch {self.epoch}, positions {self.begin} to {self.end}"

    @property
    def sample_ids(self) -> Ints:
        """The samples that must be read: substitutes in place of those that cannot be."""
        return self.delivered if self.rows is None else self.rows.ids

    @property
    def delivered(self) -> Ints:
        """int64[n]: the delivered sample ids, after substitutions."""
        if not self.substitutions:
            return self.ids
        instead = {(entry.position, entry.drawn): entry.delivered for entry in self.substitutions}
        pairs = zip(self.positions.tolist(), self.ids.tolist(), strict=True)
        return np.array([instead.get(pair, pair[1]) for pair in pairs], np.int64)

    @property
    def num_tokens(self) -> int:
        """Tokens of the rows that count; 0 where samples are not packed into rows."""
        if self.rows is None:
            return 0
        return int(self.rows.take(np.flatnonzero(~self.filler)).num_tokens.sum())

    @property
    def num_substituted(self) -> int:
        """Samples in whose place another one was delivered, padding excluded."""
        return int(np.count_nonzero((self.delivered != self.ids) & ~self.filler)) if self.substitutions else 0

    def __reduce__(self) -> tuple[Callable[..., MicroBatch], tuple[Any, ...]]:
        """Pickle its arrays as one: three take the worker that sends them and its trainer 12 us more."""
        values = vars(self).copy()
        arrays = [values.pop(name).tobytes() for name in ("ids", "positions", "filler")]
        return _unpacked, (b"".join(arrays), values)

    def without_padding(self) -> MicroBatch:
        """The samples that count; one row of padding if there are none, since a batch cannot be empty."""
        if not self.filler.any():
            return self
        return self.take(np.flatnonzero(~self.filler) if self.num_samples else slice(1))


def _unpacked(arrays: bytes, values: dict[str, Any]) -> MicroBatch:
    memory = bytearray(arrays)
    count = len(memory) // 17
    ids, positions = np.frombuffer(memory, np.int64, 2 * count).reshape(2, count)
    return MicroBatch(ids, positions, np.frombuffer(memory, np.bool_, offset=16 * count), **values)


class MicroBatches:
    """The micro-batches of one rank from a plan's start to the end of its epoch.

    Args:
        plan: The global batches.
        device_batch_size: Samples of a micro-batch on one device.
        padding: Whether a rank that has samples delivers padding too, so that all shapes are equal.

    Example::

        batches = MicroBatches(BatchPlan(run.epoch(0), batch_size=32), device_batch_size=8)
        assert len(batches) == 4 * batches.plan.num_batches
        batches[5].ids  # the sample ids of the sixth micro-batch, planned on its own
    """

    def __init__(self, plan: BatchPlan, device_batch_size: int, padding: bool = True) -> None:
        self.plan = plan
        self._size = device_batch_size
        self._padding = padding
        self._pieces = plan.num_micro_batches(0, device_batch_size) if plan.is_whole(0) else 1

    @cached_property
    def _ends(self) -> list[int]:
        """Numbers behind the last micro-batch of all whole global batches, and of each one behind them."""
        plan = self.plan
        num_whole = plan.num_whole_batches
        rests = (plan.num_micro_batches(k, self._size) for k in range(num_whole, plan.num_batches))
        return [*accumulate(rests, initial=num_whole * self._pieces)]

    def __len__(self) -> int:
        return self._ends[-1]

    def has(self, j: int) -> bool:
        """Whether there is a micro-batch j. Cheap far from the epoch's end, where `len` plans all packed rows."""
        return self._find(j) is not None

    def _find(self, j: int) -> tuple[int, int, int] | None:
        """Global batch of micro-batch j, its number within that batch, and how many the batch has; None if absent."""
        k, index = divmod(j, self._pieces)
        if k >= 0 and self.plan.is_whole(k):
            return k, index, self._pieces
        if not 0 <= j < len(self):
            return None
        rest = bisect_right(self._ends, j)
        first, end = self._ends[rest - 1 : rest + 1]
        return self.plan.num_whole_batches + rest - 1, j - first, end - first

    def __getitem__(self, j: int) -> MicroBatch:
        """Micro-batch j, planned on its own. O(samples of its global batch)."""
        if (located := self._find(j)) is None:
            raise IndexError(f"micro-batches count from 0 to {len(self) - 1} here; found {j}")
        k, index, count = located
        return next(self._made(k, self.plan.share(k), count, range(index, index + 1)))

    def walk(self, first: int = 0, step: int = 1) -> Iterator[MicroBatch]:
        """Yield micro-batches first, first + step, ...: many are planned together, which costs less than one by one.

        Worker w of n delivers those from w on in steps of n, as torch expects.
        """
        size = self.plan.order.order.samples_in(self.plan.batch_size)
        together = max(1, min(_PLANNED_BATCHES, _PLANNED_SAMPLES // (size * step)))
        batches = self._batches(first, step)
        while planned := list(islice(batches, together)):
            shares = self.plan.shares([k for k, _, _ in planned])
            yield from [
                batch
                for (k, index, count), share in zip(planned, shares, strict=True)
                for batch in self._made(k, share, count, range(index, count, step))
            ]

    def _batches(self, first: int, step: int) -> Iterator[tuple[int, int, int]]:
        """For each global batch of a walk: the result of `_find` for its first micro-batch in the walk."""
        j = first
        while (located := self._find(j)) is not None:
            yield located
            _, index, count = located
            j += ceil_div(count - index, step) * step

    def _made(self, k: int, share: ReplicaBatch, count: int, indices: range) -> Iterator[MicroBatch]:
        """Some of the micro-batches that a share is cut into."""
        epoch = self.plan.order
        begin, end = self.plan.bounds(k)
        parts = share.micro_batches(count)
        for index in indices:
            part = parts[index]
            is_last = index == count - 1
            made = MicroBatch(
                part.ids,
                part.positions,
                part.filler,
                part.rows,
                epoch=epoch.epoch,
                begin=begin,
                end=end,
                completes_step=is_last,
                ends_epoch=is_last and not self.plan.has(k + 1),
                version=epoch.order.version_at(begin),
            )
            yield made if self._padding else made.without_padding()
