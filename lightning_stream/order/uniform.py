"""The order of samples that any process reads alone as fast as in a row: one permutation of everything that is drawn.

No shard is read as a whole, so no window of shards is needed. An entry of the permutation is computed from its place
alone, so that a billion samples are planned as fast as a hundred.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .arrays import Ints
from .draw import Draw, ShardDraws
from .orders import ReadInChunks
from .permutation import MIX_STEP, RngStream, mix64, random_u64

_ROUNDS = 8  # twice as many as make a Feistel network look random
_LEAST_BITS = 6  # so that a few samples come in any order equally often


class Uniform(ReadInChunks):
    """The drawn samples in a random order: position p has entry number ``scattered(p)`` of them.

    Args:
        draw, epoch: What an epoch draws.
        drawn: The shards that give samples.
        key: (seed, epoch, set of streams), a part of every random key.
    """

    def __init__(self, draw: Draw, epoch: int, drawn: ShardDraws, key: tuple[int, int, int]) -> None:
        super().__init__(int(drawn.parts.begins[-1]))
        self._draw, self._epoch, self._parts, self._key = draw, epoch, drawn.parts, key
        self._whole = draw.snapshot.sizes[self._parts.shard]

    def _read(self, at: Ints) -> Ints:
        entry = scattered(at, self.size, RngStream.UNIFORM, *self._key)
        part = self._parts.begins.searchsorted(entry, side="right") - 1
        inside = entry - self._parts.begins[part]
        # Of a shard that gives only some of its samples, these are the first of a permutation of it.
        for number in np.unique(part[self._parts.sizes[part] < self._whole[part]]).tolist():
            of_part = part == number
            key = self._draw.key_of_subset(self._epoch, int(self._parts.shard[number]))
            inside[of_part] = scattered(inside[of_part], int(self._whole[number]), RngStream.DRAW_SAMPLES, *key)
        ids = self._draw.snapshot.shard_offsets[self._parts.shard[part]] + inside
        return self._draw.delivered(self._epoch, ids)

    def nodes(self, at: Ints) -> Ints:
        """Node 0: no process has samples of its own."""
        return np.zeros_like(at)


def scattered(at: Ints, size: int, purpose: RngStream, *numbers: int) -> Ints:
    """Entries of the permutation of ``range(size)`` with this key, each computed alone: int64[len(at)].

    A Feistel network permutes the numbers of as many bits as `size` needs; what it leads out of the range is permuted
    again until it comes back, once on average.
    """
    bits = max(_LEAST_BITS, (size - 1).bit_length())
    keys = random_u64(purpose, *numbers, size=_ROUNDS)
    found = _permuted(at.astype(np.uint64), bits, keys)
    outside = np.flatnonzero(found >= size)
    while len(outside):
        found[outside] = _permuted(found[outside], bits, keys)
        outside = outside[found[outside] >= size]
    return found.astype(np.int64)


def _permuted(numbers: NDArray[np.uint64], bits: int, keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Numbers of so many bits, permuted: in turn, each half is changed by a random function of the other."""
    low_bits = np.uint64(bits // 2)
    halves = [numbers & ((np.uint64(1) << low_bits) - np.uint64(1)), numbers >> low_bits]
    masks = [(np.uint64(1) << size) - np.uint64(1) for size in (low_bits, np.uint64(bits) - low_bits)]
    for round_number, key in enumerate(keys):
        turn = round_number % 2
        halves[turn] = halves[turn] ^ (mix64(halves[1 - turn] * MIX_STEP + key) & masks[turn])
    return halves[1] << low_bits | halves[0]
