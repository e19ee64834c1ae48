"""Over TLS: all bytes arrive, by few calls and without pauses, and the connection can be used again."""

from __future__ import annotations

import shutil
import ssl
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from servers.web import Handler, WebServer

from lightning_stream.errors import StoreError, UnavailableError
from lightning_stream.stores import http, open_store, transfer

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl: apt-get install openssl")
PIECE = bytes(range(256)) * 256  # 64 KiB


class SecureServer(WebServer):
    """A web server whose certificate signs itself. It breaks `cuts` answers off, and sends slowly after `slow_after`.

    Attributes:
        cuts: After how many bytes the next answers end.
        slow_after: After how many bytes it sends one byte every 50 ms.
    """

    def __init__(self, certificate: Path) -> None:
        super().__init__()
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate)
        self._http.socket = context.wrap_socket(self._http.socket, server_side=True)
        self.url = f"https://127.0.0.1:{self.port}"
        self.cuts: list[int] = []
        self.slow_after: int | None = None
        self.ended = threading.Event()

    def handler(self) -> type[Handler]:
        return _SecureHandler


class _SecureHandler(Handler):
    def media(self, content: bytes, headers: dict[str, str] | None = None) -> None:
        whole = self.wfile.write

        def part(body: bytes) -> int:
            if len(body) < 1000:  # the headers
                return whole(body)
            if self.owner.slow_after is not None:
                whole(body[: self.owner.slow_after])
                for k in range(self.owner.slow_after, len(body)):
                    if self.owner.ended.wait(0.05):
                        break
                    whole(body[k : k + 1])
            elif self.owner.cuts:
                self.close_connection = True
                return whole(body[: self.owner.cuts.pop(0)])
            return whole(body)

        self.wfile.write = part  # type: ignore[method-assign]
        try:
            super().media(content, headers)
        finally:
            self.wfile.write = whole  # type: ignore[method-assign]


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    certificate = tmp_path / "certificate.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-keyout", tmp_path / "key.pem", "-out", certificate, "-days", "2", "-subj", "/CN=127.0.0.1"]
    subprocess.run([*command, "-addext", "subjectAltName=IP:127.0.0.1"], check=True, capture_output=True, timeout=60)
    both = certificate.read_bytes() + (tmp_path / "key.pem").read_bytes()
    certificate.write_bytes(both)
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    with SecureServer(certificate) as made:
        yield made
        made.ended.set()


@pytest.mark.parametrize("spare", [-1, 0, 1, 1000])
def test_answers_of_all_sizes_arrive_and_the_connection_is_used_again(server: SecureServer, spare: int) -> None:
    sizes = [max(0, (size << 10) + spare) for size in (0, 1, 16, 32, 64, 96, 128, 256, 1024, 1088, 1344, 5000)]
    store: Any = open_store(server.url, {"timeout_s": 60.0})
    for size in sizes:
        server.objects[f"/{size}"] = (PIECE * (size // len(PIECE) + 1))[:size]
        assert store.read(str(size)) == server.objects[f"/{size}"]
    assert len(server.clients) == 1


def test_bytes_are_gathered_without_pauses(server: SecureServer, monkeypatch: pytest.MonkeyPatch) -> None:
    server.objects["/x"] = PIECE * 128
    store: Any = open_store(server.url, {"timeout_s": 5.0})
    pauses: list[float] = []
    monkeypatch.setattr(transfer.time, "sleep", pauses.append)
    with store.open("x") as stream:
        chunks = list(stream)
    assert b"".join(chunks) == server.objects["/x"]
    assert len(chunks) < 32  # though TLS gives 16 KiB at a time
    assert not pauses


@pytest.mark.parametrize("store", ["https", "s3"])
def test_a_certificate_that_is_not_trusted_is_an_error_that_says_where_its_authority_must_be(
    server: SecureServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, store: str
) -> None:
    (tmp_path / "empty.pem").write_text("")
    for name in ("SSL_CERT_FILE", "SSL_CERT_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "empty.pem"))
    for name in ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "AWS_CA_BUNDLE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(http, "_pools", transfer.PerProcess(dict))
    keys = {"endpoint_url": server.url, "access_key_id": "key", "secret_access_key": "S3CRET"}
    url, options = (server.url, {}) if store == "https" else ("s3://bucket", keys)
    with pytest.raises(StoreError, match=r"CERTIFICATE_VERIFY_FAILED.*this clock; who signed it must be in the file"):
        open_store(url, {**options, "timeout_s": 5.0}).read("x")
    assert server.count("GET") == 0


@pytest.mark.parametrize("cuts", [[5000], [100_000], [3_000_000, 2_500_001], [8_388_607]])
def test_a_broken_connection_is_resumed(server: SecureServer, cuts: list[int]) -> None:
    server.objects["/x"], server.cuts = PIECE * 128, list(cuts)
    store: Any = open_store(server.url, {"timeout_s": 60.0, "first_pause_s": 0.001})
    assert store.read("x") == server.objects["/x"]
    assert server.count("GET") == 1 + len(cuts)
    assert not server.cuts


def test_a_connection_that_becomes_slow_is_given_up(server: SecureServer) -> None:
    server.objects["/x"], server.slow_after = PIECE * 128, 3_000_000
    store: Any = open_store(server.url, {"timeout_s": 0.5, "first_pause_s": 0.001, "retries": 40})
    assert store.read("x") == server.objects["/x"]  # else it would take days
    assert server.count("GET") >= 3


def test_a_deadline_ends_a_server_that_sends_a_byte_now_and_then(server: SecureServer) -> None:
    server.objects["/x"], server.slow_after = PIECE * 128, 0
    store: Any = open_store(server.url, {"timeout_s": 5.0, "deadline_s": 0.5})
    begun = time.monotonic()
    with pytest.raises(UnavailableError, match=r"not done within the deadline of 0\.5 s"):
        store.read("x")
    assert time.monotonic() - begun < 20
