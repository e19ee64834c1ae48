"""Google Cloud Storage, by its own client, or with HMAC keys by the protocol of S3."""

from __future__ import annotations

import importlib
import os
import urllib.parse
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, BinaryIO

from lightning_stream.errors import AccessError, NotFoundError, needs, redact, summarize

from .base import AnswerError, BaseStore, BucketStore, ListingPage, StoreTraits
from .s3 import S3Options, S3Store
from .transfer import ObjectStream, PerProcess, first_set, header_stream, range_header, read_options, split_url

_REASON_BYTES = 1000
_HOME = "https://storage.googleapis.com"
_SCOPE = "https://www.googleapis.com/auth/devstorage.read_write"


@dataclass(frozen=True)
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
    endpoint_url: str | None = field(default=None, repr=False)
    access_key_id: str | None = field(default=None, repr=False)
    secret_access_key: str | None = field(default=None, repr=False)
    timeout_s: float = 60.0


class GcsStore(BucketStore):
    """Objects of one bucket below a prefix, by Google's JSON API."""

    traits = StoreTraits(ranges=True, sorted_listing=True, conditional_put=True)
    access_remedy = (
        "Set GOOGLE_APPLICATION_CREDENTIALS to a key file, or run `gcloud auth application-default login`, or give "
        "HMAC keys in GCS_KEY and GCS_SECRET; the account needs the right to this bucket (Storage Object User)."
    )
    network_errors = BaseStore.network_errors | {"RequestException", "TransportError", "DataCorruption"}
    client_errors = frozenset({"GoogleAPIError", "GoogleCloudError", "InvalidResponse"})

    def __init__(self, bucket: str, prefix: str, options: GcsOptions | None = None) -> None:
        super().__init__(bucket, prefix, f"gs://{bucket}/{prefix}")
        self._options = options or GcsOptions()
        self._client = PerProcess(self._connect)

    @classmethod
    def from_url(cls, url: str, options: Mapping[str, Any]) -> BaseStore:
        bucket, prefix = split_url(url)
        given = read_options(GcsOptions, options, "gs://")
        key = given.access_key_id or os.environ.get("GCS_KEY")
        secret = given.secret_access_key or os.environ.get("GCS_SECRET")
        if (given.access_key_id and not secret) or (given.secret_access_key and not key):
            raise ValueError("access_key_id and secret_access_key (GCS_KEY, GCS_SECRET) come together; one is missing.")
        if key and secret:
            endpoint = given.endpoint_url or _HOME
            interop = S3Options(endpoint, "auto", None, key, secret, anonymous=False, timeout_s=given.timeout_s)
            return S3Store(bucket, prefix, interop, scheme="gs")
        return cls(bucket, prefix, given)

    @property
    def identity(self) -> str:
        endpoint = self._endpoint()
        return self.url if endpoint == _HOME else f"{self.url}@{redact(endpoint)}"

    def _open(self, name: str, begin: int, end: int | None) -> ObjectStream:
        key = urllib.parse.quote(self._prefix + name, safe="")
        payer = f"&userProject={urllib.parse.quote(self._options.project)}" if self._options.project else ""
        address = f"{self._endpoint()}/download/storage/v1/b/{self._bucket}/o/{key}?alt=media{payer}"
        headers = {"Accept-Encoding": "gzip", **range_header(begin, end)}
        answer = self._client()[1].get(address, headers=headers, stream=True, timeout=self._options.timeout_s)
        if answer.status_code >= 400:
            with answer:
                reason = answer.raw.read(_REASON_BYTES, decode_content=True)
                raise AnswerError(answer.status_code, reason.decode(errors="replace"))
        # As it is stored, whatever its Content-Encoding is.
        return header_stream(answer.raw, answer.headers, answer.headers.get("x-goog-generation"), answer.close)

    def _put(self, name: str, file: BinaryIO, num_bytes: int, if_absent: bool, if_version: str | None) -> None:
        generation = 0 if if_absent else None if if_version is None else int(if_version)
        more = {"timeout": self._options.timeout_s, "retry": None, "if_generation_match": generation}
        self._blob(name).upload_from_file(file, size=num_bytes, content_type="application/octet-stream", **more)

    def _list_page(self, prefix: str, token: str | None) -> ListingPage:
        client = self._client()[0]
        bucket = client.bucket(self._bucket, user_project=self._options.project)
        wanted = {"prefix": self._prefix + prefix, "timeout": self._options.timeout_s, "retry": None}
        fields = "items(name,size,generation),nextPageToken"
        found = client.list_blobs(bucket, page_token=token, fields=fields, **wanted)
        page = [self._entry(blob.name, blob.size, blob.generation) for blob in next(found.pages, ())]
        return page, found.next_page_token

    def _delete(self, name: str) -> None:
        self._blob(name).delete(retry=None)

    def _blob(self, name: str) -> Any:
        bucket = self._client()[0].bucket(self._bucket, user_project=self._options.project)
        return bucket.blob(self._prefix + name)

    def _endpoint(self) -> str:
        given = self._options.endpoint_url or first_set("STORAGE_EMULATOR_HOST") or _HOME
        return (given if "://" in given else f"http://{given}").rstrip("/")

    def _connect(self) -> tuple[Any, Any]:
        """Make the client, and the authorised session that it shares with `_open`."""
        with needs("google-cloud-storage", "gcs", f"using {self.url}"):
            from google.cloud import storage
            from requests.adapters import HTTPAdapter
        transport: Any = importlib.import_module("google.auth.transport.requests")
        credentials = self._credentials()
        session = transport.AuthorizedSession(credentials)
        for scheme in ("https://", "http://"):
            session.mount(scheme, HTTPAdapter(pool_connections=4, pool_maxsize=64))
        project = self._options.project or os.environ.get("GOOGLE_CLOUD_PROJECT") or "none"
        client = storage.Client(project, credentials, session, client_options={"api_endpoint": self._endpoint()})
        return client, session

    def _credentials(self) -> Any:
        auth: Any = importlib.import_module("google.auth")
        anonymous = importlib.import_module("google.auth.credentials").AnonymousCredentials
        missing = importlib.import_module("google.auth.exceptions").DefaultCredentialsError
        path, wish = self._options.credentials_file, self._options.anonymous
        # Another endpoint is mostly an emulator; for one with a login (Private Service Connect), users pass False.
        if wish or (wish is None and not path and self._endpoint() != _HOME):
            return anonymous()
        try:
            found = auth.load_credentials_from_file(path, scopes=[_SCOPE]) if path else auth.default(scopes=[_SCOPE])
        except missing:
            # The bucket may be public, unless the user has set credentials, which are wrong then.
            if path or os.environ.get("GOOGLE_APPLICATION_CREDENTIALS") or wish is False:
                raise
            return anonymous()
        return found[0]

    def _special_error(self, error: Exception, where: str) -> Exception | None:
        kinds = {kind.__name__ for kind in type(error).__mro__}
        if "GoogleAuthError" in kinds and "TransportError" not in kinds:
            return AccessError(f"{where}: no usable credentials ({summarize(error)}). {self.access_remedy}")
        if self._status(error) == 404 and "bucket does not exist" in str(error):
            return NotFoundError(f"{where}: there is no bucket {self._bucket!r}. Check the URL.")
        return None
