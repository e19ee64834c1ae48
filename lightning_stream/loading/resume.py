"""From a state to where a run continues: states of ours, and of mosaicml-streaming."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any, Literal

from lightning_stream.loading.settings import BatchSettings, Ordered
from lightning_stream.order import OrderConfig, Position, is_mosaic_state, mosaic_config, mosaic_position


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
    size, tail = settings.global_batch_size, settings.tail
    if is_mosaic_state(state):
        run = dataset.order(mosaic_config(state, settings.order))
        loaded = mosaic_position(state, run, batch_size=size, tail=tail)
    else:
        loaded, run = Position.from_state(state), dataset.order(settings.order)
    for sentence in loaded.check(run, on_mismatch=on_mismatch):
        warnings.warn(sentence, stacklevel=4)
    return loaded.normalised(run, batch_size=size, tail=tail, world=settings.world)
