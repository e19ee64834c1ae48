"""An epoch of packed rows: an order whose positions count rows. Each row is a list of spans of documents.

The documents of an epoch are divided into several sequences, and each is packed by itself, window by window: window w
packs its documents [w * W, (w + 1) * W), and permutes the rows with a key of (seed, epoch, sequence, window). The
sequences then give one row each in turn; those that have rows left at the end of the epoch continue. A sequence is one
canonical node, or several in a small epoch. If all nodes were packed together, every row would have documents of all
nodes, and every machine would download all the data.

    sequence 0   a0 a1 a2 a3 a4          position   0  1  2  3  4  5  6  7  8  9 10
    sequence 1   b0 b1 b2 b3 b4 b5       row       a0 b0 a1 b1 a2 b2 a3 b3 a4 b4 b5

The number of rows of a window is known once it is planned. So rows are counted from the beginning of the epoch, or from
a `Landmark` that a state holds.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from lightning_stream.errors import StateError
from lightning_stream.lazy import kept
from lightning_stream.order.batching.base import EpochOrder
from lightning_stream.order.packing import RowPacking, RowSpans, pack_window, sampled
from lightning_stream.order.permutation import RngStream, permutation, random_u64
from lightning_stream.order.rank_split import ceil_div

if TYPE_CHECKING:
    from lightning_stream.order.plan import RunOrder

_KEPT_WINDOWS = 3
_ALTERNATIVES = 16
_ROWS_AT_ONCE = 1 << 14  # of which the spans are in memory together
_DOCUMENTS_AT_ONCE = 1 << 20


@dataclass(frozen=True)
class Landmark:
    """What a state holds of an epoch's rows: for each sequence a window, and the rows before it and before the next.

    With a budget of tokens there is one sequence, and batches are counted. () is the beginning of the epoch.
    """

    epoch: int = 0
    windows: tuple[tuple[int, int, int], ...] = ()


@dataclass(frozen=True)
class PackedTotals:
    """What an epoch of rows holds. ``num_long`` documents have more tokens than a row; ``lost_tokens`` are theirs."""

    num_rows: int
    num_tokens: int
    padding: int
    num_long: int
    lost_tokens: int


class Samples(Protocol):
    """A sequence of samples, readable at any position."""

    num_samples: int

    def ids(self, begin: int, end: int) -> NDArray[np.int64]:
        """Sample ids at positions [begin, end)."""


class WindowCounts:
    """How many rows or batches come before each window, counted window by window as far as they are asked for.

    Threads may share it: what a window has never changes, so a number that two of them write stays the same.

    Args:
        num_windows: All of them.
        count_in: How many a window has.
    """

    def __init__(self, num_windows: int, count_in: Callable[[int], int]) -> None:
        self.num_windows, self._count_in = num_windows, count_in
        self._known: tuple[int, list[int]] = (0, [0])  # a window, and the count before it and before each later one

    @property
    def counted(self) -> int:
        """How many are known to exist."""
        return self._known[1][-1]

    def count(self, most: int) -> int:
        """The smaller of ``most`` and the number of all: counts windows until that is known."""
        return min(most, self._grown(self._known, most)[-1])

    def before(self, window: int) -> int:
        """How many come before a window."""
        known = self._from(window < self._known[0])
        while window - known[0] >= len(known[1]):
            self._grown(known, known[1][-1] + 1)
        return known[1][window - known[0]]

    def find(self, number: int) -> tuple[int, int, int]:
        """The window that has a number, the count before it, and that before the next; behind the last one, the end."""
        known = self._from(number < self._known[1][0])
        before = self._grown(known, number + 1)
        at = bisect_right(before, number) - 1
        return known[0] + at, before[at], before[min(at + 1, len(before) - 1)]

    def learn(self, window: int, before: int, behind: int) -> None:
        """Count from a window on, with so many before it and before the next one, unless more is known already.

        If both numbers are equal, nothing is known about what is in the window.
        """
        base, known = self._known
        if base + len(known) - 1 <= window <= self.num_windows:
            self._known = window, [before, behind] if behind > before else [before]

    def _from(self, is_before: bool) -> tuple[int, list[int]]:
        """What is known. It is counted again from the beginning where something before the landmark is asked for."""
        if is_before:
            self._known = (0, [0])
        return self._known

    def _grown(self, known: tuple[int, list[int]], most: int) -> list[int]:
        """Count windows until ``most`` or all are known."""
        base, before = known
        at = len(before)
        while before[at - 1] < most and base + at <= self.num_windows:
            before[at : at + 1] = [before[at - 1] + self._count_in(base + at - 1)]
            at += 1
        return before


class PackedSequence:
    """The rows of one sequence of samples.

    Args:
        samples: All of them are packed, so a sample that is drawn twice is packed twice.
        lengths: Tokens of every sample by its id: a 1-d array of integers, in memory or memory-mapped.
        packing: How documents are packed.
        key: (seed, epoch, number of the sequence); None keeps the rows of a window in the order of their documents.
    """

    def __init__(
        self, samples: Samples, lengths: NDArray[np.integer], packing: RowPacking, key: tuple[int, ...] | None
    ) -> None:
        self._samples, self._lengths, self._packing, self._key = samples, lengths, packing, key
        self._windows: dict[int, RowSpans] = {}
        self.counts = WindowCounts(ceil_div(samples.num_samples, packing.window), self._num_rows)

    def spans(self, rows: NDArray[np.int64]) -> RowSpans:
        """The spans of some rows of the sequence, int64[n], in this order."""
        found, places, ordered = [], [], np.sort(rows)
        while len(ordered):
            window, before, behind = self.counts.find(int(ordered[0]))
            planned = self.window(window)
            if len(planned) != behind - before:
                raise StateError(
                    f"The landmark of a state must be of its order: window {window} has {len(planned)} rows, not "
                    f"{behind - before}. The state is damaged; load another checkpoint."
                )
            places.append(np.flatnonzero((rows >= before) & (rows < behind)))
            found.append(planned.take(rows[places[-1]] - before))
            ordered = ordered[np.searchsorted(ordered, behind) :]
        return RowSpans.joined(found, places)

    def rows_with(self, sample_id: int, window: int) -> list[int]:
        """The rows of a window that have a sample, each once. Counts the rows of all windows before it."""
        rows = self.window(window)
        at = np.unique(np.searchsorted(rows.edges, np.flatnonzero(rows.ids == sample_id), side="right") - 1)
        found: list[int] = (self.counts.before(window) + at).tolist()
        return found

    def window(self, number: int) -> RowSpans:
        """The rows of a window, permuted; the last few windows are kept."""
        return kept(self._windows, number, self._plan, _KEPT_WINDOWS)

    def _num_rows(self, window: int) -> int:
        return len(self.window(window))

    def _plan(self, number: int) -> RowSpans:
        packing, begin = self._packing, number * self._packing.window
        ids = self._samples.ids(begin, min(begin + packing.window, self._samples.num_samples))
        rows = pack_window(self._lengths[ids], packing.row_length, packing.long_documents)
        rows = replace(rows, ids=ids[rows.ids])
        if self._key is not None:
            rows = rows.take(permutation(RngStream.ROWS, *self._key, number, size=len(rows)))
        return rows


@dataclass(frozen=True)
class _Turn:
    """From position ``begin`` on, these sequences take turns: each gives its row ``row``, then each its next one."""

    begin: int
    row: int
    sequences: tuple[int, ...]


class PackedOrder(EpochOrder):
    """The rows of one epoch, as an order of their own: `ids` are fingerprints of rows.

    Args:
        run: The order of the run, which has the lengths and the packing.
        documents: The order of the samples that are packed.
    """

    splits_samples = False  # the spans of a rank's rows alone are looked up

    def __init__(self, run: RunOrder, documents: EpochOrder) -> None:
        config, packing, lengths = run.config, run.config.packing, run.lengths
        assert packing is not None
        assert lengths is not None
        self.epoch, self._documents, self._packing = documents.epoch, documents, packing
        self._lengths = lengths
        key = (config.seed, self.epoch) if config.shuffle else None
        sequences = documents.sequences(packing.window)
        self._sequences = [
            PackedSequence(one, lengths, packing, key and (*key, number)) for number, one in enumerate(sequences)
        ]
        self.arranged_together = packing.window * len(sequences)
        mean = int(sampled(lengths).mean()) if len(lengths) else 1
        self.samples_per_position = max(1, packing.row_length // max(1, mean))
        self._turns = [_Turn(0, 0, tuple(number for number, one in enumerate(sequences) if one.num_samples))]

    @property
    def documents(self) -> EpochOrder:
        return self._documents

    @property
    def num_samples(self) -> int:  # type: ignore[override]
        """Rows of the epoch. This plans every window that was not counted before."""
        while self.reaches(self._counted + 1):
            self.reaches(2 * self._counted + 2**20)
        return self._counted

    @property
    def full_end(self) -> int:  # type: ignore[override]
        """All rows: none is a remainder."""
        return self.num_samples

    @property
    def _counted(self) -> int:
        """Positions that are known to exist."""
        turn = self._turns[-1]
        counts = [self._sequences[number].counts.counted - turn.row for number in turn.sequences]
        return turn.begin + min(counts, default=0) * len(counts)

    def reaches(self, position: int) -> bool:
        """Whether there are so many rows. Plans windows of all sequences until that is known."""
        at = len(self._turns) - 1
        while True:
            turn = self._turns[at]
            if position <= turn.begin or not turn.sequences:
                return position <= turn.begin
            wanted = turn.row + ceil_div(position - turn.begin, len(turn.sequences))
            counts = [self._sequences[number].counts.count(wanted) for number in turn.sequences]
            row = min(counts)
            if row == wanted:
                return True
            begin = turn.begin + (row - turn.row) * len(counts)
            left = tuple(number for number, count in zip(turn.sequences, counts, strict=True) if count > row)
            at += 1
            self._turns[at : at + 1] = [_Turn(begin, row, left)]  # another thread may have added the same one

    def exists(self, position: int) -> bool:
        return self.reaches(position + 1)

    def totals(self) -> PackedTotals:
        """Count the rows of the epoch and what they hold. This plans every window that was not counted before."""
        tokens = num_long = lost = 0
        for begin in range(0, self._documents.num_samples, _DOCUMENTS_AT_ONCE):
            ids = self._documents.ids(begin, min(begin + _DOCUMENTS_AT_ONCE, self._documents.num_samples))
            lengths = self._lengths[ids]
            kept = int(self._packing.packed_tokens(lengths).sum())
            tokens, lost = tokens + kept, lost + int(lengths.sum(dtype=np.int64)) - kept
            num_long += int(np.count_nonzero(lengths > self._packing.row_length))
        padding = self.num_samples * self._packing.row_length - tokens
        return PackedTotals(self.num_samples, tokens, padding, num_long, lost)

    def landmark(self, position: int) -> Landmark:
        """What a state holds, so that a resume at this position plans few windows."""
        if not position:
            return Landmark(self.epoch)
        found = [(row, one.counts.find(row)) for one, row in zip(self._sequences, self._used(position), strict=True)]
        # A change of the mixture may still change the rows of a window that is not begun.
        windows = ((number, before, before if row == before else behind) for row, (number, before, behind) in found)
        return Landmark(self.epoch, tuple(windows))

    def _used(self, position: int) -> list[int]:
        """The rows of each sequence that come before a position."""
        self.reaches(position)
        turn = next(one for one in reversed(self._turns) if one.begin <= position)
        rounds, place = divmod(position - turn.begin, max(1, len(turn.sequences)))
        used = [one.counts.counted for one in self._sequences]  # of those that have ended: all rows
        for number, sequence in enumerate(turn.sequences):
            used[sequence] = turn.row + rounds + (number < place)
        return used

    def settled(self, position: int) -> int:
        """The end of all windows that a row before the position is of."""
        begun = []
        for one, row in zip(self._sequences, self._used(position), strict=True):
            window, before, _ = one.counts.find(row)
            begun.append(window + (row > before))
        last = max(begun, default=0) * self._packing.window * len(self._sequences)
        return min(last, self._documents.num_samples)

    def learn(self, landmark: Landmark) -> None:
        """Count rows from a landmark of this epoch, instead of from the beginning; one of another epoch is ignored."""
        if landmark.epoch == self.epoch and len(landmark.windows) == len(self._sequences):
            for one, known in zip(self._sequences, landmark.windows, strict=True):
                one.counts.learn(*known)

    def _locate(self, positions: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The sequence of each position, and its row there. The positions were reached before."""
        turn = np.searchsorted([one.begin for one in self._turns], positions, side="right") - 1
        sequence, row = np.empty_like(positions), np.empty_like(positions)
        for number in np.unique(turn).tolist():
            here, one = turn == number, self._turns[number]
            rounds, place = np.divmod(positions[here] - one.begin, len(one.sequences))
            sequence[here] = np.array(one.sequences, dtype=np.int64)[place]
            row[here] = one.row + rounds
        return sequence, row

    def spans(self, positions: NDArray[np.int64]) -> RowSpans:
        """The spans of the rows at some positions, int64[n], in this order."""
        if len(positions) and not self.reaches(int(positions.max()) + 1):
            raise ValueError(f"Positions must be within the epoch, [0, {self._counted}); found {positions.max()}.")
        sequence, row = self._locate(positions)
        places = [np.flatnonzero(sequence == number) for number in np.unique(sequence)]
        found = [self._sequences[int(sequence[place[0]])].spans(row[place]) for place in places]
        return RowSpans.joined(found, places)

    def select(self, begin: int, end: int, offsets: NDArray[np.int64]) -> tuple[NDArray[np.int64], RowSpans | None]:
        rows = self.spans(begin + offsets)
        return rows.fingerprints(), rows

    def ids(self, begin: int, end: int) -> NDArray[np.int64]:
        pieces = [
            self.spans(np.arange(first, min(first + _ROWS_AT_ONCE, end), dtype=np.int64)).fingerprints()
            for first in range(begin, end, _ROWS_AT_ONCE)
        ]
        return np.concatenate(pieces) if pieces else np.empty(0, dtype=np.int64)

    def rows(self, begin: int, end: int) -> RowSpans:
        return self.spans(np.arange(begin, end, dtype=np.int64))

    def samples(self, begin: int, end: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        rows = self.rows(begin, end)
        return rows.ids, begin + np.repeat(np.arange(len(rows)), np.diff(rows.edges))

    def alternatives(self, position: int, seed: int) -> RowSpans:
        sequence, row = (int(one[0]) for one in self._locate(np.array([position], dtype=np.int64)))
        window, before, _ = self._sequences[sequence].counts.find(row)
        rows = self._sequences[sequence].window(window)
        others = np.delete(np.arange(len(rows)), row - before)
        if not len(others):
            return rows.take(others)
        numbers = random_u64(RngStream.SUBSTITUTE, seed, self.epoch, position, size=_ALTERNATIVES)
        return rows.take(others[(numbers % np.uint64(len(others))).astype(np.int64)])

    def positions(self, sample_id: int) -> list[int]:
        """All positions whose rows hold a sample. Counts the rows of the windows before it."""
        found, count = [], len(self._sequences)
        documents = (divmod(at, count) for at in self.documents.positions(sample_id))
        for window, sequence in sorted({(index // self._packing.window, sequence) for index, sequence in documents}):
            for row in self._sequences[sequence].rows_with(sample_id, window):
                self.reaches((row + 1) * count)  # it is before that position
                turn = next(one for one in reversed(self._turns) if one.row <= row and sequence in one.sequences)
                found.append(turn.begin + (row - turn.row) * len(turn.sequences) + turn.sequences.index(sequence))
        return sorted(found)

    def canonical(self, begin: int, end: int) -> NDArray[np.int64]:
        if not self.reaches(end):
            raise ValueError(f"Positions must be within the epoch, [0, {self._counted}); found [{begin}, {end}).")
        return self._locate(np.arange(begin, end, dtype=np.int64))[0]
