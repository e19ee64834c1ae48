"""Shards from a store in a local folder that all processes of a machine share; README.md explains it."""

from __future__ import annotations

from .folder import CacheConfig, default_folder
from .shards import Lease, ShardCache
from .space import InUseError

__all__ = ["CacheConfig", "InUseError", "Lease", "ShardCache", "default_folder"]
