"""Stores are reached through the proxy that the variables name, with its user and password, which no message shows."""

from __future__ import annotations

import base64
import http.client
import sys
import threading
import urllib.parse
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from servers.fake_databricks import TOKEN, FakeDatabricks
from servers.fake_gcs import FakeGcs
from servers.web import WebServer

from lightning_stream.errors import AccessError, MissingExtraError, StoreError
from lightning_stream.stores import open_store

LOGIN = "me:S3CRET p@ss"
IN_URL = "me:S3CRET%20p%40ss"


class _Forward(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def _forward(self) -> None:
        server: Any = self.server
        server.seen.append(self.path)
        expected = "Basic " + base64.b64encode(LOGIN.encode()).decode()
        if self.headers.get("Proxy-Authorization") != expected:
            self.send_response(407, "Proxy Authentication Required")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        parts = urllib.parse.urlsplit(self.path)
        connection = http.client.HTTPConnection(parts.netloc, timeout=10)
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        headers = {name: value for name, value in self.headers.items() if not name.lower().startswith("proxy-")}
        connection.request(self.command, f"{parts.path}?{parts.query}".rstrip("?"), body, headers)
        answer = connection.getresponse()
        data = answer.read()
        self.send_response(answer.status, answer.reason)
        for name, value in answer.getheaders():
            if name.lower() not in ("transfer-encoding", "connection", "content-length", "date", "server"):
                self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
        connection.close()

    do_GET = do_PUT = do_HEAD = do_POST = _forward  # noqa: N815 - the names are http.server's

    def do_CONNECT(self) -> None:
        server: Any = self.server
        server.seen.append(f"CONNECT {self.path} {self.headers.get('Proxy-Authorization')}")
        self.send_response(407, "Proxy Authentication Required")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        """Print nothing."""


@pytest.fixture
def proxy(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    server: Any = ThreadingHTTPServer(("127.0.0.1", 0), _Forward)
    server.seen = []
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.mark.parametrize("variable", ["http_proxy", "ALL_PROXY", "all_proxy"])
@pytest.mark.parametrize("kind", ["http", "gcs", "volumes", "s3"])
def test_a_store_is_reached_through_a_proxy_that_asks_for_a_password(
    proxy: Any, kind: str, variable: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    port, options = proxy.server_address[1], {"retries": 0, "timeout_s": 5.0}
    servers: dict[str, Any] = {"http": WebServer, "gcs": FakeGcs, "volumes": FakeDatabricks}
    if kind == "s3":
        place = request.getfixturevalue("moto_place")
        store: Any = open_store(place.url, {**place.options, **options})
        store.put("index.json", b"content")
        monkeypatch.setenv(variable, f"http://{IN_URL}@127.0.0.1:{port}")
        store = open_store(place.url, {**place.options, **options})
        assert store.read("index.json") == b"content"
    else:
        with servers[kind]() as server:
            url = {"http": server.url, "gcs": "gs://bucket/x", "volumes": "dbfs:/Volumes/a/b/c/x"}[kind]
            more = {"gcs": {"endpoint_url": server.url}, "volumes": {"host": server.url, "token": TOKEN}}.get(kind, {})
            open_store(url, {**more, **options}).put("index.json", b"content")
            assert not proxy.seen
            monkeypatch.setenv(variable, f"http://{IN_URL}@127.0.0.1:{port}")
            assert open_store(url, {**more, **options}).read("index.json") == b"content"
    assert proxy.seen


def test_a_proxy_without_its_password_is_an_error_that_says_where_to_put_it(
    proxy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for scheme in ("http", "https"):
        monkeypatch.setenv("all_proxy", f"127.0.0.1:{proxy.server_address[1]}")
        store = open_store(f"{scheme}://data.example.com/x", {"retries": 0})
        with pytest.raises(AccessError, match="HTTPS_PROXY=http://USER:PASSWORD@HOST:PORT"):
            store.read("index.json")


def test_the_password_goes_to_the_proxy_of_a_secure_address_and_into_no_message(
    proxy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("https_proxy", f"http://{IN_URL}@127.0.0.1:{proxy.server_address[1]}")
    with pytest.raises(StoreError) as caught:
        open_store("https://data.example.com/x", {"retries": 0}).read("index.json")
    assert "S3CRET" not in str(caught.value)
    assert base64.b64encode(LOGIN.encode()).decode() in proxy.seen[0]


@pytest.mark.filterwarnings("ignore:SOCKS support")
def test_a_proxy_of_socks_says_which_package_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("all_proxy", f"socks5://{IN_URL}@127.0.0.1:1")
    monkeypatch.setitem(sys.modules, "socks", None)
    monkeypatch.delitem(sys.modules, "urllib3.contrib.socks", raising=False)
    with pytest.raises(MissingExtraError, match="pip install PySocks"):
        open_store("http://data.example.com/x", {"retries": 0}).read("index.json")


def test_an_address_that_needs_no_proxy_is_reached_without_it(proxy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("all_proxy", f"http://127.0.0.1:{proxy.server_address[1]}")
    monkeypatch.setenv("no_proxy", "127.0.0.1,localhost")
    with WebServer() as server:
        server.objects["/x/index.json"] = b"content"
        assert open_store(f"{server.url}/x").read("index.json") == b"content"
    assert not proxy.seen
