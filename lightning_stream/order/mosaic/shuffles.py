"""The five shuffles of mosaicml-streaming 0.13, bit for bit: `py1e py1br py1s py2s naive`.

All of them draw from numpy's PCG64 `default_rng`. One generator, seeded by the seed alone, fixes which shards lie
together in a canonical node for the whole run; another, seeded by seed + epoch, does what is new in an epoch. The
order in which draws are made is part of the format: it may not be changed, merged or batched.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.random import Generator, default_rng
from numpy.typing import NDArray

Ids = NDArray[np.int64]

DEFAULT_BLOCK_SIZE = 1 << 18
_LEAST_BLOCK = {"py1e": 1, "py1br": 2}


def shuffle(
    algo: str, shard_sizes: Ids, num_canonical_nodes: int, seed: int, epoch: int, block_size: int = DEFAULT_BLOCK_SIZE
) -> Ids:
    """The shuffled sample ids of an epoch: int64[sum of ``shard_sizes``], a permutation.

    The epoch is cut into canonical nodes, and every sample stays inside its node (except with `naive`). Only `py1e` and
    `py1br` use ``block_size``, the samples of a shuffle block.

    Raises:
        ValueError: A block too small to shuffle, or fewer samples than canonical nodes.
    """
    least = _LEAST_BLOCK.get(algo, 0)
    if block_size < least:
        raise ValueError(f"shuffle_block_size must be at least {least} with {algo}; found {block_size}")
    if algo == "py1e" and shard_sizes.sum() < num_canonical_nodes:
        raise ValueError(
            f"py1e needs a sample for each canonical node; found {shard_sizes.sum()} and {num_canonical_nodes}; "
            f"set a smaller num_canonical_nodes, or draw more samples"
        )
    return _ALGORITHMS[algo](shard_sizes, num_canonical_nodes, seed, default_rng(seed + epoch), block_size)


def _cut(spans: Ids, num_canonical_nodes: int) -> list[Ids]:
    """Cut spans, int64[n, 2] of (begin, end), at the even borders of the canonical nodes: spans of each node.

    Empty spans stay with the node before them: they hold no samples, but take part in draws.
    """
    stops = np.concatenate([[0], np.cumsum(spans[:, 1] - spans[:, 0])])
    total = int(stops[-1])
    nodes, first, begin = [], 0, 0
    for node in range(num_canonical_nodes):
        end = total * (node + 1) // num_canonical_nodes
        last = int(np.searchsorted(stops, end, side="right")) - 1
        own = spans[first : last + (begin < end and stops[last] < end)].copy()
        if begin < end:
            own[0, 0] += begin - stops[first]
            own[-1, 1] -= max(stops[first + len(own)] - end, 0)
        nodes.append(own)
        first, begin = last, end
    return nodes


def _epoch_spans(sizes: Ids, num_canonical_nodes: int, seed: int, rng: Generator) -> list[Ids]:
    """Assign all shards, in their run-constant order, to canonical nodes, whose spans get the epoch's order."""
    nodes = _cut(_shard_spans(sizes, default_rng(seed)), num_canonical_nodes)
    for node, spans in enumerate(nodes):
        order = np.arange(len(spans))
        rng.shuffle(order)
        nodes[node] = spans[order]
    return nodes


def _shard_spans(sizes: Ids, fixed: Generator) -> Ids:
    """The ids of every shard as (begin, end), int64[shards, 2], in the run-constant order of shards."""
    ends = np.cumsum(sizes)
    order = np.arange(len(sizes))
    fixed.shuffle(order)
    return np.stack([ends - sizes, ends], axis=1)[order]


def _ids_of(spans: Ids) -> Ids:
    """Every id of the spans, one span after another."""
    lengths = spans[:, 1] - spans[:, 0]
    shifts = spans[:, 0] - (np.cumsum(lengths) - lengths)
    ids: Ids = np.arange(int(lengths.sum()), dtype=np.int64) + np.repeat(shifts, lengths)
    return ids


def _shuffle_slices(ids: Ids, lengths: Ids, rng: Generator) -> None:
    """Shuffle consecutive slices of `ids` in place, each by itself, in order."""
    begin = 0
    for length in lengths.tolist():
        rng.shuffle(ids[begin : begin + length])
        begin += length


def _py1s(sizes: Ids, num_canonical_nodes: int, seed: int, rng: Generator, block_size: int) -> Ids:  # noqa: ARG001
    spans = np.concatenate(_epoch_spans(sizes, num_canonical_nodes, seed, rng))
    ids = _ids_of(spans)
    _shuffle_slices(ids, spans[:, 1] - spans[:, 0], rng)
    return ids


def _py1br(sizes: Ids, num_canonical_nodes: int, seed: int, rng: Generator, block_size: int) -> Ids:
    nodes = _epoch_spans(sizes, num_canonical_nodes, seed, rng)
    staggers = rng.integers(0, int(0.75 * block_size), (num_canonical_nodes,)).tolist()
    parts = []
    for spans, stagger in zip(nodes, staggers, strict=True):
        ids = _ids_of(spans)
        for begin, end in _blocks(len(ids), stagger, block_size, rng):
            rng.shuffle(ids[begin:end])
        parts.append(ids)
    return np.concatenate(parts)


def _blocks(num_samples: int, stagger: int, block_size: int, rng: Generator) -> list[tuple[int, int]]:
    """Cut a node into blocks of random size, moved back by `stagger`.

    The count advances by what a block holds, so the second block overlaps the first (and is shuffled after it), and
    the last `stagger` samples of a node may lie in no block at all: this is how the original behaves.
    """
    low, high = int(0.75 * block_size), int(1.25 * block_size)
    blocks, reached = [], 0
    while reached < num_samples:
        size = int(rng.integers(low, high))
        begin, end = max(reached - stagger, 0), min(reached + size - stagger, num_samples)
        blocks.append((begin, end))
        reached += end - begin
    return blocks


def _py1e(sizes: Ids, num_canonical_nodes: int, seed: int, rng: Generator, block_size: int) -> Ids:
    parts = []
    for spans in _epoch_spans(sizes, num_canonical_nodes, seed, rng):
        ids = _ids_of(spans)
        lengths = spans[:, 1] - spans[:, 0]
        _shuffle_slices(ids, lengths, rng)
        parts.append(ids[np.argsort(_jittered(lengths, block_size, rng))])
    return np.concatenate(parts)


def _jittered(lengths: Ids, block_size: int, rng: Generator) -> NDArray[np.float64]:
    """Where each sample of a node would like to be: its place, moved by up to half a block less its span."""
    low, high = int(0.75 * block_size), int(1.25 * block_size)
    num_samples = int(lengths.sum())
    places = np.arange(num_samples, dtype=np.float64)
    begin = 0
    for length in lengths.tolist():
        end = begin + length
        reach = max((int(rng.integers(low, high)) - length) / 2, 0)
        places[begin:end] += rng.uniform(max(-reach, -begin), min(reach, num_samples - end), length)
        begin = end
    return places


def _py2s(sizes: Ids, num_canonical_nodes: int, seed: int, rng: Generator, block_size: int) -> Ids:  # noqa: ARG001
    fixed = default_rng(seed)
    spans = _shard_spans(sizes, fixed)
    lengths = spans[:, 1] - spans[:, 0]
    ids = _ids_of(spans)
    _shuffle_slices(ids, lengths, fixed)
    ends = np.cumsum(lengths)
    parts = []
    for pieces in _cut(np.stack([ends - lengths, ends], axis=1), num_canonical_nodes):
        turns = np.arange(len(pieces))
        rng.shuffle(turns)
        own = ids[_ids_of(pieces[turns])]
        _shuffle_slices(own, (pieces[:, 1] - pieces[:, 0])[turns], rng)
        parts.append(own)
    return np.concatenate(parts)


def _naive(sizes: Ids, num_canonical_nodes: int, seed: int, rng: Generator, block_size: int) -> Ids:  # noqa: ARG001
    return rng.permutation(int(sizes.sum())).astype(np.int64, copy=False)


_ALGORITHMS: dict[str, Callable[[Ids, int, int, Generator, int], Ids]] = {
    "py1e": _py1e, "py1br": _py1br, "py1s": _py1s, "py2s": _py2s, "naive": _naive
}  # fmt: skip
SHUFFLES = tuple(_ALGORITHMS)
