"""MDS shards compressed in frames that can be read alone: ``compression="zstd:seekable"``.

The file follows version 0.1.0 of the Zstandard Seekable Format (facebook/zstd, contrib/seekable_format): zstd frames
one after another, and a table of their sizes in a skippable frame at the end. Any reader of zstd reads the whole file.

The first frame has what precedes the samples. Each other one has as many samples as `samples_per_frame` says, the last
one the rest. So the index tells which frame holds a sample, and where the table of the frames lies.
"""

from __future__ import annotations

import importlib
import struct
from collections.abc import Iterator
from itertools import pairwise
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from lightning_stream.errors import FormatError

from .model import ShardEntry

# Of a frame; both are part of the format: files have been written with them
_MOST_SAMPLES = 256
_FRAME_BYTES = 1 << 17
_SKIPPABLE = 0x184D2A5E
_SEEKABLE = 0x8F92EAB1
_FRAME_HEAD_BYTES = 18  # at most
_CHECKSUM_BYTES = 4
_REPEATED = 1  # the kind of a block that has one byte
_HEAD = struct.Struct("<II")  # of the table, and the sizes of a frame
_FOOT = struct.Struct("<IBI")


def samples_per_frame(num_samples: int, num_bytes: int) -> int:
    """Return how many samples each frame has of a shard of so many samples and raw bytes."""
    return max(1, min(_MOST_SAMPLES, _FRAME_BYTES * num_samples // num_bytes))


def compress_frames(shard: bytes, level: int) -> bytes:
    """Compress the file of an MDS shard."""
    num_samples = int.from_bytes(shard[:4], "little")
    offsets = np.frombuffer(shard, "<u4", num_samples, 4)
    edges = [0, *offsets[:: samples_per_frame(num_samples, len(shard))].tolist(), len(shard)]
    compressor = importlib.import_module("zstandard").ZstdCompressor(level, write_checksum=True)
    view = memoryview(shard)
    frames = [compressor.compress(view[begin:end]) for begin, end in pairwise(edges)]
    sizes = [_HEAD.pack(len(frame), end - begin) for frame, (begin, end) in zip(frames, pairwise(edges), strict=True)]
    table = b"".join([*sizes, _FOOT.pack(len(frames), 0, _SEEKABLE)])
    return b"".join([*frames, _HEAD.pack(_SKIPPABLE, len(table)), table])


class Frames:
    """Where the samples of a seekable shard are in its compressed file.

    Attributes:
        num_frames: The number of frames, without the table.
        table: The bytes of the table: their begin and end in the file.
    """

    def __init__(self, entry: ShardEntry) -> None:
        assert entry.compressed is not None
        self._entry = entry
        self._per_frame = samples_per_frame(entry.num_samples, entry.raw.num_bytes)
        self.num_frames = 1 + -(-entry.num_samples // self._per_frame)
        end = entry.compressed.num_bytes
        self.table = end - _HEAD.size - _HEAD.size * self.num_frames - _FOOT.size, end

    def of(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the frames that have these samples: ascending, distinct."""
        return np.unique(1 + indices // self._per_frame)

    def offsets(self, table: bytes) -> NDArray[np.uint32]:
        """Return where the frames begin, and the end of the last, from the bytes of the table."""
        begin, end = self.table
        head = _HEAD.pack(_SKIPPABLE, end - begin - _HEAD.size)
        foot = _FOOT.pack(self.num_frames, 0, _SEEKABLE)
        if len(table) == end - begin and table.startswith(head) and table.endswith(foot):
            packed, raw = np.frombuffer(table[len(head) : -len(foot)], "<u4").reshape(-1, 2).astype(np.int64).T
            if (int(packed.sum()), int(raw.sum())) == (begin, self._entry.raw.num_bytes):
                return np.concatenate([[0], packed.cumsum()]).astype(np.uint32)
        raise self._error("its table does not fit the index")

    def arrived(self, file: BinaryIO, num_bytes: int, last: int, edges: list[int]) -> int:
        """Extend `edges`, where frames begin, by those that are here of a file that arrives, up to the end of `last`.

        Return how many bytes are needed: more than `num_bytes` where not all of them are here.
        """
        while len(edges) < last + 2:
            if (end := self._end(file, edges[-1], num_bytes)) > num_bytes:
                return end
            edges.append(end)
        return edges[-1]

    def _end(self, file: BinaryIO, begin: int, num_bytes: int) -> int:
        """Where a frame ends, by the sizes of its blocks; a place behind `num_bytes` where one has not come."""
        if begin + _FRAME_HEAD_BYTES > num_bytes:
            return begin + _FRAME_HEAD_BYTES
        zstandard = importlib.import_module("zstandard")
        is_last = 0
        file.seek(begin)
        try:
            end = begin + int(zstandard.frame_header_size(file.read(_FRAME_HEAD_BYTES)))
        except zstandard.ZstdError:
            raise self._error("a frame does not begin as one") from None
        while not is_last:
            if end + 3 > num_bytes:
                return end + 3
            file.seek(end)
            header = int.from_bytes(file.read(3), "little")
            if not header:
                raise self._error("a frame has an empty block")
            is_last = header & 1
            kind = header >> 1 & 3
            end += 3 + (1 if kind == _REPEATED else header >> 3)
        return end + _CHECKSUM_BYTES

    def samples(self, frame: int, content: bytes) -> Iterator[tuple[int, bytes]]:
        """Yield the samples of a frame by their indices, from its decompressed bytes."""
        head = struct.Struct(f"<{self._entry.sizes.count(None)}I")
        first = (frame - 1) * self._per_frame
        begin = 0
        for index in range(first, min(first + self._per_frame, self._entry.num_samples)):
            if begin + head.size > len(content):
                raise self._does_not_fill(frame)
            end = begin + head.size + self._entry.fixed_bytes + sum(head.unpack_from(content, begin))
            yield index, content[begin:end]
            begin = end
        if begin != len(content):
            raise self._does_not_fill(frame)

    def _does_not_fill(self, frame: int) -> FormatError:
        return self._error(f"the samples of frame {frame} do not fill it")

    def _error(self, what: str) -> FormatError:
        return FormatError(f"{self._entry.raw.basename}: {what}. Compare it with the dataset's source.")
