"""The native order of one set of drawn samples: a rolling window over shards, read at any position without replay.

The drawn samples are split evenly into canonical nodes; position p belongs to node p mod C. Within a node the parts
(shards, or pieces of shards cut by a border) are permuted anew each epoch; each is permuted and cut into w pieces, and
block t holds piece i of part t - i. So one part enters and one leaves per block.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from lightning_stream.order.draw import Draw, Units
from lightning_stream.order.permutation import Purpose, permutation


class Source(Protocol):
    """The order of one set of drawn samples in one epoch, readable at any position."""

    num_samples: int

    def ids(self, begin: int, end: int) -> NDArray[np.int64]:
        """Sample ids at positions [begin, end)."""
        ...

    def canonical(self, begin: int, end: int) -> NDArray[np.int64]:
        """The canonical node of each position in [begin, end)."""
        ...


class SequentialSource:
    """``shuffle=False``: index order, S(p) = p where every sample is drawn once.

    One canonical node: positions in index order are cut among ranks as they lie, which keeps each rank's samples of a
    batch in as few shards as can be; no grouping does better, since neighbours share their shard.
    """

    def __init__(self, draw: Draw, epoch: int, units: Units) -> None:
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


class WindowSource:
    """The rolling window over a set of units.

    Args:
        draw: The run's draw.
        epoch: The epoch.
        units: Drawn samples, in the run-constant order in which shards are given to canonical nodes.
        stream: Part of every key: which set of units this is.
        canonical_nodes: C.
        window: w, active parts per canonical node.
    """

    def __init__(self, draw: Draw, epoch: int, units: Units, *, stream: int, canonical_nodes: int, window: int) -> None:
        self._draw, self._epoch, self._units = draw, epoch, units
        self._stream, self._num_nodes, self._window = stream, canonical_nodes, window
        self._ends = np.cumsum(units.count)
        self.num_samples = int(self._ends[-1]) if len(self._ends) else 0
        self._nodes: dict[int, NodeWindow] = {}

    def ids(self, begin: int, end: int) -> NDArray[np.int64]:
        """Sample ids at positions [begin, end)."""
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
        count = self._units.count[first:last]
        low, high = np.zeros_like(count), count.copy()
        if len(count):
            low[0] = begin - (self._ends[first] - count[0])
            high[-1] = end - (self._ends[last - 1] - count[-1])
        key = (self._draw.seed, self._epoch, self._stream, node)
        order = permutation(Purpose.PARTS, *key, size=len(count))
        parts = Parts(self._units.shard[first:last][order], count[order], low[order], high[order])
        return NodeWindow(self._draw, key, parts, self._window)


class Parts:
    """The parts of one canonical node in this epoch's order: samples [low, high) of a unit of ``count`` of a shard."""

    def __init__(
        self, shard: NDArray[np.int64], count: NDArray[np.int64], low: NDArray[np.int64], high: NDArray[np.int64]
    ) -> None:
        self.shard, self.count, self.low, self.high = shard, count, low, high
        self.size = high - low


class NodeWindow:
    """The rolling window of one canonical node."""

    def __init__(self, draw: Draw, key: tuple[int, int, int, int], parts: Parts, window: int) -> None:
        self._draw, self._key, self.parts, self._window = draw, key, parts, window
        self.ends = block_ends(parts.size, window)
        self._permuted: dict[int, NDArray[np.int64]] = {}
        self._blocks: dict[int, NDArray[np.int64]] = {}

    def ids(self, begin: int, end: int) -> NDArray[np.int64]:
        """Sample ids at this node's indices [begin, end)."""
        block = int(np.searchsorted(self.ends, begin, side="right"))
        pieces = []
        at = begin
        while at < end:
            ids, stop = self._block(block), int(self.ends[block])
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
        first, last = max(0, block - self._window + 1), min(block, len(self.parts.size) - 1)
        last_block = block == len(self.ends) - 1
        pieces = []
        for part in range(first, last + 1):
            ids = self._part(part)
            begin = _piece_begin(len(ids), block - part, self._window)
            stop = len(ids) if last_block else _piece_begin(len(ids), block - part + 1, self._window)
            pieces.append(ids[begin:stop])
        ids = np.concatenate(pieces)
        return ids[permutation(Purpose.BLOCK, *self._key, block, size=len(ids))]

    def _part(self, part: int) -> NDArray[np.int64]:
        found = self._permuted.get(part)
        if found is None:
            parts = self.parts
            shard, count = int(parts.shard[part]), int(parts.count[part])
            ids = self._draw.ids(self._key[1], shard, count, int(parts.low[part]), int(parts.high[part]))
            found = ids[permutation(Purpose.SAMPLES, *self._key, part, size=len(ids))]
            _remember(self._permuted, part, found, keep=self._window + 1)
        return found


def block_ends(sizes: NDArray[np.int64], window: int) -> NDArray[np.int64]:
    """int64[blocks]: where each block of a node ends, one cumulative sum over its parts.

    There is one block per part, and a last one that holds what the last parts have left.
    """
    num_parts = len(sizes)
    small, longer = sizes // window, sizes % window
    rise = np.zeros(num_parts + window + 1, dtype=np.int64)
    rise[:num_parts] += small + (longer > 0)
    rise[window : window + num_parts] -= small
    rise -= np.bincount(np.arange(num_parts) + longer, weights=longer > 0, minlength=len(rise)).astype(np.int64)
    ends = np.cumsum(np.cumsum(rise))[: num_parts + 1]
    if num_parts:
        ends[-1] = sizes.sum()
    return ends


def _piece_begin(size: int, piece: int, window: int) -> int:
    """Where a piece of a part begins: w pieces, the first ``size mod w`` of them one longer."""
    return size // window * piece + min(piece, size % window)


def _remember(cache: dict[int, NDArray[np.int64]], key: int, value: NDArray[np.int64], keep: int) -> None:
    """Keep the newest few; each step is atomic, so threads sharing a cache at worst compute a value twice."""
    cache[key] = value
    for old in list(cache)[:-keep]:
        cache.pop(old, None)
