"""A process that may have few files open: more are asked for, and where there are none, that is said."""

from __future__ import annotations

import errno
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from lightning_stream import MDSWriter, StreamingDataset
from lightning_stream.errors import CacheError
from lightning_stream.formats.shard import Shard
from lightning_stream.reading.shard_table import ShardTable
from lightning_stream.stores import LocalStore, ObjectStream

NUM_SHARDS = 300
# Both processes are forked from one that has imported torch.
READ = """
import os, resource, sys
from lightning_stream import StreamingDataLoader, StreamingDataset
for name, hard in (("granted", 4096), ("refused", 256)):
    if os.fork() == 0:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
        given = {"shuffle": True, "window": 300, "num_canonical_nodes": 1}
        in_place = [StreamingDataset(local=sys.argv[1], **given) for _ in range(2)]
        cached = [StreamingDataset(remote=sys.argv[1], local=f"{sys.argv[2]}/{name}{k}", **given) for k in range(2)]
        samples = [len([data[k] for k in range(len(data))]) for data in in_place]
        batches = [sum(len(batch["number"]) for batch in StreamingDataLoader(data, 250)) for data in cached]
        print(name, *samples, *batches)
        break
    os.wait()
"""


def test_more_files_are_asked_for_by_all_datasets_and_where_the_system_grants_none_the_error_says_so(
    tmp_path: Path,
) -> None:
    with MDSWriter(out=tmp_path / "data", columns={"number": "int"}, size_limit=100) as writer:
        for number in range(NUM_SHARDS):
            writer.write({"number": number})
    assert len(list((tmp_path / "data").glob("shard.*"))) == NUM_SHARDS
    command = [sys.executable, "-W", "ignore", "-c", READ, str(tmp_path / "data"), str(tmp_path)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=240)
    assert done.stdout == f"granted{4 * f' {NUM_SHARDS}'}\n"
    assert "this process may have 256 in all" in done.stderr
    assert "ulimit -n" in done.stderr


def test_the_error_is_the_same_where_a_fetch_meets_the_limit_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with MDSWriter(out=tmp_path / "data", columns={"number": "int"}) as writer:
        writer.write({"number": 0})
    dataset = StreamingDataset(remote=tmp_path / "data", local=tmp_path / "cache")

    def open_no_shard(store: LocalStore, name: str, begin: int, end: int | None) -> ObjectStream:
        raise OSError(errno.EMFILE, "Too many open files", str(store.folder / name))

    assert dataset.num_samples == 1
    monkeypatch.setattr(LocalStore, "_open", open_no_shard)
    with pytest.raises(CacheError, match=r"this process may have \d+ in all.*ulimit -n"):
        dataset[0]


@pytest.mark.parametrize("most_open", [2, 0])
def test_where_no_addresses_are_left_shards_are_closed_and_none_at_all_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most_open: int
) -> None:
    with MDSWriter(out=tmp_path / "data", columns={"number": "int"}, size_limit=100) as writer:
        for number in range(20):
            writer.write({"number": number})
    dataset = StreamingDataset(local=tmp_path / "data")
    pool, map_shard = dataset.reader.shards.pool, ShardTable.open

    def refuse(*arguments: Any) -> Shard:
        if len(pool.open) >= most_open:
            raise OSError(errno.ENOMEM, "Cannot allocate memory")
        return map_shard(*arguments)

    monkeypatch.setattr(ShardTable, "open", refuse)
    if most_open:
        assert [dataset[number]["number"] for number in range(20)] == list(range(20))
    else:
        with pytest.raises(CacheError, match=r"Cannot allocate memory.*ulimit -v"):
            dataset[0]
