"""Which sample, when: the order of a run as pure functions over numpy arrays.

Global batch k of epoch e is a pure function of (snapshot, weights, seed, e, order settings, k); where samples are
packed, sorted by length or forgotten, also of the lengths and of the forgotten samples. It depends on the processes in
two cases only: with ``tail="exact"``, the border between an epoch's last two batches depends on the number of data
replicas, since each needs a sample; and the orders of mosaicml-streaming depend on nodes and ranks.
"""

from __future__ import annotations

from .balance import Balance
from .batches import BatchPlan, EpochOrder, Tail
from .config import ORDER_VERSION, MosaicConfig, OrderConfig
from .draw import StreamWeights, choose_per_stream, weights_digest
from .mosaic.state import is_mosaic_state, mosaic_config, mosaic_position, mosaic_state
from .position import Position
from .run import RunOrder
from .schedule import MixtureChange, Schedule
from .shares import ReplicaBatch, num_micro_batches
from .snapshot import Snapshot
from .world import World

__all__ = [
    "Balance", "BatchPlan", "EpochOrder", "MixtureChange", "MosaicConfig", "ORDER_VERSION", "OrderConfig",
    "Position", "ReplicaBatch", "RunOrder", "Schedule", "Snapshot", "StreamWeights", "Tail", "World",
    "choose_per_stream", "is_mosaic_state", "mosaic_config", "mosaic_position", "mosaic_state", "num_micro_batches",
    "weights_digest",
]  # fmt: skip
