"""Under a cache limit the order decides what is evicted, and nothing is fetched twice."""

from __future__ import annotations

import math
import time
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from lightning_stream import MDSWriter, StreamingDataLoader, StreamingDataset  # noqa: E402
from lightning_stream.loading.checks import cache_need  # noqa: E402
from lightning_stream.order import OrderConfig, RunOrder, Snapshot, StreamWeights  # noqa: E402
from lightning_stream.questions.cache_need import ReadAhead  # noqa: E402
from lightning_stream.reading import look_ahead  # noqa: E402
from lightning_stream.reading.next_use import NextUse  # noqa: E402
from lightning_stream.stores import LocalStore  # noqa: E402

NUM_SAMPLES = 960


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shards")
    with MDSWriter(out=str(folder), columns={"id": "int", "x": "bytes"}, size_limit=3000) as writer:
        for number in range(NUM_SAMPLES):
            writer.write({"id": number, "x": bytes(100)})
    return folder


@pytest.fixture
def fetched(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each file is fetched."""
    found: Counter[str] = Counter()
    get = LocalStore.get

    def counted(store: LocalStore, name: str, to: Any, *others: Any) -> int:
        found[name] += isinstance(to, Path)  # it calls itself with a file
        return get(store, name, to, *others)

    monkeypatch.setattr(LocalStore, "get", counted)
    return found


@pytest.mark.parametrize("horizon", [10_000, 64])
def test_the_next_use_is_the_orders(horizon: int) -> None:
    snapshot = Snapshot.of([[20] * 30])
    config = OrderConfig.resolve(batch_size=8, shuffle=True, window=2)
    order = RunOrder(snapshot, (StreamWeights(),), config).epoch(0)
    of_position = snapshot.shards_of(order.ids(0, 600))
    next_use = NextUse(order, snapshot, horizon)
    for at in range(0, 600, 40):
        next_use.position = at
        for shard in range(30):
            later = np.flatnonzero(of_position[at:] == shard) + at
            wanted = float(later[0]) if len(later) else math.inf
            assert next_use(shard) == (wanted if wanted < at + horizon // 2 else next_use(shard))


@pytest.mark.parametrize(("window", "nodes", "seed"), [(8, 1, 1), (2, 4, 2)])
def test_no_shard_is_fetched_twice_where_the_limit_holds_what_is_active(
    shards: Path, tmp_path: Path, fetched: Counter[str], window: int, nodes: int, seed: int
) -> None:
    options: dict[str, Any] = {
        "shuffle": True, "shuffle_seed": seed, "window": window, "num_canonical_nodes": nodes, "predownload": 8,
    }  # fmt: skip
    free = StreamingDataset(remote=shards, local=tmp_path / "free", **options)
    settings = StreamingDataLoader(free, 4).settings()
    # Evicting what was used longest ago would fetch some twice.
    limit = cache_need(free.reader, free.order(settings.order), settings, ReadAhead(1, 2, 0)).num_bytes
    assert limit < 0.5 * free.reader.indexes[0].raw_bytes.sum()
    dataset = StreamingDataset(remote=shards, local=tmp_path / "cache", cache_limit=limit, **options)
    fetched.clear()
    seen = [number for batch in StreamingDataLoader(dataset, 4) for number in batch["id"].tolist()]
    assert sorted(seen) == list(range(NUM_SAMPLES))
    del fetched["index.json"]
    assert set(fetched.values()) == {1}
    assert sum(path.stat().st_size for path in (tmp_path / "cache").glob("*.mds")) <= limit


def test_the_next_use_reaches_into_the_next_epoch_and_what_was_read_in_this_one_is_done_with() -> None:
    snapshot = Snapshot.of([[20] * 30])
    run = RunOrder(snapshot, (StreamWeights(),), OrderConfig.resolve(batch_size=8, shuffle=True, window=2))
    order = replace(run.epoch(0), following=run.following(0))
    of_position, of_next = (snapshot.shards_of(run.epoch(epoch).ids(0, 600)) for epoch in (0, 1))
    near, far = NextUse(order, snapshot, 100), NextUse(order, snapshot)
    for at in (0, 200, 560):
        near.position = at
        far.position = at
        for shard in range(30):
            later = np.flatnonzero(np.append(of_position, of_next)[at:] == shard) + at
            assert far(shard) == later[0]
            if later[0] > at + 100 and at < 500:
                assert near(shard, last_used=0.0) == at + 100, "it is still to come"
                assert near(shard, last_used=time.time() + 1) == math.inf, "it is done with"


def test_what_a_slower_worker_may_still_read_is_done_with_last() -> None:
    snapshot = Snapshot.of([[20] * 30])
    run = RunOrder(snapshot, (StreamWeights(),), OrderConfig.resolve(batch_size=8, shuffle=True, window=2))
    order = replace(run.epoch(0), following=run.following(0))
    of_position = snapshot.shards_of(run.epoch(0).ids(0, 600))
    next_use = NextUse(order, snapshot, lag=100)
    next_use.position = 400
    last = {shard: int(np.flatnonzero(of_position == shard)[-1]) for shard in range(30)}
    behind = sorted((shard for shard in last if 300 <= last[shard] < 400), key=last.__getitem__)
    assert len(behind) > 3
    values = [next_use(shard) for shard in behind]
    assert sorted(values, reverse=True) == values, "what was used first is evicted first"
    assert all(600 <= value < 601 for value in values)
    assert all(next_use(shard) >= 600 for shard in last if last[shard] < 300)
    assert all(next_use(shard) < 600 for shard in last if last[shard] >= 400)


@pytest.mark.parametrize("horizon", [1 << 20, 200])
@pytest.mark.parametrize("share", [0.5, 0.83])
def test_a_small_cache_fetches_what_it_must(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fetched: Counter[str], share: float, horizon: int
) -> None:
    """The bound: an epoch fetches what was not there at its begin."""
    monkeypatch.setattr(look_ahead, "NextUse", partial(NextUse, horizon=horizon))
    files = [*shards.glob("*.mds")]
    kept = int(share * len(files))
    limit = kept * max(path.stat().st_size for path in files)
    options: dict[str, Any] = {"shuffle": True, "shuffle_seed": 7, "window": 4, "num_canonical_nodes": 1}
    dataset = StreamingDataset(remote=shards, local=tmp_path / "cache", cache_limit=limit, predownload=8, **options)
    loader = StreamingDataLoader(dataset, 4)
    del fetched["index.json"]
    for _ in range(3):
        assert sum(len(batch["id"]) for batch in loader) == NUM_SAMPLES
    assert fetched.total() <= 1.05 * (len(files) + 2 * (len(files) - kept))
