"""`BatchSettings`: how a training run's data is divided into batches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from lightning_stream.loading.shared_position import Start
from lightning_stream.order import BatchPlan, OrderConfig, Tail, World
from lightning_stream.order.micro_batches import MicroBatches

if TYPE_CHECKING:
    from lightning_stream.loading.source import SampleSource


@dataclass(frozen=True)
class BatchSettings:
    """How a training run's data is divided into batches."""

    world: World  # this process among all that train
    device_batch_size: int  # samples of a micro-batch on one device
    global_batch_size: int  # B, samples of one optimizer step over all replicas
    tail: Tail  # what happens to the last partial batch of an epoch
    order: OrderConfig
    padding: bool = True  # whether a rank gets padding beside samples of its own, so that all ranks have equal shapes

    def plan(self, source: SampleSource, start: Start) -> BatchPlan:
        """The global batches from a start to the end of its epoch."""
        order, size = source.order(self.order).epoch(start.epoch), self.global_batch_size
        return BatchPlan(order, batch_size=size, world=self.world, tail=self.tail, start=start.position)

    def micro_batches(self, source: SampleSource, start: Start) -> MicroBatches:
        """This rank's micro-batches from a start to the end of its epoch."""
        return MicroBatches(self.plan(source, start), self.device_batch_size, self.padding)
