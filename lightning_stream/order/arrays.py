"""The arrays of this room: ids, positions and counts are int64."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


def starts_of(counts: Ints) -> Ints:
    """int64[n + 1]: where each of n consecutive groups of these sizes begins, and the end of the last one."""
    return np.append(0, np.cumsum(counts))


def ranges(begins: Ints, lengths: Ints) -> Ints:
    """The numbers of all ranges [begin, begin + length), one range after another."""
    shifts = begins - starts_of(lengths)[:-1]
    numbers: Ints = np.arange(int(lengths.sum()), dtype=np.int64) + np.repeat(shifts, lengths)
    return numbers
