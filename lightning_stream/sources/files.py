"""The files that a conversion reads: found in folders, by patterns and in stores, with what shows a change."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import os
import re
import tarfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias, cast

import zstandard

from lightning_stream.errors import FormatError, LightningStreamError, NotFoundError, redact
from lightning_stream.stores import LocalStore, Store, open_store
from lightning_stream.writer.place import is_remote

Uris: TypeAlias = "str | os.PathLike[str] | Sequence[str | os.PathLike[str]]"
DELTA_LOG = "_delta_log/"
_BUFFER_BYTES = 1 << 22
_WILD = frozenset("*?")
_HIDDEN = re.compile(r"(^|/)[._]")
_ENDINGS = (".gz", ".zst", ".bz2", ".xz")
_DAMAGED = (EOFError, OSError, zlib.error, lzma.LZMAError, zstandard.ZstdError, tarfile.TarError, UnicodeDecodeError)


@dataclass(frozen=True)
class SourceFile:
    """One file, local or in a store, or one input of the user's. Picklable."""

    root: str  # the folder or URL that it was found in; empty for an input
    name: str  # its path below the root
    num_bytes: int
    stamp: str  # differs between contents of the same size: the time of change, or the store's version
    options: Mapping[str, Any] | None = field(default=None, repr=False)  # for the store
    value: Any = None  # the input
    store: Store | None = field(default=None, repr=False, compare=False)  # the open store; None to open it

    @property
    def path(self) -> Path | None:
        """Its path, if it is on this machine."""
        return Path(self.root) / self.name if self.root and not is_remote(self.root) else None

    @property
    def uri(self) -> str:
        """Its full path or URL, or the input, for messages."""
        return redact(f"input {self.name} ({self.value!r:.80})" if not self.root else f"{self.root}/{self.name}")

    @property
    def ending(self) -> str:
        """The lower-case suffix of its kind, without that of its compression."""
        name = self.name[: -len(Path(self.name).suffix)] if self.is_packed else self.name
        return os.path.splitext(name)[1].lower()  # noqa: PTH122 - a path object for each costs more

    @property
    def is_packed(self) -> bool:
        """Whether it is compressed as a whole, so that it can only be read from its beginning."""
        return self.name.lower().endswith(_ENDINGS)

    def open(self, buffering: int = -1) -> BinaryIO:
        """Its bytes, seekable, as stored."""
        path = self.path
        if path is not None:
            return path.open("rb", buffering)
        raw = _Ranges(self._store, self.name, self.num_bytes)
        return cast(BinaryIO, io.BufferedReader(raw, _BUFFER_BYTES if buffering < 1 else buffering))

    @contextmanager
    def unpacked(self, what: str) -> Iterator[BinaryIO]:
        """Its bytes, decompressed by what its name ends with. FormatError if reading fails: it must be ``what``."""
        make = _UNPACKERS.get(Path(self.name).suffix.lower(), nullcontext)
        try:
            with self.open() as file, make(file) as plain:
                yield plain
        except LightningStreamError:
            raise
        except _DAMAGED as error:
            raise FormatError(f"{self.uri} must be {what}; reading it failed: {error}. Fetch it again.") from error

    def read(self, begin: int = 0, end: int | None = None) -> bytes:
        """All of it, or its bytes [begin, end), as stored."""
        path = self.path
        if path is None:
            return self._store.read(self.name) if end is None else self._store.get_range(self.name, begin, end)
        with path.open("rb") as file:
            file.seek(begin)
            return file.read(-1 if end is None else end - begin)

    @property
    def _store(self) -> Store:
        return self.store or open_store(self.root, self.options)


def _zstd(file: BinaryIO) -> BinaryIO:
    reader = zstandard.ZstdDecompressor().stream_reader(file, read_across_frames=True, closefd=False)
    return cast(BinaryIO, io.BufferedReader(cast(io.RawIOBase, reader), _BUFFER_BYTES))


_UNPACKERS: Mapping[str, Callable[[BinaryIO], Any]] = {
    ".gz": lambda file: gzip.GzipFile(fileobj=file),
    ".tgz": lambda file: gzip.GzipFile(fileobj=file),
    ".zst": _zstd,
    ".bz2": bz2.BZ2File,
    ".xz": lzma.LZMAFile,
}


class _Ranges(io.RawIOBase):
    """An object of a store as a file."""

    def __init__(self, store: Store, name: str, num_bytes: int) -> None:
        self._store, self._name, self._num_bytes, self._at = store, name, num_bytes, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + (0, self._at, self._num_bytes)[whence]
        return self._at

    def readinto(self, buffer: Any) -> int:
        end = min(self._at + len(buffer), self._num_bytes)
        data = self._store.get_range(self._name, self._at, end) if end > self._at else b""
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)


def find_files(source: Uris, options: Mapping[str, Any] | None = None) -> list[SourceFile]:
    """Return the files of a source but hidden ones: those of a folder sorted by name, those of a list in its order.

    In a pattern, ``*`` and ``?`` stand for any characters of one name, and ``**/`` for folders at any depth.
    """
    found: list[SourceFile] = []
    for given in [source] if isinstance(source, (str, os.PathLike)) else source:
        uri = os.fspath(given)
        files = _found(uri.rstrip("/") if is_remote(uri) else str(LocalStore.from_url(uri, {}).folder), options)
        if not files:
            raise NotFoundError(f"a source must name files; {redact(uri)} names none. Check the path.")
        found += files
    twice = [redact(uri) for uri, count in Counter(f"{file.root}/{file.name}" for file in found).items() if count > 1]
    if twice:
        raise ValueError(f"a source must name each file once; it names {twice[0]} twice. Remove one of them.")
    return found


def _found(uri: str, options: Mapping[str, Any] | None) -> list[SourceFile]:
    parts = uri.split("/")
    literal = next((k for k, part in enumerate(parts) if _WILD & set(part)), len(parts))
    root = "/".join(parts[:literal]) or "/"
    options = options if is_remote(root) else None
    entries = list(open_store(root, options).list(""))
    is_match = _pattern("/".join(parts[literal:])).fullmatch
    entries = [entry for entry in entries if is_match(entry.name) and not _HIDDEN.search(entry.name)]
    if literal == len(parts) and not entries:  # one file
        root, _, name = uri.rpartition("/")
        entries = [entry for entry in open_store(root or "/", options).list(name) if entry.name == name]
    return [SourceFile(root, entry.name, entry.num_bytes, entry.version, options) for entry in entries]


def files_of(store: Store) -> tuple[list[SourceFile], list[SourceFile]]:
    """Return all files of a store but hidden ones, sorted by name; and those of the log of a Delta table."""
    entries = [entry for entry in store.list("") if entry.num_bytes or not entry.name.startswith(DELTA_LOG)]
    files = [SourceFile(store.url, entry.name, entry.num_bytes, entry.version, store=store) for entry in entries]
    shown = [file for file in files if not _HIDDEN.search(file.name)]
    return shown, [file for file in files if file.name.startswith(DELTA_LOG)]


def is_table(store: Store) -> bool:
    """Return whether a store holds a Delta table."""
    return any(True for _ in store.list(DELTA_LOG))


def _pattern(text: str) -> re.Pattern[str]:
    """A pattern as a regular expression; all names if it is empty."""
    wild = {"**/": "(.*/)?", "*": "[^/]*", "?": "[^/]"}
    found = "".join(wild.get(part) or re.escape(part) for part in re.split(r"(\*\*/|\*|\?)", text))
    return re.compile(found or ".*", re.DOTALL)  # a name may hold a line end


def check_unchanged(files: Sequence[SourceFile]) -> None:
    """Raise FormatError if a file of this machine changed since it was listed; those of a table never change."""
    for file in files:
        if file.store is not None:
            continue
        known = file.path.stat() if file.path is not None and file.path.exists() else None
        changed = known is None or (known.st_size, str(known.st_mtime_ns)) != (file.num_bytes, file.stamp)
        if file.path is not None and changed:
            raise FormatError(
                f"{file.uri} was modified or removed during the conversion. Nothing was published. Convert again once "
                "the file stays as it is."
            )
