"""Google Cloud Storage, by its own client; with HMAC keys, in S3's language."""

from __future__ import annotations

import importlib
import os
import urllib.parse
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
    check_conditions,
    check_name,
    explained_chunks,
    join,
    range_header,
    refused_put,
    relative,
    source_file,
)
from .s3 import S3Options, S3Store

_SAID_BYTES = 1000
_HOME = "https://storage.googleapis.com"
_SCOPE = "https://www.googleapis.com/auth/devstorage.read_write"


@dataclass(frozen=True)
class GcsOptions:
    """Options for ``gs://``; what is not given comes from the variables and files that Google's tools read.

    Attributes:
        credentials_file: A service account's (or other) JSON file; else ``GOOGLE_APPLICATION_CREDENTIALS``, or the
            machine's own account.
        project: Billed where the bucket asks for it; else ``GOOGLE_CLOUD_PROJECT``.
        anonymous: Use no credentials. None: where there are none.
        endpoint_url: Else ``STORAGE_EMULATOR_HOST``.
        access_key_id: An HMAC key; else ``GCS_KEY``. With it the bucket is spoken to in S3's language.
        secret_access_key: Its secret; else ``GCS_SECRET``.
        timeout_s: Longest silence on a connection.
    """

    credentials_file: str | None = None
    project: str | None = None
    anonymous: bool | None = None
    endpoint_url: str | None = None
    access_key_id: str | None = field(default=None, repr=False)
    secret_access_key: str | None = field(default=None, repr=False)
    timeout_s: float = 60.0


def gcs_store(bucket: str, prefix: str, options: GcsOptions) -> BodyStore:
    """The store of ``gs://bucket/prefix``: with HMAC keys that of S3, else Google's own.

    Raises:
        ValueError: Half a pair of keys.
    """
    key = options.access_key_id or os.environ.get("GCS_KEY")
    secret = options.secret_access_key or os.environ.get("GCS_SECRET")
    if (options.access_key_id and not secret) or (options.secret_access_key and not key):
        raise ValueError("access_key_id and secret_access_key (GCS_KEY and GCS_SECRET) come together; one is missing")
    if key and secret:
        endpoint = options.endpoint_url or _HOME
        interop = S3Options(endpoint, "auto", None, key, secret, anonymous=False, timeout_s=options.timeout_s)
        return S3Store(bucket, prefix, interop, scheme="gs")
    return GcsStore(bucket, prefix, options)


class GcsStore(BodyStore):
    """Objects of one bucket below a prefix, by Google's JSON API."""

    def __init__(self, bucket: str, prefix: str, options: GcsOptions | None = None) -> None:
        self._bucket = bucket
        self._prefix = prefix
        self._options = options or GcsOptions()
        self._client = PerProcess(self._connect)

    @property
    def url(self) -> str:
        """Bucket and prefix."""
        return f"gs://{join(self._bucket, self._prefix) if self._prefix else self._bucket}"

    @property
    def cuts_ranges(self) -> bool:
        """It does."""
        return True

    def open(self, name: str, begin: int = 0, end: int | None = None) -> Body:
        """The bytes ``[begin, end)`` of an object, by one GET."""
        key = urllib.parse.quote(join(self._prefix, check_name(name)), safe="")
        address = f"{self._endpoint()}/download/storage/v1/b/{self._bucket}/o/{key}?alt=media{self._billing('&')}"
        header = range_header(begin, end)
        headers = {"Accept-Encoding": "gzip"} | ({"Range": header} if header else {})

        def explain(error: Exception) -> Exception | None:
            return self._explain(name, error)

        def request() -> Any:
            answer = self._client()[1].get(address, headers=headers, stream=True, timeout=self._options.timeout_s)
            if answer.status_code >= 400 and answer.status_code != 416:
                with answer:
                    raise _StatusError(answer.status_code, answer.raw.read(_SAID_BYTES, decode_content=True))
            return answer

        answer = attempt(request, explain)
        if answer.status_code == 416:
            answer.close()
            return Body(iter(()), 0, where=f"{self.url}/{name}")
        # Undecoded, as stored: what an object's Content-Encoding says is its reader's business.
        raw = answer.raw
        chunks = explained_chunks(iter(lambda: raw.read(CHUNK_BYTES, decode_content=False), b""), explain)
        length = answer.headers.get("Content-Length")
        version = answer.headers.get("x-goog-generation")
        return Body(chunks, int(length) if length else None, version, answer.close, f"{self.url}/{name}")

    def put(self, name: str, source: Path | bytes, *, if_absent: bool = False, if_version: str | None = None) -> None:
        """One upload, checked by Google against its CRC32C."""

        conditional = check_conditions(name, if_absent, if_version)
        wanted: dict[str, Any] = {"timeout": self._options.timeout_s, "retry": None}
        if conditional:
            wanted["if_generation_match"] = 0 if if_version is None else int(if_version)

        def upload() -> None:
            with source_file(source) as file:
                self._blob(name).upload_from_file(file, content_type="application/octet-stream", **wanted)

        def explain(error: Exception) -> Exception | None:
            if conditional and getattr(error, "code", None) == 412:
                return refused_put(f"{self.url}/{name}", if_absent)
            return self._explain(name, error)

        attempt(upload, explain)

    def list(self, prefix: str = "") -> Iterator[ObjectEntry]:
        """All objects whose names begin with `prefix`, a page at a time."""

        def explain(error: Exception) -> Exception | None:
            return self._explain(prefix, error)

        def start() -> Any:
            client = self._client()[0]
            bucket = client.bucket(self._bucket, user_project=self._payer())
            wanted = {"prefix": join(self._prefix, prefix), "timeout": self._options.timeout_s, "retry": None}
            return iter(client.list_blobs(bucket, fields="items(name,size),nextPageToken", **wanted))

        blobs = attempt(start, explain)
        while (blob := attempt(lambda: next(blobs, None), explain)) is not None:
            yield ObjectEntry(relative(blob.name, self._prefix), blob.size)

    def delete(self, name: str) -> None:
        """Remove an object."""
        try:
            attempt(lambda: self._blob(name).delete(retry=None), lambda error: self._explain(name, error))
        except NotFoundError:
            return

    def exists(self, name: str) -> bool:
        """Whether there is such an object."""
        return attempt(lambda: bool(self._blob(name).exists(retry=None)), lambda error: self._explain(name, error))

    def _blob(self, name: str) -> Any:
        bucket = self._client()[0].bucket(self._bucket, user_project=self._payer())
        return bucket.blob(join(self._prefix, check_name(name)))

    def _payer(self) -> str | None:
        return self._options.project

    def _billing(self, separator: str) -> str:
        payer = self._payer()
        return f"{separator}userProject={urllib.parse.quote(payer)}" if payer else ""

    def _endpoint(self) -> str:
        given = self._options.endpoint_url or os.environ.get("STORAGE_EMULATOR_HOST") or _HOME
        return (given if "://" in given else f"http://{given}").rstrip("/")

    def _connect(self) -> tuple[Any, Any]:
        """The client, and the authorised session that it shares with our own reads."""
        try:
            from google.cloud import storage
            from requests.adapters import HTTPAdapter
        except ImportError as error:
            raise missing_extra("google-cloud-storage", "gcs", f"using {self.url}") from error
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
        path = self._options.credentials_file
        if self._options.anonymous or (self._endpoint() != _HOME and not path):
            return anonymous()
        try:
            found = auth.load_credentials_from_file(path, scopes=[_SCOPE]) if path else auth.default(scopes=[_SCOPE])
        except missing:
            # Not set up: the bucket may be public. Set up wrongly is the user's to know.
            if path or os.environ.get("GOOGLE_APPLICATION_CREDENTIALS") or self._options.anonymous is False:
                raise
            return anonymous()
        return found[0]

    def _explain(self, name: str, error: Exception) -> Exception | None:
        where = f"{self.url}/{name}"
        kinds = {kind.__name__ for kind in type(error).__mro__}
        status = getattr(error, "code", None)
        status = int(status) if isinstance(status, int) else 0
        if "GoogleAuthError" in kinds and "TransportError" not in kinds:
            return AccessError(f"{where}: no usable credentials ({summarize(error)}). {_REMEDY}")
        if status == 404:
            if "bucket does not exist" in str(error):
                return NotFoundError(f"{where}: there is no bucket {self._bucket!r}. Check the URL.")
            return NotFoundError(f"{where}: no such object. Check the URL.")
        if status in (401, 403):
            return AccessError(f"{where}: refused ({summarize(error)}). {_REMEDY}")
        if status in (408, 429) or status >= 500:
            return UnavailableError(f"{where}: {summarize(error)}. The store is overloaded or in trouble.")
        if kinds & {"RequestException", "TransportError", "HTTPError", "OSError", "ConnectionError", "DataCorruption"}:
            return UnavailableError(f"{where}: {summarize(error)}. Look at the network.")
        if kinds & {"GoogleAPIError", "GoogleCloudError", "_StatusError", "InvalidResponse"}:
            return StoreError(f"{where}: {summarize(error)}. Check the URL and the options.")
        return None


_REMEDY = (
    "Set GOOGLE_APPLICATION_CREDENTIALS to a key file, or run `gcloud auth application-default login`, or give HMAC "
    "keys in GCS_KEY and GCS_SECRET; the account needs the right to this bucket (Storage Object User)."
)


class _StatusError(Exception):
    """An answer that is no success."""

    def __init__(self, code: int, said: bytes) -> None:
        super().__init__(f"status {code}: {said.decode(errors='replace')}")
        self.code = code
