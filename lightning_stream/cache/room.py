"""Room for a shard: under the limit that all users of a folder share, and on its disk."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

from lightning_stream.cache.folder import CacheFolder
from lightning_stream.cache.usage_log import Holding, Ledger, Shortage
from lightning_stream.errors import CacheFullError
from lightning_stream.shared_files import HELD, pauses, same_file, try_flock

_RECENT_S = 60.0
NextUse = Callable[[str], "float | None"]


class Room:
    """Makes room in one cache folder, and keeps its books.

    Args:
        place: The cache's folder.
    """

    def __init__(self, place: CacheFolder) -> None:
        self.place = place
        self.ledger = Ledger(place)

    def reserve(self, holding: Holding, limit_bytes: int | None, wait_s: float, next_use: NextUse | None) -> None:
        """Enter a shard that will be fetched; evicts what is needed latest, and waits for what is in use.

        Raises:
            CacheFullError: It does not fit.
        """
        if limit_bytes is not None and holding.num_bytes > limit_bytes:
            raise CacheFullError(
                f"cache_limit is {limit_bytes:,} bytes, but {holding.names[0]} alone needs {holding.num_bytes:,} while "
                f"it is fetched. Raise cache_limit to several times that."
            )

        shortage: Shortage | None = None
        for _ in pauses(wait_s):
            shortage = self.ledger.reserve(
                holding, limit_bytes, lambda held: self._in_order(held, next_use), self.remove
            )
            if shortage is None:
                break
        if shortage is None:
            if holding.num_bytes > free_bytes(self.place.path):  # only now: what was evicted may be what was missing
                raise disk_full(self.place.path, holding.num_bytes)
            return
        raise CacheFullError(
            f"cache_limit is {shortage.limit_bytes:,} bytes, {shortage.in_use_bytes:,} of them are in use and stayed "
            f"so for {wait_s:g} s, and {holding.names[0]} needs {holding.num_bytes:,} more. Raise it, or lower "
            "what is held at once: predownload, num_workers, or num_canonical_nodes."
        )

    def remove(self, holding: Holding) -> bool:
        """Delete a shard's files; False where it is in use or being fetched. Never waits."""
        name = holding.names[0]
        lock = self.place.lock(name)
        if not lock.try_acquire():
            return False
        try:
            return self._remove(self.place.path / name, holding)
        finally:
            lock.release()

    def _remove(self, first: Path, holding: Holding) -> bool:
        try:
            fd = HELD.open(first, os.O_RDONLY)
        except FileNotFoundError:
            return self._unlink(holding)
        try:
            return try_flock(fd, first) and same_file(fd, first) and self._unlink(holding)
        finally:
            HELD.close(fd)

    def _unlink(self, holding: Holding) -> bool:
        for name in holding.names:
            (self.place.path / name).unlink(missing_ok=True)
        return True

    def _in_order(self, held: list[Holding], next_use: NextUse | None) -> list[Holding]:
        """First what no one is known to need, least recently used first; then what is needed latest."""
        recent = time.time() - _RECENT_S

        def key(holding: Holding) -> tuple[int, float]:
            when = None if next_use is None else next_use(holding.names[0])
            if when is not None:
                return (1, -when)
            used = _last_use(self.place.path / holding.names[0])
            # Others' needs are known only by their touch: what was just used goes last.
            return (2 if next_use is not None and used > recent else 0, used)

        return sorted(held, key=key)


def free_bytes(folder: Path) -> int:
    """What this user may still write to the folder's disk."""
    disk = os.statvfs(folder)
    return disk.f_bavail * disk.f_frsize


def disk_full(folder: Path, need_bytes: int) -> CacheFullError:
    """The error for a disk without room; all that was there is left as it was."""
    free = free_bytes(folder)
    if need_bytes <= free:
        return CacheFullError(
            f"the disk of the cache {folder} took no more, though {free:,} bytes are free on it: all its inodes may be "
            "used (df -i), or your quota. Delete files, or put `local` on another disk."
        )
    return CacheFullError(
        f"the disk of the cache {folder} is full: {need_bytes:,} bytes are needed, {free:,} are free. "
        "What was there is untouched. Free some space, put `local` on a larger disk, or set cache_limit below its size."
    )


def _last_use(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return 0.0
