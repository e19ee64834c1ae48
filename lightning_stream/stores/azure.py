"""Azure's blob storage, also for ``abfss://``: both name containers of an account."""

from __future__ import annotations

import base64
import hmac
import re
from dataclasses import dataclass
from email.utils import formatdate
from typing import Any
from urllib.parse import parse_qsl, quote, unquote, urlsplit

from lightning_stream.errors import AccessError, needs, redact

from .base import BaseStore, ListingPage, StoreTraits
from .credentials import Credentials, Keys, Renewed, lasting
from .http import BucketStore, Headers, Request, with_query
from .transfer import Options, content_md5, first_set, read_options, shared, split_url, xml_of

_VERSION = "2021-12-02"  # of the protocol: the first that marks names it had to encode
_SCOPE = "https://storage.azure.com/.default"
_SIGNED = (
    *("Content-Encoding", "Content-Language", "Content-Length", "Content-MD5", "Content-Type", "Date"),
    *("If-Modified-Since", "If-Match", "If-None-Match", "If-Unmodified-Since", "Range"),
)


@dataclass(frozen=True, repr=False)  # some of them are secrets
class AzureOptions:
    """Options for ``azure://container/path``, ``abfss://container@account.dfs.core.windows.net/path`` and others.

    Attributes:
        account: Else in the URL, ``AZURE_STORAGE_ACCOUNT``, ``AZURE_STORAGE_ACCOUNT_NAME`` or ``AZURE_ACCOUNT_NAME``.
        account_key: Else ``AZURE_STORAGE_KEY``, ``AZURE_STORAGE_ACCOUNT_KEY`` or ``AZURE_ACCOUNT_ACCESS_KEY``.
        sas_token, connection_string: Else ``AZURE_STORAGE_SAS_TOKEN``, ``AZURE_STORAGE_CONNECTION_STRING``.
        endpoint_url: Else ``AZURE_STORAGE_ENDPOINT``, or the account's own.
        anonymous: Use no credentials.
        timeout_s: Longest silence on a connection.
    """

    account: str | None = None
    account_key: str | None = None
    sas_token: str | None = None
    connection_string: str | None = None
    endpoint_url: str | None = None
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
    key_names = frozenset({"account_key", "sas_token", "token"})
    largest_put = 5000 << 20
    options = AzureOptions

    @classmethod
    def from_url(cls, url: str, options: Options) -> BaseStore:
        scheme = url.partition("://")[0]
        place, prefix = split_url(url)
        container, at, host = place.rpartition("@")
        match = re.fullmatch(r"([a-z0-9]+)\.(?:dfs|blob)(\..+)", host)
        if match is not None:
            options = {"account": match[1], "endpoint_url": f"https://{match[1]}.blob{match[2]}", **options}
            if not at:  # as mosaicml-streaming writes it
                container, _, prefix = prefix.partition("/")
        elif not at:
            container = host
        if not container or (at and match is None):
            raise ValueError(
                "an ADLS URL is abfss://CONTAINER@ACCOUNT.dfs.core.windows.net/FOLDER, or "
                f"azure://ACCOUNT.blob.core.windows.net/CONTAINER/FOLDER; got {redact(url)}"
            )
        return cls(container, prefix, read_options(AzureOptions, options, f"{scheme}://"), url)

    @property
    def identity(self) -> str:
        account = self._account()
        return f"{self.url}@{redact(account.get('BlobEndpoint') or account.get('AccountName') or '')}"

    def _address(self, name: str) -> str:
        return f"{self._login().address}/{self._bucket}/{quote(self._prefix + name, safe='/~')}"

    def _sign(self, request: Request) -> None:
        request.headers |= {"x-ms-version": _VERSION, "x-ms-date": formatdate(usegmt=True)}
        login = self._login()
        keys = login.keys.get().values
        if key := keys.get("account_key"):
            _sign_by_key(login.account, base64.b64decode(key), request)
        elif sas := keys.get("sas_token"):
            signature = sas.lstrip("?")
            if signature not in request.url:
                request.url += f"{'&' if '?' in request.url else '?'}{signature}"
        elif token := keys.get("token"):
            request.headers["Authorization"] = f"Bearer {token}"

    def _proof(self, body: Any) -> Headers:
        return {"x-ms-blob-type": "BlockBlob", "Content-MD5": content_md5(body)}

    def _list_page(self, prefix: str, token: str | None) -> ListingPage:
        query = {"restype": "container", "comp": "list", "include": "metadata", "prefix": self._prefix + prefix}
        address = with_query(f"{self._login().address}/{self._bucket}", {**query, "marker": token})
        return self._parsed(self._request("GET", address), self._page)

    def _page(self, text: bytes) -> ListingPage:
        page = xml_of(text, "EnumerationResults")
        entries = []
        for blob in page.iterfind("Blobs/Blob"):
            # An account with folders lists these too, as empty blobs with this metadata.
            if blob.findtext("Metadata/hdi_isfolder") != "true":
                name = blob.findtext("Name", "")
                is_encoded = blob.find("Name[@Encoded='true']") is not None
                key = unquote(name) if is_encoded else name
                size = blob.findtext("Properties/Content-Length", "")
                etag = blob.findtext("Properties/Etag")
                entries.append(self._entry(key, size, etag))
        return entries, page.findtext("NextMarker") or None

    def _account(self) -> dict[str, str | None]:
        """Return what is known of the account, by the names of a connection string."""
        options = self._options
        text = options.connection_string or first_set("AZURE_STORAGE_CONNECTION_STRING")
        if not text or options.anonymous:
            names = ("AZURE_STORAGE_ACCOUNT", "AZURE_STORAGE_ACCOUNT_NAME", "AZURE_ACCOUNT_NAME")
            keys = ("AZURE_STORAGE_KEY", "AZURE_STORAGE_ACCOUNT_KEY", "AZURE_ACCOUNT_ACCESS_KEY")
            return {
                "AccountName": options.account or first_set(*names),
                "AccountKey": options.account_key or first_set(*keys),
                "SharedAccessSignature": options.sas_token or first_set("AZURE_STORAGE_SAS_TOKEN"),
                "BlobEndpoint": options.endpoint_url or first_set("AZURE_STORAGE_ENDPOINT"),
            }
        pairs: dict[str, Any] = dict(part.partition("=")[::2] for part in text.strip().strip(";").split(";"))
        fields = {"DefaultEndpointsProtocol": "https", "EndpointSuffix": "core.windows.net", **pairs}
        if name := fields.get("AccountName"):
            host = f"{name}.blob.{fields['EndpointSuffix']}"
            fields.setdefault("BlobEndpoint", f"{fields['DefaultEndpointsProtocol']}://{host}")
        return fields

    def _connect(self) -> _Login:
        fields = self._account()
        account = fields.get("AccountName")
        endpoint = fields.get("BlobEndpoint")
        key = fields.get("AccountKey")
        sas = fields.get("SharedAccessSignature")
        if "EndpointSuffix" in fields and not (endpoint and (sas or (account and key))):
            raise AccessError(
                f"{self.url}: the connection string (AZURE_STORAGE_CONNECTION_STRING) is incomplete. Copy it whole "
                "from the account's access keys: DefaultEndpointsProtocol=...;AccountName=...;AccountKey=..."
            )
        if endpoint is None and account is None:
            raise AccessError(f"{self.url}: no account is set. {self.access_remedy}")
        address = (endpoint or f"https://{account}.blob.core.windows.net").rstrip("/")
        fixed = Keys({} if self._options.anonymous else {"account_key": key, "sas_token": sas})
        has_keys = bool(key or sas or self._options.anonymous)
        keys = self.credentials or (Renewed(lambda: fixed) if has_keys else self._tokens_for(address))
        return _Login(address, account or "", keys)

    def _tokens_for(self, address: str) -> Renewed:
        """Return the tokens of a login of this machine."""
        if not address.startswith("https://"):
            raise AccessError(f"{self.url}: a login is not sent over http://. {self.access_remedy}")
        with needs("azure-identity", "azure", f"logging in for {self.url}"):
            from azure.identity import DefaultAzureCredential

        def log_in() -> Renewed:
            login = DefaultAzureCredential()

            def ask() -> Keys:
                token = login.get_token(_SCOPE)
                return lasting({"token": token.token}, token.expires_on)

            return Renewed(ask)

        return shared(log_in, "azure")


@dataclass(frozen=True, repr=False)
class _Login:
    """The address of an account, its name, and the keys: an account's key, a signature, or a token; or none."""

    address: str
    account: str
    keys: Credentials | Renewed


def _sign_by_key(account: str, key: bytes, request: Request) -> None:
    """Azure's SharedKey: https://learn.microsoft.com/rest/api/storageservices/authorize-with-shared-key."""
    parts = urlsplit(request.url)
    headers = request.headers
    lines = [request.method, *(headers.get(name, "") for name in _SIGNED)]
    if headers.get("Content-Length") == "0":
        lines[1 + _SIGNED.index("Content-Length")] = ""
    lines += sorted(f"{name.lower()}:{value}" for name, value in headers.items() if name.startswith("x-ms-"))
    lines.append(f"/{account}{parts.path}")
    lines += sorted(f"{name.lower()}:{value}" for name, value in parse_qsl(parts.query, True))
    signature = base64.b64encode(hmac.digest(key, "\n".join(lines).encode(), "sha256")).decode()
    headers["Authorization"] = f"SharedKey {account}:{signature}"
