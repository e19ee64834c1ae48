"""What a run's batches are, besides the data and the place in it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from lightning_stream.loading.shared_position import Start
from lightning_stream.order import BatchPlan, OrderConfig, RunOrder, Tail, World


class Ordered(Protocol):
    """What has an order: a `StreamingDataset`."""

    def order(self, config: OrderConfig) -> RunOrder:
        """The order of a run with these settings."""


@dataclass(frozen=True)
class BatchSettings:
    """What a run's batches are, besides the data and the place in it.

    Attributes:
        world: This process among all that train.
        device_batch_size: Samples of a micro-batch on one device.
        global_batch_size: B, samples of one optimizer step over all replicas.
        tail: What happens to an epoch's rest.
        order: The order settings.
    """

    world: World
    device_batch_size: int
    global_batch_size: int
    tail: Tail
    order: OrderConfig

    def plan(self, dataset: Ordered, start: Start) -> BatchPlan:
        """The global batches from a start to the end of its epoch."""
        return BatchPlan(
            dataset.order(self.order).epoch(start.epoch),
            batch_size=self.global_batch_size,
            world=self.world,
            tail=self.tail,
            start=start.position,
        )
