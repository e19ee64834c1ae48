"""Proof of what a run saw: a sum over (epoch, position, sample id) of every sample trained on, filler excluded."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from lightning_stream.order.mix import EpochOrder
from lightning_stream.order.permutation import mix64

MODULUS = 2**64
_CHUNK = 1 << 20
_STEP = np.uint64(0x9E3779B97F4A7C15)


def hashes(epoch: int, positions: NDArray[np.int64], ids: NDArray[np.int64]) -> NDArray[np.uint64]:
    """uint64[n]: one well-mixed number per (epoch, position, sample id)."""
    start = mix64(np.full(1, epoch, dtype=np.uint64) + _STEP)
    return mix64(mix64(start + positions.astype(np.uint64) * _STEP) + ids.astype(np.uint64) * _STEP)


def total(epoch: int, positions: NDArray[np.int64], ids: NDArray[np.int64]) -> int:
    """The sum of :func:`hashes` modulo 2**64."""
    return int(hashes(epoch, positions, ids).sum(dtype=np.uint64))


def expected(order: EpochOrder, begin: int, end: int) -> int:
    """The sum that positions [begin, end) of an epoch must give. O(end - begin), in chunks."""
    whole = 0
    for first in range(begin, end, _CHUNK):
        last = min(first + _CHUNK, end)
        whole += total(order.epoch, np.arange(first, last, dtype=np.int64), order.ids(first, last))
    return whole % MODULUS
