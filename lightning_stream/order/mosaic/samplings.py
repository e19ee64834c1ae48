"""How many samples mosaicml-streaming 0.13 draws from each shard of a stream."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.random import default_rng
from numpy.typing import NDArray

Ids = NDArray[np.int64]


def sampling(
    samples_per_shard: Sequence[int] | Ids,
    choose: int,
    granularity: int,
    seed: int,
    epoch: int,
    use_epoch: bool,
) -> Ids:
    """Give how many samples to draw from each shard: int64[shards], with sum `choose`.

    Whole repeats of the stream come first; what is left over is picked, `granularity` samples of a shard at a time,
    in a random order of such picks.

    Args:
        samples_per_shard: Samples of each shard.
        choose: Samples to draw in all.
        granularity: Samples of one pick (the last pick of a shard may be smaller).
        seed: The run's seed.
        epoch: The epoch, counted from 0.
        use_epoch: Whether the picks are drawn anew each epoch.

    Raises:
        ValueError: A number out of range, or no shards.
    """
    sizes = np.asarray(samples_per_shard, dtype=np.int64)
    if sizes.ndim != 1 or not len(sizes) or (sizes < 0).any():
        raise ValueError(f"a draw needs one or more shards, none of negative size; found sizes {sizes.tolist()[:8]}")
    for name, value, least in (
        ("granularity", granularity, 1),
        ("choose", choose, 0),
        ("seed", seed, 0),
        ("epoch", epoch, 0),
    ):
        if value < least:
            raise ValueError(f"{name} must be at least {least}; found {value}")
    total = int(sizes.sum())
    if not total:
        return np.zeros(len(sizes), dtype=np.int64)
    repeats, left = divmod(choose, total)
    drawn = sizes * repeats
    if left:
        drawn += _pick(sizes, left, granularity, seed + epoch * use_epoch)
    return drawn


def _pick(sizes: Ids, count: int, granularity: int, seed: int) -> Ids:
    """Pick `count` samples, fewer than there are, in pieces of `granularity`: int64[shards]."""
    pieces = -(-sizes // granularity)
    shards = np.repeat(np.arange(len(sizes)), pieces)
    amounts = np.full(len(shards), granularity, dtype=np.int64)
    # An empty shard has no last piece, so it resets that of its neighbour: kept, for it is what the original draws.
    amounts[np.cumsum(pieces) - 1] = sizes - (pieces - 1) * granularity
    order = default_rng(seed).permutation(len(shards))
    taken = np.diff(np.minimum(np.cumsum(amounts[order]), count), prepend=0)
    drawn = np.zeros(len(sizes), dtype=np.int64)
    np.add.at(drawn, shards[order], taken)
    return drawn
