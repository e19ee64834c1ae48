"""A folder of this machine (or a mounted one) as a store."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from lightning_stream.errors import AccessError, NotFoundError, StoreError, UnavailableError
from lightning_stream.shared_files import publish

from .base import (
    CHUNK_BYTES,
    Body,
    BodyStore,
    ObjectEntry,
    attempt,
    check_conditions,
    check_name,
    explained_chunks,
    refused_put,
    source_file,
)
from .drafts import DRAFT, LOCK, locked_draft, name_lock, publish_new

_OF_DATABRICKS = re.compile(r"/(?:dbfs/(?=.)|(?=Volumes/.))(.+)")  # paths that Databricks mounts on its own machines


class LocalStore(BodyStore):
    """Objects as the files below a folder; ``put`` publishes by rename.

    Args:
        folder: The folder; it need not exist before the first ``put``.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder).expanduser().absolute()

    @property
    def url(self) -> str:
        """The folder's path."""
        return str(self.folder)

    def open(self, name: str, begin: int = 0, end: int | None = None) -> Body:
        """The bytes ``[begin, end)`` of a file, streamed."""
        path = self._path(name)
        file = attempt(lambda: path.open("rb", buffering=0), lambda error: self._explain(path, error))
        about = os.fstat(file.fileno())
        whole = about.st_size
        begin = min(begin, whole)
        stop = whole if end is None else min(end, whole)
        file.seek(begin)
        chunks = explained_chunks(_chunks(file, stop - begin), lambda error: self._explain(path, error))
        return Body(chunks, stop - begin, _version(about), file.close, str(path))

    def put(self, name: str, source: Path | bytes, *, if_absent: bool = False, if_version: str | None = None) -> None:
        """Copy beside the final place, then rename."""
        path = self._path(name)
        check_conditions(name, if_absent, if_version)
        attempt(lambda: self._put(path, source, if_absent, if_version), lambda error: self._explain(path, error))

    def _put(self, path: Path, source: Path | bytes, if_absent: bool, if_version: str | None) -> None:
        with locked_draft(path) as draft:
            with source_file(source) as given, draft.open("wb") as file:
                while chunk := given.read(CHUNK_BYTES):
                    file.write(chunk)
            # The kernel's own times move in steps of milliseconds: two versions could have one.
            os.utime(draft, ns=(time.time_ns(), time.time_ns()))
            if if_absent:
                publish_new(draft, path)
            elif if_version is not None:
                with name_lock(path):
                    if not path.is_file() or _version(path.stat()) != if_version:
                        raise refused_put(str(path), if_absent=False)
                    publish(draft, path)
            else:
                publish(draft, path)

    def list(self, prefix: str = "") -> Iterator[ObjectEntry]:
        """All files below the folder whose names begin with `prefix`, sorted by name."""
        for name in sorted(_walk(self.folder, "", prefix)):
            with contextlib.suppress(FileNotFoundError):
                yield ObjectEntry(name, (self.folder / name).stat().st_size)

    def delete(self, name: str) -> None:
        """Remove a file; one that is absent already is no error."""
        path = self._path(name)
        attempt(lambda: path.unlink(missing_ok=True), lambda error: self._explain(path, error))

    def exists(self, name: str) -> bool:
        """Whether there is such a file."""
        return self._path(name).is_file()

    def _path(self, name: str) -> Path:
        return self.folder / check_name(name)

    def _explain(self, path: Path, error: Exception) -> Exception | None:
        if isinstance(error, (FileNotFoundError, NotADirectoryError, IsADirectoryError)):
            lacking = "" if self.folder.is_dir() else f" (nor the folder {self.folder})"
            there = _OF_DATABRICKS.match(str(self.folder)) if lacking else None
            hint = f" Outside Databricks, that is dbfs:/{there[1]}." if there else ""
            return NotFoundError(f"no such file: {path}{lacking}. Check the path.{hint}")
        if isinstance(error, PermissionError):
            return AccessError(
                f"no right to use {path} as user {os.getuid()}. Check the owner and mode of its folders."
            )
        if isinstance(error, OSError):
            kind = UnavailableError if error.errno in (errno.EIO, errno.ESTALE, errno.ETIMEDOUT) else StoreError
            return kind(f"{path}: {error.strerror}. Check the disk or mount it is on.")
        return None


def _version(about: os.stat_result) -> str:
    return f"{about.st_mtime_ns:x}-{about.st_size:x}"


def _chunks(file: BinaryIO, num_bytes: int) -> Iterator[bytes]:
    while num_bytes > 0 and (chunk := file.read(min(CHUNK_BYTES, num_bytes))):
        num_bytes -= len(chunk)
        yield chunk


def _walk(folder: Path, above: str, prefix: str) -> Iterator[str]:
    """Names of all files, without entering folders that the prefix rules out, nor our control folders and drafts."""
    try:
        entries = list(os.scandir(folder))
    except (FileNotFoundError, NotADirectoryError):
        return
    for entry in entries:
        name = above + entry.name
        if entry.is_dir():
            branch = f"{name}/"
            if (branch.startswith(prefix) or prefix.startswith(branch)) and entry.name != ".lightning_stream":
                yield from _walk(Path(entry.path), branch, prefix)
        elif name.startswith(prefix) and not entry.name.startswith((DRAFT, LOCK)):
            yield name
