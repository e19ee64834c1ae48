"""A forecast of what a run will need, compared with the requests that a server counts."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from servers.web import WebServer  # noqa: E402

from lightning_stream import MDSWriter, Packing, StreamingDataLoader, StreamingDataset  # noqa: E402
from lightning_stream.loading.checks import cache_need  # noqa: E402
from lightning_stream.order.snapshot import max_active  # noqa: E402
from lightning_stream.questions.cache_need import ReadAhead  # noqa: E402

NUM_SAMPLES = 1200
OPTIONS: dict[str, Any] = {"shuffle": True, "window": 3, "num_canonical_nodes": 2, "predownload": 8}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WebServer]:
    folder = tmp_path_factory.mktemp("data")
    for part, compression in (("raw", None), ("packed", "zstd")):
        options: dict[str, Any] = {"size_limit": 1000, "compression": compression}
        with MDSWriter(out=folder / part, columns={"id": "int", "x": "ndarray:float32:8"}, **options) as writer:
            for number in range(NUM_SAMPLES):
                writer.write({"id": number, "x": np.full(8, number, np.float32)})
    lengths = np.minimum(np.random.default_rng(0).lognormal(3, 1, NUM_SAMPLES), 200).astype(int)
    columns = {"id": "int", "tokens": "ndarray:int32"}
    with MDSWriter(out=folder / "texts", columns=columns, size_limit=1000, lengths={"tokens": len}) as writer:
        for number, length in enumerate(lengths):
            writer.write({"id": number, "tokens": np.ones(length + 1, np.int32)})
    with WebServer() as server:
        for path in folder.rglob("*.*"):
            server.objects[f"/{path.relative_to(folder).as_posix()}"] = path.read_bytes()
        yield server


def loader(server: WebServer, folder: Path, part: str, workers: int, **options: Any) -> StreamingDataLoader:
    dataset = StreamingDataset(remote=f"{server.url}/{part}", local=folder, **{**OPTIONS, **options})
    return StreamingDataLoader(dataset, 4, num_workers=workers)


def needed(server: WebServer, folder: Path, part: str, workers: int) -> int:
    """What a refusal says that it takes."""
    with pytest.raises(ValueError, match=r"active shards take .* read ahead .*, but cache_limit is 2\.0 kB") as caught:
        next(iter(loader(server, folder, part, workers, cache_limit=2000)))
    found = re.search(r"cache_limit=(\d+)", str(caught.value))
    assert found is not None
    return int(found[1])


@pytest.mark.parametrize(("part", "workers"), [("raw", 0), ("raw", 3), ("packed", 2)])
def test_with_the_limit_that_the_error_names_each_shard_is_fetched_once_by_all_workers(
    server: WebServer, tmp_path: Path, part: str, workers: int
) -> None:
    limit = needed(server, tmp_path / "small", part, workers)
    reading = loader(server, tmp_path / "cache", part, workers, cache_limit=limit)
    sizes = reading.dataset.reader.indexes[0].raw_bytes
    assert limit < 0.5 * sizes.sum()
    server.asked.clear()
    seen = [number for batch in reading for number in batch["id"].tolist()]
    assert sorted(seen) == list(range(NUM_SAMPLES))
    gets = Counter(path for method, path in server.asked if method == "GET" and "shard" in path)
    assert (len(gets), set(gets.values())) == (len(sizes), {1})


WINDOWS = {
    "batches of one size": ({"bucket_by": {"lengths": "tokens", "window": 40}}, 4),
    "batches of a budget": ({"batch_tokens": {"tokens": 600, "multiple": 2}, "bucket_by": {"window": 150}}, None),
    "packed rows": ({"pack": Packing("tokens", row_length=300, window=20)}, 4),
}


@pytest.mark.parametrize(
    ("name", "workers"),
    [
        *((name, 0) for name in WINDOWS),
        *(pytest.param(name, 2, marks=[] if name == "packed rows" else pytest.mark.nightly) for name in WINDOWS),
    ],
)
def test_the_limit_that_the_error_names_holds_the_shards_of_windows_of_documents(
    server: WebServer, tmp_path: Path, name: str, workers: int
) -> None:
    options, size = WINDOWS[name]

    def load(limit: int) -> StreamingDataLoader:
        dataset = StreamingDataset(f"{server.url}/texts", local=tmp_path, cache_limit=limit, **OPTIONS, **options)
        return StreamingDataLoader(dataset, size, num_workers=workers, collate_fn=len)

    with pytest.raises(ValueError, match="cache_limit is") as caught:
        next(iter(load(3000)))
    found = re.search(r"cache_limit=(\d+)", str(caught.value))
    assert found is not None
    reading = load(int(found[1]))
    sizes = reading.dataset.reader.indexes[0].raw_bytes
    assert int(found[1]) < 0.7 * sizes.sum()
    server.asked.clear()
    assert sum(1 for _ in reading) > 20
    gets = Counter(path for method, path in server.asked if method == "GET" and "shard" in path)
    assert (len(gets), set(gets.values())) == (len(sizes), {1})


def test_a_byte_less_is_refused_with_settings_that_fit(server: WebServer, tmp_path: Path) -> None:
    limit = needed(server, tmp_path / "small", "raw", 2)
    cases: list[tuple[dict[str, Any], str]] = [
        ({}, "window"),
        ({"predownload": 200}, "predownload"),
        ({"forget": [3, 14]}, "window"),
    ]
    for asked, says in cases:
        with pytest.raises(ValueError, match=rf"cache_limit is .*[ ,]{says}=\d+") as caught:
            next(iter(loader(server, tmp_path / "less", "raw", 2, cache_limit=limit - 1, **asked)))
        found = re.search(rf"{says}=(\d+)", str(caught.value))
        assert found is not None
        fitting = {says: int(found[1])}
        next(iter(loader(server, tmp_path / "less", "raw", 2, cache_limit=limit - 1, **asked | fitting)))


@pytest.mark.parametrize("algorithm", [None, "py1e", "py1br"])
def test_the_need_is_that_of_the_order_itself(server: WebServer, tmp_path: Path, algorithm: str | None) -> None:
    options = {"shuffle_algo": algorithm, "shuffle_block_size": 100} if algorithm else {}
    reading = loader(server, tmp_path, "raw", 0, **options)
    settings, ahead = reading.settings(), ReadAhead(2, 8, 2)
    run = reading.dataset.order(settings.order)
    shards = run.snapshot.shards_of(run.epoch(0).ids(0, NUM_SAMPLES))
    need = cache_need(reading.dataset.reader, run, settings, ahead)
    true = max_active(shards, ahead.span * 4)
    assert true <= need.active_shards + need.entering_shards <= true + 2
