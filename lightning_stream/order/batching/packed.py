"""An epoch of packed rows: an order whose positions count rows. Each row is a list of spans of documents.

The documents of an epoch are divided into several sequences, and each is packed by itself, window by window: window w
packs its documents [w * W, (w + 1) * W), and permutes the rows with a key of (seed, epoch, sequence, window). The
sequences then give one row each in turn; those that have rows left at the end of the epoch continue. A sequence is one
canonical node, or several in a small epoch. If all nodes were packed together, every row would have documents of all
nodes, and every machine would download all the data.

    sequence 0   a0 a1 a2 a3 a4          position   0  1  2  3  4  5  6  7  8  9 10
    sequence 1   b0 b1 b2 b3 b4 b5       row       a0 b0 a1 b1 a2 b2 a3 b3 a4 b4 b5

How many rows a window has is known once it was planned. So rows are counted from the beginning of the epoch, or from a
`Landmark` that a state holds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from lightning_stream.order.batching.base import EpochOrder
from lightning_stream.order.packing import PackedRows, RowPacking, RowSpans, pack_window
from lightning_stream.order.permutation import RngStream, permutation, random_u64
from lightning_stream.order.rank_split import ceil_div
from lightning_stream.order.window import kept

if TYPE_CHECKING:
    from lightning_stream.order.plan import RunOrder

_KEPT_WINDOWS = 3
_ALTERNATIVES = 16
_SAMPLED = 1 << 12  # lengths that are averaged
_ROWS_AT_ONCE = 1 << 14  # of which the spans are in memory together


@dataclass(frozen=True)
class Landmark:
    """What is known of an epoch's rows: for each sequence a window, and the sequence's rows before it and behind it.

    () is the beginning of the epoch.
    """

    epoch: int = 0
    windows: tuple[tuple[int, int, int], ...] = ()


class Samples(Protocol):
    """A sequence of samples, readable at any position."""

    num_samples: int

    def ids(self, begin: int, end: int) -> NDArray[np.int64]:
        """Sample ids at positions [begin, end)."""


class _Window(NamedTuple):
    """A planned window: the sample id of each document, and the rows, permuted."""

    ids: NDArray[np.int64]
    rows: PackedRows


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
        self.num_windows = ceil_div(samples.num_samples, packing.window)
        self._windows: dict[int, _Window] = {}
        self._base = 0  # the window from which rows were counted
        self._firsts = [0]  # the rows before this window and each of those behind it, as far as they were counted

    @property
    def is_counted(self) -> bool:
        """Whether the number of all rows is known."""
        return self._base + len(self._firsts) > self.num_windows

    @property
    def num_counted(self) -> int:
        """Rows that were counted, from the first one of the epoch."""
        return self._firsts[-1]

    def count(self, rows: int) -> int:
        """The smaller of ``rows`` and the number of all rows: plans windows until that is known."""
        while self.num_counted < rows and not self.is_counted:
            number = self._base + len(self._firsts) - 1
            self._firsts.append(self._firsts[-1] + len(self._window(number).rows))
        return min(rows, self.num_counted)

    def learn(self, window: int, before: int, behind: int) -> None:
        """Count on from a window with so many rows before it and behind it, unless more is known already."""
        if behind > self.num_counted and window < self.num_windows:
            self._base, self._firsts = window, [before, behind]
        elif before > self.num_counted and window == self.num_windows:
            self._base, self._firsts = window, [before]

    def landmark(self, row: int) -> tuple[int, int, int]:
        """The window of a row, the rows before it, and those before the next window; behind the last row, the end."""
        self._reach(row)
        self.count(row + 1)
        at = min(int(np.searchsorted(self._firsts, row, side="right")), len(self._firsts)) - 1
        return self._base + at, self._firsts[at], self._firsts[min(at + 1, len(self._firsts) - 1)]

    def spans(self, rows: NDArray[np.int64]) -> RowSpans:
        """The spans of some rows of the sequence, int64[n], in this order."""
        self._reach(int(rows.min()))
        self.count(int(rows.max()) + 1)
        at = np.searchsorted(self._firsts, rows, side="right") - 1
        found, places = [], []
        for here in np.unique(at).tolist():
            place = np.flatnonzero(at == here)
            ids, planned = self._window(self._base + here)
            chosen = planned.take(rows[place] - self._firsts[here])
            found.append(RowSpans(chosen.edges, ids[chosen.document], chosen.first, chosen.num_tokens))
            places.append(place)
        joined = RowSpans.joined(found)
        return joined if len(found) == 1 else joined.take(np.argsort(np.concatenate(places)))

    def neighbours(self, row: int) -> RowSpans:
        """All rows of the window of a row, but itself."""
        window, first, _ = self.landmark(row)
        count = len(self._window(window).rows)
        return self.spans(np.delete(np.arange(first, first + count), row - first))

    def rows_with(self, index: int) -> list[int]:
        """The rows that hold the sample with this index in the sequence. Counts the rows of all windows before it."""
        window, document = divmod(index, self._packing.window)
        planned = self._window(window).rows
        rows = np.searchsorted(planned.edges, np.flatnonzero(planned.document == document), side="right") - 1
        found: list[int] = (self.first_row(window) + rows).tolist()
        return found

    def first_row(self, window: int) -> int:
        """The first row of a window. Counts the rows of all windows before it."""
        if window < self._base:
            self._base, self._firsts = 0, [0]
        while window >= self._base + len(self._firsts):
            self.count(self.num_counted + 1)
        return self._firsts[window - self._base]

    def _reach(self, row: int) -> None:
        """Count again from the beginning, if a row is before the landmark that the counting began at."""
        if row < self._firsts[0]:
            self._base, self._firsts = 0, [0]

    def _window(self, number: int) -> _Window:
        return kept(self._windows, number, self._plan, _KEPT_WINDOWS)

    def _plan(self, number: int) -> _Window:
        packing, begin = self._packing, number * self._packing.window
        ids = self._samples.ids(begin, min(begin + packing.window, self._samples.num_samples))
        rows = pack_window(self._lengths[ids], packing.row_length, packing.long_documents)
        if self._key is not None:
            rows = rows.take(permutation(RngStream.ROWS, *self._key, number, size=len(rows)))
        return _Window(ids, rows)


@dataclass(frozen=True)
class _Turn:
    """The positions from ``begin`` on, while these sequences give rows: each its row ``row`` first, then the next."""

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
        self.epoch, self._documents, self._window = documents.epoch, documents, packing.window
        key = (config.seed, self.epoch) if config.shuffle else None
        sequences = documents.sequences(packing.window)
        self._sequences = [
            PackedSequence(one, lengths, packing, key and (*key, number)) for number, one in enumerate(sequences)
        ]
        mean = int(lengths[:: ceil_div(max(1, len(lengths)), _SAMPLED)].mean()) if len(lengths) else 1
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
        counts = [self._sequences[number].num_counted - turn.row for number in turn.sequences]
        return turn.begin + min(counts, default=0) * len(counts)

    def reaches(self, position: int) -> bool:
        """Whether there are so many rows. Plans windows of all sequences until that is known."""
        while True:
            turn = self._turns[-1]
            if position <= turn.begin or not turn.sequences:
                return position <= turn.begin
            wanted = turn.row + ceil_div(position - turn.begin, len(turn.sequences))
            counts = [self._sequences[number].count(wanted) for number in turn.sequences]
            row = min(counts)
            if row == wanted:
                return True
            begin = turn.begin + (row - turn.row) * len(counts)
            left = tuple(number for number, count in zip(turn.sequences, counts, strict=True) if count > row)
            self._turns.append(_Turn(begin, row, left))

    def exists(self, position: int) -> bool:
        return self.reaches(position + 1)

    def landmark(self, position: int) -> Landmark:
        """What a state holds, so that a resume at this position plans few windows."""
        if not position:
            return Landmark(self.epoch)
        self.reaches(position)
        turn = next(one for one in reversed(self._turns) if one.begin <= position)
        rounds, place = divmod(position - turn.begin, max(1, len(turn.sequences)))
        used = [one.num_counted for one in self._sequences]  # of those that have ended: all rows
        for number, sequence in enumerate(turn.sequences):
            used[sequence] = turn.row + rounds + (number < place)
        windows = (one.landmark(row) for one, row in zip(self._sequences, used, strict=True))
        return Landmark(self.epoch, tuple(windows))

    def learn(self, landmark: Landmark) -> None:
        """Count rows from a landmark of this epoch, instead of from the beginning; one of another epoch is ignored."""
        if landmark.epoch == self.epoch and len(landmark.windows) == len(self._sequences):
            for one, known in zip(self._sequences, landmark.windows, strict=True):
                one.learn(*known)

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
        joined = RowSpans.joined(found)
        return joined if len(found) <= 1 else joined.take(np.argsort(np.concatenate(places)))

    def select(
        self,
        begin: int,
        end: int,  # noqa: ARG002
        offsets: NDArray[np.int64],
    ) -> tuple[NDArray[np.int64], RowSpans | None]:
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
        sequence, row = self._locate(np.array([position], dtype=np.int64))
        rows = self._sequences[int(sequence[0])].neighbours(int(row[0]))
        if not len(rows):
            return rows
        numbers = random_u64(RngStream.SUBSTITUTE, seed, self.epoch, position, size=_ALTERNATIVES)
        return rows.take((numbers % np.uint64(len(rows))).astype(np.int64))

    def positions(self, sample_id: int) -> list[int]:
        """All positions whose rows hold a sample. Counts the rows of the windows before it."""
        found = []
        for at in self.documents.positions(sample_id):
            index, sequence = divmod(at, len(self._sequences))
            found += [self._position_of(sequence, row) for row in self._sequences[sequence].rows_with(index)]
        return sorted(found)

    def _position_of(self, sequence: int, row: int) -> int:
        """The inverse of `_locate`, also for the row that would come next in a sequence that has ended."""
        self.reaches((row + 1) * len(self._sequences))  # it is before that position
        turn = next(one for one in reversed(self._turns) if one.row <= row and sequence in one.sequences)
        return turn.begin + (row - turn.row) * len(turn.sequences) + turn.sequences.index(sequence)

    def samples_before(self, position: int) -> int:
        if not position or not self.reaches(position):
            return self.documents.num_samples if position else 0
        windows = 1 + max(window for window, _, _ in self.landmark(position).windows)
        return min(windows * self._window * len(self._sequences), self.documents.num_samples)

    def first_changed(self, samples: NDArray[np.int64]) -> int:
        index, sequence = np.divmod(samples, len(self._sequences))
        found = []
        for number in np.unique(sequence).tolist():
            window = int(index[sequence == number].min()) // self._window  # it is packed again as a whole
            found.append(self._position_of(number, self._sequences[number].first_row(window)))
        return min(found)

    def canonical(self, begin: int, end: int) -> NDArray[np.int64]:
        if not self.reaches(end):
            raise ValueError(f"Positions must be within the epoch, [0, {self._counted}); found [{begin}, {end}).")
        return self._locate(np.arange(begin, end, dtype=np.int64))[0]
