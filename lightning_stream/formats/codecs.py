"""Whole-file compressions: the 58 names of MDS in five families, and ``lz4``.

Reading is bounded: the index says how many bytes a file holds, and a stream that holds more or fewer is refused before
it is expanded in memory. Each family uses its fastest library: on one core, zstd:3 compresses text at 195 MB/s
(cramjam: 181), br:5 at 43 (29) and reads it at 530 (398). So cramjam is used for snappy and lz4 only.
"""

from __future__ import annotations

import bz2
import gzip
import importlib
import zlib
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Protocol, TypeVar

from lightning_stream.errors import FormatError, MissingExtraError, missing_extra

_CHUNK_BYTES = 1 << 20
_MAX_FILE_BYTES = 1 << 32
_module: Callable[[str], Any] = importlib.import_module  # libraries are imported on first use
_T = TypeVar("_T")


class _Reader(Protocol):
    def read(self, size: int, /) -> bytes | memoryview: ...


class _Codec(NamedTuple):
    default: int | None  # level; None if the family has no levels
    levels: range
    compress: Callable[[bytes, int], bytes]
    reader: Callable[[BinaryIO, int], _Reader]


def _zstd_reader(file: BinaryIO, num_bytes: int) -> _Reader:
    # zstd:22 has windows of 128 MiB; a larger window serves only a larger file, and takes its memory at once
    window = max(1 << 27, min(1 << 31, 1 << num_bytes.bit_length()))
    decompressor = _module("zstandard").ZstdDecompressor(max_window_size=window)
    reader: _Reader = decompressor.stream_reader(file, read_across_frames=True, read_size=_CHUNK_BYTES)
    return reader


class _BrotliReader:
    """Reads a brotli stream in bounded pieces."""

    def __init__(self, file: BinaryIO, _: int) -> None:
        self._file = file
        self._state: Any = _module("brotli").Decompressor()

    def read(self, size: int) -> bytes:
        while not self._state.is_finished():
            ready = self._state.can_accept_more_data()
            chunk = self._file.read(_CHUNK_BYTES) if ready else b""
            out: bytes = self._state.process(chunk, output_buffer_limit=size)
            if out:
                return out
            if ready and not chunk:
                raise EOFError("the brotli stream ends early")
        if self._file.read(1):
            raise ValueError("bytes after the end of the brotli stream")
        return b""


def _cramjam(codec: str) -> Any:
    try:
        return getattr(importlib.import_module("cramjam"), codec)
    except ImportError as error:
        raise missing_extra("cramjam", "codecs", f"{codec} compression") from error


class _WholeReader:
    """For codecs without a bounded stream: one call into a buffer of the promised size.

    The index may be wrong, so the memory is only taken if the compressed bytes can hold so many: at most ``max_ratio``
    times their own number.
    """

    def __init__(
        self, file: BinaryIO, num_bytes: int, max_ratio: int, decompress_into: Callable[[bytes, bytearray], int]
    ) -> None:
        self._file, self._num_bytes, self._max_ratio = file, num_bytes, max_ratio
        self._decompress_into = decompress_into

    def read(self, _: int) -> memoryview:
        data = self._file.read()
        if not data:
            return memoryview(b"")
        if self._num_bytes > min(self._max_ratio * len(data), _MAX_FILE_BYTES):
            raise ValueError(f"{len(data)} compressed bytes cannot hold {self._num_bytes}")
        out = bytearray(self._num_bytes)
        return memoryview(out)[: self._decompress_into(data, out)]


def _snappy_reader(file: BinaryIO, num_bytes: int) -> _Reader:
    snappy = _cramjam("snappy")

    def into(data: bytes, out: bytearray) -> int:
        promised = snappy.decompress_raw_len(data)
        if promised != len(out):
            raise ValueError(f"the snappy block holds {promised} bytes")
        return int(snappy.decompress_raw_into(data, out))

    return _WholeReader(file, num_bytes, 22, into)  # three bytes stand for 64 at most


def _lz4_reader(file: BinaryIO, num_bytes: int) -> _Reader:
    lz4 = _cramjam("lz4")
    return _WholeReader(file, num_bytes, 255, lambda data, out: int(lz4.decompress_into(data, out)))


_CODECS: Mapping[str, _Codec] = {
    "br": _Codec(11, range(12), lambda data, level: _module("brotli").compress(data, quality=level), _BrotliReader),
    "bz2": _Codec(9, range(1, 10), bz2.compress, lambda file, _: bz2.BZ2File(file)),
    "gz": _Codec(9, range(10), partial(gzip.compress, mtime=0), lambda file, _: gzip.GzipFile(fileobj=file)),
    "snappy": _Codec(None, range(0), lambda data, _: bytes(_cramjam("snappy").compress_raw(data)), _snappy_reader),
    "zstd": _Codec(3, range(1, 23), lambda data, level: _module("zstandard").compress(data, level), _zstd_reader),
    "lz4": _Codec(None, range(0), lambda data, _: bytes(_cramjam("lz4").compress(data)), _lz4_reader),
}

_MDS = [(family, about.levels) for family, about in _CODECS.items() if family != "lz4"]  # Mosaic cannot read lz4
COMPRESSIONS = tuple(sorted(name for family, levels in _MDS for name in (family, *(f"{family}:{k}" for k in levels))))
"""The 58 names of MDS, with and without a level."""


def check_compression(name: str | None) -> str | None:
    """Return a name that is None, one of `COMPRESSIONS`, or ``"lz4"``; ValueError for another name or level."""
    if name is not None:
        _split(name)
    return name


def extension(name: str) -> str:
    """Return the extension of a compressed file's name, without the dot: the family's name."""
    return _split(name)[0]


def compress(name: str, data: bytes | bytearray | memoryview) -> bytes:
    """Compress the bytes of a file. It releases the GIL."""
    family, level = _split(name)
    return _CODECS[family].compress(bytes(data) if family in ("snappy", "lz4") else data, level)  # type: ignore[arg-type]


def decompress_file(name: str, source: Path, target: Path, num_bytes: int) -> None:
    """Decompress ``source`` to ``target`` in bounded memory; FormatError unless that gives ``num_bytes`` bytes."""
    try:
        with source.open("rb") as file, target.open("wb") as out:
            _copy(name, file, out, num_bytes, str(source))
    except BaseException:
        target.unlink(missing_ok=True)
        raise


def _split(name: str) -> tuple[str, int]:
    family, colon, text = str(name).partition(":")
    about = _CODECS.get(family)
    if about is None:
        raise ValueError(f"compression must be one of {', '.join(_CODECS)}, or with a level: got {name!r}.")
    if not colon:
        return family, about.default or 0
    if not text.isdecimal() or int(text) not in about.levels or str(int(text)) != text:
        known = f"{family}:{about.levels[0]} to {family}:{about.levels[-1]}" if about.levels else f"{family}, no level"
        raise ValueError(f"compression level out of range: got {name!r}; known are {known}.")
    return family, int(text)


def _copy(name: str, source: BinaryIO, target: BinaryIO, num_bytes: int, where: str) -> None:
    family, _ = _split(name)
    reader = _read_errors(lambda: _CODECS[family].reader(source, num_bytes), family, where)
    written = 0
    while chunk := _read_errors(partial(reader.read, min(_CHUNK_BYTES, num_bytes - written + 1)), family, where):
        written += len(chunk)
        if written > num_bytes:
            break
        target.write(chunk)
    if written != num_bytes:
        found = "more" if written > num_bytes else f"only {written}"
        raise FormatError(f"{where}: must hold {num_bytes} bytes when decompressed, says its index; it holds {found}.")


def _read_errors(action: Callable[[], _T], family: str, where: str) -> _T:
    """Return the action's result. An error of the codec becomes a FormatError, an error of the disk does not."""
    try:
        return action()
    except MissingExtraError:
        raise
    except Exception as error:
        module = type(error).__module__.split(".")[0]
        of_codec = module in ("zstandard", "brotli", "cramjam") or isinstance(error, (EOFError, ValueError, zlib.error))
        if not of_codec and (not isinstance(error, OSError) or error.errno is not None):
            raise
        raise FormatError(
            f"{where}: not a readable {family} file ({error}). Fetch it again; if it stays so, it was written wrong."
        ) from error
