"""GETs that are sent like one of boto3's: with its URL, headers, credentials and errors."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from servers.fault_proxy import FaultProxy, Plan
from servers.web import WebServer

from lightning_stream.errors import AccessError, NotFoundError, UnavailableError
from lightning_stream.stores.s3 import S3Store
from lightning_stream.stores.s3_gets import ObjectGets

boto3 = pytest.importorskip("boto3", reason="needs boto3: pip install lightning-stream[s3]")
PER_REQUEST = {"amz-sdk-invocation-id", "amz-sdk-request", "authorization", "x-amz-date"}
ODD_KEYS = ["a", "a b", "a+b", "a%20b", "é/ü~_-.*'()!", "a=b&c?d#e;f:g,h@i$j", '"<>[]{}|^`', "date=2026-11-23/part 0"]


class Refusing(WebServer):
    """Answers with `status` where there is one."""

    status: int | None = None

    def handler(self) -> Any:
        class _Handler(super().handler()):  # type: ignore[misc]
            def answer(self) -> None:
                if self.owner.status is None:
                    return super().answer()
                return self.refuse(self.owner.status, "Slow Down")

        return _Handler


def store_at(server: WebServer | FaultProxy, **options: Any) -> S3Store:
    keys = {"access_key_id": "key", "secret_access_key": "S3CRET", "region": "us-east-1"}
    made = S3Store.from_url("s3://bucket/data", {"endpoint_url": server.url, **keys, **options})
    assert isinstance(made, S3Store)
    return made


@pytest.mark.parametrize("options", [{}, {"requester_pays": True}, {"anonymous": True}])
def test_the_later_gets_have_the_headers_of_the_first(options: dict[str, Any]) -> None:
    with WebServer() as server:
        server.objects["/bucket/data/x"] = b"0123456789"
        store = store_at(server, **options)
        assert store.get_range("x", 2, 5) == b"234"
        assert store.get_range("x", 3, 6) == b"345"
        assert store.read("x") == b"0123456789"
        assert store.get_range("x", 2, 5) == b"234"
        by_boto, *_, ours = [{name.lower(): value for name, value in one.items()} for one in server.headers]
        assert "amz-sdk-request" in by_boto
        assert "amz-sdk-request" not in ours
        for headers in (by_boto, ours):
            headers["names"] = ",".join(sorted(set(headers) - PER_REQUEST))
            signed = headers.get("authorization", "").split(", ")
            headers["signed"] = ", ".join(part for part in signed if not part.startswith("Signature"))
        assert {n: v for n, v in ours.items() if n not in PER_REQUEST} == {
            n: v for n, v in by_boto.items() if n not in PER_REQUEST
        }
        assert ("authorization" in ours) == ("anonymous" not in options)


@pytest.mark.parametrize("style", ["path", "virtual"])
def test_the_later_gets_have_the_urls_that_boto3_would_ask_for(style: str) -> None:
    client = boto3.client(
        "s3",
        region_name="eu-central-1",
        aws_access_key_id="key",
        aws_secret_access_key="secret",
        config=boto3.session.Config(s3={"addressing_style": style}),
    )
    seen: list[str] = []
    gets = ObjectGets(client)

    def send(request: Any) -> Any:
        seen.append(request.url)
        raise ConnectionError("nothing is sent")

    gets._session.send = send
    for key in ODD_KEYS:
        gets._sent = None
        for _ in range(2):
            with pytest.raises(Exception, match="nothing is sent"):
                gets.open({"Bucket": "bucket", "Key": key})
            assert gets._sent is not None
        first = gets._sent
        for other in ODD_KEYS:  # after any first key
            with pytest.raises(ConnectionError):
                gets.open({"Bucket": "bucket", "Key": other})
        assert gets._sent is first
        by_boto, *ours = seen[-2 - len(ODD_KEYS) :]
        assert by_boto == ours[0] == ours[1 + ODD_KEYS.index(key)]


def test_a_server_in_trouble_is_asked_once_and_other_errors_are_those_of_boto3() -> None:
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
            with pytest.raises(UnavailableError, match=r"An error occurred \(SlowDown\)"):
                store.read("x")
        store = store_at(server)
        assert store.read("x") == b"content"
        for status, refused in ((403, AccessError), (404, NotFoundError)):
            server.status = status
            with pytest.raises(refused):
                store.read("x")
        server.status = None
        assert store.read("x") == b"content"


def test_credentials_that_have_been_refreshed_sign_the_next_get() -> None:
    import botocore.credentials
    import botocore.session

    names = iter("abcdefgh")

    def refresh() -> dict[str, str]:
        until = datetime.now(timezone.utc) + timedelta(seconds=1)  # always about to expire
        name = next(names)
        return {"access_key": name, "secret_key": "s", "token": f"token-{name}", "expiry_time": until.isoformat()}

    core = botocore.session.Session()
    core._credentials = botocore.credentials.RefreshableCredentials.create_from_metadata(refresh(), refresh, "test")
    with WebServer() as server:
        server.objects["/bucket/x"] = b"content"
        gets = ObjectGets(core.create_client("s3", region_name="us-east-1", endpoint_url=server.url))
        for _ in range(3):
            assert gets.open({"Bucket": "bucket", "Key": "x"}).read() == b"content"
        used = [headers["Authorization"].split("Credential=")[1][0] for headers in server.headers]
        assert len(set(used)) == 3
        assert [headers["X-Amz-Security-Token"] for headers in server.headers] == [f"token-{name}" for name in used]
