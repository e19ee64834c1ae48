"""Credentials: from where users already set them, never shown, never sent to a stranger; what is missing is said."""

from __future__ import annotations

import contextlib
import logging
import socket
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from servers import processes
from servers.fake_databricks import TOKEN, FakeDatabricks
from servers.fake_gcs import FakeGcs
from servers.ports import free_port
from servers.s3 import KEY, SECRET, bucket_at
from servers.web import HubServer, WebServer

from lightning_stream import StreamingDataset
from lightning_stream.errors import AccessError, MissingExtraError, NotFoundError, UnavailableError, redact
from lightning_stream.reading.stream import Stream, labels_of
from lightning_stream.stores import LocalStore, open_store

AZURITE_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="  # published
QUICK = {"retries": 0, "timeout_s": 5.0}
VARIABLES = (
    *("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE", "AWS_REGION"),
    *("AWS_DEFAULT_REGION", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "S3_ENDPOINT_URL", "AWS_REQUEST_PAYER"),
    *("GOOGLE_APPLICATION_CREDENTIALS", "GOOGLE_CLOUD_PROJECT", "STORAGE_EMULATOR_HOST", "GCS_KEY", "GCS_SECRET"),
    *("DATABRICKS_HOST", "DATABRICKS_TOKEN", "DATABRICKS_CONFIG_PROFILE", "HF_TOKEN", "HF_HOME", "HF_ENDPOINT"),
    *("AZURE_STORAGE_ACCOUNT", "AZURE_STORAGE_KEY", "AZURE_STORAGE_CONNECTION_STRING", "AZURE_STORAGE_SAS_TOKEN"),
)


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A user who has set nothing, on a machine that lends no identity."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("NO_GCE_CHECK", "true")


@pytest.fixture(scope="module")
def gateway(ceph_endpoint: str) -> str:
    """A server that checks signatures and rights, which moto does not."""
    for bucket, rights in (("private", "private"), ("public", "public-read")):
        client = bucket_at(ceph_endpoint, bucket, ACL=rights)
        client.put_object(Bucket=bucket, Key="data/x", Body=b"content", ACL=rights)
    return ceph_endpoint


def s3(url: str, gateway: str, **options: Any) -> Any:
    return open_store(url, {**QUICK, "endpoint_url": gateway, "region": "us-east-1", **options})


def test_s3_takes_keys_from_the_variables_users_set(gateway: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("S3_ENDPOINT_URL", gateway)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    assert open_store("s3://private/data", QUICK).read("x") == b"content"


def test_s3_takes_a_profile(gateway: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "credentials").write_text(f"[mine]\naws_access_key_id={KEY}\naws_secret_access_key={SECRET}\n")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    assert s3("s3://private/data", gateway, profile="mine").read("x") == b"content"
    with pytest.raises(AccessError, match="ProfileNotFound"):
        s3("s3://private/data", gateway, profile="other").read("x")


def test_a_public_bucket_needs_no_credentials(gateway: str) -> None:
    assert s3("s3://public/data", gateway).read("x") == b"content"
    assert s3("s3://public/data", gateway, anonymous=True).read("x") == b"content"


def test_a_public_bucket_is_read_though_the_credentials_are_wrong(gateway: str, caplog: Any) -> None:
    store = s3("s3://public/data", gateway, access_key_id="WRONG", secret_access_key="WRONGSECRET")
    with caplog.at_level(logging.WARNING):
        assert store.read("x") == b"content"
    assert "the credentials were refused; it is public" in caplog.text


KEYS = {"access_key_id": KEY, "secret_access_key": SECRET}
REFUSED = r"s3://private/data/x: refused .*AWS_SECRET_ACCESS_KEY"


@pytest.mark.parametrize(
    ("url", "options", "kind", "said"),
    [
        ("s3://private/data/x", {**KEYS, "secret_access_key": "S3CRET"}, AccessError, REFUSED),
        ("s3://private/data/x", {"access_key_id": "WRONG", "secret_access_key": "S3CRET"}, AccessError, REFUSED),
        ("s3://private/data/x", {}, AccessError, "x: it is not public .*no AWS credentials were found.*Set"),
        ("s3://nowhere/data/x", KEYS, NotFoundError, "there is no bucket 'nowhere'"),
        ("s3://private/data/y", KEYS, NotFoundError, "s3://private/data/y: no such object"),
    ],
)
def test_s3_tells_wrong_absent_and_other_errors_apart(
    gateway: str, url: str, options: Any, kind: Any, said: str
) -> None:
    place, _, name = url.rpartition("/")
    with pytest.raises(kind, match=said) as caught:
        s3(place, gateway, **options).read(name)
    assert "S3CRET" not in str(caught.value)


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        ("AWS_REQUEST_PAYER", "requester", {"requester"}),
        ("MOSAICML_STREAMING_AWS_REQUESTER_PAYS", "other,bucket", {"requester"}),
        ("MOSAICML_STREAMING_AWS_REQUESTER_PAYS", "buckets", {None}),
    ],
)
def test_requester_pays_is_said_in_every_request(
    variable: str, value: str, said: set[str | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    with WebServer() as server:
        server.objects["/bucket/x"] = b"paid"
        monkeypatch.setenv(variable, value)
        store = s3("s3://bucket", server.url, **KEYS)
        assert store.read("x") == b"paid"
        assert {headers.get("x-amz-request-payer") for headers in server.headers} == said


@pytest.mark.parametrize("by_option", [False, True])
def test_who_may_read_is_said_and_signed_where_an_object_is_put_and_nowhere_else(
    by_option: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("S3_CANNED_ACL", "private" if by_option else "authenticated-read")
    with WebServer() as server:
        store = s3("s3://bucket", server.url, **KEYS, **({"canned_acl": "authenticated-read"} if by_option else {}))
        store.put("x", b"content")
        assert store.read("x") == b"content"
        acls = [headers.get("x-amz-acl") for headers in server.headers]
        assert acls == ["authenticated-read", None]
        assert "x-amz-acl" in server.headers[0]["Authorization"]


def test_databricks_takes_the_variables_and_a_wrong_token_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with FakeDatabricks() as server:
        server.objects["/Volumes/a/b/c/x"] = b"content"
        monkeypatch.setenv("DATABRICKS_HOST", server.url)
        monkeypatch.setenv("DATABRICKS_TOKEN", TOKEN)
        assert open_store("dbfs:/Volumes/a/b/c", QUICK).read("x") == b"content"
        with pytest.raises(AccessError, match="DATABRICKS_TOKEN") as caught:
            open_store("dbfs:/Volumes/a/b/c", {**QUICK, "token": "dapi-wrong"}).read("x")
        assert "dapi-wrong" not in str(caught.value)


def test_gcs_without_credentials_reads_public_buckets_and_says_what_to_set_for_others() -> None:
    with FakeGcs() as server:
        server.objects["bucket/x"] = b"content"
        assert open_store("gs://bucket", {**QUICK, "endpoint_url": server.url}).read("x") == b"content"
        server.authorization = "Bearer none has it"
        with pytest.raises(AccessError, match=r"gs://bucket/x: (refused|no usable).*GOOGLE_APPLICATION_CREDENTIALS"):
            open_store("gs://bucket", {**QUICK, "endpoint_url": server.url}).read("x")


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("dbfs:/Volumes/a/b/c", "DATABRICKS_HOST .* and DATABRICKS_TOKEN, on the worker nodes too"),
        ("gs://bucket", "no usable credentials"),
        ("azure://container/x", "no account is set.*AZURE_STORAGE_ACCOUNT"),
    ],
)
def test_without_credentials_the_error_says_what_to_set(monkeypatch: pytest.MonkeyPatch, url: str, said: str) -> None:
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", "/no/such/key.json")
    with pytest.raises(AccessError, match=said):
        open_store(url, QUICK).read("x")


def test_google_tells_a_missing_bucket_from_a_missing_object() -> None:
    with FakeGcs() as server:
        for url, said in (
            ("gs://nowhere/x", "x/y: there is no bucket 'nowhere'"),
            ("gs://bucket/x", "x/y: no such obj"),
        ):
            with pytest.raises(NotFoundError, match=said):
                open_store(url, {**QUICK, "endpoint_url": server.url}).read("y")


def test_azure_tells_container_blob_and_refusal_apart(tmp_path: Path) -> None:
    from azure.storage.blob import ContainerClient

    with processes.azurite(tmp_path) as endpoint:
        keys = {"account": "devstoreaccount1", "account_key": AZURITE_KEY, "endpoint_url": endpoint}
        credential = {"account_name": keys["account"], "account_key": AZURITE_KEY}
        with ContainerClient(endpoint, "container", credential) as client:
            client.create_container()
        for url, options, kind, said in (
            ("azure://nowhere/x", keys, NotFoundError, "there is no container 'nowhere'"),
            ("azure://container/x", keys, NotFoundError, "azure://container/x/y: no such blob"),
            ("azure://container/x", {**keys, "account_key": "U0VDUkVU"}, AccessError, "refused.*AZURE_STORAGE_KEY"),
            ("azure://container/x", {"endpoint_url": endpoint}, AccessError, "a login is not sent over http://"),
        ):
            with pytest.raises(kind, match=said) as caught:
                open_store(url, {**QUICK, **options}).read("y")
            assert "U0VDUkVU" not in str(caught.value)


def test_the_hub_takes_its_token_and_does_not_send_it_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    with HubServer() as hub, WebServer() as elsewhere:
        path = "/datasets/org/name/resolve/main/x"
        elsewhere.objects[path] = b"content"
        hub.redirect = elsewhere.url
        hub.authorization = "Bearer hf_secret"
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        with pytest.raises(AccessError, match="HF_TOKEN"):
            open_store("hf://datasets/org/name", QUICK).read("x")
        monkeypatch.setenv("HF_TOKEN", "hf_secret")
        assert open_store("hf://datasets/org/name", QUICK).read("x") == b"content"
        assert "hf_secret" not in str(elsewhere.headers)


def test_user_and_password_of_a_url_are_sent_and_not_shown() -> None:
    with WebServer() as server:
        server.authorization = "Basic dXNlcjpwYTp3cmQ="
        store = open_store(f"http://user:pa%3Awrd@127.0.0.1:{server.port}/f?sig=SIGNED", QUICK)
        with pytest.raises(NotFoundError) as caught:
            store.read("x")
        shown = f"{store!r} {store.url} {store.identity} {caught.value}"
        assert "pa%3Awrd" not in shown
        assert "SIGNED" not in shown


@pytest.mark.parametrize(
    ("text", "secret"),
    [
        ("GET https://host/x?X-Amz-Signature=abcdef&b=1 failed", "abcdef"),
        ("sftp://user:hunter2@host/x", "hunter2"),
        ("sftp://user:hun@ter2@host/x", "ter2"),
        ("sftp://user:hun/ter2@host/x", "ter2"),
        ("s3://AKIA:hun/ter2+x@bucket/x", "ter2"),
        ("zip://a.csv::https://user:hunter2@host/a.zip", "hunter2"),
        ("sftp:/user:hunter2@host/x", "hunter2"),
        ("sftp:user:hunter2@host/x", "hunter2"),
        ("aws_secret_access_key=hunter2", "hunter2"),
        ('{"SessionToken": "hunter2"}', "hunter2"),
        ("HF_TOKEN=hunter2, api_key: 'hunter2'", "hunter2"),
        ("{'Authorization': 'Bearer dapi123456'}", "dapi123456"),
        ("Authorization: Basic dXNlcjpw", "dXNlcjpw"),
        ("AccountKey=Zm9vYmFy;EndpointSuffix=x", "Zm9vYmFy"),
        ("token=hf_abcdefgh", "hf_abcdefgh"),
        ("password: hunter2", "hunter2"),
    ],
)
def test_texts_of_other_libraries_are_scrubbed(text: str, secret: str) -> None:
    assert secret not in redact(text)
    for plain in ("no such key 'data/token/x' in bucket", "http://host:80/data@v1/x", "row 3: a@b", "10:30 to 11:00"):
        assert redact(plain) == plain


@pytest.mark.parametrize("last", ["/a.zip", ""])
def test_no_name_of_a_chain_of_file_systems_has_its_password(last: str) -> None:
    url = f"zip://a.csv::sftp://user:hunter2@host{last}"
    store = open_store(url, QUICK)
    assert "hunter2" not in f"{store!r} {store.url} {store.identity} {Stream(url)!r} {labels_of([Stream(url)])}"
    with pytest.raises(Exception, match="sftp://host") as caught:
        store.read("x")
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize("chain", ["", "zip://a.csv::"])
def test_a_file_system_logs_in_as_the_user_of_its_url(monkeypatch: pytest.MonkeyPatch, chain: str) -> None:
    url = f"{chain}sftp://user:hunter2@host/a.zip"
    asked = []

    def refused(address: str, **_: Any) -> None:
        asked.append(address)
        raise PermissionError("refused")

    monkeypatch.setattr(pytest.importorskip("fsspec").core, "url_to_fs", refused)
    with pytest.raises(AccessError, match="sftp://host") as caught:
        open_store(url, QUICK).read("x")
    assert asked == [url]
    assert "hunter2" not in str(caught.value)


def test_a_port_that_is_none_shows_no_password() -> None:
    pytest.importorskip("paramiko", reason="sftp needs paramiko")
    with pytest.raises(ValueError, match="in a URL has %2F for each slash") as caught:
        open_store("sftp://user:hun/ter2@host/x", QUICK).read("x")
    assert "hun" not in str(caught.value)


def test_a_file_of_keys_that_is_absent_is_no_absent_object(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def absent(*_: Any, **__: Any) -> None:
        raise FileNotFoundError("no such file: my-key")

    monkeypatch.setattr(pytest.importorskip("fsspec").core, "url_to_fs", absent)
    with pytest.raises(AccessError, match=r"no login .*my-key.*Check the file of the key"):
        open_store("sftp://host/x", QUICK).exists("x")
    assert not open_store("zip://x::file:///absent.zip", QUICK).exists("x")
    (tmp_path / "config").write_text("[default]\ncredential_process = /absent/program\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    with pytest.raises(AccessError, match=r"no usable credentials .*/absent/program"):
        open_store("s3://bucket", QUICK).read("x")


def test_what_a_program_of_keys_prints_is_logged_without_secrets(caplog: pytest.LogCaptureFixture) -> None:
    bucket_log = logging.getLogger("botocore.credentials")
    pytest.importorskip("botocore")
    with contextlib.suppress(AccessError, UnavailableError):
        open_store("s3://bucket", {**QUICK, **KEYS, "endpoint_url": "http://127.0.0.1:1"}).read("x")
    try:
        raise RuntimeError('it printed {"SecretAccessKey": "hunter2"}')
    except RuntimeError:
        bucket_log.warning("Refreshing temporary credentials failed", exc_info=True)
    assert "RuntimeError: it printed" in caplog.text
    assert "hunter2" not in caplog.text


@pytest.mark.parametrize("url", ["s3://AKIA:hun/ter2@bucket/x", "azure://box/x?sig=hunter2"])
def test_a_secret_in_the_url_of_a_bucket_is_refused_and_not_shown(url: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="the URL of a bucket takes no") as caught:
        len(StreamingDataset(url, local=str(tmp_path)))
    assert "ter2" not in str(caught.value)


@pytest.mark.parametrize(
    "url", ["s3://b/x", "gs://b/x", "azure://c/x", "http://h/x", "hf://datasets/o/n", "dbfs:/Volumes/a/b/c"]
)
def test_unknown_options_are_refused_together(url: str) -> None:
    with pytest.raises(ValueError, match=r"unknown options for .*: colour, shape\. Known are"):
        open_store(url, {"colour": 1, "shape": 2})


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("s4://b/x", r"no store is known for s4://; known are s3://.*Did you mean s3a?://BUCKET/FOLDER\?"),
        ("azur://c/x", "Did you mean azure://"),
        ("dfbs:/Volumes/a/b/c", "no URL: 'dfbs:/Volumes/a/b/c'. Did you mean dbfs:/Volumes/CATALOG"),
        ("s3:/bucket/x", "Did you mean s3://BUCKET/FOLDER"),
        ("https//host/x", "Did you mean https://HOST"),
        ("wholly-unlike://user:S3CRET@h/x", "known are s3://"),
        ("s3:///x", "names a bucket"),
        ("hf://org", "hf://datasets/"),
        ("abfss://container@host/x", "an ADLS URL is"),
    ],
)
def test_wrong_urls_are_refused_with_what_was_meant(url: str, said: str) -> None:
    with pytest.raises(ValueError, match=said) as caught:
        open_store(url).read("x")
    assert "S3CRET" not in str(caught.value)


def test_schemes_are_known_in_capitals_and_as_plugins_and_colons_may_be_in_paths(tmp_path: Path) -> None:
    assert open_store("S3://bucket/x").url == "s3://bucket/x"
    assert open_store("memory://x").url == "memory://x"
    assert open_store("simplecache::memory://x").url == "simplecache::memory://x"
    assert open_store("run:7/x").url.endswith("run:7/x")
    with pytest.raises(NotFoundError, match=r"dbfs:/Volumes/a/b/c"):
        open_store("/Volumes/a/b/c").read("x")


def test_a_local_folder_has_no_options() -> None:
    with pytest.raises(ValueError, match="local folder has no options"):
        open_store("/x", {"region": "y"})


def test_a_missing_client_is_said_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, url, extra in (
        ("botocore", "s3://b", "s3"),
        ("google.auth", "gs://b", "gcs"),
        ("fsspec", "oci://b", "fsspec"),
        ("fsspec", "sftp://host/b", "sftp"),
    ):
        monkeypatch.setitem(sys.modules, module, None)
        with pytest.raises(MissingExtraError, match=rf"lightning-stream\[{extra}\]"):
            open_store(url).read("x")


def test_an_unreachable_endpoint_is_unavailable_not_a_riddle() -> None:
    port = free_port()
    with pytest.raises(UnavailableError, match="s3://b/x: NewConnectionError"):
        s3("s3://b", f"http://127.0.0.1:{port}", **KEYS).read("x")


def test_an_answer_cut_short_before_its_end_of_headers_is_unavailable() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def hang_up() -> None:
            listener.accept()[0].close()

        threading.Thread(target=hang_up, daemon=True).start()
        with pytest.raises(UnavailableError, match="s3://b/x"):
            s3("s3://b", f"http://127.0.0.1:{listener.getsockname()[1]}", **KEYS).read("x")


@pytest.mark.parametrize(
    "url",
    [
        "abfss://box@mine.dfs.core.windows.net/a/b",
        "azure://mine.blob.core.windows.net/box/a/b",  # those of mosaicml-streaming
        "azure-dl://box/a/b",
    ],
)
def test_one_azure_url_names_container_account_and_folder(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AZURE_ACCOUNT_NAME", "mine")
    store: Any = open_store(url, {"account_key": "S3CRET=="})
    assert store.store._address("x") == "https://mine.blob.core.windows.net/box/a/b/x"
    assert "S3CRET" not in f"{store!r} {store.identity} {store.store._options}"


@pytest.mark.parametrize("url", ["abfss://box@mine/a", "azure://mine.blob.core.windows.net", "azure://@box/a"])
def test_an_azure_url_with_an_account_and_no_container_or_the_other_way_round_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match=r"azure://ACCOUNT.*/CONTAINER/FOLDER"):
        open_store(url)


def test_the_same_bucket_at_two_endpoints_is_two_places(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = open_store("s3://bucket/x")
    monkeypatch.setenv("S3_ENDPOINT_URL", "http://minio:9000")
    assert len({plain.url, open_store("s3://bucket/x").identity}) == 2


@pytest.mark.parametrize("scheme", ["s3", "gs", "azure"])
def test_a_bucket_takes_no_password_and_its_error_shows_none(scheme: str) -> None:
    with pytest.raises(ValueError, match="takes no user and password") as caught:
        open_store(f"{scheme}://user:hunter2@bucket/x", QUICK)
    assert "hunter2" not in str(caught.value)


SIGNED = "sv=1&sig=S3CRETSIG"


@pytest.mark.parametrize(
    "url",
    [
        f"azure://c/x?{SIGNED}", f"az://c?{SIGNED}", f"abfss://c@account.dfs.core.windows.net/x?{SIGNED}",
        f"abfss://c@account.example.com/x?{SIGNED}", "s3://b/x?X-Amz-Signature=S3CRETSIG", f"gs://b/x?{SIGNED}",
        f"hf://datasets/org/name/x?{SIGNED}", f"dbfs:/Volumes/a/b/c?{SIGNED}", f"https://me:S3CRETPW@host/x?{SIGNED}",
        f"sftp://me:S3CRETPW@host/x?{SIGNED}", f"https://S3CRETTOKEN@host/x?{SIGNED}", f"memory://x?{SIGNED}",
        "abfss://c:S3CRETPW@account.dfs.core.windows.net/x", "s3://me:S3CRETPW@b/x",
    ],
)  # fmt: skip
def test_no_store_shows_a_secret_of_its_url(url: str) -> None:
    try:
        store: Any = open_store(url)
    except ValueError as error:
        shown = str(error)
    else:
        shown = f"{store!r} {store.url} {store.identity} {store.store!r} {labels_of([Stream(url)])} {Stream(url)!r}"
    assert "S3CRET" not in shown


def test_no_identity_shows_a_secret_of_an_endpoint() -> None:
    endpoint = {"endpoint_url": "https://me:S3CRET@minio.example/?sig=S3CRET"}
    for url, options in (
        ("s3://b/x", endpoint), ("gs://b/x", endpoint), ("azure://c/x", endpoint),
        ("dbfs:/Volumes/a/b/c", {"host": "https://me:S3CRET@workspace.example"}),
    ):  # fmt: skip
        store: Any = open_store(url, options)
        assert "S3CRET" not in f"{store.identity} {store.url} {store!r} {getattr(store.store, '_options', '')!r}"


def test_a_store_of_another_package_shows_no_secret_either() -> None:
    class Shelf(LocalStore):
        def __init__(self, url: str) -> None:
            self.url = url

    assert Shelf("shelf://me:S3CRET@books/x?sig=S3CRET").url == "shelf://books/x"
    assert Shelf("/data/what?x=1").url == "/data/what?x=1"


def test_two_buckets_of_one_namespace_are_two_places() -> None:
    first, second = (open_store(f"oci://{bucket}@namespace/x").identity for bucket in ("a", "b"))
    assert first != second
