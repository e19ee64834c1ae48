"""Requests to S3: addressed as boto3 does it, signed each time, and sent again where the bucket is elsewhere."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from servers.fake_gcs import FakeGcs
from servers.fault_proxy import FaultProxy, Plan
from servers.web import Handler, WebServer

from lightning_stream.errors import AccessError, NotFoundError, StoreError, UnavailableError
from lightning_stream.stores import Store, open_store
from lightning_stream.stores.databricks import DatabricksStore
from lightning_stream.stores.s3 import S3Store

boto3 = pytest.importorskip("boto3", reason="needs boto3: pip install boto3")
KEYS = {"access_key_id": "key", "secret_access_key": "S3CRET", "region": "us-east-1"}
ODD_KEYS = ["a", "a b", "a+b", "a%20b", "é/ü~_-.*'()!", "a=b&c?d#e;f:g,h@i$j", '"<>[]{}|^`', "date=2026-11-23/part 0"]


class Refusing(WebServer):
    """Answers with `status` where there is one; with `home`, only in that region, as AWS does."""

    status: int | None = None
    home: str | None = None
    moved, location = 301, ""

    def handler(self) -> type[Handler]:
        return _Handler


class _Handler(Handler):
    def answer(self) -> None:
        owner = self.owner
        if owner.home and f"/{owner.home}/s3/" not in self.headers["Authorization"]:
            where = {"Location": f"{owner.location}{self.where}"} if owner.location else {}
            return self.reply(owner.moved, b"<Error><Code>PermanentRedirect</Code></Error>", "application/xml",
                              {"x-amz-bucket-region": owner.home, **where})  # fmt: skip
        if owner.status is None:
            return super().answer()
        return self.refuse(owner.status, "Slow Down")


def store_at(server: WebServer | FaultProxy, **options: Any) -> S3Store:
    made = S3Store.from_url("s3://bucket/data", {"endpoint_url": server.url, **KEYS, **options})
    assert isinstance(made, S3Store)
    return made


SETTINGS: dict[str, tuple[str, dict[str, Any], dict[str, str], str]] = {
    "virtual": ("bucket", {}, {}, ""),
    "path": ("bucket", {"addressing_style": "path"}, {}, ""),
    "dots": ("my.bucket", {}, {}, ""),
    "FIPS and dual stack": ("b", {}, {"AWS_USE_FIPS_ENDPOINT": "true", "AWS_USE_DUALSTACK_ENDPOINT": "true"}, ""),
    "accelerated": ("bucket", {}, {}, "s3 =\n  use_accelerate_endpoint = true\n"),
    "access point": ("arn:aws:s3:eu-west-1:123456789012:accesspoint:name", {}, {}, ""),
    "China": ("bucket", {"region": "cn-north-1"}, {}, ""),
    "endpoint": ("bucket", {"endpoint_url": "http://minio:9000"}, {}, ""),
    "endpoint of a profile": ("bucket", {}, {}, "endpoint_url = https://minio:9000\n"),
    "virtual at an endpoint": ("bucket", {"endpoint_url": "http://minio", "addressing_style": "virtual"}, {}, ""),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_objects_have_the_addresses_that_boto3_would_ask_for(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket, options, variables, config = SETTINGS[name]
    (tmp_path / "config").write_text(f"[default]\n{config}")
    for variable in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "S3_ENDPOINT_URL", "AWS_REGION", "AWS_PROFILE"):
        monkeypatch.delenv(variable, raising=False)
    for variable, value in {**variables, "AWS_CONFIG_FILE": str(tmp_path / "config")}.items():
        monkeypatch.setenv(variable, value)
    options = {"region": "eu-central-1", **options}
    store = S3Store(bucket, "", S3Store.from_url("s3://b", {**KEYS, **options})._options)  # type: ignore[attr-defined]
    style = {"s3": {"addressing_style": options["addressing_style"]}} if "addressing_style" in options else {}
    client = boto3.session.Session().client(
        "s3", region_name=options["region"], aws_access_key_id="key", aws_secret_access_key="secret",
        endpoint_url=options.get("endpoint_url"), config=boto3.session.Config(**style, retries={"max_attempts": 0}),
    )  # fmt: skip
    asked: list[str] = []

    def note(request: Any, **_: Any) -> None:
        asked.append(request.url)
        raise ConnectionError("nothing is sent")

    client.meta.events.register("before-send.s3", note)
    for key in ODD_KEYS:
        with pytest.raises(Exception, match="nothing is sent"):
            client.get_object(Bucket=bucket, Key=key)
        assert store._address(key) == asked[-1]


@pytest.mark.parametrize("options", [{}, {"requester_pays": True}, {"session_token": "token"}, {"anonymous": True}])
def test_a_request_is_signed_with_all_its_headers_unless_it_is_anonymous(options: dict[str, Any]) -> None:
    with WebServer() as server:
        server.objects["/bucket/data/x"] = b"0123456789"
        store = store_at(server, **options)
        assert store.read("x", 2, 5) == b"234"
        (headers,) = ({name.lower(): value for name, value in sent.items()} for sent in server.headers)
        assert ("authorization" in headers) == ("anonymous" not in options)
        assert headers.get("x-amz-security-token") == options.get("session_token")
        assert ("x-amz-request-payer" in headers) == ("requester_pays" in options)
        signed = headers.get("authorization", "SignedHeaders=,").split("SignedHeaders=")[1].split(",")[0].split(";")
        if "anonymous" not in options:
            unsigned = set(headers) - set(signed)
            assert unsigned <= {"authorization", "user-agent", "connection", "accept-encoding"}


def test_a_bucket_in_another_region_is_read_and_written_there() -> None:
    with Refusing() as server:
        server.home = "eu-south-2"
        server.objects["/bucket/data/x"] = b"content"
        store = store_at(server)
        assert store.read("x") == b"content"
        assert server.statuses == {301: 1, 200: 1}
        store = store_at(server)
        store.put("y", b"other")
        assert server.objects["/bucket/data/y"] == b"other"
        assert server.statuses[301] == 2


def test_a_new_bucket_in_another_region_is_asked_there_with_a_signature_for_it() -> None:
    """AWS then redirects by 307 and an address, where the signature for the first region would be refused."""
    with Refusing() as server, WebServer() as there:
        server.home, server.moved = "eu-south-2", 307
        server.location = there.url
        server.objects["/bucket/data/x"] = b"content"
        assert store_at(server).read("x") == b"content"
        assert there.asked == []


def test_a_server_in_trouble_is_asked_once_and_its_words_are_told() -> None:
    with Refusing() as server:
        server.objects["/bucket/data/x"] = b"content"
        store = store_at(server)
        assert store.read("x") == b"content"
        for status, expected in ((503, UnavailableError), (429, UnavailableError), (500, UnavailableError)):
            server.status, before = status, server.count("GET")
            with pytest.raises(expected, match="Slow Down") as found:
                store.read("x")
            assert server.count("GET") == before + 1
            assert found.value.is_throttled == (status != 500)
        with FaultProxy(server.url, Plan(probability={"error": 1.0}, only="x")) as proxy:
            server.status, store = None, store_at(proxy)
            proxy.plan.left = 0
            assert store.read("x") == b"content"
            proxy.plan.left = 1
            with pytest.raises(UnavailableError, match="503 SlowDown"):
                store.read("x")
        store = store_at(server)
        for status, refused in ((403, AccessError), (404, NotFoundError)):
            server.status = status
            with pytest.raises(refused):
                store.read("x")
        server.status = None
        assert store.read("x") == b"content"


def test_credentials_that_have_been_refreshed_sign_the_next_request(monkeypatch: pytest.MonkeyPatch) -> None:
    import botocore.credentials
    import botocore.session

    names = iter("abcdefgh")

    def refresh() -> dict[str, str]:
        until = datetime.now(UTC) + timedelta(seconds=1)  # always about to expire
        name = next(names)
        return {"access_key": name, "secret_key": "s", "token": f"token-{name}", "expiry_time": until.isoformat()}

    made = botocore.credentials.RefreshableCredentials.create_from_metadata(refresh(), refresh, "test")
    monkeypatch.setattr(botocore.session.Session, "get_credentials", lambda _: made)
    with WebServer() as server:
        server.objects["/bucket/data/x"] = b"content"
        store = store_at(server, access_key_id=None, secret_access_key=None)
        for _ in range(3):
            assert store.read("x") == b"content"
        used = [headers["Authorization"].split("Credential=")[1][0] for headers in server.headers]
        assert len(set(used)) == 3
        assert [headers["X-Amz-Security-Token"] for headers in server.headers] == [f"token-{name}" for name in used]


def ask_machine(asked: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the clouds' libraries find keys, and note that they were asked."""
    botocore = pytest.importorskip("botocore.session", reason="needs botocore")
    google = pytest.importorskip("google.auth", reason="needs google-auth: pip install 'lightning-stream[gcs]'")
    keys = pytest.importorskip("botocore.credentials", reason="needs botocore").Credentials("key", "S3CRET")
    token = pytest.importorskip("google.oauth2.credentials", reason="needs google-auth").Credentials("token")

    def keys_of_aws(_: object) -> object:
        asked.append("s3")
        return keys

    def keys_of_google(scopes: object) -> tuple[object, str]:
        asked.append("gs")
        return token, "project"

    monkeypatch.setattr(botocore.Session, "get_credentials", keys_of_aws)
    monkeypatch.setattr(google, "default", keys_of_google)


@pytest.mark.parametrize(("scheme", "kind"), [("s3", WebServer), ("gs", FakeGcs)])
def test_stores_share_a_login_until_it_is_refused(
    scheme: str, kind: type[WebServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    ask_machine(asked, monkeypatch)
    with kind() as server:

        def store(folder: object) -> Store:
            return open_store(f"{scheme}://bucket/{folder}", {"endpoint_url": server.url, "anonymous": False})

        for folder in range(5):
            store(folder).put("x", b"content")
            assert store(folder).read("x") == b"content"
        assert asked == [scheme]
        server.authorization = "that of other keys"
        with pytest.raises(AccessError):
            store(0).read("x")
        server.authorization = None
        assert store(0).read("x") == b"content"
        assert asked == [scheme, scheme]


class DirectoryBucket(WebServer):
    """Begins sessions, and answers only what one of them signs."""

    def handler(self) -> type[Handler]:
        return _OfSession


class _OfSession(Handler):
    def answer(self) -> None:
        if "/s3express/" not in self.headers["Authorization"]:
            return self.refuse(403, "sign for s3express")
        if self.path.endswith("?session"):
            keys = (
                "<AccessKeyId>SESSION</AccessKeyId><SecretAccessKey>s</SecretAccessKey><SessionToken>T</SessionToken>"
            )
            answer = f"<CreateSessionResult><Credentials>{keys}</Credentials></CreateSessionResult>"
            return self.reply(200, answer.encode(), "application/xml")
        if self.headers.get("x-amz-s3session-token") != "T" or "=SESSION/" not in self.headers["Authorization"]:
            return self.refuse(403, "not of a session")
        return super().answer()


def test_a_directory_bucket_is_read_and_written_in_one_session() -> None:
    with DirectoryBucket() as server:
        store = S3Store("b--usw2-az1--x-s3", "data", S3Store.from_url(
            "s3://b", {**KEYS, "endpoint_url": server.url, "session_token": "mine"})._options)  # type: ignore[attr-defined]  # fmt: skip
        store.put("x", b"content")
        assert store.read("x") == b"content"
        assert [path.rpartition("/")[2] for _, path in server.asked] == ["", "x", "x"]
        assert not any("X-Amz-Security-Token" in headers for headers in server.headers[1:])


@pytest.mark.parametrize("url", ["s3://bucket/data", "azure://box/data", "dbfs:/Volumes/main/ml/data"])
def test_a_file_that_the_service_refuses_is_not_sent(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("S3_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT", "mine")
    with (tmp_path / "large").open("wb") as file:
        file.truncate((5 << 30) + 1)  # without a byte on the disk
    store = DatabricksStore("/Volumes/main/ml/data") if url.startswith("dbfs:") else open_store(url)
    with pytest.raises(StoreError, match=r"/data/large: .* bytes at most in a request; it has 5,368,709,121"):
        store.put("large", tmp_path / "large")
