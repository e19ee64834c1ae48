"""`Pipeline` runs in a loader's worker: it reads ahead, and makes collated batches of micro-batches."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from torch.utils.data import IterableDataset, get_worker_info

from lightning_stream.loading.randomness import SeededCall
from lightning_stream.loading.settings import BatchSettings
from lightning_stream.loading.shared_position import SharedPosition, Start
from lightning_stream.loading.source import SampleSource
from lightning_stream.loading.transport import SharedSlots
from lightning_stream.loading.worker_signals import leave_signals_to_the_trainer
from lightning_stream.order.micro_batches import MicroBatch
from lightning_stream.reading.bad_samples import readable
from lightning_stream.reading.look_ahead import read_ahead


class Pipeline(IterableDataset[tuple[Any, MicroBatch]]):
    """Delivers one worker's batches, each with its `MicroBatch`.

    Args:
        source: The samples.
        settings: How the data is divided into batches.
        start: Where an iteration starts; a shared position where the workers outlive an iteration.
        collate: From samples to a batch; None for the default.
        slots: How small batches leave worker processes; None for torch's own way.
    """

    def __init__(
        self,
        source: SampleSource,
        settings: BatchSettings,
        start: Start | SharedPosition,
        collate: SeededCall | None,
        slots: SharedSlots | None = None,
    ) -> None:
        self.source, self.settings, self.start, self.collate = source, settings, start, collate
        self.slots = slots
        self.trainer_pid = os.getpid()

    def __iter__(self) -> Iterator[tuple[Any, MicroBatch]]:
        worker = get_worker_info()
        if worker is not None:  # now, and not with the first batch: the trainer may be gone before that
            leave_signals_to_the_trainer(self.trainer_pid)
        return self._batches(*((worker.id, worker.num_workers) if worker is not None else (0, 1)))

    def _batches(self, index: int, count: int) -> Iterator[tuple[Any, MicroBatch]]:
        start = self.start.upcoming if isinstance(self.start, SharedPosition) else self.start
        source, size = self.source, self.settings.device_batch_size
        batches = self.settings.micro_batches(source, start)
        ahead = read_ahead(source.reader, batches.plan, batches.walk(index, count), source.predownload, size)
        for planned in ahead:
            batch = readable(source, planned, lambda made: source.batch(made, self.collate))
            yield batch if self.slots is None else self.slots.put(index, batch)
