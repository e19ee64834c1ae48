"""What is asked for wrongly, or is not there, is said before anything is read."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from support.data import write_ids

from lightning_stream import LocalDataset, MDSWriter, Stream, StreamingDataLoader, StreamingDataset
from lightning_stream.cache import Lease, ShardCache
from lightning_stream.errors import CacheFullError
from lightning_stream.reading import shard_pool


def test_an_empty_dataset_has_no_samples_and_says_so_when_it_is_iterated(tmp_path: Path) -> None:
    with MDSWriter(out=tmp_path / "empty", columns={"a": "int"}):
        pass
    dataset = StreamingDataset(local=tmp_path / "empty")
    assert (dataset.size, len(LocalDataset(tmp_path / "empty")), dataset[:]) == (0, 0, [])
    for start in (lambda: iter(StreamingDataLoader(dataset, 2)), lambda: iter(dataset)):
        with pytest.raises(ValueError, match=r"must be samples to iterate over; .*empty has none in 0 shards"):
            next(start())
    with pytest.raises(ValueError, match="at least one sample id"):
        dataset.read_batch([])


@pytest.mark.parametrize("place", ["s3://bucket/set/index.json", "/data/set/index.json", Path("set/index.json")])
@pytest.mark.parametrize("argument", ["remote", "local"])
def test_a_stream_is_named_by_its_folder_not_by_its_index(place: str | Path, argument: str) -> None:
    with pytest.raises(ValueError, match=r"takes a folder, not its index; found .* Pass '.*set'"):
        Stream(**{argument: place})  # type: ignore[arg-type]


@pytest.mark.parametrize("argument", ["remote", "local"])
def test_an_empty_place_is_not_the_working_directory(argument: str) -> None:
    with pytest.raises(ValueError, match=r"must not be empty; pass '\.' for the working directory"):
        Stream(**{"remote": "set", argument: ""})  # type: ignore[arg-type]


def test_pickled_columns_are_refused_with_the_remedy(tmp_path: Path) -> None:
    with MDSWriter(out=tmp_path / "set", columns={"p": "pkl"}) as writer:
        writer.write({"p": {1, 2}})
    for read in (lambda d: d[0], lambda d: d.read_batch([0])):
        with pytest.raises(ValueError, match=r"column 'p' is stored as 'pkl'.*pass allow_unsafe_types=True"):
            read(StreamingDataset(local=tmp_path / "set"))
    assert LocalDataset(tmp_path / "set", allow_unsafe_types=True)[-1] == {"p": {1, 2}}


def test_random_access_under_a_cache_limit_lets_go_of_what_it_read(tmp_path: Path) -> None:
    write_ids(tmp_path / "set", range(500), size_limit=1000)
    shard_bytes = max(path.stat().st_size for path in (tmp_path / "set").glob("*.mds"))
    dataset = StreamingDataset(remote=tmp_path / "set", local=tmp_path / "cache", cache_limit=3 * shard_bytes)
    assert dataset.snapshot.num_shards > 6
    begin = time.monotonic()
    assert [dataset[number]["id"] for number in range(500)] == list(range(500))
    assert [dataset.read_batch([number, 499 - number])["id"].sum() for number in range(0, 250, 20)] == [499] * 13
    assert time.monotonic() - begin < 50  # nobody waited for room
    assert sum(path.stat().st_size for path in (tmp_path / "cache").glob("*.mds")) <= 3 * shard_bytes
    cache = dataset.reader.caches[0]
    cache.config = replace(cache.config, room_wait_s=0.1)
    with pytest.raises(CacheFullError, match="cache_limit is"):
        dataset.read_batch([0, 120, 240, 360, 480])  # four shards at once do not fit
    assert dataset[250]["id"] == 250  # and are let go of


def test_batches_that_each_fit_under_a_limit_do_not_wait_for_each_other_each_with_a_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_ids(tmp_path / "set", range(400), size_limit=1000)
    shard_bytes = max(path.stat().st_size for path in (tmp_path / "set").glob("*.mds"))
    given = {"remote": tmp_path / "set", "local": tmp_path / "cache", "cache_limit": 2 * shard_bytes}
    both_have_one, has_one = threading.Event(), set[str]()
    find_and_pin, make_space = ShardCache._pin, ShardCache._make_space
    for number in range(2):
        StreamingDataset(**given).prepare_shard(number)

    def pin(cache: ShardCache, raw: Any) -> Lease | None:
        lease = find_and_pin(cache, raw)
        has_one.add(raw.basename)
        if len(has_one & {"shard.00000.mds", "shard.00001.mds"}) == 2:
            both_have_one.set()
        return lease

    def make_late(cache: ShardCache, *args: Any) -> None:
        assert both_have_one.wait(30)
        make_space(cache, *args)

    monkeypatch.setattr(ShardCache, "_pin", pin)
    monkeypatch.setattr(ShardCache, "_make_space", make_late)
    monkeypatch.setattr(shard_pool, "_PATIENCE_S", 0.1)

    def read(number: int) -> tuple[list[int], list[int]]:
        dataset = StreamingDataset(**given)
        offsets = dataset.snapshot.shard_offsets
        for cache in dataset.reader.caches:
            cache.config = replace(cache.config, room_wait_s=20.0)
        ids = [int(offsets[number]), int(offsets[number + 2])]
        return ids, dataset.read_batch(ids)["id"].tolist()

    with ThreadPoolExecutor() as threads:
        for wanted, found in threads.map(read, range(2)):
            assert found == wanted


def test_a_batch_without_room_lets_go_of_what_was_read_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_pool, "_PATIENCE_S", 0.1)
    write_ids(tmp_path / "set", range(400), size_limit=1000)
    shard_bytes = max(path.stat().st_size for path in (tmp_path / "set").glob("*.mds"))
    dataset = StreamingDataset(remote=tmp_path / "set", local=tmp_path / "cache", cache_limit=2 * shard_bytes)
    offsets = dataset.snapshot.shard_offsets
    cache = dataset.reader.caches[0]
    cache.config = replace(cache.config, room_wait_s=5.0)
    with dataset.reader.read_ahead(offsets[:1]):
        assert [fetch.result(10) is None for fetch in dataset.reader.shards.pool.fetches.values()] == [False]
        assert dataset.read_batch(offsets[1:3].tolist())["id"].tolist() == offsets[1:3].tolist()
    with pytest.raises(CacheFullError, match="the 3 shards of a batch need"):  # at once, without a wait for room
        dataset.read_batch(offsets[:3].tolist())
