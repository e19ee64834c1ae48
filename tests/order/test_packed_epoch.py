"""The global batches of packed rows: the same in every world, wherever a training run stops and resumes."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_stream.order import BatchPlan, OrderConfig, RunOrder, Snapshot, StreamWeights, World
from lightning_stream.order.packed_epoch import EpochPosition, PackedEpoch, in_turn
from lightning_stream.order.packed_order import RowPosition
from lightning_stream.order.packing import Packing
from lightning_stream.order.permutation import RngStream, permutation, random_u64
from lightning_stream.order.window import NodeWindow

prop = settings(max_examples=100, deadline=None, derandomize=True)
lengths_of = st.lists(st.integers(0, 25), min_size=1, max_size=80)
packings = st.builds(Packing, st.integers(1, 20), st.integers(1, 30))
tails = st.sampled_from(["pad", "drop", "exact"])
nodes = st.integers(1, 4)


class OfNode:
    """The samples of one canonical node."""

    def __init__(self, whole, node):
        self.ids = NodeWindow(whole, node).ids
        self.num_samples = len(range(node, whole.num_samples, whole.canonical_nodes))


class Ids:
    """Sample ids in a given order."""

    def __init__(self, ids):
        self._ids, self.num_samples = ids, len(ids)

    def ids(self, begin, end):
        return self._ids[begin:end]


def packed_of(lengths, packing, num_orders=1):
    ids = permutation(RngStream.SAMPLES, 5, size=len(lengths))
    orders = [Ids(ids[node::num_orders]) for node in range(num_orders)]
    return PackedEpoch(orders, np.array(lengths, dtype=np.uint32), packing, key=(7, 0))


def rows_of(batch):
    """Each row as (order, its spans); a span is (sample, first token, tokens)."""
    rows = batch.rows
    flat = list(zip(rows.ids.tolist(), rows.first.tolist(), rows.num_tokens.tolist(), strict=True))
    spans = [tuple(flat[a:b]) for a, b in pairwise(rows.edges.tolist())]
    return list(zip(batch.order_of.tolist(), spans, strict=True))


def one_in_turn(available, turn, count):
    """As `in_turn`, one after another."""
    counts = [0] * len(available)
    while count:
        if counts[turn] < available[turn]:
            counts[turn] += 1
            count -= 1
        turn = (turn + 1) % len(available)
    return counts


@prop
@given(lengths_of, packings, nodes, st.integers(1, 12))
def test_every_token_is_in_one_batch(lengths, packing, num_orders, batch_size):
    batches = packed_of(lengths, packing, num_orders).batches(batch_size)
    spans = [span for batch in batches for _, row in rows_of(batch) for span in row]
    tokens = [(sample, first + t) for sample, first, count in spans for t in range(count)]
    assert sorted(tokens) == [(sample, t) for sample, length in enumerate(lengths) for t in range(length)]


@prop
@given(lengths_of, packings, nodes, st.integers(1, 4), st.integers(1, 4), tails, st.data())
def test_a_resume_continues_with_the_same_batches(lengths, packing, num_orders, replicas, per_replica, tail, data):
    def batches_from(start):
        fresh = packed_of(lengths, packing, num_orders)
        batches = fresh.batches(replicas * per_replica, start=start, tail=tail, num_replicas=replicas)
        return [(batch.begin, batch.end, rows_of(batch)) for batch in batches]

    whole = batches_from(EpochPosition())
    stop = data.draw(st.integers(0, len(whole)))
    assert batches_from(whole[stop - 1][1] if stop else EpochPosition()) == whole[stop:]


@prop
@given(lengths_of, packings, nodes, st.integers(1, 12), st.integers(1, 12))
def test_another_batch_size_reads_the_same_rows_in_the_same_turns(lengths, packing, num_orders, before, after):
    packed = packed_of(lengths, packing, num_orders)
    one_by_one = [row for batch in packed.batches(1) for row in rows_of(batch)]
    at, seen = EpochPosition(), 0
    for batch_size in (before, after, after):
        batch = next(packed.batches(batch_size, start=at), None)
        if batch is not None:
            expected = one_by_one[seen : seen + batch_size]
            assert sorted(rows_of(batch)) == sorted(expected)
            assert batch.order_of.tolist() == sorted(order for order, _ in expected)
            at, seen = batch.end, seen + len(expected)
    assert packed.row_number(at) == seen


@prop
@given(lengths_of, packings, nodes, st.integers(1, 4), st.integers(1, 4), tails)
def test_batches_of_rows_end_where_batches_of_samples_end(lengths, packing, num_orders, replicas, per_replica, tail):
    packed = packed_of(lengths, packing, num_orders)
    batch_size = replicas * per_replica
    batches = packed.batches(batch_size, tail=tail, num_replicas=replicas)
    found = [(packed.row_number(batch.begin), packed.row_number(batch.end)) for batch in batches]
    expected = []
    if packed.num_rows:
        run = RunOrder(Snapshot.of([[packed.num_rows]]), [StreamWeights()], OrderConfig.resolve(batch_size=batch_size))
        plan = BatchPlan(run.epoch(0), batch_size=batch_size, world=World(0, replicas), tail=tail)
        expected = [plan.bounds(k) for k in range(plan.num_batches)]
    assert found == expected


@prop
@given(st.lists(st.integers(0, 9), min_size=1, max_size=6), st.data())
def test_turns_are_taken_as_if_one_after_another(available, data):
    turn = data.draw(st.integers(0, len(available) - 1))
    count = data.draw(st.integers(0, sum(available)))
    counts, next_turn = in_turn(available, turn, count)
    assert counts == one_in_turn(available, turn, count)
    left = [have - took for have, took in zip(available, counts, strict=True)]
    rest = data.draw(st.integers(0, sum(left)))
    both = [a + b for a, b in zip(counts, in_turn(left, next_turn, rest)[0], strict=True)]
    assert both == one_in_turn(available, turn, count + rest)


def test_while_all_nodes_have_rows_a_batch_has_equally_many_of_each():
    lengths = (np.arange(4000) * 7919 % 97).tolist()
    batches = list(packed_of(lengths, Packing(128, 100), num_orders=4).batches(32))
    counts = [np.bincount(batch.order_of, minlength=4).tolist() for batch in batches]
    uneven = [k for k, count in enumerate(counts) if count != [8] * 4]
    assert len(batches) > 40
    assert all(k > 0.9 * len(batches) for k in uneven)


def downloads(snapshot, packed, batch_size, num_machines):
    """How often a shard is downloaded in the mean, if each machine takes an equal part of every batch."""
    used = [set() for _ in range(num_machines)]
    for batch in packed.batches(batch_size):
        cuts = batch.rows.edges[np.arange(num_machines + 1) * len(batch.rows) // num_machines]
        for shards, (first, end) in zip(used, pairwise(cuts.tolist()), strict=True):
            shards.update(snapshot.shards_of(batch.rows.ids[first:end]).tolist())
    return sum(map(len, used)) / snapshot.num_shards


def test_nodes_that_are_packed_apart_keep_their_shards_to_themselves():
    snapshot, packing = Snapshot.of([[200] * 320]), Packing(512, 1000)
    run = RunOrder(snapshot, [StreamWeights()], OrderConfig.resolve(batch_size=64, shuffle=True))
    lengths = (random_u64(RngStream.SAMPLES, 3, size=snapshot.num_samples) % np.uint64(400)).astype(np.uint32)
    samples = run.sample_order(0, (0,), 0)
    apart = PackedEpoch([OfNode(samples, node) for node in range(16)], lengths, packing, key=(7, 0))
    assert downloads(snapshot, PackedEpoch([samples], lengths, packing, key=(7, 0)), 64, 4) == 4
    assert downloads(snapshot, apart, 64, 4) < 1.2


def test_each_order_has_its_own_permutation():
    alike = Ids(np.arange(200))
    packed = PackedEpoch([alike, alike], np.full(200, 5), Packing(10, 200), key=(7, 0))
    first, second = (order.window(0).rows for order in packed.orders)
    assert sorted(first.document.tolist()) == sorted(second.document.tolist())
    assert first.document.tolist() != second.document.tolist()


def test_windows_of_empty_documents_are_passed_over():
    packed = PackedEpoch([Ids(np.arange(6))], np.array([0, 0, 3, 3, 0, 0]), Packing(8, 2))
    batches = [(batch.begin.orders, batch.end.orders) for batch in packed.batches(1)]
    assert batches == [((RowPosition(0, 0),), (RowPosition(2, 0),))]


@pytest.mark.parametrize("given", [{"tail": "keep"}, {"batch_size": 0}, {"num_replicas": 3}])
def test_batches_that_cannot_be_cut_are_refused(given):
    with pytest.raises(ValueError, match="tail must be one of pad, drop, exact, and a global batch"):
        next(packed_of([5] * 10, Packing(10, 4)).batches(**{"batch_size": 2, **given}))


def test_a_position_of_other_orders_is_refused():
    with pytest.raises(ValueError, match="A position must have 2 orders, as this epoch; found 1"):
        next(packed_of([5] * 10, Packing(10, 4), 2).batches(2, start=EpochPosition((RowPosition(),))))
