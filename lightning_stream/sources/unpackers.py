"""Files that are decompressed while they are read, by what their names end with."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
from collections.abc import Iterator
from typing import Any, BinaryIO

import zstandard

_PACKED_BYTES = 1 << 16


class Blocks(io.RawIOBase):
    """Blocks of bytes as a file."""

    def __init__(self, blocks: Iterator[bytes]) -> None:
        self._blocks = blocks
        self._left = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._left and (block := next(self._blocks, None)) is not None:
            self._left = memoryview(block)
        part = self._left[: len(buffer)]
        buffer[: len(part)] = part
        self._left = self._left[len(part) :]
        return len(part)


def _zstd(file: BinaryIO) -> BinaryIO:
    return io.BufferedReader(Blocks(_frames(file)))


def _frames(file: BinaryIO) -> Iterator[bytes]:
    """The content of the frames of a file; EOFError where the last one is cut off, which zstandard's reader hides."""
    frame: Any = None
    while data := file.read(_PACKED_BYTES):
        while data:
            frame = frame or zstandard.ZstdDecompressor().decompressobj()
            yield frame.decompress(data)
            data = frame.unused_data
            frame = None if frame.eof else frame
    if frame:
        raise EOFError("its last frame is cut off")


UNPACKERS: dict[str, Any] = {".gz": gzip.open, ".tgz": gzip.open, ".zst": _zstd, ".bz2": bz2.open, ".xz": lzma.open}
