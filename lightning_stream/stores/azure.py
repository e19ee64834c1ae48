"""Azure's blob storage, also for ``abfss://``: both name containers of an account."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, BinaryIO

from lightning_stream.errors import AccessError, NotFoundError, needs, redact, summarize

from .base import BaseStore, BucketStore, ListingPage, StoreTraits
from .transfer import ObjectStream, PerProcess, first_set, read_options, split_url

# The client downloads a whole piece before it returns, and loses it if the connection breaks.
_PIECE_BYTES = 4 << 20


@dataclass(frozen=True)
class AzureOptions:
    """Options for ``azure://container/path``, ``az://`` and ``abfss://container@account.dfs.core.windows.net/path``.

    Attributes:
        account: Else in the URL, ``AZURE_STORAGE_ACCOUNT``, ``AZURE_STORAGE_ACCOUNT_NAME`` or ``AZURE_ACCOUNT_NAME``.
        account_key: Else ``AZURE_STORAGE_KEY``, ``AZURE_STORAGE_ACCOUNT_KEY`` or ``AZURE_ACCOUNT_ACCESS_KEY``.
        sas_token, connection_string: Else ``AZURE_STORAGE_SAS_TOKEN``, ``AZURE_STORAGE_CONNECTION_STRING``.
        endpoint_url: Else ``AZURE_STORAGE_ENDPOINT``, or the account's own.
        anonymous: Use no credentials.
        timeout_s: Longest silence on a connection.
    """

    account: str | None = None
    account_key: str | None = field(default=None, repr=False)
    sas_token: str | None = field(default=None, repr=False)
    connection_string: str | None = field(default=None, repr=False)
    endpoint_url: str | None = field(default=None, repr=False)
    anonymous: bool = False
    timeout_s: float = 60.0


class AzureStore(BucketStore):
    """Blobs of one container below a prefix. `url` is the user's, for messages."""

    # An account with folders (ADLS) lists "a/b" before "a-c".
    traits = StoreTraits(ranges=True, conditional_put=True)
    access_remedy = (
        "Set AZURE_STORAGE_ACCOUNT and AZURE_STORAGE_KEY (or AZURE_STORAGE_SAS_TOKEN, or "
        "AZURE_STORAGE_CONNECTION_STRING), or log in (`az login`, a managed identity, AZURE_CLIENT_ID with "
        "AZURE_TENANT_ID and AZURE_CLIENT_SECRET); the account needs the role Storage Blob Data Reader, or Contributor "
        "to write."
    )
    missing = "no such blob. Check the URL and the account."
    network_errors = BaseStore.network_errors | {"ServiceRequestError", "ServiceResponseError", "IncompleteReadError"}
    client_errors = frozenset({"AzureError"})

    def __init__(self, container: str, prefix: str, options: AzureOptions | None, url: str) -> None:
        super().__init__(container, prefix, url)
        self._options = options or AzureOptions()
        self._container = PerProcess(self._connect)

    @classmethod
    def from_url(cls, url: str, options: Mapping[str, Any]) -> BaseStore:
        scheme = url.partition("://")[0]
        place, prefix = split_url(url)
        container, at, host = place.partition("@")
        found = re.fullmatch(r"([a-z0-9]+)\.(?:dfs|blob)(\..+)", host)
        if at and found is None:
            raise ValueError(f"an ADLS URL is abfss://CONTAINER@ACCOUNT.dfs.core.windows.net/FOLDER; got {redact(url)}")
        if found is not None:
            options = {"account": found[1], "endpoint_url": f"https://{found[1]}.blob{found[2]}", **options}
        return cls(container, prefix, read_options(AzureOptions, options, f"{scheme}://"), url)

    @property
    def identity(self) -> str:
        # The endpoint or account that the client uses; no secrets.
        fields = dict(part.partition("=")[::2] for part in (self._connection() or "").split(";"))
        given = fields.get("BlobEndpoint") or fields.get("AccountName")
        if given and fields.get("EndpointSuffix", "core.windows.net") != "core.windows.net":
            given = f"{given}.{fields['EndpointSuffix']}"
        return f"{self.url}@{redact(given or self._endpoint() or self._account() or '')}"

    def _open(self, name: str, begin: int, end: int | None) -> ObjectStream:
        length = None if end is None else end - begin
        offset = begin if begin or length is not None else None
        found = self._blob(name).download_blob(offset, length, max_concurrency=1)
        return ObjectStream(iter(found.chunks()), found.size, found.properties.etag, total=found.properties.size)

    def _put(self, name: str, file: BinaryIO, num_bytes: int, if_absent: bool, if_version: str | None) -> None:
        more: dict[str, Any] = {"overwrite": not if_absent, "max_concurrency": 4, "length": num_bytes}
        if if_version is not None:
            from azure.core import MatchConditions

            more |= {"etag": if_version, "match_condition": MatchConditions.IfNotModified}
        self._blob(name).upload_blob(file, **more)

    def _list_page(self, prefix: str, token: str | None) -> ListingPage:
        pages = self._container().list_blobs(name_starts_with=self._prefix + prefix).by_page(token)
        # An account with folders lists these too, as empty blobs with this metadata.
        found = (blob for blob in next(pages, ()) if (blob.metadata or {}).get("hdi_isfolder") != "true")
        return [self._entry(blob.name, blob.size, blob.etag) for blob in found], pages.continuation_token or None

    def _delete(self, name: str) -> None:
        self._blob(name).delete_blob()

    def _blob(self, name: str) -> Any:
        return self._container().get_blob_client(self._prefix + name)

    def _account(self) -> str | None:
        names = ("AZURE_STORAGE_ACCOUNT", "AZURE_STORAGE_ACCOUNT_NAME", "AZURE_ACCOUNT_NAME")
        return self._options.account or first_set(*names)

    def _connection(self) -> str | None:
        options = self._options
        return None if options.anonymous else options.connection_string or first_set("AZURE_STORAGE_CONNECTION_STRING")

    def _endpoint(self) -> str | None:
        return self._options.endpoint_url or first_set("AZURE_STORAGE_ENDPOINT")

    def _connect(self) -> Any:
        with needs("azure-storage-blob", "azure", f"using {self.url}"):
            from azure.storage.blob import ContainerClient
        options = self._options
        settings: dict[str, Any] = {
            "retry_total": 0,  # RetryingStore tries again, and resumes
            "connection_timeout": min(options.timeout_s, 20.0),
            "read_timeout": options.timeout_s,
            "max_single_get_size": _PIECE_BYTES,
            "max_chunk_get_size": _PIECE_BYTES,
        }
        if connection := self._connection():
            try:
                return ContainerClient.from_connection_string(connection, self._bucket, **settings)
            except ValueError as error:
                raise AccessError(
                    f"{self.url}: the connection string (AZURE_STORAGE_CONNECTION_STRING) is incomplete ({error}). "
                    "Copy it whole from the account's access keys: "
                    "DefaultEndpointsProtocol=...;AccountName=...;AccountKey="
                ) from None
        account, endpoint = self._account(), self._endpoint()
        if endpoint is None and account is None:
            raise AccessError(f"{self.url}: no account is set. {self.access_remedy}")
        address = endpoint or f"https://{account}.blob.core.windows.net"
        return ContainerClient(address, self._bucket, self._credential(account), **settings)

    def _credential(self, account: str | None) -> Any:
        options = self._options
        if options.anonymous:
            return None
        names = ("AZURE_STORAGE_KEY", "AZURE_STORAGE_ACCOUNT_KEY", "AZURE_ACCOUNT_ACCESS_KEY")
        if key := options.account_key or first_set(*names):
            return {"account_name": account, "account_key": key}
        if token := options.sas_token or first_set("AZURE_STORAGE_SAS_TOKEN"):
            from azure.core.credentials import AzureSasCredential

            return AzureSasCredential(token.lstrip("?"))
        with needs("azure-identity", "azure", f"logging in for {self.url}"):
            from azure.identity import DefaultAzureCredential
        return DefaultAzureCredential()

    def _status(self, error: Exception) -> int:
        # This one is a condition that does not hold; status 409 also has other meanings.
        return 412 if getattr(error, "error_code", "") == "BlobAlreadyExists" else super()._status(error)

    def _special_error(self, error: Exception, where: str) -> Exception | None:
        kinds = {kind.__name__ for kind in type(error).__mro__}
        if getattr(error, "error_code", "") == "ContainerNotFound":
            return NotFoundError(f"{where}: there is no container {self._bucket!r}. Check the URL and the account.")
        if kinds & {"ClientAuthenticationError", "CredentialUnavailableError"}:
            return AccessError(f"{where}: refused ({summarize(error)}). {self.access_remedy}")
        if isinstance(error, ValueError) and "HTTPS" in str(error):
            return AccessError(f"{where}: a login is not sent over http:// ({summarize(error)}). {self.access_remedy}")
        return None
