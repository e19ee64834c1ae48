"""An order whose windows are planned one by one, by the samples' lengths: packed into rows, or sorted by length.

Window w has the positions [wW, (w+1)W) of the order below, and its plan is a pure function of their lengths. How many
rows (or batches of a budget of tokens) a window has is known once it is planned. So they are counted from the beginning
of the epoch, or from the windows that a state has counted.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Generic, TypeVar

import numpy as np

from lightning_stream.errors import StateError
from lightning_stream.lazy import cached

from .arrays import Integers, Ints, segment_of
from .balance import whole_costs
from .buckets import LengthBuckets
from .orders import Composed, Counted, Listed, Order, Windows, ceil_div, places_by, positions_of
from .packing import PackedWindow, RowPacking, RowSpans, sampled
from .permutation import RngStream, permutation, random_u64

Amounts = Callable[[Ints], Integers]  # of samples by their ids

_KEPT_WINDOWS = 3
_FEWEST_EVENED = 8
_ALTERNATIVES = 16
_ROWS_AT_ONCE = 1 << 14  # of which the spans are in memory together
_DOCUMENTS_AT_ONCE = 1 << 20
_ALL = 2**62


@dataclass(frozen=True)
class CountedWindows:
    """What a state has counted of an epoch: for each sequence a window, and the rows before it and before the next one.

    With a budget of tokens there is one sequence, and batches are counted. () is the beginning of the epoch.
    """

    epoch: int = 0
    windows: Windows = ()


@dataclass(frozen=True)
class PackedTotals:
    """What an epoch of rows holds. ``num_long`` documents have more tokens than a row; ``lost_tokens`` are theirs."""

    num_rows: int
    num_tokens: int
    padding: int
    num_long: int
    lost_tokens: int


class WindowCounts:
    """How many rows or batches come before each window, counted window by window as far as they are asked for.

    Threads may share it: what a window has never changes, so a number that two of them write stays the same.

    Args:
        num_windows: All of them.
        count_in: How many a window has.
        counted: Where to begin; None for the first window.
    """

    def __init__(self, num_windows: int, count_in: Callable[[int], int], counted: Counted | None = None) -> None:
        self.num_windows = num_windows
        self._count_in = count_in
        self._known: tuple[int, list[int]] = (0, [0])  # a window, and the count before it and before each later one
        if counted is not None and counted[0] <= num_windows:
            window, before, behind = counted
            self._known = (window, [before, behind] if behind > before else [before])

    @property
    def is_complete(self) -> bool:
        """Whether all are counted, from the first window on."""
        base, counts = self._known
        return not base and len(counts) > self.num_windows

    def up_to(self, most: int) -> int:
        """The smaller of ``most`` and the number of all."""
        _, counts = self._counted(count=most)
        return min(most, counts[-1])

    def before(self, window: int) -> int:
        """How many come before a window."""
        if window < self._known[0]:
            self._known = (0, [0])
        base, counts = self._counted(window)
        return counts[window - base]

    def find(self, index: int) -> Counted:
        """The window that has the row or batch of this index; behind the last one, the end."""
        if index < self._known[1][0]:
            self._known = (0, [0])
        base, counts = self._counted(count=index + 1)
        place = bisect_right(counts, index) - 1
        return base + place, counts[place], counts[min(place + 1, len(counts) - 1)]

    def _counted(self, window: int = _ALL, count: int = _ALL) -> tuple[int, list[int]]:
        """What is known, once it is counted what comes before a window, or so many are, or all."""
        base, counts = self._known
        last = len(counts) - 1
        while base + last < min(window, self.num_windows) and counts[last] < count:
            counts[last + 1 : last + 2] = [counts[last] + self._count_in(base + last)]  # a thread writes the same
            last += 1
        return base, counts


Planned = TypeVar("Planned")


class Regrouped(ABC, Generic[Planned]):
    """What plans the windows of an order one by one. ``key`` is (seed, epoch, ...); None keeps the order in them."""

    def __init__(self, below: Order, length: int, key: tuple[int, ...] | None) -> None:
        self._below = below
        self._length = length
        self._key = key
        self.num_windows = ceil_div(below.size, length)
        self._windows: dict[int, Planned] = {}

    def window(self, index: int) -> Planned:
        """The plan of a window; the last few are kept."""
        return cached(self._windows, index, self.plan, _KEPT_WINDOWS)

    @abstractmethod
    def plan(self, index: int) -> Planned:
        """Plan a window, from what the order below has in its place."""

    def positions(self, window: int) -> Ints:
        """The positions of a window in the order below."""
        begin = window * self._length
        return positions_of(begin, min(begin + self._length, self._below.size))

    def permuted(self, purpose: RngStream, index: int, count: int) -> Ints:
        """The random order of what a window was divided into."""
        return np.arange(count) if self._key is None else permutation(purpose, *self._key, index, size=count)


class PackedSequence(Regrouped[PackedWindow]):
    """The rows of one sequence of samples.

    Args:
        documents: All of them are packed, so a sample that is drawn twice is packed twice.
        lengths: Tokens of every sample by its id: a 1-d array of integers, in memory or memory-mapped.
        packing: How documents are packed.
        key: (seed, epoch, number of the sequence); None keeps the rows of a window in the order of their documents.
        counted: A window from which on rows are counted; None for the first one.
        even: What a sample has, of which the rows of a window are to have equally much wherever it is cut: they are
            `alternated` by it. True: they are `evened` by what attention costs in them, as in older states.
    """

    def __init__(
        self,
        documents: Order,
        lengths: Integers,
        packing: RowPacking,
        key: tuple[int, ...] | None,
        counted: Counted | None = None,
        even: Amounts | bool = False,
    ) -> None:
        super().__init__(documents, packing.window, key)
        self._lengths = lengths
        self._packing = packing
        self._even = even
        self._rows: dict[int, RowSpans] = {}
        self.counts = WindowCounts(self.num_windows, lambda index: self.window(index).num_rows, counted)

    @property
    def size(self) -> int:
        """All rows. This counts those of every window."""
        return self.counts.up_to(_ALL)

    def plan(self, index: int) -> PackedWindow:
        ids = self._below.ids(self.positions(index))
        return PackedWindow(ids, self._lengths[ids], self._packing)

    def rows(self, window: int) -> RowSpans:
        """The rows of a window."""
        return cached(self._rows, window, self._made_rows, _KEPT_WINDOWS)

    def _made_rows(self, window: int) -> RowSpans:
        rows = self.window(window).rows()
        order = self.permuted(RngStream.ROWS, window, len(rows))
        if callable(self._even):
            amounts = whole_costs(self._even(rows.ids), len(rows.ids))
            order = alternated(order, np.add.reduceat(amounts, rows.edges[:-1]))
        elif self._even:
            order = evened(order, np.add.reduceat(rows.num_tokens**2, rows.edges[:-1]))
        return rows.take(order)

    def spans(self, at: Ints) -> RowSpans:
        """The spans of some rows, in this order."""
        spans = []
        places = []
        ordered = np.sort(at)
        while len(ordered):
            window, before, behind = self.counts.find(int(ordered[0]))
            rows = self.rows(window)
            if len(rows) != behind - before:
                raise StateError(
                    f"The counted windows of a state must be of its order: window {window} has {len(rows)} rows, not "
                    f"{behind - before}. The state is damaged; load another checkpoint."
                )
            places.append(np.flatnonzero((at >= before) & (at < behind)))
            spans.append(rows.take(at[places[-1]] - before))
            ordered = ordered[np.searchsorted(ordered, behind) :]
        return RowSpans.joined(spans, places)

    def rows_with(self, sample_id: int, window: int) -> list[int]:
        """The rows of a window that have a sample, each once. Counts the rows of all windows before it."""
        rows = self.rows(window)
        inside = segment_of(rows.edges, np.flatnonzero(rows.ids == sample_id))
        numbers: list[int] = (self.counts.before(window) + np.unique(inside)).tolist()
        return numbers


def evened(order: Ints, costs: Ints) -> Ints:
    """A random order changed so that every part of it costs nearly the same, however long global batches are.

    Of the two most expensive things the first goes into the first half of the order and the other into the second, then
    of the next two; and so on in each half. So canonical nodes, which are balanced each by itself, have nearly equal
    work in a global batch.

    Args:
        order: int64[n], numbers of things.
        costs: int64, of each thing.
    """
    if len(order) < _FEWEST_EVENED:
        return order
    ranked = np.argsort(-costs[order], kind="stable")
    is_first = np.zeros(len(order), np.bool_)
    is_first[ranked[: len(order) // 2 * 2].reshape(-1, 2).min(axis=1)] = True
    return np.concatenate([evened(order[is_first], costs), evened(order[~is_first], costs)])


def alternated(order: Ints, costs: Ints) -> Ints:
    """A random order changed so that the things up to any place cost their share of all, within about one thing.

    Where they cost less than their share, the next thing that costs more than the mean follows; else the next other.
    """
    excess = costs[order] * len(order) - costs.sum()
    dear = iter(np.flatnonzero(excess > 0).tolist())
    cheap = iter(np.flatnonzero(excess <= 0).tolist())
    above = excess.tolist()
    places: list[int] = []
    total = 0
    while len(places) < len(order):
        place = next(dear, None) if total <= 0 else None
        place = next(cheap, None) if place is None else place
        place = next(dear) if place is None else place
        places.append(place)
        total += above[place]
    return order[np.array(places, np.int64)]


class PackedRows(Order):
    """The rows of an epoch: `ids` are fingerprints of rows, and `spans` is what they hold.

    The documents are divided into several sequences, each packed by itself. These give one row each, one after another;
    those that have rows left at the end of the epoch continue. A sequence is one canonical node, or several in a small
    epoch. If all nodes were packed together, every row would have documents of all nodes, and every machine would
    download all the data. ::

        sequence 0   a0 a1 a2 a3 a4          position   0  1  2  3  4  5  6  7  8  9 10
        sequence 1   b0 b1 b2 b3 b4 b5       row       a0 b0 a1 b1 a2 b2 a3 b3 a4 b4 b5

    Args:
        documents: The order of the samples that are packed.
        lengths, packing: See `PackedSequence`.
        key: (seed, epoch); None where samples are not shuffled.
        counted: The `CountedWindows` of a state; those of another number of sequences are ignored.
        even: See `PackedSequence`.
    """

    def __init__(
        self,
        documents: Order,
        lengths: Integers,
        packing: RowPacking,
        key: tuple[int, int] | None,
        counted: Windows,
        even: Amounts | bool,
    ) -> None:
        self._documents = documents
        self._lengths = lengths
        self._packing = packing
        parts = documents.sequences(max(1, documents.size // packing.window))
        starts = counted if len(counted) == len(parts) else [None] * len(parts)
        self._sequences = [
            PackedSequence(part, lengths, packing, key and (*key, index), start, even)
            for index, (part, start) in enumerate(zip(parts, starts, strict=True))
        ]

    @property
    def below(self) -> Order:
        return self._documents

    @property
    def size(self) -> int:  # type: ignore[override]
        """Rows of the epoch. This counts those of every window that was not counted before."""
        return int(self._borders[2][-1])

    @property
    def is_counted(self) -> bool:
        return all(sequence.counts.is_complete for sequence in self._sequences)

    def reaches(self, position: int) -> bool:
        """Whether there are so many rows. Counts those of windows of all sequences until that is known."""
        return self._all_have(ceil_div(position, len(self._sequences))) or position <= self.size

    def _all_have(self, num_rows: int) -> bool:
        """Whether every sequence has so many rows."""
        return all(sequence.counts.up_to(num_rows) == num_rows for sequence in self._sequences)

    @cached_property
    def _borders(self) -> tuple[Ints, Ints, Ints]:
        """The rows of each sequence; the numbers of rows after which some of them end; and the positions of these."""
        totals = np.array([sequence.size for sequence in self._sequences], np.int64)
        rows = np.unique(np.append(0, totals))
        return totals, rows, np.minimum(totals, rows[:, None]).sum(axis=1)

    def locate(self, at: Ints) -> tuple[Ints, Ints]:
        """The sequence of each position, and its row there."""
        last = int(at.max(initial=-1))
        if not self.reaches(last + 1):
            raise ValueError(f"Positions must be within the epoch, [0, {self.size}); found {last}.")
        row, sequence = np.divmod(at, len(self._sequences))
        if not self._all_have(int(row.max(initial=-1)) + 1):
            totals, rows, begins = self._borders
            for border, here in places_by(segment_of(begins, at)):
                left = np.flatnonzero(totals > rows[border])
                rounds, inside = np.divmod(at[here] - begins[border], len(left))
                row[here] = rows[border] + rounds
                sequence[here] = left[inside]
        return sequence, row

    def spans(self, at: Ints) -> RowSpans:
        sequence, row = self.locate(at)
        groups = list(places_by(sequence))
        spans = [self._sequences[index].spans(row[places]) for index, places in groups]
        return RowSpans.joined(spans, [places for _, places in groups])

    def ids(self, at: Ints) -> Ints:
        parts = np.split(at, range(_ROWS_AT_ONCE, len(at), _ROWS_AT_ONCE))
        return np.concatenate([self.spans(part).fingerprints() for part in parts])

    def nodes(self, at: Ints) -> Ints:
        return self.locate(at)[0]

    @property
    def num_sequences(self) -> int:
        """How many are packed separately: their canonical nodes."""
        return len(self._sequences)

    def find(self, sample_id: int) -> list[int]:
        """All positions whose rows hold a sample. Counts the rows of the windows before it."""
        places = [divmod(at, len(self._sequences)) for at in self._documents.find(sample_id)]
        windows = {(sequence, inside // self._packing.window) for inside, sequence in places}
        rows = [
            (place, row) for place, window in windows for row in self._sequences[place].rows_with(sample_id, window)
        ]
        return sorted(self._position(sequence, row) for sequence, row in rows)

    def _position(self, sequence: int, row: int) -> int:
        """The inverse of `locate`."""
        if self._all_have(row + 1):
            return row * len(self._sequences) + sequence
        totals = self._borders[0]
        return int(np.minimum(totals, row).sum() + (totals[:sequence] > row).sum())

    def cursor(self, position: int) -> Windows:
        """What a state holds, so that a resume at this position plans few windows; () at the beginning."""
        last = len(self._sequences)
        row = _ALL
        if self.reaches(position + 1):
            (last,), (row,) = self.locate(np.array([position]))
        windows = []
        for index, sequence in enumerate(self._sequences):
            rows = sequence.counts.up_to(int(row) + (index < last))  # that come before the position
            window, before, behind = sequence.counts.find(rows)
            # A change of the mixture may still change the rows of a window that is not begun.
            windows.append((window, before, before if rows == before else behind))
        return tuple(windows) if position else ()

    def unchanged_from(self, position: int) -> int:
        """The end of all windows that a row before the position is of."""
        begun = [window + (behind > before) for window, before, behind in self.cursor(position)]
        together = self._packing.window * len(self._sequences)
        return min(max(begun, default=0) * together, self._documents.size)

    def totals(self) -> PackedTotals:
        """Count the rows of the epoch and what they hold. This plans every window that was not counted before."""
        tokens = num_long = lost = 0
        for begin in range(0, self._documents.size, _DOCUMENTS_AT_ONCE):
            at = positions_of(begin, min(begin + _DOCUMENTS_AT_ONCE, self._documents.size))
            lengths = self._lengths[self._documents.ids(at)]
            packed = int(self._packing.packed_tokens(lengths).sum())
            tokens += packed
            lost += int(lengths.sum(dtype=np.int64)) - packed
            num_long += int(np.count_nonzero(lengths > self._packing.row_length))
        padding = self.size * self._packing.row_length - tokens
        return PackedTotals(self.size, tokens, padding, num_long, lost)

    def alternatives(self, position: int, seed: int, epoch: int) -> RowSpans:
        """Rows to try where the one at a position cannot be read: 16 of its window at random, or none."""
        (sequence,), (row,) = self.locate(np.array([position]))
        window, before, _ = self._sequences[sequence].counts.find(int(row))
        rows: RowSpans = self._sequences[sequence].rows(window)
        others = np.delete(np.arange(len(rows)), row - before)
        numbers = random_u64(RngStream.SUBSTITUTE, seed, epoch, position, size=_ALTERNATIVES if len(others) else 0)
        return rows.take(others[(numbers % np.uint64(max(1, len(others)))).astype(np.int64)])

    @property
    def samples_per_position(self) -> int:
        """About so many, at least 1."""
        mean = int(sampled(self._lengths).mean()) if len(self._lengths) else 1
        return max(1, self._packing.row_length // max(1, mean))


class _Sorted(Listed):
    """A planned window: the sample and the canonical node of each position, and where its batches end."""

    def __init__(self, ids: Ints, nodes: Ints, ends: tuple[int, ...] = ()) -> None:
        super().__init__(ids)
        self.ends = ends
        self._nodes = nodes

    def nodes(self, at: Ints) -> Ints:
        return self._nodes[at]


class ByLength(Regrouped[_Sorted], Composed):
    """Samples of similar lengths together: padding a batch to its longest sample is cheap if all are about as long.

    The samples of a window are sorted by length and divided over its global batches, which keep a random order. Every
    position keeps its canonical node and its stream: machines read the same shards as without, and mixtures stay exact.

        lengths in the order below   9 2 7 3 | 8 1 2 9 | 3 8 1 7     a window of three batches
        sorted, in batches           1 1 2 2 | 3 3 7 7 | 8 8 9 9
        permuted                     8 8 9 9 | 1 1 2 2 | 3 3 7 7

    With a budget of tokens, batches differ in size: each takes the longest samples left, as many as the budget has room
    for if all are padded to the longest one. Their sizes are multiples of ``batch_size``, except for the epoch's last.

    Args:
        samples: The order whose windows are rearranged.
        lengths: Of every sample by its id.
        buckets: How they are rearranged.
        streams_of: The stream of each sample.
        key: (seed, epoch); None where samples are not shuffled.
        counted: The window that a state has counted, of a budget; see `CountedWindows`.
    """

    def __init__(
        self,
        samples: Order,
        lengths: Integers,
        buckets: LengthBuckets,
        streams_of: Callable[[Ints], Ints],
        key: tuple[int, int] | None,
        counted: Windows,
    ) -> None:
        super().__init__(samples, buckets.window, key)
        self.size = samples.size
        self._lengths = lengths
        self._buckets = buckets
        self._streams_of = streams_of
        start = counted[0] if len(counted) == 1 else None
        self._counts = WindowCounts(self.num_windows, lambda index: len(self.ends(index)), start)

    @property
    def full_end(self) -> int:
        return self.size if self.has_budget else self._below.full_end

    @property
    def is_counted(self) -> bool:
        return self._counts.is_complete

    @property
    def has_budget(self) -> bool:
        """Whether batches are as large as a budget of tokens has room for."""
        return self._buckets.batch_tokens is not None

    @property
    def below(self) -> Order:
        return self._below

    def locate(self, at: Ints) -> tuple[Ints, Ints]:
        return np.divmod(at, self._length)

    def member(self, index: int) -> Order:
        return self.window(index)

    def unchanged_from(self, position: int) -> int:
        return min(ceil_div(position, self._length) * self._length, self.size)

    def find(self, sample_id: int) -> list[int]:
        positions = []
        for index in sorted({at // self._length for at in self._below.find(sample_id)}):
            positions += [index * self._length + at for at in self.window(index).find(sample_id)]
        return positions

    def plan(self, index: int) -> _Sorted:
        at = self.positions(index)
        ids = self._below.ids(at)
        nodes = self._below.nodes(at)
        if self.has_budget:
            return self._within_budget(index, ids, nodes)
        group = nodes * 2**32 + self._streams_of(ids)
        size = self._buckets.batch_size
        num_full = len(at) // size
        # The batch of each position, by its place in the order of lengths; a last partial batch stays the last.
        batch = np.append(self.permuted(RngStream.BUCKETS, index, num_full), num_full)
        places = np.lexsort((np.repeat(batch, size)[: len(at)], group))
        ids[places] = ids[np.lexsort((self._lengths[ids], group))]
        return _Sorted(ids, nodes)

    def _within_budget(self, index: int, ids: Ints, nodes: Ints) -> _Sorted:
        # The longest samples first; every node gives one in turn.
        by_node = np.lexsort((-self._lengths[ids].astype(np.int64), nodes))
        starts = np.searchsorted(nodes[by_node], nodes[by_node])
        order = by_node[np.lexsort((nodes[by_node], np.arange(len(ids)) - starts))]
        batches = np.split(order, self._batch_ends(self._lengths[ids[order]])[:-1])
        rest = [batches.pop()] if len(ids) % self._buckets.batch_size else []  # the last batch of the epoch
        batches = [batches[place] for place in self.permuted(RngStream.BUCKETS, index, len(batches)).tolist()] + rest
        order = np.concatenate(batches)
        ends = index * self._length + np.cumsum([len(batch) for batch in batches])
        return _Sorted(ids[order], nodes[order], tuple(ends.tolist()))

    def _batch_ends(self, lengths: Integers) -> list[int]:
        """Where the batches of a budget end, before they are permuted."""
        longest = np.maximum.accumulate(lengths[::-1])[::-1]  # of each sample and all behind it
        multiple = self._buckets.batch_size
        tokens = self._buckets.batch_tokens or 0
        ends: list[int] = []
        begin = 0
        while begin < len(lengths):
            room = max(1, tokens // max(int(longest[begin]), 1) // multiple) * multiple
            left = len(lengths) - begin
            begin += min(room, left // multiple * multiple or left)
            ends.append(begin)
        return ends

    # What follows is of batches of a budget.

    def ends(self, window: int) -> tuple[int, ...]:
        """The positions behind the batches of a window; none if there is no such window."""
        return self.window(window).ends if window < self.num_windows else ()

    @property
    def num_batches(self) -> int:
        """All batches of the epoch. This plans every window that was not counted before."""
        return self._counts.up_to(_ALL)

    def end_of_batch(self, index: int) -> int | None:
        """The position behind a batch of the epoch; None if it has not so many."""
        window, before, behind = self._counts.find(index)
        return None if before == behind else self.ends(window)[index - before]

    def batches_before(self, position: int) -> int | None:
        """Global batches from the epoch's begin that end at or before a position. Counts those of windows before it."""
        if not self.has_budget:
            return None
        window, is_inside = divmod(position, self._length)
        inside = bisect_right(self.ends(window), position) if is_inside else 0
        return self._counts.before(window) + inside

    def cursor(self, position: int) -> Windows | None:
        """What a state holds, so that a resume need not count the batches before it."""
        if not self.has_budget:
            return None
        window = position // self._length
        if not window:
            return ()
        return ((window, self._counts.before(window), self._counts.before(min(window + 1, self.num_windows))),)

    def samples_in(self, num_positions: int) -> int:
        """A batch counts as ``batch_size``, the least that it has; here as the mean of the first window."""
        ends = self.ends(0) if self.has_budget else ()
        return ceil_div(num_positions * ends[-1], len(ends) * self._buckets.batch_size) if ends else num_positions
