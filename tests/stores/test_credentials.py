"""Keys that end: renewed in time or when they are refused, once a machine, and never left anywhere."""

from __future__ import annotations

import logging
import math
import pickle
import stat
import sys
import time
import traceback
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from servers.fake_databricks import FakeDatabricks
from servers.fake_gcs import FakeGcs
from servers.vending import Ask, VendingServer, stopped_and_resumed, written
from servers.web import WebServer

from lightning_stream import Stream, StreamingDataLoader, StreamingDataset, World
from lightning_stream.cache.folder import CacheFolder
from lightning_stream.errors import AccessError, UnavailableError
from lightning_stream.stores import RetryingStore, open_store, transfer
from lightning_stream.stores.credentials import Credentials

_LOADED = (StreamingDataLoader, World)  # before a fork beside threads, which may be importing
QUICK = {"retries": 2, "first_pause_s": 0.01}


@pytest.fixture
def server() -> Iterator[VendingServer]:
    with VendingServer() as server:
        server.objects["/bucket/data/x"] = b"content"
        yield server


def opened(server: VendingServer, **options: Any) -> RetryingStore:
    given = {**QUICK, "endpoint_url": server.url, "credentials": Ask(server.url), **options}
    made = open_store("s3://bucket/data", given)
    assert isinstance(made, RetryingStore)
    return made


def test_keys_are_asked_for_once_and_signed_with(server: VendingServer) -> None:
    store = opened(server)
    assert store.read("x") == store.read("x") == b"content"
    assert [entry.name for entry in store.list()] == ["x"]
    store.put("y", b"more", if_absent=True)
    store.delete("y")
    assert len(server.issued) == 1
    assert server.refused == 0


def test_keys_that_end_are_renewed_before(server: VendingServer, monkeypatch: pytest.MonkeyPatch) -> None:
    store, begun = opened(server), time.time()
    assert store.read("x") == b"content"
    monkeypatch.setattr(time, "time", lambda: begun + 0.85 * server.lifetime_s)
    assert store.read("x") == b"content"
    assert len(server.issued) == 1
    monkeypatch.setattr(time, "time", lambda: begun + 0.95 * server.lifetime_s)
    assert store.read("x") == b"content"
    assert (len(server.issued), server.refused) == (2, 0)


def test_refused_keys_are_renewed_once_and_the_request_goes_on(server: VendingServer) -> None:
    store = opened(server)
    assert store.read("x") == b"content"
    server.revoke()
    store.put("y", b"written")  # its body is sent again
    assert store.read("y") == b"written"
    assert (len(server.issued), server.refused) == (2, 1)


def test_keys_that_are_replaced_in_the_file_of_aws_tools_are_read_again_once_a_minute(
    server: VendingServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "credentials"
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))

    def rotate() -> None:
        server.revoke()
        new = {f"aws_{name}": value for name, value in server.issue().items() if name != "expires_at"}
        file.write_text("\n".join(["[default]", *(f"{name} = {value}" for name, value in new.items())]))

    rotate()
    store, begun = opened(server, credentials=None), time.monotonic()
    assert store.read("x") == b"content"
    for minute in (2, 4):
        rotate()
        monkeypatch.setattr(time, "monotonic", lambda now=begun + 60 * minute: now)
        store.put("y", b"written")  # its body is sent again
        assert store.read("y") == b"written"
        assert server.refused == minute // 2
    server.revoke()
    for _ in range(5):
        with pytest.raises(AccessError, match="refused"):
            store.read("x")
    assert server.refused == 12  # each time also without keys, since the bucket may be public


def test_a_right_that_is_missing_does_not_ask_again_and_again(server: VendingServer) -> None:
    store = opened(server)
    assert store.read("x") == b"content"
    server.lifetime_s = 7000.0
    server.revoke()
    store.store.credentials._ask = lambda: {**server.issue(), "session_token": "wrong"}  # type: ignore[attr-defined]
    for _ in range(5):
        with pytest.raises(AccessError, match="refused"):
            store.read("x")
    assert len(server.issued) == 2


def test_keys_without_an_end_are_renewed_after_a_right_was_missing_for_a_while(
    server: VendingServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bucket that may not be listed refuses what is absent, such as a further version, at each start."""
    asked = []

    def ask() -> dict[str, Any]:
        asked.append({name: value for name, value in server.issue().items() if name != "expires_at"})
        return asked[-1]

    store, begun = opened(server, credentials=ask), time.time()
    store.read("x")
    inner: Any = store.store  # type: ignore[attr-defined]

    def refused() -> None:
        raise AccessError("no such right")

    for _ in range(3):
        with pytest.raises(AccessError, match="no such right"):
            inner.credentials.attempt(refused)
    assert len(asked) == 2
    monkeypatch.setattr(time, "time", lambda: begun + 300)
    server.revoke()
    assert store.read("x") == b"content"
    assert len(asked) == 3


def test_a_trouble_of_the_keys_server_is_no_error_while_the_keys_hold(
    server: VendingServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store, begun = opened(server), time.time()
    assert store.read("x") == b"content"

    def broken() -> dict[str, Any]:
        raise ConnectionResetError("no way")

    store.store.credentials._ask = broken  # type: ignore[attr-defined]
    monkeypatch.setattr(time, "time", lambda: begun + 0.95 * server.lifetime_s)
    with caplog.at_level(logging.WARNING):
        assert store.read("x") == store.read("x") == b"content"
    assert caplog.text.count("no new ones came") == 1
    monkeypatch.setattr(time, "time", lambda: begun + 2 * server.lifetime_s)
    with pytest.raises(UnavailableError, match=r"no way.*gave up after 3"):
        store.read("x")


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ({}, "it returned no keys"),
        ({"token": "Secret1"}, "credentials= returns access_key_id, secret_access_key, session_token, and expires_at"),
        ({"access_key_id": "a", "secret_access_key": "Secret1", "expires_at": 5.0}, "end later than now"),
        ({"access_key_id": "a", "secret_access_key": "Secret1", "expires_at": time.time() * 1000}, "in seconds"),
        ({"access_key_id": "a", "secret_access_key": "Secret1", "expires_at": datetime(2050, 1, 1)}, "a time zone"),
        (None, "s3://bucket/data: .* as a dict; it returned no keys, but a NoneType"),
        ({"access_key_id": "a", "secret_access_key": None}, "access_key_id and secret.* it returned access_key_id"),
    ],
)
def test_what_is_no_keys_is_refused_without_a_word_of_them(server: VendingServer, returned: Any, message: str) -> None:
    with pytest.raises(AccessError, match=message) as caught:
        opened(server, credentials=lambda: returned).read("x")
    assert "Secret1" not in "".join(traceback.format_exception(caught.value))
    assert caught.value.__context__ is None


def test_what_a_function_raises_is_told_without_secrets(server: VendingServer) -> None:
    def failing() -> dict[str, str]:
        raise RuntimeError("token=S3CRET was refused")

    with pytest.raises(AccessError, match=r"credentials= returned no keys .RuntimeError: token=") as caught:
        opened(server, credentials=failing).read("x")
    assert "S3CRET" not in "".join(traceback.format_exception(caught.value))


@pytest.mark.parametrize("made", [str, float, lambda when: when], ids=["text", "seconds", "datetime"])
def test_ends_come_as_seconds_text_or_datetime(made: Any) -> None:
    ends = datetime.now(UTC) + timedelta(hours=1)
    given = ends.timestamp() if made is float else made(ends)
    keys = Credentials(lambda: {"token": "t", "expires_at": given}, "x://").get()
    assert keys.ends == pytest.approx(ends.timestamp())


def test_keys_without_an_end_hold_until_they_are_refused() -> None:
    assert Credentials(lambda: {"token": "t"}, "x://").get().renew_at == math.inf


def test_each_kind_of_store_takes_its_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind, url in (("gcs", "gs://bucket/x"), ("dbfs", "dbfs:/Volumes/a/b/c"), ("http", "")):
        server = {"gcs": FakeGcs, "dbfs": FakeDatabricks, "http": WebServer}[kind]()
        with server:
            server.authorization = "Bearer first"
            tokens = iter(["first", "second"])

            def ask(kind: str = kind, tokens: Iterator[str] = tokens) -> dict[str, Any]:
                token = next(tokens)
                return {"headers": {"Authorization": f"Bearer {token}"}} if kind == "http" else {"token": token}

            options = {"gcs": {"endpoint_url": server.url}, "dbfs": {"host": server.url}, "http": {}}[kind]
            store = open_store(url or f"{server.url}/x", {**QUICK, **options, "credentials": ask})
            store.put("a", b"content")
            assert store.read("a") == b"content"
            server.authorization = "Bearer second"
            assert store.read("a") == b"content"


def test_azure_takes_signatures_and_tokens() -> None:
    with WebServer() as server:
        server.objects["/container/x"] = b"content"
        for keys in ({"sas_token": "?sig=abc"}, {"token": "abc"}):
            options = {"account": "me", "endpoint_url": server.url, "credentials": lambda keys=keys: keys}
            assert open_store("azure://container", {**QUICK, **options}).read("x") == b"content"
        assert server.headers[-1]["Authorization"] == "Bearer abc"


def test_fsspec_connects_again_with_new_keys() -> None:
    fsspec = pytest.importorskip("fsspec")
    fsspec.filesystem("memory").pipe("/keyed/x", b"content")
    keys = iter([{"one": "1", "expires_at": time.time() + 3600}, {"one": "2"}])
    store = open_store("memory://keyed", {**QUICK, "credentials": lambda: next(keys)})
    assert store.read("x") == b"content"
    inner: Any = store.store  # type: ignore[attr-defined]
    inner.credentials._keys = None
    assert store.read("x") == b"content"
    assert inner._of_thread().keys == {"one": "2"}


def test_a_name_is_a_function_of_a_module_or_an_entry_point(
    server: VendingServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "my_keys.py").write_text(f"from servers.vending import Ask\nask = Ask({server.url!r})\n")
    about = tmp_path / "my_keys-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: my-keys\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[lightning_stream.credentials]\nmine = my_keys:ask\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("mine", "my_keys:ask"):
        assert opened(server, credentials=name).read("x") == b"content"
    monkeypatch.setenv("LIGHTNING_STREAM_CREDENTIALS", "s3://bucket/data=mine")
    assert opened(server, credentials=None).read("x") == b"content"
    assert open_store("s3://bucket/database", {}).store.credentials is None  # type: ignore[attr-defined]
    sys.modules.pop("my_keys", None)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("mine", "'mine' .LookupError: no such entry point"),
        ("json:absent", "'json:absent' .AttributeError: .*'absent'"),
        ("no_module:keys", "'no_module:keys' .ModuleNotFoundError: .*'no_module'.*PYTHONPATH"),
        ("math:pi", "'math:pi' .TypeError: it is a float"),
        (":keys", "':keys' .ValueError: Empty module name"),
        (5, "function without arguments, or its name; got a int"),
    ],
)
def test_what_is_no_function_is_refused_at_once(given: Any, said: str) -> None:
    with pytest.raises((ValueError, TypeError), match=f"credentials= .*{said}"):
        open_store("s3://bucket/data", {"credentials": given})


@pytest.mark.parametrize("value", ["my_keys:ask", "=my_keys:ask", "bucket=my_keys:ask"])
def test_a_variable_without_a_url_is_refused(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIGHTNING_STREAM_CREDENTIALS", value)
    with pytest.raises(ValueError, match="LIGHTNING_STREAM_CREDENTIALS is URL=NAME"):
        open_store("s3://bucket/data", {})


def test_a_store_is_pickled_without_keys_or_says_what_cannot(server: VendingServer) -> None:
    store = opened(server)
    store.read("x")
    stored = pickle.dumps(store)
    (token, (_, secret, _)), *_ = server.issued.items()
    assert token.encode() not in stored
    assert secret.encode() not in stored
    assert pickle.loads(stored).read("x") == b"content"
    unpickled = opened(server, credentials=lambda: {**server.issue()})
    with pytest.raises(TypeError, match=r"s3://bucket/data: credentials= .* must be a function of a module"):
        pickle.dumps(unpickled)


def test_processes_share_keys_by_a_private_file(server: VendingServer, tmp_path: Path) -> None:
    stores = [opened(server) for _ in range(3)]
    for store in stores:
        store.share_keys(CacheFolder(tmp_path, shared=True))
        assert store.read("x") == b"content"
    assert len(server.issued) == 1
    (file,) = tmp_path.rglob("keys-*.json")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert server.left_in(tmp_path) == [file]
    server.revoke()
    assert [store.read("x") for store in stores] == [b"content"] * 3
    assert len(server.issued) == 2


def test_a_file_of_keys_that_is_damaged_is_written_again(server: VendingServer, tmp_path: Path) -> None:
    for damage in (b"", b"\0\0", b"{}"):
        store = opened(server)
        store.share_keys(CacheFolder(tmp_path))
        assert store.read("x") == b"content"
        (file,) = tmp_path.rglob("keys-*.json")
        file.write_bytes(damage)
    assert len(server.issued) == 3


def test_keys_of_others_are_not_taken(server: VendingServer, tmp_path: Path) -> None:
    store = opened(server)
    store.share_keys(CacheFolder(tmp_path))
    store.read("x")
    (file,) = tmp_path.rglob("keys-*.json")
    file.chmod(0o644)  # not left by us: anybody may have read it
    again = opened(server)
    again.share_keys(CacheFolder(tmp_path))
    assert again.read("x") == b"content"
    assert len(server.issued) == 2
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    other = opened(server, credentials=server.issue)  # another function: other rights
    other.share_keys(CacheFolder(tmp_path))
    assert other.read("x") == b"content"
    assert len(server.issued) == 3


def test_a_stream_takes_credentials(server: VendingServer, tmp_path: Path) -> None:
    server.store(written(tmp_path / "data", 20), "bucket/train")
    stream = Stream(
        "s3://bucket/train", local=tmp_path / "cache", credentials=Ask(server.url), options={"endpoint_url": server.url}
    )
    dataset = StreamingDataset(streams=[stream])
    assert [dataset[k]["id"] for k in range(20)] == [*range(20)]
    assert len(server.issued) == 1
    assert [path.parent.name for path in server.left_in(tmp_path)] == [".lightning_stream"]


def stream_of(server: VendingServer) -> dict[str, Any]:
    return {"remote": "s3://bucket/train", "credentials": Ask(server.url), "options": {"endpoint_url": server.url}}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of forking beside the server's thread
def test_a_run_outlives_its_keys(tmp_path: Path) -> None:
    with VendingServer(lifetime_s=4.0) as server:
        stopped_and_resumed("fork", server, tmp_path, stream_of(server), 96, 0.35)


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_a_run_of_three_minutes_with_keys_of_thirty_seconds(tmp_path: Path) -> None:
    with VendingServer(lifetime_s=30.0) as server:
        stopped_and_resumed("spawn", server, tmp_path, stream_of(server), 720, 1.0)


def test_a_thread_gets_a_login_while_others_forget_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "_LOGIN_S", 0.0)
    login = transfer.PerProcess(object)

    def use() -> None:
        assert login() is not None
        raise AccessError("refused")

    def ask(count: int) -> None:
        for _ in range(count):
            with suppress(AccessError):
                login.attempt(use)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as threads:
            list(threads.map(ask, [8_000] * 4))
    finally:
        sys.setswitchinterval(interval)
