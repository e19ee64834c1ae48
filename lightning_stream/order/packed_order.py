"""One order of samples as packed rows: window by window, readable at any position without replay.

Window w packs the samples at positions [w * W, (w + 1) * W) of the order below. Its rows are permuted with a key of
(seed, epoch, window). A position is (window, row), so a resume plans one window. The number of rows before a window is
known once all windows before it were planned; only the methods that return such numbers need it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from lightning_stream.order.packing import PackedRows, Packing, pack_window
from lightning_stream.order.permutation import RngStream, permutation
from lightning_stream.order.rank_split import ceil_div
from lightning_stream.order.window import kept

_KEPT_WINDOWS = 3


class Samples(Protocol):
    """An order of samples: an `EpochOrder`, or the order of one stream."""

    num_samples: int

    def ids(self, begin: int, end: int) -> NDArray[np.int64]:
        """Sample ids at positions [begin, end)."""


class RowPosition(NamedTuple):
    """A position in an epoch of rows: the rows before this row of this window are used, and no others."""

    window: int = 0
    row: int = 0


@dataclass(frozen=True, eq=False)
class PackedWindow:
    """A planned window.

    Attributes:
        number: Its number in the epoch.
        begin: The position of its first document in the order below.
        ids: int64[documents], the sample id of each document.
        rows: The rows, permuted.
    """

    number: int
    begin: int
    ids: NDArray[np.int64]
    rows: PackedRows


class RowRange(NamedTuple):
    """The rows [begin, end) of one window."""

    window: PackedWindow
    begin: int
    end: int

    @property
    def stop(self) -> RowPosition:
        """The position behind these rows; behind the last row of a window it is the next window."""
        number = self.window.number
        return RowPosition(number + 1) if self.end == len(self.window.rows) else RowPosition(number, self.end)


@dataclass(frozen=True, eq=False)
class RowSpans:
    """Some rows as spans of samples: row r holds the spans [edges[r], edges[r + 1]).

    Attributes:
        edges: int64[rows + 1].
        ids: int64[spans], the sample of each span.
        positions: int64[spans], the position of that sample in the order below.
        first, num_tokens: int64[spans]; a span is the tokens [first, first + num_tokens) of its sample.
    """

    edges: NDArray[np.int64]
    ids: NDArray[np.int64]
    positions: NDArray[np.int64]
    first: NDArray[np.int64]
    num_tokens: NDArray[np.int64]

    def __len__(self) -> int:
        """Rows."""
        return len(self.edges) - 1

    @classmethod
    def of(cls, ranges: Iterable[RowRange]) -> RowSpans:
        """The spans of all rows in these ranges, one range after another."""
        none = np.empty(0, dtype=np.int64)
        counts, columns = [none], [(none,) * 4]
        for window, begin, end in ranges:
            rows = window.rows
            spans = slice(rows.edges[begin], rows.edges[end])
            document = rows.document[spans]
            counts.append(np.diff(rows.edges[begin : end + 1]))
            columns.append((window.ids[document], window.begin + document, rows.first[spans], rows.num_tokens[spans]))
        edges = np.cumsum(np.concatenate([[0], *counts]), dtype=np.int64)
        return cls(edges, *map(np.concatenate, zip(*columns, strict=True)))


class PackedOrder:
    """The rows of one order of samples in one epoch.

    Args:
        order: The samples of the epoch. All its positions are packed, so a sample that is drawn twice is packed twice.
        lengths: Tokens of every sample by its id: a 1-d array of integers, in memory or memory-mapped.
        packing: How documents are packed.
        key: (seed, epoch), and further numbers where one epoch has several packed orders. None keeps the rows of a
            window in the order of their first documents.
        first_rows: An earlier value of `first_rows` of the same epoch, which saves planning.

    Raises:
        ValueError: An argument of another shape or type.

    Example::

        packed = PackedOrder(run.epoch(0), lengths, Packing(row_length=2048), key=(seed, 0))
        RowSpans.of(take(packed.walk(RowPosition(window=3, row=17)), 64)).ids  # the samples of 64 rows
    """

    def __init__(
        self,
        order: Samples,
        lengths: NDArray[np.integer],
        packing: Packing,
        *,
        key: tuple[int, ...] | None = None,
        first_rows: NDArray[np.int64] | None = None,
    ) -> None:
        if lengths.ndim != 1 or not np.issubdtype(lengths.dtype, np.integer):
            raise ValueError(f"Lengths must be a 1-d array of integers; found {lengths.dtype}{list(lengths.shape)}.")
        self._order, self._lengths, self.packing, self._key = order, lengths, packing, key
        self.num_windows = ceil_div(order.num_samples, packing.window)
        known = np.zeros(1, dtype=np.int64) if first_rows is None else first_rows
        if known[:1].tolist() != [0] or (np.diff(known) < 0).any() or len(known) > self.num_windows + 1:
            raise ValueError(
                f"first_rows must rise from 0 and have at most {self.num_windows + 1} numbers, one more than there are "
                f"windows; found {len(known)} of them, first {known[:3]}. Pass the array of this epoch, or None."
            )
        self._first_rows = np.zeros(self.num_windows + 1, dtype=np.int64)
        self._first_rows[: len(known)] = known
        self._num_known = len(known)
        self._windows: dict[int, PackedWindow] = {}

    def window(self, number: int) -> PackedWindow:
        """Plan one window; the last few are kept. O(W log W)."""
        if not 0 <= number < self.num_windows:
            raise ValueError(f"Windows count from 0 to {self.num_windows - 1} here; found {number}.")
        return kept(self._windows, number, self._plan, _KEPT_WINDOWS)

    def _plan(self, number: int) -> PackedWindow:
        packing, begin = self.packing, number * self.packing.window
        ids = self._order.ids(begin, min(begin + packing.window, self._order.num_samples))
        rows = pack_window(self._lengths[ids], packing.row_length, packing.long_documents)
        if self._key is not None:
            rows = rows.take(permutation(RngStream.ROWS, *self._key, number, size=len(rows)))
        return PackedWindow(number, begin, ids, rows)

    def walk(self, start: RowPosition) -> Iterator[RowRange]:
        """All rows from a position on, one range for each window that has any; a window is planned when it is due."""
        number, row = start
        if number < self.num_windows and not 0 <= row <= len(self.window(number).rows):
            raise ValueError(
                f"Window {number} has {len(self.window(number).rows)} rows, but the position is row {row}."
            )
        for later in range(number, self.num_windows):
            window = self.window(later)
            begin = row if later == number else 0
            if begin < len(window.rows):
                yield RowRange(window, begin, len(window.rows))

    @property
    def first_rows(self) -> NDArray[np.int64]:
        """int64[known]: the first row of each window, counted over the epoch, as far as windows were counted.

        Once `num_rows` was asked for, it has ``num_windows + 1`` numbers, of which the last is the number of rows.
        """
        known: NDArray[np.int64] = self._first_rows[: self._num_known].copy()
        return known

    @property
    def num_rows(self) -> int:
        """Rows of the epoch. This plans every window that was not counted before."""
        return self._first_row(self.num_windows)

    def row_number(self, position: RowPosition) -> int:
        """Rows before a position. This plans the windows before it that were not counted before."""
        return self._first_row(position.window) + position.row

    def position_of(self, row: int) -> RowPosition:
        """The position of a row, counted over the epoch. This plans the windows up to it that were not counted yet."""
        while self._first_rows[self._num_known - 1] <= row and self._num_known <= self.num_windows:
            self._first_row(self._num_known)
        known = self._first_rows[: self._num_known]
        if not 0 <= row < known[-1]:
            raise ValueError(f"Rows count from 0 to {known[-1] - 1} here; found {row}.")
        window = int(np.searchsorted(known, row, side="right")) - 1
        return RowPosition(window, row - int(known[window]))

    def _first_row(self, window: int) -> int:
        first = self._first_rows
        for number in range(self._num_known - 1, window):
            first[number + 1] = first[number] + len(self.window(number).rows)
            self._num_known = number + 2  # threads that share an epoch may count a window twice, with the same result
        return int(first[window])


def take(ranges: Iterable[RowRange], count: int) -> list[RowRange]:
    """The first ``count`` rows of these ranges, or all if there are fewer."""
    found: list[RowRange] = []
    for one in ranges if count else ():
        found.append(one._replace(end=min(one.end, one.begin + count)))
        count -= found[-1].end - one.begin
        if not count:
            break
    return found
