"""Reading ahead: the shards of coming batches are fetched while those before them are trained on."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

from lightning_stream.order import BatchPlan, prefetch_shards
from lightning_stream.order.micro_batches import BatchInfo
from lightning_stream.reading.next_use import NextUse
from lightning_stream.reading.reader import SampleReader

_READ_AHEAD_BATCHES = 8
_FURTHER = 16  # times as far, where connections would be idle otherwise


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
    _eviction_plan(reader, plan)
    shards = prefetch_shards(plan, reader.snapshot, 0, min(steps, plan.num_batches))
    reader.fetch(shards)
    return len(shards)


def read_ahead_depth(predownload: int | None, device_batch_size: int) -> int:
    """Micro-batches that a worker looks ahead of the one it delivers."""
    return _READ_AHEAD_BATCHES if predownload is None else -(-predownload // device_batch_size)


def read_ahead(
    reader: SampleReader,
    plan: BatchPlan,
    infos: Iterable[BatchInfo],
    predownload: int | None,
    device_batch_size: int,
) -> Iterator[BatchInfo]:
    """Pass micro-batches of a plan on, having begun to fetch the shards of those that follow.

    Where the user left it open how many, more while there are connections that would be idle: in an order that reads
    shard after shard, the next batches need too few to fill the link.
    """
    next_use = _eviction_plan(reader, plan)
    depth = read_ahead_depth(predownload, device_batch_size)
    furthest = depth if predownload is not None else _FURTHER * depth
    waiting: deque[BatchInfo] = deque()
    infos = iter(infos)
    for info in infos:
        if reader.has_all_open:  # and keeps them: nothing is fetched or evicted any more
            yield from waiting
            yield info
            yield from infos
            return
        reader.read_ahead(info.ids)
        waiting.append(info)
        while len(waiting) > depth and (len(waiting) > furthest or not reader.could_fetch_more()):
            yield from _pass_on(reader, waiting.popleft(), next_use)
    while waiting:
        yield from _pass_on(reader, waiting.popleft(), next_use)


def _pass_on(reader: SampleReader, info: BatchInfo, next_use: NextUse) -> Iterator[BatchInfo]:
    next_use.advance(info.begin)
    yield info
    reader.done_with(info.ids)


def _eviction_plan(reader: SampleReader, plan: BatchPlan) -> NextUse:
    """Let the reader's caches evict what this plan needs latest, from its beginning on."""
    next_use = NextUse(plan.order, reader.snapshot)
    next_use.advance(plan.bounds(0)[0] if plan.num_batches else 0)
    reader.plan(next_use)
    return next_use
