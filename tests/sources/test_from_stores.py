"""Datasets in other formats in a store: little is read before the samples are numbered, and changes are noticed."""

from __future__ import annotations

import io
import os
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed: uv sync --extra convert")
pytest.importorskip("boto3", reason="boto3 is not installed: uv sync --extra s3")
import pyarrow.feather as feather  # noqa: E402
import pyarrow.parquet as pq  # noqa: E402
from servers.s3 import bucket_at, variables_of  # noqa: E402
from servers.web import HubServer  # noqa: E402

from lightning_stream import Stream, StreamingDataset  # noqa: E402
from lightning_stream.errors import FormatError, NotFoundError  # noqa: E402
from lightning_stream.stores import Store, open_store  # noqa: E402
from lightning_stream.stores.retry import RetryingStore  # noqa: E402


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIGHTNING_STREAM_CACHE", str(tmp_path / "cache"))


class Counted:
    """Counts what is read from all stores, without listings."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.requests, self.bytes = 0, 0
        read = RetryingStore.open

        def counted(store: RetryingStore, name: str, begin: int = 0, end: int | None = None) -> Any:
            stream = read(store, name, begin, end)
            self.requests, self.bytes = self.requests + 1, self.bytes + (stream.num_bytes or 0)
            return stream

        patch.setattr(RetryingStore, "open", counted)


@pytest.fixture
def store(moto_endpoint: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Store:
    """A new folder in a bucket; the variables are set that users of S3 set."""
    bucket_at(moto_endpoint, "formats")
    for name, value in variables_of(moto_endpoint).items():
        monkeypatch.setenv(name, value)
    return open_store(f"s3://formats/{request.node.name.replace('[', '-').rstrip(']')}")


def table(rows: int = 40_000, first: int = 0) -> Any:
    columns = {"id": range(first, first + rows), "text": [f"{k * 2**40 + k:x}" * 12 for k in range(rows)]}
    return pa.table(columns)


def put(store: Store, folder: Path, name: str, write: Any) -> int:
    path = folder / "file"
    write(path)
    store.put(name, path)
    return path.stat().st_size


def write_stream(path: Path, rows: Any) -> None:
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, rows.schema) as out:
        out.write_table(rows, max_chunksize=10_000)


def write_tar(path: Path, member_bytes: int) -> None:
    with tarfile.open(path, "w") as out:
        for number in range(8_000_000 // member_bytes):
            for ending, data in (("bin", os.urandom(member_bytes)), ("id", str(number).encode())):
                member = tarfile.TarInfo(f"{number:06}.{ending}")
                member.size = len(data)
                out.addfile(member, io.BytesIO(data))


def write_array(path: Path) -> None:
    with path.open("wb") as file:
        np.save(file, np.zeros((2000, 1024), np.int32))


WRITERS = {
    "parquet": ("a.parquet", lambda path: pq.write_table(table(), path, row_group_size=20_000, compression=None), 1),
    "parquet with a long footer": ("a.parquet", lambda path: pq.write_table(table(), path, row_group_size=400), 2),
    "stream": ("a.arrow", lambda path: write_stream(path, table()), 6),
    "feather": ("a.feather", lambda path: feather.write_feather(table(), str(path), compression="lz4"), 5),
    "tar": ("a.tar", lambda path: write_tar(path, 1_000_000), 12),
    "numpy": ("a.npy", write_array, 1),
}


@pytest.mark.parametrize("kind", WRITERS)
def test_samples_are_numbered_after_few_small_requests(
    kind: str, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, write, most_requests = WRITERS[kind]
    stored = put(store, tmp_path, name, write)
    with monkeypatch.context() as patch:
        counted = Counted(patch)
        dataset = StreamingDataset(remote=store.url)
        size = dataset.size
        found = (counted.requests, counted.bytes)
        assert StreamingDataset(remote=store.url).size == size
        assert (counted.requests, counted.bytes) == found, "the listing is enough"
    looks = 2  # one for the columns of the first file, and one for its pieces
    assert found[0] <= looks * most_requests, f"{found[0]} requests"
    most_bytes = {"parquet with a long footer": 1 << 17, "tar": 1 << 16}.get(kind, 0.005 * stored)
    assert found[1] <= looks * most_bytes + 2048 * found[0], f"{found[1]:,} of {stored:,} bytes"
    assert "id" not in dataset[size - 1] or int(dataset[size - 1]["id"]) == size - 1


@pytest.mark.parametrize("kind", ["parquet", "stream", "tar", "numpy", "images", "jsonl"])
def test_an_object_that_changed_or_is_gone_is_an_error_that_names_it(kind: str, store: Store, tmp_path: Path) -> None:
    lines = b"".join(b'{"id": %d}\n' % k for k in range(9))
    name, write = {
        **{name: (each[0].replace("a.", "b."), each[1]) for name, each in WRITERS.items()},
        "images": ("b.jpg", lambda path: path.write_bytes(b"\xff\xd8\xff" + os.urandom(99) + b"\xff\xd9")),
        "jsonl": ("b.jsonl", lambda path: path.write_bytes(lines)),
    }[kind]
    put(store, tmp_path, name, write)
    dataset = StreamingDataset(remote=store.url)
    assert dataset.size
    content = bytearray(store.read(name))
    content[50] ^= 1  # as long as before
    store.put(name, bytes(content))
    with pytest.raises(FormatError, match=rf"{name}: a file must stay as it was .* was changed"):
        dataset[0]
    store.delete(name)
    with pytest.raises(NotFoundError, match=rf"{name}: a file must stay as it was .* is gone"):
        dataset[0]


def test_files_patterns_and_folders_that_end_like_files_are_read(store: Store, tmp_path: Path) -> None:
    for number, name in enumerate(["data/train-0.parquet", "data/train-1.parquet", "data/test-0.parquet"]):
        put(store, tmp_path, name, lambda path, number=number: pq.write_table(table(5, 5 * number), path))
    put(store, tmp_path, "spark.parquet/part-0 é%20.parquet", lambda path: pq.write_table(table(3), path))
    store.put("spark.parquet/_SUCCESS", b"")

    def ids(remote: str) -> list[int]:
        dataset = StreamingDataset(remote=remote)
        return [int(dataset[k]["id"]) for k in range(dataset.size)]

    assert ids(f"{store.url}/data/train-*.parquet") == [*range(10)]
    assert ids(f"{store.url}/**/test-?.parquet") == [*range(10, 15)]
    assert ids(f"{store.url}/data/train-1.parquet") == [*range(5, 10)]
    assert ids(f"{store.url}/spark.parquet") == ids(f"{store.url}/spark.parquet/") == [0, 1, 2]
    with pytest.raises(ValueError, match=r"a stream must be one split; .*/data holds test, train"):
        ids(f"{store.url}/data")
    with pytest.raises(NotFoundError, match=r"data holds no files named val\*"):
        ids(f"{store.url}/data/val*")


def test_a_dataset_of_the_hub_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with HubServer() as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        for number, split in enumerate(("train", "train", "test")):
            pq.write_table(table(5, 5 * number), tmp_path / "file")
            path = f"/datasets/org/name/resolve/main/data/{split}-{number:05}-of-00003.parquet"
            server.objects[path] = (tmp_path / "file").read_bytes()
        server.objects["/datasets/org/name/resolve/main/README.md"] = b"# A dataset"
        with pytest.raises(ValueError, match=r"must be one split; hf://datasets/org/name holds test, train.*train\*"):
            StreamingDataset(remote="hf://datasets/org/name")[0]
        dataset = StreamingDataset(remote="hf://datasets/org/name/data/train-*")
        assert [int(dataset[k]["id"]) for k in range(dataset.size)] == [*range(10)]
        stream = Stream("hf://datasets/org/name/data/test-00002-of-00003.parquet")
        assert StreamingDataset(streams=[stream])[4]["id"] == 14
