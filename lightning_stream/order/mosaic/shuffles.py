"""The five shuffles of mosaicml-streaming 0.13, bit for bit: `py1e py1br py1s py2s naive`.

All of them draw from numpy's PCG64 `default_rng`. One generator, seeded by the seed alone, fixes which shards lie
together in a canonical node for the whole run; another, seeded by seed + epoch, does what is new in an epoch. The
order in which draws are made is part of the format: it may not be changed, merged or batched.
"""

from __future__ import annotations

import numpy as np
from numpy.random import Generator, default_rng
from numpy.typing import NDArray

from lightning_stream.order.arrays import Ints, ranges, starts_of

DEFAULT_BLOCK_SIZE = 1 << 18
SHUFFLES = ("py1e", "py1br", "py1s", "py2s", "naive")
_LEAST_BLOCK = {"py1e": 1, "py1br": 2}


def shuffle(
    algo: str, shard_sizes: Ints, num_canonical_nodes: int, seed: int, epoch: int, block_size: int = DEFAULT_BLOCK_SIZE
) -> Ints:
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
    rng = default_rng(seed + epoch)
    if algo == "naive":
        return rng.permutation(int(shard_sizes.sum())).astype(np.int64, copy=False)
    fixed = default_rng(seed)
    shards = _shuffled(np.stack([starts_of(shard_sizes)[:-1], shard_sizes], axis=1), fixed)
    if algo == "py2s":
        return _py2s(shards, num_canonical_nodes, fixed, rng)
    nodes = [_shuffled(spans, rng) for spans in _cut(shards, num_canonical_nodes)]
    if algo == "py1br":
        staggers = rng.integers(0, int(0.75 * block_size), (num_canonical_nodes,)).tolist()
        pairs = zip(nodes, staggers, strict=True)
        return np.concatenate([_shuffled_blocks(ranges(*spans.T), at, block_size, rng) for spans, at in pairs])
    parts = []
    for spans in nodes:
        ids = _shuffled_within(ranges(*spans.T), spans[:, 1], rng)
        parts.append(ids[np.argsort(_jittered(spans[:, 1], block_size, rng))] if algo == "py1e" else ids)
    return np.concatenate(parts)


def _shuffled(spans: Ints, rng: Generator) -> Ints:
    """Spans of ids, int64[n, 2] of (begin, length), in another order."""
    order = np.arange(len(spans))
    rng.shuffle(order)
    return spans[order]


def _shuffled_within(ids: Ints, lengths: Ints, rng: Generator) -> Ints:
    """Shuffle consecutive slices of `ids` in place, each by itself, in order."""
    begin = 0
    for length in lengths.tolist():
        rng.shuffle(ids[begin : begin + length])
        begin += length
    return ids


def _cut(spans: Ints, num_canonical_nodes: int) -> list[Ints]:
    """Cut spans at the even borders of the canonical nodes: spans of each node.

    Empty spans stay with the node before them: they hold no samples, but take part in draws.
    """
    stops = starts_of(spans[:, 1])
    total = int(stops[-1])
    nodes = []
    first = begin = 0
    for node in range(num_canonical_nodes):
        end = total * (node + 1) // num_canonical_nodes
        last = int(np.searchsorted(stops, end, side="right")) - 1
        of_node = spans[first : last + (begin < end and stops[last] < end)].copy()
        if begin < end:
            before = begin - stops[first]
            of_node[0] += [before, -before]
            of_node[-1, 1] -= max(stops[first + len(of_node)] - end, 0)
        nodes.append(of_node)
        first = last
        begin = end
    return nodes


def _shuffled_blocks(ids: Ints, stagger: int, block_size: int, rng: Generator) -> Ints:
    """Shuffle a node in place, in blocks of random size that are moved back by `stagger`.

    The count advances by what a block holds, so the second block overlaps the first (and is shuffled after it), and
    the last `stagger` samples of a node may lie in no block at all: this is how the original behaves.
    """
    blocks: list[Ints] = []
    reached = 0
    while reached < len(ids):
        size = int(rng.integers(int(0.75 * block_size), int(1.25 * block_size)))
        blocks.append(ids[max(reached - stagger, 0) : min(reached + size - stagger, len(ids))])
        reached += len(blocks[-1])
    for block in blocks:
        rng.shuffle(block)
    return ids


def _jittered(lengths: Ints, block_size: int, rng: Generator) -> NDArray[np.float64]:
    """Where each sample of a node would like to be: its place, moved by up to half a block less its span."""
    low = int(0.75 * block_size)
    high = int(1.25 * block_size)
    num_samples = int(lengths.sum())
    places = np.arange(num_samples, dtype=np.float64)
    begin = 0
    for length in lengths.tolist():
        end = begin + length
        reach = max((int(rng.integers(low, high)) - length) / 2, 0)
        places[begin:end] += rng.uniform(max(-reach, -begin), min(reach, num_samples - end), length)
        begin = end
    return places


def _py2s(shards: Ints, num_canonical_nodes: int, fixed: Generator, rng: Generator) -> Ints:
    """The samples of each shard are shuffled once for the run, and in an epoch again, within a canonical node."""
    lengths = shards[:, 1]
    ids = _shuffled_within(ranges(*shards.T), lengths, fixed)
    parts = []
    for spans in _cut(np.stack([starts_of(lengths)[:-1], lengths], axis=1), num_canonical_nodes):
        spans = _shuffled(spans, rng)
        parts.append(_shuffled_within(ids[ranges(*spans.T)], spans[:, 1], rng))
    return np.concatenate(parts)
