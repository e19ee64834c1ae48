"""Whole-file compressions: the 58 names of MDS in five families, ``lz4``, and ``zstd:seekable``.

Reading is bounded: the index says how many bytes a file holds, and a stream that holds more or fewer is refused before
it is expanded in memory. Each family uses its fastest library: on one core, zstd:3 compresses text at 195 MB/s
(cramjam: 181), br:5 at 43 (29) and reads it at 530 (398). So cramjam is used for snappy and lz4 only.
"""

from __future__ import annotations

import bz2
import gzip
import importlib
import zlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from lightning_stream.errors import FormatError, MissingExtraError, needs

from .model import SEEKABLE
from .seekable import compress_frames

_PIECE_BYTES = 1 << 20
_MAX_FILE_BYTES = 1 << 32
_module: Callable[[str], Any] = importlib.import_module  # libraries are imported on first use


class _Codec(NamedTuple):
    default: int  # level
    levels: range
    compress: Callable[[Any, int], bytes]
    pieces: Callable[[BinaryIO, int], Iterator[Any]]  # the content of a compressed file, which should have this size


def _pieces(reader: Any, num_bytes: int) -> Iterator[Any]:
    return iter(partial(reader.read, min(_PIECE_BYTES, num_bytes + 1)), b"")


def _zstd(file: BinaryIO, num_bytes: int) -> Iterator[Any]:
    # zstd:22 has windows of 128 MiB; a larger window serves only a larger file, and takes its memory at once
    window = max(1 << 27, min(1 << 31, 1 << num_bytes.bit_length()))
    decompressor = _module("zstandard").ZstdDecompressor(max_window_size=window)
    return _pieces(decompressor.stream_reader(file, read_across_frames=True, read_size=_PIECE_BYTES), num_bytes)


def _brotli(file: BinaryIO, num_bytes: int) -> Iterator[Any]:
    state = _module("brotli").Decompressor()
    while not state.is_finished():
        ready = state.can_accept_more_data()
        data = file.read(_PIECE_BYTES) if ready else b""
        if piece := state.process(data, output_buffer_limit=min(_PIECE_BYTES, num_bytes + 1)):
            yield piece
        elif ready and not data:
            raise EOFError("the brotli stream ends early")
    if file.read(1):
        raise ValueError("bytes after the end of the brotli stream")


def _cramjam(codec: str) -> Any:
    with needs("cramjam", "codecs", f"{codec} compression"):
        return getattr(importlib.import_module("cramjam"), codec)


def _compress_whole(codec: str, data: Any, _: int) -> bytes:
    library = _cramjam(codec)
    return bytes((library.compress_raw if codec == "snappy" else library.compress)(bytes(data)))


def _decompress_whole(codec: str, max_ratio: int, file: BinaryIO, num_bytes: int) -> Iterator[Any]:
    """Decompress by a codec without a bounded stream: one call into a buffer of the promised size.

    The index may be wrong, so the memory is only taken if the compressed bytes can hold so many: at most ``max_ratio``
    times their own number. In a snappy block, three bytes stand for 64 at most.
    """
    library = _cramjam(codec)
    if not (data := file.read()):
        return
    if num_bytes > min(max_ratio * len(data), _MAX_FILE_BYTES):
        raise ValueError(f"{len(data)} compressed bytes cannot hold {num_bytes}")
    if codec == "snappy" and (promised := library.decompress_raw_len(data)) != num_bytes:
        raise ValueError(f"the snappy block holds {promised} bytes")
    into = library.decompress_raw_into if codec == "snappy" else library.decompress_into
    out = bytearray(num_bytes)
    yield memoryview(out)[: into(data, out)]


_CODECS: Mapping[str, _Codec] = {
    "br": _Codec(11, range(12), lambda data, level: _module("brotli").compress(data, quality=level), _brotli),
    "bz2": _Codec(9, range(1, 10), bz2.compress, lambda file, size: _pieces(bz2.BZ2File(file), size)),
    "gz": _Codec(
        9, range(10), partial(gzip.compress, mtime=0), lambda file, size: _pieces(gzip.GzipFile(fileobj=file), size)
    ),
    "snappy": _Codec(0, range(0), partial(_compress_whole, "snappy"), partial(_decompress_whole, "snappy", 22)),
    "zstd": _Codec(3, range(1, 23), lambda data, level: _module("zstandard").compress(data, level), _zstd),
    # At level 6, frames of text are about as small as one frame of it at zstd's level 3.
    SEEKABLE: _Codec(6, range(1, 23), compress_frames, _zstd),
    "lz4": _Codec(0, range(0), partial(_compress_whole, "lz4"), partial(_decompress_whole, "lz4", 255)),
}

_MDS = [(family, codec.levels) for family, codec in _CODECS.items() if family not in ("lz4", SEEKABLE)]
COMPRESSIONS = tuple(sorted(name for family, levels in _MDS for name in (family, *(f"{family}:{k}" for k in levels))))
"""The 58 names of MDS, with and without a level. Mosaic cannot read lz4, and an index calls seekable files zstd."""


def check_compression(name: str | None) -> str | None:
    """Return a name that is None, one of `COMPRESSIONS`, ``"lz4"``, or ``"zstd:seekable"`` (with a
    level: ``"zstd:seekable:9"``); ValueError for another name or level."""
    if name is not None:
        _split(name)
    return name


def compress(name: str, data: bytes | bytearray | memoryview) -> bytes:
    """Compress the bytes of a file. It releases the GIL."""
    family, level = _split(name)
    return _CODECS[family].compress(data, level)


def suffix(name: str) -> str:
    """Return how the names of compressed files end, e.g. ``"zstd"``."""
    return ".".join(reversed(_split(name)[0].split(":")))


def decompress(name: str, data: bytes, most_bytes: int, where: str) -> bytes:
    """Decompress a part of a file; FormatError if it is damaged, or gives more than ``most_bytes`` bytes."""
    content = bytearray()
    for piece in _decompressed(name, BytesIO(data), most_bytes, where):
        content += piece
        if len(content) > most_bytes:
            raise FormatError(f"{where}: must hold at most {most_bytes} bytes when decompressed; it holds more.")
    return bytes(content)


def decompress_file(name: str, source: Path, target: Path, num_bytes: int) -> None:
    """Decompress ``source`` to ``target`` in bounded memory; FormatError unless that gives ``num_bytes`` bytes."""
    written = 0
    try:
        with source.open("rb") as file, target.open("wb") as out:
            for piece in _decompressed(name, file, num_bytes, source):
                written += len(piece)
                if written > num_bytes:
                    break
                out.write(piece)
        if written != num_bytes:
            amount = "more" if written > num_bytes else f"only {written}"
            rule = f"must hold {num_bytes} bytes when decompressed, says its index"
            raise FormatError(f"{source}: {rule}; it holds {amount}.")
    except BaseException:
        target.unlink(missing_ok=True)
        raise


def _split(name: str) -> tuple[str, int]:
    family, colon, text = (name, "", "") if name in _CODECS else str(name).rpartition(":")
    codec = _CODECS.get(family)
    if codec is None:
        raise ValueError(f"compression must be one of {', '.join(_CODECS)}, or with a level: got {name!r}.")
    if not colon:
        return family, codec.default
    if not text.isdecimal() or int(text) not in codec.levels or str(int(text)) != text:
        known = f"{family}:{codec.levels[0]} to {family}:{codec.levels[-1]}" if codec.levels else f"{family}, no level"
        raise ValueError(f"compression level out of range: got {name!r}; known are {known}.")
    return family, int(text)


def _decompressed(name: str, file: BinaryIO, num_bytes: int, where: Path | str) -> Iterator[Any]:
    """Yield the content in pieces. An error of the codec becomes a FormatError, an error of the disk does not."""
    family, _ = _split(name)
    try:
        yield from _CODECS[family].pieces(file, num_bytes)
    except MissingExtraError:
        raise
    except Exception as error:
        module = type(error).__module__.split(".")[0]
        # Before 0.25, the errors of zstandard are of a module named zstd.
        of_codec = module in ("zstandard", "zstd", "brotli", "cramjam")
        of_codec = of_codec or isinstance(error, (EOFError, ValueError, zlib.error))
        if not of_codec and (not isinstance(error, OSError) or error.errno is not None):
            raise
        raise FormatError(
            f"{where}: not a readable {family} file ({error}). Fetch it again; if it stays so, it was written wrong."
        ) from error
