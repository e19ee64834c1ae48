"""Databricks: volumes by the Files API, other ``dbfs:/`` paths by the older DBFS API."""

from __future__ import annotations

import base64
import os
import urllib.parse
import uuid
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, BinaryIO

from lightning_stream.errors import AccessError, NotFoundError, needs, redact, summarize

from .base import BaseStore, ObjectEntry, PastTheEndError, StoreTraits
from .transfer import (
    CHUNK_BYTES,
    ObjectStream,
    PerProcess,
    header_stream,
    range_header,
    read_options,
    refuse_query,
    slice_stream,
)

_DRAFT = ".draft-"
_DBFS_READ_BYTES = 1 << 20  # the API's own limit
_STATUS = {
    **dict.fromkeys(("TooManyRequests", "InternalError", "TemporarilyUnavailable", "DeadlineExceeded"), 503),
    "NotFound": 404, "AlreadyExists": 412, "Unauthenticated": 401, "PermissionDenied": 403, "DatabricksError": 400,
}  # fmt: skip


@dataclass(frozen=True)
class DatabricksOptions:
    """Options for ``dbfs:/``; the others come from ``DATABRICKS_*`` or ``~/.databrickscfg``.

    Attributes:
        host, token: The workspace's address, and a token; else ``DATABRICKS_HOST`` and ``DATABRICKS_TOKEN``.
        profile: A profile of ``~/.databrickscfg``; else ``DATABRICKS_CONFIG_PROFILE``.
        timeout_s: Longest silence on a connection.
    """

    host: str | None = field(default=None, repr=False)
    token: str | None = field(default=None, repr=False)
    profile: str | None = None
    timeout_s: float = 60.0


class DatabricksStore(BaseStore):
    """Files of a workspace below an absolute path: ``/Volumes/catalog/schema/volume/folder``, or a path of DBFS."""

    traits = StoreTraits(exclusive_put=True)  # both APIs refuse to create, or to move to, a file that exists
    access_remedy = (
        "Set both DATABRICKS_HOST (https://....cloud.databricks.com) and DATABRICKS_TOKEN, on the worker nodes too: "
        "the processes that TorchDistributor or Spark start there do not inherit the driver's environment or notebook "
        "login. The user needs READ VOLUME there."
    )
    missing = "no such file or volume. Check the path."
    client_errors = frozenset({"DatabricksError"})

    def __init__(self, path: str, options: DatabricksOptions | None = None) -> None:
        self._root = "/" + path.strip("/")
        self._volume = self._root.startswith("/Volumes/")
        self._options = options or DatabricksOptions()
        self.url = f"dbfs:{self._root}"
        self._workspace = PerProcess(self._connect)

    @classmethod
    def from_url(cls, url: str, options: Mapping[str, Any]) -> BaseStore:
        refuse_query(url)
        return cls(url[len("dbfs:") :], read_options(DatabricksOptions, options, "dbfs:/"))

    @property
    def identity(self) -> str:
        return f"{self.url}@{redact(self._options.host or os.environ.get('DATABRICKS_HOST', ''))}"

    def _open(self, name: str, begin: int, end: int | None) -> ObjectStream:
        path = f"{self._root}/{name}"
        if not self._volume:
            size = self._size(path)
            stop = size if end is None else min(end, size)
            return ObjectStream(self._dbfs_chunks(path, begin, stop), max(0, stop - begin))
        header = range_header(begin, end)
        try:
            found = self._workspace().api_client.do(
                "GET",
                f"/api/2.0/fs/files{urllib.parse.quote(path)}",
                headers={"Accept": "application/octet-stream", **header},
                response_headers=["content-length", "content-range", "last-modified"],
                raw=True,
            )
        except Exception as error:
            # The status of a range past the end is that of any wrong request.
            if header and self._status(error) == 400 and begin >= self._size(path):
                raise PastTheEndError(name) from None
            raise
        contents, span = found["contents"], found.get("content-range")
        length = None if header and not span else found.get("content-length")
        headers = {"Content-Length": length, "Content-Range": span}
        stream = header_stream(contents, headers, None, contents.close, tag=found.get("last-modified"))
        stream.chunks = iter(lambda: contents.read(CHUNK_BYTES), b"")
        if header and not span:
            stream.chunks = slice_stream(stream.chunks, begin, end)
        return stream

    def _put(self, name: str, file: BinaryIO, num_bytes: int, if_absent: bool, if_version: str | None) -> None:  # noqa: ARG002
        path, workspace = f"{self._root}/{name}", self._workspace()
        folder = path.rpartition("/")[0]
        if self._volume:
            workspace.files.create_directory(folder)
            workspace.files.upload(path, file, overwrite=not if_absent)
            return
        # DBFS shows a file while it grows, so it is written under another name first. A move replaces nothing, so the
        # old file is moved away first, and moved back if the move of the new one fails.
        draft, old = (f"{folder}/{_DRAFT}{uuid.uuid4().hex}" for _ in range(2))
        workspace.dbfs.upload(draft, file, overwrite=True)
        replaces = False
        with suppress(NotFoundError), self.translate_errors(name):
            if not if_absent:
                workspace.dbfs.move(path, old)
                replaces = True
        try:
            workspace.dbfs.move(draft, path)
        except Exception:
            if replaces:
                workspace.dbfs.move(old, path)
            workspace.dbfs.delete(draft)
            raise
        if replaces:
            workspace.dbfs.delete(old)

    def _list(self, prefix: str) -> Iterator[ObjectEntry]:
        below = prefix.rpartition("/")[0]
        found: list[Any] = []
        with suppress(NotFoundError), self.translate_errors(prefix):
            found = list(self._walk(f"{self._root}/{below}".rstrip("/")))
        for file in found:
            name = file.path[len(self._root) + 1 :]
            if name.startswith(prefix) and _DRAFT not in name:
                changed = getattr(file, "last_modified", None) or getattr(file, "modification_time", None)
                yield ObjectEntry(name, file.file_size, str(changed or ""))

    def _delete(self, name: str) -> None:
        api = self._workspace().files if self._volume else self._workspace().dbfs
        api.delete(f"{self._root}/{name}")

    def _size(self, path: str) -> int:
        if self._volume:
            return int(self._workspace().files.get_metadata(path).content_length)
        return int(self._workspace().dbfs.get_status(path).file_size)

    def _dbfs_chunks(self, path: str, begin: int, end: int) -> Iterator[bytes]:
        while begin < end:
            read = self._workspace().dbfs.read(path, length=min(_DBFS_READ_BYTES, end - begin), offset=begin)
            chunk = base64.b64decode(read.data or "")
            if not chunk:
                return
            begin += len(chunk)
            yield chunk

    def _walk(self, folder: str) -> Iterator[Any]:
        if not self._volume:
            yield from (found for found in self._workspace().dbfs.list(folder, recursive=True) if not found.is_dir)
            return
        for found in self._workspace().files.list_directory_contents(folder):
            yield from self._walk(found.path.rstrip("/")) if found.is_directory else (found,)

    def _connect(self) -> Any:
        with needs("databricks-sdk", "databricks", f"using {self.url}"):
            from databricks.sdk import WorkspaceClient
            from databricks.sdk.config import Config
        options = self._options
        given = {"host": options.host, "token": options.token, "profile": options.profile}
        settings: dict[str, Any] = {key: value for key, value in given.items() if value}
        # The client must not try again: RetryingStore does, and resumes.
        settings |= {"http_timeout_seconds": options.timeout_s, "retry_timeout_seconds": 1}
        return WorkspaceClient(config=Config(**settings))

    def _status(self, error: Exception) -> int:
        kinds = [kind.__name__ for kind in type(error).__mro__]
        return next((_STATUS[kind] for kind in kinds if kind in _STATUS), 0)

    def _special_error(self, error: Exception, where: str) -> Exception | None:
        if isinstance(error, ValueError) and ("auth" in str(error) or "host" in str(error)):
            return AccessError(f"{where}: no usable Databricks credentials ({summarize(error)}). {self.access_remedy}")
        if self._status(error) == 404:
            return NotFoundError(f"{where}: no such file or volume ({summarize(error)}). Check the path.")
        return None
