"""Which sample, when: the order of a run as pure functions over numpy arrays.

Global batch k of epoch e is a pure function of (snapshot, weights, seed, e, order settings, k), and of nothing else.
"""

from __future__ import annotations

from lightning_stream.order.config import ORDER_VERSION, MosaicConfig, OrderConfig
from lightning_stream.order.draw import StreamWeights, choose_per_stream, weights_digest
from lightning_stream.order.mix import EpochOrder, Layout
from lightning_stream.order.plan import BatchPlan, RunOrder, prefetch_shards
from lightning_stream.order.position import Position
from lightning_stream.order.rank_split import Share, Tail, num_micro_batches
from lightning_stream.order.snapshot import Snapshot
from lightning_stream.order.world import World

__all__ = [
    "ORDER_VERSION",
    "BatchPlan",
    "EpochOrder",
    "Layout",
    "MosaicConfig",
    "OrderConfig",
    "Position",
    "RunOrder",
    "Share",
    "Snapshot",
    "StreamWeights",
    "Tail",
    "World",
    "choose_per_stream",
    "num_micro_batches",
    "prefetch_shards",
    "weights_digest",
]
