"""Reading ahead: the shards of coming batches are fetched while earlier batches are trained on."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import filterfalse

from lightning_stream.order import BatchPlan, prefetch_shards
from lightning_stream.order.micro_batches import MicroBatch
from lightning_stream.reading.next_use import NextUse
from lightning_stream.reading.reader import SampleReader
from lightning_stream.reading.shard_pool import Want

_READ_AHEAD_BATCHES = 8
_FILES_PER_RANGE = 20  # to begin earlier costs at most a twentieth more requests, over all processes
_FURTHER = 16  # times as far, where connections would be idle otherwise


def warm(reader: SampleReader, plan: BatchPlan, steps: int) -> int:
    """Fetch the shards that this rank needs for the first global batches of a plan, and return how many these are.

    Raises StoreError, FormatError or CacheError if a shard cannot be fetched.
    """
    if steps < 0:
        raise ValueError(f"steps must be at least 0; found {steps}")
    next_use = _eviction_plan(reader, plan)
    try:
        end = next(filterfalse(plan.has, range(steps)), steps)  # counting an epoch's packed rows would plan all of it
        shards = prefetch_shards(plan, reader.snapshot, 0, end)
        reader.fetch(shards)
    finally:
        reader.forget(next_use)
    return len(shards)


def read_ahead_depth(predownload: int | None, device_batch_size: int) -> int:
    """How many micro-batches a worker looks ahead of the one that it delivers."""
    return _READ_AHEAD_BATCHES if predownload is None else -(-predownload // device_batch_size)


def furthest_ahead(predownload: int | None, device_batch_size: int, *, is_limited: bool) -> int:
    """How many micro-batches it looks ahead at most: further where connections are idle and nothing is evicted."""
    depth = read_ahead_depth(predownload, device_batch_size)
    return depth if predownload is not None or is_limited else _FURTHER * depth


def spare_requests(num_files: int, num_processes: int) -> int:
    """How many ranges each process that reads may request of shards that are being fetched anyway."""
    return num_files // (_FILES_PER_RANGE * num_processes)


def read_ahead(
    reader: SampleReader,
    plan: BatchPlan,
    infos: Iterable[MicroBatch],
    predownload: int | None,
    device_batch_size: int,
    num_workers: int = 1,
    in_progress: int = 1,
) -> Iterator[MicroBatch]:
    """Yield micro-batches of a plan, while the shards of those that follow are fetched.

    Without a ``predownload``, it looks further ahead while connections are idle: in an order that reads shard after
    shard, the next batches need too few. However it ends, it takes back what it
    has announced. The caller reads at most `in_progress` of the latest batches, or else the next one is not requested.
    """
    reader.spare_requests(spare_requests(reader.shards.num_files, plan.world.num_replicas * num_workers))
    next_use, is_exiting = _eviction_plan(reader, plan), sys.is_finalizing
    waiting: deque[tuple[MicroBatch, Want | None]] = deque()
    being_read: deque[Want | None] = deque()
    infos = iter(infos)
    try:
        # Once all shards are open, which they then stay, nothing is fetched or evicted any more.
        while not reader.has_all_open or waiting:
            further = reader.could_fetch_more()
            allowed = furthest_ahead(predownload, device_batch_size, is_limited=not further)
            allowed = 0 if reader.has_all_open else allowed
            if len(waiting) <= allowed and (info := next(infos, None)) is not None:
                waiting.append((info, reader.read_ahead(info.sample_ids)))
                continue
            if not waiting:
                break
            next_use.advance(waiting[0][0].begin)
            info, announced = waiting.popleft()
            being_read.append(announced)
            yield info
            if len(being_read) >= in_progress:
                reader.done_with(being_read.popleft())
        yield from infos
    finally:
        if not is_exiting():  # at the interpreter's exit, modules may be gone already
            for announced in (*being_read, *(announced for _, announced in waiting)):
                reader.done_with(announced)
            reader.forget(next_use)


def _eviction_plan(reader: SampleReader, plan: BatchPlan) -> NextUse:
    """Let the reader's caches evict first what this plan needs last."""
    next_use = NextUse(plan.order, reader.snapshot)
    next_use.advance(plan.start)
    reader.plan(next_use)
    return next_use
