"""Web servers, and Hugging Face's hub by its web addresses, with one pool of connections per process."""

from __future__ import annotations

import base64
import ipaddress
import json
import os
import re
import socket
import urllib.parse
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from lightning_stream.errors import StoreError, UnavailableError, needs, redact, summarize

from .base import AnswerError, BaseStore, ListingPage, ObjectEntry, PreconditionError, StoreTraits
from .transfer import (
    ObjectStream,
    PerProcess,
    content_version,
    header_stream,
    proxy_for,
    range_header,
    read_options,
    refuse_query,
    slice_stream,
)

_MOST_REDIRECTS = 10
_AS_IT_COMES: dict[str, Any] = {"redirect": False, "retries": False, "preload_content": False}
_COMPRESSED = (".gz", ".br", ".zst", ".zstd", ".bz2", ".snappy", ".lz4", ".tgz")
_TO_ANY_HOST = ("User-Agent", "Accept-Encoding", "Range")
_METADATA = {ipaddress.ip_address(address) for address in ("fd00:ec2::254", "100.100.100.200", "168.63.129.16")}


@dataclass(frozen=True)
class HttpOptions:
    """Options for ``http://`` and ``https://``: headers for this host, and the longest silence on a connection."""

    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    timeout_s: float = 60.0


class HttpStore(BaseStore):
    """Files below a web address. Reading needs only GET; writing uses PUT and DELETE if the server has them.

    User and password in the URL become a header; a query (a signature) is sent with each request. It uses urllib3: the
    standard library opens a connection for each GET, with 0.52 ms of CPU instead of 0.24 for 50 KB, and a handshake.

    A conditional put of an object without a strong ETag compares its content first, and then its date: only puts within
    the same second can both succeed.
    """

    traits = StoreTraits(conditional_put=True)
    access_remedy = "Put user and password in the URL, or pass headers={'Authorization': ...}."
    missing = "no such file. Check the URL."

    def __init__(self, url: str, options: HttpOptions | None = None) -> None:
        complete = False
        with suppress(ValueError):
            parts = urllib.parse.urlsplit(url)
            complete = bool(parts.hostname) and not re.search(r"\s", parts.netloc) and parts.port != 0
        if not complete:
            raise ValueError(f"a web address is https://HOST[:PORT]/FOLDER; got {redact(url)!r}. Correct the URL.")
        host = parts.netloc.rpartition("@")[2]
        self._base = urllib.parse.urlunsplit((parts.scheme.lower(), host, parts.path.rstrip("/"), "", ""))
        self.url = self._base
        self._query = f"?{parts.query}" if parts.query else ""
        self._options = options or HttpOptions()
        self._headers = {"User-Agent": "lightning_stream", "Accept-Encoding": "identity", **self._options.headers}
        if parts.username is not None:
            pair = f"{urllib.parse.unquote(parts.username)}:{urllib.parse.unquote(parts.password or '')}"
            self._headers["Authorization"] = "Basic " + base64.b64encode(pair.encode()).decode()

    @classmethod
    def from_url(cls, url: str, options: Mapping[str, Any]) -> BaseStore:
        return cls(url, read_options(HttpOptions, options, f"{url.partition('://')[0]}://"))

    def _open(self, name: str, begin: int, end: int | None) -> ObjectStream:
        header = range_header(begin, end)
        answer = self._request("GET", self._address(name), header)
        self._refuse_other_bytes(answer, name, begin, end)
        etag, date = answer.headers.get("ETag"), answer.headers.get("Last-Modified")
        strong = etag if etag is not None and etag.startswith('"') else None  # no If-Match holds for a weak one
        stream = header_stream(answer, answer.headers, strong, answer.close, tag=etag or date)
        if header and answer.status != 206:
            if stream.num_bytes is not None:
                stream.num_bytes = max(0, min(stream.num_bytes, end or stream.num_bytes) - begin)
            stream.chunks = slice_stream(stream.chunks, begin, end)
        return stream

    def _put(self, name: str, file: BinaryIO, num_bytes: int, if_absent: bool, if_version: str | None) -> None:
        headers = {"Content-Length": str(num_bytes), "Content-Type": "application/octet-stream"}
        if if_absent:
            headers["If-None-Match"] = "*"
        elif if_version is not None and if_version.startswith('"'):
            headers["If-Match"] = if_version
        elif if_version is not None:
            with self._request("GET", self._address(name), {}) as answer:
                if content_version(answer.read()) != if_version:
                    raise PreconditionError(name)
            if date := answer.headers.get("Last-Modified"):
                headers["If-Unmodified-Since"] = date
        self._request("PUT", self._address(name), headers, file).close()

    def _delete(self, name: str) -> None:
        self._request("DELETE", self._address(name), {}).close()

    def _refuse_other_bytes(self, answer: Any, name: str, begin: int, end: int | None) -> None:
        """Raise an error for an answer with other bytes than those that were requested.

        Servers also give an encoding for a file with the name of a compressed one, which they send as it is.
        """
        where, encoding = f"{self.url}/{name}", answer.headers.get("Content-Encoding", "identity").lower()
        if encoding != "identity" and not name.endswith(_COMPRESSED):
            answer.close()
            raise StoreError(f"{where}: the server compresses this file ({encoding}). Turn that off for this address.")
        sent = re.fullmatch(r"bytes (\d+)-(\d+)/(\d+|\*)", answer.headers.get("Content-Range") or "")
        if answer.status != 206 or sent is None:
            return
        first, stop = int(sent[1]), int(sent[2]) + 1
        total = stop if sent[3] == "*" else int(sent[3])
        if first != begin or stop != (total if end is None else min(end, total)):
            answer.close()
            asked = f"{begin}-{'' if end is None else end - 1}"
            raise UnavailableError(
                f"{where}: the server must send the requested range, bytes {asked}; it sent {sent[0]}. Check the "
                "server, or the proxy in between."
            )

    def _address(self, name: str) -> str:
        return f"{self._base}/{urllib.parse.quote(name)}{self._query}"

    def _secrets(self) -> dict[str, str]:
        """Return headers that may differ between requests."""
        return {}

    def _request(self, method: str, address: str, headers: Mapping[str, str], body: Any = None) -> Any:
        """Send a request, follow its redirects, and return the answer before its body is read."""
        sent = {**self._headers, **self._secrets(), **headers}
        for _ in range(_MOST_REDIRECTS):
            answer = _pool(address, self.url).request(
                method, address, body=body, headers=sent, timeout=self._options.timeout_s, **_AS_IT_COMES
            )
            if answer.status < 300:
                return answer
            answer.close()
            if answer.status not in (301, 302, 303, 307, 308) or method not in ("GET", "HEAD"):
                raise AnswerError(answer.status, answer.reason or "")
            target = self._redirected(address, answer.headers.get("Location") or "")
            if _origin(target) != _origin(address):
                sent = {key: value for key, value in sent.items() if key in _TO_ANY_HOST}
            address = target
        raise StoreError(f"{self.url}: {_MOST_REDIRECTS} redirects in a row, perhaps a loop. Check the URL.")

    def _redirected(self, address: str, location: str) -> str:
        """Return the address of a redirect, if it is HTTP, and not in a more private network than the user's URL."""
        try:
            target = urllib.parse.urljoin(address, location)
            scheme, host, _ = _origin(target)
        except ValueError:
            raise StoreError(f"{self.url}: redirects to a malformed address. Check the URL.") from None
        if scheme not in ("http", "https") or not host:
            raise StoreError(f"{self.url}: redirects to {scheme}://, which is not followed. Check the URL.")
        reached = _reach(host)
        if reached > _reach(_origin(self._base)[1]):
            place = "a link-local or metadata address" if reached == 2 else "an address of a private network"
            raise StoreError(f"{self.url}: redirects to {host}, {place}, which is not followed. Use its own URL.")
        return target

    def _special_error(self, error: Exception, where: str) -> Exception | None:
        if "CERTIFICATE_VERIFY_FAILED" in str(error):
            return StoreError(f"{where}: {summarize(error)}. Set SSL_CERT_FILE to the authority that signed it.")
        return None


def _origin(address: str) -> tuple[str, str, int | None]:
    parts = urllib.parse.urlsplit(address)
    return parts.scheme, parts.hostname or "", parts.port or {"http": 80, "https": 443}.get(parts.scheme)


def _reach(host: str) -> int:
    """Return 0 for a public host (or an unknown one, which a proxy may know), 1 for a private one, 2 for link-local."""
    with suppress(OSError, UnicodeError):
        found = socket.getaddrinfo(host, None, proto=socket.IPPROTO_TCP)
        addresses = [ipaddress.ip_address(str(where[0]).partition("%")[0]) for *_, where in found]
        plain = [getattr(address, "ipv4_mapped", None) or address for address in addresses]
        if any(address.is_link_local or address in _METADATA for address in plain):
            return 2
        return int(any(not address.is_global for address in plain))
    return 0


_pools: PerProcess[dict[str | None, Any]] = PerProcess(dict)  # one pool per proxy


def _pool(address: str, url: str) -> Any:
    with needs("urllib3", "http", f"using {url}"):
        import urllib3
    scheme, host, _ = _origin(address)
    proxy, pools = proxy_for(scheme, host), _pools()
    if proxy not in pools:
        pools[proxy] = urllib3.PoolManager(maxsize=64) if proxy is None else _proxy_pool(proxy, url)
    return pools[proxy]


def _proxy_pool(proxy: str, url: str) -> Any:
    """The connections through a proxy; urllib3 does not take the user and password from its URL."""
    import urllib3

    if proxy.startswith("socks"):
        with needs("PySocks", "http", f"using the proxy of {url}"):
            from urllib3.contrib.socks import SOCKSProxyManager
        return SOCKSProxyManager(proxy, maxsize=64)
    parts = urllib.parse.urlsplit(proxy)
    login = f"{urllib.parse.unquote(parts.username or '')}:{urllib.parse.unquote(parts.password or '')}"
    headers = urllib3.make_headers(proxy_basic_auth=login) if parts.username is not None else None
    return urllib3.ProxyManager(proxy, proxy_headers=headers, maxsize=64)


class HuggingFaceStore(HttpStore):
    """Files of a dataset (or model) repository on the Hugging Face hub, to read: ``hf://datasets/org/name@revision``.

    The token comes from ``HF_TOKEN``, or from the file that ``hf auth login`` writes.
    """

    traits = StoreTraits()
    access_remedy = "Set HF_TOKEN to a token that may read it; accept a gated dataset's terms on its page first."

    def __init__(self, url: str, options: HttpOptions | None = None) -> None:
        refuse_query(url)
        path = url.partition("://")[2].strip("/")
        found = re.fullmatch(r"(datasets/|spaces/)?([^/@]+/[^/@]+)(?:@([^/]+))?(?:/(.*))?", path)
        if found is None:
            raise ValueError(f"a Hugging Face URL is hf://datasets/ORG/NAME[@REVISION][/FOLDER]; got {redact(url)!r}")
        kind, repository, revision, self._folder = found[1] or "", found[2], found[3] or "main", found[4] or ""
        revision = urllib.parse.quote(urllib.parse.unquote(revision), safe="")
        hub = os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")
        address = f"{hub}/{kind}{repository}/resolve/{revision}"
        super().__init__(f"{address}/{urllib.parse.quote(self._folder)}", options)
        self.url = f"hf://{path}"
        tree = f"{hub}/api/{kind or 'models/'}{repository}/tree/{revision}/{urllib.parse.quote(self._folder)}"
        self._tree = f"{tree.rstrip('/')}?recursive=true"

    def _list_page(self, prefix: str, token: str | None) -> ListingPage:
        """Use the hub's own listing: huggingface_hub sends the token to any host that the next page names."""
        address = token or self._tree
        if _origin(address) != _origin(self._tree):
            raise StoreError(f"{self.url}/{prefix}: the listing's next page is at another host; it is not followed.")
        try:
            answer = self._request("GET", address, {})
        except AnswerError as error:
            if error.code != 404:
                raise
            return [], None
        with answer:
            text = answer.read()
        more = re.search(r'<([^>]+)>;\s*rel="next"', answer.headers.get("Link", ""))
        try:
            listed = [entry for entry in json.loads(text) if entry["type"] == "file"]
            found = [(str(entry["path"]), int(entry["size"]), str(entry.get("oid", ""))) for entry in listed]
        except (ValueError, TypeError, KeyError):
            raise UnavailableError(f"{self.url}: the hub sent {text[:40]!r}, not JSON. Check HF_ENDPOINT.") from None
        begin = len(self._folder) + 1 if self._folder else 0
        files = [ObjectEntry(path[begin:], size, oid) for path, size, oid in found]
        return [entry for entry in files if entry.name.startswith(prefix)], more[1] if more else None

    def _put(self, name: str, file: BinaryIO, num_bytes: int, if_absent: bool, if_version: str | None) -> None:  # noqa: ARG002
        raise StoreError(f"{self.url}/{name}: the hub is read here, not written. Upload with `hf upload`.")

    def _delete(self, name: str) -> None:
        raise StoreError(f"{self.url}/{name}: the hub is read here, not written. Delete with `hf repo-files delete`.")

    def _secrets(self) -> dict[str, str]:
        token = os.environ.get("HF_TOKEN") or os.environ.get("HUGGING_FACE_HUB_TOKEN")
        if not token:
            home = Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser()
            path = Path(os.environ.get("HF_TOKEN_PATH", home / "token"))
            token = path.read_text().strip() if path.is_file() else ""
        return {"Authorization": f"Bearer {token}"} if token else {}
