"""Read the first samples of shards whose files are still arriving.

A raw MDS shard begins with the table of its samples' offsets, and a single connection brings it in order. So its first
samples can be read long before the last ones are here, without another request: an order with a quick start begins with
these. They are read from a copy, since the file may yet be fetched again; it is dropped once the file is here. The
file's hash is not known before its end. Instead, the table must fit the index and each sample's columns must fill it,
and the samples that were read are compared later, see `proofs`.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from io import FileIO
from pathlib import Path
from typing import IO

import numpy as np
from msgspec.structs import replace

from lightning_stream.cache import ShardCache
from lightning_stream.errors import FormatError
from lightning_stream.formats.model import ShardEntry
from lightning_stream.formats.shard import Shard
from lightning_stream.reading.range_reads import REQUEST_BYTES, OpenShard, offsets_of, table_bytes
from lightning_stream.stores import RetryingStore

_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.001, 0.01  # between two looks at a file
_COPIED_BYTES = 1 << 17  # at a time
MOST_OF_SHARD = 0.5  # is read while the rest arrives
_WORTH_BYTES = REQUEST_BYTES  # that need not be waited for, at least: about 35 ms at 60 MB/s


class ShardHeads:
    """Opens the first samples of shards that other threads or processes are fetching. Thread-safe; of one process."""

    def __init__(self, open_shard: OpenShard) -> None:
        self._open_shard = open_shard
        self._heads: dict[int, Shard] = {}

    def pays(self, cache: ShardCache, entry: ShardEntry, count: int) -> bool:
        """Whether the first ``count`` samples of a shard can be read, and surely come well before the last ones.

        Never if the user demands a hash, nor for shards that are compressed or of other formats.
        """
        raw, config = entry.raw, cache.config
        if entry.format != "mds" or entry.compressed is not None or raw.origin is not None or len(entry.files) > 1:
            return False
        if config.validate_hash is not None or cache.in_place or not isinstance(cache.store, RetryingStore):
            return False
        return come_early(count / entry.num_samples, raw.num_bytes)

    def open(
        self, number: int, cache: ShardCache, entry: ShardEntry, count: int, has_come: Callable[[], bool]
    ) -> Shard | None:
        """At least the first ``count`` samples of a shard as a shard of their own, when they are here.

        None if the whole shard has come before, or does not arrive in order.
        """
        head = self._heads.get(number)
        if head is not None and head.num_samples >= count:
            return head
        try:
            with tempfile.NamedTemporaryFile(prefix="lightning-stream-", buffering=0) as file:
                num_samples = _copy(cache, entry, count, has_come, file)
                if not num_samples:
                    return None
                path = Path(file.name)
                raw = replace(entry.raw, basename=path.name, num_bytes=path.stat().st_size, hashes={})
                head = self._open_shard(number, replace(entry, num_samples=num_samples, raw=raw), path.parent)
        except (
            OSError,
            FormatError,
        ):  # no space for a copy, or wrong bytes: the whole shard shows which ones are right
            return None
        self._heads[number] = head
        return head

    def drop(self, number: int) -> None:
        """Forget the first samples of a shard that is here, or will not come."""
        self._heads.pop(number, None)


def come_early(part: float, num_bytes: int) -> bool:
    """Whether the beginning of a shard of so many bytes, a part of it from 0 to 1, comes well before its end."""
    return part <= MOST_OF_SHARD and num_bytes * (1 - part) >= _WORTH_BYTES


def _copy(cache: ShardCache, entry: ShardEntry, count: int, has_come: Callable[[], bool], to: IO[bytes]) -> int:
    """Copy the first samples of a shard to a file of their own when they are here; return their number, or 0.

    These are twice ``count``, or as many as have come, and at most half of all. The offsets of the others stay, and
    nothing refers to them.
    """
    path, pause_s, table = cache.arriving(entry), _SHORTEST_PAUSE_S, table_bytes(entry.num_samples)
    needed = table
    while not has_come():
        with suppress(FileNotFoundError), path.open("rb", buffering=0) as file:
            here = os.fstat(file.fileno()).st_size
            if here >= entry.raw.num_bytes:
                return 0  # it is being verified, or comes in parts
            if here >= needed:
                try:
                    offsets = offsets_of(file.read(table), cache, entry)
                except FormatError:
                    return 0  # the whole shard tells the user
                needed = int(offsets[count])
                if here >= needed:
                    whole = int(np.searchsorted(offsets, here, side="right")) - 1
                    num_samples = min(whole, 2 * count, int(MOST_OF_SHARD * entry.num_samples))
                    to.write(num_samples.to_bytes(4, "little"))
                    file.seek(4)
                    return num_samples if _copy_bytes(file, to, int(offsets[num_samples]) - 4) else 0
        time.sleep(pause_s)
        pause_s = min(_LONGEST_PAUSE_S, 1.2 * pause_s)
    return 0


def _copy_bytes(file: FileIO, to: IO[bytes], num_bytes: int) -> bool:
    """Copy so many bytes; return whether there were as many: the file may be fetched again meanwhile."""
    buffer = memoryview(bytearray(min(num_bytes, _COPIED_BYTES)))
    while num_bytes and (count := file.readinto(buffer[:num_bytes])):
        to.write(buffer[:count])
        num_bytes -= count
    return not num_bytes
