"""Space for a shard: under the limit for all users of a folder, and on its disk."""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Callable

from lightning_stream.cache.folder import CacheFolder
from lightning_stream.cache.usage_log import CacheEntry, UsageLog
from lightning_stream.errors import CacheFullError
from lightning_stream.shared_files import LOCK_FDS, backoff, same_file, try_flock

_RECENT_S = 60.0
_FEW_INODES = 16  # the drafts of a write that failed are deleted already
_BLOCK_BYTES = 4096  # a disk with less than a block free is full
NextUse = Callable[[str], "float | None"]


class Evictor:
    """Makes space in one cache folder, and writes its usage log."""

    def __init__(self, folder: CacheFolder) -> None:
        self.folder = folder
        self.log = UsageLog(folder)

    def make_space(self, entry: CacheEntry, limit_bytes: int | None, wait_s: float, next_use: NextUse | None) -> int:
        """Enter a shard that will be fetched: evict shards, and wait for those in use. CacheFullError if that fails.

        Returns the number of evicted shards.
        """
        if limit_bytes is not None and entry.num_bytes > limit_bytes:
            name, need = entry.names[0], entry.num_bytes
            raise CacheFullError(f"cache_limit is {limit_bytes:,} bytes; {name} alone needs {need:,}. Raise it.")

        evicted: list[bool] = []

        def remove(held: CacheEntry) -> bool:
            evicted.append(self.remove(held))
            return evicted[-1]

        for _ in backoff(wait_s):
            in_use = self.log.reserve(entry, limit_bytes, lambda held: self._in_order(held, next_use), remove)
            if in_use is None:
                break
        else:
            raise CacheFullError(
                f"cache_limit is {limit_bytes:,} bytes, {in_use:,} of them are in use and stayed so for "
                f"{wait_s:g} s, and {entry.names[0]} needs {entry.num_bytes:,} more. Raise it, or lower predownload, "
                "num_workers or num_canonical_nodes, so that fewer shards are in use at once."
            )
        if entry.num_bytes > self._free_bytes():  # checked last: an eviction may have made space on the disk
            raise self.disk_full(entry.num_bytes)
        return sum(evicted)

    def remove(self, entry: CacheEntry) -> bool:
        """Delete a shard's files; False if it is in use or being fetched. It never waits."""
        lock, first = self.folder.lock(entry.names[0]), self.folder.path / entry.names[0]
        if not lock.try_acquire():
            return False
        with contextlib.ExitStack() as stack:
            stack.callback(lock.release)
            try:
                # NFS gives an exclusive lock only on a file that is open for writing.
                fd = LOCK_FDS.open(first, os.O_RDWR if os.access(first, os.W_OK) else os.O_RDONLY)
            except OSError as error:
                # A link is not ours: it is deleted, and its target stays.
                if error.errno not in (errno.ENOENT, errno.ELOOP):
                    raise
            else:
                stack.callback(LOCK_FDS.close, fd)
                if not (try_flock(fd, first) and same_file(fd, first)):
                    return False
            for name in entry.names:
                self.folder.unlink(name)
        return True

    def prune(self, target_bytes: int, unused_since: float | None = None) -> tuple[int, int]:
        """Delete shards, the least recently used first, until at most so many bytes are left. Those in use stay.

        With `unused_since`, in seconds since the epoch, only shards that were last read before.

        Returns:
            The bytes that were deleted, and those that are left.
        """
        held = self.log.entries()
        left, deleted = sum(entry.num_bytes for entry in held), 0
        for entry in sorted(held, key=self.last_used):
            if left <= target_bytes or (unused_since is not None and self.last_used(entry) >= unused_since):
                break
            if self.remove(entry):
                self.log.forget(entry.names[0])
                left, deleted = left - entry.num_bytes, deleted + entry.num_bytes
        return deleted, left

    def last_used(self, entry: CacheEntry) -> float:
        """Return when a shard was last read, in seconds since the epoch; 0.0 if it is not here."""
        with contextlib.suppress(FileNotFoundError):
            return (self.folder.path / entry.names[0]).stat().st_mtime
        return 0.0

    def _in_order(self, held: list[CacheEntry], next_use: NextUse | None) -> list[CacheEntry]:
        """Sort: first shards without a known next use, least recently used first; then those that are needed latest."""
        recent = time.time() - _RECENT_S

        def key(entry: CacheEntry) -> tuple[int, float]:
            when = None if next_use is None else next_use(entry.names[0])
            if when is not None:
                return (1, -when)
            used = self.last_used(entry)
            # The needs of other jobs are not known, so a shard that was just used comes last.
            return (2 if next_use is not None and used > recent else 0, used)

        return sorted(held, key=key)

    def _free_bytes(self) -> int:
        """Return the bytes that this user may still write to the folder's disk."""
        disk = os.statvfs(self.folder.path)
        return disk.f_bavail * disk.f_frsize

    def disk_full(self, need_bytes: int) -> CacheFullError:
        """Return the error for a full disk. All files that were there are unchanged."""
        free, disk = self._free_bytes(), os.statvfs(self.folder.path)
        if max(need_bytes, _BLOCK_BYTES) <= free and disk.f_files and disk.f_favail < _FEW_INODES:
            return CacheFullError(
                f"the disk of the cache {self.folder.path} is full, though {free:,} bytes are free on it: all its "
                "inodes may be used (df -i). Delete files, or put `local` on another disk."
            )
        needed = f"{need_bytes:,} bytes are needed, " if need_bytes else ""
        return CacheFullError(
            f"the disk of the cache {self.folder.path} is full: {needed}{free:,} are free. Its files are unchanged. "
            "Free some space (or raise your quota), put `local` on a larger disk, or set cache_limit below its size."
        )
