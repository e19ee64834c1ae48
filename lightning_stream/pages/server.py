"""`serve`: a page on this machine alone, whose fields change its plots at once."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from lightning_stream.errors import redact
from lightning_stream.pages import Section, drawn_page

Drawn = tuple[Sequence[Section], Mapping[str, Sequence[float]]]
_ADDRESS = "127.0.0.1"
_PAGE, _VALUES = "/", "/values"
_MOST_CHARACTERS = 8192


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, port: int, title: str, fields: Section, answer: Callable[[Mapping[str, str]], Drawn]) -> None:
        super().__init__((_ADDRESS, port), _Handler)
        self.title, self.fields, self.answer = title, fields, answer
        self.lock = threading.Lock()  # one answer at a time
        self.hosts = {f"{name}:{self.server_port}" for name in (_ADDRESS, "localhost")}


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = 60

    def do_GET(self) -> None:
        """Answer with the page, or with what it shows for other values of its fields."""
        url = urlsplit(self.path)
        if self.headers.get("Host") not in self.server.hosts:  # a name of another site that points here
            self._send(403, f"open http://{_ADDRESS}:{self.server.server_port}/ itself", "text/plain")
        elif url.path == _PAGE:
            sections, columns = self._drawn({})
            html = drawn_page(self.server.title, "", [self.server.fields, *sections], columns)
            self._send(200, html, "text/html")
        elif url.path == _VALUES and len(self.path) <= _MOST_CHARACTERS:
            self._send_values({name: values[-1] for name, values in parse_qs(url.query).items()})
        else:
            self._send(404, "there is no such page", "text/plain")

    def _drawn(self, given: Mapping[str, str]) -> Drawn:
        with self.server.lock:
            return self.server.answer(given)

    def _send_values(self, given: Mapping[str, str]) -> None:
        try:
            sections, columns = self._drawn(given)
        except ValueError as error:  # a value that the rules refuse: the page shows why
            self._send(400, json.dumps({"error": redact(str(error))}), "application/json")
        else:
            self._send(200, json.dumps({"sections": sections, "columns": columns}), "application/json")

    def _send(self, status: int, text: str, kind: str) -> None:
        content = text.encode()
        self.send_response(status)
        headers = {"Content-Type": f"{kind}; charset=utf-8", "Content-Length": str(len(content))}
        headers |= {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        """Print nothing for each request."""


def serve(
    title: str,
    fields: Section,
    answer: Callable[[Mapping[str, str]], Drawn],
    *,
    port: int = 0,
    say: Callable[[str], object] = print,
) -> None:
    """Show a page with fields until Ctrl-C. Only this machine can open it, and it opens nothing else.

    Args:
        title: Its title.
        fields: Its fields, see `pages.fields`.
        answer: What the page shows for the values of the fields; none are given at first. ValueError for values that
            a rule refuses: the page shows its message.
        port: The port; 0 for one that is free.
        say: Shows the user the address.

    Raises:
        OSError: Another program has the port.
    """
    with _Server(port, title, fields, answer) as server:
        say(f"http://{_ADDRESS}:{server.server_port}/ (Ctrl-C ends it)")
        server.serve_forever(poll_interval=0.2)
