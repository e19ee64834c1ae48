"""`plan`: its counts are those of real runs, and its bounds follow from the rates."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

TESTS = str(Path(__file__).resolve().parent)
if TESTS not in sys.path:
    sys.path.insert(0, TESTS)

from servers.web import WebServer  # noqa: E402

from lightning_stream import (  # noqa: E402
    MDSWriter,
    StatefulDataLoader,
    StreamingDataLoader,
    StreamingDataset,
    World,
)
from lightning_stream.plan import Plan, Rates, plan  # noqa: E402

FEW: dict[str, Any] = {"window": 2, "num_canonical_nodes": 2, "predownload": 8}
RATES = Rates(
    latency_s=0.03,
    connection_bytes_per_s=1e6,
    node_bytes_per_s=4e6,
    bucket_bytes_per_s=5e6,
    disk_bytes_per_s=9e6,
    step_s=0.01,
    sample_s=0.002,
    unpack_s_per_mb=0.5,
    num_cores=4,
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WebServer]:
    """Datasets of 50 raw and 50 compressed shards."""
    folder = tmp_path_factory.mktemp("data")
    for part, compression in (("raw", None), ("packed", "zstd")):
        columns = {"id": "int", "x": "ndarray:float32:32"}
        with MDSWriter(out=folder / part, columns=columns, size_limit=2500, compression=compression) as writer:
            for number in range(800):
                writer.write({"id": number, "x": np.full(32, number, np.float32)})
    with WebServer() as server:
        for path in folder.rglob("*.*"):
            server.objects[f"/{path.relative_to(folder).as_posix()}"] = path.read_bytes()
        yield server


def loader_of(
    server: WebServer, folder: Path, part: str = "raw", world: World | None = None, workers: int = 0, **options: Any
) -> StreamingDataLoader:
    options["predownload"] = {"samples": options.get("predownload"), "by_range": False}
    dataset = StreamingDataset(f"{server.url}/{part}", local=folder, shuffle=True, **options)
    return StreamingDataLoader(dataset, 8, num_workers=workers, world=world or World())


def rates_of(found: Plan) -> dict[str, float]:
    return {bound.resource: inf if bound.samples_per_s is None else bound.samples_per_s for bound in found.bounds}


@pytest.mark.parametrize("part", ["raw", "packed"])
@pytest.mark.parametrize("nodes", [1, 2])
def test_downloads_and_requests_are_those_of_a_real_run(
    server: WebServer, tmp_path: Path, part: str, nodes: int
) -> None:
    found = plan(loader_of(server, tmp_path / "planned", part, World(0, nodes)))
    server.asked.clear()
    for rank in range(nodes):
        for _ in loader_of(server, tmp_path / str(rank), part, World(rank, nodes)):
            pass
    gets = [path for method, path in server.asked if method == "GET"]
    assert found.num_requests == len(gets)
    assert found.download_bytes == sum(len(server.objects[path]) for path in gets if "shard" in path)
    assert found.busiest_node_bytes * nodes >= found.download_bytes
    assert found.num_steps == len(loader_of(server, tmp_path / "planned", part, World(0, nodes)))


@pytest.mark.parametrize(("part", "workers"), [("raw", 0), ("raw", 3), ("packed", 2)])
def test_the_loader_refuses_a_cache_below_the_need(server: WebServer, tmp_path: Path, part: str, workers: int) -> None:
    need = plan(loader_of(server, tmp_path, part, workers=workers, **FEW)).cache_bytes
    fits = loader_of(server, tmp_path, part, workers=workers, cache_limit=need, **FEW)
    fits.check()
    found = plan(fits, RATES)
    assert found.refusal is None
    raw_bytes = plan(loader_of(server, tmp_path / "raw")).download_bytes
    kept = found.download_bytes * need / raw_bytes
    assert found.later_bytes == pytest.approx(max(0, found.download_bytes - kept), rel=0.01)
    refused = loader_of(server, tmp_path, part, workers=workers, cache_limit=need - 1, **FEW)
    with pytest.raises(ValueError, match="cache_limit is") as error:
        refused.check()
    found = plan(refused, RATES)
    assert found.refusal == str(error.value)
    assert found.limit is not None
    assert (found.limit.resource, found.limit.samples_per_s) == ("cache", 0.0)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    ("name", "resources"),
    [
        ("latency_s", {"connections", "look-ahead"}),
        ("connection_bytes_per_s", {"connections", "look-ahead"}),
        ("node_bytes_per_s", {"link of a node"}),
        ("bucket_bytes_per_s", {"bucket"}),
        ("disk_bytes_per_s", {"disk"}),
        ("step_s", {"training process"}),
        ("sample_s", {"cores", "workers", "training process"}),
        ("unpack_s_per_mb", {"cores", "connections", "look-ahead"}),
        ("num_cores", {"cores"}),
    ],
)
def test_a_better_resource_raises_its_bounds_and_no_others(
    server: WebServer, tmp_path: Path, name: str, resources: set[str], workers: int
) -> None:
    loader = loader_of(server, tmp_path, "packed", workers=workers, **FEW)
    better = getattr(RATES, name) * (2 if getattr(Rates(), name) else 0.5)
    before, after = rates_of(plan(loader, RATES)), rates_of(plan(loader, replace(RATES, **{name: better})))
    unlike = {"workers"} if not workers else {"training process"} if name == "sample_s" else set()
    raised = {resource for resource, rate in after.items() if rate > before[resource]}
    assert raised == resources - unlike
    assert all(after[resource] == before[resource] for resource in before.keys() - raised)


def test_the_limit_is_the_lowest_bound_and_unknown_without_rates(server: WebServer, tmp_path: Path) -> None:
    loader = loader_of(server, tmp_path, "packed", workers=1, **FEW)
    found = plan(loader, RATES)
    assert found.limit is not None
    assert found.limit.samples_per_s == min(rates_of(found).values())
    assert found.limit.resource in found.finding
    free = plan(loader)
    assert (free.limit, free.later_bound, free.first_batch_s) == (None, None, None)
    assert all("not given" in bound.why for bound in free.bounds)
    for name, value in vars(RATES).items():  # one that is given bounds at most what it is a part of
        if value != getattr(Rates(), name):
            alone = rates_of(plan(loader, Rates(**{name: value})))
            assert all(rate >= rates_of(found)[resource] for resource, rate in alone.items())


def test_more_workers_and_a_longer_look_ahead_allow_more(server: WebServer, tmp_path: Path) -> None:
    rates = [rates_of(plan(loader_of(server, tmp_path, workers=number, **FEW), RATES)) for number in (1, 2, 4)]
    for resource in ("workers", "connections", "look-ahead"):
        assert rates[0][resource] <= rates[1][resource] <= rates[2][resource]
    assert rates[2]["workers"] == pytest.approx(4 * rates[0]["workers"])
    far = rates_of(plan(loader_of(server, tmp_path, workers=1, **{**FEW, "predownload": 64}), RATES))
    assert far["look-ahead"] > rates[0]["look-ahead"]


@pytest.mark.parametrize("nodes", [1, 10, 100, 1000])
def test_any_number_of_nodes_is_planned(server: WebServer, tmp_path: Path, nodes: int) -> None:
    dataset = StreamingDataset(f"{server.url}/raw", local=tmp_path, shuffle=True)
    found = plan(StreamingDataLoader(dataset, 1, world=World(0, nodes)), RATES)
    assert (found.num_nodes, found.global_batch_size, found.num_steps) == (nodes, nodes, -(-800 // nodes))
    assert found.download_factor > 0.99  # an estimate may lack a few bytes of a whole one
    assert found.busiest_node_bytes * nodes >= found.download_bytes
    assert found.is_estimated == (nodes == 1000)


def test_what_cannot_be_planned_is_refused(server: WebServer, tmp_path: Path) -> None:
    dataset = StreamingDataset(f"{server.url}/raw", local=tmp_path)
    with pytest.raises(ValueError, match="an epoch must have a batch"):
        plan(StreamingDataLoader(dataset, 900, tail="drop"))
    for wrong in ({"latency_s": -1.0}, {"node_bytes_per_s": 0.0}, {"step_s": float("nan")}, {"usd_per_gb": -1.0}):
        with pytest.raises(ValueError, match="is above 0"):
            Rates(**wrong)
    with pytest.raises(ValueError, match="sample_s is above 0 and finite; found inf"):
        Rates(sample_s=inf)
    text: Any = "0.02"
    with pytest.raises(ValueError, match=r"latency_s must be a number; found '0\.02'"):
        Rates(latency_s=text)


def test_samples_of_one_shard_are_not_limited_by_the_look_ahead(server: WebServer, tmp_path: Path) -> None:
    dataset = StreamingDataset(f"{server.url}/raw", local=tmp_path).subset(range(3))
    found = plan(StreamingDataLoader(dataset, 1), RATES)
    assert found.num_requests == 1 + 2  # of the shard, and of the index
    assert "look-ahead" not in [bound.resource for bound in found.bounds]


def test_a_map_style_dataset_is_planned_without_downloads() -> None:
    found = plan(StatefulDataLoader(list(range(50)), 4), Rates(step_s=0.1))
    assert (found.num_steps, found.download_bytes) == (13, 0)
    assert found.limit is not None
    assert found.limit.samples_per_s == pytest.approx(50 / 1.3)
