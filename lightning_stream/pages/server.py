"""`serve`: a page on this machine alone, whose fields change its plots at once."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs

from lightning_stream.errors import redact
from lightning_stream.pages import Section, drawn_page, values_of

Drawn = tuple[Sequence[Section], Mapping[str, Sequence["float | None"]]]
Answer = Callable[[Mapping[str, str], bool], Drawn]
_ADDRESS = "127.0.0.1"
_PAGE, _VALUES, _QUICK = "/", "/values", "/quick"
_MOST_CHARACTERS = 8192


class PageServer(ThreadingHTTPServer):
    """Serves one page; see `serve`."""

    daemon_threads = True

    def __init__(self, port: int, title: str, fields: Section, answer: Answer) -> None:
        super().__init__((_ADDRESS, port), _Handler)
        self.title, self.fields, self.answer = title, fields, answer
        self.lock = threading.Lock()  # one answer at a time
        self.url = f"http://{_ADDRESS}:{self.server_port}/"
        self.hosts = {f"{name}:{self.server_port}" for name in (_ADDRESS, "localhost")}

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print what went wrong, unless a browser has closed its page."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    server: PageServer
    timeout = 60

    def do_GET(self) -> None:
        """Answer with the page, or with what it shows for other values of its fields."""
        path, _, query = self.path.partition("?")
        if self.headers.get("Host") not in self.server.hosts:  # a name of another site that points here
            self._send(403, f"open {self.server.url} itself", "text/plain")
        elif path == _PAGE:
            sections, columns = self._drawn({}, is_quick=False)
            html = drawn_page(self.server.title, "", [self.server.fields, *sections], columns)
            self._send(200, html, "text/html")
        elif path in (_VALUES, _QUICK) and len(self.path) <= _MOST_CHARACTERS:
            given = {name: values[-1] for name, values in parse_qs(query, keep_blank_values=True).items()}
            self._send_values(given, is_quick=path == _QUICK)
        else:
            self._send(404, "there is no such page", "text/plain")

    def _drawn(self, given: Mapping[str, str], is_quick: bool) -> Drawn:
        with self.server.lock:
            return self.server.answer(given, is_quick)

    def _send_values(self, given: Mapping[str, str], is_quick: bool) -> None:
        try:
            sections, columns = self._drawn(given, is_quick)
        except ValueError as error:  # a value that the rules refuse: the page shows why
            self._send(400, json.dumps({"error": redact(str(error))}), "application/json")
        else:
            self._send(200, values_of(sections, columns), "application/json")

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
    answer: Answer,
    *,
    port: int = 0,
    say: Callable[[str], object] = print,
) -> None:
    """Show a page with fields until Ctrl-C. Only this machine can open it, and it opens nothing else.

    Args:
        title: Its title.
        fields: Its fields, see `pages.fields`.
        answer: What the page shows for the values of the fields, none of which are given at first; and whether it may
            omit what takes long, since a slider is moving. ValueError for values that a rule refuses: the page shows
            its message.
        port: The port; 0 for one that is free.
        say: Shows the user the address.

    Raises:
        OSError: Another program has the port.
    """
    with PageServer(port, title, fields, answer) as server:
        say(f"{server.url} (Ctrl-C ends it)")
        with suppress(KeyboardInterrupt):
            server.serve_forever(poll_interval=0.2)
