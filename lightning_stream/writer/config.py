"""A writer's settings, checked."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass

from lightning_stream.formats.codecs import check_compression
from lightning_stream.formats.hashing import hashes_to_write
from lightning_stream.formats.index.schema import MAX_FILE_BYTES
from lightning_stream.formats.sizes import parse_bytes

_DEFAULT_WORKERS = 4
_QUICK_HASHES = frozenset({"xxh3_64", "xxh3_128", "xxh128", "xxh64"})  # faster than any disk


@dataclass(frozen=True)
class WriterConfig:
    """How shards are cut and packed."""

    compression: str | None
    hashes: tuple[str, ...]
    size_limit: int | None

    def num_workers(self, is_local: bool) -> int:
        """Threads that put shards, by default: where that is only writing to a disk, one holds less memory."""
        only_writes = is_local and self.compression is None and _QUICK_HASHES.issuperset(self.hashes)
        return 1 if only_writes else min(_DEFAULT_WORKERS, os.cpu_count() or 1)

    @classmethod
    def make(
        cls, compression: str | None, hashes: Iterable[str] | None, size_limit: float | str | None
    ) -> WriterConfig:
        """Check a writer's settings. An empty compression is None.

        Raises:
            ValueError: An unknown compression or hash, or a size limit beyond what offsets of 32 bits can describe.
        """
        limit = None if size_limit is None else parse_bytes(size_limit, "size_limit")
        if limit is not None and limit > MAX_FILE_BYTES:
            raise ValueError(f"size_limit must stay under 4 GiB, since offsets have 32 bits; got {size_limit!r}.")
        return cls(check_compression(compression or None), hashes_to_write(hashes), limit)
