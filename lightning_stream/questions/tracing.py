"""What a state means: the epoch, batch and samples that come next, and the samples of any step of its epoch."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from lightning_stream.errors import checking
from lightning_stream.order.arrays import Ints
from lightning_stream.order.balance import Balance
from lightning_stream.order.batches import BatchPlan
from lightning_stream.order.position import Position
from lightning_stream.order.run import RunOrder
from lightning_stream.order.world import World


@dataclass(frozen=True, eq=False)
class TracedBatch:
    """A global batch: epoch, number in it (from 0), positions [begin, end), and int64[n] samples without padding."""

    epoch: int
    step: int
    begin: int
    end: int
    ids: Ints
    shards: Ints
    streams: Ints


@dataclass(frozen=True, eq=False)
class Explanation:
    """What comes after a state: the epoch that continues or begins, and its next global batch (None if it has none).

    ``position`` of its ``num_samples`` were trained on; ``steps_left`` global batches are still to come.
    """

    epoch: int
    position: int
    num_samples: int
    steps_left: int
    upcoming: TracedBatch | None

    def __str__(self) -> str:
        """A few lines of text."""
        done = f"{self.position} of {self.num_samples} samples trained on"
        batch = self.upcoming
        text = f"epoch {self.epoch}: {done}, {self.steps_left} global batches to come"
        if batch is None:
            return text
        head = ", ".join(map(str, batch.ids[:8].tolist())) + (", ..." if len(batch.ids) > 8 else "")
        return (
            f"{text}\nnext: global batch {batch.step}, positions {batch.begin} to {batch.end - 1}, from "
            f"{len(np.unique(batch.shards))} shards of {len(np.unique(batch.streams))} streams: ids {head}"
        )


class Occurrence(NamedTuple):
    """One time that a training run sees a sample; all numbers count from 0.

    ``step`` counts in the epoch, ``micro_batch`` in the step, and ``row`` in the micro-batch. With replication,
    ``rank`` is the first of the ranks that get it.
    """

    epoch: int
    step: int
    rank: int
    micro_batch: int
    row: int


@dataclass(frozen=True)
class Delivery:
    """How global batches are delivered: to which ranks, and in which micro-batches; see `BatchPlan` and `MicroBatches`.

    ``world`` may be that of any rank.
    """

    world: World
    device_batch_size: int
    padding: bool = True
    balance: Balance | None = None
    accumulate: int = 1


def explain(run: RunOrder, position: Position, *, world: World | None = None) -> Explanation:
    """What comes after a position, with its own batch size and tail (the next epoch, if this one is over).

    Example: ``print(explain(run, Position.from_state(state)))`` gives "epoch 0: 512 of 2000 samples trained on, ...".
    """
    here = position.rebased_on(run, batch_size=position.batch_size, tail=position.tail, world=world)
    *_, (plan, before, _) = _segments(run, here, here.epoch, world)
    done = _steps_until(plan, here.position)
    left = plan.num_batches - done
    upcoming = trace(run, here, before + done, world=world) if left else None
    return Explanation(here.epoch, here.position, run.epoch(here.epoch).num_samples, left, upcoming)


def steps_done(run: RunOrder, position: Position) -> int:
    """The global batches of the position's epoch before it, those of remainders included."""
    *_, (plan, before, _) = _segments(run, position, position.epoch, None)
    return before + bisect_left(range(plan.num_batches), position.position, key=lambda k: plan.bounds(k)[0])


@checking
def trace(run: RunOrder, position: Position, step: int, *, world: World | None = None) -> TracedBatch:
    """The samples of global batch ``step``, counted from the start of the position's epoch, done or to come.

    The position's changes of the batch size count; ``world`` only matters for the last batch of ``tail="exact"``.

    Raises:
        ValueError: The epoch has no such step.
    """
    end = 0
    for plan, before, end in _segments(run, position, position.epoch, world):
        if before <= step < end:
            bounds = plan.bounds(step - before)
            ids, _ = plan.order.samples(*bounds)
            shards = run.snapshot.shards_of(ids)
            streams = run.snapshot.streams_of(ids)
            return TracedBatch(position.epoch, step, *bounds, ids, shards, streams)
    raise ValueError(f"A step must be one of the epoch's: epoch {position.epoch} has {end} of them, not step {step}.")


@checking
def where(
    run: RunOrder, position: Position, sample_id: int, delivery: Delivery, epochs: Iterable[int] | None = None
) -> list[Occurrence]:
    """When and where a training run sees a sample, done or to come, in the epoch of the position or in ``epochs``.

    There is no log: this is the inverse of the order. It holds for this world, and for the position's batch size and
    its changes in that epoch; earlier steps whose batch does not divide over this world are those of one process.
    Padding does not count, nor do samples that ``tail="drop"`` omits.

    Raises:
        ValueError: There is no such sample or epoch; or the batches do not follow the order (see `BatchPlan`).
    """
    occurrences: list[Occurrence] = []
    for epoch in (position.epoch,) if epochs is None else epochs:
        segments = _segments(run, position, epoch, delivery.world, delivery.accumulate)
        if not all(plan.follows_order for plan, _, _ in segments):
            raise ValueError(
                "This order of mosaicml-streaming has other batches on this number of nodes and ranks. Ask in the "
                "world that the training run began in."
            )
        for at in run.where(sample_id, epoch).tolist():
            for plan, before, end in segments:
                k = _steps_until(plan, at)
                if before + k < end and plan.bounds(k)[0] <= at:
                    occurrences += (
                        Occurrence(epoch, before + k, *place) for place in _delivered(plan, k, at, delivery)
                    )
    return occurrences


def _delivered(plan: BatchPlan, k: int, at: int, delivery: Delivery) -> Iterator[tuple[int, int, int]]:
    """The rank, micro-batch and row that get position ``at`` of global batch ``k``."""
    for replica_plan in plan.of_replicas(delivery.balance):
        share = replica_plan.places(k)
        rank = replica_plan.world.rank
        if not ((share.positions == at) & ~share.filler).any():
            continue
        count = plan.num_micro_batches(k, delivery.device_batch_size)
        for micro_batch, piece in enumerate(share.micro_batches(count)):
            rows = np.arange(len(piece)) if delivery.padding else np.flatnonzero(~piece.filler)
            matches = (piece.positions[rows] == at) & ~piece.filler[rows]
            yield from ((rank, micro_batch, row) for row in np.flatnonzero(matches).tolist())
        return  # a position is on one replica


def _segments(
    run: RunOrder, position: Position, epoch: int, world: World | None, accumulate: int = 1
) -> list[tuple[BatchPlan, int, int]]:
    """An epoch by its batch sizes: a plan from the first position of each on, its first step, and that behind its last.

    The changes of the position are those of its own epoch.
    """
    order = run.epoch(epoch)
    segments = []
    step = 0
    here = position if epoch == position.epoch else replace(position, batch_changes=())
    for begin, end, size in here.segments(order.num_samples):
        # Of an earlier batch the world is not known. Those of a budget divide over any.
        fits = world is not None and (run.config.has_budget or size % world.num_replicas == 0)
        known = world if world is not None and fits else World()
        plan = BatchPlan(order, batch_size=size, world=known, tail=position.tail, start=begin, accumulate=accumulate)
        steps = _steps_until(plan, end)
        segments.append((plan, step, step + steps))
        step += steps
    return segments


def _steps_until(plan: BatchPlan, end: int) -> int:
    """How many of the plan's batches end at or before a position."""
    return bisect_right(range(plan.num_batches), end, key=lambda k: plan.bounds(k)[1])
