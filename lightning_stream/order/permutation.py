"""Permutations that stay the same under every version of numpy.

numpy keeps the streams of its bit generators, but not the results of `Generator.permutation` or `shuffle`. So a
permutation here is the stable argsort of raw 64-bit output, keyed by plain numbers.
"""

from __future__ import annotations

import math
from enum import IntEnum

import numpy as np

from .arrays import Ints, Words

_WORTH_PACKING = 512
MIX_STEP = np.uint64(0x9E3779B97F4A7C15)  # between numbers for `mix64`, as in splitmix64


class RngStream(IntEnum):
    """The purpose of random numbers: the first word of every key, so that no two purposes share a stream."""

    SHARDS = 1
    PARTS = 2
    SAMPLES = 3
    MIXING_BLOCK = 4
    DRAW_SHARDS = 5
    DRAW_SAMPLES = 6
    JITTER = 7
    SUBSTITUTE = 8
    SHORTFALL = 9
    STRATA = 10
    ROWS = 11
    BUCKETS = 12
    UNIFORM = 13
    FORGOTTEN = 20
    VERSIONS = 21


def random_u64(purpose: RngStream, *numbers: int, size: int) -> Words:
    """``size`` raw 64-bit numbers of the stream with this key (each number in [0, 2**63))."""
    words = np.array((purpose, *numbers), dtype="<u8").view("<u4")
    return np.random.PCG64(np.random.SeedSequence(words)).random_raw(size)


def permutation(purpose: RngStream, *numbers: int, size: int, begin: int = 0, end: int | None = None) -> Ints:
    """Entries [begin, end) of the permutation of ``range(size)`` with this key: the stable argsort of `random_u64`.

    A short range of a long permutation is far cheaper than all of it: only the numbers near those ranks are sorted.
    """
    end = size if end is None else end
    if size < 2:  # needs no random numbers
        return np.arange(begin, end)
    keys = random_u64(purpose, *numbers, size=size)
    if end - begin == size:
        return argsort_random(keys)
    # Of `size` random numbers, the share below any bound differs from the expected one by less than 8 / sqrt(size).
    margin = 8 * math.isqrt(size) + 8
    low = 2**64 * max(0, begin - margin) // size
    high = min(2**64 * (end + margin) // size, 2**64 - 1)
    near = np.flatnonzero((keys >= np.uint64(low)) & (keys <= np.uint64(high)))
    below = int(np.count_nonzero(keys < np.uint64(low)))
    if not below <= begin <= end <= below + len(near):
        return argsort_random(keys)[begin:end]
    return near[argsort_random(keys[near])[begin - below : end - below]]


def place_in_permutation(purpose: RngStream, *numbers: int, size: int, index: int) -> int:
    """Where the permutation with this key has ``index``, without sorting: its rank among the random numbers."""
    keys = random_u64(purpose, *numbers, size=size)
    key = keys[index]
    return int(np.count_nonzero(keys < key)) + int(np.count_nonzero(keys[:index] == key))


def argsort_random(keys: Words) -> Ints:
    """The stable argsort of random numbers, at twice the speed.

    Each number's lowest bits are replaced by its index, so that one sort, which is faster than an argsort, moves both.
    """
    if len(keys) < _WORTH_PACKING:
        return keys.argsort(kind="stable")
    index_bits = (len(keys) - 1).bit_length()
    index_mask = np.uint64((1 << index_bits) - 1)
    packed = keys & ~index_mask
    packed |= np.arange(len(keys), dtype=np.uint64)
    packed.sort()
    order = (packed & index_mask).view(np.int64)
    packed >>= np.uint64(index_bits)
    has_ties = np.count_nonzero(packed[1:] == packed[:-1])  # by their high bits, so the sort may be wrong there
    return keys.argsort(kind="stable") if has_ties else order


def mix64(numbers: Words) -> Words:
    """Scatter 64-bit numbers (the finaliser of splitmix64, a bijection)."""
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    scattered: Words = numbers ^ (numbers >> np.uint64(31))
    return scattered
