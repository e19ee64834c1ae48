"""Shards that are made of other formats, in a cache: one maker for all processes, true sizes, killed makers."""

from __future__ import annotations

import multiprocessing
import os
import signal
from multiprocessing.process import BaseProcess
from pathlib import Path

import numpy as np
import pytest

pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed: uv sync --extra convert")
import pyarrow.parquet as pq  # noqa: E402

from lightning_stream import StreamingDataset  # noqa: E402
from lightning_stream.cache import ShardCache  # noqa: E402
from lightning_stream.cache.space import Space  # noqa: E402
from lightning_stream.formats.index import ShardEntry  # noqa: E402
from lightning_stream.formats.mds.encode import ShardDraft  # noqa: E402
from lightning_stream.reading.lengths import read_lengths  # noqa: E402
from lightning_stream.sources.in_place import InPlace  # noqa: E402
from lightning_stream.stores.local import LocalStore  # noqa: E402

TOKENS = np.arange(8000 * 64, dtype=np.int32).reshape(8000, 64)


@pytest.fixture(autouse=True)
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LIGHTNING_STREAM_CACHE", str(tmp_path / "cache"))
    (tmp_path / "data").mkdir()
    np.save(tmp_path / "data" / "a.npy", TOKENS)
    return tmp_path / "data"


def read_all(data: Path) -> None:
    dataset = StreamingDataset(remote=str(data))
    assert [int(dataset[k]["array"][0]) for k in range(8000)] == TOKENS[:, 0].tolist()


def reader(data: Path, log: Path, is_killed: bool) -> BaseProcess:
    """A process that reads all, and notes the shards that it makes; or is killed before it has made one."""
    write = InPlace.write

    def logged(self: InPlace, store: LocalStore, entry: ShardEntry, to: Path) -> None:
        write(self, store, entry, to)
        with log.open("a") as out:
            out.write(f"{entry.raw.basename}\n")

    def work() -> None:
        InPlace.write = logged
        if is_killed:
            ShardDraft.finish = lambda _: os.kill(os.getpid(), signal.SIGKILL)
        read_all(data)

    process = multiprocessing.get_context("fork").Process(target=work)
    process.start()
    return process


def test_several_processes_make_each_shard_once(data: Path, tmp_path: Path) -> None:
    readers = [reader(data, tmp_path / "log", is_killed=False) for _ in range(3)]
    for one in readers:
        one.join(120)
    assert [one.exitcode for one in readers] == [0, 0, 0]
    made = (tmp_path / "log").read_text().splitlines()
    assert len(made) == len(set(made)) == 8


def test_a_killed_maker_leaves_no_shard_and_the_next_one_cleans_up(data: Path, tmp_path: Path) -> None:
    killed = reader(data, tmp_path / "log", is_killed=True)
    killed.join(120)
    assert killed.exitcode == -signal.SIGKILL
    cache = tmp_path / "cache"
    assert not list(cache.rglob("*.mds"))
    assert [path for path in cache.rglob("drafts/*") if path.stat().st_size]
    read_all(data)
    assert not list(cache.rglob("drafts/*"))


def test_the_cache_counts_the_true_sizes_of_made_shards(data: Path, tmp_path: Path) -> None:
    cache = ShardCache(LocalStore(data), tmp_path / "copy", other=InPlace())
    index = cache.index()
    for number in range(len(index)):
        cache.lease(index.entry(number)).close()
    sizes = {path.name: path.stat().st_size for path in (tmp_path / "copy").glob("*.mds")}
    assert {entry.names[0]: entry.num_bytes for entry in Space(cache._place).entries()} == sizes
    assert sizes[index.entry(0).raw.basename] != index.entry(0).raw.num_bytes, "the index has an estimate"


def test_a_shard_over_4_gib_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning_stream.formats.mds import encode

    monkeypatch.setattr(encode, "MAX_FILE_BYTES", 300)
    with ShardDraft(encode.MdsEncoder({"x": "int64"}, None, (), None), 40, tmp_path / "shard") as draft:
        draft.add({"x": np.arange(40)}, 40)
        with pytest.raises(ValueError, match="must stay under 4 GiB; found 320 bytes"):
            draft.finish()


def test_lengths_follow_from_made_shards(tmp_path: Path) -> None:
    rows = [np.arange(k % 9, dtype=np.int32) for k in range(100)]
    (tmp_path / "parquet").mkdir()
    pq.write_table(pa.table({"tokens": rows}), tmp_path / "parquet" / "a.parquet", row_group_size=30)
    cache = ShardCache(LocalStore(tmp_path / "parquet"), other=InPlace())
    found = read_lengths([cache], [cache.index()], "tokens")
    assert found.tolist() == [len(row) for row in rows]
