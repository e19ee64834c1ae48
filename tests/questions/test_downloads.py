"""The predicted downloads of each node are those of its ranks' shares, and few."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.orders import run_over

from lightning_stream.order import BatchPlan, World
from lightning_stream.order.buckets import LengthBuckets
from lightning_stream.questions import plan_downloads
from lightning_stream.questions.downloads import better_canonical_nodes, estimate_factor, warning_about


def run_of(sizes, batch_size, **arguments):
    return run_over(sizes, batch_size=batch_size, **{"shuffle": True} | arguments)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.data())
def test_each_nodes_share_is_predicted_exactly(data):
    nodes, per_node = data.draw(st.sampled_from([(1, 2), (2, 1), (3, 2), (4, 2), (2, 4)]))
    ranks = nodes * per_node
    replication = data.draw(st.sampled_from([r for r in (1, 2, 3, 4) if ranks % r == 0]))
    batch_size = ranks // replication * data.draw(st.sampled_from([2, 4]))
    sizes = data.draw(st.lists(st.lists(st.integers(1, 30), min_size=1, max_size=12), min_size=1, max_size=3))
    method = data.draw(st.sampled_from(["random", "stratified", "per_stream", "device_per_stream"]))
    tail = data.draw(st.sampled_from(["pad", "drop", "exact"]))
    run = run_of(sizes, batch_size, batching_method=method, device_batch_size=2, shuffle=data.draw(st.booleans()))
    fetched = [set() for _ in range(World(0, ranks, per_node, replication).num_nodes)]
    for rank in range(ranks):
        world = World(rank, ranks, per_node, replication)
        plan = BatchPlan(run.epoch(0), batch_size=batch_size, world=world, tail=tail)
        for k in range(plan.num_batches):
            fetched[world.node].update(run.snapshot.shards_of(plan.share(k).ids).tolist())
    predicted = plan_downloads(run, epoch=0, batch_size=batch_size, world=world, tail=tail)
    assert [set(shards.tolist()) for shards in predicted.shards] == fetched


def test_each_nodes_share_is_predicted_exactly_for_batches_that_differ_in_size():
    lengths = np.random.default_rng(0).integers(1, 90, 600)
    buckets = LengthBuckets.resolved(lengths, batch_size=8, window=160, batch_tokens=1600)
    run = run_over([[10] * 60], lengths=lengths, batch_size=8, shuffle=True, canonical_nodes=4, buckets=buckets)
    worlds = [World(rank, 4, 2) for rank in range(4)]
    fetched = [set(), set()]
    for world in worlds:
        plan = BatchPlan(run.epoch(0), batch_size=8, world=world)
        for k in range(plan.num_batches):
            fetched[world.node].update(run.snapshot.shards_of(plan.share(k).ids).tolist())
    assert len({plan.bounds(k)[1] - plan.bounds(k)[0] for k in range(plan.num_batches)}) > 2
    predicted = plan_downloads(run, epoch=0, batch_size=8, world=worlds[0])
    assert [set(shards.tolist()) for shards in predicted.shards] == fetched
    assert 1 <= estimate_factor(run, epoch=0, batch_size=8, world=worlds[0]) <= 2


@pytest.mark.parametrize("nodes", [1, 2, 4, 8, 16])
def test_each_shard_is_fetched_once_but_for_those_on_borders(nodes):
    sizes = np.random.default_rng(0).integers(20, 40, 200)
    run = run_of([sizes], 128)
    plan = plan_downloads(run, epoch=2, batch_size=128, world=World(0, nodes * 8, 8), tail="drop")
    fetched = np.concatenate(plan.shards)
    assert len(np.unique(fetched)) == 200
    assert len(fetched) - 200 <= nodes - 1
    assert (plan.warning is None) == (plan.factor <= 1.05)
    assert plan.factor <= 1 + (nodes - 1) * sizes.max() / sizes.sum()


def test_much_double_fetching_is_named_with_the_better_number():
    run = run_of([[30] * 200], 96, canonical_nodes=4)
    plan = plan_downloads(run, epoch=0, batch_size=96, world=World(0, 24, 2))
    assert plan.factor > 2
    assert "num_canonical_nodes=12 fits best" in plan.warning


def test_a_batch_size_that_fits_no_number_is_named():
    run = run_of([[30] * 200], 64)
    plan = plan_downloads(run, epoch=0, batch_size=64, world=World(0, 6, 1, 3))
    assert plan.warning is None
    plan = plan_downloads(run_of([[30] * 200], 10), epoch=0, batch_size=10, world=World(0, 10, 1, 5))
    assert plan.warning is None
    uneven = plan_downloads(run_of([[30] * 200], 35), epoch=0, batch_size=35, world=World(0, 7, 1), tail="drop")
    assert uneven.warning is None
    straddling = plan_downloads(run_of([[30] * 200], 4), epoch=0, batch_size=4, world=World(0, 12, 4, 3))
    assert "multiple of 3" in straddling.warning


def test_index_order_needs_everything_everywhere():
    run = run_of([[30] * 200], 64, shuffle=False)
    plan = plan_downloads(run, epoch=0, batch_size=64, world=World(0, 8, 4))
    assert "set shuffle=True" in plan.warning


def test_bytes_are_those_of_the_shards():
    run = run_of([[30] * 20], 8)
    sizes = np.arange(20) + 100
    plan = plan_downloads(run, epoch=0, batch_size=8, world=World(0, 2, 1), shard_bytes=sizes)
    assert plan.union_bytes == sizes.sum()
    assert plan.num_bytes.tolist() == [sizes[shards].sum() for shards in plan.shards]


@pytest.mark.parametrize("method", ["random", "stratified", "per_stream"])
@pytest.mark.parametrize(("nodes", "canonical"), [(2, 16), (4, 16), (8, 16), (3, 16), (16, 8)])
def test_the_factor_is_estimated_from_a_few_batches(method, nodes, canonical):
    run = run_of([[30] * 300] * 3, 96 * 8, batching_method=method, canonical_nodes=canonical)
    world = World(0, nodes * 2, 2)
    arguments = {"batch_size": 96 * 8, "world": world}
    estimate = estimate_factor(run, epoch=0, **arguments)
    assert estimate == pytest.approx(plan_downloads(run, epoch=0, tail="drop", **arguments).factor, rel=0.15)
    assert (warning_about(run, factor=estimate, **arguments) is None) == (estimate <= 1.05)


def test_mixtures_are_given_more_canonical_nodes():
    assert better_canonical_nodes(256, 4) == 16
    assert better_canonical_nodes(256, 4, mixed=True) == 128
    assert better_canonical_nodes(96, 32) == 32
    assert better_canonical_nodes(35, 4) is None
