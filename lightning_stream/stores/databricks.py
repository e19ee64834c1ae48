"""Databricks: volumes by the Files API, other ``dbfs:/`` paths by the older DBFS API."""

from __future__ import annotations

import base64
import os
import urllib.parse
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightning_stream.errors import AccessError, NotFoundError, StoreError, UnavailableError, missing_extra, summarize

from .base import (
    CHUNK_BYTES,
    Body,
    BodyStore,
    ObjectEntry,
    PerProcess,
    attempt,
    check_name,
    cut,
    explained_chunks,
    range_header,
    source_file,
)

_REMEDY = (
    "Set both DATABRICKS_HOST (https://....cloud.databricks.com) and DATABRICKS_TOKEN, on the worker nodes too: what "
    "TorchDistributor or spark starts there does not inherit the driver's environment or notebook login."
)
_DRAFT = ".draft-"
_DBFS_READ_BYTES = 1 << 20  # the API's own limit


@dataclass(frozen=True)
class DatabricksOptions:
    """Options for ``dbfs:/``; what is not given comes from ``DATABRICKS_*`` or ``~/.databrickscfg``.

    Attributes:
        host: The workspace's address; else ``DATABRICKS_HOST``.
        token: Else ``DATABRICKS_TOKEN``.
        profile: One of ``~/.databrickscfg``; else ``DATABRICKS_CONFIG_PROFILE``.
        timeout_s: Longest silence on a connection.
    """

    host: str | None = None
    token: str | None = field(default=None, repr=False)
    profile: str | None = None
    timeout_s: float = 60.0


class DatabricksStore(BodyStore):
    """Files of a workspace below a path.

    Args:
        path: Absolute, e.g. ``/Volumes/catalog/schema/volume/folder``; others are DBFS paths.
        options: See :class:`DatabricksOptions`.
    """

    def __init__(self, path: str, options: DatabricksOptions | None = None) -> None:
        self._root = "/" + path.strip("/")
        self._volume = self._root.startswith("/Volumes/")
        self._options = options or DatabricksOptions()
        self._workspace = PerProcess(self._connect)

    @property
    def url(self) -> str:
        """The ``dbfs:/`` form."""
        return f"dbfs:{self._root}"

    @property
    def identity(self) -> str:
        """The URL in its workspace."""
        return f"{self.url}@{self._options.host or os.environ.get('DATABRICKS_HOST', '')}"

    def open(self, name: str, begin: int = 0, end: int | None = None) -> Body:
        """The bytes ``[begin, end)`` of a file, streamed."""
        path = self._path(name)

        def explain(error: Exception) -> Exception | None:
            return self._explain(name, error)

        try:
            return attempt(lambda: self._open(path, begin, end, name), explain)
        except _RefusedError:
            # A range past the end is refused like any wrong request.
            if (begin or end is not None) and begin >= attempt(lambda: self._size(path), explain):
                return Body(iter(()), 0, where=f"{self.url}/{name}")
            raise

    def put(self, name: str, source: Path | bytes, *, if_absent: bool = False, if_version: str | None = None) -> None:
        """One upload; folders above are made."""
        path = self._path(name)

        def upload() -> None:
            workspace = self._workspace()
            with source_file(source) as file:
                if self._volume:
                    workspace.files.create_directory(path.rpartition("/")[0])
                    workspace.files.upload(path, file, overwrite=True)
                    return
                # Block by block, and seen while it grows: so under another name first.
                draft = f"{path.rpartition('/')[0]}/{_DRAFT}{uuid.uuid4().hex}"
                workspace.dbfs.upload(draft, file, overwrite=True)
                workspace.dbfs.delete(path)
                workspace.dbfs.move(draft, path)

        with self._claimed(name, if_absent, if_version):
            attempt(upload, lambda error: self._explain(name, error))

    def list(self, prefix: str = "") -> Iterator[ObjectEntry]:
        """All files whose names begin with `prefix`, sorted by name."""
        below = prefix.rpartition("/")[0]
        start = f"{self._root}/{below}".rstrip("/")
        try:
            found = attempt(lambda: list(self._walk(start)), lambda error: self._explain(prefix, error))
        except NotFoundError:
            return
        entries = (ObjectEntry(path[len(self._root) + 1 :], size) for path, size in found if _DRAFT not in path)
        yield from sorted((entry for entry in entries if entry.name.startswith(prefix)), key=lambda entry: entry.name)

    def delete(self, name: str) -> None:
        """Remove a file."""
        path = self._path(name)

        def remove() -> None:
            api = self._workspace().files if self._volume else self._workspace().dbfs
            api.delete(path)

        try:
            attempt(remove, lambda error: self._explain(name, error))
        except NotFoundError:
            return

    def exists(self, name: str) -> bool:
        """Whether there is such a file."""
        path = self._path(name)
        try:
            attempt(lambda: self._size(path), lambda error: self._explain(name, error))
        except NotFoundError:
            return False
        return True

    def _path(self, name: str) -> str:
        return f"{self._root}/{check_name(name)}"

    def _size(self, path: str) -> int:
        if self._volume:
            return int(self._workspace().files.get_metadata(path).content_length)
        return int(self._workspace().dbfs.get_status(path).file_size)

    def _open(self, path: str, begin: int, end: int | None, name: str) -> Body:
        def explain(error: Exception) -> Exception | None:
            return self._explain(name, error)

        where = f"{self.url}/{name}"
        if not self._volume:
            size = self._size(path)
            stop = size if end is None else min(end, size)
            return Body(
                explained_chunks(self._dbfs_chunks(path, begin, stop), explain), max(0, stop - begin), where=where
            )
        header = range_header(begin, end)
        found = self._workspace().api_client.do(
            "GET",
            f"/api/2.0/fs/files{urllib.parse.quote(path)}",
            headers={"Accept": "application/octet-stream"} | ({"Range": header} if header else {}),
            response_headers=["content-length", "content-range", "last-modified"],
            raw=True,
        )
        contents = found["contents"]
        length = found.get("content-length")
        num_bytes = int(length) if length else None
        chunks = explained_chunks(iter(lambda: contents.read(CHUNK_BYTES), b""), explain)
        if header and not found.get("content-range"):
            chunks, num_bytes = cut(chunks, begin, end), None
        return Body(chunks, num_bytes, None, contents.close, where)

    def _dbfs_chunks(self, path: str, begin: int, end: int) -> Iterator[bytes]:
        while begin < end:
            read = self._workspace().dbfs.read(path, length=min(_DBFS_READ_BYTES, end - begin), offset=begin)
            chunk = base64.b64decode(read.data or "")
            if not chunk:
                return
            begin += len(chunk)
            yield chunk

    def _walk(self, folder: str) -> Iterator[tuple[str, int]]:
        if self._volume:
            for found in self._workspace().files.list_directory_contents(folder):
                if found.is_directory:
                    yield from self._walk(found.path.rstrip("/"))
                else:
                    yield found.path, found.file_size
        else:
            for found in self._workspace().dbfs.list(folder, recursive=True):
                if not found.is_dir:
                    yield found.path, found.file_size

    def _connect(self) -> Any:
        try:
            from databricks.sdk import WorkspaceClient
            from databricks.sdk.config import Config
        except ImportError as error:
            raise missing_extra("databricks-sdk", "databricks", f"using {self.url}") from error
        options = self._options
        given = {"host": options.host, "token": options.token, "profile": options.profile}
        settings: dict[str, Any] = {key: value for key, value in given.items() if value}
        # No patience of its own: ours retry, and resume.
        settings |= {"http_timeout_seconds": options.timeout_s, "retry_timeout_seconds": 1}
        return WorkspaceClient(config=Config(**settings))

    def _explain(self, name: str, error: Exception) -> Exception | None:
        where = f"{self.url}/{name}"
        kinds = {kind.__name__ for kind in type(error).__mro__}
        if isinstance(error, ValueError) and ("auth" in str(error) or "host" in str(error)):
            return AccessError(f"{where}: no usable Databricks credentials ({summarize(error)}). {_REMEDY}")
        if kinds & {"Unauthenticated", "PermissionDenied"}:
            return AccessError(f"{where}: refused ({summarize(error)}). {_REMEDY} The user needs READ VOLUME there.")
        if "NotFound" in kinds:
            return NotFoundError(f"{where}: no such file or volume ({summarize(error)}). Check the path.")
        passing = {"TooManyRequests", "InternalError", "TemporarilyUnavailable", "DeadlineExceeded", "TimeoutError"}
        # The client's own errors are OSErrors, whatever they are about.
        if kinds & passing or (isinstance(error, OSError) and "DatabricksError" not in kinds):
            return UnavailableError(f"{where}: {summarize(error)}. The service or the network is in trouble.")
        if "DatabricksError" in kinds:
            return _RefusedError(f"{where}: {summarize(error)}. Check the path and the options.")
        return None


class _RefusedError(StoreError):
    """A request that the service calls wrong."""
