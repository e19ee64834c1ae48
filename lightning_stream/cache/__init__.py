"""Shards from a store in a local folder that all processes of a machine share; README.md explains it."""

from __future__ import annotations

from lightning_stream.cache.folder import default_folder

from .config import CacheConfig
from .shards import Lease, ShardCache

__all__ = ["CacheConfig", "Lease", "ShardCache", "default_folder"]
