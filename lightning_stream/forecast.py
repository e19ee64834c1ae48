"""What a run will need, told before it starts: cache, downloads, and how well it shuffles."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import numpy as np

from lightning_stream.order import RunOrder
from lightning_stream.order.downloads import estimate_factor, warning_about
from lightning_stream.order.quality import Quality, measure
from lightning_stream.reader import SampleReader

if TYPE_CHECKING:
    from lightning_stream.batch_source import BatchSettings

_log = logging.getLogger(__name__)


def quality(reader: SampleReader, run: RunOrder, batch_size: int) -> Quality:
    """How well global batches of this size are shuffled, and the active shards and cache that takes."""
    shard_bytes = np.concatenate([index.raw_bytes for index in reader.indexes])
    return measure(run, batch_size=batch_size, shard_bytes=shard_bytes)


def tell(reader: SampleReader, run: RunOrder, settings: BatchSettings) -> None:
    """Refuse a cache that is too small, and log what rank 0 should know.

    Raises:
        ValueError: The cache limit is below what the order keeps active on a node: it would fetch for ever.
    """
    limit = reader.defaults.config.limit_bytes
    world = settings.world
    if limit is not None and not all(cache.in_place for cache in reader.caches):
        _check_limit(quality(reader, run, settings.global_batch_size), limit, run, world.num_nodes)
    if world.rank:
        return
    if world.num_nodes > 1:
        factor = estimate_factor(run, epoch=0, batch_size=settings.global_batch_size, world=world)
        if sentence := warning_about(run, batch_size=settings.global_batch_size, world=world, factor=factor):
            _log.warning(sentence)
    if _log.isEnabledFor(logging.INFO) and run.config.shuffle:
        _log.info("Shuffle: %s", quality(reader, run, settings.global_batch_size))


def _check_limit(need: Quality, limit_bytes: int, run: RunOrder, num_nodes: int) -> None:
    per_node = need.cache_bytes // num_nodes
    if per_node <= limit_bytes:
        return
    fitting = max(1, run.config.window * limit_bytes // per_node)
    raise ValueError(
        "a cache must hold the shards that the order keeps active, or each is fetched again and again: cache_limit "
        f"is {limit_bytes / 1e6:.1f} MB, and {need.active_shards // num_nodes} active shards take "
        f"{per_node / 1e6:.1f} MB on each node. Raise cache_limit, write smaller shards, or pass window={fitting} "
        f"(it is {run.config.window}), which shuffles less"
    )
