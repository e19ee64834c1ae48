"""The laws of the order, each a property over random data, mixtures and worlds."""

from __future__ import annotations

import copy
import json
import pickle
import tracemalloc
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from support.orders import run_over

from lightning_stream.order import (
    BatchPlan,
    OrderConfig,
    Position,
    RunOrder,
    Snapshot,
    StreamWeights,
    World,
    choose_per_stream,
)

METHODS = ("random", "stratified", "per_stream", "device_per_stream")
law = settings(max_examples=50, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


@dataclass(frozen=True)
class Case:
    """A run, and the world it starts in."""

    run: RunOrder
    batch_size: int
    device_batch_size: int
    accumulate: int
    num_replicas: int
    ranks_per_node: int
    replication: int

    def worlds(self) -> list[World]:
        """One world per replica."""
        ranks = self.num_replicas * self.replication
        step = self.replication
        return [World(rank, ranks, self.ranks_per_node, self.replication) for rank in range(0, ranks, step)]


@st.composite
def weights_of(draw, num_streams):
    kind = draw(st.sampled_from(["none", "repeat", "choose", "proportion"]))
    amounts = {
        "repeat": st.sampled_from([0.5, 1, 1.7, 3]),
        "choose": st.integers(1, 90),
        "proportion": st.floats(0.1, 9),
    }
    if kind == "none":
        return [StreamWeights()] * num_streams
    return [StreamWeights(**{kind: draw(amounts[kind])}) for _ in range(num_streams)]


@st.composite
def cases(draw, methods=METHODS, most_nodes=64):
    nodes, ranks_per_node = draw(st.integers(1, most_nodes)), draw(st.integers(1, 8))
    ranks = nodes * ranks_per_node
    replication = draw(st.sampled_from([r for r in range(1, min(ranks, 16) + 1) if ranks % r == 0]))
    replicas = ranks // replication
    device, accumulate = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    batch_size = device * accumulate * replicas
    sizes = draw(st.lists(st.lists(st.integers(0, 60), min_size=1, max_size=8), min_size=1, max_size=3))
    assume(all(sum(one) for one in sizes))
    run = run_over(
        sizes,
        draw(weights_of(len(sizes))),
        batch_size=batch_size,
        shuffle=draw(st.sampled_from([True, True, False])),
        seed=draw(st.integers(0, 2**63 - 1)),
        canonical_nodes=draw(st.sampled_from([None, None, 1, 3, 8])),
        window=draw(st.sampled_from([None, None, 1, 2, 5])),
        quick_start=draw(st.booleans()),
        batching_method=draw(st.sampled_from(methods)),
        device_batch_size=device,
        sampling_method=draw(st.sampled_from(["balanced", "fixed"])),
        sampling_granularity=draw(st.sampled_from([1, 7, 100])),
    )
    return Case(run, batch_size, device, accumulate, replicas, ranks_per_node, replication)


@st.composite
def other_world(draw, case):
    """Another world the same global batch divides over: (replicas, samples per micro-batch, accumulation)."""
    unit = case.run.config.device_block or 1
    replicas = draw(st.sampled_from([r for r in range(1, 65) if case.batch_size % (r * unit) == 0]))
    share = case.batch_size // replicas
    device = draw(st.sampled_from([d for d in range(unit, share + 1, unit) if share % d == 0]))
    return replicas, device, share // device


def plans(case, epoch, tail, start=0, batch_size=None, num_replicas=None):
    worlds = case.worlds() if num_replicas is None else [World(r, num_replicas, 1) for r in range(num_replicas)]
    size = batch_size or case.batch_size
    return [BatchPlan(case.run.epoch(epoch), batch_size=size, world=w, tail=tail, start=start) for w in worlds]


tails = st.sampled_from(["pad", "drop", "exact"])


@law
@given(cases(), st.integers(0, 3), tails)
def test_law_1_every_drawn_position_is_in_exactly_one_global_batch(case, epoch, tail):
    order = case.run.epoch(epoch)
    ids = order.ids(0, order.num_samples)
    all_plans = plans(case, epoch, tail)
    seen = []
    for k in range(all_plans[0].num_batches):
        shares = [plan.share(k) for plan in all_plans]
        delivered = np.concatenate([share.positions[~share.filler] for share in shares])
        assert sorted(delivered.tolist()) == list(range(*all_plans[0].bounds(k)))
        for share in shares:
            assert np.array_equal(ids[share.positions], share.ids)
        seen.append(delivered)
    seen = np.sort(np.concatenate(seen)) if seen else np.empty(0)
    assert np.array_equal(seen, np.arange(all_plans[0].end))
    if tail != "drop":
        assert len(seen) == order.num_samples
    elif case.run.config.batching_method in ("random", "stratified"):
        assert len(seen) == order.num_samples // case.batch_size * case.batch_size


@law
@given(cases(), st.integers(0, 3), tails, st.data())
def test_shares_planned_together_are_those_planned_one_by_one(case, epoch, tail, data):
    for plan in plans(case, epoch, tail)[:3]:
        ks = data.draw(st.sets(st.integers(0, plan.num_batches - 1))) if plan.num_batches else set()
        for k, share in zip(sorted(ks), plan.shares(sorted(ks)), strict=True):
            alone = plan.share(k)
            for name in ("ids", "positions", "filler"):
                assert np.array_equal(getattr(share, name), getattr(alone, name))
            assert (share.device_block, share.ends) == (alone.device_block, alone.ends)


@law
@given(cases(), st.integers(0, 3))
def test_law_1_an_epoch_delivers_every_sample_as_often_as_drawn(case, epoch):
    order, snapshot = case.run.epoch(epoch), case.run.snapshot
    ids = order.ids(0, order.num_samples)
    counts = np.bincount(ids, minlength=snapshot.num_samples)
    ends = np.cumsum(snapshot.stream_samples)
    per_stream = choose_per_stream(snapshot, case.run.weights, None, case.run.config.seed)
    for chosen, end, size in zip(per_stream, ends, snapshot.stream_samples, strict=True):
        mine = counts[end - size : end]
        assert mine.sum() == chosen
        assert mine.min() >= chosen // size
        assert mine.max() <= -(-chosen // size)


@law
@given(st.data())
def test_law_2_the_sequence_of_global_batches_is_the_same_in_every_world(data):
    case = data.draw(cases())
    replicas, _, _ = data.draw(other_world(case))
    tail = data.draw(st.sampled_from(["pad", "drop"]))
    epoch, workers = data.draw(st.integers(0, 3)), data.draw(st.integers(1, 8))
    here, there = plans(case, epoch, tail), plans(case, epoch, tail, num_replicas=replicas)
    assert here[0].num_batches == there[0].num_batches
    fresh = [pickle.loads(pickle.dumps(case.run)).epoch(epoch) for _ in range(workers)]
    for k in range(here[0].num_batches):
        # each worker of a rank reads every workers-th batch alone, in a process of its own
        order = fresh[k % workers]
        again = BatchPlan(order, batch_size=case.batch_size, world=there[0].world, tail=tail)
        assert np.array_equal(here[0].ids(k), again.ids(k))
        union = np.concatenate([plan.share(k).ids[~plan.share(k).filler] for plan in there])
        assert sorted(union.tolist()) == sorted(here[0].ids(k).tolist())


@law
@given(st.data())
def test_law_2_a_run_stopped_anywhere_goes_on_in_any_other_world_with_any_other_batch(data):
    case = data.draw(cases())
    method = case.run.config.batching_method
    wanted = [case.run.epoch(e).ids(0, case.run.epoch(e).num_samples) for e in range(2)]
    position = Position.start(case.run, batch_size=case.batch_size, tail="pad")
    got: list[list[np.ndarray]] = [[], []]
    while position.epoch < 2:
        replicas, _, _ = data.draw(other_world(case))
        scale = data.draw(st.integers(1, 3)) if method != "per_stream" else 1
        world, size = World(0, replicas, 1), case.batch_size * scale
        tail = data.draw(st.sampled_from(["pad", "exact"]))
        state = json.loads(json.dumps(position.to_state()))
        position = Position.from_state(state)
        assert position.check(case.run) == []
        position = position.rebased_on(case.run, batch_size=size, tail=tail, world=world)
        if position.epoch == 2:
            break
        plan = BatchPlan(
            case.run.epoch(position.epoch), batch_size=size, world=world, tail=tail, start=position.position
        )
        assert plan.num_batches > 0, "an epoch was empty after loading"
        for k in range(data.draw(st.integers(1, plan.num_batches))):
            got[position.epoch].append(plan.ids(k))
            position = position.advanced(case.run, plan.bounds(k)[1])
    for one, all_ids in zip(got, wanted, strict=True):
        assert np.array_equal(np.concatenate(one), all_ids)


@law
@given(cases(methods=("random", "stratified", "per_stream")), st.integers(0, 3), tails)
def test_law_3_a_batch_is_grouped_by_canonical_node_and_cut_evenly_over_ranks(case, epoch, tail):
    order = case.run.epoch(epoch)
    all_plans = plans(case, epoch, tail)
    for k in range(all_plans[0].num_batches):
        begin, end = all_plans[0].bounds(k)
        grouped = begin + np.argsort(order.canonical(begin, end), kind="stable")
        parts = [share.positions[~share.filler] for share in (plan.share(k) for plan in all_plans)]
        assert np.array_equal(np.concatenate(parts), grouped)
        assert max(map(len, parts)) - min(map(len, parts)) <= 1


@law
@given(st.data())
def test_law_3_only_shards_on_node_borders_are_downloaded_twice(data):
    nodes, canonical = data.draw(st.sampled_from([(1, 4), (2, 4), (4, 4), (2, 8), (8, 16), (16, 16)]))
    ranks_per_node = data.draw(st.sampled_from([1, 2, 4]))
    ranks = nodes * ranks_per_node
    batch_size = canonical * ranks * data.draw(st.integers(1, 2))
    sizes = data.draw(st.lists(st.integers(1, 40), min_size=20, max_size=60))
    run = run_over(
        [sizes],
        [StreamWeights(repeat=data.draw(st.sampled_from([1, 2])))],
        batch_size=batch_size,
        shuffle=True,
        canonical_nodes=canonical,
    )
    order, fetched = run.epoch(0), [set() for _ in range(nodes)]
    for rank in range(ranks):
        plan = BatchPlan(order, batch_size=batch_size, world=World(rank, ranks, ranks_per_node), tail="drop")
        for k in range(plan.num_batches):
            fetched[rank // ranks_per_node].update(run.snapshot.shards_of(plan.share(k).ids).tolist())
    assert sum(map(len, fetched)) <= len(set().union(*fetched)) + nodes - 1


@law
@given(cases(), st.integers(0, 3), tails)
def test_law_4_the_ranks_of_a_replica_get_the_same_samples(case, epoch, tail):
    ranks = case.num_replicas * case.replication
    order = case.run.epoch(epoch)
    for first in case.worlds()[:4]:
        own = BatchPlan(order, batch_size=case.batch_size, world=first, tail=tail)
        last = World(first.rank + case.replication - 1, ranks, case.ranks_per_node, case.replication)
        other = BatchPlan(order, batch_size=case.batch_size, world=last, tail=tail)
        assert first.replica == last.replica
        for k in range(own.num_batches):
            assert np.array_equal(own.share(k).ids, other.share(k).ids)
            assert np.array_equal(own.share(k).filler, other.share(k).filler)


@law
@given(cases(), st.integers(0, 3), st.data())
def test_law_5_any_range_equals_the_slice_of_the_whole_epoch(case, epoch, data):
    order = case.run.epoch(epoch)
    ids, nodes = order.ids(0, order.num_samples), order.canonical(0, order.num_samples)
    for _ in range(5):
        begin = data.draw(st.integers(0, order.num_samples))
        end = data.draw(st.integers(begin, order.num_samples))
        fresh = copy.deepcopy(case.run).epoch(epoch)
        assert np.array_equal(fresh.ids(begin, end), ids[begin:end])
        assert np.array_equal(fresh.canonical(begin, end), nodes[begin:end])


@pytest.mark.parametrize("method", ["random", "stratified"])
def test_law_5_a_billion_samples_are_planned_in_little_memory(method):
    snapshot = Snapshot.of([np.full(10_000, 100_000)])
    config = OrderConfig.resolve(batch_size=1024, shuffle=True, batching_method=method, window=2)
    tracemalloc.start()
    order = RunOrder(snapshot, [StreamWeights()], config).epoch(3)
    ids = order.ids(500_000_000, 500_001_024)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(np.unique(ids)) == 1024
    assert peak < 150e6


@law
@given(cases(), st.integers(0, 3), tails)
def test_law_6_every_rank_makes_the_same_steps_and_filler_is_flagged(case, epoch, tail):
    all_plans = plans(case, epoch, tail)
    assert len({plan.num_batches for plan in all_plans}) == 1
    for k in range(all_plans[0].num_batches):
        begin, end = all_plans[0].bounds(k)
        counts = {plan.num_micro_batches(k, case.device_batch_size) for plan in all_plans}
        assert len(counts) == 1
        count = counts.pop()
        shares = [plan.share(k) for plan in all_plans]
        lengths = {len(share) for share in shares}
        if tail == "exact" and case.run.config.batching_method != "device_per_stream":
            assert max(lengths) - min(lengths) <= 1
            assert all(not share.filler.any() or len(share) == 1 for share in shares)
        elif tail != "exact":
            assert len(lengths) == 1
        if end - begin == case.batch_size:
            assert count == case.accumulate
            assert not any(share.filler.any() for share in shares)
        for share in shares:
            pieces = share.micro_batches(count)
            assert len(pieces) == count
            assert all(1 <= len(piece) <= case.device_batch_size for piece in pieces)
            assert np.array_equal(np.concatenate([piece.ids for piece in pieces])[: len(share)], share.ids)
            assert sum(piece.num_samples for piece in pieces) == share.num_samples
            assert set(share.positions.tolist()) <= set(range(begin, end))


@law
@given(st.data())
def test_law_6_no_micro_batch_exceeds_the_device_batch_of_any_world(data):
    case = data.draw(cases(most_nodes=8))
    replicas = data.draw(st.sampled_from([r for r in range(1, 33) if case.batch_size % r == 0]))
    share = case.batch_size // replicas
    device = data.draw(st.sampled_from([d for d in range(1, share + 1) if share % d == 0]))
    tail, block = data.draw(tails), case.run.config.device_block or 1
    assume(share % block == 0)
    for plan in (all_plans := plans(case, data.draw(st.integers(0, 3)), tail, num_replicas=replicas)):
        for k in range(plan.num_batches):
            if device % block and block % device and (tail != "exact" or k < plan.num_whole_batches):
                with pytest.raises(ValueError, match="must hold whole blocks or divide one"):
                    plan.num_micro_batches(k, device)
                continue
            count = plan.num_micro_batches(k, device)
            assert count == all_plans[0].num_micro_batches(k, device)
            assert count == share // device or k >= plan.num_whole_batches
            pieces = plan.share(k).micro_batches(count)
            assert len(pieces) == count
            assert all(1 <= len(piece) <= device for piece in pieces)


@law
@given(cases(most_nodes=4), st.integers(0, 3), tails)
def test_a_plan_pickled_is_the_same_plan(case, epoch, tail):
    plan = plans(case, epoch, tail)[-1]
    again = pickle.loads(pickle.dumps(plan))
    assert (again.num_batches, again.end, again.world) == (plan.num_batches, plan.end, plan.world)
    for k in range(plan.num_batches):
        assert np.array_equal(again.share(k).positions, plan.share(k).positions)
