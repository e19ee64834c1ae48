"""Shards from a store into a local folder: fetch, verify, decompress, verify, publish; evict under a limit.

A shard is here if, and only if, its files have their final names. They get them after their size, and their hash where
the index has one, were found right. One process fetches a shard, all others of the machine wait for it; whatever was
cut short leaves drafts under names that nobody reads.
"""

from __future__ import annotations

from lightning_stream.cache.folder import default_folder

from .config import CacheConfig
from .lease import Lease
from .shards import ShardCache

__all__ = ["CacheConfig", "Lease", "ShardCache", "default_folder"]
