"""Under a cache limit the order decides what is evicted, and nothing is fetched twice."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from lightning_stream import MDSWriter, StreamingDataLoader, StreamingDataset  # noqa: E402
from lightning_stream.loading.checks import cache_need  # noqa: E402
from lightning_stream.order import OrderConfig, RunOrder, Snapshot, StreamWeights  # noqa: E402
from lightning_stream.questions.cache_need import ReadAhead  # noqa: E402
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
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, window: int, nodes: int, seed: int
) -> None:
    fetched: Counter[str] = Counter()
    get = LocalStore.get

    def counted(store: LocalStore, name: str, to: Any, *others: Any) -> int:
        fetched[name] += isinstance(to, Path)  # it calls itself with a file
        return get(store, name, to, *others)

    monkeypatch.setattr(LocalStore, "get", counted)
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
