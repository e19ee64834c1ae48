"""Permutations that stay the same under every version of numpy.

numpy keeps the streams of its bit generators, but not the results of `Generator.permutation` or `shuffle`. So a
permutation here is the stable argsort of raw 64-bit output, keyed by plain numbers.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from lightning_stream.order.arrays import Ints

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
    FORGOTTEN = 20
    VERSIONS = 21


def random_u64(purpose: RngStream, *numbers: int, size: int) -> NDArray[np.uint64]:
    """``size`` raw 64-bit numbers of the stream with this key (each number in [0, 2**63))."""
    words = np.array((purpose, *numbers), dtype="<u8").view("<u4")
    return np.random.PCG64(np.random.SeedSequence(words)).random_raw(size)


def permutation(purpose: RngStream, *numbers: int, size: int) -> Ints:
    """The permutation of ``range(size)`` with this key: the stable argsort of :func:`random_u64`."""
    keys = random_u64(purpose, *numbers, size=size)
    order = _argsort_scattered(keys) if size >= _WORTH_PACKING else None
    return stable_argsort(keys) if order is None else order


def place_in_permutation(purpose: RngStream, *numbers: int, size: int, index: int) -> int:
    """Where the permutation with this key has ``index``, without sorting: its rank among the random numbers."""
    keys = random_u64(purpose, *numbers, size=size)
    key = keys[index]
    return int(np.count_nonzero(keys < key)) + int(np.count_nonzero(keys[:index] == key))


def _argsort_scattered(keys: NDArray[np.uint64]) -> Ints | None:
    """The stable argsort of random numbers, at twice the speed; None where the high bits of two are equal.

    Each number's lowest bits are replaced by its index, so that one sort, which is faster than an argsort, moves both.
    """
    index_bits = (len(keys) - 1).bit_length()
    index_mask = np.uint64((1 << index_bits) - 1)
    packed = keys & ~index_mask
    packed |= np.arange(len(keys), dtype=np.uint64)
    packed.sort()
    order = (packed & index_mask).view(np.int64)
    packed >>= np.uint64(index_bits)
    return None if np.count_nonzero(packed[1:] == packed[:-1]) else order


def stable_argsort(keys: NDArray[np.uint64] | Ints) -> Ints:
    """Stable argsort, several times faster where no two keys are equal: then every sort agrees."""
    order = keys.argsort()
    ordered = keys[order]
    return keys.argsort(kind="stable") if (ordered[1:] == ordered[:-1]).any() else order


def mix64(numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Scatter 64-bit numbers (the finaliser of splitmix64, a bijection)."""
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    scattered: NDArray[np.uint64] = numbers ^ (numbers >> np.uint64(31))
    return scattered
