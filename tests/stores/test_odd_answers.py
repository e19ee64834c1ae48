"""Servers that answer what no store should: each is an error of ours, names the URL, and gives no secret away."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from lightning_stream.errors import AccessError, StoreError
from lightning_stream.stores import open_store
from lightning_stream.stores.generic import FsspecStore

QUICK = {"retries": 0, "timeout_s": 5.0}
KEYS = {"access_key_id": "key", "secret_access_key": "S3CRET", "region": "us-east-1"}
MOVED = b"<?xml version='1.0'?><Error><Code>PermanentRedirect</Code><Message>elsewhere</Message></Error>"


class Odd(ThreadingHTTPServer):
    """Gives every request the same answer."""

    status, headers, content = 200, {"X-Odd": "yes"}, b""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: Odd

    def do_GET(self) -> None:
        self.send_response(self.server.status)
        for name, value in {**self.server.headers, "Content-Length": str(len(self.server.content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(self.server.content)

    do_HEAD = do_GET  # noqa: N815 - the name that the server looks for

    def log_message(self, *_: Any) -> None:
        """Nothing."""


@pytest.fixture
def odd() -> Iterator[Odd]:
    with Odd(("127.0.0.1", 0), _Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_an_s3_server_that_only_redirects_is_no_endless_recursion(odd: Odd) -> None:
    odd.status, odd.content = 301, MOVED
    with pytest.raises(StoreError, match=r"s3://bucket/d/x: the server answers with redirects only. Set its region"):
        open_store("s3://bucket/d", {**QUICK, **KEYS, "endpoint_url": odd.url}).read("x")


def test_a_redirect_leaves_http_for_nothing_else(odd: Odd) -> None:
    odd.status, odd.headers = 302, {"Location": "ftp://127.0.0.1/x"}
    with pytest.raises(StoreError, match=r"/d: redirects to ftp://, which is not followed"):
        open_store(f"{odd.url}/d", QUICK).read("x")


def test_an_endless_redirect_is_said_in_one_line(odd: Odd) -> None:
    odd.status, odd.headers = 302, {"Location": f"{odd.url}/d/x"}
    with pytest.raises(StoreError, match=r"^http://\S+/d: 10 redirects in a row[^\n]*$"):
        open_store(f"{odd.url}/d", QUICK).read("x")


@pytest.mark.parametrize("scheme", ["s3", "gs"])
@pytest.mark.parametrize("half", [{"access_key_id": "key"}, {"secret_access_key": "S3CRET"}])
def test_half_of_a_pair_of_keys_is_refused(monkeypatch: pytest.MonkeyPatch, scheme: str, half: dict[str, str]) -> None:
    monkeypatch.delenv("GCS_KEY", raising=False)
    monkeypatch.delenv("GCS_SECRET", raising=False)
    with pytest.raises(ValueError, match=r"access_key_id and secret_access_key .*come together") as caught:
        open_store(f"{scheme}://bucket/d", half)
    assert "S3CRET" not in str(caught.value)


def test_an_endpoint_without_a_scheme_is_refused_with_the_url_to_write(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"is a URL; got 'minio:9000'. Write https://minio:9000, or http://"):
        open_store("s3://bucket/d", {"endpoint_url": "minio:9000"})
    monkeypatch.setenv("S3_ENDPOINT_URL", "minio:9000")
    with pytest.raises(ValueError, match=r"S3_ENDPOINT_URL.* is a URL; got 'minio:9000'"):
        open_store("s3://bucket/d", QUICK).read("x")


def test_an_incomplete_connection_string_is_refused_without_showing_it() -> None:
    pytest.importorskip("azure.storage.blob", reason="azure-storage-blob is not installed: pip install it")
    store = open_store("azure://container/d", {"connection_string": "AccountKey=S3CRET;nothing", **QUICK})
    with pytest.raises(AccessError, match=r"azure://container/d: the connection string .* is incomplete") as caught:
        store.read("x")
    assert "S3CRET" not in "".join(traceback.format_exception(caught.value))


def test_a_login_of_another_kind_than_the_server_takes_is_refused_access() -> None:
    class AuthenticationException(Exception):
        """As paramiko's family is called."""

    class BadAuthenticationType(AuthenticationException):
        """A password, where only keys are taken."""

    found = FsspecStore("sftp://host/d", {}, 5.0)._special_error(BadAuthenticationType("allowed: publickey"), "x")
    assert isinstance(found, AccessError)
