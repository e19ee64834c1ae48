"""The bytes of the samples of one shard, in memory that is used again.

Fresh memory costs more than copying, since its pages are made one by one. So samples are copied into pieces of a
pool, which come back when their shard was put, and the caller may change its own memory at once. Only very large bytes
objects are not copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from lightning_stream.threads import Lock

PIECE_BYTES = 1 << 23  # numpy asks for huge pages from 4 MiB on, and then making them is cheap
_HUGE_PAGE_BYTES = 1 << 21
_JOINED_BYTES = 1 << 14  # the parts of smaller samples are joined first: one copy more, but fewer steps
_LARGE_BYTES = 1 << 20  # bytes objects of this size or more are not copied


class Pool:
    """Pieces of memory to be used again. Thread-safe."""

    def __init__(self) -> None:
        self._free: list[memoryview] = []
        self._lock = Lock()

    def take(self) -> memoryview:
        """Return a piece with any content. It begins at a huge page: else a quarter of it would be small pages."""
        with self._lock:
            if self._free:
                return self._free.pop()
        memory = np.empty(PIECE_BYTES + _HUGE_PAGE_BYTES, np.uint8)
        begin = -memory.ctypes.data % _HUGE_PAGE_BYTES
        return memory[begin : begin + PIECE_BYTES].data

    def give_back(self, pieces: list[memoryview]) -> None:
        """Take pieces back."""
        with self._lock:
            self._free += pieces

    def clear(self) -> None:
        """Free all pieces that are not in use."""
        with self._lock:
            self._free.clear()


class ShardBuffer:
    """The samples of one shard, in order; `sizes` has their bytes, and `file_bytes` those of the shard's file."""

    def __init__(self, pool: Pool, header_bytes: int) -> None:
        self.sizes: list[int] = []
        self.file_bytes = header_bytes
        self._pool = pool
        self._pieces: list[memoryview] = []
        self._done: list[Any] = []
        self._view = memoryview(bytearray())
        self._begin = self._at = self._room = 0

    def add_sample(self, parts: Sequence[bytes], num_bytes: int, file_bytes: int) -> None:
        """Add one sample of ``num_bytes`` bytes, which takes ``file_bytes`` of the shard's file."""
        end = self._at + num_bytes
        if end <= self._room and num_bytes < _JOINED_BYTES:
            self._view[self._at : end] = parts[0] if len(parts) == 1 else b"".join(parts)
            self._at = end
        else:
            for part in parts:
                self.add(part)
        self.sizes.append(num_bytes)
        self.file_bytes += file_bytes

    def add(self, data: Any) -> None:
        """Add bytes or a view of bytes; large bytes objects, which nobody can change, are not copied."""
        size = len(data)
        end = self._at + size
        if size >= _LARGE_BYTES and type(data) is bytes:
            self._close()
            self._done.append(data)
        elif end <= self._room:
            self._view[self._at : end] = data
            self._at = end
        else:
            self._add_across(memoryview(data))

    def _add_across(self, data: memoryview) -> None:
        """Add bytes that do not fit into the current piece."""
        while len(data):
            if self._at == self._room:
                self._close()
                self._pieces.append(self._pool.take())
                self._view = self._pieces[-1]
                self._begin = 0
                self._at = 0
                self._room = PIECE_BYTES
            count = min(len(data), self._room - self._at)
            self._view[self._at : self._at + count] = data[:count]
            self._at += count
            data = data[count:]

    def _close(self) -> None:
        if self._at > self._begin:
            self._done.append(self._view[self._begin : self._at])
        self._begin = self._at

    def parts(self) -> list[Any]:
        """Return all bytes in order, in parts of any size."""
        self._close()
        return self._done

    def release(self) -> None:
        """Give the memory back to the pool. The parts must not be used any more."""
        pieces = self._pieces
        self._pieces = []
        self._done = []
        self._view = memoryview(bytearray())
        self._pool.give_back(pieces)
