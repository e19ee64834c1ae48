"""Tables and volumes of a Unity Catalog: in their storage, with its keys, or by the Files interface."""

from __future__ import annotations

import logging
import pickle
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from servers.catalog import TOKEN, CatalogServer
from servers.vending import stopped_and_resumed, written

from lightning_stream import MDSWriter, Stream, StreamingDataLoader, StreamingDataset, World
from lightning_stream.cache.folder import CacheFolder
from lightning_stream.errors import AccessError, NotFoundError, StoreError
from lightning_stream.stores import RetryingStore, open_store

_LOADED = (StreamingDataLoader, World)  # before a fork beside threads, which may be importing
QUICK = {"retries": 2, "first_pause_s": 0.01}
VOLUME, DBFS, TABLE = "uc://main/ml/shards", "dbfs:/Volumes/main/ml/shards", "uc://main.ml.docs"


@pytest.fixture(autouse=True)
def _no_login(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("DATABRICKS_HOST", "DATABRICKS_TOKEN", "DATABRICKS_CONFIG_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("DATABRICKS_CONFIG_FILE", str(tmp_path / "none"))


@pytest.fixture
def server() -> Iterator[CatalogServer]:
    with CatalogServer() as server:
        server.add("main.ml.shards", "s3://bucket/volume")
        server.add("main.ml.docs", "s3://bucket/docs", "PARQUET")
        server.objects["/bucket/volume/x"] = server.objects["/Volumes/main/ml/shards/x"] = b"content"
        yield server


def options(server: CatalogServer, **more: Any) -> dict[str, Any]:
    return {"host": server.url, "token": TOKEN, "storage": {"endpoint_url": server.url}, **more}


def opened(server: CatalogServer, url: str = VOLUME, **more: Any) -> RetryingStore:
    made = open_store(url, {**QUICK, **options(server, **more)})
    assert isinstance(made, RetryingStore)
    return made


def test_a_volume_is_read_and_written_where_it_is_stored(server: CatalogServer) -> None:
    store = opened(server)
    assert store.traits.conditional_put
    assert store.read("x") == b"content"
    assert [entry.name for entry in store.list()] == ["x"]
    store.put("folder/y", b"more", if_absent=True)
    assert server.objects["/bucket/volume/folder/y"] == b"more"
    assert opened(server, f"{VOLUME}/folder").read("y") == b"more"
    store.delete("folder/y")
    assert server.asked_for == ["READ_VOLUME", "WRITE_VOLUME", "READ_VOLUME"]
    assert server.count("GET", "/api/2.0/fs/") == 0


def test_keys_of_a_volume_are_renewed_when_they_are_refused_and_shared(server: CatalogServer, tmp_path: Path) -> None:
    stores = [opened(server), opened(server)]
    for store in stores:
        store.share_keys(CacheFolder(tmp_path))
        assert store.read("x") == b"content"
    assert len(server.issued) == 1
    server.revoke()
    assert [store.read("x") for store in stores] == [b"content"] * 2
    assert (len(server.issued), server.refused) == (2, 2)
    unpickled = pickle.loads(pickle.dumps(stores[0]))
    assert unpickled.read("x") == b"content"
    assert len(server.issued) == 2


@pytest.mark.parametrize("cloud", ["azure", "gcp"])
def test_each_cloud_takes_the_keys_of_the_catalog(cloud: str) -> None:
    with CatalogServer(storage=cloud) as server:
        location = {"azure": "abfss://box@me.dfs.core.windows.net/volume", "gcp": "gs://box/volume"}[cloud]
        server.add("main.ml.shards", location)
        server.objects["/box/volume/x"] = b"content"
        store = opened(server)
        assert store.read("x") == b"content"
        server.revoke()
        assert store.read("x") == b"content"
        assert len(server.issued) == 2


def test_a_dataset_is_written_to_a_volume_and_read_from_it(server: CatalogServer, tmp_path: Path) -> None:
    url = f"{VOLUME}/new"
    with MDSWriter(out=url, columns={"id": "int"}, store_options=options(server)) as writer:
        for number in range(20):
            writer.write({"id": number})
    dataset = StreamingDataset(streams=[Stream(url, local=tmp_path / "cache", options=options(server))])
    assert [dataset[k]["id"] for k in range(20)] == [*range(20)]
    assert "/bucket/volume/new/index.json" in server.objects


def test_a_table_of_parquet_is_read_in_place(server: CatalogServer, tmp_path: Path) -> None:
    for part in range(2):
        pq.write_table(pa.table({"id": range(part * 5, part * 5 + 5)}), tmp_path / f"part-{part}.snappy.parquet")
    server.store(tmp_path, "bucket/docs")
    dataset = StreamingDataset(streams=[Stream(TABLE, local=tmp_path / "cache", options=options(server))])
    assert [dataset[k]["id"] for k in range(10)] == [*range(10)]
    assert set(server.asked_for) == {"READ"}


def test_a_delta_table_is_read_at_its_versions(server: CatalogServer, tmp_path: Path) -> None:
    delta = pytest.importorskip("deltalake", reason="deltalake is not installed: uv sync --extra delta")
    for part in range(2):
        delta.write_deltalake(str(tmp_path / "table"), pa.table({"id": range(part * 5, part * 5 + 5)}), mode="append")
    server.add("main.ml.docs", "s3://bucket/docs", "DELTA")
    server.store(tmp_path / "table", "bucket/docs")
    for version, count in ((None, 10), (0, 5)):
        stream = Stream(TABLE, local=tmp_path / f"cache-{version}", version=version, options=options(server))
        dataset = StreamingDataset(streams=[stream])
        assert sorted(dataset[k]["id"] for k in range(len(dataset))) == [*range(count)]


def test_a_volume_without_external_access_comes_by_the_files_interface_and_says_so_once(
    server: CatalogServer, caplog: pytest.LogCaptureFixture
) -> None:
    server.grants = set()
    for url in (VOLUME, DBFS):
        caplog.clear()
        store = opened(server, url)
        with caplog.at_level(logging.WARNING):
            assert store.read("x") == store.read("x") == b"content"
            assert [entry.name for entry in store.list()] == ["x"]
            assert pickle.loads(pickle.dumps(store)).read("x") == b"content"
        assert caplog.text.count("by the Files interface") == 1
        assert "EXTERNAL USE SCHEMA on main.ml" in caplog.text
    assert not server.issued


def test_a_volume_that_is_not_written_in_its_storage_is_read_where_it_is_written(server: CatalogServer) -> None:
    server.grants = {"READ_VOLUME"}
    store = opened(server)
    assert store.read("x") == b"content"
    assert server.count("GET", "/api/2.0/fs/") == 0
    store.put("x", b"new")
    with store.open("x") as stream:
        assert b"".join(stream) == b"new" == server.objects["/Volumes/main/ml/shards/x"]
    assert stream.version is not None
    store.put("x", b"newer", if_version=stream.version)
    assert store.read("x") == b"newer"


def test_a_volume_in_other_storage_comes_by_the_files_interface(server: CatalogServer) -> None:
    server.add("main.ml.shards", "wasbs://box@me.blob.core.windows.net/x")
    assert opened(server).read("x") == b"content"


def test_dbfs_reads_from_the_storage_and_lists_as_before(server: CatalogServer) -> None:
    store = opened(server, DBFS)
    assert (store.url, store.identity) == (DBFS, f"{DBFS}@{server.url}")
    listed, before = [*store.list()], [*opened_by_files(server).list()]
    assert [(entry.name, entry.version) for entry in listed] == [(entry.name, entry.version) for entry in before]
    files = server.count("GET", "/api/2.0/fs/files")
    assert store.read("x") == b"content"
    assert store.read("x", 2, 4) == b"nt"
    assert server.count("GET", "/api/2.0/fs/files") == files
    assert server.asked_for[0] == "READ_VOLUME"
    assert store.traits.ranges
    assert not store.traits.conditional_put


def opened_by_files(server: CatalogServer) -> RetryingStore:
    server.grants, before = set(), server.grants
    store = opened(server, DBFS)
    assert store.read("x") == b"content"
    server.grants = before
    return store


def test_a_token_of_the_catalog_may_end_too(server: CatalogServer) -> None:
    tokens = iter(["first", "second"])
    store = opened(server, token=None, credentials=lambda: {"token": next(tokens)})
    server.tokens = {"first"}
    assert store.read("x") == b"content"
    server.tokens = {"second"}
    server.revoke()
    assert store.read("x") == b"content"


@pytest.mark.parametrize("url", [TABLE, VOLUME, DBFS])
def test_a_missing_login_says_what_to_set_on_workers_too(url: str) -> None:
    with pytest.raises(AccessError, match=r"DATABRICKS_HOST .* and DATABRICKS_TOKEN, on the worker nodes too"):
        open_store(url, QUICK).read("x")


def test_a_wrong_token_is_refused_without_a_word_of_it(server: CatalogServer) -> None:
    wrong = f"{TOKEN}-no"
    for url in (TABLE, VOLUME):
        with pytest.raises(AccessError, match="DATABRICKS_TOKEN") as caught:
            opened(server, url, token=wrong).read("x")
        assert wrong not in "".join(traceback.format_exception(caught.value))


def test_a_host_may_be_what_a_browser_shows(server: CatalogServer) -> None:
    assert opened(server, host=f"{server.url}/?o=1234").read("x") == b"content"


@pytest.mark.parametrize("status", [429, 503])
def test_a_catalog_that_is_busy_is_asked_again(server: CatalogServer, status: int) -> None:
    server.troubles = [status, status]
    assert opened(server, TABLE).traits.conditional_put
    assert server.asked_for == ["READ"]


def test_a_missing_grant_is_named(server: CatalogServer) -> None:
    server.grants = set()
    said = (
        r"uc://main.ml.docs: .*EXTERNAL USE SCHEMA on Schema 'main.ml'.*USE CATALOG on main, .*SELECT .* main.ml.docs"
    )
    with pytest.raises(AccessError, match=said):
        opened(server, TABLE).read("x")


@pytest.mark.parametrize(
    ("about", "kind", "said"),
    [
        (
            {"storage_location": None, "table_type": "VIEW", "data_source_format": None},
            StoreError,
            r"this is a VIEW at no place\. .*CREATE TABLE .* AS SELECT \* FROM main\.ml\.docs",
        ),
        (
            {"data_source_format": "ICEBERG"},
            StoreError,
            "DELTA and PARQUET tables .* this is a MANAGED ICEBERG at s3://bucket/docs",
        ),
        (None, NotFoundError, "the catalog knows no such table .*a volume uc://CATALOG/SCHEMA/.*USE CATALOG on main"),
    ],
)
def test_what_is_no_table_of_files_is_refused(server: CatalogServer, about: Any, kind: Any, said: str) -> None:
    if about is None:
        del server.things["main.ml.docs"]
    else:
        server.things["main.ml.docs"].update(about)
    with pytest.raises(kind, match=said):
        opened(server, TABLE).read("x")


@pytest.mark.parametrize("url", ["uc://main", "uc://main.ml", "uc://main/ml", "uc://a.b.c.d", "dbfs:/FileStore/x"])
def test_wrong_urls_are_refused(url: str) -> None:
    with pytest.raises(ValueError, match=r"uc://CATALOG\.SCHEMA\.TABLE"):
        open_store(url)


def test_an_unknown_option_is_refused() -> None:
    with pytest.raises(ValueError, match=r"unknown options for uc:/: colour\. Known are host, token, profile"):
        open_store(VOLUME, {"colour": 1})


def test_a_catalog_of_this_machine_names_folders(server: CatalogServer, tmp_path: Path) -> None:
    server.add("main.ml.shards", f"file://{tmp_path}")
    (tmp_path / "x").write_bytes(b"here")
    assert opened(server).read("x") == b"here"


def outlived(server: CatalogServer, folder: Path, patch: pytest.MonkeyPatch, method: str, *shape: Any) -> None:
    """A run on a volume, whose login comes from the variables, as on a cluster."""
    for name, value in (("DATABRICKS_HOST", server.url), ("DATABRICKS_TOKEN", TOKEN)):
        patch.setenv(name, value)
    server.add("main.ml.shards", "s3://bucket")
    stream = {"remote": f"{VOLUME}/train", "options": {"storage": {"endpoint_url": server.url}}}
    stopped_and_resumed(method, server, folder, stream, *shape)
    assert set(server.asked_for) == {"READ_VOLUME"}
    assert not [path for path in folder.rglob("*") if path.is_file() and TOKEN.encode() in path.read_bytes()]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of forking beside the server's thread
def test_a_run_outlives_the_keys_of_its_catalog(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with CatalogServer(lifetime_s=4.0) as server:
        outlived(server, tmp_path, monkeypatch, "fork", 96, 0.35)


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_a_run_of_three_minutes_with_keys_of_thirty_seconds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with CatalogServer(lifetime_s=30.0) as server:
        outlived(server, tmp_path, monkeypatch, "spawn", 720, 1.0)


def test_a_dataset_of_a_table_has_the_name_of_the_table(server: CatalogServer, tmp_path: Path) -> None:
    written(tmp_path / "data", 10)
    server.store(tmp_path / "data", "bucket/docs")
    stream = Stream(TABLE, local=tmp_path / "cache", options=options(server))
    assert repr(stream) == f"Stream({TABLE!r})"
    assert TOKEN not in repr(StreamingDataset(streams=[stream]))
