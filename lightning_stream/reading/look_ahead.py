"""Reading ahead: the shards of coming batches are fetched while earlier batches are trained on.

A cache under a limit evicts first what is needed last.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import chain, filterfalse

import numpy as np

from lightning_stream.order import BatchPlan
from lightning_stream.order.micro_batches import MicroBatch
from lightning_stream.reading.next_use import NextUse, next_use_of_file
from lightning_stream.reading.reader import SampleReader
from lightning_stream.reading.shard_pool import Want

_READ_AHEAD_BATCHES = 8
_FILES_PER_RANGE = 20  # to begin earlier costs at most a twentieth more requests, over all processes
_FINISHED_BATCHES = 4  # of each worker, that a slower one has not reached: at least
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
        of_batches = [reader.snapshot.shards_of(plan.share(k).sample_ids).tolist() for k in range(end)]
        shards = list(dict.fromkeys(chain.from_iterable(of_batches)))
        reader.fetch(np.array(shards, np.int64))
    finally:
        reader.shards.pool.plans.pop(id(next_use), None)
    return len(shards)


def read_ahead_depth(predownload: int | None, device_batch_size: int) -> int:
    """How many micro-batches a worker looks ahead of the one that it delivers."""
    return _READ_AHEAD_BATCHES if predownload is None else -(-predownload // device_batch_size)


def furthest_ahead(predownload: int | None, device_batch_size: int, *, is_limited: bool) -> int:
    """How many micro-batches it looks ahead at most: further where connections are idle and nothing is evicted."""
    depth = read_ahead_depth(predownload, device_batch_size)
    return depth if predownload is not None or is_limited else _FURTHER * depth


def read_ahead(
    reader: SampleReader,
    plan: BatchPlan,
    infos: Iterable[MicroBatch],
    predownload: int | None,
    device_batch_size: int,
    num_workers: int = 1,
    in_progress: int = 1,
    num_waiting: int = 0,
) -> Iterator[MicroBatch]:
    """Yield micro-batches of a plan, while the shards of those that follow are fetched.

    Without a ``predownload``, it looks further ahead while connections are idle: in an order that reads shard after
    shard, the next batches need too few. However it ends, it drops what it has asked for. The caller reads at most
    `in_progress` of the latest batches, or else the next one is not requested. In each of the workers, `num_waiting`
    batches may wait for a slower one.
    """
    pool = reader.shards.pool
    is_exiting = sys.is_finalizing
    pool.spare_requests = reader.shards.num_files // (_FILES_PER_RANGE * plan.world.num_replicas * num_workers)
    depth = read_ahead_depth(predownload, device_batch_size)
    next_use = _eviction_plan(reader, plan, num_workers * (depth + max(num_waiting, _FINISHED_BATCHES)))
    furthest = furthest_ahead(predownload, device_batch_size, is_limited=reader.shards.is_limited)
    ahead: deque[MicroBatch] = deque()
    wants: deque[Want] = deque()  # of the batches that are being read, and of those ahead
    infos = iter(infos)
    try:
        while not pool.has_all_open():
            while len(ahead) <= depth or (len(ahead) <= furthest and pool.queue.has_idle_threads()):
                if (info := next(infos, None)) is None:
                    break
                ahead.append(info)
                wants.append(reader.read_ahead(info.sample_ids))
            if not ahead:
                break
            next_use.position = ahead[0].begin
            yield ahead.popleft()
            if len(wants) - len(ahead) >= in_progress:
                wants.popleft().drop()
        yield from ahead
        yield from infos
    finally:
        if not is_exiting():  # at the interpreter's exit, modules may be gone already
            for want in wants:
                want.drop()
            pool.plans.pop(id(next_use), None)


def _eviction_plan(reader: SampleReader, plan: BatchPlan, lag: int = 0) -> NextUse:
    """Let the reader's caches evict first what this plan needs last; other workers may be ``lag`` batches behind."""
    next_use = NextUse(plan.order, reader.snapshot, lag=lag * plan.batch_size)
    next_use.position = plan.start
    if reader.shards.is_limited:
        plans = reader.shards.pool.plans
        for stream, cache in enumerate(reader.caches if not plans else ()):
            files = reader.shards.files(stream)
            cache.plan(partial(next_use_of_file, files, plans, last_used=cache.last_used))
        plans[id(next_use)] = next_use
    return next_use
