"""The native order of one set of drawn samples: a rolling window over shards, read at any position without replay.

The drawn samples are split evenly into canonical nodes; position p belongs to node p mod C. Within a node the parts get
a new order each epoch; each is permuted and cut into w pieces, and mixing block t holds piece i of part t - i. So one
part enters and one leaves with each block. The window fills with half pieces, and the last block holds all that the
last parts have left. (README.md has a drawing.)

Which shards are active together is random, but the active ones always span all the data (`spread_parts`). On data
sorted on disk a batch then touches nearly as many disk segments as a truly random one: 88 of 100 instead of 69 with 128
active shards of 400 (random: 92).
"""

from __future__ import annotations

from bisect import bisect_right
from functools import cached_property, lru_cache, partial

import numpy as np
from numpy.typing import NDArray

from lightning_stream.lazy import kept
from lightning_stream.order.draw import Draw, ShardDraws
from lightning_stream.order.permutation import RngStream, permutation, place_in_permutation
from lightning_stream.order.spread import spread_parts

_CHUNK = 1 << 12
_MOST_PARTS = 2**28


class Parts:
    """The drawn shards as numbered parts, in their order: each pass over a shard, then its subset. O(shards)."""

    def __init__(self, draw: Draw, epoch: int, drawn: ShardDraws) -> None:
        self._draw, self._epoch, self.drawn = draw, epoch, drawn
        self._sizes = draw.snapshot.sizes[drawn.shard]
        self._ends = np.cumsum(drawn.count)
        self.num_samples = int(self._ends[-1]) if len(self._ends) else 0
        self._single = bool((drawn.count <= self._sizes).all())  # one part of each shard
        parts = np.ones_like(drawn.count) if self._single else (drawn.count - 1) // self._sizes + 1
        self._last = np.cumsum(parts) - 1  # the last part of each shard
        self.num_parts = int(self._last[-1]) + 1 if len(self._last) else 0
        self._subsets: dict[int, NDArray[np.int64]] = {}

    def find(self, sample: int) -> tuple[int, int, int]:
        """The part that holds the sample with this number, the sample's index in it, and the part's length."""
        entry = int(np.searchsorted(self._ends, sample, side="right"))
        count, size = int(self.drawn.count[entry]), int(self._sizes[entry])
        number, inside = divmod(sample - int(self._ends[entry]) + count, size)
        return int(self._last[entry]) - (count - 1) // size + number, inside, min(size, count - number * size)

    def span(self, first: int, end: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Parts [first, end): the shard of each, and its samples."""
        if self._single:
            return self.drawn.shard[first:end], self.drawn.count[first:end].copy()
        part = np.arange(first, end)
        entry = np.searchsorted(self._last, part)
        count, size = self.drawn.count[entry], self._sizes[entry]
        number = (count - 1) // size - self._last[entry] + part
        return self.drawn.shard[entry], np.minimum(size, count - number * size)

    def ids(self, part: int, before: int, behind: int) -> NDArray[np.int64]:
        """Sample ids of one part in the order in which they are drawn, without so many at its begin and at its end."""
        return self._draw.delivered(self._epoch, self._drawn(part, before, behind))

    def _drawn(self, part: int, before: int, behind: int) -> NDArray[np.int64]:
        """The drawn ids of a part, ascending: those of :meth:`ids`, unless they are forgotten."""
        entry = part if self._single else int(np.searchsorted(self._last, part))
        shard, size = int(self.drawn.shard[entry]), int(self._sizes[entry])
        subset = int(self.drawn.count[entry]) % size
        if not subset or part < self._last[entry]:
            return self._draw.ids(self._epoch, shard, size, before, size - behind)
        # Kept, since each batch needs it: a draw of half of a shard of 10^6 samples takes 18 ms.
        ids = kept(self._subsets, part, lambda _: self._draw.ids(self._epoch, shard, subset, 0, subset), 2)
        return ids[before : subset - behind]

    def numbers_of(self, sample_id: int) -> list[int]:
        """The numbers, as in :meth:`find`, under which a sample is delivered, ascending."""
        drawn = self._draw.drawn_for(self._epoch, sample_id)
        return sorted(number for one in drawn for number in self._numbers_drawn(one))

    def _numbers_drawn(self, sample_id: int) -> list[int]:
        shard, inside = (int(one[0]) for one in self._draw.snapshot.locate(np.array([sample_id])))
        entry = int(self._entry_of[shard])
        if entry < 0:
            return []
        count, size = int(self.drawn.count[entry]), int(self._sizes[entry])
        begin, (passes, subset) = int(self._ends[entry]) - count, divmod(count, size)
        numbers = [begin + number * size + inside for number in range(passes)]
        if subset:
            at = np.flatnonzero(self._drawn(int(self._last[entry]), 0, 0) == sample_id)
            numbers += (begin + passes * size + at).tolist()
        return numbers

    @cached_property
    def _entry_of(self) -> NDArray[np.int64]:
        """Where each shard is among the drawn ones; -1 for one that is not drawn."""
        entry_of = np.full(self._draw.snapshot.num_shards, -1, dtype=np.int64)
        entry_of[self.drawn.shard] = np.arange(len(self.drawn.shard))
        return entry_of


class IndexOrder:
    """``shuffle=False``: index order. One canonical node, since neighbours share their shard without any grouping."""

    def __init__(self, parts: Parts) -> None:
        self._parts, self.num_samples = parts, parts.num_samples

    def ids(self, begin: int, end: int) -> NDArray[np.int64]:
        """Sample ids at positions [begin, end)."""
        pieces, at = [np.empty(0, dtype=np.int64)], begin
        while at < end:
            part, inside, count = self._parts.find(at)
            pieces.append(self._parts.ids(part, inside, max(0, count - inside - (end - at))))
            at += count - inside
        return pieces[1] if len(pieces) == 2 else np.concatenate(pieces)

    def ids_at(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Sample ids at positions that lie near each other."""
        begin = int(positions.min())
        return self.ids(begin, int(positions.max()) + 1)[positions - begin]

    def split(self, most: int) -> list[IndexOrder]:  # noqa: ARG002
        """One sequence: see `WindowOrder.split`."""
        return [self]

    def positions(self, sample_id: int) -> list[int]:
        """All positions of a sample, ascending."""
        return self._parts.numbers_of(sample_id)

    def canonical(self, begin: int, end: int) -> NDArray[np.int64]:
        """All positions belong to the one canonical node."""
        return np.zeros(max(end - begin, 0), dtype=np.int64)


class WindowOrder:
    """The rolling window over parts, in the run-constant order in which canonical nodes get their shards.

    ``key`` is (seed, epoch, set of streams), a part of every key; C and w are ``canonical_nodes`` and ``window``.
    """

    def __init__(
        self, parts: Parts, key: tuple[int, int, int], *, canonical_nodes: int, window: int, quick_start: bool = False
    ) -> None:
        self.parts, self.key, self.canonical_nodes, self.window = parts, key, canonical_nodes, window
        self.quick_start = quick_start
        self.num_samples = parts.num_samples
        if parts.num_parts > _MOST_PARTS:
            raise ValueError(
                f"A shuffled epoch takes 16 bytes for each pass over a shard, at most {_MOST_PARTS} of them, but "
                f"{parts.num_parts} are drawn. Lower repeat, choose or epoch_size: an epoch may be shorter."
            )
        shard = parts.drawn.shard
        self.first_group = int(shard.min(initial=2**62)) // canonical_nodes
        self.num_groups = max(int(shard.max(initial=0)) // canonical_nodes - self.first_group + 1, 1)
        self._nodes: dict[int, NodeWindow] = {}
        self._chunks: dict[int, NDArray[np.int64]] = {}

    def ids(self, begin: int, end: int) -> NDArray[np.int64]:
        """Sample ids at positions [begin, end). Small ranges are cut from a chunk that is read at once, for speed."""
        if end - begin > _CHUNK or begin >= end:
            return self.read(begin, end)
        pieces = []
        for first in range(begin // _CHUNK * _CHUNK, end, _CHUNK):
            ids = kept(self._chunks, first, lambda at: self.read(at, min(at + _CHUNK, self.num_samples)), 2)
            pieces.append(ids[max(begin - first, 0) : end - first])
        return np.concatenate(pieces)

    def read(self, begin: int, end: int, step: int = 1) -> NDArray[np.int64]:
        """Sample ids at positions begin, begin + step, ... below ``end``; ``step`` divides C."""
        count = self.canonical_nodes
        out = np.empty(max((end - begin + step - 1) // step, 0), dtype=np.int64)
        for k, first in enumerate(range(begin, min(begin + count, end), step)):
            node, index = first % count, first // count
            stop = index + (end - first + count - 1) // count
            out[k :: count // step] = self._node(node).ids(index, stop)
        return out

    def ids_at(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Sample ids at positions that lie near each other; canonical nodes that have none of them cost nothing."""
        out, (indices, nodes) = np.empty_like(positions), np.divmod(positions, self.canonical_nodes)
        for node in np.unique(nodes).tolist():
            own = np.flatnonzero(nodes == node)
            begin, end = int(indices[own].min()), int(indices[own].max()) + 1
            out[own] = self._node(node).ids(begin, end)[indices[own] - begin]
        return out

    def split(self, most: int) -> list[EveryNth]:
        """As many sequences as possible, at most ``most``, of equally many canonical nodes each."""
        nodes = self.canonical_nodes
        count = max(count for count in range(1, min(nodes, most) + 1) if nodes % count == 0)
        return [EveryNth(self, first, count) for first in range(count)]

    def _node(self, node: int) -> NodeWindow:
        return kept(self._nodes, node, partial(NodeWindow, self), self.canonical_nodes)

    def positions(self, sample_id: int) -> list[int]:
        """All positions of a sample, ascending. O(samples of two shards), and O(parts) the first time in a node."""
        size, longer = divmod(self.num_samples, self.canonical_nodes)
        found = []
        for number in self.parts.numbers_of(sample_id):
            node = number // (size + 1) if number < longer * (size + 1) else (number - longer) // size
            found.append(self._node(node).index_of(number) * self.canonical_nodes + node)
        return sorted(found)

    def canonical(self, begin: int, end: int) -> NDArray[np.int64]:
        """The canonical node of each position: p mod C."""
        return np.arange(begin, max(end, begin), dtype=np.int64) % self.canonical_nodes


class EveryNth:
    """The samples at positions first, first + step, ... of an order: those of some of its canonical nodes."""

    def __init__(self, whole: WindowOrder, first: int, step: int) -> None:
        self._whole, self._first, self._step = whole, first, step
        self.num_samples = len(range(first, whole.num_samples, step))

    def ids(self, begin: int, end: int) -> NDArray[np.int64]:
        """Sample ids at positions [begin, end) of this sequence."""
        first, step = self._first + self._step * begin, self._step
        return self._whole.read(first, min(self._first + step * end, self._whole.num_samples), step)


SampleOrder = IndexOrder | WindowOrder
"""The order of one set of drawn samples in one epoch, readable at any position."""


class NodeWindow:
    """The rolling window of one canonical node, whose samples are cut out of all parts; a part on a border is cut."""

    def __init__(self, whole: WindowOrder, node: int) -> None:
        nodes, parts = whole.canonical_nodes, whole.parts
        self._parts, self._window, self._key = parts, whole.window, (*whole.key, node)
        self._in_disk_order = whole.window - 1 if whole.quick_start else 0  # so many parts, the first ones
        size, longer = divmod(whole.num_samples, nodes)
        begin = size * node + min(node, longer)
        end = begin + size + (node < longer)
        (self._first, self._before, _), (last, inside, count) = parts.find(begin), parts.find(end - 1)
        self._behind = count - inside - 1  # samples of the last part that the next node has, as `_before` of the first
        self._num_parts = last + 1 - self._first
        shards, sizes = self._span()
        group = shards // nodes - whole.first_group
        # The part at each place of the epoch, counted from the first, and where each mixing block ends.
        self._order = spread_parts(self._key, group, whole.num_groups, nodes, self._window)
        self._ends = block_ends(sizes[self._order], self._window)
        self._permuted: dict[int, tuple[NDArray[np.int64], tuple[int, ...]]] = {}
        self._mixing_blocks: dict[int, NDArray[np.int64]] = {}

    def _span(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The shard of each part, and its samples in this node."""
        shards, sizes = self._parts.span(self._first, self._first + self._num_parts)
        sizes[0] -= self._before
        sizes[-1] -= self._behind
        return shards, sizes

    def ids(self, begin: int, end: int) -> NDArray[np.int64]:
        """Sample ids at this node's indices [begin, end)."""
        pieces, at, block = [], begin, int(np.searchsorted(self._ends, begin, side="right"))
        while at < end:
            ids, stop = kept(self._mixing_blocks, block, self._mixing_block, 2), int(self._ends[block])
            start = stop - len(ids)
            pieces.append(ids[at - start : min(end, stop) - start])
            at, block = min(end, stop), block + 1
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    def _mixing_block(self, block: int) -> NDArray[np.int64]:
        is_last = block == len(self._order) - 1
        pieces = []
        for place in range(max(0, block - self._window + 1), block + 1):
            ids, begins = kept(self._permuted, place, self._part, self._window + 1)
            piece = block - place
            pieces.append(ids[begins[piece] : len(ids) if is_last else begins[piece + 1]])
        ids = np.concatenate(pieces)
        return ids[permutation(RngStream.MIXING_BLOCK, *self._key, block, size=len(ids))]

    def _part(self, place: int) -> tuple[NDArray[np.int64], tuple[int, ...]]:
        """The ids of the part at a place, permuted, and where its pieces begin."""
        part = int(self._order[place])
        before = self._before if part == 0 else 0
        behind = self._behind if part == len(self._order) - 1 else 0
        ids = self._parts.ids(self._first + part, before, behind)
        if place >= self._in_disk_order:
            ids = ids[permutation(RngStream.SAMPLES, *self._key, place, size=len(ids))]
        return ids, piece_begins(len(ids), min(place, self._window), self._window)  # all later places are alike

    def index_of(self, number: int) -> int:
        """The index in this node of the sample that has this number among the drawn ones, see `Parts.find`.

        The inverse of :meth:`ids`, without its sorts: first through the permutation of the part, to its piece and the
        mixing block of that, then through the permutation of the block.
        """
        part, inside, _ = self._parts.find(number)
        places, sizes = self._places
        place = int(places[part - self._first])
        inside -= self._before if part == self._first else 0
        size, last = int(sizes[place]), self._num_parts - 1
        at = inside
        if place >= self._in_disk_order:
            at = place_in_permutation(RngStream.SAMPLES, *self._key, place, size=size, index=inside)
        begins = piece_begins(size, min(place, self._window), self._window)
        block = min(place + bisect_right(begins, at) - 1, last)
        before = at - begins[block - place]
        for earlier in range(max(0, block - self._window + 1), place):
            size = int(sizes[earlier])
            begins = piece_begins(size, min(earlier, self._window), self._window)
            before += (size if block == last else begins[block - earlier + 1]) - begins[block - earlier]
        begin, end = (int(self._ends[block - 1]) if block else 0), int(self._ends[block])
        key = (*self._key, block)
        return begin + place_in_permutation(RngStream.MIXING_BLOCK, *key, size=end - begin, index=before)

    @cached_property
    def _places(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The place of each part, and the size of the part at each place."""
        places = np.empty_like(self._order)
        places[self._order] = np.arange(self._num_parts)
        return places, self._span()[1][self._order]


def block_ends(sizes: NDArray[np.int64], window: int) -> NDArray[np.int64]:
    """int64[K]: where each mixing block of a node ends. O(K + w**2)."""
    num_parts = len(sizes)
    head = min(window - 1, num_parts)
    length = num_parts + window + 1
    rise = np.zeros(length, dtype=np.int64)
    steady = np.arange(head, num_parts)
    small, longer = sizes[head:] // window, sizes[head:] % window
    rise[head:num_parts] += small + (longer > 0)
    rise[head + window : num_parts + window] -= small
    rise -= np.bincount(steady + longer, weights=longer > 0, minlength=length).astype(np.int64)
    blocks = np.cumsum(rise)
    for place in range(head):
        blocks[place : place + window] += np.diff(piece_begins(int(sizes[place]), place, window))
    ends = np.cumsum(blocks)[:num_parts]
    ends[-1:] = sizes.sum()  # the last block holds all that is left
    return ends


@lru_cache(maxsize=256)  # most parts are of like sizes
def piece_begins(size: int, place: int, window: int) -> tuple[int, ...]:
    """Where each of the w pieces of the part at ``place`` begins, and the end.

    The first ``size mod w`` of them are one longer. While the window fills, the first w - 1 parts give half pieces, and
    the rest in equal pieces once it is full: so it fills twice as fast.
    """
    filling = max(0, window - 1 - place)
    half = size // (2 * window)
    even, longer = divmod(size - half * filling, window - filling)
    piece = np.arange(window + 1, dtype=np.int64)
    late = np.maximum(piece - filling, 0)
    begins = half * np.minimum(piece, filling) + even * late + np.minimum(late, longer)
    return tuple(begins.tolist())
