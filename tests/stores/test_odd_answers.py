"""Servers that answer what no store should: each is an error of ours, names the URL, and gives no secret away."""

from __future__ import annotations

import gzip
import logging
import threading
import time
import traceback
import uuid
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from servers.web import LAST_MODIFIED, Handler, WebServer

from lightning_stream import stores
from lightning_stream.errors import (
    AccessError,
    AlreadyExistsError,
    ConflictError,
    NotFoundError,
    StoreError,
    UnavailableError,
)
from lightning_stream.stores import LocalStore, base, open_store
from lightning_stream.stores.generic import FsspecStore
from lightning_stream.stores.http import HttpStore

QUICK = {"retries": 0, "timeout_s": 5.0}
KEYS = {"access_key_id": "key", "secret_access_key": "S3CRET", "region": "us-east-1"}
MOVED = b"<?xml version='1.0'?><Error><Code>PermanentRedirect</Code><Message>elsewhere</Message></Error>"


class Odd(ThreadingHTTPServer):
    """Gives every request the same answer."""

    status, headers, content, has_length = 200, {"X-Odd": "yes"}, b"", True

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: Odd

    def do_GET(self) -> None:
        self.send_response(self.server.status)
        length = {"Content-Length": str(len(self.server.content))} if self.server.has_length else {}
        for name, value in {**self.server.headers, **length}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(self.server.content)

    do_HEAD = do_GET  # noqa: N815 - the name that the server looks for

    def do_PUT(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.command = "GET"
        self.do_GET()

    do_POST = do_PUT  # noqa: N815

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


UNFOLLOWED = {
    "ftp://127.0.0.1/x": "/d: redirects to ftp://, which is not followed",
    "file:///etc/passwd": "redirects to",
    "http://[::1": "redirects to",
    "http://host:port/x": "redirects to",
    "{odd}/d/x": r"^http://\S+/d: 10 redirects in a row[^\n]*$",
    **{
        f"http://{host}/latest/meta-data": "link-local or metadata address, which is not followed"
        for host in ("169.254.169.254", "[fe80::1]", "[::ffff:169.254.169.254]", "2852039166", "100.100.100.200")
    },
}


@pytest.mark.parametrize("location", UNFOLLOWED)
def test_a_redirect_that_is_endless_malformed_or_foreign_is_an_error_in_one_line(odd: Odd, location: str) -> None:
    odd.status, odd.headers = 302, {"Location": location.format(odd=odd.url)}
    with pytest.raises(StoreError, match=UNFOLLOWED[location]):
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
    with pytest.raises(ValueError, match=r"is a URL; got 'minio:9000'. Use https://minio:9000 or http://"):
        open_store("s3://bucket/d", {"endpoint_url": "minio:9000"})
    monkeypatch.setenv("S3_ENDPOINT_URL", "minio:9000")
    with pytest.raises(ValueError, match=r"S3_ENDPOINT_URL is a URL; got 'minio:9000'"):
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


@pytest.mark.parametrize(("retryable", "kind"), [(True, UnavailableError), (False, AccessError)])
def test_a_token_server_in_trouble_is_asked_again_and_its_refusal_is_one_of_access(
    retryable: bool, kind: type[StoreError]
) -> None:
    errors = pytest.importorskip("google.auth.exceptions", reason="google-auth is not installed")
    store: Any = open_store("gs://bucket/d", QUICK)
    with pytest.raises(kind, match="oops"), store.store._logging_in():
        raise errors.RefreshError("oops", retryable=retryable)


def test_a_connection_that_ends_during_the_login_is_trouble_and_no_refusal() -> None:
    """An SSH server that is killed, or has too many at once, gives what paramiko calls an error of authentication."""
    paramiko = pytest.importorskip("paramiko", reason="sftp needs paramiko")
    store = FsspecStore("sftp://host/d", {}, 5.0)
    ended = paramiko.AuthenticationException("Authentication failed: transport shut down or saw EOF")
    assert isinstance(store._special_error(ended, "x"), UnavailableError)
    for refused in (
        paramiko.AuthenticationException("Authentication failed."),
        paramiko.SSHException("No authentication methods available"),
    ):
        assert isinstance(store._special_error(refused, "x"), AccessError)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "10.0.0.1", "[::1]", "192.168.1.1"])
def test_a_redirect_from_a_public_host_into_a_private_network_is_refused(host: str) -> None:
    store = HttpStore("https://8.8.8.8/d")
    with pytest.raises(StoreError, match="private network, which is not followed"):
        store._redirected("https://8.8.8.8/d/x", f"http://{host}/x")
    assert store._redirected("https://8.8.8.8/d/x", "/e/x") == "https://8.8.8.8/e/x"


def test_what_authorises_goes_to_no_other_host_on_a_redirect() -> None:
    with WebServer() as elsewhere, WebServer() as server:
        elsewhere.objects["/f/x"] = server.objects["/f/y"] = b"content"
        server.redirect = elsewhere.url
        store = open_store(f"http://user:S3CRET@127.0.0.1:{server.port}/f", {**QUICK, "headers": {"X-Key": "S3CRET"}})
        assert store.read("x") == b"content"
        assert server.headers[0]["X-Key"] == "S3CRET"
        assert "Authorization" in server.headers[0]
        assert not {"X-Key", "Authorization"} & set(elsewhere.headers[0])


@pytest.mark.parametrize("scheme", ["http", "file"])
def test_the_hubs_next_page_is_followed_to_no_other_host(
    odd: Odd, scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed = b'[{"type": "file", "path": "a", "size": 1}]'
    (tmp_path / "page.json").write_bytes(listed)
    with WebServer() as elsewhere:
        target = f"{elsewhere.url}/page" if scheme == "http" else f"file://{tmp_path}/page.json"
        odd.content, odd.headers = listed, {"Link": f'<{target}>; rel="next"'}
        monkeypatch.setenv("HF_ENDPOINT", odd.url)
        monkeypatch.setenv("HF_TOKEN", "hf_S3CRET")
        with pytest.raises(StoreError, match="next page is at another host"):
            list(open_store("hf://datasets/o/n", QUICK).list())
        assert elsewhere.headers == []


def test_a_connection_is_used_again_for_the_next_request() -> None:
    with WebServer() as server:
        server.objects["/x"] = b"content"
        store = open_store(server.url, QUICK)
        for _ in range(5):
            assert store.read("x") == b"content"
        assert len(server.clients) == 1


def test_of_two_places_none_has_the_others_identity(monkeypatch: pytest.MonkeyPatch) -> None:
    def azure(account: str) -> str:
        return f"DefaultEndpointsProtocol=https;AccountName={account};AccountKey=S3CRET=="

    one, two = (open_store("azure://c/x", {"connection_string": azure(name)}).identity for name in ("a", "b"))
    assert one != two
    assert "S3CRET" not in one
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", azure("c"))
    assert open_store("azure://c/x").identity not in (one, two)
    endpoints = ("https://a", "https://b", None)
    assert len({open_store("gs://b/x", {"endpoint_url": endpoint}).identity for endpoint in endpoints}) == 3


def test_a_google_endpoint_is_logged_in_to_where_anonymous_is_false(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("google.auth", reason="google-auth is not installed: pip install 'lightning-stream[gcs]'")
    monkeypatch.setenv("NO_GCE_CHECK", "true")
    monkeypatch.setenv("CLOUDSDK_CONFIG", "/nowhere")
    monkeypatch.delenv("GOOGLE_APPLICATION_CREDENTIALS", raising=False)
    with pytest.raises(AccessError, match="no usable credentials"):
        open_store("gs://b/x", {"endpoint_url": "http://127.0.0.1:1", "anonymous": False, **QUICK}).read("x")


def test_a_file_url_is_decoded_and_names_no_other_host(tmp_path: Path) -> None:
    LocalStore(tmp_path / "a b").put("x", b"content")
    assert open_store(f"file://{tmp_path}/a%20b").read("x") == b"content"
    assert open_store(f"file://localhost{tmp_path}/a b").read("x") == b"content"
    for url in ("file://data/set", "file://data"):
        with pytest.raises(ValueError, match="names the host 'data'"):
            open_store(url)


def test_a_scheme_with_a_store_here_keeps_it_and_nothing_installed_is_looked_through(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looked: list[str] = []
    monkeypatch.setattr(stores, "entry_points", lambda **group: looked.extend(group) or [])
    assert type(open_store("s3://bucket/x").store).__name__ == "S3Store"
    assert not looked
    with pytest.raises(ValueError, match="no store is known for mine://"):
        open_store("mine://shelf")
    assert looked


def test_a_package_may_bring_a_store_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text(OWN_STORE)
    about = tmp_path / "mine-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[lightning_stream.stores]\nmine = mine:MyStore\n")
    monkeypatch.syspath_prepend(tmp_path)
    store = open_store("mine://shelf", QUICK)
    store.put("b", b"content", if_absent=True)
    store.put("a", b"other")
    assert [entry.name for entry in store.list()] == ["a", "b"]
    assert store.read("b", 2, 100) == b"ntent"
    with pytest.raises(AlreadyExistsError):
        store.put("b", b"again", if_absent=True)
    with pytest.raises(NotFoundError, match="mine://shelf/c: no such object"):
        store.read("c")
    assert not store.exists("c")
    with pytest.raises(UnavailableError, match="the shelf fell down"):
        store.read("broken")


OWN_STORE = """
from lightning_stream.stores import BaseStore, ObjectEntry, ObjectStream

class ShelfError(Exception): pass

class MyStore(BaseStore):
    network_errors = frozenset({"ShelfError"})

    def __init__(self, url):
        self.url, self.objects = url, {}

    @classmethod
    def from_url(cls, url, options):
        return cls(url)

    def _open(self, name, begin, end):
        if name == "broken":
            raise ShelfError("the shelf fell down")
        if name not in self.objects:
            raise FileNotFoundError(name)
        content = self.objects[name][begin:end]
        return ObjectStream(iter([content]), len(content))

    def _put(self, name, file, num_bytes, if_absent, if_version):
        self.objects[name] = file.read()

    def _list(self, prefix):
        return (ObjectEntry(name, len(content)) for name, content in self.objects.items() if name.startswith(prefix))

    def _delete(self, name):
        self.objects.pop(name, None)
"""


@pytest.mark.parametrize(
    ("sent", "span"),
    [("0-9/100", (50, 60)), ("50-54/100", (50, 60)), ("50-99/100", (50, 60)), ("50-60/*", (50, 60)), ("0-9/100", None)],
)
def test_an_answer_with_another_range_than_was_asked_for_is_never_taken(
    odd: Odd, sent: str, span: tuple[int, int] | None
) -> None:
    first, last = map(int, sent.partition("/")[0].split("-"))
    odd.status, odd.headers, odd.content = 206, {"Content-Range": f"bytes {sent}"}, bytes(last + 1 - first)
    store = open_store(odd.url, QUICK)
    with pytest.raises(UnavailableError, match=f"it sent bytes {sent[:5]}"):
        store.read("x", *span) if span else store.read("x")


@pytest.mark.parametrize(
    ("status", "headers", "num_bytes"),
    [
        (206, {}, 10),
        (206, {"Content-Type": "multipart/byteranges; boundary=x"}, 200),
        (206, {"Content-Range": "bytes 50-59"}, 10),
        (206, {"Content-Range": "bytes 50-59/100"}, 5),
        (206, {"Content-Range": "bytes 50-59/100"}, 15),
        (202, {"x-amzn-waf-action": "challenge"}, 10),
        (204, {}, 0),
    ],
)
def test_a_range_is_refused_unless_the_answer_says_which_one_it_is_and_has_its_bytes(
    odd: Odd, status: int, headers: dict[str, str], num_bytes: int
) -> None:
    odd.status, odd.headers, odd.content = status, headers, bytes(num_bytes)
    with pytest.raises(UnavailableError, match=r"must send the object, or the requested|ended after|sent more"):
        open_store(odd.url, QUICK).read("x", 50, 60)


class _Compressing(Handler):
    def reply(self, status: int, content: bytes = b"", *args: Any, **how: Any) -> None:
        super().reply(status, gzip.compress(content) if status == 206 else content, *args, **how)


class _CompressingServer(WebServer):
    def handler(self) -> type[Handler]:
        return _Compressing


def test_ranges_that_are_compressed_on_their_way_are_not_taken_for_pieces_of_the_object() -> None:
    """Each has fewer bytes than its Content-Range says, as if its connection had ended; the next one was joined."""
    with _CompressingServer() as server:
        server.objects["/x"] = b"abcd" * 1000
        store = open_store(server.url, {"retries": 9, "first_pause_s": 0.001, "longest_pause_s": 0.001})
        with pytest.raises(UnavailableError, match=r"it sent bytes 4-3999/4000, status 206\. Check the server, or the"):
            store.read("x", 4, 4000)


CLOUDS: dict[str, tuple[str, dict[str, Any]]] = {
    "s3": ("s3://bucket/d", KEYS),
    "gs": ("gs://bucket/d", {}),
    "gs-hmac": ("gs://bucket/d", {name: KEYS[name] for name in ("access_key_id", "secret_access_key")}),
    "azure": ("azure://container/d", {"account": "me", "account_key": "S3CRET=="}),
}


@pytest.mark.parametrize("cloud", CLOUDS)
@pytest.mark.parametrize(
    "content", [b"<html><body>log in</body></html>", b'{"error": "no"}', b"[]", b"null", b"<ListResult/>", b""]
)
def test_a_page_that_is_no_listing_is_not_an_empty_one(odd: Odd, cloud: str, content: bytes) -> None:
    url, options = CLOUDS[cloud]
    odd.content = content
    with pytest.raises(UnavailableError, match="not a listing"):
        list(open_store(url, {**QUICK, **options, "endpoint_url": odd.url}).list())


@pytest.mark.parametrize("cloud", CLOUDS)
@pytest.mark.parametrize("content", [b"<html><body>log in</body></html>", b""])
def test_a_page_is_not_taken_for_an_object_of_a_cloud(odd: Odd, cloud: str, content: bytes) -> None:
    url, options = CLOUDS[cloud]
    odd.content = content
    store = open_store(url, {**QUICK, **options, "endpoint_url": odd.url})
    for read in (lambda: store.read("x"), lambda: store.read("x", 5, 9), lambda: store.exists("x")):
        with pytest.raises(UnavailableError, match="an answer without"):
            read()


@pytest.mark.parametrize("cloud", CLOUDS)
def test_a_proxy_that_compresses_objects_is_refused_and_an_object_that_is_stored_so_is_read(
    odd: Odd, cloud: str
) -> None:
    url, options = CLOUDS[cloud]
    odd.headers = {"ETag": '"1"', "x-goog-generation": "1", "Content-Encoding": "gzip"}
    odd.content = b"\x1f\x8b"
    store = open_store(url, {**QUICK, **options, "endpoint_url": odd.url})
    assert store.read("x.txt") == odd.content
    odd.has_length = False
    with pytest.raises(StoreError, match=r"x\.txt: the server compresses this file \(gzip\)"):
        store.read("x.txt")


def test_an_answer_to_head_without_a_version_is_no_version(odd: Odd) -> None:
    store = open_store("s3://bucket/d", {**QUICK, **KEYS, "endpoint_url": odd.url})
    for condition in ({"if_absent": True}, {"if_version": '"1"'}):
        with pytest.raises(UnavailableError, match="an answer without the store's ETag"):
            store.put("x", b"content", **condition)  # type: ignore[arg-type]


def test_no_library_logs_what_authorises_a_request(odd: Odd, caplog: pytest.LogCaptureFixture) -> None:
    odd.headers = {"ETag": '"1"'}
    keys = {**KEYS, "session_token": "S3CRETtoken", "endpoint_url": odd.url}
    signed = {"account": "me", "sas_token": "se=2030&sig=S3CRETsignature", "endpoint_url": odd.url}
    with caplog.at_level(logging.DEBUG):
        for url, options in (("s3://b", keys), ("azure://c", signed), (f"{odd.url}/d?X-Amz-Signature=S3CRETquery", {})):
            open_store(url, {**QUICK, **options}).read("x")
    assert '"GET /c/x?... HTTP/1.1" 200' in caplog.text
    assert "x-amz-security-token:***" in caplog.text
    assert "S3CRET" not in caplog.text


@pytest.mark.parametrize("cloud", CLOUDS)
def test_a_page_in_place_of_a_stores_answer_means_that_nothing_was_stored(odd: Odd, cloud: str) -> None:
    url, options = CLOUDS[cloud]
    odd.content = b"<html><body>log in</body></html>"
    with pytest.raises(UnavailableError, match="nothing was stored"):
        open_store(url, {**QUICK, **options, "endpoint_url": odd.url}).put("x", b"content")


FIRST_PAGE = (
    b"<ListBucketResult><IsTruncated>true</IsTruncated>%s"
    b"<Contents><Key>d/a</Key><Size>1</Size></Contents></ListBucketResult>"
)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (b"", "how to get the next one"),
        (b"<NextMarker>d/a</NextMarker>", "how to get the next one"),
        (b"<NextContinuationToken>again</NextContinuationToken>", "the same page again and again"),
    ],
)
def test_a_listing_that_cannot_be_continued_is_not_the_end_of_it(odd: Odd, more: bytes, said: str) -> None:
    odd.content = FIRST_PAGE % more
    with pytest.raises(StoreError, match=said):
        list(open_store("s3://bucket/d", {**QUICK, **KEYS, "endpoint_url": odd.url}).list())


@pytest.mark.parametrize("cloud", ["gs", "gs-hmac"])
def test_google_is_asked_for_what_is_stored_since_it_would_unpack_it_and_send_no_ranges(cloud: str) -> None:
    url, options = CLOUDS[cloud]
    with WebServer() as server:
        store = open_store(url, {**QUICK, **options, "endpoint_url": server.url})
        with pytest.raises(NotFoundError):
            store.read("x", 0, 5)
        assert server.headers[0]["Accept-Encoding"] == "gzip"
    google = open_store("s3://b", {**KEYS, "endpoint_url": "https://storage.googleapis.com"})
    amazon = open_store("s3://b", KEYS)
    asked = [store.store.encoding for store in (google, amazon)]  # type: ignore[attr-defined]
    assert asked == ["gzip", "identity"]


@pytest.mark.parametrize("encoding", ["gzip", "br"])
def test_a_file_that_the_server_compresses_on_its_way_is_refused_and_a_compressed_file_is_read(
    odd: Odd, encoding: str
) -> None:
    odd.headers, odd.content = {"Content-Encoding": encoding}, b"\x1f\x8b"
    with pytest.raises(StoreError, match=r"server compresses this file.*Turn that off"):
        open_store(odd.url, QUICK).read("index.json")
    assert open_store(odd.url, QUICK).read(f"shard.00000.mds.{encoding[:2]}") == odd.content


def test_a_web_server_is_asked_by_nothing_but_get_whether_a_file_is_there() -> None:
    with WebServer() as server:
        server.objects = {"/folder/full": b"1", "/folder/empty": b""}
        store = open_store(f"{server.url}/folder", QUICK)
        assert [store.exists(name) for name in ("full", "empty", "absent")] == [True, True, False]
        assert server.count("GET") == len(server.asked)


@pytest.mark.parametrize("content", [b"<html>", b"null", b"[1]", b'{"error": "x"}', b'[{"type": "file"}]'])
def test_a_listing_of_the_hub_that_is_none_is_a_store_error(
    odd: Odd, content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    odd.content = content
    monkeypatch.setenv("HF_ENDPOINT", odd.url)
    with pytest.raises(UnavailableError, match=r"not JSON\. Check HF_ENDPOINT"):
        list(open_store("hf://datasets/org/name", QUICK).list(""))


@pytest.mark.parametrize("etags", ["weak", "none"])
def test_a_web_server_without_strong_etags_replaces_the_version_that_was_read_only(etags: str) -> None:
    with WebServer() as server:
        server.etags = etags
        store = open_store(f"{server.url}/d")
        store.put("x", b"one")
        with store.open("x") as stream:
            assert b"".join(stream) == b"one"
        store.put("x", b"two", if_version=stream.version)
        assert server.headers[-1].get("If-Unmodified-Since") == (LAST_MODIFIED if etags == "none" else None)
        with pytest.raises(ConflictError, match="replaced or deleted"):
            store.put("x", b"three", if_version=stream.version)
        server.objects.clear()
        with pytest.raises(ConflictError, match="replaced or deleted"):
            store.put("x", b"four", if_version=stream.version)
        assert not server.objects


@pytest.mark.parametrize(
    "url",
    [
        "https://me:S3CRET@/x",
        "https://me:S3CRET@host:port/x",
        "https://me:S3CRET@ho st/x",
        "http://me:S3CRET@[::1/x",
        "hf://me:S3CRET@datasets/o",
        "file://me:S3CRET@host/x",
        "s3:///x?token=S3CRET",
    ],
)
def test_an_incomplete_url_is_refused_before_any_request_and_without_its_secret(url: str) -> None:
    with pytest.raises(ValueError, match="got ") as caught:
        open_store(url)
    assert "S3CRET" not in str(caught.value)


def test_the_claim_of_a_killed_process_is_deleted_by_the_next_one() -> None:
    pytest.importorskip("fsspec", reason="fsspec is not installed: pip install fsspec")
    store = open_store("memory://claims/killed")
    dead, stranger = f"pointer.claim-1000-{'0' * 32}", "pointer.claim-ants"
    store.put(dead, b"")
    store.put(stranger, b"")
    store.put("pointer", b"first", if_absent=True)
    assert [entry.name for entry in store.list("")] == ["pointer", stranger]
    with pytest.raises(AlreadyExistsError):
        store.put("pointer", b"second", if_absent=True)
    assert store.read("pointer") == b"first"


@pytest.mark.parametrize("etags", ["strong", "weak", "none"])
def test_a_web_server_that_ignores_the_conditions_of_puts_keeps_what_was_there(etags: str) -> None:
    with WebServer() as server:
        server.etags, server.conditions = etags, False
        store = open_store(f"{server.url}/folder", QUICK)
        store.put("x", b"first", if_absent=True)
        with store.open("x") as stream:
            list(stream)
        with pytest.raises(AlreadyExistsError):
            store.put("x", b"other", if_absent=True)
        store.put("x", b"second", if_version=stream.version)
        with pytest.raises(ConflictError):
            store.put("x", b"third", if_version=stream.version)
        assert store.read("x") == b"second"
        store.delete("x")
        with pytest.raises(ConflictError):
            store.put("x", b"third", if_version=stream.version)


def test_a_claim_that_could_not_be_deleted_at_once_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(f"memory://{uuid.uuid4().hex}", {"retries": 1, "first_pause_s": 0.001})
    delete = FsspecStore._delete

    def broken(self: FsspecStore, name: str) -> None:
        monkeypatch.setattr(FsspecStore, "_delete", delete)
        raise ConnectionResetError

    monkeypatch.setattr(FsspecStore, "_delete", broken)
    monkeypatch.setattr("lightning_stream.stores.base._CLAIM_WAIT_S", 0.1)
    store.put("x", b"content", if_absent=True)
    assert [entry.name for entry in store.list()] == ["x"]


def test_a_claim_that_arrived_although_its_answer_was_lost_is_withdrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(f"memory://{uuid.uuid4().hex}", {"retries": 0})
    put = FsspecStore._put

    def lost(self: FsspecStore, *arguments: Any) -> None:
        monkeypatch.setattr(FsspecStore, "_put", put)
        put(self, *arguments)
        raise ConnectionResetError

    monkeypatch.setattr(FsspecStore, "_put", lost)
    monkeypatch.setattr("lightning_stream.stores.base._CLAIM_WAIT_S", 0.1)
    with pytest.raises(UnavailableError, match="claim"):
        store.put("x", b"content", if_absent=True)
    assert not [*store.list()]
    store.put("x", b"content", if_absent=True)
    assert store.read("x") == b"content"


@pytest.mark.parametrize("ahead_s", [-3600, 3600, 10**8])
def test_a_claim_of_another_clock_is_waited_for(monkeypatch: pytest.MonkeyPatch, ahead_s: int) -> None:
    """Where the other machine's clock is an hour behind, its claim is no older than it looks; it ends in seconds."""
    pytest.importorskip("fsspec", reason="fsspec is not installed: pip install fsspec")
    store = open_store(f"memory://{uuid.uuid4().hex}")
    dated = int(time.time()) + ahead_s
    alive, killed = (f"pointer.claim-{dated}-{digit * 32}" for digit in "01")
    store.put(alive, b"")
    ends = threading.Timer(0.5, store.delete, [alive])
    ends.start()
    store.put("pointer", b"first", if_absent=True)
    assert not ends.is_alive()
    monkeypatch.setattr(base, "_CLAIM_WATCHED_S", 0.5)
    store.put(killed, b"")
    with pytest.raises(AlreadyExistsError):
        store.put("pointer", b"second", if_absent=True)
    assert [entry.name for entry in store.list("")] == ["pointer"]


def test_a_file_of_a_file_system_that_is_replaced_while_it_is_read_is_no_mixture(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("fsspec", reason="fsspec is not installed: pip install fsspec")
    former, newer = b"1" * (5 << 20), b"2" * (5 << 20)
    store = open_store("memory://replaced", {"first_pause_s": 0.001})
    opened = FsspecStore._open

    def breaks(self: FsspecStore, name: str, begin: int, end: int | None) -> Any:
        stream = opened(self, name, begin, end)

        def chunks() -> Iterator[bytes]:
            yield next(stream.chunks)
            store.put("x", newer)
            monkeypatch.setattr(FsspecStore, "_open", opened)
            raise ConnectionResetError

        return replace(stream, chunks=chunks())

    store.put("x", former)
    monkeypatch.setattr(FsspecStore, "_open", breaks)
    with pytest.raises(StoreError, match="it was replaced while it was being read"), store.open("x") as stream:
        list(stream)
    store.put("x", former)
    monkeypatch.setattr(FsspecStore, "_open", breaks)
    assert store.read("x") == newer


def test_a_put_that_breaks_leaves_nothing_behind() -> None:
    """A file of fsspec is closed with what was written so far: under the name of a whole object."""
    pytest.importorskip("fsspec", reason="fsspec is not installed: pip install fsspec")
    store = FsspecStore("memory://broken/put", {}, 5.0)

    class Failing(BytesIO):
        def read(self, _: int | None = -1) -> bytes:
            if self.tell():
                raise OSError("the disk is gone")
            return super().read(4 << 20)

    with pytest.raises(OSError, match="the disk is gone"):
        store._put("x", Failing(bytes(8 << 20)), 8 << 20, False, None)
    assert list(store.list()) == []
