"""Samples sorted by length within windows, and batches of a budget of tokens: the same in every world."""

from __future__ import annotations

import json
import pickle
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.orders import run_over

from lightning_stream.order import BatchPlan, OrderConfig, Position, RunOrder, World
from lightning_stream.order.buckets import LengthBuckets
from lightning_stream.order.micro_batches import MicroBatches

prop = settings(max_examples=60, deadline=None, derandomize=True)
lengths_of = st.lists(st.integers(0, 25), min_size=1, max_size=150)
tails = st.sampled_from(["pad", "drop", "exact"])


def run_of(lengths, *, tokens=None, multiple=None, window=None, batch_size=8, streams=1, **options):
    lengths = np.array(lengths, dtype=np.uint32)
    sizes = np.diff(np.linspace(0, len(lengths), 8).astype(int)).tolist()
    size = multiple if tokens else batch_size
    buckets = LengthBuckets.resolved(lengths, batch_size=size, window=window, batch_tokens=tokens)
    options = {"shuffle": True, **options}
    return run_over(
        [sizes[k::streams] for k in range(streams)],
        lengths=lengths,
        batch_size=buckets.batch_size,
        buckets=buckets,
        **options,
    )


def below(run):
    """The order that the windows of a run are of."""
    config = OrderConfig.from_state({**run.config.to_state(), "buckets": None})
    return RunOrder(run.snapshot, run.weights, config)


def whole(run, epoch=0):
    order = run.epoch(epoch)
    return order.ids(0, order.num_samples)


@prop
@given(lengths_of, st.integers(1, 60), st.booleans(), st.sampled_from(["random", "stratified"]), st.integers(0, 2))
def test_a_window_keeps_its_samples_and_each_position_its_node_and_stream(lengths, window, shuffle, method, epoch):
    run = run_of(lengths, window=window, shuffle=shuffle, streams=2, batching_method=method)
    ids, old, size = whole(run, epoch), whole(below(run), epoch), run.config.buckets.window
    assert size % 8 == 0
    assert size >= window
    for begin in range(0, len(ids), size):
        assert sorted(ids[begin : begin + size]) == sorted(old[begin : begin + size])
    order, plain = run.epoch(epoch), below(run).epoch(epoch)
    assert np.array_equal(order.canonical(0, len(ids)), plain.canonical(0, len(ids)))
    assert np.array_equal(run.snapshot.streams_of(ids), run.snapshot.streams_of(old))


@prop
@given(lengths_of, st.integers(1, 60), st.data())
def test_the_samples_of_a_node_are_divided_over_the_batches_by_length(lengths, window, data):
    run = run_of(lengths, window=window, canonical_nodes=data.draw(st.sampled_from([1, 2, 4])))
    ids, size = whole(run), run.config.buckets.window
    nodes = run.epoch(0).canonical(0, len(ids))
    found = np.array(lengths)[ids]
    for begin in range(0, len(ids), size):
        for node in set(nodes.tolist()):
            span = slice(begin, begin + size)
            at = np.flatnonzero(nodes[span] == node)
            batches = [found[span][at[at // 8 == k]].tolist() for k in range(size // 8)]
            batches = [one for one in batches if one]
            assert all(one == sorted(one) for one in batches)
            ranges = sorted((one[0], one[-1]) for one in batches)
            assert all(a[1] <= b[0] for a, b in pairwise(ranges))


@prop
@given(lengths_of, st.integers(25, 400), st.sampled_from([None, 1, 3, 4]), tails, st.integers(1, 5), st.data())
def test_the_batches_of_a_budget_are_the_same_in_every_world(lengths, tokens, multiple, tail, replicas, data):
    tokens = max(tokens, (multiple or 1) * max(lengths))
    window, accumulate = data.draw(st.sampled_from([None, 20, 50])), data.draw(st.integers(1, 3))
    runs = [run_of(lengths, tokens=tokens, multiple=multiple, window=window) for _ in range(replicas)]
    size = runs[0].config.buckets.batch_size
    device = -(-size // (accumulate * replicas))
    plans = [
        BatchPlan(run.epoch(1), batch_size=size, tail=tail, world=World(rank, replicas))
        for rank, run in enumerate(runs)
    ]
    shares = [list(MicroBatches(plan, device).walk()) for plan in plans]
    assert len({len(each) for each in shares}) == 1
    seen = Counter(p for each in shares for b in each for p in b.positions[~b.filler].tolist())
    kept = len(lengths) - (len(lengths) % size if tail == "drop" else 0)  # fewer than `size` are omitted
    assert seen == Counter(range(kept))
    assert sorted(whole(runs[0], 1)) == list(range(len(lengths)))
    ids = whole(runs[0], 1)
    alone = BatchPlan(runs[0].epoch(1), batch_size=size, tail=tail)
    for k in range(alone.num_batches):
        begin, end = alone.bounds(k)
        assert (end - begin) * max(lengths[i] for i in ids[begin:end].tolist()) <= tokens
        assert (end - begin) % size == 0 or (k == alone.num_batches - 1 and tail != "drop")
        assert [(b.begin, b.end) == (begin, end) for b in shares[0]].count(True) == len(shares[0]) // alone.num_batches


@prop
@given(lengths_of, st.sampled_from([None, 60, 200]), st.sampled_from([10, 40, None]), st.data())
def test_a_state_resumes_in_a_new_process_and_knows_its_steps(lengths, tokens, window, data):
    run = run_of(lengths, tokens=tokens, multiple=None, window=window)
    size = run.config.buckets.batch_size if tokens else 8
    plan = BatchPlan(run.epoch(2), batch_size=size)
    k = data.draw(st.integers(0, plan.num_batches - 1))
    at = plan.bounds(k)[0]
    before = Position.start(run, batch_size=size, tail="pad", epoch=2).advanced(run, at)
    order = run.epoch(2)
    state = json.loads(json.dumps(Position(**{**vars(before), "landmark": order.counted_windows(at)}).to_state()))
    assert len(json.dumps(state)) < 1024
    fresh = pickle.loads(pickle.dumps(run))
    here = Position.from_state(state)
    assert here.check(fresh, tail="pad") == []
    assert here.num_steps(fresh) == k
    rest = BatchPlan(here.order_in(fresh), batch_size=size, start=at)
    assert [rest.bounds(j) for j in range(rest.num_batches)] == [plan.bounds(j) for j in range(k, plan.num_batches)]
    assert np.array_equal(np.concatenate([rest.ids(j) for j in range(rest.num_batches)]), whole(run, 2)[at:])
    sample = int(data.draw(st.sampled_from(range(len(lengths)))))
    assert fresh.where(sample, 2).tolist() == np.flatnonzero(whole(run, 2) == sample).tolist()


def test_a_resume_far_in_an_epoch_plans_few_windows():
    lengths = np.random.default_rng(0).integers(1, 500, 200_000)
    run = run_of(lengths, tokens=50_000, window=4096)
    order = run.epoch(0)
    at = next(end for end in order.order.ends(150_000 // 4096) if end > 150_000)
    mark, steps = order.counted_windows(at), order.order.batches_before(at)
    fresh = run_of(lengths, tokens=50_000, window=4096).epoch(0, mark)
    planned = []
    plan = fresh.order.plan
    fresh.order.plan = lambda number: planned.append(number) or plan(number)
    assert fresh.order.batches_before(at) == steps
    assert len(set(planned)) == 1


def test_a_plan_behind_the_last_batch_has_none():
    run = run_of(range(1, 12), tokens=44, multiple=4)
    for tail, start in (("drop", 8), ("drop", 11), ("pad", 11), ("exact", 11)):
        plan = BatchPlan(run.epoch(0), batch_size=4, tail=tail, start=start)
        assert (plan.num_batches, len(MicroBatches(plan, 4)), plan.has(0)) == (0, 0, False)


def test_batches_of_similar_lengths_have_little_padding():
    lengths = np.minimum(np.random.default_rng(0).lognormal(6, 1, 40_000), 8000).astype(int)

    def padding(run, size):
        plan, ids = BatchPlan(run.epoch(0), batch_size=size), whole(run)
        bounds = [plan.bounds(k) for k in range(plan.num_batches)]
        return 1 - lengths.sum() / sum((b - a) * lengths[ids[a:b]].max() for a, b in bounds)

    run = run_of(lengths, batch_size=64)
    assert padding(below(run), 64) > 0.8
    assert padding(run, 64) < 0.14
    budget = run_of(lengths, tokens=128_000)
    assert padding(budget, budget.config.buckets.batch_size) < 0.14


def test_a_change_behind_the_windows_that_were_begun_changes_nothing_before():
    run = run_of(range(100), window=24)
    order = run.epoch(0)
    assert [order.order.unchanged_from(at) for at in (0, 1, 24, 25, 97, 100)] == [0, 24, 24, 48, 100, 100]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tokens": 90, "multiple": 4}, "room for 4 samples of the greatest length, 25, which is 100; found 90"),
        ({"tokens": 24}, "room for 1 samples of the greatest length, 25"),
        ({"batching_method": "per_stream"}, "sorted by length in the native order with batching_method random or"),
        ({"shuffle": False, "algorithm": "py1e"}, "sorted by length in the native order"),
    ],
)
def test_what_cannot_be_is_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        run_of([25, 3, 4], **settings)
