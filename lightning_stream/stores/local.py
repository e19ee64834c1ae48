"""A local (or mounted) folder as a store, and the drafts by which a file there is whole or absent."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from time import time_ns
from typing import BinaryIO
from zlib import crc32

from lightning_stream.errors import AccessError, NotFoundError, StoreError, UnavailableError, redact
from lightning_stream.shared_files import DRAFT, FULL, FileLock, Modes, locked_draft, publish, sync

from .base import BaseStore, ObjectEntry, PreconditionError, StoreTraits, already_exists
from .transfer import ObjectStream, Options, file_chunks

LOCK = ".lock-"
_OPEN_TO_ALL = Modes(0o666, 0o777)  # a lock's file: all who may write into the folder may lock
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)
_VOLUME = re.compile(r"(?:/dbfs)?(/Volumes/.+)")  # paths that Databricks mounts on its own machines


class LocalStore(BaseStore):
    """Files below a folder, which need not exist before the first `put`; that publishes by rename."""

    traits = StoreTraits(ranges=True, sorted_listing=True, exclusive_put=True, conditional_put=True)

    def __init__(self, folder: str | Path) -> None:
        path = Path(folder).expanduser().absolute()
        self.folder = path.resolve() if ".." in path.parts else path
        self.url = str(self.folder)
        if self.url != self.url.encode(errors="replace").decode():
            raise ValueError(f"names of folders must be UTF-8; rename {self.url!r}.")

    @classmethod
    def from_url(cls, url: str, options: Options) -> LocalStore:
        if options:
            raise ValueError(f"a local folder has no options; got {', '.join(sorted(options))}")
        if not url:
            raise ValueError("a dataset is at a path or a URL; got an empty text. Pass one of them.")
        if not url.lower().startswith("file://"):
            return cls(url)
        host, slash, path = url[len("file://") :].partition("/")
        if host not in ("", "localhost") or not slash:
            raise ValueError(
                f"a file URL names a folder of this machine: file:///FOLDER; got {redact(url)!r}, which "
                f"names the host {host.rpartition('@')[2]!r}. Use a path, or the URL of that host's store."
            )
        return cls(urllib.parse.unquote(slash + path))

    @property
    def identity(self) -> str:
        return os.path.realpath(self.folder)  # the same for every path to the folder

    def _open(self, name: str, begin: int, end: int | None) -> ObjectStream:
        file = (self.folder / name).open("rb", buffering=0)
        status = os.fstat(file.fileno())
        begin = min(begin, status.st_size)
        stop = status.st_size if end is None else min(end, status.st_size)
        file.seek(begin)
        return ObjectStream(file_chunks(file, stop - begin), max(0, stop - begin), _version(status), file.close)

    def _put(self, name: str, file: BinaryIO, num_bytes: int, if_absent: bool, if_version: str | None) -> None:
        path = self.folder / name
        with draft_beside(path) as draft:
            with draft.open("wb") as copy:
                for chunk in file_chunks(file, num_bytes):
                    copy.write(chunk)
            # The kernel's clock for files has steps of milliseconds: two versions could have the same time.
            os.utime(draft, ns=(time_ns(), time_ns()))
            if if_absent:
                publish_new(draft, path)
                return
            with name_lock(path) if if_version is not None else contextlib.nullcontext():
                if if_version is not None and _version(path.stat()) != if_version:
                    raise PreconditionError(name)
                publish(draft, path)

    def _list(self, prefix: str) -> Iterator[ObjectEntry]:
        for name in sorted(_walk(self.folder, "", prefix)):
            path = self.folder / name
            try:
                known = path.stat()
            except FileNotFoundError:
                if path.is_symlink():  # to a file that is gone: it is no empty place
                    yield ObjectEntry(name, 0)
                continue
            yield ObjectEntry(name, known.st_size, str(known.st_mtime_ns), change_mark(known))

    def _delete(self, name: str) -> None:
        (self.folder / name).unlink(missing_ok=True)

    def _special_error(self, error: Exception, where: str) -> Exception | None:
        if isinstance(error, (FileNotFoundError, NotADirectoryError, IsADirectoryError)):
            lacking = "" if self.folder.is_dir() else f" (nor the folder {self.folder})"
            there = _VOLUME.match(str(self.folder)) if lacking else None
            hint = f" Outside Databricks, that is dbfs:{there[1]}." if there else ""
            return NotFoundError(f"no such file: {where}{lacking}. Check the path.{hint}")
        if isinstance(error, PermissionError):
            return AccessError(f"user {os.getuid()} has no right to use {where}. Check the mode of its folder.")
        if isinstance(error, OSError):
            kind = UnavailableError if error.errno in (errno.EIO, errno.ESTALE, errno.ETIMEDOUT) else StoreError
            remedy = "Free some space" if error.errno in FULL else "Check the disk or mount it is on"
            return kind(f"{where}: {error.strerror}. {remedy}.")
        return None


def _version(status: os.stat_result) -> str:
    # Without the inode: mounts in user space (Databricks volumes, gcsfuse) may give a file a new one.
    return f"{status.st_mtime_ns:x}-{status.st_size:x}"


def change_mark(status: os.stat_result) -> str:
    """The time of a file's last change of any kind, which no program can set, on this machine.

    Other machines may see another time of the same file, so theirs say nothing: see `is_other_mark`. The inode says
    nothing either: mounts in user space may give a file a new one.
    """
    return f"{crc32(os.uname().nodename.encode()):08x}.{status.st_ctime_ns:x}"


def is_other_mark(mark: str, now: str) -> bool:
    """Return whether two marks of one machine differ: then a file is another one, although size and time are equal."""
    return mark != now and mark.partition(".")[0] == now.partition(".")[0]


def _walk(folder: Path, above: str, prefix: str) -> Iterator[str]:
    """Yield the names of all files with the prefix, except drafts, locks and our control folders."""
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


@contextlib.contextmanager
def draft_beside(final: Path) -> Iterator[Path]:
    """Yield an empty draft beside `final`, see `locked_draft`; its folder is made."""
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise StoreError(f"{final.parent} must be a folder; it is a file, or below one. Use another folder.") from None
    with locked_draft(final) as draft:
        yield draft


def publish_new(draft: Path, final: Path) -> None:
    """Give a finished draft its final name; AlreadyExistsError if there is a file of that name."""
    sync(draft)
    try:
        os.link(draft, final)
    except FileExistsError as error:
        raise already_exists(final) from error
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        with name_lock(final):
            if final.exists():
                raise already_exists(final) from None
            publish(draft, final)
        return
    sync(final.parent)


def name_lock(final: Path) -> FileLock:
    """Return the lock for comparing and replacing a file of this name."""
    return FileLock(final.with_name(f"{LOCK}{final.name}"), modes=_OPEN_TO_ALL)
