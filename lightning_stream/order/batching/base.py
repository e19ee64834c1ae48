"""How an epoch's positions are cut into global batches, and each of those into shares: the native rules."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import numpy as np

from lightning_stream.order.batching.interleave import EpochOrder
from lightning_stream.order.rank_split import (
    TAILS,
    ReplicaBatch,
    Tail,
    ceil_div,
    num_micro_batches,
    split,
    split_blocks,
)
from lightning_stream.order.world import World


class NativeBatches:
    """The global batches of a native order from a position on; see `BatchPlan` for the arguments.

    With ``tail="exact"`` a rest smaller than the replicas takes from the batch before it what they lack, so that none
    of them repeats a sample; not for ``per_stream``, where that batch is another stream's, and not out of a block.
    """

    def __init__(self, order: EpochOrder, batch_size: int, world: World, tail: Tail, start: int) -> None:
        self._order, self._batch_size, self._world, self._tail = order, batch_size, world, tail
        self._start = start
        self.num_whole = max(0, order.layout.whole - start) // batch_size
        at = start + self.num_whole * batch_size
        self._tail_ends = _tail_ends(order, batch_size, tail, at)
        if tail == "exact" and order.layout.batch_size is None:
            self._level_small_rest(at)

    @property
    def num_batches(self) -> int:
        """Global batches."""
        return self.num_whole + len(self._tail_ends)

    @property
    def end(self) -> int:
        """The position behind the last batch."""
        return self._tail_ends[-1] if self._tail_ends else self._start + self.num_whole * self._batch_size

    def bounds(self, k: int) -> tuple[int, int]:
        """First position of global batch ``k``, and the one behind its last."""
        first = self._start + min(k, self.num_whole) * self._batch_size
        if k < self.num_whole:
            return first, first + self._batch_size
        tail = k - self.num_whole
        return (self._tail_ends[tail - 1] if tail else first), self._tail_ends[tail]

    def share(self, k: int) -> ReplicaBatch:
        """This replica's part of global batch ``k``."""
        begin, end = self.bounds(k)
        replicas, replica = self._world.num_replicas, self._world.replica
        canonical = self._order.canonical(begin, end)
        block = self._order.layout.block
        streams = self._order.streams(begin, end)
        if streams is None or (self._tail == "exact" and k >= self.num_whole):
            block = 1
            offsets, filler = split(canonical, replicas, replica, equal=self._tail != "exact")
        else:
            offsets, filler = split_blocks(canonical, streams, block, replicas, replica)
        return ReplicaBatch(self._order.ids(begin, end)[offsets], begin + offsets, filler, block)

    def shares(self, ks: Sequence[int]) -> list[ReplicaBatch]:
        """This replica's part of each of these batches, ascending: as :meth:`share`, but planned together."""
        block, count = self._order.layout.block, bisect_left(ks, self.num_whole)
        if block > 1 or count < 2:
            return [self.share(k) for k in ks]
        size, replicas, replica = self._batch_size, self._world.num_replicas, self._world.replica
        first, end = self._start + ks[0] * size, self._start + (ks[count - 1] + 1) * size
        begins = (np.array(ks[:count], dtype=np.int64)[:, None] - ks[0]) * size
        canonical = self._order.canonical(first, end)[begins + np.arange(size)]
        if (canonical == canonical[0]).all():
            canonical = canonical[:1]  # usually C divides B, and all batches are grouped alike
        grouped = np.argsort(canonical, axis=1, kind="stable")
        offsets = begins + grouped[:, size * replica // replicas : size * (replica + 1) // replicas]
        filler = np.zeros(offsets.shape, dtype=np.bool_)
        whole = map(ReplicaBatch, self._order.ids(first, end)[offsets], first + offsets, filler)
        return [*whole, *map(self.share, ks[count:])]

    def num_micro_batches(self, k: int, device_batch_size: int) -> int:
        """See `BatchPlan.num_micro_batches`."""
        begin, end = self.bounds(k)
        block, replicas = self._order.layout.block, self._world.num_replicas
        if block == 1 or (self._tail == "exact" and k >= self.num_whole):
            return num_micro_batches(end - begin, device_batch_size, replicas)
        if device_batch_size % block and block % device_batch_size:
            raise ValueError(
                f"device_per_stream deals blocks of {block} samples, the batch per device that the run began with; a "
                f"batch per device must hold whole blocks or divide one, but it is {device_batch_size}. Choose another."
            )
        length = len(self.share(k)) if k >= self.num_whole else self._batch_size // replicas
        return ceil_div(length, device_batch_size)

    def _level_small_rest(self, at: int) -> None:
        """Move the border before a rest smaller than the replicas, where a batch lies before it."""
        first, *ends = at, *self._tail_ends
        if not ends or (len(ends) == 1 and not self.num_whole):
            return
        before = [first, *ends][-2]
        border = ends[-1] - self._world.num_replicas
        layout = self._order.layout
        if border < before and (layout.block == 1 or border >= layout.whole):
            self.num_whole -= len(ends) == 1
            self._tail_ends = (*ends[:-2], border, ends[-1])


def _tail_ends(order: EpochOrder, batch_size: int, tail: Tail, at: int) -> tuple[int, ...]:
    """Ends of the batches behind position ``at``, from which on no whole batch follows."""
    layout = order.layout
    total = layout.num_samples
    if tail == "drop" or at >= total:
        return ()
    if layout.batch_size is not None:
        return tuple(end for end in layout.rests if end > at)
    if layout.block > 1 and tail == "pad":
        edges = [*range(at + layout.block, layout.whole + 1, layout.block), *layout.rests]
        edges = [end for end in edges if end > at]
        per_batch = batch_size // layout.block
        return (*edges[per_batch - 1 :: per_batch], *edges[len(edges) // per_batch * per_batch :][-1:])
    return (*range(at + batch_size, total, batch_size), total)


def plan_problems(order: EpochOrder, batch_size: int, world: World, tail: str, start: int) -> list[str]:
    """Sentences on what forbids cutting this order this way; empty if nothing does."""
    problems = []
    layout = order.layout
    if tail not in TAILS:
        problems.append(f"tail must be one of {', '.join(TAILS)}, not {tail!r}.")
    if not 0 <= start <= layout.num_samples:
        problems.append(f"start must be within the epoch, [0, {layout.num_samples}], not {start}.")
    if batch_size < 1:
        return [*problems, f"batch_size (B) must be at least 1, not {batch_size}."]
    replicas = world.num_replicas
    if batch_size % replicas:
        near = [b for b in (batch_size // replicas * replicas, -(-batch_size // replicas) * replicas) if b]
        problems.append(
            f"A global batch must divide evenly over the data replicas, but {batch_size} samples over {replicas} "
            f"replicas leave {batch_size % replicas}: use {' or '.join(map(str, near))} samples, or a number of "
            f"replicas that divides {batch_size}."
        )
    elif batch_size // replicas % layout.block:
        problems.append(
            f"device_per_stream deals blocks of {layout.block} samples, so a replica's part of a global batch must be "
            f"a multiple of that, but {batch_size} samples over {replicas} replicas are {batch_size // replicas} each."
        )
    unit = layout.batch_size or layout.block
    if 0 < start < layout.whole and start % unit:
        problems.append(f"This order goes in runs of {unit} samples of one stream, but start={start} is amid one.")
    if layout.batch_size not in (None, batch_size):
        problems.append(
            f"per_stream fixes the global batch at the run's start: {layout.batch_size} samples then, {batch_size} "
            "now. Keep it, or choose another batching_method."
        )
    return problems
