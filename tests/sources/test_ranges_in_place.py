"""Datasets in other formats in a store: which bytes are asked of it, for an index, a shard and single samples."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed: uv sync --extra convert")
fsspec = pytest.importorskip("fsspec", reason="fsspec is not installed: uv sync --extra fsspec")
import pyarrow.parquet as pq  # noqa: E402

from lightning_stream import StreamingDataLoader, StreamingDataset  # noqa: E402
from lightning_stream.cache import ShardCache  # noqa: E402
from lightning_stream.errors import FormatError  # noqa: E402
from lightning_stream.formats.index import Index  # noqa: E402
from lightning_stream.reading import partial  # noqa: E402
from lightning_stream.sources import webdataset  # noqa: E402
from lightning_stream.sources.in_place import InPlace  # noqa: E402
from lightning_stream.stores.base import ObjectEntry  # noqa: E402
from lightning_stream.stores.generic import FsspecStore  # noqa: E402
from lightning_stream.stores.local import LocalStore, _version  # noqa: E402
from lightning_stream.stores.transfer import ObjectStream  # noqa: E402

TOKENS = np.random.default_rng(0).integers(0, 1 << 31, (3000, 256)).astype(np.int32)


class Counted(LocalStore):
    """A folder that is read as a store with versions; ``asked`` has the name and the bytes of every range."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.url = "counted://bucket"
        self.asked: list[tuple[str, int]] = []

    def _open(self, name: str, begin: int, end: int | None) -> ObjectStream:
        found = super()._open(name, begin, end)
        self.asked.append((name, found.num_bytes or 0))
        return found

    def _list(self, prefix: str) -> Iterator[ObjectEntry]:
        for entry in super()._list(prefix):
            yield ObjectEntry(entry.name, entry.num_bytes, f'"{_version((self.folder / entry.name).stat())}"')

    @property
    def num_bytes(self) -> int:
        return sum(size for _, size in self.asked)


def made(store: Counted, to: Path, **options: Any) -> Index:
    """Make all shards in a folder."""
    other = InPlace(**options)
    index = Index.from_bytes(other.index(store), "index")
    for number in range(len(index)):
        other.write(store, index.entry(number), to / str(number))
    return index


def test_one_of_ten_parquet_columns_costs_a_tenth_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    columns = {f"c{k}": pa.FixedSizeListArray.from_arrays(pa.array(TOKENS.reshape(-1)), 256) for k in range(10)}
    pq.write_table(pa.table(columns), tmp_path / "data" / "a.parquet", row_group_size=1000, compression="none")
    size = (tmp_path / "data" / "a.parquet").stat().st_size
    store = Counted(tmp_path / "data")
    index = made(store, tmp_path, columns=["c7"])
    shards = len(index)
    assert shards == 3
    assert store.num_bytes < size * 0.115
    footers = [size for _, size in store.asked if size < 100_000]
    assert len(store.asked) == len(footers) + shards, "one range for each shard"
    assert len(footers) <= 4, "the footer is kept"
    store.asked.clear()
    made(store, tmp_path, columns=["c3", "c4", "c9"])
    assert store.num_bytes < size * 0.315
    assert sum(size > 100_000 for _, size in store.asked) == 2 * shards, "neighbours come in one range"


def test_an_arrow_shard_costs_its_own_bytes(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    table = pa.table({"tokens": pa.FixedSizeListArray.from_arrays(pa.array(TOKENS.reshape(-1)), 256)})
    with pa.OSFile(str(tmp_path / "data" / "a.arrow"), "wb") as file, pa.ipc.new_file(file, table.schema) as out:
        out.write_table(table, max_chunksize=500)
    size = (tmp_path / "data" / "a.arrow").stat().st_size
    store = Counted(tmp_path / "data")
    index = Index.from_bytes(InPlace().index(store), "index")
    assert store.num_bytes < size * 0.03
    store.asked.clear()
    for number in range(6):
        InPlace().write(store, index.entry(number), tmp_path / "shard")
    assert len(store.asked) == 6
    assert store.num_bytes < size * 1.001


@pytest.mark.parametrize("num_bytes", [100, 300_000])
def test_the_index_of_a_tar_costs_few_requests_or_few_bytes(
    num_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(webdataset, "_SAMPLED", 5)
    (tmp_path / "data").mkdir()
    with tarfile.open(tmp_path / "data" / "a.tar", "w") as out:
        for k in range(200):
            member = tarfile.TarInfo(f"{k:05}.bin")
            member.size = num_bytes
            out.addfile(member, io.BytesIO(bytes(num_bytes)))
    size = (tmp_path / "data" / "a.tar").stat().st_size
    store = Counted(tmp_path / "data")
    index = Index.from_bytes(InPlace(columns={"__key__": "str", "bin": "bytes"}).index(store), "index")
    assert index.num_samples == 200
    if num_bytes == 100:
        assert len(store.asked) < 10
    else:
        assert store.num_bytes < 0.25 * size, "some samples are looked at, and 2 KB of each of the others"
    store.asked.clear()
    for number in range(len(index)):
        InPlace().write(store, index.entry(number), tmp_path / f"{number}")
    assert len(store.asked) == len(index)


def write_version(path: Path, tokens: Any) -> None:
    """A file of the kind that its name shows, with the same number of rows and of bytes."""
    path.unlink(missing_ok=True)
    if path.suffix == ".npy":
        np.save(path, tokens)
    elif path.suffix == ".jsonl":
        path.write_text("".join(f'{{"x": {row[0] % 10}}}\n' for row in tokens))
    elif path.suffix == ".webp":
        path.write_bytes(tokens.tobytes())
    elif path.suffix == ".tar":
        with tarfile.open(path, "w") as out:
            member = tarfile.TarInfo("a.bin")
            member.size = tokens.nbytes
            out.addfile(member, io.BytesIO(tokens.tobytes()))
    else:
        table = pa.table({"x": tokens.reshape(-1)})
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as out:
            out.write_table(table)


@pytest.mark.parametrize("name", ["a.npy", "a.jsonl", "a.webp", "a.tar", "a.arrow"])
def test_a_file_that_is_replaced_by_one_of_the_same_size_is_an_error(name: str, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    write_version(tmp_path / "data" / name, TOKENS)
    for store in (Counted(tmp_path / "data"), LocalStore(tmp_path / "data")):
        entry = Index.from_bytes(InPlace().index(store), "index").entry(0)
        InPlace().write(store, entry, tmp_path / "shard")
        write_version(tmp_path / "data" / name, TOKENS + 1)
        with pytest.raises(FormatError, match=rf"{name}: a file must stay as it was.*this one was changed"):
            InPlace().write(store, entry, tmp_path / "shard")


def write_numpy(folder: Path) -> str:
    np.save(folder / "a.npy", TOKENS)
    return "array"


def write_litdata(folder: Path) -> str:
    items = [np.uint32(row.nbytes).tobytes() + row.tobytes() for row in TOKENS]
    ends = np.cumsum([8 + 4 * len(items), *map(len, items)])
    chunk = np.uint32(len(items)).tobytes() + ends.astype("<u4").tobytes() + b"".join(items)
    (folder / "chunk-0-0.bin").write_bytes(chunk)
    spec = {"type": "builtins.dict", "context": '["x"]', "children_spec": [{"type": None, "children_spec": []}]}
    config = {"compression": None, "data_format": ["no_header_numpy:2"], "data_spec": json.dumps([1, spec])}
    chunks = [{"chunk_bytes": len(chunk), "chunk_size": len(items), "filename": "chunk-0-0.bin"}]
    (folder / "index.json").write_text(json.dumps({"chunks": chunks, "config": config}))
    return "x"


def write_images(folder: Path) -> str:
    for k, row in enumerate(TOKENS[:300]):
        path = folder / f"class{k // 150}" / f"{k:05}.webp"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(row.tobytes())
    return "image"


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[str, int]]:
    """The ranges that are asked of the store ``memory://``."""
    monkeypatch.setenv("LIGHTNING_STREAM_CACHE", str(tmp_path / "cache"))
    found: list[tuple[str, int]] = []
    opened = FsspecStore._open

    def counted(self: FsspecStore, name: str, begin: int, end: int | None) -> ObjectStream:
        stream = opened(self, name, begin, end)
        found.append((name, stream.num_bytes or 0))
        return stream

    monkeypatch.setattr(FsspecStore, "_open", counted)
    return found


@pytest.mark.parametrize("write", [write_numpy, write_litdata, write_images])
def test_one_sample_of_a_shard_that_is_not_here_comes_by_ranges(
    write: Any, tmp_path: Path, asked: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(partial, "REQUEST_BYTES", 20_000)  # these shards are small
    folder = tmp_path / "data"
    folder.mkdir()
    column = write(folder)
    url = f"memory://{write.__name__}"
    fsspec.filesystem("memory").put(str(folder), f"/{write.__name__}", recursive=True)
    num_rows = 300 if write is write_images else 3000
    dataset = StreamingDataset(remote=url)
    assert dataset.size == num_rows
    asked.clear()
    for k in (num_rows - 1, 7, 150):
        value = dataset[k][column]
        assert (value if isinstance(value, bytes) else value.tobytes()) == TOKENS[k].tobytes()
    assert sum(size for _, size in asked) < (40_000 if write is not write_litdata else 60_000)
    assert not list((tmp_path / "cache").rglob("*.mds"))
    for k in range(num_rows):  # then whole shards come, and are compared with what came by ranges
        value = dataset[k][column]
        assert (value if isinstance(value, bytes) else value.tobytes()) == TOKENS[k].tobytes()
    assert list((tmp_path / "cache").rglob("*.mds"))


@pytest.mark.parametrize("write", [write_numpy, write_litdata, write_images])
def test_a_run_that_starts_by_ranges_has_the_same_batches(
    write: Any, tmp_path: Path, asked: list[tuple[str, int]]
) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    column = write(folder)
    name = f"{write.__name__}-start"
    fsspec.filesystem("memory").put(str(folder), f"/{name}", recursive=True)

    def batches(**options: Any) -> list[Any]:
        dataset = StreamingDataset(
            remote=f"memory://{name}", local=str(tmp_path / str(len(options))), shuffle=True, **options
        )
        return [np.asarray(batch[column]).tobytes() for batch in StreamingDataLoader(dataset, batch_size=50)]

    assert batches(predownload={"by_range": True}) == batches()
    assert asked


def test_damage_in_a_made_shard_is_found_after_a_restart_and_it_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "data").mkdir()
    np.save(tmp_path / "data" / "a.npy", TOKENS)

    def first_rows() -> Any:
        cache = ShardCache(LocalStore(tmp_path / "data"), tmp_path / "cache", other=InPlace())
        entry = cache.index().entry(0)
        with cache.lease(entry) as lease:
            return (lease.folder / entry.raw.basename).read_bytes()

    wanted = first_rows()
    (path,) = (tmp_path / "cache").glob("*.mds")
    path.write_bytes(wanted[:-1] + b"?")
    assert first_rows() != wanted, "without a restart, files of the cache are trusted"
    monkeypatch.setattr("lightning_stream.cache.shards.before_boot", lambda path: True)
    assert first_rows() == wanted


def test_one_row_of_arrays_has_the_columns_in_the_names_of_folders(tmp_path: Path) -> None:
    folder = tmp_path / "data" / "year=2024"
    folder.mkdir(parents=True)
    np.save(folder / "a.npy", TOKENS)
    store, other = LocalStore(tmp_path / "data"), InPlace()
    entry = Index.from_bytes(other.index(store), "index").entry(1)
    assert entry.schema.columns == {"array": "ndarray:int32:256", "year": "int64"}
    other.write(store, entry, tmp_path / "made.mds")
    row, later = other.samples(store, entry, [5, 7])
    assert row != later
    assert row in (tmp_path / "made.mds").read_bytes()
    assert TOKENS[1024 + 5].tobytes() in row
