"""S3 and the services with its protocol: R2, B2, CoreWeave, MinIO, Ceph, Google's interoperable API.

botocore finds the credentials and the address of a bucket, and signs; the requests are our own.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, BinaryIO
from urllib.parse import quote, unquote_plus

from lightning_stream.errors import AccessError, StoreError, needs, redact, without_secrets

from .base import AnswerError, ListingPage, PreconditionError, StoreTraits
from .credentials import Keys, Renewed, lasting
from .http import BucketStore, Headers, Request, with_query
from .transfer import content_md5, first_set, shared, xml_of

_log = logging.getLogger("lightning_stream.stores")
_SESSION_S = 240  # a session of a directory bucket is valid for five minutes
_SESSION = "/?session"
AS_STORED = "gzip"  # else Google unpacks what is stored with that encoding, and sends no ranges
_KEY_NAMES = ("access_key_id", "secret_access_key", "session_token")


@dataclass(frozen=True, repr=False)  # some of them are secrets
class S3Options:
    """Options for ``s3://``; the others come from the variables and files that AWS tools read.

    Attributes:
        endpoint_url: Else ``S3_ENDPOINT_URL``, ``AWS_ENDPOINT_URL_S3``, ``AWS_ENDPOINT_URL``.
        region, profile: Else ``AWS_REGION``, ``AWS_DEFAULT_REGION`` or that of the profile; ``AWS_PROFILE``.
        access_key_id, secret_access_key, session_token: The last one for temporary keys only.
        anonymous: Sign no request. None: if there are no credentials, or they are refused and the bucket is public.
        requester_pays: Else ``AWS_REQUEST_PAYER=requester``, or the bucket is one of those that
            ``MOSAICML_STREAMING_AWS_REQUESTER_PAYS`` lists.
        canned_acl: Who may read what is written, e.g. ``"bucket-owner-full-control"``; else ``S3_CANNED_ACL``.
        addressing_style: ``"path"``, ``"virtual"``, or None to let the client choose.
        timeout_s: Longest silence on a connection.
    """

    endpoint_url: str | None = None
    region: str | None = None
    profile: str | None = None
    access_key_id: str | None = None
    secret_access_key: str | None = None
    session_token: str | None = None
    anonymous: bool | None = None
    requester_pays: bool | None = None
    canned_acl: str | None = None
    addressing_style: str | None = None
    timeout_s: float = 60.0

    def __post_init__(self) -> None:
        if (self.access_key_id is None) != (self.secret_access_key is None):
            raise ValueError("access_key_id and secret_access_key come together; got one without the other")
        endpoint = self.resolved_endpoint()
        if endpoint and not endpoint.startswith(("http://", "https://")):
            shown = redact(endpoint)
            raise ValueError(
                f"endpoint_url or S3_ENDPOINT_URL is a URL; got {shown!r}. Use https://{shown} or http://."
            )

    def resolved_endpoint(self) -> str | None:
        """Return the endpoint, from the options or the variables."""
        return self.endpoint_url or first_set("S3_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")

    def resolved_payer(self, bucket: str) -> bool:
        """Return whether the requester pays, from the options or the variables."""
        asked = os.environ.get("AWS_REQUEST_PAYER", "").lower() == "requester"
        asked |= bucket in os.environ.get("MOSAICML_STREAMING_AWS_REQUESTER_PAYS", "").split(",")
        return asked if self.requester_pays is None else self.requester_pays


class S3Store(BucketStore):
    """Objects of one bucket below a prefix. `scheme` is ``"gs"`` for Google's interoperable API.

    Conditional puts need a server that knows ``If-None-Match`` and ``If-Match`` (AWS since 2024, R2, MinIO, Ceph, ...).
    A server that ignores them cannot be recognised. So with an endpoint the object's ETag is compared first: then only
    puts at the same instant can both succeed.
    """

    access_remedy = (
        "Check the credentials, their right to this bucket, the region and the clock; set AWS_ACCESS_KEY_ID and "
        "AWS_SECRET_ACCESS_KEY or AWS_PROFILE, or log in (`aws sso login`), on the worker nodes too; requester_pays if "
        "it asks so; for a public bucket pass anonymous=True."
    )
    key_names = frozenset(_KEY_NAMES)
    redirects = ()  # to another region, where requests are signed for that

    options = S3Options

    def __init__(self, bucket: str, prefix: str, options: S3Options, url: str = "") -> None:
        is_gs = url.startswith("gs://")
        super().__init__(bucket, prefix, options, url if is_gs else f"s3://{bucket}/{prefix}")
        # AWS sorts, except its directory buckets. Google knows If-Match only in its own protocol.
        endpoint = options.resolved_endpoint()
        aws = endpoint is None and not bucket.endswith("--x-s3")
        if is_gs or "storage.googleapis.com" in (endpoint or ""):
            self.encoding = AS_STORED
        if aws:
            self.largest_put = 5 << 30
        self.traits = StoreTraits(ranges=True, sorted_listing=aws, conditional_put=not is_gs)
        self._public = False

    @property
    def identity(self) -> str:
        endpoint = self._options.resolved_endpoint()
        return f"{self.url}@{redact(endpoint)}" if endpoint else self.url

    def _connect(self) -> _Login:
        with needs("botocore", "s3", f"using {self.url}"):
            options = self._options if self.credentials is None else replace(self._options, anonymous=True)
            return _Login(self._bucket, options, Renewed(self._begin_session))

    def _address(self, name: str) -> str:
        return f"{self._login().address}/{quote(self._prefix + name, safe='/~')}"

    def _authorities(self) -> str | None:
        return self._login().authorities or super()._authorities()

    def _sign(self, request: Request) -> None:
        login = self._login()
        if self._options.resolved_payer(self._bucket):
            request.headers["x-amz-request-payer"] = "requester"
        if self._public or (login.credentials is None and self.credentials is None):
            return
        if login.is_directory and not request.url.endswith(_SESSION):
            keys = dict(login.session.get().values)
            request.headers["x-amz-s3session-token"] = keys.pop("session_token")
            login.sign(request, login.made(keys))
        elif self.credentials is not None:
            login.sign(request, login.made(self.credentials.get().values))
        else:
            login.sign(request, login.credentials.get_frozen_credentials())

    def _begin_session(self) -> Keys:
        """Return the keys for a directory bucket, whose requests these sign."""
        answer = self._request("GET", self._login().address + _SESSION)
        page = self._parsed(answer, lambda text: xml_of(text, "CreateSessionResult"))
        named = zip(_KEY_NAMES, ("AccessKeyId", "SecretAccessKey", "SessionToken"), strict=True)
        keys = {option: page.findtext(f".//{{*}}{name}", "") for option, name in named}
        return lasting(keys, time.time() + _SESSION_S)

    def _request(
        self, method: str, url: str, headers: Headers | None = None, body: Any = None, signed: bool = True
    ) -> Any:
        """Send a request; if the bucket is in another region, there; if the credentials are refused, without them."""
        try:
            return super()._request(method, url, headers, body, signed)
        except AnswerError as error:
            is_elsewhere = error.code in (301, 307) or error.name == "AuthorizationHeaderMalformed"
            if is_elsewhere and error.region:
                if body is not None:
                    body.seek(0)
                return super()._request(method, self._login().moved(url, error.region), headers, body, signed)
            if error.code not in (401, 403) or method != "GET" or not self._may_be_public():
                raise
            with suppress(AnswerError):
                answer = super()._request(method, url, headers, signed=False)
                _log.warning("%s: the credentials were refused; it is public, so it is read without them", self.url)
                self._public = True
                return answer
            raise

    def _may_be_public(self) -> bool:
        is_signed = self._login().credentials is not None and not self._public
        return is_signed and self._options.anonymous is None and not self._options.resolved_payer(self._bucket)

    def _proof(self, body: Any) -> Headers:
        """An MD5 digest; in directory buckets, that of the signature. And who may read what is put."""
        usual = first_set("S3_CANNED_ACL") if self.url.startswith("s3://") else None
        acl = self._options.canned_acl or usual
        return {"Content-MD5": None if self._login().is_directory else content_md5(body), "x-amz-acl": acl}

    def _put(self, name: str, file: BinaryIO, num_bytes: int, if_absent: bool, if_version: str | None) -> None:
        is_conditional = if_absent or if_version is not None
        if is_conditional and self._options.resolved_endpoint() and self._etag(name) != if_version:
            raise PreconditionError(name)
        try:
            super()._put(name, file, num_bytes, if_absent, if_version)
        except AnswerError as error:
            # Ceph's gateway expects an ETag without the quotes that the standard demands.
            if if_version is None or error.code != 412 or self._etag(name) != if_version:
                raise
            file.seek(0)
            super()._put(name, file, num_bytes, False, if_version.strip('"'))

    def _etag(self, name: str) -> str | None:
        if (answer := self._if_there("HEAD", self._address(name))) is None:
            return None
        answer.read()
        return self._version(answer, name)

    def _list_page(self, prefix: str, token: str | None) -> ListingPage:
        query = {"list-type": "2", "encoding-type": "url", "prefix": self._prefix + prefix, "continuation-token": token}
        return self._parsed(self._request("GET", with_query(f"{self._login().address}/", query)), self._page)

    def _page(self, text: bytes) -> ListingPage:
        page = xml_of(text, "ListBucketResult")
        unquoted = unquote_plus if page.findtext("{*}EncodingType") == "url" else str
        entries = []
        for item in page.iterfind("{*}Contents"):
            key = unquoted(item.findtext("{*}Key", ""))
            entries.append(self._entry(key, item.findtext("{*}Size", ""), item.findtext("{*}ETag")))
        if page.findtext("{*}IsTruncated") != "true":
            return entries, None
        if not (token := page.findtext("{*}NextContinuationToken")):
            raise StoreError(
                f"{self.url}: a page of a listing says how to get the next one; this server's does not. Use a server "
                "that knows the second version of S3's listing."
            )
        return entries, token

    def _special_error(self, error: Exception, where: str) -> Exception | None:
        if not isinstance(error, AnswerError):
            return super()._special_error(error, where)
        if error.code in (301, 302, 307):
            return StoreError(f"{where}: the server answers with redirects only. Set its region and endpoint_url.")
        if error.name == "InvalidObjectState":
            return StoreError(f"{where}: archived ({error}). Restore it first.")
        has_keys = self.credentials is not None or self._login().credentials is not None
        if error.code in (401, 403) and not has_keys and not self._options.anonymous:
            return AccessError(
                f"{where}: it is not public ({error}), and no AWS credentials were found. Set AWS_ACCESS_KEY_ID and "
                "AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, or log in (`aws sso login`); on the worker nodes too."
            )
        return super()._special_error(error, where)


class _Login:
    """Who asks, and where the bucket is, as botocore has it from variables, files and the machine.

    Attributes:
        credentials: They renew themselves; None: nothing is signed.
        address: The URL of the bucket, in its region.
        authorities: The file of certificates to trust, if one is named.
        is_directory: It is a directory bucket (S3 Express), whose requests a session signs.
        session: The keys of that.
    """

    def __init__(self, bucket: str, options: S3Options, session: Renewed) -> None:
        import botocore.session
        from botocore.auth import S3SigV4Auth
        from botocore.awsrequest import AWSRequest
        from botocore.credentials import Credentials

        for name in ("botocore.auth", "botocore.credentials"):
            logging.getLogger(name).addFilter(without_secrets)
        self._bucket = bucket
        self._options = options
        self.session = session
        self._signer = S3SigV4Auth  # an import in `sign` would take 4 us of each request
        self._request = AWSRequest
        self._credentials = Credentials
        profile = options.profile
        self._botocore = shared(lambda: botocore.session.Session(profile=profile), "s3", profile)
        self.credentials = None
        if options.access_key_id and not options.anonymous:
            self.credentials = Credentials(options.access_key_id, options.secret_access_key, options.session_token)
        elif not options.anonymous:  # where there are none, a machine may be asked for them for seconds
            self.credentials = shared(self._botocore.get_credentials, "s3 credentials", profile)
        self._read = self._botocore.get_config_variable
        self.authorities = self._read("ca_bundle")
        self._addresses: list[str] = []  # also those before another thread has found the bucket in another region
        region = options.region or first_set("AWS_REGION", "AWS_DEFAULT_REGION")
        self._move(region or self._read("region") or "us-east-1")

    def _move(self, region: str) -> None:
        """Find the address in a region: by AWS's rules, with FIPS, dual stack, access points and directory buckets."""
        from botocore.configprovider import ConfiguredEndpointProvider
        from botocore.endpoint_provider import EndpointProvider

        session = self._botocore
        settings = self._read("s3") or {}
        endpoint = self._options.resolved_endpoint()
        if endpoint is None and not self._read("ignore_configured_endpoint_urls"):
            endpoint = ConfiguredEndpointProvider(session.full_config, session.get_scoped_config(), "s3").provide()
        style = self._options.addressing_style or settings.get("addressing_style")
        accelerates = settings.get("use_accelerate_endpoint", False)
        load = session.get_component("data_loader").load_data
        rules = shared(
            lambda: EndpointProvider(load("s3/2006-03-01/endpoint-rule-set-1"), load("partitions")), "s3 rules"
        )
        place = rules.resolve_endpoint(
            Bucket=self._bucket,
            Region=region,
            Endpoint=endpoint,
            Accelerate=accelerates,
            ForcePathStyle=not accelerates and (style != "virtual" if endpoint else style == "path"),
            UseArnRegion=settings.get("use_arn_region", True),
            UseDualStack=endpoint is None and bool(self._read("use_dualstack_endpoint")),
            UseFIPS=endpoint is None and bool(self._read("use_fips_endpoint")),
        )
        self.address: str = place.url
        self._addresses.append(self.address)
        scheme = place.properties["authSchemes"][0]
        if scheme["name"] == "sigv4a":
            raise StoreError(f"{self.address}: a multi-region access point is not read. Use that of one region.")
        self.is_directory = scheme["name"] == "sigv4-s3express"
        self._signed_for = scheme["signingName"], scheme["signingRegion"]

    def moved(self, url: str, region: str) -> str:
        """Return the URL of an object in another region, which is that of the bucket from now on."""
        self._move(region)
        address = next(address for address in self._addresses if url.startswith(address))
        return self.address + url.removeprefix(address)

    def made(self, keys: Mapping[str, Any]) -> Any:
        """Return botocore's credentials with these keys, by the names of the store's options."""
        name, secret, token = map(keys.get, _KEY_NAMES)
        if not (name and secret):
            raise AccessError(
                f"s3://{self._bucket}: credentials= returns access_key_id and secret_access_key, and session_token if "
                f"there is one; it returned {', '.join(keys)}. Correct the function."
            )
        return self._credentials(name, secret, token)

    def sign(self, request: Request, credentials: Any) -> None:
        signed = self._request(request.method, request.url, request.headers, request.body)
        signed.context["has_streaming_input"] = True  # beside an MD5, over TLS, the signature needs no digest of it
        self._signer(credentials, *self._signed_for).add_auth(signed)
        request.headers = dict(signed.headers.items())
