"""Where the global batches of an epoch end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property

from .rows import ByLength


class Cuts:
    """Where global batches end, counted from a start: batches of B samples, and explicit ends behind them.

    Args:
        start, batch_size: The first position, and B.
        reaches: Whether positions are cut into batches of B up to this one, known without `listed`.
        listed: The number of batches of B, and the ends of those behind them; asked for when it is needed.
    """

    def __init__(
        self,
        start: int,
        batch_size: int,
        reaches: Callable[[int], bool],
        listed: Callable[[], tuple[int, Sequence[int]]],
    ) -> None:
        self.start = start
        self._batch_size = batch_size
        self._reaches = reaches
        self._listed = listed
        self._num_known = 0  # whole batches, at least: asking costs as much as the rest of planning a batch

    @cached_property
    def _ends(self) -> tuple[int, Sequence[int]]:
        return self._listed()

    @property
    def num_whole(self) -> int:
        """How many batches, from the first on, have the regular size."""
        return self._ends[0]

    @property
    def num_batches(self) -> int:
        """All batches."""
        return self._ends[0] + len(self._ends[1])

    def is_whole(self, k: int) -> bool:
        """Whether batch ``k`` has the regular size, and no tail changes it. Cheap far from the epoch's end."""
        if k < self._num_known:
            return True
        if self._reaches(self.start + (k + 1) * self._batch_size):
            self._num_known = k + 1
            return True
        return k < self.num_whole

    def end_of(self, k: int) -> int | None:
        """The position behind batch ``k``; None if there is no such batch. Cheap far from the epoch's end."""
        if self.is_whole(k):
            return self.start + (k + 1) * self._batch_size
        num_whole, ends = self._ends
        return ends[k - num_whole] if k < num_whole + len(ends) else None

    def bounds(self, k: int) -> tuple[int, int]:
        """The first position of batch ``k``, and the one behind its last; ValueError if there is no such batch."""
        begin = self.end_of(k - 1) if k > 0 else self.start
        end = None if k < 0 else self.end_of(k)
        if begin is None or end is None:
            raise ValueError(f"Global batches count from 0 to {self.num_batches - 1} here; found {k}.")
        return begin, end


class CountedCuts(Cuts):
    """The batches of a budget of tokens: counted window by window, as far as they are asked for.

    ``last`` is the position behind the last batch.
    """

    def __init__(self, order: ByLength, start: int, last: int) -> None:
        self.start = start
        self._order = order
        self._last = last

    @cached_property
    def _done(self) -> int:
        """The batches that end at or before the start."""
        return self._order.batches_before(self.start) or 0

    @property
    def num_whole(self) -> int:
        order = self._order
        count = order.num_batches - self._done
        return count - (count > 0 and self._last < order.size)

    @property
    def num_batches(self) -> int:
        return self.num_whole

    def is_whole(self, k: int) -> bool:
        return self.end_of(k) is not None

    def end_of(self, k: int) -> int | None:
        end = self._order.end_of_batch(self._done + k)
        return end if end is not None and end <= self._last else None
