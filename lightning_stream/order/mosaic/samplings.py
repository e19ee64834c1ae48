"""Which samples an epoch of mosaicml-streaming 0.13 holds, before they are shuffled and partitioned."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.random import default_rng
from numpy.typing import NDArray

from lightning_stream.order.draw import StreamWeights
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

    The weights are those that `choose_per_stream` has accepted; the seed picks the streams that give the samples lost
    by rounding.

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
        choose = np.array([one.absolute(have) for one, have in zip(weights, sizes.tolist(), strict=True)], np.int64)
        proportion = choose / max(int(choose.sum()), 1)
    bad = np.flatnonzero((sizes == 0) & (choose > 0)).tolist()
    if bad or not choose.sum():
        raise ValueError(
            f"an epoch needs samples, each from a stream that has some; found {int(choose.sum())} in all, and {bad} "
            "as streams without any; raise the weights, or omit those streams"
        )
    return choose.tolist(), proportion.tolist()


def draw(snapshot: Snapshot, streams: Sequence[int], choose: Sequence[int], config: OrderConfig, epoch: int) -> Drawn:
    """Draw from some streams. One generator serves the call, so a call for all streams differs from one for each."""
    balanced = config.sampling_method == "balanced"
    rng = default_rng(config.seed + epoch * balanced)
    none = np.zeros(0, np.int64)
    parts = [Drawn(none, none)]
    for stream in streams:
        sizes = snapshot.shard_sizes[stream]
        if not len(sizes):
            continue  # an empty dataset has no shards
        use_epoch = config.shuffle and balanced
        per_shard = sampling(sizes, choose[stream], config.sampling_granularity, config.seed, epoch, use_epoch)
        begin = int(snapshot.shard_offsets[snapshot.stream_offsets[stream]])
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


def sampling(sizes: Ids, choose: int, granularity: int, seed: int, epoch: int, use_epoch: bool) -> Ids:
    """How many samples to draw from each shard of ``sizes`` samples: int64[shards], with sum ``choose``.

    Whole repeats of the stream come first; what is left over is picked, ``granularity`` samples of a shard at a time
    (the last pick of a shard may be smaller), in a random order, another one in each epoch if ``use_epoch``.
    """
    total = int(sizes.sum())
    if not total:
        return np.zeros(len(sizes), dtype=np.int64)
    repeats, left = divmod(choose, total)
    drawn = sizes * repeats
    if not left:
        return drawn
    pieces = -(-sizes // granularity)
    shards = np.repeat(np.arange(len(sizes)), pieces)
    amounts = np.full(len(shards), granularity, dtype=np.int64)
    # An empty shard has no last piece, so it resets that of its neighbour: kept, because the original draws so.
    amounts[np.cumsum(pieces) - 1] = sizes - (pieces - 1) * granularity
    order = default_rng(seed + epoch * use_epoch).permutation(len(shards))
    np.add.at(drawn, shards[order], np.diff(np.minimum(np.cumsum(amounts[order]), left), prepend=0))
    return drawn
