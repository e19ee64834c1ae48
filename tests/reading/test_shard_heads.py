"""The first samples of shards that are still arriving: the server sends only a part of each until the test lets it."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from servers.holding import NUM_SAMPLES, HoldingServer, held_files  # noqa: E402

from lightning_stream import MDSWriter, StreamingDataLoader, StreamingDataset  # noqa: E402
from lightning_stream.cache import ShardCache  # noqa: E402
from lightning_stream.errors import StoreError  # noqa: E402
from lightning_stream.reading import partial  # noqa: E402
from lightning_stream.reading.partial import PartialShards  # noqa: E402
from lightning_stream.reading.shard_table import ReaderConfig  # noqa: E402
from lightning_stream.stores import RetryingStore, open_store  # noqa: E402
from lightning_stream.stores.retry import RetryPolicy  # noqa: E402


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    return held_files(tmp_path_factory.mktemp("data"))


@pytest.fixture
def server(data: dict[str, bytes]) -> Iterator[HoldingServer]:
    with HoldingServer() as server:
        server.objects = dict(data)
        yield server
        server.go.set()


def loader_of(server: HoldingServer, folder: Path, **options: Any) -> StreamingDataLoader:
    names = ("num_workers", "multiprocessing_context")
    workers = {name: options.pop(name) for name in names if name in options}
    settings = {"shuffle": True, "num_canonical_nodes": 2, "window": 2, **options}
    dataset = StreamingDataset(remote=f"{server.url}/raw", local=folder, **settings)
    return StreamingDataLoader(dataset, batch_size=8, **workers)


def rest_of(server: HoldingServer, batches: Any, first: list[Any]) -> None:
    """Let the shards arrive, and check that the whole epoch has each sample once, with its own values."""
    server.go.set()
    found = [*first, *batches]
    for batch in found:
        assert all((x == k % 251).all() for k, x in zip(batch["id"].tolist(), batch["x"].numpy(), strict=True))
    assert sorted(k for batch in found for k in batch["id"].tolist()) == list(range(NUM_SAMPLES))


@pytest.mark.parametrize("workers", [{}, {"num_workers": 2, "multiprocessing_context": "fork"}])
def test_first_batches_come_from_the_beginnings_without_another_request(
    server: HoldingServer, tmp_path: Path, workers: dict[str, Any]
) -> None:
    loader = loader_of(server, tmp_path / "cache", **workers)
    batches = iter(loader)
    first = [next(batches) for _ in range(3)]
    assert not list((tmp_path / "cache").glob("*.mds"))
    for number, batch in enumerate(first):
        assert sorted(batch["id"].tolist()) == sorted(loader.trace(number).ids.tolist())
    assert not any("Range" in one for one in server.headers)
    rest_of(server, batches, first)
    asked = [path for _, path in server.asked if "shard" in path]
    assert sorted(asked) == sorted(set(asked))


def test_bytes_that_were_delivered_and_are_wrong_end_the_run(
    server: HoldingServer, tmp_path: Path, data: dict[str, bytes]
) -> None:
    wrong = {name: bytearray(content) for name, content in data.items() if name.endswith("mds")}
    for content in wrong.values():
        for number in range(1, 13):
            content[number * len(content) // 128] ^= 1  # a value of each sample in the first tenth
        server.wrong = {name: bytes(content) for name, content in wrong.items()}
    batches = iter(loader_of(server, tmp_path / "cache"))
    assert len(next(batches)["id"]) == 8
    server.go.set()
    with pytest.raises(StoreError, match=r"verified file has other bytes.*by_range"):
        list(batches)


def test_wrong_bytes_that_were_not_delivered_are_fetched_again(
    server: HoldingServer, tmp_path: Path, data: dict[str, bytes]
) -> None:
    server.wrong = {name: content[:-9] + b"\0" * 9 for name, content in data.items() if name.endswith("mds")}
    batches = iter(loader_of(server, tmp_path / "cache"))
    rest_of(server, batches, [next(batches)])


def test_a_beginning_that_is_no_shard_is_waited_for(
    server: HoldingServer, tmp_path: Path, data: dict[str, bytes]
) -> None:
    server.wrong = {name: b"\7" * len(content) for name, content in data.items() if name.endswith("mds")}
    timer = threading.Timer(0.5, server.go.set)
    timer.start()
    rest_of(server, iter(loader_of(server, tmp_path / "cache")), [])


@pytest.mark.parametrize("options", [{"predownload": {"by_range": False}}, {"validate_hash": "xxh3_64"}])
def test_nothing_is_read_early_against_the_users_wish(
    server: HoldingServer, tmp_path: Path, options: dict[str, Any]
) -> None:
    came = threading.Event()
    batches = iter(loader_of(server, tmp_path / "cache", **options))
    first: list[Any] = []
    thread = threading.Thread(target=lambda: (first.append(next(batches)), came.set()))
    thread.start()
    assert not came.wait(1)
    server.go.set()
    thread.join(30)
    rest_of(server, batches, first)


def parts_of(cache: ShardCache, entry: Any) -> PartialShards:
    """Parts of shards that must not be opened."""
    shards: Any = SimpleNamespace(
        entry=lambda _: (cache, entry), open=lambda *_: pytest.fail("nothing is opened"), config=ReaderConfig()
    )
    return PartialShards(shards)


def test_shards_that_are_packed_here_or_soon_here_do_not_pay(
    server: HoldingServer, tmp_path: Path, data: dict[str, bytes]
) -> None:
    caches = {part: ShardCache(open_store(f"{server.url}/{part}"), tmp_path / part) for part in ("raw", "packed")}
    entries = {part: cache.index().entry(0) for part, cache in caches.items()}
    assert parts_of(caches["raw"], entries["raw"]).comes_soon(0, 19)
    assert not parts_of(caches["raw"], entries["raw"]).comes_soon(0, entries["raw"].num_samples // 2)
    assert not parts_of(caches["packed"], entries["packed"]).comes_soon(0, 19)
    folder = tmp_path / "local"
    folder.mkdir()
    for name, content in data.items():
        if name.startswith("/raw/"):
            (folder / Path(name).name).write_bytes(content)
    assert not parts_of(ShardCache(open_store(str(folder))), entries["raw"]).comes_soon(0, 19)


def test_a_file_that_comes_in_parts_is_not_read_early(tmp_path: Path) -> None:
    begun, go = threading.Event(), threading.Event()
    out = tmp_path / "out"
    with MDSWriter(out=out, columns={"x": "bytes"}, size_limit=None) as writer:
        for _ in range(64):
            writer.write({"x": os.urandom(1 << 17)})

    class Parts(RetryingStore):
        def connect(self, name: str, begin: int, end: int | None) -> Any:
            if begin:  # all but the first part wait
                begun.set()
                go.wait(30)
            return super().connect(name, begin, end)

    policy = RetryPolicy(parallel_from_bytes=1 << 20, part_bytes=1 << 20)
    cache = ShardCache(Parts(open_store(str(out)), policy), tmp_path / "cache")
    entry = cache.index().entry(0)
    thread = threading.Thread(target=cache.ensure, args=(entry,))
    thread.start()
    assert begun.wait(30)
    parts = parts_of(cache, entry)
    assert parts.comes_soon(0, 1)
    assert parts.arriving(0, np.arange(2), go.is_set) is None
    go.set()
    thread.join(30)
    assert cache.present(entry)


def test_a_file_that_no_longer_grows_is_not_waited_for(
    server: HoldingServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process that fetched it may have been killed: then a thread that waits for the whole shard fetches it."""
    monkeypatch.setattr(partial, "_STALL_S", 0.1)
    cache = ShardCache(open_store(f"{server.url}/raw"), tmp_path / "cache")
    entry = cache.index().entry(0)
    draft = cache.arriving(entry)
    draft.parent.mkdir(parents=True, exist_ok=True)
    draft.write_bytes(bytes(100))
    assert parts_of(cache, entry).arriving(0, np.arange(2), lambda: False) is None
