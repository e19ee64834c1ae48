"""S3, and everything that speaks its language: R2, B2, CoreWeave, MinIO, Ceph, Google's interoperable API."""

from __future__ import annotations

import base64
import hashlib
import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from lightning_stream.errors import (
    AccessError,
    ConflictError,
    NotFoundError,
    StoreError,
    UnavailableError,
    missing_extra,
    redact,
    summarize,
)

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

T = TypeVar("T")
_log = logging.getLogger("lightning_stream.stores")
_MULTIPART_FROM = 64 << 20
_NOT_FOUND = {"NoSuchKey", "NoSuchBucket", "NotFound", "404"}
_ACCESS = {
    *("AccessDenied", "AllAccessDisabled", "AuthorizationHeaderMalformed", "ExpiredToken", "Forbidden", "401", "403"),
    *("InvalidAccessKeyId", "InvalidSecurity", "InvalidToken", "RequestTimeTooSkewed", "SignatureDoesNotMatch"),
}
_PASSING = {
    "ConditionalRequestConflict",
    "BadDigest",
    "RequestTimeout",
    "SlowDown",
    "Throttling",
    "ThrottlingException",
    "TooManyRequests",
    "InternalError",
}
_CREDENTIALS = {
    *("NoCredentialsError", "PartialCredentialsError", "CredentialRetrievalError", "ProfileNotFound"),
    *("TokenRetrievalError", "SSOTokenLoadError", "UnauthorizedSSOTokenError"),
}
_BROKEN = {
    *("HTTPClientError", "EndpointConnectionError", "ConnectTimeoutError", "ReadTimeoutError", "ConnectionError"),
    *("ConnectionClosedError", "ProxyConnectionError", "ResponseStreamingError", "IncompleteReadError", "SSLError"),
    *("ProtocolError", "TimeoutError", "MetadataRetrievalError"),
}


@dataclass(frozen=True)
class S3Options:
    """Options for ``s3://``; what is not given comes from the variables and files that AWS tools read.

    Attributes:
        endpoint_url: Else ``S3_ENDPOINT_URL``, ``AWS_ENDPOINT_URL_S3``, ``AWS_ENDPOINT_URL``.
        region: Else ``AWS_REGION``, ``AWS_DEFAULT_REGION``, the profile's.
        profile: Else ``AWS_PROFILE``.
        access_key_id: With `secret_access_key`, and `session_token` if temporary; else AWS's usual places.
        anonymous: Sign nothing. None: where there are no credentials, or they are refused and the bucket is public.
        requester_pays: Else ``AWS_REQUEST_PAYER=requester``.
        addressing_style: ``"path"``, ``"virtual"``, or None to let the client choose.
        timeout_s: Longest silence on a connection.
    """

    endpoint_url: str | None = None
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
                f"endpoint_url (or S3_ENDPOINT_URL, AWS_ENDPOINT_URL) is a URL; got {shown!r}. Write https://{shown}, "
                f"or http://{shown} where the server has no TLS."
            )

    def resolved(self) -> S3Options:
        """With the variables read that the client itself does not.

        Raises:
            ValueError: A variable that is none.
        """
        env = os.environ.get
        payer = self.requester_pays
        return replace(
            self,
            endpoint_url=self.endpoint_url
            or env("S3_ENDPOINT_URL")
            or env("AWS_ENDPOINT_URL_S3")
            or env("AWS_ENDPOINT_URL"),
            region=self.region or env("AWS_REGION") or env("AWS_DEFAULT_REGION"),
            requester_pays=env("AWS_REQUEST_PAYER", "").lower() == "requester" if payer is None else payer,
        )


class S3Store(BodyStore):
    """Objects of one bucket below a prefix.

    Args:
        bucket: The bucket.
        prefix: The folder in it, without slashes at its ends; may be empty.
        options: See :class:`S3Options`.
        scheme: For messages: ``"s3"``, or ``"gs"`` when Google's bucket is spoken to in S3's language.
    """

    def __init__(self, bucket: str, prefix: str, options: S3Options | None = None, scheme: str = "s3") -> None:
        self._bucket = bucket
        self._prefix = prefix
        self._options = options or S3Options()
        self._url = f"{scheme}://{join(bucket, prefix) if prefix else bucket}"
        self._signed = PerProcess(self._make_signed)
        self._unsigned = PerProcess(self._make_unsigned)
        self._public = False
        self._without_credentials = False  # known once a client was made

    @property
    def url(self) -> str:
        """Bucket and prefix."""
        return self._url

    @property
    def identity(self) -> str:
        """The URL at its endpoint."""
        endpoint = self._options.resolved().endpoint_url
        return f"{self._url}@{endpoint}" if endpoint else self._url

    @property
    def cuts_ranges(self) -> bool:
        """It does."""
        return True

    def open(self, name: str, begin: int = 0, end: int | None = None) -> Body:
        """The bytes ``[begin, end)`` of an object, by one GET."""
        wanted = self._wanted(name)
        header = range_header(begin, end)
        if header is not None:
            wanted["Range"] = header
        try:
            found = self._reading(name, lambda client: client.get_object(**wanted))
        except _PastTheEndError:
            return Body(iter(()), 0, where=f"{self._url}/{name}")
        body = found["Body"]

        def explain(error: Exception) -> Exception | None:
            return self._explain(name, error)

        chunks = explained_chunks(iter(lambda: body.read(CHUNK_BYTES), b""), explain)
        return Body(chunks, found["ContentLength"], found.get("ETag"), body.close, f"{self._url}/{name}")

    def put(self, name: str, source: Path | bytes, *, if_absent: bool = False, if_version: str | None = None) -> None:
        """One PUT; a large file goes as several parts."""
        conditional = check_conditions(name, if_absent, if_version)
        wanted = self._wanted(name)
        if conditional:
            wanted |= {"IfNoneMatch": "*"} if if_absent else {"IfMatch": if_version}
        large = not conditional and isinstance(source, Path) and source.stat().st_size > _MULTIPART_FROM

        def upload() -> None:
            with source_file(source) as file:
                if large:
                    extra = {"RequestPayer": "requester"} if "RequestPayer" in wanted else {}
                    self._signed().upload_fileobj(file, self._bucket, wanted["Key"], ExtraArgs=extra)
                else:
                    self._signed().put_object(Body=file, **wanted, **self._checksum(file))

        def explain(error: Exception) -> Exception | None:
            answer = getattr(error, "response", None) or {}
            code = str(answer.get("Error", {}).get("Code", ""))
            if conditional and (code in ("PreconditionFailed", "412") or (if_version and code in _NOT_FOUND)):
                return refused_put(f"{self._url}/{name}", if_absent)
            return self._explain(name, error)

        try:
            attempt(upload, explain)
        except ConflictError:
            # Ceph's gateway compares with an ETag without its quotes, which the standard asks for.
            found = attempt(lambda: self._signed().head_object(**self._wanted(name)), explain)
            if found["ETag"] != if_version:
                raise
            wanted["IfMatch"] = found["ETag"].strip('"')
            attempt(upload, explain)

    def list(self, prefix: str = "") -> Iterator[ObjectEntry]:
        """All objects whose names begin with `prefix`, a page at a time."""
        wanted = {**self._wanted(None), "Prefix": join(self._prefix, prefix)}
        while True:
            page = self._reading(prefix, lambda client: client.list_objects_v2(**wanted))
            for found in page.get("Contents", ()):
                yield ObjectEntry(relative(found["Key"], self._prefix), found["Size"])
            if not page.get("IsTruncated"):
                return
            wanted["ContinuationToken"] = page["NextContinuationToken"]

    def delete(self, name: str) -> None:
        """Remove an object."""
        wanted = self._wanted(name)
        attempt(lambda: self._signed().delete_object(**wanted), lambda error: self._explain(name, error))

    def exists(self, name: str) -> bool:
        """Whether there is such an object, by one HEAD."""
        wanted = self._wanted(name)
        try:
            self._reading(name, lambda client: client.head_object(**wanted))
        except NotFoundError:
            return False
        return True

    def _checksum(self, file: BinaryIO) -> dict[str, str]:
        """What lets the server refuse bytes that changed on the way; AWS's own endpoint gets a CRC from the client."""
        if not self._options.resolved().endpoint_url:
            return {}
        digest = hashlib.md5(usedforsecurity=False)
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
        file.seek(0)
        return {"ContentMD5": base64.b64encode(digest.digest()).decode()}

    def _wanted(self, name: str | None) -> dict[str, Any]:
        wanted = {"Bucket": self._bucket}
        if name is not None:
            wanted["Key"] = join(self._prefix, check_name(name))
        if self._options.resolved().requester_pays:
            wanted["RequestPayer"] = "requester"
        return wanted

    def _reading(self, name: str, call: Callable[[Any], T]) -> T:
        """A read; where credentials are refused, the bucket may still be public."""

        def explain(error: Exception) -> Exception | None:
            return self._explain(name, error)

        if self._public:
            return attempt(lambda: call(self._unsigned()), explain)
        try:
            return attempt(lambda: call(self._signed()), explain)
        except AccessError:
            if self._options.anonymous is not None or self._options.resolved().requester_pays:
                raise
            try:
                found = attempt(lambda: call(self._unsigned()), explain)
            except StoreError:
                found = None
            if found is None:
                raise
        _log.warning("%s: the credentials were refused, but it is public: reading it without them", self._url)
        self._public = True
        return found

    def _make_signed(self) -> Any:
        options = self._options.resolved()
        session = self._session(options)
        signed = options.anonymous is not True and session.get_credentials() is not None
        self._without_credentials = not signed and not options.anonymous
        return self._client(session, options, signed=signed)

    def _make_unsigned(self) -> Any:
        options = self._options.resolved()
        return self._client(self._session(options), options, signed=False)

    def _session(self, options: S3Options) -> Any:
        try:
            import boto3
        except ImportError as error:
            raise missing_extra("boto3", "s3", f"using {self._url}") from error
        return boto3.session.Session(
            botocore_session=_core_session(),
            aws_access_key_id=options.access_key_id,
            aws_secret_access_key=options.secret_access_key,
            aws_session_token=options.session_token,
            region_name=options.region,
            profile_name=options.profile,
        )

    def _client(self, session: Any, options: S3Options, *, signed: bool) -> Any:
        import botocore
        from botocore.config import Config

        settings: dict[str, Any] = {
            "connect_timeout": min(options.timeout_s, 20.0),
            "read_timeout": options.timeout_s,
            "retries": {"total_max_attempts": 1, "mode": "standard"},  # ours resume bodies too
            "max_pool_connections": 64,
            "tcp_keepalive": True,
        }
        if options.endpoint_url and hasattr(Config, "OPTION_DEFAULTS"):
            # Not every compatible server knows the newer trailing checksums.
            checksums = ("request_checksum_calculation", "response_checksum_validation")
            settings |= {name: "when_required" for name in checksums if name in Config.OPTION_DEFAULTS}
        if not signed:
            settings["signature_version"] = botocore.UNSIGNED
        if options.addressing_style:
            settings["s3"] = {"addressing_style": options.addressing_style}
        region = session.region_name or ("us-east-1" if options.endpoint_url else None)
        return session.client("s3", endpoint_url=options.endpoint_url, region_name=region, config=Config(**settings))

    def _explain(self, name: str, error: Exception) -> Exception | None:
        kind = type(error).__name__
        where = f"{self._url}/{name}"
        answer = getattr(error, "response", None)  # errors of the connection have one too, that is None
        if isinstance(answer, dict):
            return self._explain_answer(where, error, answer)
        if kind in _CREDENTIALS:
            return AccessError(
                f"{where}: no usable AWS credentials ({summarize(error)}). Set AWS_ACCESS_KEY_ID and "
                "AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, or log in; for a public bucket pass anonymous=True."
            )
        if isinstance(error, RecursionError):  # botocore asks a redirecting server for the bucket's region, and so on
            return StoreError(
                f"{where}: the server answers with redirects only. Set the region and endpoint_url of it."
            )
        if kind in _BROKEN or isinstance(error, (ConnectionError, TimeoutError)):
            return UnavailableError(f"{where}: {summarize(error)}. Look at the network and the endpoint.")
        if type(error).__module__.split(".")[0] in ("botocore", "boto3", "s3transfer"):
            return StoreError(f"{where}: {summarize(error)}. Check the URL and the options.")
        return None

    def _explain_answer(self, where: str, error: Exception, answer: dict[str, Any]) -> Exception:
        code = str(answer.get("Error", {}).get("Code", ""))
        status = answer.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
        said = summarize(error)
        if code == "NoSuchBucket":
            return NotFoundError(f"{where}: there is no bucket {self._bucket!r}. Check the URL, endpoint and region.")
        if code == "InvalidObjectState":
            return StoreError(f"{where}: archived ({said}). Restore it first.")
        if code in ("InvalidRange", "416"):
            return _PastTheEndError(f"{where}: past its end")
        if code in _PASSING or status == 429 or status >= 500:
            return UnavailableError(f"{where}: {said}. The store is overloaded or in trouble; ask for less at once.")
        if code in _NOT_FOUND or status == 404:
            return NotFoundError(f"{where}: no such object. Check the URL.")
        if (code in _ACCESS or status in (401, 403)) and self._without_credentials:
            return AccessError(
                f"{where}: it is not public ({said}), and no AWS credentials were found. Set AWS_ACCESS_KEY_ID and "
                "AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, or log in (`aws sso login`); on the worker nodes too."
            )
        if code in _ACCESS or status in (401, 403):
            return AccessError(
                f"{where}: refused ({said}). Check the credentials, their right to this bucket, the region and the "
                "clock; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY or AWS_PROFILE; requester_pays if it asks so."
            )
        return StoreError(f"{where}: {said}. Check the URL, region and endpoint.")


_loader: Any = None  # of what describes AWS's services; it holds nothing of a session's


def _core_session() -> Any:
    """A session that shares that with all others of this process and its forks: 50 ms saved for each client."""
    global _loader
    import botocore.session

    session: Any = botocore.session.Session()
    _loader = _loader or session.get_component("data_loader")
    _loader.search_paths[:] = dict.fromkeys(_loader.search_paths)  # every session of boto3's adds its path once more
    _loader.list_available_services = partial(_services, _loader)
    session.register_component("data_loader", _loader)
    return session


def _services(loader: Any, _: str) -> list[str]:
    """What there are folders for. The loader's own answer looks into each of the 400: 15 ms, only to find S3."""
    folders = (Path(path) for path in loader.search_paths if Path(path).is_dir())
    return sorted({path.name for folder in folders for path in folder.iterdir()})


class _PastTheEndError(StoreError):
    """A range that begins at or after the object's end."""
