"""The samples of an epoch as sequences that can be read at any positions, and the ways to compose them.

    Window      the drawn shards of some streams, shuffled by a rolling window, or in index order (window.py)
    Repeated    a stream's own epochs, one after another; `VersionedOrder` (switches.py): the versions of an epoch
    Interleave  blocks of several sequences, in the order that a merge gives: `EvenMerge`, or a `Mixture`
    Regrouped   windows of a sequence, packed into rows or sorted by length (rows.py)

Every sequence answers for ascending positions, int64[n]: `ids`, `nodes` (what shares are grouped by); and the inverse,
`find`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from lightning_stream.lazy import cached

from .arrays import Ints, segment_of, starts_of
from .permutation import MIX_STEP, RngStream, mix64, random_u64

if TYPE_CHECKING:
    from .mixture import Mixture
    from .packing import RowSpans

CHUNK = 1 << 12  # positions
Counted = tuple[int, int, int]
"""A window, and the rows (or batches) before it and before the next one. Equal: nothing is known of what it has."""
Windows = tuple[Counted, ...]


def ceil_div(dividend: int, divisor: int) -> int:
    """``dividend / divisor`` rounded up."""
    return (dividend + divisor - 1) // divisor


def positions_of(begin: int, end: int) -> Ints:
    """The positions [begin, end) as an array."""
    return np.arange(begin, end)


def chunks_of(begin: int, end: int, length: int = 1 << 20) -> Iterator[Ints]:
    """The positions [begin, end), so many at once."""
    for first in range(begin, end, length):
        yield positions_of(first, min(first + length, end))


def places_by(key: Ints) -> Iterator[tuple[int, Ints]]:
    """Each value of ``key``, ascending, with the places that have it, ascending."""
    low = int(key.min(initial=2**62))
    high = int(key.max(initial=0))
    if low == high:
        yield low, np.arange(len(key))
        return
    small = (
        (key - low).astype(np.uint16) if high - low < 2**16 else key
    )  # which is sorted by its digits: 3 times as fast
    order = np.argsort(small, kind="stable")
    ordered = key[order]
    edges = [0, *(np.flatnonzero(ordered[1:] != ordered[:-1]) + 1).tolist(), len(key)]
    for begin, end in pairwise(edges if len(key) else []):
        yield int(ordered[begin]), order[begin:end]


class Order(ABC):
    """A sequence of samples, or of rows of them.

    Attributes:
        size: How many. Of rows, which are counted window by window, it is far cheaper to ask `reaches`.
        full_end: Positions [0, full_end) are cut into global batches of B one after another; behind them lie the
            remainders of the streams.
    """

    size: int

    @property
    def full_end(self) -> int:
        return self.size

    @abstractmethod
    def ids(self, at: Ints) -> Ints:
        """The sample id at each position; of rows, the fingerprint of each."""

    def nodes(self, at: Ints) -> Ints:
        """The canonical node of each position: node 0, where no node has samples of its own."""
        return np.zeros_like(at)

    def find(self, sample_id: int) -> list[int]:
        """All positions of a sample, ascending. Here O(size), by a search."""
        positions: list[int] = []
        for at in chunks_of(0, self.size):
            positions += at[self.ids(at) == sample_id].tolist()
        return positions

    def reaches(self, position: int) -> bool:
        """Whether the positions before this one are cut into global batches of B one after another."""
        return position <= self.full_end

    def reads_to(self, end: int) -> bool:
        """Whether the positions before this one can be read."""
        return self.reaches(end) or end <= self.size

    def sequences(self, most: int) -> Sequence[Order]:
        """At most so many sequences that need different shards, to be packed separately."""
        return [self]

    def spans(self, at: Ints) -> RowSpans | None:
        """What the rows at some positions hold; None where positions are samples."""
        return None

    @property
    def samples_per_position(self) -> int:
        """About so many, where samples are packed into rows."""
        return 1

    def samples_in(self, num_positions: int) -> int:
        """About how many samples global batches have that count as so many positions."""
        return num_positions * self.samples_per_position

    def position_after(self, delivered: int) -> int:
        """The position after so many delivered samples: repeats, which some orders deliver, have none."""
        return delivered

    def delivered_before(self, position: int) -> int | None:
        """The opposite of `position_after`; None where that is no number of whole batches."""
        return position

    def batches_before(self, position: int) -> int | None:
        """Global batches that end at or before a position; None where all have the size that the run gives them."""
        return None

    def cursor(self, position: int) -> Windows | None:
        """The windows that a state holds so that a resume at this position is fast; None where every position is."""
        return None

    def alternatives(self, position: int, seed: int, epoch: int) -> RowSpans:
        """Rows to try where the one at a position cannot be read: 16 of its window at random, or none."""
        raise TypeError("Only packed rows have alternatives.")

    @property
    def is_counted(self) -> bool:
        """Whether it is known how many rows or batches each window has, where they are counted."""
        return False

    @property
    def below(self) -> Order:
        """The order whose windows are packed or rearranged, where they are; else this one."""
        return self

    def unchanged_from(self, position: int) -> int:
        """The first position of `below` that changes nothing before a position of this order."""
        return position

    def version_at(self, position: int) -> int:
        """The number of the version of the data at a position, where a run switches between several."""
        return 0


class Listed(Order):
    """A sequence whose sample ids are in memory."""

    def __init__(self, ids: Ints) -> None:
        self.size = len(ids)
        self._ids = ids

    def ids(self, at: Ints) -> Ints:
        return self._ids[at]


class ReadInChunks(Order):
    """A sequence whose small ranges are cut from a chunk that is read at once, for speed."""

    chunk_length = CHUNK

    def __init__(self, size: int) -> None:
        self.size = size
        self._chunks: dict[int, Ints] = {}

    @abstractmethod
    def _read(self, at: Ints) -> Ints:
        """The sample id at each position."""

    def ids(self, at: Ints) -> Ints:
        """The sample id at each position."""
        length = self.chunk_length
        if not len(at) or at[-1] - at[0] >= length:
            return self._read(at)
        first = int(at[0]) // length * length
        chunks = [cached(self._chunks, begin, self._chunk, 2) for begin in range(first, int(at[-1]) + 1, length)]
        ids = chunks[0] if len(chunks) == 1 else np.concatenate(chunks)
        begin = int(at[0]) - first
        last = int(at[-1]) - first
        return ids[begin : last + 1].copy() if last - begin == len(at) - 1 else ids[at - first]

    def _chunk(self, begin: int) -> Ints:
        return self._read(positions_of(begin, min(begin + self.chunk_length, self.size)))


class EveryNth(Order):
    """Positions first, first + step, ... of an order: some of its canonical nodes."""

    def __init__(self, parent: Order, first: int, step: int) -> None:
        self._parent = parent
        self._first = first
        self._step = step
        self.size = len(range(first, parent.size, step))

    def ids(self, at: Ints) -> Ints:
        return self._parent.ids(self._first + self._step * at)

    def nodes(self, at: Ints) -> Ints:
        return self._parent.nodes(self._first + self._step * at)


class Composed(Order):
    """An order of which every position is one of a member's."""

    @abstractmethod
    def locate(self, at: Ints) -> tuple[Ints, Ints]:
        """The member of each position, and the position there."""

    @abstractmethod
    def member(self, index: int) -> Order:
        """A member; not all of them need be in memory."""

    def ids(self, at: Ints) -> Ints:
        return self._gathered(at, lambda order, inside: order.ids(inside))

    def nodes(self, at: Ints) -> Ints:
        return self._gathered(at, lambda order, inside: order.nodes(inside))

    def _gathered(self, at: Ints, read: Callable[[Order, Ints], Ints]) -> Ints:
        indices, inside = self.locate(at)
        out = np.empty_like(at)
        for index, places in places_by(indices):
            out[places] = read(self.member(index), inside[places])
        return out


class Repeated(Composed):
    """Sequences of one size one after another, without end: a stream's own epochs. `find` searches [begin, end)."""

    def __init__(self, make: Callable[[int], Order], length: int, begin: int, end: int) -> None:
        self._make = make
        self._length = length
        self._begin = begin
        self.size = end

    def locate(self, at: Ints) -> tuple[Ints, Ints]:
        return np.divmod(at, self._length)

    def member(self, index: int) -> Order:
        return self._make(index)

    def find(self, sample_id: int) -> list[int]:
        indices = range(self._begin // self._length, ceil_div(self.size, self._length))
        positions = (index * self._length + at for index in indices for at in self.member(index).find(sample_id))
        return [position for position in positions if self._begin <= position < self.size]


class EvenMerge:
    """Sequences merged evenly: entry j of a sequence of n has the key (j + u) / n, ties by sequence.

    As a `Mixture`, it says with `read` which sequence each entry of [begin, end) is of, and its index there; and with
    `find` the opposite.

    u is 1/2, or with a seed a number in [0, 1) of (seed, epoch, sequence, j). Keys are IEEE doubles, whose division is
    correctly rounded everywhere, so equal fractions tie and every machine merges alike. O(sequences + range).
    """

    def __init__(self, counts: Ints, epoch: int, seed: int | None) -> None:
        self._counts = counts
        self._total = int(counts.sum())
        self._salt = None if seed is None else random_u64(RngStream.JITTER, seed, epoch, size=len(counts))

    def read(self, begin: int, end: int) -> tuple[Ints, Ints]:
        # At key t, a sequence of n has between t * n - 1 and t * n + 1 entries below; so all together are within their
        # number of t * total.
        margin = len(self._counts) + 1
        below = (begin - margin) / self._total * self._counts
        above = (end + margin) / self._total * self._counts
        low = np.clip(np.floor(below).astype(np.int64) - 1, 0, self._counts)
        high = np.clip(np.ceil(above).astype(np.int64) + 1, 0, self._counts)
        starts = starts_of(high - low)
        sequence = np.repeat(np.arange(len(low)), high - low)
        index = np.arange(len(sequence)) - (starts[:-1] - low)[sequence]
        order = np.argsort(self._keys(sequence, index), kind="stable")
        skipped = begin - int(low.sum())
        order = order[skipped : skipped + end - begin]
        return sequence[order], index[order]

    def find(self, stream: int, index: int, begin: int, end: int) -> int:
        key = float(self._keys(np.array([stream]), np.array([index]))[0])
        near = int(key * self._total)
        margin = len(self._counts) + 2
        begin = max(near - margin, begin)
        sequences, indices = self.read(begin, min(near + margin, end))
        return begin + int(np.flatnonzero((sequences == stream) & (indices == index))[0])

    def _keys(self, sequence: Ints, index: Ints) -> NDArray[np.float64]:
        if self._salt is None:
            return (index + 0.5) / self._counts[sequence]
        scattered = mix64(self._salt[sequence] + index.astype(np.uint64) * MIX_STEP)
        jitter = (scattered >> np.uint64(12)).astype(np.float64) * 2.0**-52
        keys: NDArray[np.float64] = (index + jitter) / self._counts[sequence]
        return keys


class Interleave(Composed):
    """Blocks of several sequences, in the order that a merge gives; then the remainder of each sequence.

    With blocks of 2 samples, streams of 9 and 4 samples, and B = 4::

        positions   0 1 2 3 4 5 6 7 8 9 10 11 | 12
        stream      a a b b a a a a b b a  a  | a       six whole blocks, evenly; then the remainder of each stream
        number      0 1 0 1 2 3 4 5 2 3 6  7  | 8

    Args:
        orders: The sequences.
        merge: The sequence of each block.
        counts: int64[sequences]: the whole blocks of each, up to the end of this order.
        remainders: int64[sequences]: the samples of each behind these.
        block: Samples of a block.
        begin, end: The blocks of the merge that this order has.
    """

    def __init__(
        self,
        orders: Sequence[Order],
        merge: EvenMerge | Mixture,
        counts: Ints,
        remainders: Ints,
        block: int,
        begin: int,
        end: int,
    ) -> None:
        self._orders = orders
        self._merge = merge
        self._counts = counts
        self._blocks = (begin, end)
        self.block = block
        self._with_remainder = np.flatnonzero(remainders)
        self._borders = (end - begin) * block + starts_of(remainders[self._with_remainder])
        self.remainder_ends: list[int] = self._borders[1:].tolist()  # the positions behind each sequence's remainder
        self.size = int(self._borders[-1])
        self._located: tuple[Ints, Ints, Ints] | None = None

    @property
    def full_end(self) -> int:
        return int(self._borders[0])

    def member(self, index: int) -> Order:
        return self._orders[index]

    def locate(self, at: Ints) -> tuple[Ints, Ints]:
        """The sequence of each position, and the sample's index there."""
        located = self._located  # of the same array, since ids follow nodes
        if located is None or located[0] is not at:
            located = self._located = (at, *self._locate(at))
        return located[1], located[2]

    def _locate(self, at: Ints) -> tuple[Ints, Ints]:
        sequence = np.empty_like(at)
        index = np.empty_like(at)
        num_full = int(np.searchsorted(at, self.full_end))
        if num_full:
            blocks = at[:num_full] // self.block
            first = int(blocks[0])
            begin = self._blocks[0] + first
            which, indices = self._merge.read(begin, begin + int(blocks[-1]) - first + 1)
            sequence[:num_full] = which[blocks - first]
            index[:num_full] = indices[blocks - first] * self.block + at[:num_full] % self.block
        rest = at[num_full:]
        entry = segment_of(self._borders, rest)
        sequence[num_full:] = self._with_remainder[entry]
        index[num_full:] = self._counts[sequence[num_full:]] * self.block + rest - self._borders[entry]
        return sequence, index

    def find(self, sample_id: int) -> list[int]:
        places = [(which, index) for which, order in enumerate(self._orders) for index in order.find(sample_id)]
        positions = [self._position(*place) for place in places]
        return sorted(position for position in positions if position is not None)

    def _position(self, which: int, index: int) -> int | None:
        """The inverse of `locate`; None for an index that a mixture skips."""
        block, inside = divmod(index, self.block)
        begin, end = self._blocks
        if block < self._counts[which]:
            entry = self._merge.find(which, block, begin, end)
            return None if entry is None else (entry - begin) * self.block + inside
        place = int(np.searchsorted(self._with_remainder, which))
        return int(self._borders[place]) + index - int(self._counts[which]) * self.block
