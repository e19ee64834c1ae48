"""Which shards a cache folder holds, and space for more: under the limit of all its processes, and on its disk."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote, unquote

from lightning_stream.cache.folder import CacheFolder, key_of
from lightning_stream.errors import CacheFullError, FormatError
from lightning_stream.formats.hashing import digest
from lightning_stream.formats.model import FileEntry, check_basename
from lightning_stream.shared_files import LOCK_FDS, FileLock, backoff, named_errors, same_file, try_flock

_RECENT_S = 60.0
_SCAN_EVERY_S = 10.0  # the total is counted again, since processes without a limit do not add to it
_SLACK_FROM = 256  # shards; with fewer, making space for one at a time is cheap
_VALUE_BYTES = 64
_WAIT_S = 60.0  # for a lock that is held for milliseconds
_LIST = "+"  # the end of a marker's name whose content is a list of files
_LONGEST_STEM = 200  # names of files have at most 255 bytes
NextUse = Callable[[str], "float | None"]


class InUseError(CacheFullError):
    """Under the limit there is no room now, since shards are in use: there may be later."""


@dataclass(frozen=True)
class CacheEntry:
    """One shard that the cache holds, or fetches: its files, relative to the folder, and their bytes together."""

    names: tuple[str, ...]
    num_bytes: int


class Spaces(dict[Path, "Space"]):
    """The cache folders of a dataset, whose bytes its limit counts together. A copy is empty: its caches add theirs."""

    def __reduce__(self) -> tuple[type[Spaces], tuple[()]]:
        return Spaces, ()


class Space:
    """The markers of one cache folder, and what is evicted from it, and from others under the same limit.

    Each shard that a cache has fetched has a marker: an empty file named after the shard and its bytes or, for a shard
    of several files, a list of their names. It appears before them and is deleted after them, under the shard's lock:
    if a process is killed, markers count too much, never too little, until space is needed. Every marker is checked,
    since other users of a shared cache write too. A note beside it has the hashes with which the shard was compared:
    jobs whose indexes differ use one folder, where a shard of both has one name.

    Attributes:
        folder: The folder.
        latest: The shards of the markers that were read last, by the markers' names.
        next_use: From a shard's first file to its next use, for evictions; None if that is not known.
    """

    def __init__(self, folder: CacheFolder, together: Spaces | None = None) -> None:
        self.folder = folder
        self.next_use: NextUse | None = None
        self._together = Spaces() if together is None else together
        self._together[folder.path] = self
        self.latest: dict[str, CacheEntry] = {}  # a marker never changes

    # -- markers

    def entries(self) -> tuple[CacheEntry, ...]:
        """Return all shards that the cache holds or fetches now."""
        self._take_over_log()
        entries = {}
        with contextlib.suppress(FileNotFoundError), os.scandir(self.folder.markers) as markers:
            for marker in markers:
                entry = self.latest.get(marker.name) or _read(Path(marker.path))
                if entry is not None:
                    entries[marker.name] = entry
        self.latest = entries
        return tuple(entries.values())

    def knows(self, file: FileEntry) -> bool:
        """Return whether the file that is here was compared with these hashes, by any process."""
        with contextlib.suppress(OSError):
            return str(self.note(file.basename).readlink()) == _hashes(file)
        return False

    def keep_note(self, file: FileEntry) -> None:
        """Note that a file was compared with its hashes; without a note, it is compared again."""
        note = self.note(file.basename)
        with contextlib.suppress(OSError):  # a file system without links
            note.unlink(missing_ok=True)
            note.symlink_to(_hashes(file))

    def mark(self, entry: CacheEntry, former: CacheEntry | None = None) -> None:
        """Note a shard whose files will appear, in place of a former note; for the holder of its lock."""
        self.note(entry.names[0]).unlink(missing_ok=True)
        self._write(entry, self.folder.draft(entry.names[0], "marker"))
        if former is not None and former != entry:
            self._marker(former).unlink(missing_ok=True)

    def note(self, name: str) -> Path:
        """Return the link whose text is the hashes with which a file was compared: it takes no block of the disk."""
        return self.folder.markers / f"{_stem(name)}.compared"

    def forget(self, name: str) -> None:
        """Delete the markers of a shard without files; for the holder of its lock."""
        for entry in self.entries():
            if entry.names[0] == name:
                self._marker(entry).unlink(missing_ok=True)

    def _write(self, entry: CacheEntry, draft: Path) -> None:
        marker = self._marker(entry)
        if marker.name.endswith(_LIST):
            self.folder.write(draft, json.dumps(entry.names).encode())
            draft.replace(marker)
        else:
            self.folder.write(marker, b"")

    def _marker(self, entry: CacheEntry) -> Path:
        stem = _stem(entry.names[0])
        is_whole = entry.names == (unquote(stem),)
        return self.folder.markers / f"{stem}.{entry.num_bytes}{'' if is_whole else _LIST}"

    def _take_over_log(self) -> None:
        """Turn the log in which former releases counted into markers.

        A process of such a release that still runs begins a new log, which is taken over the next time: this release's
        limit counts the shards of both, the former one's what it has fetched since.
        """
        log = self.folder.control / "ledger"
        draft = self.folder.control / "ledger.draft"
        if not log.exists():
            return
        self.folder.prepare()  # the former release had no folder for markers
        with FileLock(self.folder.control / "ledger.lock", _WAIT_S, self.folder.modes):
            for entry in _read_log(log):
                self._write(entry, draft)
            log.unlink(missing_ok=True)

    # -- space

    def make_space(
        self,
        entry: CacheEntry,
        limit_bytes: int | None,
        wait_s: float,
        former: CacheEntry | None = None,
    ) -> int:
        """Mark a shard that will be fetched: evict shards, and wait for those in use.

        With `former`, what was marked for it before was an estimate. Returns the number of evicted shards.

        Raises:
            InUseError: Shards in use left no room in that time.
            CacheFullError: There will be no room.
        """
        name = entry.names[0]
        need = entry.num_bytes
        if limit_bytes is not None and need > limit_bytes:
            raise CacheFullError(f"cache_limit is {limit_bytes:,} bytes; {name} alone needs {need:,}. Raise it.")
        evicted = in_use = 0
        for _ in backoff(wait_s):
            if self._reserve(entry, limit_bytes, former, counts=False) <= 0:
                break
            # One at a time: two that evict at once would each make the space that one needs. The lock's file
            # stays, since to make and delete it costs a tenth of an eviction.
            with self._lock("evict"):
                while True:  # in Python 3.12 and 3.13, one with a condition would jump back outside of the block
                    excess = self._reserve(entry, limit_bytes, former)
                    if excess <= 0:
                        break
                    num_shards, in_use = self._evict(excess, entry)
                    if not num_shards:
                        break
                    evicted += num_shards
            if excess <= 0:
                break
        else:
            raise InUseError(
                f"cache_limit is {limit_bytes:,} bytes, {in_use:,} of them are in use and stayed so, and {name} needs "
                f"{need:,} more. Raise it, or lower predownload, num_workers or num_canonical_nodes, so that fewer "
                "shards are in use at once."
            )
        # Checked last: an eviction may have made space on the disk.
        if former is None and need > self.folder.free_bytes():
            raise self.folder.disk_full(need)
        return evicted

    def _reserve(
        self, entry: CacheEntry, limit_bytes: int | None, former: CacheEntry | None, *, counts: bool = True
    ) -> int:
        """Mark a shard unless it passes the limit; return by how many bytes it does.

        Without `counts`, it may seem to pass the limit, because the markers are not counted for that.
        """
        if limit_bytes is None:
            self.mark(entry, former)
            return 0
        lock = self._lock("space")
        with named_errors(lock.path), lock:
            marked = former or entry
            is_marked = self._marker(marked).exists()
            growth = entry.num_bytes - (marked.num_bytes if is_marked else 0)
            total, counted_at = _counted(os.pread(lock.fd, _VALUE_BYTES, 0))
            if (counts and total + growth > limit_bytes) or abs(time.time() - counted_at) >= _SCAN_EVERY_S:
                total = self._total(marked)
                counted_at = time.time()
            if total + growth > limit_bytes:
                return total + growth - limit_bytes
            value = f"{total + growth:20} bytes {counted_at:20.3f}".encode()
            os.pwrite(lock.fd, value.ljust(_VALUE_BYTES), 0)
            self.mark(entry, former)
        return 0

    def _lock(self, name: str) -> FileLock:
        """Return the lock of all processes with a limit for the same folders; in the first one."""
        home = min((self, *self._others()), key=lambda space: str(space.folder.path)).folder
        home.prepare()
        suffix = f".{key_of(repr(sorted(map(str, self._together))))}" if len(self._together) > 1 else ""
        return FileLock(home.control / f"{name}{suffix}", _WAIT_S, home.modes, has_value=True)

    def _total(self, marked: CacheEntry) -> int:
        """Return the bytes of all markers. If somebody else deleted a shard, its markers but this one are deleted, too.

        That shard is being fetched, so nothing would evict it; and it may be marked with other bytes now.
        """
        total = 0
        is_deleted = not (self.folder.path / marked.names[0]).exists()
        for cached in self.entries():
            if is_deleted and cached.names[0] == marked.names[0] and cached != marked:
                self._marker(cached).unlink(missing_ok=True)
            else:
                total += cached.num_bytes
        return total + sum(cached.num_bytes for space in self._others() for cached in space.entries())

    def _others(self) -> list[Space]:
        """Return the other folders under the same limit, but for those where this user may not evict anything."""
        return [
            space
            for path, space in self._together.items()
            if path != self.folder.path and os.access(space.folder.markers, os.W_OK)
        ]

    def _evict(self, excess: int, wanted: CacheEntry) -> tuple[int, int]:
        """Delete so many bytes of shards; return how many shards, and the bytes in use."""
        shards = [
            (space, entry)
            for space in (self, *self._others())
            for entry in space.latest.values()  # `_reserve` counted them
            if space is not self or entry.names[0] != wanted.names[0]
        ]
        if len(shards) > _SLACK_FROM:
            # Make space for a few of many small shards at once, so that not every fetch sorts all of them.
            excess += sum(entry.num_bytes for _, entry in shards) // 20
        evicted = in_use = 0
        for space, entry in _in_order(shards):
            if excess <= 0:
                break
            if self._remove_from(space, entry):
                excess -= entry.num_bytes
                evicted += 1
            else:
                in_use += entry.num_bytes
        return evicted, in_use

    def _remove_from(self, space: Space, entry: CacheEntry) -> bool:
        """Delete a shard's files in any of the folders; False where it stays."""
        try:
            return space.remove(entry)
        except OSError:
            if space is self:
                raise
            return False  # that folder is being deleted

    def remove(self, entry: CacheEntry, *, even_in_use: bool = False) -> bool:
        """Delete a shard's files; False if it is in use or being fetched. It never waits.

        `even_in_use`: those who have it mapped keep what they read.
        """
        lock = self.folder.lock(entry.names[0])
        first = self.folder.path / entry.names[0]
        marker = self._marker(entry)
        if not lock.try_acquire():
            return False
        with contextlib.ExitStack() as stack:
            stack.callback(lock.release)
            if not marker.exists():  # evicted by another meanwhile
                return False
            try:
                # NFS gives an exclusive lock only on a file that is open for writing.
                fd = LOCK_FDS.open(first, os.O_RDWR if os.access(first, os.W_OK) else os.O_RDONLY)
            except OSError as error:
                # A link is not ours: it is deleted, and its target stays.
                if error.errno not in (errno.ENOENT, errno.ELOOP):
                    raise
            else:
                stack.callback(LOCK_FDS.close, fd)
                if not even_in_use and not (try_flock(fd, first) and same_file(fd, first)):
                    return False
            for name in entry.names:
                self.folder.unlink(name)
            self.note(entry.names[0]).unlink(missing_ok=True)
            marker.unlink(missing_ok=True)
        return True

    def prune(self, target_bytes: int, unused_since: float | None = None) -> tuple[int, int]:
        """Delete shards, the least recently used first, until at most so many bytes are left. Those in use stay.

        With `unused_since`, in seconds since the epoch, only shards that were last read before.

        Returns:
            The bytes that were deleted, and those that are left.
        """
        entries = self.entries()
        left = total = sum(entry.num_bytes for entry in entries)
        for entry in sorted(entries, key=self.last_used):
            if left <= target_bytes or (unused_since is not None and self.last_used(entry) >= unused_since):
                break
            if self.remove(entry):
                left -= entry.num_bytes
        return total - left, left

    def last_used(self, entry: CacheEntry) -> float:
        """Return when a shard was last read, in seconds since the epoch; 0.0 if it is not here."""
        with contextlib.suppress(FileNotFoundError):
            return os.stat(f"{self.folder.path}/{entry.names[0]}").st_mtime  # noqa: PTH116 - 20 times at each eviction
        return 0.0


def _in_order(shards: list[tuple[Space, CacheEntry]]) -> list[tuple[Space, CacheEntry]]:
    """Sort: first shards without a known next use, then those that are needed latest; of equals, the oldest first.

    A process that is done with a shard does not know whether another one is still about to read it.
    """
    recent = time.time() - _RECENT_S

    def key(shard: tuple[Space, CacheEntry]) -> tuple[int, float, float]:
        space, entry = shard
        when = None if space.next_use is None else space.next_use(entry.names[0])
        if when is not None and when < math.inf:
            return (1, -when, 0.0)  # each has its own position
        used = space.last_used(entry)
        if when is not None:
            return (1, -when, used)
        # The needs of other jobs are not known, so a shard that was just used comes last.
        return (2 if space.next_use is not None and used > recent else 0, 0.0, used)

    return sorted(shards, key=key)


def _entry(names: object, num_bytes: object) -> CacheEntry | None:
    """Return a shard as another process wrote it; None if this package does not write it so."""
    if not (isinstance(names, list) and names and type(num_bytes) is int and 0 <= num_bytes < 1 << 53):
        return None
    try:
        return CacheEntry(tuple(check_basename(name, "a marker of the cache") for name in names), num_bytes)
    except FormatError:
        return None


def _counted(value: bytes) -> tuple[int, float]:
    """Return the bytes of all markers, as last counted and added to, and when they were counted."""
    try:
        total, _, counted_at = value.split()
        return int(total), float(counted_at)
    except ValueError:
        return 0, 0.0


def _stem(name: str) -> str:
    """Return the beginning of the name of a shard's marker: the shard's, or what stands for one that is too long."""
    quoted = quote(name, safe="")
    return quoted if len(quoted) <= _LONGEST_STEM else key_of(name)


def _hashes(file: FileEntry) -> str:
    return digest("xxh3_128", repr(sorted(file.hashes.items())).encode())


def _read(marker: Path) -> CacheEntry | None:
    """Return the shard of a marker; None for other markers, or other files."""
    stem, _, size = marker.name.removesuffix(_LIST).rpartition(".")
    if not size.isdecimal():
        return None
    try:
        names = json.loads(marker.read_bytes()) if marker.name.endswith(_LIST) else [unquote(stem)]
        entry = _entry(names, int(size))
    except (OSError, ValueError, RecursionError):
        return None
    return entry if entry is not None and stem == _stem(entry.names[0]) else None


def _read_log(log: Path) -> Iterable[CacheEntry]:
    """Return the shards in the log of a former release.

    It has lines ``["+", bytes, names...]`` and ``["-", name]``. Others are left out: torn ones, and those of files of
    somebody else, which are compared with their hashes once more.
    """
    entries: dict[str, CacheEntry] = {}
    for line in log.read_bytes().splitlines() if log.exists() else ():
        try:
            sign, *names = json.loads(line)
            entry = _entry(names, names.pop(0) if sign == "+" else 0)
        except (ValueError, TypeError, IndexError, RecursionError):
            continue
        if entry is not None and sign == "+":
            entries[entry.names[0]] = entry
        if entry is not None and sign == "-":
            entries.pop(entry.names[0], None)
    return entries.values()
