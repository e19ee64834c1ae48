"""Databricks: files of volumes by the Files API."""

from __future__ import annotations

import json
import os
import urllib.parse
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, BinaryIO

from lightning_stream.errors import StoreError, needs, redact

from .base import AnswerError, BaseStore, ObjectEntry, PastTheEndError, StoreTraits
from .http import HttpDialect, Request
from .transfer import ObjectStream, PerProcess, read_options, refuse_query

_FILES, _FOLDERS = "/api/2.0/fs/files", "/api/2.0/fs/directories"


@dataclass(frozen=True)
class DatabricksOptions:
    """Options for ``dbfs:/Volumes/``; the others come from ``DATABRICKS_*`` or ``~/.databrickscfg``.

    Attributes:
        host, token: The workspace's address, and a token; else ``DATABRICKS_HOST`` and ``DATABRICKS_TOKEN``.
        profile: A profile of ``~/.databrickscfg``; else ``DATABRICKS_CONFIG_PROFILE``.
        timeout_s: Longest silence on a connection.
    """

    host: str | None = field(default=None, repr=False)
    token: str | None = field(default=None, repr=False)
    profile: str | None = None
    timeout_s: float = 60.0


@dataclass
class _Workspace:
    """Its address, and what authorises a request to it, if that is known; else the library that logs in."""

    host: str
    token: str | None
    config: Any = None

    def authorisation(self) -> dict[str, str]:
        if self.token is not None:
            return {"Authorization": f"Bearer {self.token}"}
        headers: dict[str, str] = self.config.authenticate()
        return headers


class DatabricksStore(HttpDialect):
    """Files of a volume below an absolute path: ``/Volumes/catalog/schema/volume/folder``."""

    traits = StoreTraits(exclusive_put=True)  # the API refuses to create a file that exists
    access_remedy = (
        "Set both DATABRICKS_HOST (https://....cloud.databricks.com) and DATABRICKS_TOKEN, on the worker nodes too: "
        "the processes that TorchDistributor or Spark start there do not inherit the driver's environment or notebook "
        "login. The user needs READ VOLUME there."
    )
    missing = "no such file or volume. Check the path."
    version_header = ""

    def __init__(self, path: str, options: DatabricksOptions | None = None) -> None:
        self._root = "/" + path.strip("/")
        self._options = options or DatabricksOptions()
        self.url = f"dbfs:{self._root}"
        self._workspace = PerProcess(self._log_in)

    @classmethod
    def from_url(cls, url: str, options: Mapping[str, Any]) -> BaseStore:
        refuse_query(url)
        path = url[len("dbfs:") :]
        if not path.lstrip("/").startswith("Volumes/"):
            raise ValueError(
                f"a Databricks URL is dbfs:/Volumes/CATALOG/SCHEMA/VOLUME/FOLDER; got {redact(url)!r}. Move the files "
                "to a volume; in a workspace, DBFS is the folder /dbfs, too."
            )
        return cls(path, read_options(DatabricksOptions, options, "dbfs:/"))

    @property
    def identity(self) -> str:
        return f"{self.url}@{redact(self._options.host or os.environ.get('DATABRICKS_HOST', ''))}"

    def _address(self, name: str) -> str:
        return self._call(_FILES, f"{self._root}/{name}")

    def _call(self, method: str, path: str) -> str:
        return f"{self._workspace().host}{method}{urllib.parse.quote(path)}"

    def _sign(self, request: Request) -> None:
        request.headers.update(self._workspace().authorisation())

    def _open(self, name: str, begin: int, end: int | None) -> ObjectStream:
        try:
            return super()._open(name, begin, end)
        except AnswerError as error:
            # The status of a range past the end is that of any wrong request.
            if error.code != 400 or (begin, end) == (0, None):
                raise
        answer = self._request("HEAD", self._address(name))
        answer.read()
        if begin < int(answer.headers["Content-Length"]):
            raise StoreError(f"{self.url}/{name}: the server does not take the range {begin}-{end}.")
        raise PastTheEndError(name)

    def _put(self, name: str, file: BinaryIO, num_bytes: int, if_absent: bool, if_version: str | None) -> None:  # noqa: ARG002
        folder = f"{self._root}/{name}".rpartition("/")[0]
        self._request("PUT", self._call(_FOLDERS, folder)).read()
        overwrite = "false" if if_absent else "true"
        self._upload("PUT", f"{self._address(name)}?overwrite={overwrite}", file, num_bytes, {})

    def _list(self, prefix: str) -> Iterator[ObjectEntry]:
        below = prefix.rpartition("/")[0]
        for entry in self._walk(f"{self._root}/{below}".rstrip("/")):
            name = entry["path"][len(self._root) + 1 :]
            if name.startswith(prefix):
                yield ObjectEntry(name, entry["file_size"], str(entry.get("last_modified") or ""))

    def _walk(self, folder: str) -> Iterator[dict[str, Any]]:
        address = page_address = self._call(_FOLDERS, folder)
        while True:
            try:
                answer = self._request("GET", page_address)
            except AnswerError as error:
                if error.code != 404:
                    raise
                return
            page = self._parsed(answer, json.loads)
            for entry in page.get("contents", ()):
                if entry.get("is_directory"):
                    yield from self._walk(entry["path"].rstrip("/"))
                else:
                    yield entry
            if not (token := page.get("next_page_token")):
                return
            page_address = f"{address}?page_token={urllib.parse.quote(token)}"

    def _connect(self) -> _Workspace:
        options = self._options
        host = options.host or os.environ.get("DATABRICKS_HOST")
        token = options.token or (None if options.profile else os.environ.get("DATABRICKS_TOKEN"))
        config = None
        if not host or not token:  # its import takes a second
            with needs("databricks-sdk", "databricks", f"using {self.url}"):
                from databricks.sdk.config import Config
            given = {"host": options.host, "token": options.token, "profile": options.profile}
            config = Config(**{key: value for key, value in given.items() if value})
            host = config.host or ""
            token = None
        return _Workspace(host.rstrip("/") if "://" in host else f"https://{host}", token, config)
