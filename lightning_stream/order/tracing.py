"""What a state means: which epoch, batch and samples come next, and which a step of its epoch was made of."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lightning_stream.order.batching.base import BatchPlan
from lightning_stream.order.plan import RunOrder
from lightning_stream.order.position import Position
from lightning_stream.order.world import World


@dataclass(frozen=True, eq=False)
class TracedBatch:
    """One global batch: which it is, and its samples.

    Args:
        epoch, step: Its epoch, and its number in that epoch, from 0.
        begin, end: Its positions, [begin, end).
        ids: int64[n], sample ids in position order, padding excluded.
        shards, streams: int64[n], the shard and the stream of each.
    """

    epoch: int
    step: int
    begin: int
    end: int
    ids: NDArray[np.int64]
    shards: NDArray[np.int64]
    streams: NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Explanation:
    """What comes next after a state.

    Args:
        epoch: The epoch that continues or begins.
        position, num_samples: Samples of it already trained on, and all that are drawn in it.
        steps_left, upcoming: Global batches still to come in it, and the next one; None if the epoch is over.
    """

    epoch: int
    position: int
    num_samples: int
    steps_left: int
    upcoming: TracedBatch | None

    def __str__(self) -> str:
        """A few lines for a reader."""
        done, batch = f"{self.position} of {self.num_samples} samples trained on", self.upcoming
        text = f"epoch {self.epoch}: {done}, {self.steps_left} global batches to come"
        if batch is None:
            return text
        head = ", ".join(map(str, batch.ids[:8].tolist())) + (", ..." if len(batch.ids) > 8 else "")
        return (
            f"{text}\nnext: global batch {batch.step}, positions {batch.begin} to {batch.end - 1}, from "
            f"{len(np.unique(batch.shards))} shards of {len(np.unique(batch.streams))} streams: ids {head}"
        )


def explain(run: RunOrder, position: Position, *, world: World | None = None) -> Explanation:
    """Say what comes next after a position, under its own batch size and tail (the next epoch, if this one is over)."""
    here = position.normalised(run, batch_size=position.batch_size, tail=position.tail, world=world)
    *earlier, (plan, _) = _stretches(run, here, world)
    done = sum(steps for _, steps in earlier) + _steps_until(plan, here.position)
    left = sum(steps for _, steps in earlier) + plan.num_batches - done
    upcoming = trace(run, here, done, world=world) if left else None
    return Explanation(here.epoch, here.position, run.epoch(here.epoch).num_samples, left, upcoming)


def trace(run: RunOrder, position: Position, step: int, *, world: World | None = None) -> TracedBatch:
    """Which samples global batch ``step`` of the position's epoch is made of, done or to come.

    Args:
        run: The run's order.
        position: Any position of that epoch: its changes of batch size are honoured.
        step: Counted from the epoch's start.
        world: Only matters for the last batch of ``tail="exact"``.

    Raises:
        ValueError: The epoch has no such step.
    """
    before = 0
    for plan, steps in _stretches(run, position, world):
        if 0 <= step - before < steps:
            (begin, end), ids = plan.bounds(step - before), plan.ids(step - before)
            shards, streams = run.snapshot.shards_of(ids), run.snapshot.streams_of(ids)
            return TracedBatch(position.epoch, step, begin, end, ids, shards, streams)
        before += steps
    raise ValueError(
        f"Steps count from 0 to the last global batch of the epoch, but step {step} was asked of epoch "
        f"{position.epoch}, which has {before} under this state. Ask for one of those."
    )


def _stretches(run: RunOrder, position: Position, world: World | None) -> list[tuple[BatchPlan, int]]:
    """The epoch by its batch sizes: for each a plan from where it came into force, and how many steps it held."""
    order, tail = run.epoch(position.epoch), position.tail
    changes = position.batch_changes or ((0, position.batch_size),)
    ends = [*(begin for begin, _ in changes[1:]), order.num_samples]
    found = []
    for (begin, size), end in zip(changes, ends, strict=True):
        plan = BatchPlan(order, batch_size=size, world=world, tail=tail, start=begin)
        found.append((plan, _steps_until(plan, end)))
    return found


def _steps_until(plan: BatchPlan, end: int) -> int:
    """How many of the plan's batches end at or before a position."""
    return bisect_right(range(plan.num_batches), end, key=lambda k: plan.bounds(k)[1])
