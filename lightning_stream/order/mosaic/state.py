"""States written by mosaicml-streaming: the order settings that they hold, and the position to resume from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import structs

from lightning_stream.errors import StateError
from lightning_stream.order.batches import Tail
from lightning_stream.order.config import MOST_NODES, OrderConfig
from lightning_stream.order.position import MOST_EPOCHS, Position
from lightning_stream.order.rules import count, violations
from lightning_stream.order.run import RunOrder

from .epoch import MosaicOrder

_NODES = "initial_physical_nodes"  # older versions of that library do not record it
_RULES = {
    "epoch": count(0, MOST_EPOCHS),
    "sample_in_epoch": count(),
    "num_canonical_nodes": count(1, MOST_NODES),
    "shuffle_seed": count(),
    _NODES: count(1, MOST_NODES, optional=True),
}


def is_mosaic_state(state: object) -> bool:
    """Whether this looks like a state written by mosaicml-streaming rather than by this package."""
    return isinstance(state, Mapping) and "sample_in_epoch" in state and "version" not in state


def mosaic_config(state: Mapping[str, Any], config: OrderConfig) -> OrderConfig:
    """The order of a run: seed and nodes from its state, the rest from this run's arguments (``config``).

    Raises StateError where the arguments do not name the algorithm, or the state is damaged.
    """
    _check(state)
    if config.mosaic is None:
        raise StateError(
            "A run must continue in the order it began with, but this state, written by mosaicml-streaming, does not "
            "record its algorithm. Pass the shuffle, shuffle_algo, partition_algo and batch_size of that run (its "
            "defaults: False, py1e, relaxed)."
        )
    nodes = state.get(_NODES)
    mosaic = config.mosaic if nodes is None else structs.replace(config.mosaic, initial_physical_nodes=nodes)
    nodes = state["num_canonical_nodes"]
    return structs.replace(config, seed=state["shuffle_seed"], canonical_nodes=nodes, mosaic=mosaic)


def mosaic_position(state: Mapping[str, Any], run: RunOrder, *, batch_size: int, tail: Tail) -> Position:
    """The position that a state of mosaicml-streaming stands for, in a run made with :func:`mosaic_config`.

    Raises ValueError for one beyond the epoch, which says that the state is of other data, or counts samples twice.
    """
    start = Position.start(run, batch_size=batch_size, tail=tail, epoch=state["epoch"])
    order = run.epoch(state["epoch"]).order
    assert isinstance(order, MosaicOrder)
    delivered = state["sample_in_epoch"]
    if delivered > (most := order.num_delivered + batch_size):  # more ranks repeat less than a batch more
        raise ValueError(
            f"an epoch of this data delivers at most {most} samples, repeats included; found sample_in_epoch="
            f"{delivered}, of other data, or of ranks that share samples and each counted them."
        )
    return start.advanced(run, order.position_after(delivered))


def mosaic_state(position: Position, run: RunOrder) -> dict[str, int]:
    """The state with which mosaicml-streaming continues at a position of this run.

    Raises StateError where it cannot: the run has an order of its own, or stands within one of that library's batches.
    """
    if position.order.mosaic is None:
        raise StateError(
            f"mosaicml-streaming can continue a run in one of its own orders; this one has shuffle_algo="
            f"{position.order.algorithm!r}. Continue it with lightning-stream; one with shuffle_algo='py1e' could move"
        )
    order = run.epoch(position.epoch).order
    assert isinstance(order, MosaicOrder)
    delivered = order.delivered_before(position.position)
    if delivered is None:
        raise StateError(
            f"mosaicml-streaming continues after whole global batches of {order.global_batch} samples; this run stands "
            f"at {position.position}, within one. Take a checkpoint from the nodes and ranks that it began with"
        )
    nodes = position.order.mosaic.initial_physical_nodes or 1
    known = {"num_canonical_nodes": position.order.canonical_nodes, "shuffle_seed": position.order.seed, _NODES: nodes}
    return {"epoch": position.epoch, "sample_in_epoch": delivered, **known}


def _check(state: Mapping[str, Any]) -> None:
    if problems := violations(state, _RULES):
        raise StateError(
            f"A state of mosaicml-streaming must hold its whole numbers, but: {' '.join(problems)} It is damaged or "
            "not such a state; load another checkpoint."
        )
