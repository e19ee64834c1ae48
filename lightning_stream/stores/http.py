"""Plain web servers, and Hugging Face's hub over its web addresses; by the standard library alone."""

from __future__ import annotations

import base64
import http.client
import json
import os
import re
import ssl
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightning_stream.errors import AccessError, NotFoundError, StoreError, UnavailableError, redact, summarize

from .base import (
    CHUNK_BYTES,
    Body,
    BodyStore,
    ObjectEntry,
    attempt,
    check_conditions,
    check_name,
    cut,
    explained_chunks,
    join,
    range_header,
    refused_put,
    relative,
    source_file,
)


@dataclass(frozen=True)
class HttpOptions:
    """Options for ``http://`` and ``https://``.

    Attributes:
        headers: Sent with each request, to this host only.
        timeout_s: Longest silence on a connection.
    """

    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    timeout_s: float = 60.0


class HttpStore(BodyStore):
    """Files below a web address. Reading needs only GET; writing uses PUT and DELETE where the server has them.

    Args:
        url: The address; user and password in it become a header, a query (a signature) is sent with each request.
        options: See :class:`HttpOptions`.
    """

    def __init__(self, url: str, options: HttpOptions | None = None) -> None:
        parts = urllib.parse.urlsplit(url)
        host = parts.netloc.rpartition("@")[2]
        self._base = urllib.parse.urlunsplit((parts.scheme, host, parts.path.rstrip("/"), "", ""))
        self._query = parts.query
        self._options = options or HttpOptions()
        self._headers = {"User-Agent": "lightning_stream", "Accept-Encoding": "identity", **self._options.headers}
        if parts.username is not None:
            pair = f"{urllib.parse.unquote(parts.username)}:{urllib.parse.unquote(parts.password or '')}"
            self._headers["Authorization"] = "Basic " + base64.b64encode(pair.encode()).decode()

    @property
    def url(self) -> str:
        """The address, without user, password and query."""
        return self._base

    def open(self, name: str, begin: int = 0, end: int | None = None) -> Body:
        """The bytes ``[begin, end)`` of a file; a server that ignores the range is read past what was not asked for."""
        header = range_header(begin, end)
        try:
            answer = self._request("GET", name, {"Range": header} if header else {})
        except _PastTheEndError:
            return Body(iter(()), 0, where=f"{self._base}/{name}")
        length = answer.headers.get("Content-Length")
        num_bytes = int(length) if length is not None else None

        def explain(error: Exception) -> Exception | None:
            return self._explain(name, error)

        chunks = explained_chunks(iter(lambda: answer.read(CHUNK_BYTES), b""), explain)
        if header is not None and answer.status != 206:
            whole, num_bytes = num_bytes, None
            if whole is not None:
                num_bytes = max(0, min(whole, whole if end is None else end) - begin)
            chunks = cut(chunks, begin, end)
        return Body(chunks, num_bytes, answer.headers.get("ETag"), answer.close, f"{self._base}/{name}")

    def put(self, name: str, source: Path | bytes, *, if_absent: bool = False, if_version: str | None = None) -> None:
        """One PUT."""
        num_bytes = len(source) if isinstance(source, bytes) else source.stat().st_size
        headers = {"Content-Length": str(num_bytes), "Content-Type": "application/octet-stream"}
        if check_conditions(name, if_absent, if_version):
            headers |= {"If-None-Match": "*"} if if_version is None else {"If-Match": if_version}
        with source_file(source) as file:
            try:
                self._request("PUT", name, headers, file).close()
            except PreconditionError:
                raise refused_put(f"{self._base}/{name}", if_absent) from None

    def list(self, prefix: str = "") -> Iterator[ObjectEntry]:
        """A web server has no listing that one could rely on: StoreError."""
        raise StoreError(
            f"{self._base}/{prefix}: a web server cannot be listed. Name the files, or use a bucket's own URL."
        )

    def delete(self, name: str) -> None:
        """One DELETE."""
        try:
            self._request("DELETE", name, {}).close()
        except NotFoundError:
            return

    def exists(self, name: str) -> bool:
        """Whether there is such a file, by one HEAD."""
        try:
            self._request("HEAD", name, {}).close()
        except NotFoundError:
            return False
        return True

    def _address(self, name: str) -> str:
        query = f"?{self._query}" if self._query else ""
        return f"{self._base}/{urllib.parse.quote(check_name(name))}{query}"

    def _request(self, method: str, name: str, headers: Mapping[str, str], body: Any = None) -> Any:
        request = urllib.request.Request(
            self._address(name), data=body, headers={**self._headers, **headers}, method=method
        )
        opener = urllib.request.build_opener(_Redirects())
        return attempt(
            lambda: opener.open(request, timeout=self._options.timeout_s), lambda error: self._explain(name, error)
        )

    def _explain(self, name: str, error: Exception) -> Exception | None:
        where = f"{self._base}/{name}"
        if isinstance(error, urllib.error.HTTPError):
            error.close()
            return self._explain_status(where, error.code, redact(" ".join(str(error.reason).split())))
        reason = getattr(error, "reason", error)
        if isinstance(reason, ssl.SSLCertVerificationError):
            return StoreError(f"{where}: {summarize(reason)}. Set SSL_CERT_FILE to the authority that signed it.")
        if isinstance(error, (OSError, http.client.HTTPException)):
            return UnavailableError(f"{where}: {summarize(error)}. Look at the network and the server.")
        return None

    def _explain_status(self, where: str, status: int, said: str) -> Exception:
        if status in (404, 410):
            return NotFoundError(f"{where}: no such file. Check the URL.")
        if status == 416:
            return _PastTheEndError(f"{where}: past its end")
        if status == 412:
            return PreconditionError(f"{where}: the condition does not hold")
        if status in (401, 403, 407):
            return AccessError(f"{where}: refused ({status} {said}). {self._access_remedy()}")
        if status in (408, 425, 429) or status >= 500:
            return UnavailableError(f"{where}: {status} {said}. The server is overloaded or in trouble.")
        return StoreError(f"{where}: {status} {said}. Check the URL, and whether the server allows this.")

    def _access_remedy(self) -> str:
        return "Put user and password in the URL, or pass headers={'Authorization': ...}."


class PreconditionError(StoreError):
    """A conditional put whose condition does not hold."""


class _PastTheEndError(StoreError):
    """A range that begins at or after the file's end."""


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Follows redirects over HTTP; what authorises goes to the first host only, and never from TLS to none."""

    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> Any:
        """The request to the new address."""
        new = urllib.parse.urlsplit(newurl)
        if new.scheme not in ("http", "https"):
            reason = f"redirects to {new.scheme}://, which is not followed"
            raise urllib.error.HTTPError(req.full_url, code, reason, headers, fp)
        followed = super().redirect_request(req, fp, code, msg, headers, newurl)
        if followed is not None and (new.netloc != req.host or (req.type == "https" and new.scheme != "https")):
            allowed = {"user-agent", "range", "accept-encoding"}
            followed.headers = {key: value for key, value in followed.headers.items() if key.lower() in allowed}
        return followed


_Page = tuple[list[dict[str, Any]], "str | None"]


class HuggingFaceStore(HttpStore):
    """Files of a dataset (or model) repository on the Hugging Face hub, to read.

    Args:
        path: What follows ``hf://``, e.g. ``datasets/org/name@revision/folder``.
        options: As for a web server. The token comes from ``HF_TOKEN``, or from where ``hf auth login`` puts it.
    """

    def __init__(self, path: str, options: HttpOptions | None = None) -> None:
        found = re.fullmatch(r"(datasets/|spaces/)?([^/@]+/[^/@]+)(?:@([^/]+))?(?:/(.*))?", path.strip("/"))
        if found is None:
            raise ValueError(f"a Hugging Face URL is hf://datasets/ORG/NAME[@REVISION][/FOLDER]; got hf://{path}")
        kind, repository, revision, folder = found.groups()
        self._kind, self._repository = kind or "", repository
        self._revision = urllib.parse.quote(urllib.parse.unquote(revision or "main"), safe="")
        self._folder = folder or ""
        self._hub = os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")
        self._shown = f"hf://{path.strip('/')}"
        address = f"{self._hub}/{self._kind}{repository}/resolve/{self._revision}"
        super().__init__(join(address, urllib.parse.quote(self._folder)) if self._folder else address, options)

    @property
    def url(self) -> str:
        """The ``hf://`` form."""
        return self._shown

    def list(self, prefix: str = "") -> Iterator[ObjectEntry]:
        """All files whose names begin with `prefix`, by the hub's own listing."""
        kind = self._kind or "models/"
        address = f"{self._hub}/api/{kind}{self._repository}/tree/{self._revision}/{urllib.parse.quote(self._folder)}"
        page: str | None = f"{address.rstrip('/')}?recursive=true"
        entries: list[ObjectEntry] = []
        while page:
            listed, page = self._page(page, prefix)
            files = (found for found in listed if found["type"] == "file")
            entries += [ObjectEntry(relative(found["path"], self._folder), found["size"]) for found in files]
        yield from sorted((entry for entry in entries if entry.name.startswith(prefix)), key=lambda entry: entry.name)

    def put(
        self,
        name: str,
        source: Path | bytes,  # noqa: ARG002
        *,
        if_absent: bool = False,  # noqa: ARG002
        if_version: str | None = None,  # noqa: ARG002
    ) -> None:
        """The hub takes commits, not files: StoreError."""
        raise StoreError(f"{self.url}/{name}: the hub is read here, not written. Upload with `hf upload`.")

    def delete(self, name: str) -> None:
        """The hub takes commits, not deletions: StoreError."""
        raise StoreError(f"{self.url}/{name}: the hub is read here, not written. Delete with `hf repo-files delete`.")

    def _page(self, address: str, name: str) -> _Page:
        request = urllib.request.Request(address, headers={**self._headers, **self._token()})
        opener = urllib.request.build_opener(_Redirects())

        def load() -> _Page:
            with opener.open(request, timeout=self._options.timeout_s) as answer:
                more = re.search(r'<([^>]+)>;\s*rel="next"', answer.headers.get("Link", ""))
                return json.load(answer), more[1] if more else None

        try:
            return attempt(load, lambda error: self._explain(name, error))
        except NotFoundError:
            return [], None

    def _request(self, method: str, name: str, headers: Mapping[str, str], body: Any = None) -> Any:
        return super()._request(method, name, {**self._token(), **headers}, body)

    def _token(self) -> dict[str, str]:
        token = os.environ.get("HF_TOKEN") or os.environ.get("HUGGING_FACE_HUB_TOKEN")
        if not token:
            home = Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser()
            path = Path(os.environ.get("HF_TOKEN_PATH", home / "token"))
            token = path.read_text().strip() if path.is_file() else ""
        return {"Authorization": f"Bearer {token}"} if token else {}

    def _access_remedy(self) -> str:
        return "Set HF_TOKEN to a token that may read it; a gated dataset's terms must be accepted on its page first."
