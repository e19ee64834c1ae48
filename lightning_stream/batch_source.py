"""What runs in a loader's worker: from the micro-batches it must deliver to collated batches, reading ahead."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from torch.utils.data import IterableDataset, get_worker_info

from lightning_stream.bad_data import BadData, readable
from lightning_stream.batches import BatchInfo, micro_batches
from lightning_stream.next_use import NextUse
from lightning_stream.order import (
    BatchPlan,
    OrderConfig,
    Position,
    RunOrder,
    Tail,
    World,
    is_mosaic_state,
    prefetch_shards,
)
from lightning_stream.reader import SampleReader
from lightning_stream.shared_position import SharedPosition, Start

_READ_AHEAD_BATCHES = 8
_GRACE_S = 30


class Readable(Protocol):
    """What batches are read from: a `StreamingDataset`."""

    reader: SampleReader
    bad_data: BadData
    predownload: int | None

    def order(self, config: OrderConfig) -> RunOrder:
        """The order of a run with these settings."""

    def deliver(self, info: BatchInfo, collate: Callable[[list[Any]], Any] | None) -> Any:
        """Read, transform and collate one micro-batch."""


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

    def plan(self, dataset: Readable, start: Start) -> BatchPlan:
        """The global batches from a start to the end of its epoch."""
        return BatchPlan(
            dataset.order(self.order).epoch(start.epoch),
            batch_size=self.global_batch_size,
            world=self.world,
            tail=self.tail,
            start=start.position,
        )


def order_in(state: Mapping[str, Any]) -> OrderConfig | None:
    """The order settings that a state of ours records; None where it is of mosaicml-streaming, which records none."""
    return None if is_mosaic_state(state) else Position.from_state(state).order


class BatchSource(IterableDataset[tuple[Any, BatchInfo]]):
    """Delivers one worker's batches, each with what it is made of.

    Args:
        dataset: What is read.
        settings: What the batches are.
        start: Where an iteration starts; a shared position where the workers outlive an iteration.
        collate: From samples to a batch; None for the dataset's own.
    """

    def __init__(
        self,
        dataset: Readable,
        settings: BatchSettings,
        start: Start | SharedPosition,
        collate: Callable[[list[Any]], Any] | None,
    ) -> None:
        self.dataset = dataset
        self.settings = settings
        self.start = start
        self.collate = collate

    def __iter__(self) -> Iterator[tuple[Any, BatchInfo]]:
        start = self.start.upcoming if isinstance(self.start, SharedPosition) else self.start
        worker = get_worker_info()
        if worker is not None:
            leave_signals_to_the_trainer()
        index, count = (worker.id, worker.num_workers) if worker is not None else (0, 1)
        plan = self.settings.plan(self.dataset, start)
        own = micro_batches(plan, self.settings.device_batch_size, index, count)
        for info in read_ahead(self.dataset, plan, own, self.settings.device_batch_size):
            yield readable(self.dataset, info, self._read)

    def _read(self, info: BatchInfo) -> Any:
        return self.dataset.deliver(info, self.collate)


def warm(reader: SampleReader, plan: BatchPlan, steps: int) -> int:
    """Fetch what this rank needs for the first global batches of a plan.

    Returns:
        How many shards that takes, those included that were here.

    Raises:
        ValueError: Fewer than no steps.
        StoreError, FormatError, CacheError: A shard cannot be had.
    """
    if steps < 0:
        raise ValueError(f"steps is 0 or more; found {steps}")
    next_use = NextUse(plan.order, reader.snapshot)
    next_use.advance(plan.bounds(0)[0] if plan.num_batches else 0)
    reader.plan(next_use)
    shards = prefetch_shards(plan, reader.snapshot, 0, min(steps, plan.num_batches))
    reader.fetch(shards)
    return len(shards)


def leave_signals_to_the_trainer() -> None:
    """Let a worker outlive Ctrl-C and SIGTERM, which terminals, `timeout` and schedulers send to the whole job.

    The trainer takes them to mean: finish the step, save, leave. It needs its workers for that; they end with it, at
    once when it is the trainer who asks. A worker asked by others, and not by its trainer within a grace period, ends
    by itself.
    """
    if threading.current_thread() is not threading.main_thread():
        return  # handlers can only be set from the main thread, where torch runs its workers
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if not hasattr(signal, "sigtimedwait") or signal.SIGTERM in signal.pthread_sigmask(signal.SIG_BLOCK, ()):
        return  # a system that does not say who sends; or an iteration before has done this
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    threading.Thread(target=_end_when_asked, args=(os.getppid(),), daemon=True).start()


def _end_when_asked(trainer: int) -> None:
    """Wait for SIGTERM in a thread, since only a waiter is told who sent it."""
    asked: signal.struct_siginfo | None = signal.sigwaitinfo({signal.SIGTERM})
    end = time.monotonic() + _GRACE_S
    while asked is not None and asked.si_pid != trainer:
        asked = signal.sigtimedwait({signal.SIGTERM}, max(0.0, end - time.monotonic()))
    os._exit(0)


def read_ahead_depth(predownload: int | None, device_batch_size: int) -> int:
    """Micro-batches that a worker looks ahead of the one it delivers."""
    return _READ_AHEAD_BATCHES if predownload is None else -(-predownload // device_batch_size)


def read_ahead(
    dataset: Readable, plan: BatchPlan, infos: Iterator[BatchInfo], device_batch_size: int
) -> Iterator[BatchInfo]:
    """Pass micro-batches of a plan on, having begun to fetch the shards of those that follow."""
    next_use = NextUse(plan.order, dataset.reader.snapshot)
    next_use.advance(plan.bounds(0)[0] if plan.num_batches else 0)
    dataset.reader.plan(next_use)
    depth = read_ahead_depth(dataset.predownload, device_batch_size)
    waiting: deque[BatchInfo] = deque()
    for info in infos:
        dataset.reader.read_ahead(info.ids)
        waiting.append(info)
        if len(waiting) > depth:
            yield from _deliver(dataset, waiting, next_use)
    while waiting:
        yield from _deliver(dataset, waiting, next_use)


def _deliver(dataset: Readable, waiting: deque[BatchInfo], next_use: NextUse) -> Iterator[BatchInfo]:
    info = waiting.popleft()
    next_use.advance(info.begin)
    yield info
    dataset.reader.done_with(info.ids)
