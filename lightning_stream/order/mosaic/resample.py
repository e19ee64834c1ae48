"""Which samples an epoch of mosaicml-streaming 0.13 holds, before they are partitioned and shuffled."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.random import default_rng
from numpy.typing import NDArray

from lightning_stream.order.mosaic.samplings import sampling

Ids = NDArray[np.int64]


@dataclass(frozen=True)
class Draws:
    """Drawn samples as units: a whole shard, once for each of its repeats, then what is drawn of it in part.

    Args:
        sizes: int64[units], samples of each.
        ids: int64[sum of sizes], the sample id of each drawn sample.
    """

    sizes: Ids
    ids: Ids


@dataclass(frozen=True)
class Sampler:
    """Draws the epochs of a run.

    Args:
        shard_sizes: Samples of each shard, per stream; sample ids run through all streams.
        choose: Samples to draw from each stream.
        balanced: Draw anew each epoch; else the same in all.
        granularity: Samples of one pick of a shard, see `sampling`.
        seed: The run's seed.
        shuffle: Whether the run shuffles (the picks of shards are new in each epoch only if it does).
    """

    shard_sizes: Sequence[Ids]
    choose: Sequence[int]
    balanced: bool
    granularity: int
    seed: int
    shuffle: bool

    def draw(self, epoch: int, streams: Iterable[int]) -> Draws:
        """Draw from some streams. One generator serves the call, so asking for all at once differs from one by one."""
        begins = np.cumsum([0, *(int(sizes.sum()) for sizes in self.shard_sizes)])
        rng = default_rng(self.seed + epoch * self.balanced)
        parts = []
        for stream in streams:
            sizes = self.shard_sizes[stream]
            draws = sampling(
                sizes, self.choose[stream], self.granularity, self.seed, epoch, self.shuffle and self.balanced
            )
            parts.append(_units(sizes, draws, int(begins[stream]), rng))
        return Draws(np.concatenate([part.sizes for part in parts]), np.concatenate([part.ids for part in parts]))


def _units(sizes: Ids, draws: Ids, begin: int, rng: np.random.Generator) -> Draws:
    repeats, rest = np.divmod(draws, np.maximum(sizes, 1))
    units = repeats + (rest > 0)
    shard = np.repeat(np.arange(len(sizes)), units)
    lengths = sizes[shard]
    partial = np.cumsum(units)[rest > 0] - 1
    lengths[partial] = rest[rest > 0]
    starts = np.cumsum(lengths) - lengths
    shard_begins = begin + np.cumsum(sizes) - sizes
    ids = np.arange(int(lengths.sum()), dtype=np.int64) + np.repeat(shard_begins[shard] - starts, lengths)
    for unit in partial.tolist():
        own = shard[unit]
        picks = np.sort(rng.choice(int(sizes[own]), int(lengths[unit]), replace=False))
        ids[starts[unit] : starts[unit] + lengths[unit]] = shard_begins[own] + picks
    return Draws(lengths, ids)
