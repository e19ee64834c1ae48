"""Photos inside a tar archive: listed and read in place, so that nothing it says can write anywhere."""

from __future__ import annotations

import gzip
import os
import tarfile
import tempfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path, PurePosixPath
from typing import IO

from lightning_stream.errors import FormatError

_CHUNK_BYTES = 1 << 20
_LARGEST_RATIO = 200  # photos hardly compress; an archive that grows beyond this is made to fill the disk
_DAMAGED = (EOFError, gzip.BadGzipFile, zlib.error, tarfile.TarError)


@contextmanager
def open_archive(path: Path, suffixes: tuple[str, ...]) -> Iterator[Mapping[tuple[str, str], Callable[[], bytes]]]:
    """The image files of a .tgz or .tar, by the names of their folder and themselves.

    The archive is unpacked into one nameless temporary file and its members are read from there by offset: names
    serve as labels only, links and special files are passed over, and a name that leads out of the archive is refused.

    Raises:
        FormatError: The archive is damaged, or not what it should be.
    """
    with tempfile.TemporaryFile() as plain:
        try:
            _unpack(path, plain)
            plain.seek(0)
            found = _members(path, plain, suffixes)
        except _DAMAGED as error:
            raise FormatError(
                f"{path} must be a whole .tgz or .tar; reading it failed: {error or type(error).__name__}. "
                "Fetch it again."
            ) from error
        if not found:
            raise FormatError(
                f"{path} must hold class folders with image files ({', '.join(suffixes)}); it holds none. "
                "Pack the folder that contains the class folders."
            )
        yield {key: partial(_read, plain, offset, size) for key, (offset, size) in found.items()}


def _unpack(path: Path, plain: IO[bytes]) -> None:
    with path.open("rb") as packed:
        is_gzip = packed.read(2) == b"\x1f\x8b"
    limit = path.stat().st_size * _LARGEST_RATIO
    source: IO[bytes] = gzip.open(path, "rb") if is_gzip else path.open("rb")  # type: ignore[assignment]  # noqa: SIM115
    with source:
        written = 0
        while chunk := source.read(_CHUNK_BYTES):
            written += plain.write(chunk)
            if written > limit:
                raise FormatError(f"{path} unpacks to more than {_LARGEST_RATIO} times its size: refused.")
    plain.flush()


def _members(path: Path, plain: IO[bytes], suffixes: tuple[str, ...]) -> dict[tuple[str, str], tuple[int, int]]:
    found: dict[tuple[str, str], tuple[int, int]] = {}
    with tarfile.open(fileobj=plain, mode="r:") as archive:
        for member in archive:
            name = PurePosixPath(member.name)
            if name.is_absolute() or ".." in name.parts:
                raise FormatError(f"{path} has a member named {member.name!r}, which leads out of it: refused.")
            is_photo = member.isreg() and name.suffix.lower() in suffixes and not name.name.startswith(".")
            if is_photo and len(name.parts) >= 2:
                found[name.parts[-2], name.name] = (member.offset_data, member.size)
    return found


def _read(plain: IO[bytes], offset: int, size: int) -> bytes:
    data = os.pread(plain.fileno(), size, offset)
    if len(data) != size:
        raise FormatError(f"an archive ends in the middle of a photo: {size} bytes at {offset}, found {len(data)}.")
    return data
