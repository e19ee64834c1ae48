"""The simulator: laws of what a training run waits for."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from lightning_stream.order import OrderConfig, RunOrder, Snapshot, StreamWeights, World
from lightning_stream.order.downloads import estimate_factor, plan_downloads
from lightning_stream.simulation import (
    QUICK,
    Link,
    Machine,
    Node,
    Part,
    Prices,
    Shards,
    Simulated,
    Training,
    Work,
    simulate,
)
from lightning_stream.simulation.node import NodeModel

FAST = Link(latency_s=0.0, connection_bytes_per_s=1e15)
FREE = Work(
    step_s=0.0, sample_s=0.0, shard_s=0.0, unpack_s_per_mb=0.0, send_s=0.0, start_s=0.0, worker_s=0.0, client_s=0.0
)
MB = 1_000_000


def training(
    sizes: Any = (32,) * 24, *, batch_size: int = 16, nodes: int = 1, devices: int = 1, **settings: Any
) -> Training:
    world = World(0, nodes * devices, devices)
    given = {"shuffle": True, "device_batch_size": batch_size // (nodes * devices), **settings}
    config = OrderConfig.resolve(batch_size=batch_size, world=world, **given)
    run = RunOrder(Snapshot.of([list(sizes)]), [StreamWeights()], config)
    return Training(run, batch_size, batch_size // (nodes * devices), world)


def shards(count: int = 24, num_bytes: int = MB, num_samples: int = 32) -> Shards:
    return replace(Shards.alike(count, num_bytes, num_samples), index_bytes=0)


def simulated(of: Training | None = None, data: Shards | None = None, **given: Any) -> Simulated:
    return simulate(Part(of or training(), data or shards()), Machine(**{"link": FAST, "work": FREE, **given}))


@pytest.mark.parametrize("workers", [0, 1, 4])
@pytest.mark.parametrize("devices", [1, 4])
def test_with_a_perfect_link_an_epoch_takes_the_time_of_its_steps(workers: int, devices: int) -> None:
    found = simulated(training(devices=devices), work=replace(FREE, step_s=0.5), node=Node(num_workers=workers))
    assert found.epoch_s == pytest.approx(found.first_batch_s + 48 * 0.5)
    assert (found.limited_by, found.wait_share, found.gains) == ("training", pytest.approx(0, abs=1e-9), {})
    assert found.samples_per_s == pytest.approx(found.needed_samples_per_s)


def test_one_connection_fetches_shard_after_shard() -> None:
    link = Link(latency_s=0.5, connection_bytes_per_s=4 * MB)
    found = simulated(training(shuffle=False), link=link, node=Node(fetch_threads=1))
    assert found.epoch_s == pytest.approx(2 * 0.5 + 24 * (0.5 + 0.25))  # two requests for the index
    assert found.first_batch_s == pytest.approx(2 * 0.5 + 0.75)


def test_all_connections_share_the_link_of_a_node() -> None:
    link = Link(latency_s=0.0, connection_bytes_per_s=4 * MB, node_bytes_per_s=6 * MB)
    found = simulated(link=link, node=Node(num_workers=2))
    assert found.epoch_s == pytest.approx(24 * MB / (6 * MB))
    shared = simulated(training(nodes=2, devices=1), link=Link(0.0, 4 * MB, 6 * MB, 6 * MB), node=Node(num_workers=2))
    assert shared.epoch_s == pytest.approx(shared.busiest_node_bytes / (3 * MB))


def test_each_limit_is_named() -> None:
    work, two = replace(FREE, step_s=0.01), Node(num_workers=2)
    cases = {
        "latency": {"link": Link(0.5, 1e12)},
        "connection": {"link": Link(0.001, 0.5 * MB)},
        "link": {"link": Link(0.0, 1e12, MB)},
        "workers": {"work": replace(work, sample_s=0.02)},
        "cores": {"work": replace(work, sample_s=0.02), "node": Node(num_workers=8, num_cores=1)},
        "unpacking": {"work": replace(work, unpack_s_per_mb=1.0)},
        "look_ahead": {"link": Link(0.06, 1e12), "node": Node(predownload=0, fetch_threads=16)},
    }
    few = training(canonical_nodes=1, window=1)
    found = {name: simulated(few, **{"work": work, "node": two, **given}).limited_by for name, given in cases.items()}
    assert found == {name: name for name in cases}


def test_a_gain_has_a_bound_where_nothing_else_limits() -> None:
    found = simulated(work=replace(FREE, sample_s=0.001))
    assert (found.limited_by, found.gains["workers"]) == ("workers", 100)
    assert found.finding.startswith("Making batches limits training. ")
    assert "over 100 times as fast" in found.finding
    assert (found.needed_samples_per_s, found.wait_share) == (None, 1.0)


def test_an_epoch_of_one_batch_has_a_finite_rate() -> None:
    found = simulated(training((4,)), shards(1, MB, 4))
    assert found.samples_per_s == pytest.approx(4 / found.epoch_s)


def test_all_shards_that_a_batch_waits_for_are_fetched_at_once() -> None:
    link = Link(latency_s=0.5, connection_bytes_per_s=1e12)
    for nodes, num_rounds in ((1, 1), (4, 1), (12, 1), (24, 2)):
        run = training(batch_size=24, canonical_nodes=nodes, window=1)
        found = simulated(run, link=link, node=Node(start_by_range=False))
        waited = len(run.needs(0, 0, 1)[0][0].shards)
        assert waited == nodes
        assert found.first_batch_s == pytest.approx(2 * 0.5 + num_rounds * 0.5, abs=1e-3)


def test_a_worker_looks_ahead_before_its_threads_find_what_others_fetch() -> None:
    run, data = training((128,) * 24, canonical_nodes=1, window=4), shards(24, MB, 128)
    one, two = (simulated(run, data, link=Link(0.0, MB, 4 * MB), node=Node(num_workers=n)) for n in (1, 2))
    assert two.first_batch_s == pytest.approx(one.first_batch_s, rel=0.01)


@pytest.mark.parametrize("seed", range(5))
def test_more_connections_or_a_faster_link_are_never_slower(seed: int) -> None:
    rng = np.random.default_rng(seed)
    sizes = rng.integers(8, 64, 30)
    data = replace(shards(30), raw_bytes=sizes * 30_000, stored_bytes=sizes * 30_000, num_samples=sizes)
    run, work = training(sizes, seed=seed), replace(FREE, step_s=0.01, sample_s=0.0005)
    link = Link(float(rng.uniform(0.01, 0.3)), float(rng.uniform(0.2, 5)) * MB)
    found = [simulated(run, data, link=link, work=work, node=Node(1, fetch_threads=n)).epoch_s for n in (1, 2, 4, 8)]
    assert found == sorted(found, reverse=True)
    faster = replace(link, connection_bytes_per_s=2 * link.connection_bytes_per_s)
    assert simulated(run, data, link=faster, work=work, node=Node(1)).epoch_s <= found[2]


@pytest.mark.parametrize(("nodes", "devices"), [(1, 1), (1, 4), (2, 2), (4, 1)])
def test_the_bytes_are_those_of_the_order(nodes: int, devices: int) -> None:
    run, data = training(nodes=nodes, devices=devices), shards()
    plan = plan_downloads(run.run, epoch=0, batch_size=16, world=run.world, shard_bytes=data.stored_bytes)
    found = simulated(run, data, node=Node(num_workers=2))
    assert found.download_bytes == plan.num_bytes.sum()
    assert found.busiest_node_bytes == plan.num_bytes.max()
    assert found.download_factor == pytest.approx(plan.factor)
    assert found.fetched_again == 0
    assert found.simulated_share == 1.0


def replayed_fetches(run: Training, limit: int, depth: int) -> int:
    """How often shards are fetched by a loader that has time enough, evicting what is needed last."""
    needs = [list(dict.fromkeys(one)) for one in np.array_split(_shards_in_order(run), run.plan().num_batches)]
    held: list[int] = []
    fetched = 0
    for now in range(len(needs)):
        wanted = list(dict.fromkeys(shard for need in needs[now : now + depth + 1] for shard in need))
        for number, shard in enumerate(wanted):
            if shard in held:
                continue
            # Those that are announced stay open once they are here.
            free = [one for one in held if one not in wanted]
            while len(held) >= limit:
                gone = max(free, key=lambda one: next((k for k in range(now, len(needs)) if one in needs[k]), math.inf))
                held.remove(gone)
                free.remove(gone)
            held.append(shard)
            fetched += 1
            assert number < limit
    return fetched


def _shards_in_order(run: Training) -> list[int]:
    order = run.run.epoch(0)
    return run.run.snapshot.shards_of(order.ids(0, order.num_samples)).tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize("limit", [9, 12, 16, 24])
def test_a_cache_that_is_too_small_fetches_again_as_a_replay_does(limit: int) -> None:
    run = training((32,) * 24, batch_size=4, canonical_nodes=1, window=24)
    node = Node(predownload=4, cache_limit=limit * MB, fetch_threads=1)
    part = Part(run, shards())
    model = NodeModel(part.needs, run, part.shards, Machine(FAST, replace(FREE, step_s=1.0), node))
    model.run()
    assert len(model.step_ends) == part.num_steps
    assert model.num_fetched == replayed_fetches(run, limit, 1)
    assert model.disk.num_fetched_again == model.num_fetched - 24
    assert (model.disk.num_fetched_again > 0) == (limit < 24)
    assert model.disk.peak_bytes <= limit * MB


def test_a_cache_limit_that_the_loader_would_refuse_is_a_problem() -> None:
    found = simulated(node=Node(cache_limit=3 * MB))
    assert found.problem is not None
    assert "would refuse cache_limit=3.0 MB" in found.finding
    assert simulated(node=Node(cache_limit=100 * MB)).problem is None


def test_the_price_is_that_of_bytes_and_requests() -> None:
    found = simulated(prices=Prices(per_gb=0.09, per_1000_requests=0.4))
    assert found.price_usd == pytest.approx(24 * MB / 1e9 * 0.09 + found.num_requests / 1000 * 0.4)
    assert simulated().price_usd is None


def test_idle_connections_split_a_large_shard() -> None:
    link = Link(0.0, 8 * MB)
    assert simulated(
        training((384,), shuffle=False), shards(1, 32 * MB, 384), link=link
    ).first_batch_s == pytest.approx(1)
    alone = Node(fetch_threads=1, start_by_range=False)
    found = simulated(training((384,), shuffle=False), shards(1, 32 * MB, 384), link=link, node=alone)
    assert found.first_batch_s == pytest.approx(4)


def test_a_batch_waits_only_for_the_beginning_of_a_shard_that_arrives_in_order() -> None:
    link = Link(0.0, 8 * MB)
    run, data = training((384,), shuffle=False), shards(1, 32 * MB, 384)
    found = simulated(run, data, link=link, node=Node(fetch_threads=1))
    needed = run.batch_size / 384  # of the shard
    assert 4 * needed <= found.first_batch_s <= 4 * (needed + 1 / 32)
    assert (
        found.num_requests
        == simulated(run, data, link=link, node=Node(fetch_threads=1, start_by_range=False)).num_requests
    )


def test_ranges_make_the_first_batch_earlier() -> None:
    link, data = Link(0.02, 4 * MB), shards(24, 32 * MB)
    plain = simulated(training(), data, link=link, node=Node(start_by_range=False))
    ranged = simulated(training(), data, link=link, node=Node(start_by_range=True))
    assert ranged.first_batch_s < 1 < plain.first_batch_s
    assert ranged.download_bytes > plain.download_bytes


def test_by_default_whole_batches_come_by_range_within_the_requests_to_spare() -> None:
    link, found = Link(0.02, 4 * MB), {}
    for count in (100, 10_000):  # shards, a twentieth of which is the number of requests
        data, run = shards(count, 32 * MB), training((32,) * count, canonical_nodes=16, window=1)
        modes = [simulate(Part(run, data, 0.01), Machine(link, FREE, Node(0, start_by_range=one)))
                 for one in (None, False, True)]  # fmt: skip
        found[count] = [one.first_batch_s for one in modes]
    assert found[100][0] == found[100][1] > found[100][2]
    assert found[10_000][0] == found[10_000][2] < found[10_000][1]


def test_a_resume_in_the_middle_waits_for_its_own_shards_alone() -> None:
    found = simulated(training(shuffle=False), link=Link(0.1, MB), node=Node(fetch_threads=1))
    assert found.resume_s == pytest.approx(found.first_batch_s)
    assert simulated(training((4,)), shards(1, MB, 4)).resume_s is None


def test_the_timeline_has_few_points_and_never_trains_on_what_is_not_ready() -> None:
    found = simulated(training((32,) * 200), shards(200), link=Link(0.05, MB), work=replace(FREE, step_s=0.01))
    line = found.timeline
    assert line is not None
    assert len(line.seconds) <= 500
    assert all(len(one) == len(line.seconds) for one in vars(line).values())
    assert line.seconds == sorted(line.seconds)
    assert all(ready >= trained for ready, trained in zip(line.ready, line.trained, strict=True))
    assert all(needed >= trained for needed, trained in zip(line.needed, line.trained, strict=True))
    assert json.loads(json.dumps(found.to_json()))["timeline"]["trained"][-1] == 6400


@pytest.mark.parametrize("given", [{}, {"link": Link(0.05, 2 * MB)}, {"work": replace(FREE, sample_s=0.01)}])
def test_a_part_of_the_steps_predicts_the_whole_epoch(given: dict[str, Any]) -> None:
    run, data = training((32,) * 400, canonical_nodes=2, window=2), shards(400)
    given = {"work": replace(FREE, step_s=0.02), "node": Node(num_workers=2), **given}
    whole, part = (simulate(Part(run, data, most), Machine(**{"link": FAST, **given})) for most in (1.0, 0.05))
    assert part.simulated_share < 0.5 < whole.simulated_share
    assert part.epoch_s == pytest.approx(whole.epoch_s, rel=0.1)
    assert part.download_bytes == whole.download_bytes


@pytest.mark.parametrize("nodes", [16, 32, 64])
def test_a_point_of_the_curve_is_near_a_simulation_of_all_steps(nodes: int) -> None:
    run = training((1000,) * 2000, batch_size=256 * nodes, nodes=nodes, devices=8)
    machine = Machine(Link(0.05, 20 * MB, 600 * MB), Work(step_s=0.1), Node(num_workers=2))
    data = Shards.alike(2000, 64 << 20, 1000)
    whole, part = (simulate(Part(run, data, most), machine) for most in (4.0, QUICK))
    assert part.simulated_share < 0.4 < whole.simulated_share == 1.0
    assert part.epoch_s == pytest.approx(whole.epoch_s, rel=0.1)


def test_a_hundred_thousand_shards_on_a_thousand_nodes_are_a_few_steps() -> None:
    for nodes in (1, 1000):
        run = training((1000,) * 100_000, batch_size=256 * nodes, nodes=nodes, devices=8)
        found = simulate(Part(run, Shards.alike(100_000, 64 * MB, 1000), QUICK), Machine(node=Node(num_workers=4)))
        assert found.simulated_share < 0.02
        assert found.num_nodes == nodes
        assert found.epoch_s > 0


def test_nodes_that_share_canonical_nodes_download_as_estimated() -> None:
    run = training((100,) * 64, batch_size=64, nodes=8, canonical_nodes=4)
    exact = plan_downloads(run.run, epoch=0, batch_size=64, world=run.world)
    assert estimate_factor(run.run, epoch=0, batch_size=64, world=run.world) == pytest.approx(exact.factor, rel=0.05)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Link(latency_s=-1), "latency_s is 0 or more; found -1"),
        (lambda: Link(connection_bytes_per_s=0), "connection_bytes_per_s is positive; found 0"),
        (lambda: Link(latency_s=math.nan), "latency_s is 0 or more; found nan"),
        (lambda: Node(num_cores=0), "num_cores is positive; found 0"),
        (lambda: Work(step_s=-0.1), "step_s is 0 or more"),
        (lambda: Prices(per_gb=-1), "per_gb is 0 or more"),
    ],
)
def test_impossible_values_are_refused(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
