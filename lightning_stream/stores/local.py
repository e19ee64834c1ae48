"""A folder of this machine (or a mounted one) as a store."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import urllib.parse
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from time import time_ns
from typing import TYPE_CHECKING, Any, BinaryIO

from lightning_stream.errors import AccessError, NotFoundError, StoreError, UnavailableError
from lightning_stream.shared_files import FileLock, Modes, publish

from .base import BaseStore, ObjectEntry, StoreTraits
from .claims import PreconditionError
from .transfer import ObjectStream, file_chunks

if TYPE_CHECKING:
    from typing_extensions import Self

_DRAFT, _LOCK = ".draft-", ".lock-"
_ABANDONED_S = 7 * 24 * 3600
_ANYONE = Modes(0o666, 0o777)  # the lock's file: any user who may write into the folder may lock
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)
_OF_DATABRICKS = re.compile(r"/(?:dbfs/(?=.)|(?=Volumes/.))(.+)")  # paths that Databricks mounts on its own machines


class LocalStore(BaseStore):
    """Objects as the files below a folder; `put` publishes by rename.

    Args:
        folder: The folder; it need not exist before the first `put`.
    """

    traits = StoreTraits(ranges=True, sorted_listing=True, exclusive_put=True, conditional_put=True)

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder).expanduser().absolute()
        self.url = str(self.folder)
        self._swept: set[Path] = set()

    @classmethod
    def from_url(cls, url: str, options: Mapping[str, Any]) -> Self:
        """Make the store of a path or of ``file:///path``, in which ``%20`` is a space."""
        if options:
            raise ValueError(f"a local folder has no options; got {', '.join(sorted(options))}")
        if not url.lower().startswith("file://"):
            return cls(url)
        host, slash, path = url[len("file://") :].partition("/")
        if host not in ("", "localhost") or not slash:
            raise ValueError(
                f"a file URL names a folder of this machine: file:///FOLDER; got {url!r}, which names the host {host!r}"
            )
        return cls(urllib.parse.unquote(slash + path))

    def _open(self, name: str, begin: int, end: int | None) -> ObjectStream:
        file = (self.folder / name).open("rb", buffering=0)
        about = os.fstat(file.fileno())
        begin = min(begin, about.st_size)
        stop = about.st_size if end is None else min(end, about.st_size)
        file.seek(begin)
        return ObjectStream(file_chunks(file, stop - begin), max(0, stop - begin), _version(about), file.close)

    def _put(self, name: str, file: BinaryIO, num_bytes: int, if_absent: bool, if_version: str | None) -> None:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        self._sweep(path.parent)
        draft = path.with_name(f"{_DRAFT}{uuid.uuid4().hex}")
        try:
            with draft.open("wb") as copy:
                for chunk in file_chunks(file, num_bytes):
                    copy.write(chunk)
                if if_absent:
                    copy.flush()
                    os.fsync(copy.fileno())
            # The kernel's own clock for files moves in steps of milliseconds: two versions could have one time.
            os.utime(draft, ns=(time_ns(), time_ns()))
            if if_absent:
                _publish_new(draft, path)
            elif if_version is not None:
                with _locked(path):
                    if _version(path.stat()) != if_version:
                        raise PreconditionError(name)
                    publish(draft, path)
            else:
                publish(draft, path)
        finally:
            draft.unlink(missing_ok=True)

    def _sweep(self, folder: Path) -> None:
        """Remove drafts that killed processes left in a folder, once per folder."""
        if folder in self._swept:
            return
        self._swept.add(folder)
        for draft in folder.glob(f"{_DRAFT}*"):
            with contextlib.suppress(FileNotFoundError):
                if time_ns() - draft.stat().st_mtime_ns > _ABANDONED_S * 10**9:
                    draft.unlink()

    def _list(self, prefix: str) -> Iterator[ObjectEntry]:
        for name in sorted(_walk(self.folder, "", prefix)):
            with contextlib.suppress(FileNotFoundError):
                yield ObjectEntry(name, (self.folder / name).stat().st_size)

    def _delete(self, name: str) -> None:
        (self.folder / name).unlink(missing_ok=True)

    def _exists(self, name: str) -> bool:
        return (self.folder / name).is_file()

    def _special_error(self, error: Exception, where: str) -> Exception | None:
        if isinstance(error, (FileNotFoundError, NotADirectoryError, IsADirectoryError)):
            lacking = "" if self.folder.is_dir() else f" (nor the folder {self.folder})"
            there = _OF_DATABRICKS.match(str(self.folder)) if lacking else None
            hint = f" Outside Databricks, that is dbfs:/{there[1]}." if there else ""
            return NotFoundError(f"no such file: {where}{lacking}. Check the path.{hint}")
        if isinstance(error, PermissionError):
            return AccessError(
                f"no right to use {where} as user {os.getuid()}. Check the owner and mode of its folders."
            )
        if isinstance(error, OSError):
            kind = UnavailableError if error.errno in (errno.EIO, errno.ESTALE, errno.ETIMEDOUT) else StoreError
            return kind(f"{where}: {error.strerror}. Check the disk or mount it is on.")
        return None


def _version(about: os.stat_result) -> str:
    # Without the inode: mounts in user space (Databricks volumes, gcsfuse) give a file a new one now and then.
    return f"{about.st_mtime_ns:x}-{about.st_size:x}"


def _locked(path: Path) -> FileLock:
    return FileLock(path.with_name(f"{_LOCK}{path.name}"), modes=_ANYONE)


def _publish_new(draft: Path, path: Path) -> None:
    """Give a draft its name, which no file may have yet."""
    try:
        os.link(draft, path)
        publish(draft, draft)  # puts the folder on the disk too
    except FileExistsError:
        raise PreconditionError(str(path)) from None
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        with _locked(path):
            if path.exists():
                raise PreconditionError(str(path)) from None
            publish(draft, path)


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
        elif name.startswith(prefix) and not entry.name.startswith((_DRAFT, _LOCK)):
            yield name
