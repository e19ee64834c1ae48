"""All other schemes of fsspec: ``sftp://``, ``oci://``, ``hdfs://``, ``smb://`` and more."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any, BinaryIO

from lightning_stream.errors import (
    AccessError,
    MissingExtraError,
    NotFoundError,
    StoreError,
    UnavailableError,
    needs,
    redact,
    summarize,
)

from .base import BaseStore, ObjectEntry
from .transfer import ObjectStream, Options, PerProcess, file_chunks, is_named, links_of

_BLOCK_BYTES = 4 << 20
# What file systems call the version of a file; most have one of these.
_VERSIONS = ("ETag", "etag", "version_id", "mtime", "last_modified", "LastModified", "created")
_PACKAGES = {"sftp": "paramiko", "ssh": "paramiko", "oci": "ocifs", "smb": "smbprotocol", "hdfs": "pyarrow"}
_LOGIN_ERRORS = {"AuthenticationException", "BadHostKeyException", "PasswordRequiredException", "NotAuthenticated"}
# Readers see a file while it is written, so a draft is renamed.
_WITH_USERS = {"sftp", "ssh", "ftp", "ftps", "smb", "hdfs", "webhdfs", "http", "https", "webdav", "dav"}
_IN_PLACE = {"sftp", "ssh", "ftp", "smb", "hdfs", "webhdfs"}


class FsspecStore(BaseStore):
    """Files of any file system of fsspec, which gets the options; only sftp gets the timeout."""

    def __init__(self, url: str, options: Options | None = None, timeout_s: float = 60.0) -> None:
        self._url = url.rstrip("/")
        self._options = dict(options or {})
        self._scheme = url.partition("://")[0]
        self._timeout_s = timeout_s
        # A name before the @ is a user's, or (oci) the bucket's.
        has_users = any(link.partition("://")[0] in _WITH_USERS for link in links_of(self._url))
        self.url = redact(self._url) if has_users else self._url
        # One connection per thread: not every file system (sftp) can share one between threads.
        self._of_thread = PerProcess(threading.local)

    @classmethod
    def from_url(cls, url: str, options: Options) -> BaseStore:
        return cls(url, {key: value for key, value in options.items() if key != "timeout_s"}, options["timeout_s"])

    def _open(self, name: str, begin: int, end: int | None) -> ObjectStream:
        system, path = self._at(name)
        tag = _version_of(system.info(path))  # before it is opened: it may be replaced in between
        file = system.open(path, "rb", block_size=_BLOCK_BYTES)
        file.seek(0, 2)
        size = int(file.tell())
        file.seek(min(begin, size))
        num_bytes = max(0, (size if end is None else min(end, size)) - begin)
        return ObjectStream(file_chunks(file, num_bytes, _BLOCK_BYTES), num_bytes, None, file.close, tag=tag)

    def _put(self, name: str, file: BinaryIO, num_bytes: int, if_absent: bool, if_version: str | None) -> None:  # noqa: ARG002
        system, path = self._at(name)
        parent, _, last = path.rpartition("/")
        draft = f"{parent}/.draft-{uuid.uuid4().hex}-{last}" if self._scheme in _IN_PLACE else path
        system.makedirs(parent, exist_ok=True)
        try:
            with system.open(draft, "wb") as copy:
                for chunk in file_chunks(file, num_bytes, _BLOCK_BYTES):
                    copy.write(chunk)
        except BaseException:  # the file was closed with a part of the bytes
            with suppress(Exception):
                system.rm_file(draft)
            raise
        if draft != path:
            system.mv(draft, path)

    def _list(self, prefix: str) -> Iterator[ObjectEntry]:
        system, root = self._at(None)
        below = prefix.rpartition("/")[0]
        try:
            files: dict[str, Any] = system.find(f"{root}/{below}" if below else root, detail=True)
        except FileNotFoundError:
            return
        root = root.rstrip("/")
        for path, details in files.items():
            name = path[len(root) + 1 :] if root else path  # empty if the root is a file
            if name and name.startswith(prefix) and ".draft-" not in name:
                yield ObjectEntry(name, details["size"], _version_of(details))

    def _delete(self, name: str) -> None:
        system, path = self._at(name)
        system.rm_file(path)

    def _at(self, name: str | None) -> tuple[Any, str]:
        mine = self._of_thread()
        keys = None if self.credentials is None else self.credentials.get().values
        if not getattr(mine, "connected", None) or mine.keys != keys:
            mine.connected = self._connect(keys or {})
            mine.keys = keys
        system, root = mine.connected
        return system, root if name is None else f"{root.rstrip('/')}/{name}"

    def _connect(self, keys: Mapping[str, Any]) -> tuple[Any, str]:
        extra = "sftp" if _PACKAGES.get(self._scheme) == "paramiko" else "fsspec"
        with needs("fsspec", extra, f"using {self.url}"):
            import fsspec
        try:
            # No shared instances: neither two stores nor a forked child may use the same connection.
            system, path = fsspec.core.url_to_fs(self._url, skip_instance_cache=True, **self._options, **keys)
        except ImportError as error:
            package = _PACKAGES.get(self._scheme, "its fsspec package")
            raise MissingExtraError(
                f"{self._scheme}:// needs {package} beside fsspec ({summarize(error)}). Install it with:  "
                f"pip install {_PACKAGES.get(self._scheme, '...')}"
            ) from error
        except FileNotFoundError as error:
            if self._scheme not in _IN_PLACE:  # a part of a chain is absent
                raise
            raise AccessError(f"{self.url}: no login ({summarize(error)}). Check the file of the key.") from None
        if self._scheme in ("sftp", "ssh"):
            system.ftp.get_channel().settimeout(self._timeout_s)
        return system, path

    def _special_error(self, error: Exception, where: str) -> Exception | None:
        reason = summarize(error)
        if isinstance(error, (FileNotFoundError, NotADirectoryError, IsADirectoryError)):
            return NotFoundError(f"{where}: no such file. Check the URL.")
        is_refused = isinstance(error, PermissionError) or "No authentication methods" in reason
        is_cut = "transport shut down" in reason  # during the login, so that is none of its errors
        if not is_cut and (is_refused or is_named(error, _LOGIN_ERRORS)):
            return AccessError(f"{where}: refused ({reason}). Check user, key or password, and their rights.")
        if isinstance(error, (OSError, EOFError)) or is_named(error, ("SSHException",)):
            self._of_thread().connected = None  # the next attempt makes a new connection
            return UnavailableError(f"{where}: {reason}. Check the network and the server.")
        if isinstance(error, ValueError) and "Port could not be cast" in reason:  # it shows what follows the colon
            return ValueError(f"{where}: a port is a number, and a password in a URL has %2F for each slash.")
        if isinstance(error, ValueError) and "Protocol not known" in str(error):
            return ValueError(f"no store is known for {self._scheme}:// ({reason})")
        return StoreError(f"{where}: {reason}. Check the URL and the options.")


def _version_of(details: Mapping[str, Any]) -> str:
    return str(next((details[key] for key in _VERSIONS if details.get(key)), ""))


def known_schemes() -> list[str]:
    """Return the schemes of fsspec, with those of installed plugins; none if fsspec is not installed."""
    try:
        import fsspec
    except ImportError:
        return []
    known: list[str] = fsspec.available_protocols()
    return known
