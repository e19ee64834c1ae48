"""From a state to where a run continues: states of ours, and of mosaicml-streaming."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any, Literal

from lightning_stream.errors import StateError
from lightning_stream.loading.settings import BatchSettings, Ordered
from lightning_stream.order import (
    BatchPlan,
    OrderConfig,
    Position,
    RunOrder,
    is_mosaic_state,
    mosaic_config,
    mosaic_position,
)

_CHECKED_POSITIONS = 2**22
_OTHER_BATCHES = (
    "shuffle_algo={algorithm!r} with batching_method={method!r} deals other global batches to this number of nodes and "
    "ranks than to those that the run began with, as mosaicml-streaming does: some samples of this epoch may come "
    "twice or not at all. Continue on as many nodes and ranks as the run began with; leave shuffle_algo out of new "
    "runs, whose batches are then the same on any."
)


def order_in(state: Mapping[str, Any]) -> OrderConfig | None:
    """The order settings that a state of ours records; None where it is of mosaicml-streaming, which records none."""
    return None if is_mosaic_state(state) else Position.from_state(state).order


def position_in(
    state: Mapping[str, Any],
    dataset: Ordered,
    settings: BatchSettings,
    on_mismatch: Literal["error", "warn"] = "error",
) -> Position:
    """Where a state continues over this data.

    States of mosaicml-streaming are taken too, where the dataset was given that run's `shuffle_algo`.

    Args:
        state: What `state_dict` gave.
        dataset: What is read.
        settings: What the batches are now; their order resolved with the state's, see `order_in`.
        on_mismatch: Whether to refuse other data and other settings, or to warn of them.

    Raises:
        StateError: It cannot be continued here; says what differs.
    """
    size, tail, world = settings.global_batch_size, settings.tail, settings.world
    ours = None if is_mosaic_state(state) else Position.from_state(state)
    run = dataset.order(mosaic_config(state, settings.order) if ours is None else settings.order)
    accepted = [] if ours is None else ours.check(run, tail=tail, on_mismatch=on_mismatch)
    try:
        if ours is not None and not accepted and _is_damaged(ours, run):
            raise StateError(
                f"A state's ledger must be the sum of the samples before its position, but that of epoch {ours.epoch}, "
                f"position {ours.position} is another. The state is damaged; load another checkpoint."
            )
        here = ours or mosaic_position(state, run, batch_size=size, tail=tail)
        here = here.normalised(run, batch_size=size, tail=tail, world=world)
        plan = BatchPlan(run.epoch(here.epoch), batch_size=size, world=world, tail=tail, start=here.position)
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


def _is_damaged(position: Position, run: RunOrder) -> bool:
    """Whether the ledger contradicts the position. Beyond what takes about a second, the checksum must do."""
    return position.position <= _CHECKED_POSITIONS and not position.is_proven(run)
