"""The order of samples that any process reads alone as fast as in a row: one permutation of everything that is drawn.

No shard is read as a whole, so no window of shards is needed. An entry of the permutation is computed from its place
alone, so that a billion samples are planned as fast as a hundred.
"""

from __future__ import annotations

import numpy as np

from .arrays import Ints, Words
from .draw import Draw, ShardDraws
from .orders import ReadInChunks
from .permutation import MIX_STEP, RngStream, mix64, random_u64
from .window import Stored

_ROUNDS = 8  # twice as many as make a Feistel network look random
_LEAST_BITS = 6  # so that a few samples come in any order equally often


class Uniform(ReadInChunks):
    """The drawn samples in a random order: position p has entry number ``scattered(p)`` of them.

    Args:
        draw, epoch: What an epoch draws.
        drawn: The shards that give samples.
        key: (seed, epoch, set of streams), a part of every random key.
    """

    chunk_length = 1 << 14  # a third of the time of 4096: few entries are permuted many times, for the same calls

    def __init__(self, draw: Draw, epoch: int, drawn: ShardDraws, key: tuple[int, int, int]) -> None:
        self._entries = _Picked(draw, epoch, drawn)
        self._key = key
        super().__init__(self._entries.size)

    def _read(self, at: Ints) -> Ints:
        return self._entries.ids(scattered(at, self.size, RngStream.UNIFORM, *self._key))


class _Picked(Stored):
    """The drawn samples shard by shard; of one that gives only some, these are the first of a permutation of it."""

    def picked(self, index: int, at: Ints) -> Ints:
        shard = int(self.shard[index])
        key = self.draw.key_of_subset(self.epoch, shard)
        begin = int(self.draw.snapshot.shard_offsets[shard])
        return scattered(at, int(self.sizes[index]), RngStream.DRAW_SAMPLES, *key) + begin


def scattered(at: Ints, size: int, purpose: RngStream, *numbers: int) -> Ints:
    """Entries of the permutation of ``range(size)`` with this key, each computed alone: int64[len(at)].

    A Feistel network permutes the numbers of as many bits as `size` needs; what it leads out of the range is permuted
    again until it comes back, once on average.
    """
    bits = max(_LEAST_BITS, (size - 1).bit_length())
    keys = random_u64(purpose, *numbers, size=_ROUNDS)
    entries = _permuted(at.astype(np.uint64), bits, keys)
    outside = np.flatnonzero(entries >= size)
    while len(outside):
        entries[outside] = _permuted(entries[outside], bits, keys)
        outside = outside[entries[outside] >= size]
    return entries.astype(np.int64)


def _permuted(numbers: Words, bits: int, keys: Words) -> Words:
    """Numbers of so many bits, permuted: in turn, each half is changed by a random function of the other."""
    low_bits = np.uint64(bits // 2)
    halves = [numbers & ((np.uint64(1) << low_bits) - np.uint64(1)), numbers >> low_bits]
    masks = [(np.uint64(1) << size) - np.uint64(1) for size in (low_bits, np.uint64(bits) - low_bits)]
    for round_number, key in enumerate(keys):
        side = round_number % 2
        halves[side] = halves[side] ^ (mix64(halves[1 - side] * MIX_STEP + key) & masks[side])
    return halves[1] << low_bits | halves[0]
