"""How many bytes a cache folder holds: a small file that all its processes write."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from lightning_stream.cache.folder import CacheFolder
from lightning_stream.errors import FormatError
from lightning_stream.formats.model import check_basename
from lightning_stream.shared_files import FileLock, open_with_mode, publish_bytes

_SLACK_FROM = 256  # entries; with fewer, making space for one shard at a time is cheap
_COMPACT_FROM = 4096  # lines
_MARK_BYTES = 48  # of the file's beginning: enough for a first line with its token


@dataclass(frozen=True)
class CacheEntry:
    """One shard that the cache holds, or fetches: its files, relative to the folder, and their bytes together."""

    names: tuple[str, ...]
    num_bytes: int


_Order = Callable[[list[CacheEntry]], list[CacheEntry]]
_Remove = Callable[[CacheEntry], bool]


class UsageLog:
    """A file of lines, ``["+", bytes, names...]``, ``["-", name]`` and ``["=", name]``, appended under a lock.

    ``+`` is written before a shard's files appear, ``-`` after they are deleted: if a process is killed, the log counts
    too much, never too little, until space is needed. ``=`` means that a file of somebody else was compared with its
    hash. Every line is checked, since other users of a shared cache write too.
    """

    def __init__(self, folder: CacheFolder) -> None:
        self._folder = folder
        self._path = folder.control / "ledger"
        self._lock = folder.control / "ledger.lock"
        self._pid = os.getpid()
        self._restart(b"")

    def reserve(self, entry: CacheEntry, limit_bytes: int | None, in_order: _Order, remove: _Remove) -> int | None:
        """Enter a shard that will be fetched, in place of its older entry, after making space under the folder's limit.

        `in_order` sorts the shards that may be removed, the first one first; `remove` deletes the files of one, False
        if it is in use. Return None, or the bytes in use that leave no space: then nothing was entered.
        """
        with self._locked():
            known = self._held.get(entry.names[0])
            need = entry.num_bytes - (known.num_bytes if known else 0)
            if limit_bytes is not None and self._total + need > limit_bytes:
                kept = self._make_space(entry, limit_bytes - need, in_order, remove)
                if self._total + need > limit_bytes:
                    return kept
            self._append(["+", entry.num_bytes, *entry.names])
        return None

    def settle(self, entry: CacheEntry) -> None:
        """Enter the files of a shard that was fetched, if they are others than those for which space was reserved."""
        if self._held.get(entry.names[0]) == entry:
            return
        with self._locked():
            self._append(["+", entry.num_bytes, *entry.names])

    def forget(self, name: str, *, only_verified: bool = False) -> None:
        """Delete the entry of a shard, named by its first file; or only the note that this file was compared."""
        with self._locked():
            if name in self._verified or (name in self._held and not only_verified):
                self._append(["-", name])

    def entries(self) -> tuple[CacheEntry, ...]:
        """Return all shards that the cache holds or fetches now."""
        with self._locked():
            return tuple(self._held.values())

    def knows(self, name: str, *, or_verified: bool = False) -> bool:
        """Return whether the cache has fetched this file; with `or_verified`, or compared it with its hash."""
        if name in self._held or (or_verified and name in self._verified):
            return True
        with self._locked():
            return name in self._held or (or_verified and name in self._verified)

    def set_verified(self, name: str) -> None:
        """Note that this file was compared with its hash."""
        with self._locked():
            self._append(["=", name])

    def _make_space(self, wanted: CacheEntry, target: int, in_order: _Order, remove: _Remove) -> int:
        """Remove shards until the total is at most the target; return the bytes that could not be removed."""
        if len(self._held) > _SLACK_FROM:
            # Make space for a few of many small shards at once, so that not every fetch sorts all of them.
            target -= target // 20
        kept = 0
        others = [held for held in self._held.values() if held.names[0] != wanted.names[0]]
        for held in in_order(others):
            if self._total <= target:
                break
            if remove(held):
                self._append(["-", held.names[0]])
            else:
                kept += held.num_bytes
        return kept

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the log's lock and read the new lines of others; at the end, compact the file if it is long."""
        with FileLock(self._lock, 60.0, self._folder.modes):
            self._replay()
            yield
            if self._num_lines > max(_COMPACT_FROM, 4 * (len(self._held) + len(self._verified))):
                self._compact()

    def _replay(self) -> None:
        if self._pid != os.getpid():
            # It was forked, perhaps while another thread was here: read everything again.
            self._pid = os.getpid()
            self._restart(b"")
        try:
            fd = open_with_mode(self._path, os.O_RDONLY, 0)
        except FileNotFoundError:
            self._restart(b"")
            return
        try:
            size, mark = os.fstat(fd).st_size, os.pread(fd, _MARK_BYTES, 0)
            if size < self._offset or not mark.startswith(self._mark) or not self._mark:
                self._restart(mark)
            tail = os.pread(fd, size - self._offset, self._offset)
        finally:
            os.close(fd)
        self._offset += len(tail)
        for line in tail.splitlines():
            self._enter(line)

    def _restart(self, mark: bytes) -> None:
        # A folder that was deleted and made again often has the same inodes; the first line of the log differs.
        self._held: dict[str, CacheEntry] = {}
        self._verified: set[str] = set()
        self._total = self._offset = self._num_lines = 0
        self._mark = mark

    def _enter(self, line: bytes) -> None:
        self._num_lines += 1
        read = _parsed(line)
        if read is None:
            return
        sign, num_bytes, names = read
        if sign == "=":
            self._verified.add(names[0])
            return
        self._verified.discard(names[0])
        old = self._held.pop(names[0], None)
        self._total -= old.num_bytes if old else 0
        if sign == "+":
            self._held[names[0]] = CacheEntry(names, num_bytes)
            self._total += num_bytes

    def _append(self, line: list[object]) -> None:
        if not self._mark:
            self._compact()
        encoded = json.dumps(line).encode()
        fd = open_with_mode(self._path, os.O_RDWR | os.O_APPEND, self._folder.modes.file)
        try:
            # The newline comes first, so that a torn line damages only itself.
            written = os.write(fd, b"\n" + encoded + b"\n")
        finally:
            os.close(fd)
        if written != len(encoded) + 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._path))
        self._offset += written
        self._enter(encoded)

    def _compact(self) -> None:
        """Write the file without its history, with a new first line."""
        first = json.dumps(["log", secrets.token_hex(8)]).encode().ljust(_MARK_BYTES - 1) + b"\n"
        held = (["+", held.num_bytes, *held.names] for held in self._held.values())
        verified = (["=", name] for name in sorted(self._verified))
        lines = "".join(json.dumps(line) + "\n" for line in (*held, *verified)).encode()
        publish_bytes(first + lines, self._path, self._folder.modes, durable=False)
        self._mark, self._offset = first, len(first) + len(lines)
        self._num_lines = len(self._held) + len(self._verified)


def _parsed(line: bytes) -> tuple[str, int, tuple[str, ...]] | None:
    """Return sign, bytes and names of a line; None for a torn line, or one that this package does not write."""
    try:
        sign, *rest = json.loads(line)
        num_bytes = rest.pop(0) if sign == "+" else 0
        names = tuple(check_basename(name, "the cache's log") for name in rest)
    except (ValueError, TypeError, IndexError, RecursionError, FormatError):
        return None
    known = sign in ("+", "-", "=") and type(num_bytes) is int and 0 <= num_bytes < 1 << 53 and names
    return (sign, num_bytes, names) if known else None
