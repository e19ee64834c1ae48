"""Everything else that fsspec knows: ``sftp://``, ``oci://``, ``hdfs://``, ``smb://`` and more."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lightning_stream.errors import (
    AccessError,
    MissingExtraError,
    NotFoundError,
    StoreError,
    UnavailableError,
    missing_extra,
    redact,
    summarize,
)

from .base import (
    Body,
    BodyStore,
    ObjectEntry,
    PerProcess,
    attempt,
    check_name,
    explained_chunks,
    relative,
    source_file,
)

_BLOCK_BYTES = 4 << 20
_PACKAGES = {"sftp": "paramiko", "ssh": "paramiko", "oci": "ocifs", "smb": "smbprotocol", "hdfs": "pyarrow"}
_FINAL = {"AuthenticationException", "BadHostKeyException", "PasswordRequiredException", "NotAuthenticated"}
_IN_PLACE = {"sftp", "ssh", "ftp", "smb", "hdfs", "webhdfs"}  # a file being written is seen: write a draft, rename it


class FsspecStore(BodyStore):
    """Files of any file system of fsspec.

    Args:
        url: The URL, as fsspec takes it.
        options: Handed to the file system; what secrets they hold is not shown.
        timeout_s: Longest silence on a connection, where the file system has such a setting that we know.
    """

    def __init__(self, url: str, options: Mapping[str, Any] | None = None, timeout_s: float = 60.0) -> None:
        self._given = url.rstrip("/")
        self._options = dict(options or {})
        self._scheme = url.partition("://")[0]
        self._timeout_s = timeout_s
        # One connection per thread: not every file system (sftp's) survives two threads on one.
        self._of_thread = PerProcess(threading.local)

    @property
    def url(self) -> str:
        """The URL, without user and password."""
        return redact(self._given)

    def open(self, name: str, begin: int = 0, end: int | None = None) -> Body:
        """The bytes ``[begin, end)`` of a file, streamed."""

        def explain(error: Exception) -> Exception | None:
            return self._explain(name, error)

        def start() -> tuple[Any, int]:
            system, path = self._at(name)
            file = system.open(path, "rb", block_size=_BLOCK_BYTES)
            file.seek(0, 2)
            size = int(file.tell())
            file.seek(min(begin, size))
            return file, size

        file, size = attempt(start, explain)
        stop = size if end is None else min(end, size)
        num_bytes = max(0, stop - begin)
        return Body(
            explained_chunks(_read(file, num_bytes), explain), num_bytes, None, file.close, f"{self.url}/{name}"
        )

    def put(self, name: str, source: Path | bytes, *, if_absent: bool = False, if_version: str | None = None) -> None:
        """Write a file; where a half-written one would be seen, under another name first."""

        def write() -> None:
            system, path = self._at(name)
            parent, _, last = path.rpartition("/")
            draft = f"{parent}/.draft-{uuid.uuid4().hex}-{last}" if self._scheme in _IN_PLACE else path
            system.makedirs(parent, exist_ok=True)
            with source_file(source) as given, system.open(draft, "wb") as file:
                while chunk := given.read(_BLOCK_BYTES):
                    file.write(chunk)
            if draft != path:
                system.mv(draft, path)

        with self._claimed(name, if_absent, if_version):
            attempt(write, lambda error: self._explain(name, error))

    def list(self, prefix: str = "") -> Iterator[ObjectEntry]:
        """All files whose names begin with `prefix`, sorted by name."""

        def find() -> dict[str, Any]:
            system, root = self._at(None)
            below = prefix.rpartition("/")[0]
            found: dict[str, Any] = system.find(f"{root}/{below}" if below else root, detail=True)
            return {relative(path, root.rstrip("/")): about for path, about in found.items()}

        try:
            found = attempt(find, lambda error: self._explain(prefix, error))
        except NotFoundError:
            return
        for name in sorted(found):
            if name.startswith(prefix) and ".draft-" not in name:
                yield ObjectEntry(name, found[name]["size"])

    def delete(self, name: str) -> None:
        """Remove a file."""

        def remove() -> None:
            system, path = self._at(name)
            system.rm_file(path)

        try:
            attempt(remove, lambda error: self._explain(name, error))
        except NotFoundError:
            return

    def exists(self, name: str) -> bool:
        """Whether there is such a file."""

        def look() -> bool:
            system, path = self._at(name)
            return bool(system.isfile(path))

        return attempt(look, lambda error: self._explain(name, error))

    def _at(self, name: str | None) -> tuple[Any, str]:
        mine = self._of_thread()
        if not getattr(mine, "connected", None):
            mine.connected = self._connect()
        system, root = mine.connected
        return system, root if name is None else f"{root.rstrip('/')}/{check_name(name)}"

    def _connect(self) -> tuple[Any, str]:
        try:
            import fsspec
        except ImportError as error:
            raise missing_extra("fsspec", "fsspec", f"using {self.url}") from error
        try:
            # No shared instances: neither two stores nor a fork's child may meet on one connection.
            system, path = fsspec.core.url_to_fs(self._given, skip_instance_cache=True, **self._options)
        except ImportError as error:
            package = _PACKAGES.get(self._scheme, "its fsspec package")
            raise MissingExtraError(
                f"{self._scheme}:// needs {package} beside fsspec ({summarize(error)}). Install it with:  "
                f"pip install {_PACKAGES.get(self._scheme, '...')}"
            ) from error
        if self._scheme in ("sftp", "ssh"):
            system.ftp.get_channel().settimeout(self._timeout_s)
        return system, path

    def _explain(self, name: str, error: Exception) -> Exception | None:
        where = f"{self.url}/{name}"
        if isinstance(error, (StoreError, MissingExtraError)):
            return None
        if isinstance(error, (FileNotFoundError, NotADirectoryError, IsADirectoryError)):
            return NotFoundError(f"{where}: no such file. Check the URL.")
        if isinstance(error, PermissionError) or {kind.__name__ for kind in type(error).__mro__} & _FINAL:
            return AccessError(f"{where}: refused ({summarize(error)}). Check user, key or password, and their rights.")
        if isinstance(error, (OSError, EOFError, TimeoutError)) or type(error).__name__ == "SSHException":
            self._of_thread().connected = None  # the next attempt connects anew
            return UnavailableError(f"{where}: {summarize(error)}. Look at the network and the server.")
        if isinstance(error, ValueError) and "Protocol not known" in str(error):
            return ValueError(f"no store is known for {self._scheme}:// ({summarize(error)})")
        return StoreError(f"{where}: {summarize(error)}. Check the URL and the options.")


def protocols() -> list[str]:
    """The schemes that fsspec knows here, those of installed plugins included; none without it."""
    try:
        import fsspec
    except ImportError:
        return []
    known: list[str] = fsspec.available_protocols()
    return known


def _read(file: Any, num_bytes: int) -> Iterator[bytes]:
    while num_bytes > 0 and (chunk := file.read(min(_BLOCK_BYTES, num_bytes))):
        num_bytes -= len(chunk)
        yield chunk
