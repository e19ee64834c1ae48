"""Ending an iteration early costs nothing, and iterations over one reader do not disturb each other."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from lightning_stream import MDSWriter, StreamingDataLoader, StreamingDataset  # noqa: E402
from lightning_stream.order import OrderConfig, RunOrder, StreamWeights  # noqa: E402
from lightning_stream.order.bitmap import Bitmap  # noqa: E402
from lightning_stream.reading.next_use import NextUse, next_use_of_file  # noqa: E402
from lightning_stream.reading.partial import PartialShards  # noqa: E402
from lightning_stream.stores import LocalStore  # noqa: E402

NUM_SAMPLES, NUM_SHARDS = 640, 64


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shards")
    with MDSWriter(out=folder, columns={"id": "int", "x": "bytes"}, size_limit=1400) as writer:
        for number in range(NUM_SAMPLES):
            writer.write({"id": number, "x": bytes(100)})
    return folder


def limited(shards: Path, folder: Path, num_shards: int = 40, **options: Any) -> StreamingDataset:
    options = {"shuffle": True, "window": 4, "num_canonical_nodes": 2, "predownload": 16, **options}
    dataset = StreamingDataset(remote=shards, local=folder, **options)
    assert dataset.snapshot.num_shards == NUM_SHARDS
    size = int(dataset.reader.indexes[0].raw_bytes.max())
    config = replace(dataset.reader.shards.defaults.config, limit_bytes=num_shards * size, room_wait_s=1)
    dataset.reader.shards.defaults = replace(dataset.reader.shards.defaults, config=config)
    vars(dataset.reader.shards).pop("caches")  # made before the limit was known
    return dataset


def assert_nothing_is_held(dataset: StreamingDataset) -> None:
    process = dataset.reader.shards.pool
    assert process is not None
    assert (len(process.open), dict(process.wanted), process.fetches, process.plans) == (0, {}, {}, {})


def broken_off(batches: Iterator[Any]) -> None:
    for k, _ in enumerate(batches):
        if k == 1:
            break


def failing(batches: Iterator[Any]) -> None:
    def train() -> None:
        for _ in batches:
            1 / 0  # noqa: B018

    with pytest.raises(ZeroDivisionError):
        train()


def collected(batches: Iterator[Any]) -> None:
    next(batches)
    ring: list[Any] = [batches]
    ring.append(ring)
    del batches


@pytest.mark.parametrize("end", [broken_off, failing, collected])
@pytest.mark.parametrize("through", [lambda dataset: iter(StreamingDataLoader(dataset, 8)), iter])
def test_an_iteration_that_ends_early_holds_nothing(shards: Path, tmp_path: Path, end: Any, through: Any) -> None:
    dataset = limited(shards, tmp_path)
    for _ in range(25):
        end(through(dataset))
        gc.collect(0)
    gc.collect()
    assert_nothing_is_held(dataset)
    assert len(list(StreamingDataLoader(dataset, 8))) == NUM_SAMPLES // 8


def test_an_iteration_takes_back_only_what_it_announced(shards: Path, tmp_path: Path) -> None:
    dataset = limited(shards, tmp_path)
    first, second = (iter(StreamingDataLoader(dataset, 8)) for _ in range(2))
    seen = next(first)["id"].tolist()
    process = dataset.reader.shards.pool
    assert process is not None
    alone = dict(process.wanted)
    next(second)
    assert process.wanted.total() > sum(alone.values())
    assert len(process.plans) == 2
    del second
    gc.collect()
    assert dict(process.wanted) == alone
    assert len(process.plans) == 1
    seen += [number for batch in first for number in batch["id"].tolist()]
    assert sorted(seen) == list(range(NUM_SAMPLES))
    assert_nothing_is_held(dataset)


def test_fetches_that_wait_for_a_thread_are_not_begun_once_nobody_needs_them(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go, fetched, get = threading.Event(), [], LocalStore.get

    def slow(store: LocalStore, name: str, to: Any, *others: Any) -> int:
        if name.startswith("shard") and isinstance(to, Path):
            fetched.append(name)
            if not name.startswith("shard.00000"):  # the only one that the first batch needs
                assert go.wait(30)
        return get(store, name, to, *others)

    monkeypatch.setattr(LocalStore, "get", slow)
    dataset = StreamingDataset(remote=shards, local=tmp_path, batch_size=8)
    batches = iter(dataset)
    next(batches)
    process = dataset.reader.shards.pool
    assert process is not None
    assert len(process.fetches) > 4 + 1
    gc.disable()  # nothing may wait for a collection, which a training run may do without
    try:
        batches.close()  # type: ignore[attr-defined]
        go.set()
        assert (process.fetches, dict(process.wanted)) == ({}, {})
    finally:
        gc.enable()
    assert dataset[NUM_SAMPLES - 1]["id"] == NUM_SAMPLES - 1  # behind all that was queued
    assert len(fetched) <= 1 + 4 + 1  # the first, one a thread, and the last


def test_of_several_plans_the_one_that_needs_a_file_first_says_when(shards: Path) -> None:
    snapshot = StreamingDataset(remote=shards).snapshot
    run = RunOrder(snapshot, (StreamWeights(),), OrderConfig.resolve(batch_size=8))
    near, far = (NextUse(run.epoch(0), snapshot) for _ in range(2))
    near.position = 400
    numbers = {"a": 1, "b": 45, "c": 63}
    plans = {id(plan): plan for plan in (near, far)}
    assert [next_use_of_file(numbers, plans, name) for name in "abc"] == [10, 50, 230]
    assert next_use_of_file(numbers, plans, "another dataset's") is None
    assert next_use_of_file(numbers, {}, "a") is None


AT_EXIT = """
import sys
from lightning_stream import StreamingDataLoader, StreamingDataset
dataset = StreamingDataset(remote=sys.argv[1], local=sys.argv[2], cache_limit="1mb", batch_size=8)
batches, samples = iter(StreamingDataLoader(dataset, 8)), iter(dataset)
next(batches), next(samples)
"""


def test_an_iterator_that_lives_at_exit_prints_nothing(shards: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", AT_EXIT, str(shards), str(tmp_path)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_subset_takes_back_what_it_announced(shards: Path, tmp_path: Path) -> None:
    dataset = limited(shards, tmp_path)
    part = dataset.subset(np.arange(0, NUM_SAMPLES, 3))
    for _ in range(10):
        broken_off(iter(StreamingDataLoader(part, 8)))
    gc.collect()
    assert_nothing_is_held(dataset)


def test_a_filter_asks_nothing_about_shards_that_are_open(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To ask how many samples of a shard are left takes longer than to read them."""
    dataset = StreamingDataset(remote=shards, local=tmp_path / "cache")
    reader = dataset.reader.only(Bitmap.of_mask(np.arange(NUM_SAMPLES) != 7))
    asked: list[int] = []
    is_cheaper = PartialShards.is_cheaper

    def counted(partial: PartialShards, shard_id: int, indices: Any) -> bool:
        asked.append(shard_id)
        return is_cheaper(partial, shard_id, indices)

    monkeypatch.setattr(PartialShards, "is_cheaper", counted)
    ids = np.arange(0, NUM_SAMPLES - 1, NUM_SAMPLES // NUM_SHARDS)
    with reader.read_ahead(ids):
        assert len(asked) == NUM_SHARDS
        reader.batch(ids)
    asked.clear()
    with reader.read_ahead(ids):
        assert not asked
