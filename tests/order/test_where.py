"""Where a sample is in an epoch: the inverse of the order, equal to a search through all of it."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.orders import run_over

from lightning_stream.order import BatchPlan, OrderConfig, Position, RunOrder, Schedule, Snapshot, StreamWeights, World
from lightning_stream.order.packing import RowPacking
from lightning_stream.order.permutation import RngStream, permutation, place_in_permutation
from lightning_stream.order.window import Window
from lightning_stream.questions import Delivery, where

WEIGHTS = [{}, {"repeat": 0.4}, {"repeat": 2.7}, {"repeat": 3}, {"choose": 11}, {"proportion": 1.5}]
METHODS = ["random", "stratified", "per_stream", "device_per_stream"]


@st.composite
def runs(draw):
    sizes = draw(st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=12), min_size=1, max_size=3))
    kind = draw(st.sampled_from(WEIGHTS))
    return run_over(
        sizes,
        [StreamWeights(**kind)] * len(sizes),
        batch_size=24,
        device_batch_size=4,
        shuffle=draw(st.sampled_from([True, True, False])),
        canonical_nodes=draw(st.sampled_from([None, 1, 2, 5])),
        window=draw(st.sampled_from([None, 1, 2, 7])),
        quick_start=draw(st.booleans()),
        batching_method=draw(st.sampled_from(METHODS)),
        sampling_method=draw(st.sampled_from(["balanced", "fixed"])),
        sampling_granularity=draw(st.sampled_from([1, 5])),
        seed=draw(st.integers(0, 2**40)),
    )


def expect_found(run, epoch):
    """That `where` finds what a search finds, for some 40 of the samples."""
    order = run.epoch(epoch)
    ids = order.ids(0, order.num_samples)
    for sample_id in range(epoch, run.snapshot.num_samples, 1 + run.snapshot.num_samples // 40):
        assert run.where(sample_id, epoch).tolist() == np.flatnonzero(ids == sample_id).tolist()


@settings(max_examples=60, deadline=None, derandomize=True)
@given(runs(), st.integers(0, 5))
def test_where_equals_a_search_through_the_epoch(run, epoch):
    expect_found(run, epoch)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.sampled_from(METHODS), st.booleans(), st.integers(0, 3), st.data())
def test_where_equals_a_search_through_an_epoch_of_a_scheduled_mixture(method, shuffle, epoch, data):
    weights = st.fixed_dictionaries({name: st.sampled_from([0.5, 1, 3]) for name in "ab"}).map(lambda one: {**one})
    schedule = Schedule([(0, data.draw(weights)), (100, data.draw(weights))], interpolation="linear", streams="abc")
    for at in sorted(data.draw(st.lists(st.integers(0, 400), max_size=3))):
        skip = data.draw(st.dictionaries(st.sampled_from("ab"), st.integers(1, 60), max_size=2))
        schedule = schedule.changed(at, {**data.draw(weights), "c": 1} if data.draw(st.booleans()) else None, skip)
    run = run_over(
        [[20, 13], [9], [30, 30]],
        batch_size=24,
        device_batch_size=4,
        shuffle=shuffle,
        batching_method=method,
        schedule=schedule,
        epoch_size=120,
    )
    expect_found(run, epoch)


def test_where_finds_what_a_stream_that_stops_gives_once():
    schedule = Schedule([(0, {"a": 1, "b": 2})], exhausted="stop")
    run = run_over([[20], [9, 22]], batch_size=6, shuffle=True, schedule=schedule, epoch_size=40)
    orders = [run.epoch(epoch) for epoch in range(3)]
    assert [order.num_samples for order in orders] == [40, 11, 0]
    for sample_id in range(51):
        found = [(epoch, at) for epoch in range(3) for at in run.where(sample_id, epoch).tolist()]
        assert [int(orders[epoch].ids(at, at + 1)[0]) for epoch, at in found] == [sample_id]


@settings(max_examples=25, deadline=None, derandomize=True)
@given(st.data())
def test_where_equals_a_search_through_a_mixture_with_changes_and_skips(data):
    sizes = data.draw(st.lists(st.lists(st.integers(1, 20), min_size=1, max_size=4), min_size=3, max_size=3))
    schedule = Schedule(
        [(0, {"a": 3, "b": 1, "c": 1}), (60, {"a": 1, "b": 2})],
        interpolation=data.draw(st.sampled_from(["step", "linear"])),
        exhausted={"a": data.draw(st.sampled_from(["repeat", "stop"]))},
    )
    for at in sorted(data.draw(st.lists(st.integers(0, 200), max_size=3))):
        schedule = schedule.changed(at, data.draw(st.sampled_from([None, {"b": 1, "c": 2}])), {"b": 7, "c": 40})
    run = run_over(
        sizes,
        batch_size=12,
        device_batch_size=4,
        shuffle=True,
        schedule=schedule,
        epoch_size=96,
        batching_method=data.draw(st.sampled_from(METHODS if not any(schedule.stops) else METHODS[:2])),
    )
    for epoch in range(3):
        expect_found(run, epoch)


def test_where_finds_packed_documents_and_mixtures_among_a_million():
    lengths = (np.arange(10**6) * 7919 % 1400).astype(np.uint32)
    mixture = Schedule([(0, {"a": 1, "b": 3}), (10**6, {"a": 3, "b": 1})], interpolation="linear")
    packing, sizes = RowPacking(2048, 16384), [[1000] * 400, [1000] * 600]
    for rows, schedule in ((packing, None), (None, mixture), (packing, mixture)):
        run = run_over(
            sizes, lengths=lengths if rows else None, batch_size=256, shuffle=True, packing=rows, schedule=schedule
        )
        order = run.epoch(1)
        ids, positions = order.samples(0, order.num_samples)
        for sample_id in range(11, 10**6, 10**6 // 20):
            assert run.where(sample_id, 1).tolist() == positions[ids == sample_id].tolist()


def test_a_row_with_several_copies_of_a_sample_is_found_once():
    run = run_over(
        [[2]],
        [StreamWeights(repeat=4)],
        lengths=np.array([1, 2]),
        batch_size=2,
        shuffle=True,
        packing=RowPacking(8, window=16),
    )
    order = run.epoch(0)
    rows = [set(row.ids.tolist()) for row in order.rows(0, order.num_samples)]
    for sample_id in range(2):
        assert run.where(sample_id, 0).tolist() == [at for at, ids in enumerate(rows) if sample_id in ids]


@pytest.mark.parametrize("method", METHODS)
def test_where_over_many_epochs_looks_up_no_samples(method, monkeypatch):
    run = run_over([[40, 40, 40], [50, 30]], batch_size=24, device_batch_size=4, shuffle=True, batching_method=method)
    position, delivery = Position.start(run, batch_size=24, tail="pad"), Delivery(World(0, 3), 4)
    wanted = []
    for epoch in range(4):
        for rank in range(3):
            plan = BatchPlan(run.epoch(epoch), batch_size=24, world=World(rank, 3))
            steps = [(k, plan.share(k).micro_batches(plan.num_micro_batches(k, 4))) for k in range(plan.num_batches)]
            wanted += [
                (epoch, k, rank, number, row)
                for k, pieces in steps
                for number, piece in enumerate(pieces)
                for row in np.flatnonzero((piece.ids == 7) & ~piece.filler).tolist()
            ]
    monkeypatch.setattr(Window, "ids", None)
    assert where(run, position, 7, delivery, range(4)) == wanted


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("shuffle", [True, False])
def test_every_sample_of_a_large_epoch_is_where_it_should_be(method, shuffle):
    run = run_over(
        [[997] * 60, [1409] * 30],
        [StreamWeights(repeat=1), StreamWeights(repeat=1.5)],
        batch_size=256,
        device_batch_size=32,
        shuffle=shuffle,
        batching_method=method,
    )
    order = run.epoch(3)
    ids = order.ids(0, order.num_samples)
    assert len(ids) > 10**5
    places = np.argsort(ids, kind="stable")
    edges = np.searchsorted(ids[places], np.arange(run.snapshot.num_samples + 1))
    for sample_id in range(0, run.snapshot.num_samples, 97):
        assert run.where(sample_id, 3).tolist() == places[edges[sample_id] : edges[sample_id + 1]].tolist()


def test_an_order_of_mosaicml_streaming_is_searched_too():
    run = run_over([[40, 41, 42]], batch_size=8, device_batch_size=8, shuffle=True, algorithm="py1s")
    assert run.epoch(1).ids(0, 123)[run.where(77, 1)].tolist() == [77]


def test_a_sample_outside_the_data_is_refused():
    run = run_over([[10]], batch_size=2)
    for sample_id in (-1, 10):
        with pytest.raises(ValueError, match=f"Sample ids count from 0 to 9 here; found {sample_id}"):
            run.where(sample_id, 0)


@pytest.mark.parametrize("size", [1, 2, 700, 5000])
def test_the_place_of_an_index_in_a_permutation_needs_no_sort(size):
    order = permutation(RngStream.SAMPLES, 1, 2, size=size)
    for place in range(0, size, 1 + size // 20):
        assert place_in_permutation(RngStream.SAMPLES, 1, 2, size=size, index=int(order[place])) == place


SCHEDULE = Schedule([(0, {"a": 1, "b": 4}), (10**9, {"a": 3, "b": 4})], interpolation="linear")


@pytest.mark.parametrize(("streams", "schedule"), [(1, None), (2, SCHEDULE)])
def test_a_sample_of_a_billion_is_found_without_going_through_the_epoch(streams, schedule):
    config = OrderConfig.resolve(batch_size=1024, shuffle=True, schedule=schedule)
    sizes = np.split(np.full(100_000, 10_000), streams)
    run = RunOrder(Snapshot.of(sizes), [StreamWeights()] * streams, config)
    spread = range(7, 10**9, 10**9 // 40)
    found = [run.where(sample_id, 0) for sample_id in spread]
    begin = time.process_time()
    assert [run.where(sample_id, 0).tolist() for sample_id in spread] == [one.tolist() for one in found]
    assert (time.process_time() - begin) / len(spread) < 0.02  # about 0.001; other machines are slower and busy
    order = run.epoch(0)
    for sample_id, places in zip(spread, found, strict=True):
        assert [int(order.ids(at, at + 1)[0]) for at in places.tolist()] == [sample_id] * len(places)
    assert sum(map(len, found)) >= len(spread) // 2
