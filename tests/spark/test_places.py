"""Executors put the shards where they stay, and others read them there."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from servers.catalog import TOKEN, CatalogServer
from servers.s3 import SECRET, bucket_at, options_of

from lightning_stream import spark as room
from lightning_stream.stores import open_store


@pytest.fixture
def bucket(moto_endpoint: str) -> dict[str, str]:
    """The options of a store in a bucket of a real server."""
    bucket_at(moto_endpoint)
    return options_of(moto_endpoint)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_executors_upload_and_the_driver_puts_only_what_makes_it_a_dataset(
    spark: Any, tmp_path: Path, bucket: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from lightning_stream.stores.s3 import S3Store

    by_driver: list[str] = []
    put = S3Store.put

    def counted(self: Any, name: str, *arguments: Any, **more: Any) -> Any:
        by_driver.append(name)
        return put(self, name, *arguments, **more)

    monkeypatch.setattr(S3Store, "put", counted)
    frame = spark.range(0, 400, 1, 4).selectExpr("id", "cast(id as string) as text")
    out = "s3://bucket/some/rows"
    kwargs = {"out": out, "compression": "zstd", "hashes": ["sha1"], "size_limit": "2kb", "store_options": bucket}
    assert room.dataframe_to_mds(frame, mds_kwargs=kwargs) == ("", out)
    begun, *rest = by_driver  # a note that this conversion is at work here, and what ends it
    assert begun.startswith("_conversion/")
    assert rest == ["manifest.json", "index.json"]

    store = open_store(out, bucket)
    names = {entry.name for entry in store.list("")}
    index = json.loads(store.read("index.json"))
    listed = {shard["zip_data"]["basename"] for shard in index["shards"]}
    assert len(listed) > 4
    assert names == listed | {"index.json", "manifest.json"}  # no receipt, no leftover
    assert sum(shard["samples"] for shard in index["shards"]) == 400
    assert SECRET not in store.read("manifest.json").decode()

    from lightning_stream import LocalDataset

    for name in names:
        (tmp_path / "copy" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "copy" / name).write_bytes(store.read(name))
    dataset = LocalDataset(tmp_path / "copy")
    assert [(dataset[k]["id"], dataset[k]["text"]) for k in range(400)] == [(k, str(k)) for k in range(400)]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_keys_that_the_store_refuses_raise_the_stores_error(spark: Any, bucket: dict[str, str]) -> None:
    kwargs = {"out": "s3://no-such-bucket/rows", "store_options": {**bucket, "retries": 0}}
    with pytest.raises(Exception, match="no-such-bucket"):
        room.dataframe_to_mds(spark.range(10), mds_kwargs=kwargs)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_executors_write_to_a_volume_of_a_catalog_with_its_keys(spark: Any) -> None:
    with CatalogServer() as server:
        server.add("main.ml.shards", "s3://bucket/volume")
        options = {"host": server.url, "token": TOKEN, "storage": {"endpoint_url": server.url}}
        out = "uc://main/ml/shards/rows"
        room.dataframe_to_mds(spark.range(0, 40, 1, 2), mds_kwargs={"out": out, "store_options": options})
        store = open_store(out, options)
        assert sum(shard["samples"] for shard in json.loads(store.read("index.json"))["shards"]) == 40
        assert "/bucket/volume/rows/index.json" in server.objects
        words = [word.encode() for token in server.issued for word in (token, TOKEN)]
        assert not any(word in content for content in server.objects.values() for word in words)


READER = """
import json, sys
from streaming import StreamingDataset

dataset = StreamingDataset(local=sys.argv[1], batch_size=1)
rows = [dataset[k] for k in range(len(dataset))]
print(json.dumps([[int(r["id"]), r["text"], r["tokens"].tolist(), float(r["x"]), r["nested"]] for r in rows]))
"""


@pytest.mark.nightly
@pytest.mark.parametrize("merged", [True, False])
def test_mosaicml_streaming_reads_what_spark_wrote(
    spark: Any, tmp_path: Path, mosaic_python: str, merged: bool
) -> None:
    frame = spark.range(0, 60, 1, 3).selectExpr(
        "id",
        "concat('row ', id) as text",
        "array(cast(id as int), 7) as tokens",
        "cast(id as float) / 2 as x",
        "named_struct('a', id, 'b', array('x')) as nested",
    )
    kwargs = {"out": str(tmp_path / "out"), "compression": "zstd", "hashes": ["xxh64"], "size_limit": "1kb"}
    room.dataframe_to_mds(frame, merged, kwargs)
    folder, ids = (tmp_path / "out", range(60)) if merged else (tmp_path / "out" / "part-00001", range(20, 40))
    done = subprocess.run(
        [mosaic_python, "-W", "ignore", "-c", READER, str(folder)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    rows = json.loads(done.stdout.splitlines()[-1])
    assert rows == [[k, f"row {k}", [k, 7], float(np.float32(k) / 2), {"a": k, "b": ["x"]}] for k in ids]
