"""Which samples an epoch of mosaicml-streaming 0.13 holds, before they are shuffled and partitioned."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.random import default_rng
from numpy.typing import NDArray

from lightning_stream.order.draw import StreamWeights
from lightning_stream.order.rules import broken, count
from lightning_stream.order.snapshot import Snapshot

if TYPE_CHECKING:
    from lightning_stream.order.config import OrderConfig

Ids = NDArray[np.int64]


class Drawn(NamedTuple):
    """Drawn samples: of each shard every repeat of it, then what is drawn of it in part."""

    sizes: Ids  # int64[n], samples of each repeat or part
    ids: Ids  # int64[sum of sizes], the sample id of each drawn sample


def chosen(
    snapshot: Snapshot, weights: Sequence[StreamWeights], epoch_size: int | None, seed: int
) -> tuple[list[int], list[float]]:
    """How many samples each stream gives to an epoch, and each stream's proportion of it.

    The weights are those that `choose_per_stream` has accepted; numbers lost by rounding are dealt by the seed.

    Raises:
        ValueError: The epoch would be empty, or a stream without samples would have to give some.
    """
    sizes = snapshot.stream_samples
    if epoch_size is not None or any(one.proportion is not None for one in weights):
        parts = np.array([one.proportion for one in weights], dtype=np.float64)
        parts = sizes.astype(np.float64) if np.isnan(parts).any() else parts
        total = int(sizes.sum()) if epoch_size is None else epoch_size
        proportion = parts / max(parts.sum(), np.finfo(np.float64).tiny)
        choose = (total * proportion).astype(np.int64)
        choose[default_rng(seed).choice(len(sizes), total - int(choose.sum()), replace=False)] += 1
    else:
        repeats = [1 if one.repeat is None else one.repeat for one in weights]
        asked = [one.choose for one in weights]
        choose = np.array(
            [int(r * n) if c is None else c for c, r, n in zip(asked, repeats, sizes.tolist(), strict=True)], np.int64
        )
        proportion = choose / max(int(choose.sum()), 1)
    bad = np.flatnonzero((sizes == 0) & (choose > 0)).tolist()
    if bad or not choose.sum():
        raise ValueError(
            f"an epoch needs samples, each from a stream that has some; found {int(choose.sum())} in all, and {bad} "
            "as streams without any; raise the weights, or leave those streams out"
        )
    return choose.tolist(), proportion.tolist()


def draw(snapshot: Snapshot, streams: Sequence[int], choose: Sequence[int], config: OrderConfig, epoch: int) -> Drawn:
    """Draw from some streams. One generator serves the call, so asking for all at once differs from one by one."""
    balanced = config.sampling_method == "balanced"
    rng = default_rng(config.seed + epoch * balanced)
    none = np.zeros(0, np.int64)
    parts = [Drawn(none, none)]
    for stream in streams:
        if not len(snapshot.shard_sizes[stream]):
            continue  # an empty dataset has no shards
        sizes, begin = snapshot.shard_sizes[stream], int(snapshot.shard_offsets[snapshot.stream_offsets[stream]])
        use_epoch = config.shuffle and balanced
        per_shard = sampling(sizes, choose[stream], config.sampling_granularity, config.seed, epoch, use_epoch)
        parts.append(_drawn(sizes, per_shard, begin, rng))
    return Drawn(np.concatenate([part.sizes for part in parts]), np.concatenate([part.ids for part in parts]))


def _drawn(sizes: Ids, per_shard: Ids, begin: int, rng: np.random.Generator) -> Drawn:
    repeats, rest = np.divmod(per_shard, np.maximum(sizes, 1))
    times = repeats + (rest > 0)
    shard = np.repeat(np.arange(len(sizes)), times)
    lengths = sizes[shard]
    partial = np.cumsum(times)[rest > 0] - 1
    lengths[partial] = rest[rest > 0]
    starts = np.cumsum(lengths) - lengths
    shard_begins = begin + np.cumsum(sizes) - sizes
    ids = np.arange(int(lengths.sum()), dtype=np.int64) + np.repeat(shard_begins[shard] - starts, lengths)
    for at in partial.tolist():
        own = shard[at]
        picks = np.sort(rng.choice(int(sizes[own]), int(lengths[at]), replace=False))
        ids[starts[at] : starts[at] + lengths[at]] = shard_begins[own] + picks
    return Drawn(lengths, ids)


def sampling(
    samples_per_shard: Sequence[int] | Ids, choose: int, granularity: int, seed: int, epoch: int, use_epoch: bool
) -> Ids:
    """Give how many samples to draw from each shard: int64[shards], with sum `choose`.

    Whole repeats of the stream come first; what is left over is picked, `granularity` samples of a shard at a time,
    in a random order of such picks.

    Args:
        samples_per_shard, choose: Samples of each shard, and samples to draw in all.
        granularity: Samples of one pick (the last pick of a shard may be smaller).
        seed, epoch, use_epoch: The run's seed, the epoch from 0, and whether each epoch draws other picks.

    Raises:
        ValueError: A number out of range, or no shards.
    """
    sizes = np.asarray(samples_per_shard, dtype=np.int64)
    if sizes.ndim != 1 or not len(sizes) or (sizes < 0).any():
        raise ValueError(f"a draw needs one or more shards, none of negative size; found sizes {sizes.tolist()[:8]}")
    given = {"granularity": granularity, "choose": choose, "seed": seed, "epoch": epoch}
    if problems := broken(given, {name: count(int(name == "granularity")) for name in given}):
        raise ValueError(" ".join(problems))
    total = int(sizes.sum())
    if not total:
        return np.zeros(len(sizes), dtype=np.int64)
    repeats, left = divmod(choose, total)
    drawn = sizes * repeats
    if left:
        drawn += _pick(sizes, left, granularity, seed + epoch * use_epoch)
    return drawn


def _pick(sizes: Ids, wanted: int, granularity: int, seed: int) -> Ids:
    """Pick `wanted` samples, fewer than there are, in pieces of `granularity`: int64[shards]."""
    pieces = -(-sizes // granularity)
    shards = np.repeat(np.arange(len(sizes)), pieces)
    amounts = np.full(len(shards), granularity, dtype=np.int64)
    # An empty shard has no last piece, so it resets that of its neighbour: kept, for it is what the original draws.
    amounts[np.cumsum(pieces) - 1] = sizes - (pieces - 1) * granularity
    order = default_rng(seed).permutation(len(shards))
    taken = np.diff(np.minimum(np.cumsum(amounts[order]), wanted), prepend=0)
    drawn = np.zeros(len(sizes), dtype=np.int64)
    np.add.at(drawn, shards[order], taken)
    return drawn
