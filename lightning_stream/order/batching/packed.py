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

from lightning_stream.errors import StateError
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
_ALL = 2**62  # more rows than there are


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


class _Counted(NamedTuple):
    """The rows before window ``base``, and before each of those behind it, as far as they were counted."""

    base: int
    firsts: list[int]


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
        self._counted = _Counted(0, [0])  # replaced as a whole, so that threads and interrupts cannot tear it

    def count(self, rows: int) -> int:
        """The smaller of ``rows`` and the number of all rows: plans windows until that is known."""
        return min(rows, self._grown(self._counted, rows).firsts[-1])

    def learn(self, window: int, before: int, behind: int) -> None:
        """Count on from a window with so many rows before it and behind it, unless more is known already."""
        if behind > self._counted.firsts[-1] and window <= self.num_windows:
            self._counted = _Counted(window, [before, behind] if behind > before else [before])

    def landmark(self, row: int) -> tuple[int, int, int]:
        """The window of a row, the rows before it, and those before the next window; behind the last row, the end.

        If the row is the first one of its window, this says nothing about the rows in it: a change of the mixture may
        still change them.
        """
        base, firsts = self._counted_to(row, row + 1)
        at = min(int(np.searchsorted(firsts, row, side="right")), len(firsts)) - 1
        return base + at, firsts[at], firsts[at] if row == firsts[at] else firsts[at + 1]

    def spans(self, rows: NDArray[np.int64]) -> RowSpans:
        """The spans of some rows of the sequence, int64[n], in this order."""
        base, firsts = self._counted_to(int(rows.min()), int(rows.max()) + 1)
        at = np.searchsorted(firsts, rows, side="right") - 1
        found, places = [], []
        for here in np.unique(at).tolist():
            place = np.flatnonzero(at == here)
            ids, planned = self._window(base + here)
            if len(planned) != firsts[here + 1] - firsts[here]:
                raise StateError(
                    f"The landmark of a state must be of its order: window {base + here} has {len(planned)} rows, not "
                    f"{firsts[here + 1] - firsts[here]}. The state is damaged; load another checkpoint."
                )
            chosen = planned.take(rows[place] - firsts[here])
            found.append(RowSpans(chosen.edges, ids[chosen.document], chosen.first, chosen.num_tokens))
            places.append(place)
        joined = RowSpans.joined(found)
        return joined if len(found) == 1 else joined.take(np.argsort(np.concatenate(places)))

    def neighbours(self, row: int) -> RowSpans:
        """All rows of the window of a row, but itself."""
        window, first, _ = self.landmark(row)
        count = len(self._window(window).rows)
        return self.spans(np.delete(np.arange(first, first + count), row - first))

    def rows_before(self, window: int) -> int:
        """The rows of all windows before this one, which are counted."""
        known = self._counted
        base, firsts = self._grown(_Counted(0, [0]) if window < known.base else known, window=window)
        return firsts[window - base]

    def rows_with(self, index: int) -> list[int]:
        """The rows that hold the sample with this index in the sequence. Counts the rows of all windows before it."""
        window, document = divmod(index, self._packing.window)
        planned = self._window(window).rows
        rows = np.searchsorted(planned.edges, np.flatnonzero(planned.document == document), side="right") - 1
        found: list[int] = (self.rows_before(window) + rows).tolist()
        return found

    def _counted_to(self, row: int, end: int) -> _Counted:
        """The rows before the window of a row and those behind it, up to ``end`` or to the last row.

        Counts again from the beginning, if the row is before the landmark that the counting began at.
        """
        known = self._counted
        return self._grown(_Counted(0, [0]) if row < known.firsts[0] else known, end)

    def _grown(self, known: _Counted, rows: int = 0, window: int = 0) -> _Counted:
        """``known``, with the next windows counted until it has so many rows, and this window, or all."""
        base, firsts = known
        while base + len(firsts) <= self.num_windows and (firsts[-1] < rows or base + len(firsts) <= window):
            firsts = firsts.copy() if firsts is known.firsts else firsts
            firsts.append(firsts[-1] + len(self._window(base + len(firsts) - 1).rows))
        if firsts is not known.firsts:
            known = self._counted = _Counted(base, firsts)
        return known

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
        self.epoch, self._documents, self._packing = documents.epoch, documents, packing
        key = (config.seed, self.epoch) if config.shuffle else None
        sequences = documents.sequences(packing.window)
        self._sequences = [
            PackedSequence(one, lengths, packing, key and (*key, number)) for number, one in enumerate(sequences)
        ]
        mean = int(lengths[:: ceil_div(max(1, len(lengths)), _SAMPLED)].mean()) if len(lengths) else 1
        self.samples_per_position = max(1, packing.row_length // max(1, mean))
        filled = tuple(number for number, one in enumerate(sequences) if one.num_samples)
        self._turns: tuple[_Turn, ...] = (_Turn(0, 0, filled),)

    @property
    def documents(self) -> EpochOrder:
        return self._documents

    @property
    def num_samples(self) -> int:  # type: ignore[override]
        """Rows of the epoch. This plans every window that was not counted before."""
        return self._turns_to(_ALL)[-1].begin

    @property
    def full_end(self) -> int:  # type: ignore[override]
        """All rows: none is a remainder."""
        return self.num_samples

    def reaches(self, position: int) -> bool:
        """Whether there are so many rows. Plans windows of all sequences until that is known."""
        last = self._turns_to(position)[-1]
        return position <= last.begin or bool(last.sequences)

    def exists(self, position: int) -> bool:
        return self.reaches(position + 1)

    def _turns_to(self, position: int) -> tuple[_Turn, ...]:
        """The turns of all positions before this one: the last turn has no sequences if there are fewer rows."""
        turns = self._turns
        while position > turns[-1].begin and turns[-1].sequences:
            turn = turns[-1]
            wanted = turn.row + ceil_div(position - turn.begin, len(turn.sequences))
            counts = [self._sequences[number].count(wanted) for number in turn.sequences]
            row = min(counts)
            if row == wanted:
                break
            begin = turn.begin + (row - turn.row) * len(counts)
            left = tuple(number for number, count in zip(turn.sequences, counts, strict=True) if count > row)
            turns = (*turns, _Turn(begin, row, left))
        self._turns = turns
        return turns

    def _used(self, position: int) -> list[int]:
        """The rows of each sequence that are before a position."""
        turn = next(one for one in reversed(self._turns_to(position)) if one.begin <= position)
        rounds, place = divmod(position - turn.begin, max(1, len(turn.sequences)))
        used = {sequence: turn.row + rounds + (number < place) for number, sequence in enumerate(turn.sequences)}
        ended = (number for number in range(len(self._sequences)) if number not in used)
        used.update((number, self._sequences[number].count(_ALL)) for number in ended)
        return [used[number] for number in range(len(used))]

    def landmark(self, position: int) -> Landmark:
        """What a state holds, so that a resume at this position plans few windows."""
        if not position:
            return Landmark(self.epoch)
        windows = map(PackedSequence.landmark, self._sequences, self._used(position))
        return Landmark(self.epoch, tuple(windows))

    def learn(self, landmark: Landmark) -> None:
        """Count rows from a landmark of this epoch, instead of from the beginning; one of another epoch is ignored."""
        if landmark.epoch == self.epoch and len(landmark.windows) == len(self._sequences):
            for one, known in zip(self._sequences, landmark.windows, strict=True):
                one.learn(*known)

    def samples_before(self, position: int) -> int:
        used, windows = self._used(position), self.landmark(position).windows
        begun = [window + (row > before) for row, (window, before, _) in zip(used, windows, strict=False)]
        most = max(begun, default=0) * self._packing.window * len(self._sequences)
        return min(most, self.documents.num_samples)

    def first_changed(self, at: NDArray[np.int64], end: int) -> int:
        index, sequence = np.divmod(at, len(self._sequences))
        found = [end]
        for number, (last, _, _) in enumerate(self.landmark(end).windows):
            window = int((index[sequence == number] // self._packing.window).min(initial=last + 1))
            if window <= last:  # it is packed again as a whole
                found.append(self._position_of(number, self._sequences[number].rows_before(window)))
        return min(found)

    def _position_of(self, sequence: int, row: int) -> int:
        """The position of a row of a sequence; of the row behind its last one, where that would be."""
        turns = self._turns_to((row + 1) * len(self._sequences))  # it is before that position
        turn = next(one for one in reversed(turns) if one.row <= row and sequence in one.sequences)
        return turn.begin + (row - turn.row) * len(turn.sequences) + turn.sequences.index(sequence)

    def _locate(self, positions: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The sequence of each position, and its row there."""
        end = int(positions.max(initial=-1)) + 1
        turns = self._turns_to(end)
        if end > turns[-1].begin and not turns[-1].sequences:
            raise ValueError(f"Positions must be within the epoch, [0, {turns[-1].begin}); found {end - 1}.")
        turn = np.searchsorted([one.begin for one in turns], positions, side="right") - 1
        sequence, row = np.empty_like(positions), np.empty_like(positions)
        for number in np.unique(turn).tolist():
            here, one = turn == number, turns[number]
            rounds, place = np.divmod(positions[here] - one.begin, len(one.sequences))
            sequence[here] = np.array(one.sequences, dtype=np.int64)[place]
            row[here] = one.row + rounds
        return sequence, row

    def spans(self, positions: NDArray[np.int64]) -> RowSpans:
        """The spans of the rows at some positions, int64[n], in this order."""
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

    def canonical(self, begin: int, end: int) -> NDArray[np.int64]:
        return self._locate(np.arange(begin, end, dtype=np.int64))[0]
