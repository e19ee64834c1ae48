"""S3 and the services with its protocol: R2, B2, CoreWeave, MinIO, Ceph, Google's interoperable API."""

from __future__ import annotations

import base64
import gzip
import hashlib
import logging
import os
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import msgspec

from lightning_stream.errors import AccessError, NotFoundError, StoreError, needs, redact, summarize

from .base import BaseStore, BucketStore, ListingPage, PreconditionError, StoreTraits
from .s3_gets import ObjectGets
from .transfer import (
    ObjectStream,
    PerProcess,
    first_set,
    header_stream,
    proxy_for,
    range_header,
    read_options,
    split_url,
)

T = TypeVar("T")
_loader: Any = None  # reads the descriptions of AWS's services; all sessions of a process share it, see `_make_loader`
_log = logging.getLogger("lightning_stream.stores")
_MULTIPART_FROM = 64 << 20
# The status of a code of S3; some servers answer with another status.
_STATUS = {
    **dict.fromkeys(("NoSuchKey", "NotFound"), 404),
    **dict.fromkeys(("AccessDenied", "AllAccessDisabled", "AuthorizationHeaderMalformed", "ExpiredToken"), 403),
    **dict.fromkeys(("Forbidden", "InvalidAccessKeyId", "InvalidSecurity", "InvalidToken"), 403),
    **dict.fromkeys(("RequestTimeTooSkewed", "SignatureDoesNotMatch"), 403),
    **dict.fromkeys(("BadDigest", "RequestTimeout", "SlowDown", "Throttling", "ThrottlingException"), 503),
    **dict.fromkeys(("TooManyRequests", "InternalError", "ConditionalRequestConflict"), 503),
    "PreconditionFailed": 412,
    "InvalidRange": 416,
}
_CREDENTIALS = {
    *("NoCredentialsError", "PartialCredentialsError", "CredentialRetrievalError", "ProfileNotFound"),
    *("TokenRetrievalError", "SSOTokenLoadError", "UnauthorizedSSOTokenError"),
}


@dataclass(frozen=True)
class S3Options:
    """Options for ``s3://``; the others come from the variables and files that AWS tools read.

    Attributes:
        endpoint_url: Else ``S3_ENDPOINT_URL``, ``AWS_ENDPOINT_URL_S3``, ``AWS_ENDPOINT_URL``.
        region, profile: Else ``AWS_REGION``, ``AWS_DEFAULT_REGION`` or that of the profile; ``AWS_PROFILE``.
        access_key_id, secret_access_key, session_token: The last one for temporary keys only.
        anonymous: Sign no request. None: if there are no credentials, or they are refused and the bucket is public.
        requester_pays: Else ``AWS_REQUEST_PAYER=requester``.
        addressing_style: ``"path"``, ``"virtual"``, or None to let the client choose.
        timeout_s: Longest silence on a connection.
    """

    endpoint_url: str | None = field(default=None, repr=False)
    region: str | None = None
    profile: str | None = None
    access_key_id: str | None = field(default=None, repr=False)
    secret_access_key: str | None = field(default=None, repr=False)
    session_token: str | None = field(default=None, repr=False)
    anonymous: bool | None = None
    requester_pays: bool | None = None
    addressing_style: str | None = None
    timeout_s: float = 60.0

    def __post_init__(self) -> None:
        if (self.access_key_id is None) != (self.secret_access_key is None):
            raise ValueError("access_key_id and secret_access_key come together; got one without the other")
        if self.endpoint_url and not self.endpoint_url.startswith(("http://", "https://")):
            shown = redact(self.endpoint_url)
            raise ValueError(
                f"endpoint_url or S3_ENDPOINT_URL is a URL; got {shown!r}. Use https://{shown} or http://."
            )

    def resolved_endpoint(self) -> str | None:
        """Return the endpoint, from the options or the variables."""
        return self.endpoint_url or first_set("S3_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")

    def resolved(self) -> S3Options:
        """Add the variables that the client itself does not read; ValueError if one of them is not a URL."""
        region = self.region or first_set("AWS_REGION", "AWS_DEFAULT_REGION")
        return replace(self, endpoint_url=self.resolved_endpoint(), region=region)

    def resolved_payer(self) -> bool:
        """Return whether the requester pays, from the options or the variable."""
        asked = os.environ.get("AWS_REQUEST_PAYER", "").lower() == "requester"
        return asked if self.requester_pays is None else self.requester_pays


class S3Store(BucketStore):
    """Objects of one bucket below a prefix. `scheme` is ``"gs"`` for Google's interoperable API.

    Conditional puts need a server that knows ``If-None-Match`` and ``If-Match`` (AWS since 2024, R2, MinIO, Ceph, ...).
    A server that ignores them cannot be recognised. So with an endpoint the object's ETag is compared first: then only
    puts at the same instant can both succeed.
    """

    access_remedy = (
        "Check the credentials, their right to this bucket, the region and the clock; set AWS_ACCESS_KEY_ID and "
        "AWS_SECRET_ACCESS_KEY or AWS_PROFILE; requester_pays if it asks so."
    )
    network_errors = BaseStore.network_errors | {
        *("HTTPClientError", "EndpointConnectionError", "ConnectTimeoutError", "ReadTimeoutError", "SSLError"),
        *("ConnectionClosedError", "ProxyConnectionError", "ResponseStreamingError", "IncompleteReadError"),
        *("ProtocolError", "MetadataRetrievalError"),
    }
    client_errors = frozenset({"BotoCoreError", "ClientError", "Boto3Error", "S3UploadFailedError"})

    def __init__(self, bucket: str, prefix: str, options: S3Options | None = None, scheme: str = "s3") -> None:
        super().__init__(bucket, prefix, f"{scheme}://{bucket}/{prefix}")
        self._options = options or S3Options()
        # AWS sorts, except its directory buckets. Google knows If-Match only in its own protocol.
        aws = self._options.resolved_endpoint() is None and not bucket.endswith("--x-s3")
        self.traits = StoreTraits(ranges=True, sorted_listing=aws, conditional_put=scheme == "s3")
        self._signed = PerProcess(partial(self._connect, signed=True))
        self._unsigned = PerProcess(partial(self._connect, signed=False))
        self._public = False
        self._without_credentials = False  # known once a client was made

    @classmethod
    def from_url(cls, url: str, options: Mapping[str, Any]) -> BaseStore:
        return cls(*split_url(url), read_options(S3Options, options, "s3://"))

    @property
    def identity(self) -> str:
        endpoint = self._options.resolved_endpoint()
        return f"{self.url}@{redact(endpoint)}" if endpoint else self.url

    def _open(self, name: str, begin: int, end: int | None) -> ObjectStream:
        wanted = self._wanted(name) | range_header(begin, end)
        raw = self._reading(name, lambda gets: gets.open(wanted))
        return header_stream(raw, raw.headers, raw.headers.get("ETag"), raw.close)

    def _put(self, name: str, file: BinaryIO, num_bytes: int, if_absent: bool, if_version: str | None) -> None:
        wanted = self._wanted(name)
        condition = {"IfNoneMatch": "*"} if if_absent else {} if if_version is None else {"IfMatch": if_version}
        if num_bytes > _MULTIPART_FROM and not condition:
            extra = {"RequestPayer": "requester"} if "RequestPayer" in wanted else {}
            self._signed().client.upload_fileobj(file, self._bucket, wanted["Key"], ExtraArgs=extra)
            return
        more = self._checksum(file) | condition
        if condition and self._options.resolved_endpoint() and self._etag(name) != if_version:
            raise PreconditionError(name)
        try:
            self._signed().client.put_object(Body=file, **wanted, **more)
        except Exception as error:
            # Ceph's gateway expects an ETag without the quotes that the standard demands.
            if if_version is None or self._status(error) != 412 or self._etag(name) != if_version:
                raise
            file.seek(0)
            self._signed().client.put_object(Body=file, **wanted, **{**more, "IfMatch": if_version.strip('"')})

    def _etag(self, name: str) -> str | None:
        with suppress(NotFoundError), self.translate_errors(name):
            return str(self._signed().client.head_object(**self._wanted(name))["ETag"])
        return None

    def _list_page(self, prefix: str, token: str | None) -> ListingPage:
        wanted = {**self._wanted(None), "Prefix": self._prefix + prefix}
        if token is not None:
            wanted["ContinuationToken"] = token
        page = self._reading(prefix, lambda gets: gets.client.list_objects_v2(**wanted))
        entries = [self._entry(item["Key"], item["Size"], item.get("ETag")) for item in page.get("Contents", ())]
        return entries, page["NextContinuationToken"] if page.get("IsTruncated") else None

    def _delete(self, name: str) -> None:
        self._signed().client.delete_object(**self._wanted(name))

    def _checksum(self, file: BinaryIO) -> dict[str, Any]:
        """Return a checksum for the server to verify. For AWS's own endpoint the client sends a CRC."""
        if not self._options.resolved_endpoint():
            return {}
        digest = hashlib.md5(usedforsecurity=False)
        while chunk := file.read(1 << 20):
            digest.update(chunk)
        file.seek(0)
        return {"ContentMD5": base64.b64encode(digest.digest()).decode()}

    def _wanted(self, name: str | None) -> dict[str, Any]:
        wanted = {"Bucket": self._bucket}
        if name is not None:
            wanted["Key"] = self._prefix + name
        if self._options.resolved_payer():
            wanted["RequestPayer"] = "requester"
        return wanted

    def _reading(self, name: str, call: Callable[[ObjectGets], T]) -> T:
        """Make a reading call; if credentials are refused, try without them, since the bucket may be public."""
        if self._public:
            return call(self._unsigned())
        try:
            with self.translate_errors(name):
                return call(self._signed())
        except AccessError:
            if self._options.anonymous is not None or self._options.resolved_payer():
                raise
            with suppress(StoreError), self.translate_errors(name):
                found = call(self._unsigned())
                _log.warning("%s: the credentials were refused; it is public, so it is read without them", self.url)
                self._public = True
                return found
            raise

    def _connect(self, signed: bool) -> ObjectGets:
        with needs("boto3", "s3", f"using {self.url}"):
            import boto3
            import botocore.session
            from botocore.config import Config
        global _loader
        options, core = self._options.resolved(), botocore.session.Session()
        _loader = _loader or _make_loader(core.get_component("data_loader").search_paths)
        core.register_component("data_loader", _loader)
        session = boto3.session.Session(
            botocore_session=core,
            aws_access_key_id=options.access_key_id,
            aws_secret_access_key=options.secret_access_key,
            aws_session_token=options.session_token,
            region_name=options.region,
            profile_name=options.profile,
        )
        if signed:
            signed = options.anonymous is not True and session.get_credentials() is not None
            self._without_credentials = not signed and not options.anonymous
        settings: dict[str, Any] = {
            "connect_timeout": min(options.timeout_s, 20.0),
            "read_timeout": options.timeout_s,
            "retries": {"total_max_attempts": 1, "mode": "standard"},  # RetryingStore resumes streams too
            "max_pool_connections": 64,
            "tcp_keepalive": True,
        }
        if options.endpoint_url:
            # Not every compatible server knows the newer trailing checksums.
            checksums = ("request_checksum_calculation", "response_checksum_validation")
            settings |= {name: "when_required" for name in checksums if name in Config.OPTION_DEFAULTS}
        if proxies := _proxies(options.endpoint_url or "https://s3.amazonaws.com"):
            settings["proxies"] = proxies
        if not signed:
            settings["signature_version"] = botocore.UNSIGNED
        if options.addressing_style:
            settings["s3"] = {"addressing_style": options.addressing_style}
        region = session.region_name or ("us-east-1" if options.endpoint_url else None)
        config = Config(**settings)
        return ObjectGets(session.client("s3", endpoint_url=options.endpoint_url, region_name=region, config=config))

    def _status(self, error: Exception) -> int:
        answer = _answer(error)
        code = str(answer.get("Error", {}).get("Code", ""))
        status = int(answer.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
        return _STATUS.get(code) or (int(code) if code.isdigit() else status)

    def _special_error(self, error: Exception, where: str) -> Exception | None:
        code = _answer(error).get("Error", {}).get("Code")
        reason = summarize(error)
        if type(error).__name__ in _CREDENTIALS:
            return AccessError(
                f"{where}: no usable AWS credentials ({reason}). Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or "
                "AWS_PROFILE, or log in; for a public bucket pass anonymous=True."
            )
        # botocore asks a redirecting server for the bucket's region, which redirects again.
        if isinstance(error, RecursionError) or "maximum recursion depth" in str(error):
            return StoreError(f"{where}: the server answers with redirects only. Set its region and endpoint_url.")
        if code == "NoSuchBucket":
            return NotFoundError(f"{where}: there is no bucket {self._bucket!r}. Check the URL, endpoint and region.")
        if code == "InvalidObjectState":
            return StoreError(f"{where}: archived ({reason}). Restore it first.")
        if self._status(error) in (401, 403) and self._without_credentials:
            return AccessError(
                f"{where}: it is not public ({reason}), and no AWS credentials were found. Set AWS_ACCESS_KEY_ID and "
                "AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, or log in (`aws sso login`); on the worker nodes too."
            )
        return None


def _make_loader(folders: list[str]) -> Any:
    """Make a loader of descriptions that is like botocore's, and with which a first client takes 30 ms instead of 60.

    That one parses JSON into ordered dicts, and looks up 900 files to list the services.
    """
    from botocore.loaders import JSONFileLoader, Loader

    class Files(JSONFileLoader):  # type: ignore[misc]
        def load_file(self, file_path: str) -> Any:
            for suffix, read in ((".json", open), (".json.gz", gzip.open)):
                with suppress(FileNotFoundError), read(file_path + suffix, "rb") as file:
                    return msgspec.json.decode(file.read())
            return None

    class Descriptions(Loader):  # type: ignore[misc]
        def list_available_services(self, type_name: str) -> list[str]:  # noqa: ARG002 - they have all types
            return sorted({path.name for folder in folders for path in Path(folder).glob("*/")})

    return Descriptions(folders, Files(), include_default_search_paths=False)


def _proxies(endpoint: str) -> dict[str, str]:
    """The proxy of the endpoint where ``ALL_PROXY`` names it, which botocore does not read."""
    parts = urllib.parse.urlsplit(endpoint)
    proxy = proxy_for(parts.scheme, parts.hostname or "")
    return {} if proxy is None or parts.scheme in urllib.request.getproxies() else {parts.scheme: proxy}


def _answer(error: Exception) -> dict[str, Any]:
    found = getattr(error, "response", None)  # connection errors have the attribute too, but it is None
    return found if isinstance(found, dict) else {}
