"""A web server for tests: files by GET with ranges, PUT and DELETE; it counts what it is asked. Others build on it."""

from __future__ import annotations

import http.server
import json
import re
import threading
import urllib.parse
from collections import Counter
from typing import Any, ClassVar

LAST_MODIFIED = "Sun, 06 Nov 1994 08:49:37 GMT"


class WebServer:
    """Serves `objects` on 127.0.0.1 while the context lasts.

    Attributes:
        objects: Path to content.
        asked: (method, path) of every request, in order.
        statuses: How often each status was answered.
        ranges: False: the server ignores ``Range``, as some do.
        authorization: What the header must be, where it is not None.
        redirect: Where GETs are sent instead, if anywhere.
        etags: "strong", "weak" or "none".
        conditions: False: it ignores those of a PUT, as nginx does.
    """

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.asked: list[tuple[str, str]] = []
        self.headers: list[dict[str, str]] = []
        self.statuses: Counter[int] = Counter()
        self.clients: set[Any] = set()  # addresses that requests came from: one for each connection
        self.ranges = True
        self.authorization: str | None = None
        self.redirect: str | None = None
        self.etags = "strong"
        self.conditions = True
        self.lock = threading.RLock()
        self._http = _ThreadingServer(("127.0.0.1", 0), self.handler())
        self._http.owner = self
        self.port = self._http.server_port
        self.url = f"http://127.0.0.1:{self.port}"
        self._thread = threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)

    def handler(self) -> type[Handler]:
        return Handler

    def count(self, method: str, part: str = "") -> int:
        """Requests of a method whose path holds `part`."""
        with self.lock:
            return sum(1 for asked, path in self.asked if asked == method and part in path)

    def __enter__(self) -> Any:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._http.shutdown()
        self._http.server_close()


class _ThreadingServer(http.server.ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128
    owner: Any

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients of these tests break connections on purpose."""


class Handler(http.server.BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    owner_methods: ClassVar[tuple[str, ...]] = ("GET", "HEAD", "PUT", "POST", "DELETE")

    @property
    def owner(self) -> Any:
        return self.server.owner  # type: ignore[attr-defined]

    def log_message(self, *args: object) -> None:
        pass

    def do(self) -> None:
        parts = urllib.parse.urlsplit(self.path)
        self.where = urllib.parse.unquote(parts.path)
        self.query = dict(urllib.parse.parse_qsl(parts.query))
        self.content = self._content()
        with self.owner.lock:
            self.owner.asked.append((self.command, self.where))
            self.owner.clients.add(self.client_address)
            self.owner.headers.append(dict(self.headers.items()))
        needed = self.owner.authorization
        if needed is not None and self.headers.get("Authorization") != needed:
            return self.refuse(401, "wrong or missing credentials")
        return self.answer()

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = do  # noqa: N815 (the names http.server calls)

    def answer(self) -> None:
        """What this server does; by default, files."""
        objects = self.owner.objects
        if self.command == "PUT":
            with self.owner.lock:
                if not self._condition_holds(objects.get(self.where)):
                    return self.refuse(412, "precondition failed")
                objects[self.where] = self.content
            return self.reply(201)
        if self.command == "DELETE":
            return self.reply(204 if objects.pop(self.where, None) is not None else 404)
        if self.owner.redirect is not None:
            return self.reply(302, headers={"Location": self.owner.redirect + self.where})
        if self.where not in objects:
            return self.refuse(404, "no such file")
        return self.media(objects[self.where])

    def _condition_holds(self, there: bytes | None) -> bool:
        if not self.owner.conditions:
            return True
        if self.headers.get("If-None-Match") == "*":
            return there is None
        wanted = self.headers.get("If-Match")
        strong = there is not None and self.owner.etags == "strong"
        return wanted is None or (strong and wanted == f'"{hash(there):x}"')

    def media(self, content: bytes, headers: dict[str, str] | None = None) -> None:
        """The content, or the range of it that was asked for."""
        etag = f'{"W/" if self.owner.etags == "weak" else ""}"{hash(content):x}"'
        validators = {"Last-Modified": LAST_MODIFIED} if self.owner.etags == "none" else {"ETag": etag}
        headers = {**validators, "Accept-Ranges": "bytes", **(headers or {})}
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if asked is None or not self.owner.ranges:
            return self.reply(200, content, "application/octet-stream", headers)
        begin, end = int(asked[1]), min(int(asked[2] or len(content)), len(content) - 1)
        if begin >= len(content):
            return self.reply(416, b"", headers={"Content-Range": f"bytes */{len(content)}"})
        headers["Content-Range"] = f"bytes {begin}-{end}/{len(content)}"
        return self.reply(206, content[begin : end + 1], "application/octet-stream", headers)

    def reply(
        self, status: int, content: bytes | dict[str, Any] | list[Any] = b"", kind: str = "application/json",
        headers: dict[str, str] | None = None,
    ) -> None:  # fmt: skip
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        with self.owner.lock:
            self.owner.statuses[status] += 1
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        for key, value in (headers or {}).items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def refuse(self, status: int, message: str) -> None:
        self.reply(status, {"error": {"code": status, "message": message}})

    def _content(self) -> bytes:
        if "chunked" not in self.headers.get("Transfer-Encoding", ""):
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        content = b""
        while size := int(self.rfile.readline(), 16):
            content += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return content


class HubServer(WebServer):
    """A little of the Hugging Face hub: files of one dataset repository at one revision, and its listing, paged."""

    def handler(self) -> type[Handler]:
        return _HubHandler


class _HubHandler(Handler):
    page = 3

    def answer(self) -> None:
        found = re.fullmatch(r"/api/datasets/[^/]+/[^/]+/tree/([^/]+)(?:/(.*))?", self.where)
        if found is None:
            return super().answer()
        top = f"/resolve/{found[1]}/"
        paths = {where.split(top)[1]: len(content) for where, content in self.owner.objects.items() if top in where}
        below = [path for path in sorted(paths) if not found[2] or path.startswith(found[2] + "/")]
        begin = int(self.query.get("cursor", 0))
        listed = [{"type": "file", "path": path, "size": paths[path]} for path in below[begin : begin + self.page]]
        more = f'<{self.owner.url}{self.where}?cursor={begin + self.page}>; rel="next"'
        return self.reply(200, listed, headers={"Link": more} if begin + self.page < len(below) else {})
