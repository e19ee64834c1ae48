"""Shards from a store in a local folder that all processes of a machine share; README.md explains it."""

from __future__ import annotations

from .folder import CacheConfig, default_folder
from .shards import Lease, ShardCache, check_limit
from .space import InUseError, Spaces

__all__ = ["CacheConfig", "InUseError", "Lease", "ShardCache", "Spaces", "check_limit", "default_folder"]
