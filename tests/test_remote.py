"""From a bucket to batches, over real S3 servers: what is asked of the server is counted there."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("boto3")

from servers.fault_proxy import FaultProxy, Plan  # noqa: E402
from servers.s3 import bucket_at, variables_of  # noqa: E402

from lightning_stream import (  # noqa: E402
    MDSWriter,
    Stream,
    StreamingDataLoader,
    StreamingDataset,
    World,
    add_lengths,
    merge_index,
)
from lightning_stream.errors import AccessError, ConflictError, NotFoundError, StoreError, UnavailableError  # noqa: E402
from lightning_stream.questions.downloads import plan_downloads  # noqa: E402
from lightning_stream.stores import open_store  # noqa: E402

NUM_SAMPLES, SHARD_BYTES = 240, 1000
COLUMNS = {"id": "int", "x": "ndarray:float32:4", "name": "str"}
URL, PACKED = "s3://bucket/data", "s3://bucket/packed"


@dataclass
class Bucket:
    """A server with an empty bucket, behind a proxy that counts what is asked."""

    proxy: FaultProxy
    client: Any

    @property
    def options(self) -> dict[str, Any]:
        return {"retries": 2, "first_pause_s": 0.01, "timeout_s": 10.0}

    def names(self, folder: str) -> list[str]:
        """What lies in a folder of the bucket."""
        found = self.client.list_objects_v2(Bucket="bucket", Prefix=f"{folder}/").get("Contents", [])
        return sorted(entry["Key"].partition("/")[2] for entry in found)

    def fetched(self) -> dict[str, int]:
        """Shards asked for since the last call, each with how often."""
        asked = {path.rpartition("/")[2]: n for (method, path), n in self.proxy.asked.items() if method == "GET"}
        self.proxy.asked.clear()
        return {name: n for name, n in asked.items() if name.startswith("shard.")}


@pytest.fixture(scope="module", params=["moto", "ceph"])
def endpoint(request: pytest.FixtureRequest) -> str:
    return request.getfixturevalue(f"{request.param}_endpoint")


@pytest.fixture(scope="module")
def stored(endpoint: str) -> Any:
    """A client of a bucket that has the data at `URL`, and compressed at `PACKED`."""
    client = bucket_at(endpoint)
    with pytest.MonkeyPatch.context() as patch:
        connect(patch, endpoint)
        write(URL)
        write(PACKED, compression="zstd")
    return client


@pytest.fixture
def bucket(endpoint: str, stored: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    with FaultProxy(endpoint, Plan()) as proxy:
        connect(monkeypatch, proxy.url)
        yield Bucket(proxy, stored)


def connect(patch: pytest.MonkeyPatch, endpoint: str) -> None:
    for name, value in variables_of(endpoint).items():
        patch.setenv(name, value)


def sample(number: int) -> dict[str, Any]:
    return {"id": number, "x": np.full(4, number, np.float32), "name": f"sample {number}"}


def write(out: Any, first: int = 0, count: int = NUM_SAMPLES, **options: Any) -> None:
    with MDSWriter(out=out, columns=COLUMNS, size_limit=SHARD_BYTES, hashes=["xxh64"], **options) as writer:
        for number in range(first, first + count):
            writer.write(sample(number))


def dataset_in(folder: Path, bucket: Bucket, **options: Any) -> StreamingDataset:
    stream = Stream(remote=URL, local=folder, options=bucket.options)
    return StreamingDataset(streams=[stream], shuffle=True, **options)


def is_right(batch: dict[str, Any]) -> bool:
    want = [sample(number) for number in batch["id"].tolist()]
    return batch["name"] == [one["name"] for one in want] and np.array_equal(batch["x"], [one["x"] for one in want])


def test_a_writer_uploads_to_both_of_a_pair_and_the_index_last(bucket: Bucket, tmp_path: Path) -> None:
    write((tmp_path, "s3://bucket/pair"), count=60, keep_local=True)
    puts = [path for method, path in bucket.proxy.asked if method == "PUT"]
    assert len(puts) == len(bucket.names("pair")) >= 3
    assert puts[-1].endswith("/index.json")
    assert bucket.names("pair") == sorted(path.name for path in tmp_path.iterdir())
    assert [one["id"] for one in StreamingDataset(remote="s3://bucket/pair", local=tmp_path)[:3]] == [0, 1, 2]


def test_a_pair_keeps_nothing_local_by_default(bucket: Bucket, tmp_path: Path) -> None:
    write((str(tmp_path / "local"), "s3://bucket/alone"), count=10)
    assert not (tmp_path / "local").exists()
    assert bucket.names("alone") == ["index.json", "shard.00000.mds"]


def test_a_failed_upload_raises_and_leaves_no_index(bucket: Bucket) -> None:
    bucket.proxy.plan = Plan(probability={"error": 1.0}, only="shard.00001", method="PUT")
    with pytest.raises(UnavailableError, match=r"shard\.00001"):
        write("s3://bucket/failed", count=60, store_options=bucket.options)
    assert "index.json" not in bucket.names("failed")


def test_an_upload_spoiled_on_its_way_is_refused(bucket: Bucket, request: pytest.FixtureRequest) -> None:
    if "moto" in request.node.callspec.id:
        pytest.skip("moto takes whatever comes: it does not compare checksums")
    bucket.proxy.plan = Plan(probability={"flip": 1.0}, only="shard.00001", method="PUT")
    with pytest.raises(StoreError, match=r"shard\.00001"):
        write("s3://bucket/spoiled", count=60, store_options=bucket.options)
    assert not {"index.json", "shard.00001.mds"} & set(bucket.names("spoiled"))


def test_indexes_of_partitions_merge_in_the_bucket(bucket: Bucket, tmp_path: Path) -> None:
    for part in range(2):
        write(f"s3://bucket/parts/part{part}", first=part * 10, count=10)
    merge_index("s3://bucket/parts")
    dataset = StreamingDataset(remote="s3://bucket/parts", local=tmp_path)
    assert [one["id"] for one in dataset] == list(range(20))


@pytest.mark.parametrize(("num_workers", "url"), [(0, URL), (2, PACKED)])
def test_every_sample_comes_once_and_bit_equal(bucket: Bucket, tmp_path: Path, num_workers: int, url: str) -> None:
    dataset = StreamingDataset(remote=url, local=tmp_path / "cache", shuffle=True)
    batches = list(StreamingDataLoader(dataset, 16, num_workers=num_workers))
    assert sorted(number for batch in batches for number in batch["id"].tolist()) == list(range(NUM_SAMPLES))
    assert all(map(is_right, batches))
    fetched = bucket.fetched()
    assert set(fetched.values()) == {1}
    assert len(fetched) == dataset.snapshot.num_shards


def test_ranks_and_workers_of_a_node_fetch_each_shard_once(bucket: Bucket, tmp_path: Path) -> None:
    loaders = [
        StreamingDataLoader(dataset_in(tmp_path, bucket), 10, num_workers=2, world=World(rank, 2, 2))
        for rank in range(2)
    ]
    seen = [number for step in zip(*loaders, strict=True) for batch in step for number in batch["id"].tolist()]
    assert sorted(seen) == list(range(NUM_SAMPLES))
    fetched = bucket.fetched()
    assert set(fetched.values()) == {1}
    assert len(fetched) == loaders[0].dataset.snapshot.num_shards


@pytest.mark.parametrize(("num_nodes", "shuffle"), [(2, True), (4, True), (4, False)])
def test_nodes_fetch_the_bytes_that_were_predicted(
    bucket: Bucket, tmp_path: Path, num_nodes: int, shuffle: bool
) -> None:
    for node in range(num_nodes):
        stream = Stream(remote=URL, local=tmp_path / str(node), options=bucket.options)
        dataset = StreamingDataset(streams=[stream], shuffle=shuffle, window=2)
        loaders = [
            StreamingDataLoader(dataset, 4, tail="exact", world=World(2 * node + local, 2 * num_nodes, 2))
            for local in range(2)
        ]
        index = dataset.reader.indexes[0]
        settings = loaders[0].settings()
        plan = plan_downloads(
            dataset.order(settings.order),
            epoch=0,
            batch_size=settings.global_batch_size,
            world=settings.world,
            tail="exact",
            shard_bytes=index.raw_bytes,
        )
        bucket.fetched()
        before = bucket.proxy.counts["bytes"]
        for _ in zip(*loaders, strict=True):
            pass
        fetched = bucket.fetched()
        assert sorted(fetched) == [index.entry(number).raw.basename for number in plan.shards[node].tolist()]
        assert set(fetched.values()) == {1}
        assert bucket.proxy.counts["bytes"] - before == plan.num_bytes[node]
        if shuffle:
            assert sum(map(len, plan.shards)) <= index.num_shards + num_nodes - 1


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_resume_fetches_exactly_what_still_holds_an_undelivered_sample(
    bucket: Bucket, tmp_path: Path, num_workers: int
) -> None:
    first = StreamingDataLoader(dataset_in(tmp_path / "first", bucket, window=2), 8)
    batches = iter(first)
    seen = [number for _ in range(20) for number in next(batches)["id"].tolist()]
    dataset = dataset_in(tmp_path / "second", bucket, window=2)
    loader = StreamingDataLoader(dataset, 8, num_workers=num_workers)
    loader.load_state_dict(first.state_dict())
    batches.close()
    bucket.fetched()
    rest = [number for batch in loader for number in batch["id"].tolist()]
    assert sorted(seen + rest) == list(range(NUM_SAMPLES))
    snapshot, index = dataset.snapshot, dataset.reader.indexes[0]
    needed = np.unique(snapshot.shards_of(np.array(rest))).tolist()
    assert len(needed) < index.num_shards
    assert bucket.fetched() == {index.entry(number).raw.basename: 1 for number in needed}


def test_a_missing_bucket_is_an_error_of_ours(bucket: Bucket, tmp_path: Path) -> None:
    dataset = StreamingDataset(remote="s3://nobody/data", local=tmp_path)
    with pytest.raises(NotFoundError, match=r"s3://nobody/data.*no bucket 'nobody'.*Check the URL"):
        list(StreamingDataLoader(dataset, 8, num_workers=2))
    with pytest.raises(NotFoundError, match=r"s3://bucket/nothing.*writer puts last"):
        list(StreamingDataLoader(StreamingDataset(remote="s3://bucket/nothing", local=tmp_path), 8, num_workers=2))


def test_wrong_credentials_reach_the_user_of_workers(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    dataset = dataset_in(tmp_path, bucket)
    dataset.snapshot  # noqa: B018 - the index is here; what the workers ask for is not
    loader = StreamingDataLoader(dataset, 8, num_workers=2)
    if "moto" in request.node.callspec.id:
        bucket.proxy.plan = Plan(probability={"refuse": 1.0})
    else:
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "WRONG-PASSWORD")
        dataset.reader.close()
    with pytest.raises(AccessError, match=r"s3://bucket/data/shard.*AWS_SECRET_ACCESS_KEY") as caught:
        list(loader)
    assert "WRONG-PASSWORD" not in str(caught.value)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_shard_deleted_in_mid_epoch_raises(bucket: Bucket, tmp_path: Path, num_workers: int) -> None:
    loader = StreamingDataLoader(
        dataset_in(tmp_path, bucket, window=1, predownload=8), 8, num_workers=num_workers, prefetch_factor=None
    )
    batches = iter(loader)
    next(batches)
    shard = int(loader.trace(28).shards[0])  # far behind what is read ahead
    victim = loader.dataset.reader.indexes[0].entry(shard).raw.basename
    content = bucket.client.get_object(Bucket="bucket", Key=f"data/{victim}")["Body"].read()
    bucket.client.delete_object(Bucket="bucket", Key=f"data/{victim}")
    try:
        with pytest.raises(NotFoundError, match=rf"s3://bucket/data/{victim}.*index lists this file"):
            list(batches)
    finally:
        bucket.client.put_object(Bucket="bucket", Key=f"data/{victim}", Body=content)


def test_options_reach_the_remote_of_a_pair_under_any_url(tmp_path: Path) -> None:
    from servers.fake_databricks import TOKEN, FakeDatabricks

    with FakeDatabricks() as server:
        options = {"host": server.url, "token": TOKEN}
        url = "dbfs:/Volumes/a/b/c/folder"
        write((tmp_path / "local", url), count=20, store_options=options)
        assert open_store(url, options).exists("index.json")


def test_lengths_are_added_in_a_bucket_and_fetched_once(bucket: Bucket, tmp_path: Path) -> None:
    url = f"s3://bucket/lengths-{tmp_path.name}"
    write(url, count=60, compression="zstd")

    def late(name: str) -> int:
        if name == "sample 7":
            write(url, 60, 3, append=True)
        return len(name)

    with pytest.raises((ConflictError, FileExistsError), match="another writer is or was at work"):
        add_lengths(url, {"name": late}, num_workers=1)
    wanted = [len(f"sample {number}") for number in range(63)]
    assert add_lengths(url, {"name": len}, num_workers=2)["name"].tolist() == wanted
    names = [name for name in bucket.names(url.removeprefix("s3://bucket/")) if name.startswith("lengths.")]
    assert len(names) == 1
    for times in (1, 0):
        bucket.proxy.asked.clear()
        dataset = StreamingDataset(remote=url, local=tmp_path / "cache")
        assert dataset.lengths("name").tolist() == wanted
        asked = {path.rpartition("/")[2]: n for (_, path), n in bucket.proxy.asked.items()}
        assert asked.pop(names[0], 0) == times
        assert set(asked) == {"index.json", "00000003.json"}  # whether there is a newer version than the second
