"""Array types of the order, and the sums that turn counts into places."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


def starts_of(counts: Ints) -> Ints:
    """int64[n + 1]: where each of n segments begins, one after another, and where the last one ends."""
    starts = np.zeros(len(counts) + 1, dtype=np.int64)
    np.cumsum(counts, out=starts[1:])
    return starts
