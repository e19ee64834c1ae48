"""Where the global batches of an epoch end."""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import cached_property

from lightning_stream.order.rows import ByLength, WindowCounts

_Rest = Callable[[int, int], Sequence[int]]


class Cuts(ABC):
    """Where global batches end, counted from a start. Those of one size come first."""

    start: int

    @property
    @abstractmethod
    def num_whole(self) -> int:
        """How many batches, from the first on, have the regular size."""

    @property
    @abstractmethod
    def num_batches(self) -> int:
        """All batches."""

    @property
    @abstractmethod
    def end(self) -> int:
        """The position behind the last batch."""

    @abstractmethod
    def is_whole(self, k: int) -> bool:
        """Whether batch ``k`` has the regular size, and no tail changes it. Cheap far from the epoch's end."""

    @abstractmethod
    def bounds(self, k: int) -> tuple[int, int]:
        """The first position of batch ``k``, and the one behind its last; ValueError if there is no such batch."""

    def has(self, k: int) -> bool:
        """Whether there is a batch ``k``. Cheap far from the epoch's end."""
        return self.is_whole(k) or k < self.num_batches

    def no_batch(self, k: int) -> ValueError:
        """The error where there is no batch ``k``."""
        return ValueError(f"Global batches count from 0 to {self.num_batches - 1} here; found {k}.")


class EvenCuts(Cuts):
    """Batches of B samples, and explicit ends behind them.

    Args:
        start, batch_size: The first position, and B.
        reaches: Whether positions are cut into batches of B up to this one, known without `rest`.
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

    @cached_property
    def _whole_and_ends(self) -> tuple[int, Sequence[int]]:
        return self._listed()

    @property
    def num_whole(self) -> int:
        return self._whole_and_ends[0]

    @property
    def num_batches(self) -> int:
        return self.num_whole + len(self._whole_and_ends[1])

    @property
    def end(self) -> int:
        ends = self._whole_and_ends[1]
        return ends[-1] if ends else self.start + self.num_whole * self._batch_size

    def is_whole(self, k: int) -> bool:
        return self._reaches(self.start + (k + 1) * self._batch_size) or k < self.num_whole

    def bounds(self, k: int) -> tuple[int, int]:
        if k < 0 or not self.has(k):
            raise self.no_batch(k)
        if self.is_whole(k):
            first = self.start + k * self._batch_size
            return first, first + self._batch_size
        whole, ends = self._whole_and_ends
        begin = ends[k - whole - 1] if k > whole else self.start + whole * self._batch_size
        return begin, ends[k - whole]


class CountedCuts(Cuts):
    """The batches of a budget of tokens: counted window by window, as far as they are asked for.

    ``last`` is the position behind the last batch.
    """

    def __init__(self, order: ByLength, start: int, last: int) -> None:
        self.start = start
        self._order = order
        self._last = last

    @cached_property
    def _counts(self) -> tuple[WindowCounts, int]:
        """What counts the batches from the start's window on, and how many of these end at or before the start."""
        window = self._order.window_of(self.start)
        ends = self._order.ends(window)
        counts = WindowCounts(self._order.num_windows, self._num_in, (window, 0, len(ends)))
        return counts, bisect_right(ends, self.start)

    def _num_in(self, window: int) -> int:
        return len(self._order.ends(window))

    def _end_of(self, k: int) -> int | None:
        """The position behind batch ``k``; None if there is no such batch. Plans windows until that is known."""
        counts, done = self._counts
        window, before, behind = counts.find(done + k)
        end = None if before == behind else self._order.ends(window)[done + k - before]
        return end if end is not None and end <= self._last else None

    @property
    def num_whole(self) -> int:
        counts, done = self._counts
        count = counts.before(self._order.num_windows) - done
        return count - (count > 0 and self._last < self._order.size)

    @property
    def num_batches(self) -> int:
        return self.num_whole

    @property
    def end(self) -> int:
        return max(self.start, self._last)

    def is_whole(self, k: int) -> bool:
        return self._end_of(k) is not None

    def bounds(self, k: int) -> tuple[int, int]:
        end = self._end_of(k) if k >= 0 else None
        begin = self._end_of(k - 1) if k > 0 else self.start
        if begin is None or end is None:
            raise self.no_batch(k)
        return begin, end
