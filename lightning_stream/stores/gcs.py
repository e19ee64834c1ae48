"""Google Cloud Storage by its JSON API, or with HMAC keys by the protocol of S3."""

from __future__ import annotations

import importlib
import itertools
import json
import os
import uuid
from dataclasses import dataclass
from typing import Any, BinaryIO
from urllib.parse import quote

from lightning_stream.errors import needs, redact

from .base import BaseStore, ListingPage, StoreTraits
from .http import BucketStore, Request, with_query
from .s3 import AS_STORED, S3Options, S3Store
from .transfer import Options, content_md5, file_chunks, first_set, read_options, shared, split_url

_HOME = "https://storage.googleapis.com"
_SCOPE = "https://www.googleapis.com/auth/devstorage.read_write"


@dataclass(frozen=True, repr=False)  # some of them are secrets
class GcsOptions:
    """Options for ``gs://``; the others come from the variables and files that Google's tools read.

    Attributes:
        credentials_file: A service account's (or other) JSON file; else ``GOOGLE_APPLICATION_CREDENTIALS``, or the
            machine's own account.
        project: Billed if the bucket asks for it; else ``GOOGLE_CLOUD_PROJECT``.
        anonymous: Use no credentials. None: only if there are none.
        endpoint_url: Else ``STORAGE_EMULATOR_HOST``.
        access_key_id, secret_access_key: An HMAC key, for the protocol of S3; else ``GCS_KEY`` and ``GCS_SECRET``.
        timeout_s: Longest silence on a connection.
    """

    credentials_file: str | None = None
    project: str | None = None
    anonymous: bool | None = None
    endpoint_url: str | None = None
    access_key_id: str | None = None
    secret_access_key: str | None = None
    timeout_s: float = 60.0


class GcsStore(BucketStore):
    """Objects of one bucket below a prefix, by Google's JSON API."""

    traits = StoreTraits(ranges=True, sorted_listing=True, conditional_put=True)
    access_remedy = (
        "Set GOOGLE_APPLICATION_CREDENTIALS to a key file, or run `gcloud auth application-default login`, or give "
        "HMAC keys in GCS_KEY and GCS_SECRET; the account needs the right to this bucket (Storage Object User)."
    )
    version_header = "x-goog-generation"
    key_names = frozenset({"token"})
    options = GcsOptions
    encoding = AS_STORED

    @classmethod
    def from_url(cls, url: str, options: Options) -> BaseStore:
        url = f"gs://{url.partition('://')[2]}"
        settings = read_options(GcsOptions, options, "gs://")
        key = settings.access_key_id or os.environ.get("GCS_KEY")
        secret = settings.secret_access_key or os.environ.get("GCS_SECRET")
        if (settings.access_key_id and not secret) or (settings.secret_access_key and not key):
            raise ValueError("access_key_id and secret_access_key (GCS_KEY, GCS_SECRET) come together; one is missing.")
        if key and secret:
            endpoint = settings.endpoint_url or _HOME
            interop = S3Options(endpoint, "auto", None, key, secret, anonymous=False, timeout_s=settings.timeout_s)
            return S3Store(*split_url(url), interop, url)
        return super().from_url(url, options)

    @property
    def identity(self) -> str:
        endpoint = self._endpoint()
        return self.url if endpoint == _HOME else f"{self.url}@{redact(endpoint)}"

    def _address(self, name: str) -> str:
        return self._call("/download", self._prefix + name, alt="media")

    def _call(self, kind: str, key: str | None = None, **query: str | None) -> str:
        """Return the URL of a method of the API, for the bucket or for an object of it."""
        path = "" if key is None else f"/{quote(key, safe='')}"
        url = f"{self._endpoint()}{kind}/storage/v1/b/{self._bucket}/o{path}"
        return with_query(url, {**query, "userProject": self._options.project})

    def _sign(self, request: Request) -> None:
        if self.credentials is not None:
            request.headers["Authorization"] = f"Bearer {self.credentials.get().values['token']}"
        elif (login := self._login()) is not None:
            credentials, transport = login
            credentials.before_request(transport, request.method, request.url, request.headers)

    def _put(self, name: str, file: BinaryIO, num_bytes: int, if_absent: bool, if_version: str | None) -> None:
        generation = "0" if if_absent else if_version
        url = self._call("/upload", None, uploadType="multipart", ifGenerationMatch=generation)
        mark = uuid.uuid4().hex
        metadata = json.dumps({"name": self._prefix + name, "md5Hash": content_md5(file)})
        part = f"--{mark}\r\nContent-Type: application"
        head = f"{part}/json\r\n\r\n{metadata}\r\n{part}/octet-stream\r\n\r\n".encode()
        tail = f"\r\n--{mark}--\r\n".encode()
        body = itertools.chain([head], file_chunks(file, num_bytes), [tail])
        headers = {"Content-Type": f"multipart/related; boundary={mark}"}
        self._upload("POST", url, body, len(head) + num_bytes + len(tail), headers)

    def _list_page(self, prefix: str, token: str | None) -> ListingPage:
        fields = "kind,items(name,size,generation),nextPageToken"
        address = self._call("", prefix=self._prefix + prefix, pageToken=token, fields=fields)
        return self._parsed(self._request("GET", address), self._page)

    def _page(self, text: bytes) -> ListingPage:
        page = json.loads(text)
        if page["kind"] != "storage#objects":
            raise ValueError("it is no listing")
        entries = [self._entry(item["name"], item["size"], item["generation"]) for item in page.get("items", ())]
        return entries, page.get("nextPageToken")

    def _delete(self, name: str) -> None:
        self._request("DELETE", self._call("", self._prefix + name)).read()

    def _endpoint(self) -> str:
        endpoint = self._options.endpoint_url or first_set("STORAGE_EMULATOR_HOST") or _HOME
        return (endpoint if "://" in endpoint else f"http://{endpoint}").rstrip("/")

    def _connect(self) -> tuple[Any, Any] | None:
        """Return the credentials, and what they are renewed with; None where nothing is signed."""
        path = self._options.credentials_file
        wish = self._options.anonymous
        # Another endpoint is mostly an emulator; for one with a login (Private Service Connect), users pass False.
        if wish or (wish is None and not path and self._endpoint() != _HOME):
            return None
        with needs("google-auth", "gcs", f"using {self.url}"):
            auth: Any = importlib.import_module("google.auth")
            transport: Any = importlib.import_module("google.auth.transport.requests")
        scopes = [_SCOPE]

        def log_in() -> tuple[Any, Any] | None:
            try:
                login = auth.load_credentials_from_file(path, scopes=scopes) if path else auth.default(scopes=scopes)
            except auth.exceptions.DefaultCredentialsError:
                # The bucket may be public, unless the user has set credentials, which are wrong then.
                if path or os.environ.get("GOOGLE_APPLICATION_CREDENTIALS") or wish is False:
                    raise
                return None
            return login[0], transport.Request()

        return shared(log_in, "gcs", path, wish)
