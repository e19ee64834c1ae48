"""How a batch is made: its samples are planned, read ahead, read, transformed and collated, and each stage is timed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from time import perf_counter, process_time, thread_time
from typing import Any

from lightning_stream.loading.randomness import SeededCall
from lightning_stream.loading.shared_position import Start
from lightning_stream.loading.source import BatchSettings, SampleSource
from lightning_stream.monitoring.meter import Made
from lightning_stream.order.batches import EpochOrder
from lightning_stream.order.micro_batches import MicroBatch
from lightning_stream.reading.bad_samples import readable
from lightning_stream.reading.look_ahead import read_ahead

Delivery = tuple[Any, MicroBatch, Made]  # a batch, its samples, and the times of its making

_SHORT_S, _UNMEASURED = 0.001, 15  # after the measured one of the batches that take less time
_log = logging.getLogger(__name__)


@dataclass
class BatchMaker:
    """Makes the batches of a loader, in any process.

    Attributes:
        source: The samples.
        collate: From samples to a batch; None for the default.
        memory: Where the arrays of a batch are made; None for memory of their own.
    """

    source: SampleSource
    collate: SeededCall | None = None
    memory: Callable[[int], memoryview | None] | None = None

    def batches(self, settings: BatchSettings, start: Start, index: int = 0, count: int = 1) -> Generator[Delivery]:
        """The batches of one worker of several, from a start to the end of its epoch."""
        for make in self.to_make(settings, start, index, count):
            yield make()

    def to_make(
        self, settings: BatchSettings, start: Start, index: int = 0, count: int = 1, threads: tuple[int, int] = (1, 0)
    ) -> Iterator[Callable[[], Delivery]]:
        """What makes each of these batches; they are to be made in this order.

        `threads` has the number of threads that make them, and how many batches they are ahead at most.
        """
        num_threads, in_progress = threads
        source, size = self.source, settings.device_batch_size
        batches = settings.micro_batches(source, start)
        look_ahead = source.predownload, size, count, 1 + in_progress
        ahead = read_ahead(source.reader, batches.plan, batches.walk(index, count), *look_ahead)
        order, clock, began = batches.plan.order, _Processor(), perf_counter()
        for planned in ahead:
            if in_progress:
                clock = _Processor(num_threads)
            yield partial(self.make, planned, order, perf_counter() - began, clock)
            began = perf_counter()

    def make(
        self, planned: MicroBatch, order: EpochOrder, planning_s: float = 0.0, processor: _Processor | None = None
    ) -> Delivery:
        """Make one batch, whose planning took so long."""
        source, spent, processor = self.source, self.source.reader.counters.spent, processor or _Processor()
        processor.begin()
        began = perf_counter()
        waited_s, transform_s, collate_s = spent.waited_s, spent.transform_s, spent.collate_s
        spent.early = []
        batch, info = readable(source, planned, order, lambda made: source.batch(made, self.collate, self.memory))
        early, spent.early = tuple(spent.early), None
        ended, waited_s = perf_counter(), spent.waited_s - waited_s
        transform_s, collate_s = spent.transform_s - transform_s, spent.collate_s - collate_s
        read_s = ended - began - waited_s - transform_s - collate_s
        stages = (planning_s, waited_s, read_s, transform_s, collate_s)
        thread_s, process_s, queued_s = processor.used(ended - began - waited_s)
        made = Made(began - planning_s, ended, stages, planning_s + thread_s, planning_s + process_s, queued_s, early)
        return batch, info, made

    def verified(self, settings: BatchSettings, delivery: Delivery) -> Delivery:
        """A batch that is about to be handed out; made again if its shards have come since and have other bytes."""
        _, info, made = delivery
        while not self.source.reader.is_right(made.early, wait=False):
            _log.warning("The batch at %s was read early and wrong: it is made again.", info.label)
            delivery = self.make(info, self.source.order(settings.order).epoch(info.epoch))
            _, info, made = delivery
        return delivery

    def in_threads(self) -> BatchMaker:
        """One for threads of this process, which share its random generators."""
        return BatchMaker(replace(self.source, in_threads=True), self.collate)


class _Processor:
    """The processor time of the thread that makes batches, and of its whole process; the time it waited for a core.

    Reading them takes 20 us, a tenth of a batch of 256 token rows: of short batches, one in 16 is measured.
    """

    def __init__(self, num_threads: int = 1) -> None:
        self._num_unmeasured, self._shares, self._num_threads = 0, (0.0, 0.0, 0.0), num_threads

    def begin(self) -> None:
        """Note that a batch is begun."""
        if not self._num_unmeasured:
            self._thread_s, self._process_s, self._queued_s = thread_time(), process_time(), _queued_s()

    def used(self, computing_s: float) -> tuple[float, float, float]:
        """These times of the batch that was begun, whose making took so long without waiting for shards."""
        if self._num_unmeasured:
            self._num_unmeasured -= 1
            thread, process, queued = self._shares
            return thread * computing_s, process * computing_s, queued * computing_s
        thread_s, process_s = thread_time() - self._thread_s, (process_time() - self._process_s) / self._num_threads
        queued_s = _queued_s() - self._queued_s
        if computing_s < _SHORT_S:
            self._shares = thread_s / computing_s, process_s / computing_s, queued_s / computing_s
            self._num_unmeasured = _UNMEASURED
        return thread_s, process_s, queued_s


def _queued_s() -> float:
    """Seconds that this thread could have computed so far, but waited for a core; 0 where the system does not tell."""
    try:
        with Path("/proc/thread-self/schedstat").open("rb", buffering=0) as file:
            return int(file.read().split()[1]) / 1e9
    except OSError:
        return 0.0
