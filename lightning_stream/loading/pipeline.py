"""What runs in a loader's worker: from the micro-batches it must deliver to collated batches, reading ahead."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

from torch.utils.data import IterableDataset, get_worker_info

from lightning_stream.loading.settings import BatchSettings, Ordered
from lightning_stream.loading.shared_position import SharedPosition, Start
from lightning_stream.loading.transport import Conveyor
from lightning_stream.loading.worker_signals import leave_signals_to_the_trainer
from lightning_stream.order.micro_batches import BatchInfo, micro_batches
from lightning_stream.reading.bad_samples import BadData, readable
from lightning_stream.reading.look_ahead import read_ahead
from lightning_stream.reading.reader import SampleReader


class Readable(Ordered, Protocol):
    """What batches are read from: a `StreamingDataset`."""

    reader: SampleReader
    bad_data: BadData
    predownload: int | None

    def deliver(self, info: BatchInfo, collate: Callable[[list[Any]], Any] | None) -> Any:
        """Read, transform and collate one micro-batch."""


class BatchSource(IterableDataset[tuple[Any, BatchInfo]]):
    """Delivers one worker's batches, each with what it is made of.

    Args:
        dataset: What is read.
        settings: What the batches are.
        start: Where an iteration starts; a shared position where the workers outlive an iteration.
        collate: From samples to a batch; None for the dataset's own.
        conveyor: How batches leave worker processes; None for torch's own way.
    """

    def __init__(
        self,
        dataset: Readable,
        settings: BatchSettings,
        start: Start | SharedPosition,
        collate: Callable[[list[Any]], Any] | None,
        conveyor: Conveyor | None = None,
    ) -> None:
        self.dataset = dataset
        self.settings = settings
        self.start = start
        self.collate = collate
        self.conveyor = conveyor

    def __iter__(self) -> Iterator[tuple[Any, BatchInfo]]:
        start = self.start.upcoming if isinstance(self.start, SharedPosition) else self.start
        worker = get_worker_info()
        if worker is not None:
            leave_signals_to_the_trainer()
        index, count = (worker.id, worker.num_workers) if worker is not None else (0, 1)
        plan = self.settings.plan(self.dataset, start)
        own = micro_batches(plan, self.settings.device_batch_size, index, count)
        for info in read_ahead(
            self.dataset.reader, plan, own, self.dataset.predownload, self.settings.device_batch_size
        ):
            batch = readable(self.dataset, info, self._read)
            yield batch if worker is None or self.conveyor is None else self.conveyor.load(worker.id, batch)

    def _read(self, info: BatchInfo) -> Any:
        return self.dataset.deliver(info, self.collate)
