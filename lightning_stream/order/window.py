"""The native order of one set of drawn samples: a rolling window over shards, read at any position without replay.

The drawn samples are split evenly into canonical nodes; position p belongs to node p mod C. Within a node the parts
(shards, or pieces of shards cut by a border) are permuted anew each epoch; each is permuted and cut into w pieces, and
block t holds piece i of part t - i. So one part enters and one leaves per block. Both ends are softened: the window
fills with half pieces, and the last block holds all that the last parts have left.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from lightning_stream.order.draw import Draw, ShardDraws
from lightning_stream.order.permutation import RngStream, permutation
from lightning_stream.order.stratify import spread_parts

_CHUNK = 1 << 12
_Kept = TypeVar("_Kept")


class SampleOrder(Protocol):
    """The order of one set of drawn samples in one epoch, readable at any position."""

    num_samples: int

    def ids(self, begin: int, end: int) -> NDArray[np.int64]:
        """Sample ids at positions [begin, end)."""
        ...

    def canonical(self, begin: int, end: int) -> NDArray[np.int64]:
        """The canonical node of each position in [begin, end)."""
        ...


class IndexOrder:
    """``shuffle=False``: index order, S(p) = p where every sample is drawn once.

    One canonical node: positions in index order are cut among ranks as they lie, which keeps each rank's samples of a
    batch in as few shards as can be; no grouping does better, since neighbours share their shard.
    """

    def __init__(self, draw: Draw, epoch: int, units: ShardDraws) -> None:
        self._draw, self._epoch, self._units = draw, epoch, units
        self._ends = np.cumsum(units.count)
        self.num_samples = int(self._ends[-1]) if len(self._ends) else 0

    def ids(self, begin: int, end: int) -> NDArray[np.int64]:
        """Sample ids at positions [begin, end)."""
        out = np.empty(max(end - begin, 0), dtype=np.int64)
        at = begin
        unit = int(np.searchsorted(self._ends, begin, side="right"))
        while at < end:
            count, stop = int(self._units.count[unit]), int(self._ends[unit])
            first, last = at - (stop - count), min(end, stop) - (stop - count)
            shard = int(self._units.shard[unit])
            out[at - begin : min(end, stop) - begin] = self._draw.ids(self._epoch, shard, count, first, last)
            at, unit = min(end, stop), unit + 1
        return out

    def canonical(self, begin: int, end: int) -> NDArray[np.int64]:
        """All positions belong to the one canonical node."""
        return np.zeros(max(end - begin, 0), dtype=np.int64)


class WindowOrder:
    """The rolling window over a set of units.

    Args:
        draw: The run's draw.
        epoch: The epoch.
        units: Drawn samples, in the run-constant order in which shards are given to canonical nodes.
        stream: Part of every key: which set of units this is.
        canonical_nodes: C.
        window: w, active parts per canonical node.
    """

    def __init__(
        self, draw: Draw, epoch: int, units: ShardDraws, *, stream: int, canonical_nodes: int, window: int
    ) -> None:
        self._draw, self._epoch, self._units = draw, epoch, units
        self._stream, self._num_nodes, self._window = stream, canonical_nodes, window
        self._ends = np.cumsum(units.count)
        self.num_samples = int(self._ends[-1]) if len(self._ends) else 0
        self._first_group = int(units.shard.min(initial=2**62)) // canonical_nodes
        self._num_groups = max(int(units.shard.max(initial=0)) // canonical_nodes - self._first_group + 1, 1)
        self._nodes: dict[int, NodeWindow] = {}
        self._chunks: dict[int, NDArray[np.int64]] = {}

    def ids(self, begin: int, end: int) -> NDArray[np.int64]:
        """Sample ids at positions [begin, end). Small ranges are cut from a chunk read at once, for speed alone."""
        if end - begin > _CHUNK or begin >= end:
            return self._read(begin, end)
        chunks = range(begin // _CHUNK, (end - 1) // _CHUNK + 1)
        return np.concatenate(
            [self._chunk(chunk)[max(begin - chunk * _CHUNK, 0) : end - chunk * _CHUNK] for chunk in chunks]
        )

    def _chunk(self, chunk: int) -> NDArray[np.int64]:
        found = self._chunks.get(chunk)
        if found is None:
            found = self._read(chunk * _CHUNK, min((chunk + 1) * _CHUNK, self.num_samples))
            _remember(self._chunks, chunk, found, keep=2)
        return found

    def _read(self, begin: int, end: int) -> NDArray[np.int64]:
        out = np.empty(max(end - begin, 0), dtype=np.int64)
        count = self._num_nodes
        for first in range(begin, min(begin + count, end)):
            node, index = first % count, first // count
            stop = index + (end - first + count - 1) // count
            out[first - begin :: count] = self.node(node).ids(index, stop)
        return out

    def canonical(self, begin: int, end: int) -> NDArray[np.int64]:
        """The canonical node of each position: p mod C."""
        return np.arange(begin, max(end, begin), dtype=np.int64) % self._num_nodes

    def node(self, node: int) -> NodeWindow:
        """The order within one canonical node."""
        found = self._nodes.get(node)
        if found is None:
            found = self._nodes.setdefault(node, self._plan_node(node))
        return found

    def _plan_node(self, node: int) -> NodeWindow:
        """Cut this node's stretch out of all units; units on its borders become parts of both neighbours."""
        size, longer = divmod(self.num_samples, self._num_nodes)
        begin = size * node + min(node, longer)
        end = begin + size + (node < longer)
        first = int(np.searchsorted(self._ends, begin, side="right"))
        last = int(np.searchsorted(self._ends, end, side="left")) + (end > begin)
        key = (self._draw.seed, self._epoch, self._stream, node)
        group = self._units.shard[first:last] // self._num_nodes - self._first_group
        order = spread_parts(key, group, self._num_groups, self._num_nodes, self._window)
        start = int(self._ends[first] - self._units.count[first]) if last > first else begin
        parts = Parts(self._units, first, order, begin - start, int(self._ends[last - 1]) - end if last > first else 0)
        return NodeWindow(self._draw, key, parts, self._window)


class Parts:
    """The parts of one canonical node in this epoch's order: units first, first + 1, ..., the outer two perhaps cut.

    Args:
        units: All units.
        first: The node's first unit.
        order: int64[K], the part (counted from ``first``) at each place of the epoch.
        before: Samples of the first unit that belong to the node before.
        behind: Samples of the last unit that belong to the next node.
    """

    def __init__(self, units: ShardDraws, first: int, order: NDArray[np.int64], before: int, behind: int) -> None:
        self._units, self._first, self._order, self._before, self._behind = units, first, order, before, behind

    def __len__(self) -> int:
        """K."""
        return len(self._order)

    def sizes(self) -> NDArray[np.int64]:
        """int64[K]: samples of each part, in the epoch's order."""
        count = self._units.count[self._first : self._first + len(self._order)].copy()
        if len(count):
            count[0] -= self._before
            count[-1] -= self._behind
        permuted: NDArray[np.int64] = count[self._order]
        return permuted

    def read(self, place: int, draw: Draw, epoch: int) -> NDArray[np.int64]:
        """Sample ids of the part at this place of the epoch, ascending."""
        part = int(self._order[place])
        unit = self._first + part
        count = int(self._units.count[unit])
        low = self._before if part == 0 else 0
        high = count - (self._behind if part == len(self._order) - 1 else 0)
        return draw.ids(epoch, int(self._units.shard[unit]), count, low, high)


class NodeWindow:
    """The rolling window of one canonical node.

    Args:
        draw: The run's draw.
        key: (seed, epoch, stream, node).
        parts: The node's parts.
        window: w.
    """

    def __init__(self, draw: Draw, key: tuple[int, int, int, int], parts: Parts, window: int) -> None:
        self._draw, self._key, self._parts, self._window = draw, key, parts, window
        self._ends = block_ends(parts.sizes(), window)
        self._permuted: dict[int, tuple[NDArray[np.int64], tuple[int, ...]]] = {}
        self._blocks: dict[int, NDArray[np.int64]] = {}

    def ids(self, begin: int, end: int) -> NDArray[np.int64]:
        """Sample ids at this node's indices [begin, end)."""
        block = int(np.searchsorted(self._ends, begin, side="right"))
        pieces = []
        at = begin
        while at < end:
            ids, stop = self._block(block), int(self._ends[block])
            start = stop - len(ids)
            pieces.append(ids[at - start : min(end, stop) - start])
            at, block = min(end, stop), block + 1
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    def _block(self, block: int) -> NDArray[np.int64]:
        found = self._blocks.get(block)
        if found is None:
            found = self._make_block(block)
            _remember(self._blocks, block, found, keep=2)
        return found

    def _make_block(self, block: int) -> NDArray[np.int64]:
        is_last = block == len(self._parts) - 1
        pieces = []
        for place in range(max(0, block - self._window + 1), block + 1):
            ids, begins = self._part(place)
            piece = block - place
            pieces.append(ids[begins[piece] : len(ids) if is_last else begins[piece + 1]])
        ids = np.concatenate(pieces)
        return ids[permutation(RngStream.BLOCK, *self._key, block, size=len(ids))]

    def _part(self, place: int) -> tuple[NDArray[np.int64], tuple[int, ...]]:
        """The part's ids, permuted, and where its pieces begin."""
        found = self._permuted.get(place)
        if found is None:
            ids = self._parts.read(place, self._draw, self._key[1])
            ids = ids[permutation(RngStream.SAMPLES, *self._key, place, size=len(ids))]
            found = ids, piece_begins(len(ids), min(place, self._window), self._window)  # all later places are alike
            _remember(self._permuted, place, found, keep=self._window + 1)
        return found


def block_ends(sizes: NDArray[np.int64], window: int) -> NDArray[np.int64]:
    """int64[K]: where each block of a node ends, in O(K + w**2); the last block holds all that is left."""
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
    if num_parts:
        ends[-1] = sizes.sum()
    return ends


@lru_cache(maxsize=256)  # most parts are of like sizes
def piece_begins(size: int, place: int, window: int) -> tuple[int, ...]:
    """Where each of the w pieces of the part at ``place`` begins, and the end.

    A part gives w pieces, the first ``size mod w`` of them one longer. While the window fills, the first w - 1 parts
    give half pieces, and what they keep back in equal pieces once it is full: it fills twice as fast.
    """
    filling = max(0, window - 1 - place)
    half = size // (2 * window)
    even, longer = divmod(size - half * filling, window - filling)
    piece = np.arange(window + 1, dtype=np.int64)
    late = np.maximum(piece - filling, 0)
    begins = half * np.minimum(piece, filling) + even * late + np.minimum(late, longer)
    return tuple(begins.tolist())


def _remember(cache: dict[int, _Kept], key: int, value: _Kept, keep: int) -> None:
    """Keep the newest few; each step is atomic, so threads sharing a cache at worst compute a value twice."""
    cache[key] = value
    for old in list(cache)[:-keep]:
        cache.pop(old, None)
