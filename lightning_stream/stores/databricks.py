"""Databricks: the login, and files of volumes by the Files API."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO
from urllib.parse import quote

from lightning_stream.errors import needs, redact

from .base import ObjectEntry, StoreTraits
from .http import HttpDialect, Request, with_query
from .transfer import PerProcess, shared

_FILES = "/api/2.0/fs/files"
_FOLDERS = "/api/2.0/fs/directories"


@dataclass(frozen=True, repr=False)  # some of them are secrets
class DatabricksOptions:
    """Options of a workspace; the others come from ``DATABRICKS_*`` or ``~/.databrickscfg``.

    Attributes:
        host, token: The workspace's address, and a token; else ``DATABRICKS_HOST`` and ``DATABRICKS_TOKEN``.
        profile: A profile of ``~/.databrickscfg``; else ``DATABRICKS_CONFIG_PROFILE``.
        timeout_s: Longest silence on a connection.
    """

    host: str | None = None
    token: str | None = None
    profile: str | None = None
    timeout_s: float = 60.0


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
    key_names = frozenset({"token"})
    largest_put = 5 << 30

    def __init__(self, path: str, options: DatabricksOptions | None = None) -> None:
        self._root = "/" + path.strip("/")
        self._options = options or DatabricksOptions()
        self.url = f"dbfs:{self._root}"
        self._workspace = PerProcess(self._log_in)

    @property
    def identity(self) -> str:
        return f"{self.url}@{redact(self._options.host or os.environ.get('DATABRICKS_HOST', ''))}"

    def _address(self, name: str) -> str:
        return self._call(_FILES, f"{self._root}/{name}")

    def _call(self, method: str, path: str) -> str:
        return f"{self._workspace()[0]}{method}{quote(path)}"

    def _sign(self, request: Request) -> None:
        _, authorisation = self._workspace()
        request.headers.update(authorisation())

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
            if (answer := self._if_there("GET", page_address)) is None:
                return
            page = self._parsed(answer, json.loads)
            for entry in page.get("contents", ()):
                if entry.get("is_directory"):
                    yield from self._walk(entry["path"].rstrip("/"))
                else:
                    yield entry
            if not (token := page.get("next_page_token")):
                return
            page_address = with_query(address, {"page_token": token})

    def _connect(self) -> tuple[str, Callable[[], dict[str, str]]]:
        """Return the workspace's address, and what makes the header that authorises a request."""
        options = self._options
        host = options.host or os.environ.get("DATABRICKS_HOST")
        token = options.token or (None if options.profile else os.environ.get("DATABRICKS_TOKEN"))
        if (keys := self.credentials) is not None and host:
            return _complete(host), lambda: {"Authorization": f"Bearer {keys.get().values['token']}"}
        if host and token:  # the import of the SDK takes a second
            return _complete(host), lambda: {"Authorization": f"Bearer {token}"}
        with needs("databricks-sdk", "databricks", f"using {self.url}"):
            from databricks.sdk.config import Config
        settings = {"host": options.host, "token": options.token, "profile": options.profile}
        wanted = {key: value for key, value in settings.items() if value}
        config = shared(lambda: Config(**wanted), "databricks", *wanted.items())
        return _complete(config.host or ""), config.authenticate


def _complete(host: str) -> str:
    host = host.partition("?")[0].rstrip("/")  # of a workspace's page, which a browser shows with ?o=...
    return host if "://" in host else f"https://{host}"
