"""How many bytes a cache folder holds, kept by all processes that use it in one small file; no process serves it."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from dataclasses import dataclass

from lightning_stream.shared_files import FileLock, open_with_mode, publish_bytes

from .folder import CacheFolder

_SLACK_FROM = 256  # entries; with fewer, finding room for one shard at a time is cheap
_COMPACT_FROM = 4096  # lines


@dataclass(frozen=True)
class Holding:
    """One shard that the cache holds, or is fetching: its files, relative to the folder, and their bytes together."""

    names: tuple[str, ...]
    num_bytes: int


@dataclass(frozen=True)
class Shortage:
    """What could not be fitted in."""

    limit_bytes: int
    held_bytes: int
    in_use_bytes: int


class Ledger:
    """A file of lines, ``["+", bytes, names...]`` and ``["-", name]``, appended under a lock.

    An entry is written before its files appear, and its end after they are gone: killed at any instant, the ledger
    counts too much, never too little; what it counts in vain is found when room is needed.

    Args:
        place: The cache's folder.
    """

    def __init__(self, place: CacheFolder) -> None:
        self._place = place
        self._path = place.control / "ledger"
        self._held: dict[str, Holding] = {}
        self._total = 0
        self._offset = 0
        self._inode = -1
        self._num_lines = 0
        self._pid = os.getpid()

    def reserve(
        self,
        holding: Holding,
        limit_bytes: int | None,
        in_order: Callable[[list[Holding]], list[Holding]],
        remove: Callable[[Holding], bool],
    ) -> Shortage | None:
        """Enter a shard that will be fetched, making room for it under the limit.

        Args:
            holding: The shard; entered anew if it is known.
            limit_bytes: What the folder may hold; None for no limit.
            in_order: Sorts the candidates, the first to go first.
            remove: Deletes a shard's files; False where it is in use.

        Returns:
            None, or what stood in the way: then nothing was entered.
        """
        with self._locked():
            known = self._held.get(holding.names[0])
            need = holding.num_bytes - (known.num_bytes if known else 0)
            if limit_bytes is not None and self._total + need > limit_bytes:
                kept = self._make_room(holding, limit_bytes - need, in_order, remove)
                if self._total + need > limit_bytes:
                    return Shortage(limit_bytes, self._total, kept)
            self._append(["+", holding.num_bytes, *holding.names])
        return None

    def settle(self, holding: Holding) -> None:
        """Say what a shard holds now that it is fetched."""
        with self._locked():
            self._append(["+", holding.num_bytes, *holding.names])

    def forget(self, name: str) -> None:
        """Strike the shard out, by its first file."""
        with self._locked():
            if name in self._held:
                self._append(["-", name])

    def knows(self, name: str) -> bool:
        """Whether the cache itself has fetched this file."""
        if name not in self._held:
            with self._locked():
                pass
        return name in self._held

    def total(self) -> int:
        """Bytes held."""
        with self._locked():
            return self._total

    def _make_room(
        self,
        wanted: Holding,
        target: int,
        in_order: Callable[[list[Holding]], list[Holding]],
        remove: Callable[[Holding], bool],
    ) -> int:
        """Remove until the total is at most the target; give the bytes that could not be removed."""
        if len(self._held) > _SLACK_FROM:
            # Many small shards: room for a few at once, so that not every fetch sorts them all.
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

    def _locked(self) -> _Replayed:
        return _Replayed(self, FileLock(self._place.control / "ledger.lock", wait_s=60.0, modes=self._place.modes))

    def replay(self) -> None:
        """Read what other processes have appended. Under the lock."""
        if self._pid != os.getpid():
            # Forked, perhaps while another thread was here: trust nothing.
            self._pid, self._inode = os.getpid(), -1
        try:
            fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            self._restart(-1)
            return
        try:
            inode = os.fstat(fd).st_ino
            if inode != self._inode:
                self._restart(inode)
            size = os.fstat(fd).st_size
            tail = os.pread(fd, size - self._offset, self._offset) if size > self._offset else b""
        finally:
            os.close(fd)
        self._offset += len(tail)
        for line in tail.splitlines():
            self._enter(line)

    def _restart(self, inode: int) -> None:
        self._held, self._total, self._offset, self._inode, self._num_lines = {}, 0, 0, inode, 0

    def _enter(self, line: bytes) -> None:
        self._num_lines += 1
        try:
            sign, *rest = json.loads(line)
        except (ValueError, TypeError):
            # A line torn by a full disk or a power cut.
            return
        old = self._held.pop(str(rest[1] if sign == "+" else rest[0]), None)
        self._total -= old.num_bytes if old else 0
        if sign == "+":
            self._held[str(rest[1])] = Holding(tuple(rest[1:]), rest[0])
            self._total += rest[0]

    def _append(self, line: list[object]) -> None:
        encoded = json.dumps(line).encode()
        fd = open_with_mode(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND, self._place.modes.file)
        try:
            # The newline comes first, so that a torn line spoils only itself.
            written = os.write(fd, b"\n" + encoded + b"\n")
            self._inode = os.fstat(fd).st_ino
        finally:
            os.close(fd)
        if written != len(encoded) + 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._path))
        self._offset += written
        self._enter(encoded)

    def compact(self) -> None:
        """Rewrite a ledger that is mostly history. Under the lock."""
        if self._num_lines > max(_COMPACT_FROM, 4 * len(self._held)):
            lines = (json.dumps(["+", held.num_bytes, *held.names]) for held in self._held.values())
            publish_bytes("\n".join([*lines, ""]).encode(), self._path, self._place.modes)
            self._restart(-1)


class _Replayed:
    """The ledger's lock, with what others wrote read in, and compacted on the way out where it is due."""

    def __init__(self, ledger: Ledger, lock: FileLock) -> None:
        self._ledger = ledger
        self._lock = lock

    def __enter__(self) -> None:
        self._lock.__enter__()
        try:
            self._ledger.replay()
        except BaseException:
            self._lock.release()
            raise

    def __exit__(self, *exc: object) -> None:
        try:
            self._ledger.compact()
        finally:
            self._lock.release()
