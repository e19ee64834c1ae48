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
from collections.abc import Sequence
from functools import cached_property, lru_cache, partial

import numpy as np

from lightning_stream.lazy import cached

from .arrays import Integers, Ints, segment_of, starts_of
from .draw import Draw, ShardDraws
from .orders import CHUNK, EveryNth, Order, ReadInChunks, places_by, positions_of
from .permutation import RngStream, permutation, place_in_permutation
from .spread import spread_parts

_KEPT_PART = 1 << 15  # samples: a smaller part is kept until it is read; of a larger one, each piece is made again
_SLICE = 1 << 17  # entries of a mixing block that are in memory together: a last block is as large as several parts


class Window(ReadInChunks):
    """The rolling window over drawn shards: position p is entry p // C of canonical node p mod C.

    Args:
        draw, epoch: What an epoch draws.
        drawn: The shards, in the run-constant order in which canonical nodes get them.
        key: (seed, epoch, set of streams), a part of every random key.
        num_nodes, window: C and w.
        quick_start: Whether the first w - 1 parts of a node are read as they are stored.
    """

    def __init__(
        self,
        draw: Draw,
        epoch: int,
        drawn: ShardDraws,
        key: tuple[int, int, int],
        num_nodes: int,
        window: int,
        quick_start: bool,
    ) -> None:
        super().__init__(int(drawn.parts.begins[-1]))
        self.draw = draw
        self.epoch = epoch
        self.key = key
        self.num_nodes = num_nodes
        self.window = window
        self.stored_parts = window - 1 if quick_start else 0
        self.parts = drawn.parts
        # Ids in memory: half as much where they fit.
        self.dtype = np.uint32 if draw.snapshot.num_samples <= 2**32 else np.int64
        self._nodes: dict[int, _NodeWindow] = {}

    def _chunk(self, begin: int) -> Ints:
        if len(self.parts.shard) > 1 or self.size > CHUNK:
            return super()._chunk(begin)
        # One small shard, as a stream's own epochs may have by the dozen in a batch: each node has one mixing block.
        at = np.empty(self.size, np.int64)
        for node in range(min(self.num_nodes, self.size)):
            inside = positions_of(*self.parts.bounds_of(node, self.num_nodes))
            if not self.stored_parts:
                inside = inside[permutation(RngStream.SAMPLES, *self.key, node, 0, size=len(inside))]
            inside = inside[permutation(RngStream.MIXING_BLOCK, *self.key, node, 0, size=len(inside))]
            at[node :: self.num_nodes] = inside
        return self.draw.delivered(self.epoch, self.part_ids(0, at))

    def _read(self, at: Ints) -> Ints:
        out = np.empty_like(at)
        count = self.num_nodes
        if len(at) and at[-1] - at[0] == len(at) - 1:  # without a gap, the entries of each node need no search
            for place, first in enumerate(at[:count].tolist()):
                index = first // count
                out[place::count] = self._node(first % count).read(index, index + len(out[place::count]))
            return out
        indices, nodes = np.divmod(at, count)
        for node, places in places_by(nodes):
            inside = indices[places]
            begin = int(inside[0])
            out[places] = self._node(node).read(begin, int(inside[-1]) + 1)[inside - begin]
        return out

    def nodes(self, at: Ints) -> Ints:
        return at % self.num_nodes

    def sequences(self, most: int) -> Sequence[Order]:
        divisors = (count for count in range(1, min(self.num_nodes, most) + 1) if self.num_nodes % count == 0)
        count = max(divisors, default=1)
        return [self] if count == 1 else [EveryNth(self, first, count) for first in range(count)]

    def find(self, sample_id: int) -> list[int]:
        """All positions of a sample. O(samples of two shards), and O(parts) the first time in a node."""
        positions = []
        begins = [self.parts.bounds_of(node, self.num_nodes)[0] for node in range(self.num_nodes)]
        for part, inside in self._draws_of(sample_id):
            node = bisect_right(begins, int(self.parts.begins[part]) + inside) - 1
            positions.append(self._node(node).index_of(part, inside) * self.num_nodes + node)
        return sorted(positions)

    def _node(self, node: int) -> _NodeWindow:
        return cached(self._nodes, node, partial(_NodeWindow, self), self.num_nodes)

    def spread(self, key: tuple[int, int, int, int], shard: Ints) -> Ints:
        """The part at each place of a node's epoch, from the shards of its parts."""
        if len(shard) == 1:
            return np.arange(1)
        first, last = self._groups
        return spread_parts(key, shard // self.num_nodes - first, last - first + 1, self.num_nodes, self.window)

    @cached_property
    def _groups(self) -> tuple[int, int]:
        """The first and the last group of neighbouring shards."""
        shard = self.parts.shard
        return int(shard.min()) // self.num_nodes, int(shard.max()) // self.num_nodes

    def part_ids(self, part: int, at: Ints) -> Ints:
        """The drawn ids at some places of a part, where they ascend; others may be delivered for forgotten ones."""
        return self.draw.ids(self.epoch, int(self.parts.shard[part]), int(self.parts.sizes[part]), at)

    def _draws_of(self, sample_id: int) -> list[tuple[int, int]]:
        """The parts that deliver a sample, and its place in each."""
        draws = []
        for drawn_id in self.draw.drawn_for(self.epoch, sample_id):
            shard = int(self.draw.snapshot.shards_of(np.array([drawn_id]))[0])
            shards, parts = self._by_shard
            first, end = np.searchsorted(shards, [shard, shard + 1]).tolist()
            for part in parts[first:end].tolist():
                ids = self.part_ids(part, np.arange(self.parts.sizes[part]))
                draws += [(part, inside) for inside in np.flatnonzero(ids == drawn_id).tolist()]
        return draws

    @cached_property
    def _by_shard(self) -> tuple[Ints, Ints]:
        parts = np.argsort(self.parts.shard, kind="stable")
        return self.parts.shard[parts], parts


class Stored(Order):
    """The drawn shards as they are stored, one after another: ``shuffle=False``. O(shards) for any repeat.

    It has one canonical node, since neighbours share their shard without any grouping.
    """

    def __init__(self, draw: Draw, epoch: int, drawn: ShardDraws) -> None:
        self.draw = draw
        self.epoch = epoch
        self.shard = drawn.shard
        self._begins = starts_of(drawn.count)
        self.sizes = drawn.size
        self._in_passes = drawn.count - drawn.count % np.maximum(self.sizes, 1)  # samples of whole passes
        self.size = int(self._begins[-1])
        self._subsets: dict[int, Ints] = {}

    def ids(self, at: Ints) -> Ints:
        entry = segment_of(self._begins, at)
        inside = at - self._begins[entry]
        ids = self.draw.snapshot.shard_offsets[self.shard[entry]] + inside % self.sizes[entry]
        rest = np.flatnonzero(inside >= self._in_passes[entry])
        for index in np.unique(entry[rest]).tolist() if len(rest) else ():
            places = rest[entry[rest] == index]
            ids[places] = self.picked(index, inside[places] - int(self._in_passes[index]))
        return self.draw.delivered(self.epoch, ids)

    def picked(self, index: int, at: Ints) -> Ints:
        """Some of the ids that are drawn of a shard beside its whole passes; here they ascend."""
        return self._subset(index)[at]

    def find(self, sample_id: int) -> list[int]:
        """All positions of a sample. O(passes over its shard)."""
        positions: list[int] = []
        for drawn_id in self.draw.drawn_for(self.epoch, sample_id):
            (shard,), (place,) = self.draw.snapshot.locate(np.array([drawn_id]))
            for index in np.flatnonzero(self.shard == shard).tolist():
                begin = int(self._begins[index])
                in_passes = int(self._in_passes[index])
                positions += range(begin + int(place), begin + in_passes, int(self.sizes[index]))
                positions += (begin + in_passes + np.flatnonzero(self._subset(index) == drawn_id)).tolist()
        return sorted(positions)

    def _subset(self, index: int) -> Ints:
        """The ids that are drawn of a shard beside its whole passes, ascending."""
        return cached(self._subsets, index, self._drawn_subset, 2)

    def _drawn_subset(self, index: int) -> Ints:
        count = int(self._begins[index + 1] - self._begins[index] - self._in_passes[index])
        return self.draw.ids(self.epoch, int(self.shard[index]), count, np.arange(count))


class _NodeWindow:
    """The rolling window of one canonical node, whose samples are cut out of all parts; a part on a border is cut."""

    def __init__(self, order: Window, node: int) -> None:
        self._order = order
        self._parts = order.parts.of_node(node, order.num_nodes)
        self._key = (*order.key, node)
        self._part_at = order.spread(self._key, self._parts.shard)
        self._sizes = self._parts.sizes[self._part_at]
        self._begins = block_begins(self._sizes, order.window)
        self._small_parts: dict[int, Integers] = {}
        self._slices: dict[tuple[int, int], Integers] = {}

    def read(self, begin: int, end: int) -> Integers:
        """Sample ids of the entries [begin, end) of this node."""
        ids: list[Integers] = []
        block = int(self._begins.searchsorted(begin, side="right")) - 1
        while begin < end:
            start = int(self._begins[block])
            start += (begin - start) // _SLICE * _SLICE
            slice_ids = cached(self._slices, (block, start), self._slice, 2)
            ids.append(slice_ids[begin - start : end - start])
            begin = start + len(slice_ids)
            block += int(begin == self._begins[block + 1])
        return np.concatenate(ids)

    def _slice(self, key: tuple[int, int]) -> Integers:
        """The ids of a slice of a mixing block."""
        order = self._order
        block, begin = key
        ids = np.concatenate([self._piece(*piece) for piece in self._pieces(block)])
        size = len(ids)
        begin -= int(self._begins[block])
        end = min(begin + _SLICE, size)
        ids = ids[permutation(RngStream.MIXING_BLOCK, *self._key, block, size=size, begin=begin, end=end)]
        if order.draw.forgotten is not None:
            ids = order.draw.delivered(order.epoch, ids.astype(np.int64)).astype(order.dtype)
        return ids

    def _pieces(self, block: int) -> list[tuple[int, int, int]]:
        """The places of the parts in a mixing block, and the entries that it has of each; the last one has the rest."""
        window = self._order.window
        is_last = block == len(self._sizes) - 1
        first = max(0, block - window + 1)
        pieces = []
        for place, size in enumerate(self._sizes[first : block + 1].tolist(), first):
            begins = piece_begins(size, min(place, window), window)
            pieces.append((place, begins[block - place], size if is_last else begins[block - place + 1]))
        return pieces

    def _piece(self, place: int, begin: int, end: int) -> Integers:
        """Some entries of the part at a place. Of a large part, only these are made, from all of its random numbers."""
        if self._sizes[place] > _KEPT_PART:
            return self._permuted(place, begin, end)
        return cached(self._small_parts, place, self._permuted, self._order.window + 1)[begin:end]

    def _permuted(self, place: int, begin: int = 0, end: int | None = None) -> Integers:
        order = self._order
        part = int(self._part_at[place])
        size = int(self._sizes[place])
        if place < order.stored_parts:
            at = np.arange(size)[begin:end]
        else:
            at = permutation(RngStream.SAMPLES, *self._key, place, size=size, begin=begin, end=end)
        if part == 0:
            at += self._parts.skipped
        return order.part_ids(self._parts.first + part, at).astype(order.dtype)

    def index_of(self, part: int, inside: int) -> int:
        """The entry of this node that has a sample of a part: the inverse of `read`, without its sorts."""
        place = int(self._places[part - self._parts.first])
        entry = inside - (self._parts.skipped if part == self._parts.first else 0)
        size = int(self._sizes[place])
        window = self._order.window
        if place >= self._order.stored_parts:
            entry = place_in_permutation(RngStream.SAMPLES, *self._key, place, size=size, index=entry)
        piece = bisect_right(piece_begins(size, min(place, window), window), entry) - 1
        block = min(place + piece, len(self._sizes) - 1)
        *earlier, (_, first, _) = self._pieces(block)[: place - block or None]
        index = sum(end - begin for _, begin, end in earlier) + entry - first
        begin, end = self._begins[block : block + 2].tolist()
        key = (*self._key, block)
        inside = place_in_permutation(RngStream.MIXING_BLOCK, *key, size=end - begin, index=index)
        return int(begin) + inside

    @cached_property
    def _places(self) -> Ints:
        """The place of each part."""
        return np.argsort(self._part_at)


def block_begins(sizes: Ints, window: int) -> Ints:
    """int64[K + 1]: where each mixing block of a node begins, and the end, from the sizes of its parts. O(K + w**2).

    A part gives each of w blocks ``size // w`` entries, and the first ``size % w`` of these one more. The first w - 1
    parts do not.
    """
    count = len(sizes)
    head = min(window - 1, count)
    even, longer = np.divmod(sizes[head:], window)
    rises = np.zeros(count + window, np.int64)  # of the size, from each block to the next
    rises[head:count] = even + 1
    rises[head + window :] -= even
    rises -= np.bincount(np.arange(head, count) + longer, minlength=count + window)
    blocks = np.cumsum(rises)
    for place in range(head):
        blocks[place : place + window] += np.diff(piece_begins(int(sizes[place]), place, window))
    begins = starts_of(blocks[:count])
    begins[-1] = sizes.sum()
    return begins


@lru_cache(maxsize=1 << 9)  # most parts are of like sizes, and all places from w on alike
def piece_begins(size: int, place: int, window: int) -> tuple[int, ...]:
    """Where each of the w pieces of the part at ``place`` begins, and the end.

    The first ``size mod w`` of them are one longer. While the window fills, the first w - 1 parts give half pieces, and
    the rest in equal pieces once it is full: so it fills twice as fast.
    """
    filling = max(0, window - 1 - place)
    half = size // (2 * window)
    even, longer = divmod(size - half * filling, window - filling)
    piece = np.arange(window + 1)
    late = np.maximum(piece - filling, 0)
    begins = half * np.minimum(piece, filling) + even * late + np.minimum(late, longer)
    return tuple(begins.tolist())
