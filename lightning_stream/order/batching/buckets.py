"""Samples of similar lengths together: an epoch's order, rearranged within windows by the samples' lengths.

Padding a batch to its longest sample is cheap if all are about as long. Window w has the positions [wW, (w+1)W) of the
order below. Its samples are sorted by length and divided over its global batches, which keep a random order. Every
position keeps its canonical node and its stream: machines read the same shards as without, and mixtures stay exact.

    lengths in the order below   9 2 7 3 | 8 1 2 9 | 3 8 1 7     a window of three batches
    sorted, in batches           1 1 2 2 | 3 3 7 7 | 8 8 9 9
    permuted                     8 8 9 9 | 1 1 2 2 | 3 3 7 7

With a budget of tokens, batches differ in size: each takes the longest samples left, as many as the budget has room for
if all are padded to the longest one.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_stream.lazy import kept
from lightning_stream.order.batching.base import BatchPlan, EpochOrder
from lightning_stream.order.batching.packed import Landmark, WindowCounts
from lightning_stream.order.permutation import RngStream, permutation
from lightning_stream.order.rank_split import ceil_div
from lightning_stream.order.rules import TEXT, Rule, count, violations

if TYPE_CHECKING:
    from lightning_stream.order.plan import RunOrder

_KEPT_WINDOWS = 3
_WINDOW = 16384
_BATCHES = 64  # in a window, at least
_MULTIPLES = (1, 2, 4, 8, 16)  # so that 16 devices or fewer, as a power of two, have equal shares
_MOST = 2**31 - 1


@dataclass(frozen=True)
class LengthBuckets:
    """How samples of similar lengths come together. Make one with :meth:`resolved`, which chooses what is None.

    Args:
        window: W, samples that are sorted by length together, a multiple of ``batch_size``.
        batch_size: B of the run's first start. With a budget: what the sizes of all batches are multiples of.
        batch_tokens: Tokens of a global batch at most, if its samples are padded to the longest; None: batches of B.
        lengths: A digest of the samples' lengths, by which a state recognises other data.

    Raises:
        ValueError: A value that is not allowed; all of them are named.

    Example::

        LengthBuckets.resolved(np.array([512, 2000]), batch_size=None, batch_tokens=65536)
    """

    window: int
    batch_size: int
    batch_tokens: int | None = None
    lengths: str = ""

    def __post_init__(self) -> None:
        problems = violations(vars(self), _RULES)
        if not problems and self.window % self.batch_size:
            problems = [f"window must be a multiple of batch_size, {self.batch_size}; found {self.window}."]
        if problems:
            raise ValueError(f"Samples cannot be sorted by length this way. {' '.join(problems)}")

    @classmethod
    def resolved(
        cls,
        lengths: NDArray[np.integer],
        *,
        batch_size: int | None,
        window: int | None = None,
        batch_tokens: int | None = None,
        digest: str = "",
        resumed: LengthBuckets | None = None,
    ) -> LengthBuckets:
        """Choose what is None, from the data and the run's first start alone.

        Args:
            lengths: Those of all samples: 1-d.
            batch_size: As above; with a budget, None means the largest power of two up to 16 that it has room for.
            window: Rounded up to whole batches; None means 16,384, or 64 batches where these are more.
            resumed: The settings of the state to resume from.

        Raises:
            ValueError: The budget has no room for ``batch_size`` samples of the greatest length.
        """
        longest, usual = int(lengths.max(initial=1)), batch_size or 1
        if batch_tokens is not None:
            room = batch_tokens // max(longest, 1)
            multiple = batch_size or max(one for one in _MULTIPLES if one <= max(room, 1))
            if multiple > room:
                raise ValueError(
                    f"batch_tokens must have room for {multiple} samples of the greatest length, {longest:,}, which is "
                    f"{multiple * longest:,}; found {batch_tokens:,}. Raise it, omit long samples with filter_lengths, "
                    "or lower batch_multiple"
                )
            batch_size, usual = multiple, batch_tokens // max(1, int(lengths.mean() if len(lengths) else 1))
        elif resumed is not None:
            batch_size = resumed.batch_size
        batch_size = batch_size or 1
        if window is None:
            window = max(_WINDOW, _BATCHES * usual) if resumed is None else resumed.window
        return cls(ceil_div(window, batch_size) * batch_size, batch_size, batch_tokens, digest)

    def order(self, run: RunOrder, samples: EpochOrder) -> BucketOrder:
        """An epoch in this arrangement."""
        return (BucketOrder if self.batch_tokens is None else BudgetOrder)(run, samples, self)


_RULES: dict[str, Rule] = {
    "window": count(1, _MOST),
    "batch_size": count(1, _MOST),
    "batch_tokens": count(1, 2**62, optional=True),
    "lengths": TEXT,
}


class _Window(NamedTuple):
    """A planned window: the sample and the canonical node of each position, and where its batches end."""

    ids: NDArray[np.int64]
    nodes: NDArray[np.int64]
    ends: tuple[int, ...] = ()


class BucketOrder(EpochOrder):
    """An epoch whose global batches have samples of similar lengths, as an order of its own.

    Args:
        run: The order of the run, which has the lengths.
        samples: The order whose windows are rearranged.
        buckets: How they are rearranged.
    """

    def __init__(self, run: RunOrder, samples: EpochOrder, buckets: LengthBuckets) -> None:
        assert run.lengths is not None
        self.epoch, self.num_samples, self.full_end = samples.epoch, samples.num_samples, samples.full_end
        self._samples, self._buckets, self._lengths, self._snapshot = samples, buckets, run.lengths, run.snapshot
        self._key = (run.config.seed, samples.epoch) if run.config.shuffle else None
        self._windows: dict[int, _Window] = {}
        self.num_windows = ceil_div(self.num_samples, buckets.window)
        self.arranged_together = buckets.window

    def ids(self, begin: int, end: int) -> NDArray[np.int64]:
        return np.concatenate([np.empty(0, dtype=np.int64), *(one.ids[at] for one, at in self._parts(begin, end))])

    def canonical(self, begin: int, end: int) -> NDArray[np.int64]:
        return np.concatenate([np.empty(0, dtype=np.int64), *(one.nodes[at] for one, at in self._parts(begin, end))])

    def _parts(self, begin: int, end: int) -> Iterator[tuple[_Window, slice]]:
        """The windows of [begin, end), and what each has of it."""
        self.check_range(begin, end)
        size = self._buckets.window
        for number in range(begin // size, ceil_div(end, size)):
            first = number * size
            yield self.window(number), slice(max(begin - first, 0), end - first)

    @property
    def drawn(self) -> EpochOrder:
        return self._samples

    def settled(self, position: int) -> int:
        return min(ceil_div(position, self._buckets.window) * self._buckets.window, self.num_samples)

    def positions(self, sample_id: int) -> list[int]:
        size = self._buckets.window
        windows = sorted({at // size for at in self._samples.positions(sample_id)})
        return [
            at for one in windows for at in (one * size + np.flatnonzero(self.window(one).ids == sample_id)).tolist()
        ]

    def window(self, number: int) -> _Window:
        """A window of the epoch; the last few are kept."""
        return kept(self._windows, number, self._plan, _KEPT_WINDOWS)

    def _bounds(self, number: int) -> tuple[int, int]:
        begin = number * self._buckets.window
        return begin, min(begin + self._buckets.window, self.num_samples)

    def _plan(self, number: int) -> _Window:
        begin, end = self._bounds(number)
        ids, nodes = self._samples.ids(begin, end), self._samples.canonical(begin, end)
        group = nodes * self._snapshot.num_streams + self._snapshot.streams_of(ids)
        size = self._buckets.batch_size
        # The batch of each position, by its place in the order of lengths; a last partial batch stays the last.
        turn = np.append(self._turns(number, (end - begin) // size), (end - begin) // size)
        places = np.lexsort((np.repeat(turn, size)[: end - begin], group))
        ids[places] = ids[np.lexsort((self._lengths[ids], group))]
        return _Window(ids, nodes)

    def _turns(self, number: int, count: int) -> NDArray[np.int64]:
        """The permutation of the batches of a window."""
        if self._key is None:
            return np.arange(count)
        return permutation(RngStream.BUCKETS, *self._key, number, size=count)


class BudgetPlan(BatchPlan):
    """The global batches of a `BudgetOrder`: counted window by window, as far as they are asked for."""

    order: BudgetOrder
    must_divide = False

    @cached_property
    def _counts(self) -> tuple[WindowCounts, int]:
        """What counts the batches from the start's window on, and how many of these end at or before the start."""
        window = self.order.window_of(self.start)
        counts = WindowCounts(self.order.num_windows, self.order.num_batches)
        counts.learn(window, 0, self.order.num_batches(window))
        return counts, bisect_right(self.order.ends(window), self.start)

    def _end_of(self, k: int) -> int | None:
        """The position behind batch ``k``; None if there is no such batch. Plans windows until that is known."""
        counts, done = self._counts
        window, before, behind = counts.find(done + k)
        if before == behind:
            return None
        end = self.order.ends(window)[done + k - before]
        return end if end <= self._last else None

    @property
    def _last(self) -> int:
        """The position behind the last batch."""
        total = self.order.num_samples
        return total - total % self.batch_size if self.tail == "drop" else total

    def is_whole(self, k: int) -> bool:
        return self._end_of(k) is not None

    def _cut(self) -> tuple[int, tuple[int, ...]]:
        counts, done = self._counts
        count = counts.before(self.order.num_windows) - done
        return count - (count > 0 and self._last < self.order.num_samples), ()

    @property
    def end(self) -> int:
        return max(self.start, self._last)

    def bounds(self, k: int) -> tuple[int, int]:
        if k < 0 or (end := self._end_of(k)) is None:
            raise ValueError(f"Global batches count from 0 to {self.num_batches - 1} here; found {k}.")
        begin = self._end_of(k - 1) if k else self.start
        assert begin is not None
        return begin, end

    def num_micro_batches(self, k: int, device_batch_size: int) -> int:
        return self.accumulate


class BudgetOrder(BucketOrder):
    """An epoch whose global batches have as many samples of similar lengths as a budget of tokens has room for.

    The sizes of batches are multiples of ``batch_size``, except for the last one of the epoch.
    """

    plan_type = BudgetPlan
    splits_samples = False  # no two batches need have one size

    def __init__(self, run: RunOrder, samples: EpochOrder, buckets: LengthBuckets) -> None:
        super().__init__(run, samples, buckets)
        self.full_end = self.num_samples
        self._counts = WindowCounts(self.num_windows, self.num_batches)

    def _plan(self, number: int) -> _Window:
        begin, end = self._bounds(number)
        ids, nodes = self._samples.ids(begin, end), self._samples.canonical(begin, end)
        # The longest samples first; every node gives one in turn.
        by_node = np.lexsort((-self._lengths[ids].astype(np.int64), nodes))
        starts = np.searchsorted(nodes[by_node], nodes[by_node])
        order = by_node[np.lexsort((nodes[by_node], np.arange(len(ids)) - starts))]
        ids, nodes = ids[order], nodes[order]
        longest = np.maximum.accumulate(self._lengths[ids][::-1])[::-1]  # of each sample and all behind it
        multiple, edges = self._buckets.batch_size, [0]
        while (left := len(ids) - edges[-1]) > 0:
            room = self._room(int(longest[edges[-1]]))
            edges.append(edges[-1] + min(room, left // multiple * multiple or left))
        batches = np.split(np.arange(len(ids)), edges[1:-1])
        rest = [batches.pop()] if len(ids) % multiple else []  # the last batch of the epoch
        batches = [batches[at] for at in self._turns(number, len(batches)).tolist()] + rest
        order = np.concatenate(batches)
        return _Window(ids[order], nodes[order], tuple((begin + np.cumsum([len(one) for one in batches])).tolist()))

    def _room(self, longest: int) -> int:
        """Samples of a batch whose longest has so many tokens."""
        tokens, multiple = self._buckets.batch_tokens, self._buckets.batch_size
        assert tokens is not None
        return max(1, tokens // max(longest, 1) // multiple) * multiple

    def samples_in(self, num_positions: int) -> int:
        """A batch counts as ``batch_size``, the least that it has; here as the mean of the first window."""
        ends = self.ends(0)
        return ceil_div(num_positions * ends[-1], len(ends) * self._buckets.batch_size) if ends else num_positions

    def window_of(self, position: int) -> int:
        """The window of a position; behind the last one, the number of all windows."""
        return position // self._buckets.window

    def ends(self, window: int) -> tuple[int, ...]:
        """The positions behind the batches of a window; none if there is no such window."""
        return self.window(window).ends if window < self.num_windows else ()

    def num_batches(self, window: int) -> int:
        """Batches of a window."""
        return len(self.ends(window))

    def batches_before(self, position: int) -> int:
        """Global batches from the epoch's begin that end at or before a position. Counts those of windows before it."""
        window = self.window_of(position)
        inside = bisect_right(self.ends(window), position) if position % self._buckets.window else 0
        return self._counts.before(window) + inside

    def landmark(self, position: int) -> Landmark:
        """What a state holds, so that a resume need not count the batches before it."""
        window = self.window_of(position)
        before, behind = (self._counts.before(at) for at in (window, min(window + 1, self.num_windows)))
        return Landmark(self.epoch, ((window, before, behind),) if window else ())

    def learn(self, landmark: Landmark) -> None:
        """Count batches from a landmark of this epoch, unless more is known already."""
        if landmark.epoch == self.epoch and len(landmark.windows) == 1:
            self._counts.learn(*landmark.windows[0])
