"""The position at which a run continues from a state, of ours or of mosaicml-streaming."""

from __future__ import annotations

import logging
import warnings
from typing import Any, Literal

from lightning_stream.errors import SnapshotMismatch, StateError
from lightning_stream.loading.cursor import State, Walk
from lightning_stream.loading.source import BatchSettings, SampleSource
from lightning_stream.order import BatchPlan, OrderConfig, Position, is_mosaic_state, mosaic_config, mosaic_position
from lightning_stream.reading.stream import changes_since

GIVEN_WHILE_TRAINING = (
    "a trainer reads where its run stands in its own checkpoint, so that a state would change nothing while it trains; "
    "found load_state_dict() then. Resume the trainer itself, by ckpt_path= of Lightning's fit or "
    "resume_from_checkpoint= of Transformers' train; to begin where another run stands, call load_state_dict, or "
    "start_at, before the training"
)


_log = logging.getLogger(__name__)
_CONVERTED = (
    "The data was converted since this state was saved. Its samples and their order are the same, so the training run "
    "continues exactly (digest of the data: %s, now %s)."
)
_CHECKED_POSITIONS = 2**22  # beyond what takes about a second, a state's checksum must do
_OTHER_BATCHES = (
    "shuffle_algo={algorithm!r} with batching_method={method!r} has other global batches on this number of nodes and "
    "ranks than on those that the run began with, as in mosaicml-streaming: some samples of this epoch may come twice "
    "or not at all. Continue on as many nodes and ranks as the run began with; omit shuffle_algo in new runs, whose "
    "batches are then the same on any."
)


def order_in(state: State) -> OrderConfig | None:
    """The order settings that a state of ours records; None where it is of mosaicml-streaming, which records none."""
    return None if is_mosaic_state(state) else Position.from_state(state).order


def resumed_at(position: Position, step: int, num_samples: int | None) -> str:
    """The sentence that announces where a training run resumed; None where samples are packed into rows."""
    here = f"{position.position:,}"
    done = f"{here} rows of this epoch" if num_samples is None else f"{here} of {num_samples:,} samples of this epoch"
    return f"Resumed at epoch {position.epoch}, step {step:,} ({done})."


def position_after(loader: Any, num_batches: int) -> Position:
    """Where a loader's run is once so many batches of the iteration in progress, or of the last one, are trained on.

    Raises:
        StateError: So many were not handed out, or a trainer counts the batches itself.
    """
    if loader.cursor.driver is not None:
        raise StateError(
            "a trainer counts the batches that it trained on itself; found state_dict(num_batches=...) of a loader "
            "that a trainer or a PositionTracker drives. Call state_dict() without it"
        )
    walk = loader.cursor.now or Walk()
    if not 0 <= num_batches <= walk.num_batches:
        raise StateError(
            "num_batches counts the batches of the iteration in progress that were trained on; found "
            f"{num_batches}, and {walk.num_batches} were handed out. Count from 0 in each iteration"
        )
    start: Position = walk.start or loader.position
    last = loader.micro_batches_from(start)[num_batches - 1] if num_batches else None
    loader.cursor.warn_inside_step(last)
    return Walk(start=start, last_batch=last).reached or start


def position_in(
    state: State,
    source: SampleSource,
    settings: BatchSettings,
    on_mismatch: Literal["error", "warn"] = "error",
) -> Position:
    """The position at which a state, which `state_dict` returned, continues over this data.

    States of mosaicml-streaming are accepted if the dataset has that run's `shuffle_algo`. The order of `settings` is
    resolved with the state's, see `order_in`; `on_mismatch` refuses other data and other settings, or warns of them.

    Raises:
        StateError: It cannot be continued here; the message names what differs.
    """
    size = settings.global_batch_size
    tail = settings.tail
    world = settings.world
    ours = None if is_mosaic_state(state) else Position.from_state(state)
    run = source.order(mosaic_config(state, settings.order) if ours is None else settings.order)
    if ours is not None and (moved := ours.converted(run.snapshot)) is not ours:
        if world.rank == 0:
            _log.info(_CONVERTED, ours.snapshot.digest, moved.snapshot.digest)
        ours = moved
    try:
        accepted = [] if ours is None else ours.check(run, tail=tail, on_mismatch=on_mismatch)
    except SnapshotMismatch as error:
        assert ours is not None
        changes = changes_since(ours.snapshot.versions, source.reader.indexes, source.reader.caches)
        raise SnapshotMismatch(f"{error} {changes}".rstrip()) from error
    try:
        if (
            ours is not None
            and not accepted
            and ours.position <= _CHECKED_POSITIONS
            and not run.config.needs_lengths
            # Beyond a new switch, samples may have other ids, and the sum is made again.
            and ours.order.switches == run.config.switches
            and not ours.ledger_matches(run)
        ):
            raise StateError(
                f"A state's ledger must be the sum of the samples before its position, but that of epoch {ours.epoch}, "
                f"position {ours.position} is another. A sampler lists other samples than before, or else the state is "
                "damaged: pass the former sampler, or load another checkpoint."
            )
        here = ours or mosaic_position(state, run, batch_size=size, tail=tail)
        here = here.rebased_on(run, batch_size=size, tail=tail, world=world)
        plan = BatchPlan(here.order_in(run), batch_size=size, world=world, tail=tail, start=here.position)
    except ValueError as error:
        raise StateError(
            f"A state must be one that this run can continue, but: {error} Pass the batch size, devices and settings "
            "of the run that wrote it, or load another checkpoint."
        ) from error
    if not plan.follows_order:
        accepted.append(_OTHER_BATCHES.format(algorithm=run.config.algorithm, method=run.config.batching_method))
    for sentence in accepted:
        warnings.warn(sentence, stacklevel=4)
    return here
