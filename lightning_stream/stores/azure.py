"""Azure's blob storage, also for ``abfss://``: both are one account's containers."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightning_stream.errors import AccessError, NotFoundError, StoreError, UnavailableError, missing_extra, summarize

from .base import (
    Body,
    BodyStore,
    ObjectEntry,
    PerProcess,
    attempt,
    check_conditions,
    check_name,
    explained_chunks,
    join,
    refused_put,
    relative,
    source_file,
)

# One GET up to this size; the client holds such a piece in memory, so it is not larger.
_PIECE_BYTES = 64 << 20
_REMEDY = (
    "Set AZURE_STORAGE_ACCOUNT and AZURE_STORAGE_KEY (or AZURE_STORAGE_SAS_TOKEN, or AZURE_STORAGE_CONNECTION_STRING), "
    "or log in (`az login`, a managed identity, AZURE_CLIENT_ID with AZURE_TENANT_ID and AZURE_CLIENT_SECRET); the "
    "account needs the role Storage Blob Data Reader, or Contributor to write."
)


@dataclass(frozen=True)
class AzureOptions:
    """Options for ``azure://container/path``, ``az://`` and ``abfss://container@account.dfs.core.windows.net/path``.

    Attributes:
        account: Else in the URL, ``AZURE_STORAGE_ACCOUNT``, ``AZURE_STORAGE_ACCOUNT_NAME`` or ``AZURE_ACCOUNT_NAME``.
        account_key: Else ``AZURE_STORAGE_KEY``, ``AZURE_STORAGE_ACCOUNT_KEY`` or ``AZURE_ACCOUNT_ACCESS_KEY``.
        sas_token: Else ``AZURE_STORAGE_SAS_TOKEN``.
        connection_string: Else ``AZURE_STORAGE_CONNECTION_STRING``.
        endpoint_url: Else ``AZURE_STORAGE_ENDPOINT``, or the account's own.
        anonymous: Use no credentials.
        timeout_s: Longest silence on a connection.
    """

    account: str | None = None
    account_key: str | None = field(default=None, repr=False)
    sas_token: str | None = field(default=None, repr=False)
    connection_string: str | None = field(default=None, repr=False)
    endpoint_url: str | None = None
    anonymous: bool = False
    timeout_s: float = 60.0


class AzureStore(BodyStore):
    """Blobs of one container below a prefix.

    Args:
        container: The container.
        prefix: The folder in it; may be empty.
        options: See :class:`AzureOptions`.
        shown: The URL as the user wrote it.
    """

    def __init__(self, container: str, prefix: str, options: AzureOptions | None, shown: str) -> None:
        self._container_name = container
        self._prefix = prefix
        self._options = options or AzureOptions()
        self._shown = shown
        self._container = PerProcess(self._connect)

    @property
    def url(self) -> str:
        """The URL as the user wrote it."""
        return self._shown

    @property
    def identity(self) -> str:
        """The URL with its account."""
        return f"{self._shown}@{self._options.endpoint_url or self._account() or ''}"

    @property
    def cuts_ranges(self) -> bool:
        """It does."""
        return True

    def open(self, name: str, begin: int = 0, end: int | None = None) -> Body:
        """The bytes ``[begin, end)`` of a blob, by one GET where they are at most 64 MiB."""

        def explain(error: Exception) -> Exception | None:
            return self._explain(name, error)

        length = None if end is None else end - begin
        offset = begin if begin or length is not None else None
        try:
            found = attempt(lambda: self._blob(name).download_blob(offset, length, max_concurrency=1), explain)
        except _PastTheEndError:
            return Body(iter(()), 0, where=f"{self._shown}/{name}")
        chunks = explained_chunks(iter(found.chunks()), explain)
        return Body(chunks, found.size, found.properties.etag, None, f"{self._shown}/{name}")

    def put(self, name: str, source: Path | bytes, *, if_absent: bool = False, if_version: str | None = None) -> None:
        """One upload; the blob appears when all of it is there."""

        check_conditions(name, if_absent, if_version)
        wanted: dict[str, Any] = {"overwrite": not if_absent, "max_concurrency": 4}

        def upload() -> None:
            if if_version is not None:
                from azure.core import MatchConditions

                wanted.update(etag=if_version, match_condition=MatchConditions.IfNotModified)
            with source_file(source) as file:
                self._blob(name).upload_blob(file, **wanted)

        def explain(error: Exception) -> Exception | None:
            status = getattr(error, "status_code", None)
            if (if_absent and status in (409, 412)) or (if_version is not None and status in (404, 412)):
                return refused_put(f"{self._shown}/{name}", if_absent)
            return self._explain(name, error)

        attempt(upload, explain)

    def list(self, prefix: str = "") -> Iterator[ObjectEntry]:
        """All blobs whose names begin with `prefix`, a page at a time."""

        def explain(error: Exception) -> Exception | None:
            return self._explain(prefix, error)

        wanted = join(self._prefix, prefix)
        blobs = attempt(lambda: iter(self._container().list_blobs(name_starts_with=wanted)), explain)
        while (blob := attempt(lambda: next(blobs, None), explain)) is not None:
            # An account with folders lists these too, as empty blobs that say so.
            if (blob.metadata or {}).get("hdi_isfolder") != "true":
                yield ObjectEntry(relative(blob.name, self._prefix), blob.size)

    def delete(self, name: str) -> None:
        """Remove a blob."""
        try:
            attempt(lambda: self._blob(name).delete_blob(), lambda error: self._explain(name, error))
        except NotFoundError:
            return

    def exists(self, name: str) -> bool:
        """Whether there is such a blob."""
        return attempt(lambda: bool(self._blob(name).exists()), lambda error: self._explain(name, error))

    def _blob(self, name: str) -> Any:
        return self._container().get_blob_client(join(self._prefix, check_name(name)))

    def _account(self) -> str | None:
        names = ("AZURE_STORAGE_ACCOUNT", "AZURE_STORAGE_ACCOUNT_NAME", "AZURE_ACCOUNT_NAME")
        return self._options.account or _first(names)

    def _connect(self) -> Any:
        try:
            from azure.storage.blob import ContainerClient
        except ImportError as error:
            raise missing_extra("azure-storage-blob", "azure", f"using {self._shown}") from error
        options = self._options
        settings: dict[str, Any] = {
            "retry_total": 0,  # ours retry, and resume
            "connection_timeout": min(options.timeout_s, 20.0),
            "read_timeout": options.timeout_s,
            "max_single_get_size": _PIECE_BYTES,
            "max_chunk_get_size": _PIECE_BYTES,
        }
        connection = options.connection_string or _first(("AZURE_STORAGE_CONNECTION_STRING",))
        if connection and not options.anonymous:
            try:
                return ContainerClient.from_connection_string(connection, self._container_name, **settings)
            except ValueError as error:
                raise AccessError(
                    f"{self._shown}: the connection string (AZURE_STORAGE_CONNECTION_STRING) is none ({error}). Copy "
                    "it whole from the account's access keys: DefaultEndpointsProtocol=...;AccountName=...;AccountKey="
                ) from None
        account = self._account()
        endpoint = options.endpoint_url or _first(("AZURE_STORAGE_ENDPOINT",))
        if endpoint is None and account is None:
            raise AccessError(f"{self._shown}: which account? {_REMEDY}")
        address = endpoint or f"https://{account}.blob.core.windows.net"
        return ContainerClient(address, self._container_name, self._credential(account), **settings)

    def _credential(self, account: str | None) -> Any:
        options = self._options
        if options.anonymous:
            return None
        key = options.account_key or _first(
            ("AZURE_STORAGE_KEY", "AZURE_STORAGE_ACCOUNT_KEY", "AZURE_ACCOUNT_ACCESS_KEY")
        )
        if key:
            return {"account_name": account, "account_key": key}
        if token := options.sas_token or _first(("AZURE_STORAGE_SAS_TOKEN",)):
            from azure.core.credentials import AzureSasCredential

            return AzureSasCredential(token.lstrip("?"))
        try:
            from azure.identity import DefaultAzureCredential
        except ImportError as error:
            raise missing_extra("azure-identity", "azure", f"logging in for {self._shown}") from error
        return DefaultAzureCredential()

    def _explain(self, name: str, error: Exception) -> Exception | None:
        where = f"{self._shown}/{name}"
        kinds = {kind.__name__ for kind in type(error).__mro__}
        status = getattr(error, "status_code", None) or 0
        if kinds & {"ClientAuthenticationError", "CredentialUnavailableError"} or status in (401, 403):
            return AccessError(f"{where}: refused ({_said(error)}). {_REMEDY}")
        if status == 404 or "ResourceNotFoundError" in kinds:
            return self._missing(where, error)
        if status == 416:
            return _PastTheEndError(f"{where}: past its end")
        if status in (408, 429) or status >= 500:
            return UnavailableError(f"{where}: {_said(error)}. The store is overloaded or in trouble.")
        if kinds & {"ServiceRequestError", "ServiceResponseError", "IncompleteReadError", "OSError", "HTTPError"}:
            return UnavailableError(f"{where}: {_said(error)}. Look at the network.")
        if isinstance(error, ValueError) and "HTTPS" in str(error):
            return AccessError(f"{where}: a login is not sent over http:// ({summarize(error)}). {_REMEDY}")
        if "AzureError" in kinds:
            return StoreError(f"{where}: {_said(error)}. Check the URL and the options.")
        return None

    def _missing(self, where: str, error: Exception) -> NotFoundError:
        if getattr(error, "error_code", None) == "ContainerNotFound":
            return NotFoundError(
                f"{where}: there is no container {self._container_name!r}. Check the URL and the account."
            )
        return NotFoundError(f"{where}: no such blob. Check the URL and the account.")


class _PastTheEndError(StoreError):
    """A range that begins at or after the blob's end."""


def _said(error: Exception) -> str:
    code = getattr(error, "error_code", None)
    return f"{code}, {summarize(error)}" if code else summarize(error)


def _first(names: tuple[str, ...]) -> str | None:
    return next((os.environ[name] for name in names if os.environ.get(name)), None)
