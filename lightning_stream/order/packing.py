"""Documents of all lengths, packed into rows of one length: a pure function of the lengths in a window.

Best-fit decreasing: pieces are taken from the longest to the shortest, and each goes into the fullest row that still
has room for it. Among rows with equal room it goes into the one that has had this room for the longest time. Only
integers are used, so every machine packs alike. Log-normal documents (mean 700 tokens) in windows of 16,384 fill the
fewest possible rows in nearly every window: the padding that remains is in the last row.

    documents 0..4 of 3, 9, 4, 0 and 5 tokens, rows of 6:
    row 0   0 0 0 1 1 1      document 0, and the last 3 tokens of document 1
    row 1   1 1 1 1 1 1      the first 6 tokens of document 1
    row 2   2 2 2 2 . .      padding behind document 2
    row 3   4 4 4 4 4 .      document 3 is empty and appears nowhere
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from .arrays import Integers, Ints, ranges, starts_of
from .permutation import MIX_STEP, mix64
from .rules import TEXT, Rule, one_of, violations
from .rules import count as whole_number

LongDocuments = Literal["split", "truncate", "drop"]
LONG_DOCUMENTS: tuple[LongDocuments, ...] = ("split", "truncate", "drop")
_MOST_TOKENS = 2**31 - 1
_ROWS = 700  # of a window that is chosen: half a row of padding is then less than a part in a thousand
# Of such a window: more would keep the first batch waiting
_LEAST_DOCUMENTS = 4096
_MOST_DOCUMENTS = 65536
_SAMPLED = 1 << 12  # lengths that are averaged
_ENDLESS = 2**62


@dataclass(frozen=True)
class RowPacking:
    """How documents are packed into rows.

    Args:
        row_length: S, tokens of a row.
        window: W, documents that are packed together. A larger window leaves less padding, about half a row each.
        long_documents: What happens to documents of more than S tokens. ``"split"`` cuts them after every S tokens, and
            all pieces stay in their window; ``"truncate"`` keeps the first S tokens; ``"drop"`` omits them.
        lengths: A digest of the documents' lengths, by which a state recognises other data.

    Raises:
        ValueError: A value that is not allowed; all of them are named.

    Example::

        RowPacking(row_length=2048, long_documents="truncate")
    """

    row_length: int
    window: int = 16384
    long_documents: LongDocuments = "split"
    lengths: str = ""

    def __post_init__(self) -> None:
        if problems := violations(vars(self), _RULES):
            raise ValueError(f"Documents cannot be packed this way. {' '.join(problems)}")

    def packed_tokens(self, lengths: Integers) -> Ints:
        """How many tokens of each document are packed, int64[n]."""
        tokens = lengths.astype(np.int64)
        if self.long_documents == "split":
            return tokens
        return np.where(tokens > self.row_length, self.row_length if self.long_documents == "truncate" else 0, tokens)

    def usual_window(self, lengths: Integers) -> int:
        """The documents that fill about 700 rows, from 4,096 to 65,536, by the lengths of all samples."""
        tokens = self.packed_tokens(sampled(lengths))
        documents = _ROWS * self.row_length * len(tokens) // max(1, int(tokens.sum()))
        return min(max(documents, _LEAST_DOCUMENTS), _MOST_DOCUMENTS)


def sampled(lengths: Integers) -> Integers:
    """Some of the lengths, spread evenly over all: enough for their mean."""
    return lengths[:: max(1, -(-len(lengths) // _SAMPLED))]


_RULES: dict[str, Rule] = {
    "row_length": whole_number(1, _MOST_TOKENS),
    "window": whole_number(1, _MOST_TOKENS),
    "long_documents": one_of(*LONG_DOCUMENTS),
    "lengths": TEXT,
}


@dataclass(frozen=True, eq=False)
class RowSpans:
    """Rows as spans of samples: row r holds the spans [edges[r], edges[r + 1]).

    Attributes:
        edges: int64[rows + 1].
        ids: int64[spans], the sample of each span.
        first, num_tokens: int64[spans]; a span is the tokens [first, first + num_tokens) of its sample.
    """

    edges: Ints
    ids: Ints
    first: Ints
    num_tokens: Ints

    def __len__(self) -> int:
        """Rows."""
        return len(self.edges) - 1

    def __iter__(self) -> Iterator[RowSpans]:
        """Yield the rows one by one."""
        return (self.take(np.array([row])) for row in range(len(self)))

    def take(self, rows: Ints) -> RowSpans:
        """These rows, int64[n], in this order."""
        counts = np.diff(self.edges)[rows]
        edges = starts_of(counts)
        at = np.repeat(self.edges[rows] - edges[:-1], counts) + np.arange(edges[-1])
        return RowSpans(edges, self.ids[at], self.first[at], self.num_tokens[at])

    def fingerprints(self) -> Ints:
        """int64[rows] in [0, 2**63): a number for each row, which differs for other spans or another order."""
        counts = np.diff(self.edges)
        mixed = mix64(ranges(np.zeros_like(counts), counts).astype(np.uint64))
        for column in (self.ids, self.first, self.num_tokens):
            mixed = mix64(mixed + column.astype(np.uint64) * MIX_STEP)
        sums = np.add.reduceat(mixed, self.edges[:-1]) if len(self) else np.empty(0, np.uint64)
        prints: Ints = (sums >> np.uint64(1)).astype(np.int64)
        return prints

    @classmethod
    def joined(cls, parts: Sequence[RowSpans], places: Sequence[Ints] = ()) -> RowSpans:
        """The rows of all parts, one part after another; or each row at its place, if ``places`` of all are given."""
        if len(parts) == 1:
            return parts[0]
        none = np.empty(0, np.int64)
        parts = [cls(starts_of(none), none, none, none), *parts]
        columns = zip(*((part.ids, part.first, part.num_tokens) for part in parts), strict=True)
        edges = starts_of(np.concatenate([np.diff(part.edges) for part in parts]))
        rows = cls(edges, *map(np.concatenate, columns))
        return rows.take(np.argsort(np.concatenate(places))) if places else rows


class PackedWindow:
    """The documents of one window, of which the rows are counted; they are made when `rows` is called. O(W log W).

    To count them takes less than half of the time.

    Args:
        ids: The sample id of each document.
        lengths: Tokens of each document, 1-d; empty documents appear in no row.
        packing: How they are packed.

    Attributes:
        num_rows: How many rows they fill.

    Raises:
        ValueError: Lengths below 0, or none of whole numbers.

    Example::

        rows = PackedWindow(np.arange(5), np.array([3, 9, 4, 0, 5]), RowPacking(6)).rows()
        rows.edges.tolist()  # [0, 2, 3, 4, 5]
        rows.ids.tolist()    # [0, 1, 1, 2, 4]
        rows.first.tolist()  # [0, 6, 0, 0, 0]
    """

    def __init__(self, ids: Ints, lengths: Integers, packing: RowPacking) -> None:
        if lengths.ndim != 1 or not np.issubdtype(lengths.dtype, np.integer) or (lengths < 0).any():
            raise ValueError(
                f"Lengths must be a 1-d array of integers of at least 0; found {lengths.dtype}{list(lengths.shape)} "
                f"with a minimum of {lengths.min(initial=0)}."
            )
        self._ids = ids
        self._tokens = packing.packed_tokens(lengths)
        self._row_length = packing.row_length
        self._moves, self.num_rows = _best_fit(self._tokens, packing.row_length)

    def rows(self) -> RowSpans:
        """The rows, in the order of each one's first document; in each, spans are in the order of their documents."""
        # Every document is cut into pieces of a row at most; an empty one has none.
        pieces = -(-self._tokens // self._row_length)
        first = ranges(np.zeros_like(pieces), pieces) * self._row_length
        num_tokens = np.minimum(np.repeat(self._tokens, pieces) - first, self._row_length)
        row_of = np.empty(len(first), np.int64)
        row_of[_sorted_by(self._row_length - num_tokens)] = _placed(self._moves, self._row_length)
        first_span = np.empty(self.num_rows, np.int64)
        first_span[row_of[::-1]] = np.arange(len(row_of))[::-1]  # the last write to an index remains: the first span's
        row_of = np.argsort(np.argsort(first_span))[row_of]
        order = _sorted_by(row_of)
        edges = starts_of(np.bincount(row_of, minlength=self.num_rows))
        return RowSpans(edges, np.repeat(self._ids, pieces)[order], first[order], num_tokens[order])


_Move = tuple[int, int, int, int]
"""A room, rows that have it, pieces that each of them takes, and the room left. With the room of a whole row, they are
new."""


def _best_fit(tokens: Ints, row_length: int) -> tuple[list[_Move], int]:
    """Where all pieces of documents go, from the longest to the shortest, and how many rows they fill.

    Equal pieces are placed together: the fullest row with room takes as many as fit, and so does each row with equal
    room. With rows of 8,192 tokens, 16,384 log-normal documents take about 4,000 such moves.
    """
    full, rest = np.divmod(tokens, row_length)
    rests, counts = np.unique(rest[rest > 0], return_counts=True)
    pieces = [(row_length, int(full.sum())), *zip(rests[::-1].tolist(), counts[::-1].tolist(), strict=True)]
    shortest = pieces[-1][0]
    rooms = [row_length]  # the different rooms of rows that have room for the shortest piece, ascending
    num_rows = {row_length: _ENDLESS}  # how many rows have each of them: new rows never end
    moves: list[_Move] = []
    for length, count in pieces:
        at = bisect_left(rooms, length)
        while count:
            room = rooms[at]
            num_pieces = room // length
            if num_pieces > count:
                num_pieces = count
            num_filled = count // num_pieces
            if num_filled < num_rows[room]:
                num_rows[room] -= num_filled
            else:
                num_filled = num_rows.pop(room)
                del rooms[at]
            count -= num_pieces * num_filled
            left = room - num_pieces * length
            moves.append((room, num_filled, num_pieces, left))
            if left in num_rows:
                num_rows[left] += num_filled
            elif left >= shortest:
                num_rows[left] = num_filled
                insort(rooms, left)
                at += 1
    return moves, _ENDLESS - num_rows[row_length]


def _placed(moves: list[_Move], row_length: int) -> list[int]:
    """The row of each piece, from the longest to the shortest; rows count as they are opened."""
    queues: dict[int, list[int]] = {}  # the rows with each room, the longest waiting first
    placed: list[int] = []
    num_opened = 0
    for room, num_rows, num_pieces, left in moves:
        if room == row_length:
            rows = list(range(num_opened, num_opened + num_rows))
            num_opened += num_rows
        else:
            queue = queues[room]
            rows = queue[:num_rows]
            del queue[:num_rows]
        placed += rows if num_pieces == 1 else [row for row in rows for _ in range(num_pieces)]
        if left in queues:
            queues[left] += rows
        else:
            queues[left] = rows
    return placed


def _sorted_by(keys: Ints) -> Ints:
    """The stable argsort of keys in [0, 2**31): one sort, which is faster than an argsort, moves key and index."""
    packed = keys * len(keys) + np.arange(len(keys))
    packed.sort()
    return packed % max(len(keys), 1)
