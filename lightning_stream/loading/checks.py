"""Checks before a training run: the cache that it needs, its downloads, and the quality of its shuffle."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from lightning_stream.order import BatchPlan, RunOrder, Tail
from lightning_stream.questions.cache_need import CacheNeed, ReadAhead, need_of_node
from lightning_stream.questions.describe import readable
from lightning_stream.questions.downloads import estimate_factor, warning_about
from lightning_stream.questions.imbalance import can_balance
from lightning_stream.questions.quality import Quality, measure
from lightning_stream.reading.mapped import MapReader
from lightning_stream.reading.reader import SampleReader

if TYPE_CHECKING:
    from lightning_stream.loading.source import BatchSettings

_log = logging.getLogger(__name__)


def quality(reader: SampleReader, run: RunOrder, batch_size: int) -> Quality:
    """How well global batches of this size are shuffled, and the active shards and cache that takes."""
    shard_bytes = np.concatenate([index.raw_bytes for index in reader.indexes])
    return measure(run, batch_size=batch_size, shard_bytes=shard_bytes)


def cache_need(
    reader: SampleReader, run: RunOrder, settings: BatchSettings, ahead: ReadAhead, window: int | None = None
) -> CacheNeed:
    """The bytes a node's cache must hold at once; `window` replaces the run's own."""
    if window is not None:
        run = run.altered(window=window, switches=())
    sizes = np.concatenate([index.raw_bytes for index in reader.indexes])
    packed = _packed_ratio(reader)
    cached = packed if reader.shards.defaults.config.keep_zip else 0.0
    batch_size = settings.device_batch_size
    return need_of_node(
        run, sizes, ahead, device_batch_size=batch_size, world=settings.world, packed=packed, cached=cached
    )


def _packed_ratio(reader: SampleReader) -> float:
    """Compressed bytes for each raw one, from some shards."""
    raw = packed = 0
    for index in reader.indexes:
        for shard in range(0, index.num_shards, max(1, index.num_shards // 16)):
            for file, compressed in (pair for entry in index.entries(shard) for pair in entry.files):
                raw += file.num_bytes
                packed += 0 if compressed is None else compressed.num_bytes
    return packed / max(1, raw)


def check_run(reader: SampleReader, run: RunOrder, settings: BatchSettings, ahead: ReadAhead) -> None:
    """Refuse data and settings that cannot be trained with, and log what rank 0 should know.

    Raises:
        ValueError: An epoch has no batch; or the cache limit is below what a node needs at once, so that it would fetch
            the same shards again and again.
    """
    size = settings.global_batch_size
    tail = settings.tail
    if not BatchPlan(run.epoch(0), batch_size=size, world=settings.world, tail=tail).has(0):
        raise ValueError(f"an epoch must have a batch, but {_cause_of_none(run, tail, size)}")
    limit = reader.shards.defaults.config.limit_bytes
    world = settings.world
    if limit is not None and not all(cache.in_place for cache in reader.caches):
        refusal = refusal_of_limit(reader, run, settings, ahead, limit)
        if refusal is not None:
            raise ValueError(refusal)
    if world.rank:
        return
    if num_dropped := _num_dropped(run):
        _log.warning(
            f"{num_dropped:,} of {run.snapshot.num_samples:,} samples are longer than a row, and in none: they are "
            "dropped (long_documents='drop')."
        )
    if settings.balance is not None and world.num_replicas > 1 and not can_balance(run, world):
        _log.warning(
            "Shares are balanced among the replicas of a machine, which has only one here, so that no machine "
            "downloads more. num_canonical_nodes=1, set when a run starts, balances over all machines; each then "
            "downloads all shards."
        )
    if run.config.buckets is not None and size % (settings.accumulate * world.num_replicas):
        _log.warning(
            f"With batch_tokens, batches have multiples of {size} samples. {world.num_replicas} replicas (times "
            "accumulation) do not divide that, so every batch has padding. When a run starts, set the multiple of "
            "batch_tokens."
        )
    if isinstance(reader, MapReader):  # nothing is downloaded, and any sample comes next
        return
    if world.num_nodes > 1 and (settings.balance is None or run.config.canonical_nodes > 1):
        factor = estimate_factor(run, epoch=0, batch_size=size, world=world)
        if sentence := warning_about(run, batch_size=size, world=world, factor=factor):
            _log.warning(sentence)
    if _log.isEnabledFor(logging.INFO) and run.config.shuffle:
        measured = quality(reader, run, size)
        _log.info(
            "Shuffle quality %.0f/100 (perfect shuffle: %.0f). Cache needed: %d MB.",
            measured.mean,
            measured.random,
            max(1, measured.cache_bytes // 10**6),
        )


def _num_dropped(run: RunOrder) -> int:
    """How many samples are in no row."""
    packing = run.config.packing
    if packing is None or packing.long_documents != "drop" or run.lengths is None:
        return 0
    return int(np.count_nonzero(run.lengths > packing.row_length))


def _cause_of_none(run: RunOrder, tail: Tail, batch_size: int) -> str:
    """Why an epoch has no batch, and what to do."""
    order = run.epoch(0)
    packing = run.config.packing
    if packing is not None and not order.exists(0):
        return (
            f"none of the {run.num_samples} documents has a row of {packing.row_length} tokens: all are empty, or "
            f"omitted as longer (long_documents={packing.long_documents!r}). Check the lengths, or raise row_length"
        )
    what = f"{run.num_samples} samples" if packing is None else f"the {order.num_samples} rows"
    return (
        f"tail={tail!r} leaves none of {what} in global batches of {batch_size}. Choose a smaller batch, or tail='pad' "
        "or 'exact'"
    )


def refusal_of_limit(
    reader: SampleReader, run: RunOrder, settings: BatchSettings, ahead: ReadAhead, limit_bytes: int
) -> str | None:
    """Why a cache limit is too small to train with, and what to pass instead; None where it suffices."""
    need = cache_need(reader, run, settings, ahead)
    if need.num_bytes <= limit_bytes:
        return None

    def fits(ahead: ReadAhead, window: int | None = None) -> bool:
        return cache_need(reader, run, settings, ahead, window).num_bytes <= limit_bytes

    remedies = [f"cache_limit={need.num_bytes}"]
    less = [n for n in range(ahead.batches) if fits(replace(ahead, batches=n))]
    if less:
        remedies.append(f"predownload={less[-1] * settings.device_batch_size}")
    if run.config.shuffle and run.config.mosaic is None:
        windows = [w for w in range(1, run.config.window) if fits(ahead, w)]
        remedies += [f"window={windows[-1]} (it is {run.config.window}), which shuffles less"] if windows else []
    if len(remedies) == 1:
        remedies.append("fewer workers, a smaller num_canonical_nodes, or smaller shards")
    entering = f" and {need.entering_shards} read ahead {readable(need.entering_bytes)}" if need.entering_shards else ""
    return (
        "a cache must hold the active shards and those read ahead, or each is fetched again and again: on each node, "
        f"{need.active_shards} active shards take {readable(need.active_bytes)}{entering}, but cache_limit is "
        f"{readable(limit_bytes)}. Pass {', or '.join(remedies)}"
    )
