"""HTTP, which all clouds speak: requests, refusals and redirects; web servers, and Hugging Face's hub.

A store that is reached by HTTP is a dialect: it addresses objects, signs requests and reads listings.
"""

from __future__ import annotations

import base64
import ipaddress
import json
import logging
import os
import re
import socket
import sys
import time
import urllib.request
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import lru_cache
from io import DEFAULT_BUFFER_SIZE
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, TypeVar
from urllib.parse import quote, unquote, urlencode, urljoin, urlsplit

import numpy as np

from lightning_stream.errors import (
    AccessError,
    LightningStreamError,
    MissingExtraError,
    NoBucketError,
    StoreError,
    UnavailableError,
    needs,
    redact,
    summarize,
    without_secrets,
)

from .base import AnswerError, BaseStore, ListingPage, ObjectEntry, PreconditionError, StoreTraits
from .credentials import Credentials
from .transfer import (
    CHUNK_BYTES,
    ObjectStream,
    Options,
    PerProcess,
    content_version,
    first_set,
    is_named,
    range_header,
    read_options,
    refuse_query,
    slice_stream,
    split_url,
)

T = TypeVar("T")
Headers = Mapping[str, str | None]  # None: it is not sent
_CONNECT_S = 20.0
_CONNECTIONS = 64
_MOST_REDIRECTS = 10
_COMPRESSED = (".gz", ".br", ".zst", ".zstd", ".bz2", ".snappy", ".lz4", ".tgz")
_TO_ANY_HOST = ("User-Agent", "Accept-Encoding", "Range")
_METADATA = {ipaddress.ip_address(address) for address in ("fd00:ec2::254", "100.100.100.200", "168.63.129.16")}
_SPAN = re.compile(r"bytes (\d+)-(-?\d+)/(\d+|\*)")  # Azure's emulator ends an empty object at -1
_REASON_BYTES = 2000
_SAID = re.compile(r'[<"](Code|Message|Region|error_code|message)(?:>|"\s*:\s*")([^<"]*)')  # XML or JSON
_NO_BUCKET = ("NoSuchBucket", "ContainerNotFound")
# All that a proxy depends on: to look through the whole environment takes 0.05 ms.
_PROXIES = ["http_proxy", "https_proxy", "all_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY"]
_SLOW_S = 1.0
_WAIT_S = 0.02
_RECORD_BYTES = 1 << 15  # more than a record of TLS
_ENOUGH_BYTES = 256 << 10


def _refusal(answer: Any) -> AnswerError:
    text = answer.read(_REASON_BYTES, decode_content=True).decode(errors="replace")
    answer.close()
    said = {field.lower(): value for field, value in _SAID.findall(text)}
    name = said.get("code") or said.get("error_code") or answer.headers.get("x-ms-error-code", "")
    reason = f"{name} {said.get('message', '')}".strip() or answer.reason or ""
    error = AnswerError(answer.status, reason, name, answer.headers.get("x-amz-bucket-region") or said.get("region"))
    asked = answer.headers.get("Retry-After", "")[:9]
    error.wait_s = int(asked) if asked.isdecimal() else 0  # it may be a date
    return error


@dataclass
class Request:
    """A request before it is sent."""

    method: str
    url: str
    headers: dict[str, str]
    body: Any = None


class HttpDialect(BaseStore):
    """A store that is reached by HTTP, with one pool of connections per process.

    It uses urllib3: the standard library opens a connection for each GET. The figures of it, and of the clouds' own
    clients, are in docs/performance.md.

    Attributes:
        version_header: The header of an answer that holds the object's version.
        listing: What an answer should be that is no object, and what to do else.
        redirects: The statuses that send a reader elsewhere.
        encoding: That in which the server may send an object.
    """

    version_header: ClassVar[str] = "ETag"
    listing: ClassVar[str] = "a listing. Check the URL and the endpoint"
    redirects: ClassVar[tuple[int, ...]] = (301, 302, 303, 307, 308)
    encoding = "identity"
    _options: Any  # has `timeout_s`

    @abstractmethod
    def _address(self, name: str) -> str:
        """Return the URL of an object."""

    def _sign(self, request: Request) -> None:
        """Add what authorises a request."""

    def _authorities(self) -> str | None:
        """Return the file with the certificates to trust; None for those of the system."""
        return first_set("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE")

    def _open(self, name: str, begin: int, end: int | None) -> ObjectStream:
        asked = range_header(begin, end)
        answer = self._request("GET", self._address(name), asked)
        num_bytes, total = self._sizes(answer, name, begin, end)
        chunks = response_chunks(answer)
        if asked and answer.status != 206:
            chunks = slice_stream(chunks, begin, end)
            if num_bytes is not None:
                num_bytes = max(0, (num_bytes if end is None else min(num_bytes, end)) - begin)
        version = self._version(answer, name)
        strong = None if version is None or version.startswith("W/") else version  # no If-Match holds for a weak one
        tag = version or answer.headers.get("Last-Modified")
        return ObjectStream(chunks, num_bytes, strong, answer.close, tag=tag, total=total)

    def _version(self, answer: Any, name: str) -> str | None:
        """The version that an answer has; all stores that have ranges have versions."""
        version: str | None = answer.headers.get(self.version_header)
        if version is None and self.traits.ranges:
            answer.close()
            raise UnavailableError(f"{self.url}/{name}: an answer without the store's {self.version_header}, a page?")
        return version

    def _put(self, name: str, file: BinaryIO, num_bytes: int, if_absent: bool, if_version: str | None) -> None:
        headers = {"If-None-Match": "*" if if_absent else None, "If-Match": if_version}
        self._upload("PUT", self._address(name), file, num_bytes, headers)

    def _proof(self, body: Any) -> Headers:  # noqa: ARG002
        """Return the headers by which the server compares what it stores with what was sent."""
        return {}

    def _upload(self, method: str, url: str, body: Any, num_bytes: int, headers: Headers) -> None:
        usual = {"Content-Length": str(num_bytes), "Content-Type": "application/octet-stream"}
        headers = {**usual, **self._proof(body), **headers}
        answer = self._request(method, url, headers, body)
        said = answer.read()
        if answer.status == 200 and said.lstrip()[:1] == b"<":
            raise UnavailableError(
                f"{self.url}: the server sent a page, {said[:40]!r}, so nothing was stored. Check the URL."
            )

    def _delete(self, name: str) -> None:
        self._request("DELETE", self._address(name)).read()

    def _parsed(self, answer: Any, parse: Callable[[bytes], T]) -> T:
        """Return what a (small) answer says."""
        text = answer.read(decode_content=True)
        try:
            return parse(text)
        except (ValueError, TypeError, KeyError, SyntaxError):
            raise UnavailableError(f"{self.url}: the server sent {text[:40]!r}, not {self.listing}.") from None

    def _request(
        self, method: str, url: str, headers: Headers | None = None, body: Any = None, signed: bool = True
    ) -> Any:
        """Send a request, follow its redirects, and return the answer before its body is read."""
        chosen = {"User-Agent": "lightning_stream", "Accept-Encoding": self.encoding, **(headers or {})}
        sent = {name: value for name, value in chosen.items() if value is not None}
        request = Request(method, url, sent, body)
        home = _origin(url)
        for _ in range(_MOST_REDIRECTS):
            if signed and _origin(request.url) == home:
                with self._logging_in():
                    self._sign(request)
            answer = self._send(request)
            if answer.status < 300:
                return answer
            if answer.status not in self.redirects or method not in ("GET", "HEAD") or "Location" not in answer.headers:
                raise _refusal(answer)
            answer.close()
            request.url = self._redirected(request.url, answer.headers["Location"])
            if _origin(request.url) != home:
                request.headers = {key: value for key, value in request.headers.items() if key in _TO_ANY_HOST}
        raise StoreError(f"{self.url}: {_MOST_REDIRECTS} redirects in a row, perhaps a loop. Check the URL.")

    def _if_there(self, method: str, url: str) -> Any | None:
        """Send a request without a body; None where there is no such thing."""
        try:
            return self._request(method, url)
        except AnswerError as error:
            if error.code != 404:
                raise
        return None

    def _connect(self) -> Any:
        """Return what is needed to sign requests; it is made once per process."""

    def _log_in(self) -> Any:
        with self._logging_in():
            return self._connect()

    @contextmanager
    def _logging_in(self) -> Iterator[None]:
        """What a library for logins says is an error of access, unless the network is at fault."""
        try:
            yield
        except (LightningStreamError, MissingExtraError):
            raise
        except Exception as error:
            is_of_file = isinstance(error, FileNotFoundError)  # of keys, or a program that prints them
            if is_named(error, self.network_errors) and not is_of_file:
                raise
            if getattr(error, "retryable", False):  # Google's word for trouble that passes
                raise UnavailableError(f"{self.url}: {summarize(error)}. Check the server of the logins.") from None
            raise AccessError(f"{self.url}: no usable credentials ({summarize(error)}). {self.access_remedy}") from None

    def _send(self, request: Request) -> Any:
        timeout_s = self._options.timeout_s
        pool = _pool(request.url, self.url, self._authorities())
        timeout = sys.modules["urllib3"].Timeout(connect=min(timeout_s, _CONNECT_S), read=timeout_s)
        return pool.request(
            request.method, request.url, body=request.body, headers=request.headers, timeout=timeout,
            redirect=False, retries=False, preload_content=False, decode_content=False,
        )  # fmt: skip

    def _sizes(self, answer: Any, name: str, begin: int, end: int | None) -> tuple[int | None, int | None]:
        """The size of an answer, and that of the whole object where the answer is a range, as far as they are known.

        An answer with other bytes than those that were requested is an error.
        """
        length = answer.headers.get("Content-Length", "")
        encoding = answer.headers.get("Content-Encoding", "identity").lower()
        if encoding != "identity" and not self._is_stored_so(name, length):
            answer.close()
            raise StoreError(
                f"{self.url}/{name}: the server compresses this file ({encoding}). Turn that off for this address."
            )
        sent = answer.headers.get("Content-Range", "no range")
        if answer.status == 200:
            return int(length) if length.isdigit() else None, None
        if answer.status == 206 and (span := _SPAN.fullmatch(sent)):
            first = int(span[1])
            stop = int(span[2]) + 1
            total = stop if span[3] == "*" else int(span[3])
            is_right = first == begin and stop == (total if end is None else min(end, total))
            if is_right and length in ("", str(stop - first)):
                return stop - first, total
        answer.close()
        asked = f"{begin}-{'' if end is None else end - 1}"
        raise UnavailableError(
            f"{self.url}/{name}: the server must send the object, or the requested range, bytes {asked}; it sent "
            f"{sent}, status {answer.status}. Check the server, or the proxy in between."
        )

    def _is_stored_so(self, name: str, length: str) -> bool:  # noqa: ARG002
        """Return whether an encoded file is stored so: on its way, it is compressed without a length."""
        return bool(length)

    def _redirected(self, address: str, location: str) -> str:
        """Return the address of a redirect, if it is HTTP, and not in a more private network than the user's URL."""
        try:
            target = urljoin(address, location)
            scheme, host, _ = _origin(target)
        except ValueError:
            raise StoreError(f"{self.url}: redirects to a malformed address. Check the URL.") from None
        if scheme not in ("http", "https") or not host:
            raise StoreError(f"{self.url}: redirects to {scheme}://, which is not followed. Check the URL.")
        reached = _reach(host)
        if reached > _reach(_origin(address)[1]):
            place = "a link-local or metadata address" if reached == 2 else "an address of a private network"
            raise StoreError(f"{self.url}: redirects to {host}, {place}, which is not followed. Use its own URL.")
        return target

    def _special_error(self, error: Exception, where: str) -> Exception | None:
        if "CERTIFICATE_VERIFY_FAILED" in str(error):
            return StoreError(
                f"{where}: {summarize(error)}. Check the server's certificate and this clock; who signed it must be in "
                "the file of SSL_CERT_FILE or, for clouds where these are set, of REQUESTS_CA_BUNDLE or AWS_CA_BUNDLE."
            )
        return None


class BucketStore(HttpDialect):
    """Objects of one bucket (or container) below a prefix, which may be empty; `options` is the class of these."""

    options: ClassVar[type[Any]]

    def __init__(self, bucket: str, prefix: str, options: Any, url: str) -> None:
        self._bucket = bucket
        self._options = options
        self._prefix = f"{prefix}/" if prefix else ""
        self.url = url.rstrip("/")
        self._login = PerProcess(self._log_in)

    @classmethod
    def from_url(cls, url: str, options: Options) -> BaseStore:
        bucket, prefix = split_url(url)
        return cls(bucket, prefix, read_options(cls.options, options, f"{url.partition('://')[0]}://"), url)

    @property
    def _keys(self) -> Credentials | PerProcess[Any] | None:
        return self.credentials or self._login

    def _entry(self, key: str, num_bytes: int | str, version: object = None) -> ObjectEntry:
        return ObjectEntry(key[len(self._prefix) :], int(num_bytes), str(version or ""))

    def _special_error(self, error: Exception, where: str) -> Exception | None:
        if isinstance(error, AnswerError) and (error.name in _NO_BUCKET or "bucket does not exist" in str(error)):
            lacks = "there is no container" if error.name == "ContainerNotFound" else "there is no bucket"
            return NoBucketError(f"{where}: {lacks} {self._bucket!r}. Check the URL, endpoint and region.")
        return super()._special_error(error, where)


def with_query(url: str, query: Mapping[str, str | None]) -> str:
    """Return a URL with those parameters that are not None."""
    wanted = {name: value for name, value in query.items() if value is not None}
    return f"{url}?{urlencode(wanted, quote_via=quote)}"


def response_chunks(raw: Any) -> Iterator[bytes]:
    """Read a urllib3 response, undecoded, in chunks of up to 1 MiB.

    `raw.read` would wait for a whole chunk, so a server that sends a byte now and then would pass every timeout.
    `raw.read1` returns the bytes that are there, a few at a time: at 60 MB/s a GB would take 12,000 calls and 1.2
    CPU-seconds; over TLS, which gives a record of 16 KiB at a time, 65,000 calls.
    """
    sock = getattr(getattr(raw, "connection", None), "sock", None)
    if isinstance(sock, socket.socket) and raw.length_remaining is not None:
        return _socket_chunks(raw, sock)
    return iter(lambda: raw.read1(CHUNK_BYTES, decode_content=False), b"")


def _socket_chunks(raw: Any, sock: socket.socket) -> Iterator[Any]:
    """The chunks (bytes-like) of a response of known length, each of what arrives within a second.

    All but the first bytes, which came with the headers, and the last ones are read from the socket itself. There the
    kernel waits for what arrives in 20 ms at the pace of the last chunk, but for no more than surely follows: a TLS
    record that has come in part is not among that, and after the last bytes the connection is another request's.
    """
    wanted = 1
    if first := raw.read1(max(CHUNK_BYTES, DEFAULT_BUFFER_SIZE), decode_content=False):  # all that is buffered
        yield first
    while (left := raw.length_remaining) > 2 * _RECORD_BYTES:
        chunk: memoryview = np.empty(min(CHUNK_BYTES, left - 2 * _RECORD_BYTES), np.uint8).data  # no zeros
        wanted = max(1, min(wanted, _ENOUGH_BYTES, left - len(chunk) - _RECORD_BYTES))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, wanted)
        num_bytes = 0
        broken = None
        begun = time.perf_counter()
        while num_bytes < len(chunk) and time.perf_counter() - begun < _SLOW_S:
            try:
                count = sock.recv_into(chunk[num_bytes:])
            except OSError as error:
                broken = error
                break
            if not count:
                break
            num_bytes += count
        wanted = int(_WAIT_S * num_bytes / max(time.perf_counter() - begun, 1e-6))
        raw.length_remaining = raw._fp.length = left - num_bytes  # noqa: SLF001 - as `raw.read1` itself does
        if num_bytes:
            yield chunk if num_bytes == len(chunk) else chunk[:num_bytes].tobytes()  # or it holds the rest, too
        if broken is not None:
            raise broken
        if not num_bytes:
            return  # the connection has ended
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)
    while chunk := raw.read1(CHUNK_BYTES, decode_content=False):
        yield chunk


@lru_cache
def _proxy_for(scheme: str, host: str, *_: str | None) -> str | None:
    """The URL of the proxy that the variables (``HTTPS_PROXY``, ``ALL_PROXY``, ``NO_PROXY``, ...) name for a host."""
    proxies = urllib.request.getproxies()
    proxy = proxies.get(scheme) or proxies.get("all")
    if not proxy or urllib.request.proxy_bypass(host):
        return None
    return proxy if "://" in proxy else f"http://{proxy}"


def _origin(address: str) -> tuple[str, str, int | None]:
    parts = urlsplit(address)
    return parts.scheme, parts.hostname or "", parts.port or {"http": 80, "https": 443}.get(parts.scheme)


@lru_cache  # not of failures
def _looked_up(host: str) -> list[Any]:
    answers = socket.getaddrinfo(host, None, proto=socket.IPPROTO_TCP)
    addresses = [ipaddress.ip_address(str(where[0]).partition("%")[0]) for *_, where in answers]
    return [getattr(address, "ipv4_mapped", None) or address for address in addresses]


def _reach(host: str) -> int:
    """Return 0 for a public host (or an unknown one, which a proxy may know), 1 for a private one, 2 for link-local."""
    with suppress(OSError, UnicodeError):
        addresses = _looked_up(host)
        if any(address.is_link_local or address in _METADATA for address in addresses):
            return 2
        return int(any(not address.is_global for address in addresses))
    return 0


_pools: PerProcess[dict[tuple[str | None, str | None], Any]] = PerProcess(dict)  # by proxy and authorities


def _pool(address: str, url: str, authorities: str | None) -> Any:
    with needs("urllib3", "http", f"using {url}"):
        import urllib3
    scheme, host, _ = _origin(address)
    proxy = _proxy_for(scheme, host, *map(os.environ.get, _PROXIES))
    pools = _pools()
    if (pool := pools.get((proxy, authorities))) is not None:
        return pool
    logging.getLogger("urllib3.connectionpool").addFilter(without_secrets)
    # glibc gives memory back as soon as twice the largest block that was freed is unused. With chunks alone, it would
    # take the memory of each chunk from the kernel again: 0.6 CPU-seconds a GB instead of 0.4.
    bytearray(8 * CHUNK_BYTES)
    alive = [*urllib3.connection.HTTPConnection.default_socket_options, (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)]
    options: dict[str, Any] = {
        "maxsize": _CONNECTIONS,
        "socket_options": alive,
        "ca_certs": authorities,
        "blocksize": CHUNK_BYTES,  # of what is sent of a file at a time
    }
    if proxy is None:
        pool = urllib3.PoolManager(**options)
    elif proxy.startswith("socks"):
        try:
            from urllib3.contrib.socks import SOCKSProxyManager
        except ImportError:
            raise MissingExtraError(
                f"the proxy of {url} is one of SOCKS, which needs PySocks. Install it with:  pip install PySocks"
            ) from None
        pool = SOCKSProxyManager(proxy, **options)
    else:  # urllib3 does not take the user and password from its URL
        login = unquote(urllib3.util.parse_url(proxy).auth or "")
        pool = urllib3.ProxyManager(
            proxy, proxy_headers=urllib3.make_headers(proxy_basic_auth=login or None), **options
        )
    return pools.setdefault((proxy, authorities), pool)


@dataclass(frozen=True, repr=False)  # some of them are secrets
class HttpOptions:
    """Options for ``http://`` and ``https://``: headers for this host, and the longest silence on a connection."""

    headers: Mapping[str, str] = field(default_factory=dict)
    timeout_s: float = 60.0


class HttpStore(HttpDialect):
    """Files below a web address. Reading needs only GET; writing uses PUT and DELETE if the server has them.

    User and password in the URL become a header; a query (a signature) is sent with each request.

    A conditional put compares first what is there, by its strong ETag or its content. Of a server that ignores
    conditions, only puts at the same instant can both succeed; without a strong ETag, those within the same second.
    """

    traits = StoreTraits(conditional_put=True)
    access_remedy = "Put user and password in the URL, or pass headers={'Authorization': ...}."
    key_names = frozenset({"headers"})
    missing = "no such file. Check the URL."

    def __init__(self, url: str, options: HttpOptions | None = None) -> None:
        complete = False
        with suppress(ValueError):
            parts = urlsplit(url)
            complete = bool(parts.hostname) and not re.search(r"\s", parts.netloc) and parts.port != 0
        if not complete:
            raise ValueError(f"a web address is https://HOST[:PORT]/FOLDER; got {redact(url)!r}. Correct the URL.")
        host = parts.netloc.rpartition("@")[2]
        self._base = f"{parts.scheme}://{host}{parts.path.rstrip('/')}"
        self.url = self._base
        self._query = f"?{parts.query}" if parts.query else ""
        self._options = options or HttpOptions()
        self._secrets = dict(self._options.headers)
        if parts.username is not None:
            pair = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
            self._secrets["Authorization"] = "Basic " + base64.b64encode(pair.encode()).decode()

    @classmethod
    def from_url(cls, url: str, options: Options) -> BaseStore:
        return cls(url, read_options(HttpOptions, options, f"{url.partition('://')[0]}://"))

    def _address(self, name: str) -> str:
        return f"{self._base}/{quote(name)}{self._query}"

    def _sign(self, request: Request) -> None:
        request.headers.update(self._secrets if self.credentials is None else self.credentials.get().values["headers"])

    def _authorities(self) -> str | None:
        return None

    def _is_stored_so(self, name: str, length: str) -> bool:  # noqa: ARG002
        return name.endswith(_COMPRESSED)  # servers send these as they are, and give the encoding

    def _put(self, name: str, file: BinaryIO, num_bytes: int, if_absent: bool, if_version: str | None) -> None:
        """Compare what is there before: nginx and others ignore the conditions of a put."""
        headers = {"If-None-Match": "*" if if_absent else None}
        if if_absent or if_version is not None:
            version = None
            if (answer := self._if_there("GET", self._address(name))) is not None:
                content = answer.read()
                version = answer.headers.get("ETag", "")
                headers["If-Match"] = version
                if not version.startswith('"'):  # no condition holds for a weak one
                    version = content_version(content)
                    headers = {"If-Unmodified-Since": answer.headers.get("Last-Modified")}
            if version != if_version:
                raise PreconditionError(name)
        self._upload("PUT", self._address(name), file, num_bytes, headers)


class HuggingFaceStore(HttpStore):
    """Files of a dataset (or model) repository on the Hugging Face hub, to read: ``hf://datasets/org/name@revision``.

    The token comes from ``HF_TOKEN``, or from the file that ``hf auth login`` writes.
    """

    traits = StoreTraits()
    listing = "JSON. Check HF_ENDPOINT"
    key_names = frozenset({"token"})
    access_remedy = "Set HF_TOKEN to a token that may read it; accept a gated dataset's terms on its page first."

    def __init__(self, url: str, options: HttpOptions | None = None) -> None:
        refuse_query(url)
        path = url.partition("://")[2].strip("/")
        match = re.fullmatch(r"(datasets/|spaces/)?([^/@]+/[^/@]+)(?:@([^/]+))?(?:/(.*))?", path)
        if match is None:
            raise ValueError(f"a Hugging Face URL is hf://datasets/ORG/NAME[@REVISION][/FOLDER]; got {redact(url)!r}")
        kind = match[1] or ""
        repository = match[2]
        revision = quote(unquote(match[3] or "main"), safe="")
        self._folder = match[4] or ""
        hub = os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")
        super().__init__(f"{hub}/{kind}{repository}/resolve/{revision}/{quote(self._folder)}", options)
        self.url = f"hf://{path}"
        tree = f"{hub}/api/{kind or 'models/'}{repository}/tree/{revision}/{quote(self._folder)}"
        self._tree = f"{tree.rstrip('/')}?recursive=true"

    def _list_page(self, prefix: str, token: str | None) -> ListingPage:
        """Use the hub's own listing: huggingface_hub sends the token to any host that the next page names."""
        address = token or self._tree
        if _origin(address) != _origin(self._tree):
            raise StoreError(f"{self.url}/{prefix}: the listing's next page is at another host; it is not followed.")
        if (answer := self._if_there("GET", address)) is None:
            return [], None
        more = re.search(r'<([^>]+)>;\s*rel="next"', answer.headers.get("Link", ""))

        begin = len(self._folder) + 1 if self._folder else 0

        def parse(text: bytes) -> list[ObjectEntry]:
            files = [entry for entry in json.loads(text) if entry["type"] == "file"]
            return [
                ObjectEntry(entry["path"][begin:], int(entry["size"]), str(entry.get("oid", ""))) for entry in files
            ]

        entries = [entry for entry in self._parsed(answer, parse) if entry.name.startswith(prefix)]
        return entries, more[1] if more else None

    def _send(self, request: Request) -> Any:
        if request.method != "GET":
            raise StoreError(
                f"{self.url}: the hub is read here, not written. Use `hf upload`, or `hf repo-files delete`."
            )
        return super()._send(request)

    def _sign(self, request: Request) -> None:
        token = first_set("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")
        if self.credentials is not None:
            token = str(self.credentials.get().values["token"])
        elif not token:
            home = Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser()
            path = Path(os.environ.get("HF_TOKEN_PATH", home / "token"))
            token = path.read_text().strip() if path.is_file() else ""
        if token:
            request.headers["Authorization"] = f"Bearer {token}"
