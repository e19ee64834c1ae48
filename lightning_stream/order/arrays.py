"""The arrays of this room: ids, positions and counts are int64, and lengths integers of any size."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
Integers = NDArray[np.integer]
Words = NDArray[np.uint64]  # random numbers, and what is made of them


def starts_of(counts: Ints) -> Ints:
    """int64[n + 1]: where each of n consecutive groups of these sizes begins, and the end of the last one."""
    starts = np.zeros(len(counts) + 1, np.int64)  # faster than np.append, which small windows of rows notice
    np.cumsum(counts, out=starts[1:])
    return starts


def segment_of(starts: Ints, at: Ints) -> Ints:
    """Which of consecutive groups has each number; ``starts`` has where these begin, and perhaps the end."""
    return starts.searchsorted(at, side="right") - 1


def ranges(begins: Ints, lengths: Ints) -> Ints:
    """The numbers of all ranges [begin, begin + length), one range after another."""
    starts = starts_of(lengths)
    numbers: Ints = np.arange(starts[-1]) + np.repeat(begins - starts[:-1], lengths)
    return numbers
