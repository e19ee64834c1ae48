"""The draw: what an epoch takes from each shard, and how often. A pure function of (snapshot, weights, seed, epoch)."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from lightning_stream.lazy import cached

from .arrays import Ints, starts_of
from .forget import Forgotten
from .permutation import RngStream, permutation
from .rules import AMOUNT, MAX_NUMBER, short
from .snapshot import Snapshot

_MOST_PARTS = 2**28
_FIXED = 2**63 - 1  # stands for the epoch where every epoch draws the same samples


@dataclass(frozen=True)
class StreamWeights:
    """How much one stream gives to an epoch: at most one of the three, and one kind over all streams of a mixture.

    Example: ``RunOrder(snapshot, [StreamWeights(proportion=0.8), StreamWeights(proportion=0.2)], config)``.
    """

    proportion: float | None = None  # its part of the epoch, relative to the sum of all streams' proportions
    repeat: float | None = None  # how often each of its samples is drawn (0.5: half of them, 2: each twice)
    choose: int | None = None  # how many samples are drawn

    def absolute(self, have: int) -> int:
        """How many samples repeat or choose (neither: all) draw from a stream that has so many."""
        if self.repeat is not None:
            return int(self.repeat * have)
        return have if self.choose is None else self.choose


@dataclass(frozen=True, eq=False)
class ShardDraws:
    """What an epoch draws from each shard: some whole passes over it, then a subset. O(shards) for any repeat."""

    shard: Ints  # int64[n], different shards
    count: Ints  # samples drawn from each, at least 1; more than the shard has means several passes
    size: Ints  # samples of each

    def take(self, places: Ints) -> ShardDraws:
        """Those at some places, in this order."""
        return ShardDraws(self.shard[places], self.count[places], self.size[places])

    @cached_property
    def parts(self) -> Parts:
        """Each pass over a shard, then the subset that is drawn of it. O(passes).

        Raises ValueError if there are more of them than memory can be expected to hold.
        """
        passes = -(-self.count // np.maximum(self.size, 1))
        if int(passes.sum()) > _MOST_PARTS:
            raise ValueError(
                f"A shuffled epoch takes 16 bytes for each pass over a shard, at most {_MOST_PARTS} of them, but "
                f"{passes.sum()} are drawn. Lower repeat, choose or epoch_size: an epoch may be shorter."
            )
        sizes = np.repeat(self.size, passes)
        sizes[np.cumsum(passes) - 1] = self.count - (passes - 1) * self.size
        return Parts(np.repeat(self.shard, passes), sizes)


class NodeParts(NamedTuple):
    """The parts of one canonical node; those on its borders are cut.

    Attributes:
        first: The number of its first part among all, of which it lacks the first ``skipped`` samples.
        shard, sizes: int64[K] of each part: the shard, and how many samples the node has of it.
    """

    first: int
    skipped: int
    shard: Ints
    sizes: Ints


class Parts:
    """The parts of an epoch, one after another in the order in which canonical nodes get them.

    Attributes:
        shard, sizes: int64[parts] of each: its shard, and its samples.
        begins: int64[parts + 1]: where each begins, and the end.
    """

    def __init__(self, shard: Ints, sizes: Ints) -> None:
        self.shard = shard
        self.sizes = sizes
        self.begins = starts_of(sizes)
        self._nodes: dict[tuple[int, int], NodeParts] = {}

    def bounds_of(self, node: int, num_nodes: int) -> tuple[int, int]:
        """The samples of one of some canonical nodes, which have equally many but for one."""
        size, longer = divmod(int(self.begins[-1]), num_nodes)
        begin = size * node + min(node, longer)
        return begin, begin + size + (node < longer)

    def of_node(self, node: int, num_nodes: int) -> NodeParts:
        """The parts of one of some canonical nodes; many epochs may ask for them."""
        return cached(self._nodes, (node, num_nodes), self._of_node, num_nodes)

    def _of_node(self, key: tuple[int, int]) -> NodeParts:
        begin, end = self.bounds_of(*key)
        first = int(np.searchsorted(self.begins, begin, side="right")) - 1
        stop = int(np.searchsorted(self.begins, end))
        sizes = np.diff(self.begins[first : stop + 1].clip(begin, end))
        return NodeParts(first, begin - int(self.begins[first]), self.shard[first:stop], sizes)


@dataclass(frozen=True)
class Draw:
    """The draw of every epoch of a run: ``chosen`` samples of each stream (see :func:`choose_per_stream`).

    ``balanced`` draws other samples in each epoch. Where only some samples of a shard are drawn, they are taken
    ``granularity`` at a time: large values touch fewer shards.
    """

    snapshot: Snapshot
    chosen: tuple[int, ...]
    seed: int
    balanced: bool
    granularity: int
    forgotten: Forgotten | None = None  # samples in whose places others are delivered

    @property
    def constant(self) -> bool:
        """Whether every epoch draws the same samples."""
        return not self.balanced or not (np.array(self.chosen) % np.maximum(self.snapshot.stream_samples, 1)).any()

    def shards(self, epoch: int, streams: Sequence[int]) -> ShardDraws:
        """What is drawn from the shards of these streams, in index order."""
        drawn = [self._stream_shards(epoch, stream) for stream in streams]
        shard, count = map(np.concatenate, zip(*drawn, strict=True))
        return ShardDraws(shard, count, self.snapshot.sizes[shard])

    def ids(self, epoch: int, shard: int, count: int, at: Ints) -> Ints:
        """The sample ids at some places of one pass over a shard, or of its subset of ``count``: both are ascending."""
        size = int(self.snapshot.sizes[shard])
        if count < size:
            picks = np.sort(self._shuffled(RngStream.DRAW_SAMPLES, epoch, shard, size)[:count])
            at = picks[at]
        return at + int(self.snapshot.shard_offsets[shard])

    def delivered(self, epoch: int, ids: Ints) -> Ints:
        """What is delivered for drawn ids: others for forgotten ones."""
        return ids if self.forgotten is None else self.forgotten.replaced(ids, self.seed, epoch)

    def drawn_for(self, epoch: int, sample_id: int) -> list[int]:
        """The inverse of :meth:`delivered`: for which drawn ids a sample is delivered."""
        return [sample_id] if self.forgotten is None else self.forgotten.delivered_as(sample_id, self.seed, epoch)

    def key_of_subset(self, epoch: int, place: int) -> tuple[int, int, int]:
        """The random key of what is drawn of a shard, or of a stream, that gives only a part."""
        return self.seed, epoch if self.balanced else _FIXED, place

    def _shuffled(self, purpose: RngStream, epoch: int, place: int, size: int) -> Ints:
        return permutation(purpose, *self.key_of_subset(epoch, place), size=size)

    def _stream_shards(self, epoch: int, stream: int) -> tuple[Ints, Ints]:
        """The shards of a stream that give samples, and how many each gives."""
        sizes = self.snapshot.shard_sizes[stream]
        shard = np.arange(len(sizes)) + self.snapshot.stream_offsets[stream]
        passes, rest = divmod(self.chosen[stream], max(int(self.snapshot.stream_samples[stream]), 1))
        count = sizes * passes
        if rest:
            order = self._shuffled(RngStream.DRAW_SHARDS, epoch, stream, len(sizes))
            count[order] += _spread(sizes[order], rest, self.granularity)
        return shard[count > 0], count[count > 0]


def choose_per_stream(
    snapshot: Snapshot, weights: Sequence[StreamWeights], epoch_size: int | None, seed: int
) -> tuple[int, ...]:
    """How many samples an epoch draws from each stream.

    Proportions share ``epoch_size`` (default: all samples), the streams' sizes where there are no weights. The seed
    picks the streams that give the few samples lost by rounding down.

    Raises:
        ValueError: Weights that contradict each other or cannot be met; every problem is named.

    Example: for streams of 60 and 40 samples, ``[StreamWeights(repeat=2), StreamWeights()]`` gives (120, 40).
    """
    samples = snapshot.stream_samples.tolist()
    chosen: list[int] = []
    problems = weight_problems(snapshot.stream_names, weights, epoch_size)
    if epoch_size is not None and not any(samples) and not problems and weights[0].proportion is None:
        problems.append(f"epoch_size={epoch_size} needs samples, but no stream has any.")
    if not problems:
        pairs = list(zip(weights, samples, strict=True))
        if epoch_size is None and weights[0].proportion is None:
            chosen = [weight.absolute(have) for weight, have in pairs]
        else:
            parts = [float(have if weight.proportion is None else weight.proportion) for weight, have in pairs]
            chosen = _shared(parts, epoch_size or sum(samples), seed)
        problems = [
            f"Stream {name!r} has no samples, but its weight asks for {take}: omit it or give it shards."
            for name, take, have in zip(snapshot.stream_names, chosen, samples, strict=True)
            if take and not have
        ]
    if sum(chosen) >= MAX_NUMBER:
        problems.append(f"An epoch has fewer than 2**63 samples, but the weights ask for {sum(chosen)}.")
    if problems:
        raise ValueError("The weights of the streams cannot be met. " + " ".join(problems))
    return tuple(chosen)


def weights_digest(weights: Sequence[StreamWeights], kind: type[float] | None = None) -> str:
    """A digest that differs for any other weights; with a kind, of such numbers where these have the same values."""

    def text(value: float | None) -> str:
        return repr(value if kind is None or value is None or kind(value) != value else kind(value))

    words = ";".join(f"{text(weight.proportion)},{text(weight.repeat)},{weight.choose!r}" for weight in weights)
    return hashlib.sha256(words.encode()).hexdigest()[:16]


def _shared(parts: list[float], total: int, seed: int) -> list[int]:
    """Split ``total`` by ``parts``, rounded down; the seed picks the streams that get one more each."""
    all_parts = sum(parts)
    chosen = [int(total * part / all_parts) for part in parts]
    takers = [i for i in permutation(RngStream.SHORTFALL, seed, size=len(parts)).tolist() if parts[i] > 0]
    for i in range(total - sum(chosen)):
        chosen[takers[i % len(takers)]] += 1
    return chosen


def weight_problems(names: Sequence[str], weights: Sequence[StreamWeights], epoch_size: int | None) -> list[str]:
    """One sentence for each contradiction in the weights, whatever is in the streams."""
    if len(weights) != len(names):
        return [f"Every stream needs weights of its own: {len(names)} streams, {len(weights)} weights."]
    problems = []
    pairs = list(zip(names, weights, strict=True))
    for name, weight in pairs:
        values = {kind: value for kind, value in vars(weight).items() if value is not None}
        if len(values) > 1:
            problems.append(f"Stream {name!r} has {' and '.join(values)}: give one of them.")
        bad = [f"{kind}={short(value)}" for kind, value in values.items() if not AMOUNT.accepts(value)]
        problems += [f"Stream {name!r} has {sentence}, which must be {AMOUNT.text}." for sentence in bad]
    others = [name for name, weight in pairs if weight.proportion is None]
    absolute = [name for name, weight in pairs if weight.repeat is not None or weight.choose is not None]
    if 0 < len(others) < len(names):
        problems.append(f"A proportion for one stream means one for all: {others} have none.")
    if not others and not problems and not any(weight.proportion for weight in weights):
        problems.append("At least one proportion must be above 0; all are 0.")
    if epoch_size is not None:
        if absolute:
            problems.append(
                f"epoch_size={epoch_size} shares an epoch among relative weights, but {absolute} have repeat or "
                "choose, which fix the number of samples: drop epoch_size or use proportion."
            )
        if epoch_size < 1:
            problems.append(f"epoch_size must be at least 1, not {epoch_size}.")
    return problems


def _spread(sizes: Ints, total: int, granularity: int) -> Ints:
    """Take ``total`` (at most all) samples from shards evenly, in picks of ``granularity`` (a shard's last is smaller).

    Each shard gives the floor or ceil of its even share of picks; O(shards).
    """
    ends = np.cumsum(-(-sizes // granularity))
    num_picks = int(ends[-1])
    num_samples = int(sizes.sum())
    wanted = total * num_picks // num_samples
    while True:
        taken = np.minimum(np.diff(_scaled(ends, wanted, num_picks), prepend=0) * granularity, sizes)
        lacking = total - int(taken.sum())
        if lacking <= 0 or wanted >= num_picks:
            return np.diff(np.minimum(starts_of(taken), total))
        wanted = min(num_picks, wanted + max(1, lacking * num_picks // num_samples))


def _scaled(ends: Ints, part: int, total: int) -> Ints:
    """``ends * part / total`` rounded down, exact in 64 bits: rises by at most its argument, reaches ``part``."""
    factor = np.uint64(-(-part * 2**32 // total))
    high, low = np.divmod(ends.astype(np.uint64), np.uint64(2**32))
    product = high * factor + low * factor // np.uint64(2**32)
    scaled: Ints = np.minimum(product, np.uint64(part)).astype(np.int64)
    return scaled
