"""The batching methods."""

from __future__ import annotations

import ast
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.orders import run_over

import lightning_stream.order
from lightning_stream.order import BatchPlan, World
from lightning_stream.order.batches import divide_evenly
from lightning_stream.order.methods import METHODS
from lightning_stream.order.orders import EvenMerge, Order

prop = settings(max_examples=60, deadline=None, derandomize=True)


def run_of(sizes, method, batch_size=12, **arguments):
    return run_over(sizes, batch_size=batch_size, batching_method=method, **{"shuffle": True} | arguments)


def merged(lengths):
    """The definition, word for word: all keys, sorted, ties by sequence."""
    keys = [((j + 0.5) / n, stream, j) for stream, n in enumerate(lengths) for j in range(n)]
    return [(stream, j) for _, stream, j in sorted(keys)]


@prop
@given(st.lists(st.integers(0, 40), min_size=1, max_size=25), st.data())
def test_a_stratified_merge_can_be_read_at_any_position(lengths, data):
    wanted = merged(lengths)
    merge = EvenMerge(np.array(lengths, dtype=np.int64), epoch=0, seed=None)
    begin = data.draw(st.integers(0, len(wanted)))
    end = data.draw(st.integers(begin, len(wanted)))
    if wanted:
        sequence, index = merge.read(begin, end)
        assert list(zip(sequence.tolist(), index.tolist(), strict=True)) == wanted[begin:end]


@prop
@given(st.lists(st.integers(0, 40), min_size=1, max_size=25), st.integers(0, 2**62), st.integers(0, 5))
def test_a_jittered_merge_read_in_pieces_is_the_merge_read_at_once(lengths, seed, epoch):
    merge = EvenMerge(np.array(lengths, dtype=np.int64), epoch, seed)
    total = sum(lengths)
    if not total:
        return
    whole = np.stack(merge.read(0, total))
    pieces = [np.stack(merge.read(at, min(at + 7, total))) for at in range(0, total, 7)]
    assert np.array_equal(np.concatenate(pieces, axis=1), whole)
    for stream, length in enumerate(lengths):
        assert np.array_equal(whole[1][whole[0] == stream], np.arange(length))


@prop
@given(st.lists(st.integers(1, 400), min_size=1, max_size=22))
@example([1, 1, 1, 1, 13])
def test_in_any_window_of_a_stratified_mix_each_stream_is_near_its_share(lengths):
    total = sum(lengths)
    sequence, _ = EvenMerge(np.array(lengths, dtype=np.int64), epoch=0, seed=None).read(0, total)
    for stream, length in enumerate(lengths):
        most = 1 + len(lengths) * length / total  # 2 of equal streams; single samples of all others may come together
        ahead = np.concatenate([[0], np.cumsum(sequence == stream)]) - np.arange(total + 1) * length / total
        assert ahead.max() - ahead.min() <= most  # the difference over a window is that of two prefixes


def test_a_stratified_merge_of_huge_streams_is_read_in_little_time():
    lengths = np.array([10**12, 7 * 10**11, 3], dtype=np.int64)
    sequence, index = EvenMerge(lengths, epoch=0, seed=None).read(10**12, 10**12 + 1000)
    assert 560 <= (sequence == 0).sum() <= 620
    assert all((np.diff(index[sequence == stream]) == 1).all() for stream in range(2))


def test_a_stratified_samples_canonical_node_follows_its_streams_own_index():
    run = run_of([[40] * 3, [30] * 2], "stratified", canonical_nodes=4)
    order = run.epoch(0)
    streams = run.snapshot.streams_of(order.ids(0, order.num_samples))
    nodes = order.canonical(0, order.num_samples)
    for stream in range(2):
        mine = nodes[streams == stream]
        assert np.array_equal(mine, np.arange(len(mine)) % 4)


@pytest.mark.parametrize("tail", ["pad", "drop", "exact"])
def test_per_stream_takes_every_batch_from_one_stream(tail):
    run = run_of([[40] * 3, [7], [30] * 2], "per_stream")
    plan = BatchPlan(run.epoch(0), batch_size=12, world=World(0, 4, 4), tail=tail)
    streams = [set(run.snapshot.streams_of(plan.ids(k)).tolist()) for k in range(plan.num_batches)]
    assert all(len(one) == 1 for one in streams)
    assert plan.num_batches == 10 + 5 + (1 if tail != "drop" else 0)
    whole = [next(iter(one)) for one in streams[:15]]
    assert (whole.count(0), whole.count(2)) == (10, 5)


def test_per_stream_refuses_another_batch_size():
    run = run_of([[40] * 3, [30] * 2], "per_stream")
    with pytest.raises(ValueError, match=r"12 samples then, 24 now.*another batching_method"):
        BatchPlan(run.epoch(0), batch_size=24)


def test_per_stream_refuses_to_start_inside_a_batch():
    with pytest.raises(ValueError, match=r"12 samples of one stream at a time, but start=13 lies inside"):
        BatchPlan(run_of([[40] * 3, [30] * 2], "per_stream").epoch(0), batch_size=12, start=13)


@pytest.mark.parametrize(("replicas", "device"), [(1, 12), (2, 6), (4, 3), (2, 3)])
def test_device_per_stream_gives_a_device_whole_blocks_of_one_stream(replicas, device):
    run = run_of([[40] * 3, [7], [30] * 2], "device_per_stream", device_batch_size=3)
    for rank in range(replicas):
        plan = BatchPlan(run.epoch(0), batch_size=12, world=World(rank, replicas, replicas), tail="pad")
        for k in range(plan.num_batches):
            share = plan.share(k)
            for micro in share.micro_batches(plan.num_micro_batches(k, device)):
                assert len(micro) % 3 == 0
                streams = run.snapshot.streams_of(micro.ids).reshape(-1, 3)
                assert (streams == streams[:, :1]).all()


def test_device_per_stream_refuses_a_world_whose_device_batch_is_no_multiple_of_the_block():
    run = run_of([[40] * 3, [30] * 2], "device_per_stream", device_batch_size=3)
    with pytest.raises(ValueError, match=r"blocks of 3 samples.*4 each"):
        BatchPlan(run.epoch(0), batch_size=12, world=World(0, 3, 3))


@pytest.mark.parametrize("method", ["random", "stratified", "per_stream", "device_per_stream"])
def test_several_threads_may_read_one_order(method):
    from concurrent.futures import ThreadPoolExecutor

    run = run_of([[40] * 30, [30] * 20], method, device_batch_size=3)
    order = run.epoch(0)
    wanted = run_of([[40] * 30, [30] * 20], method, device_batch_size=3).epoch(0).ids(0, order.num_samples)
    spots = [(at * 37) % (order.num_samples - 50) for at in range(400)]
    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda at: order.ids(at, at + 50), spots))
    assert all(np.array_equal(wanted[at : at + 50], got) for at, got in zip(spots, results, strict=True))


def test_a_thousand_streams_are_mixed_in_little_time():
    run = run_of([[40, 25]] * 1000, "stratified", batch_size=256)
    order = run.epoch(0)
    ids = np.concatenate([order.ids(at, min(at + 256, 65_000)) for at in range(0, 65_000, 256)])
    assert np.array_equal(np.sort(ids), np.arange(65_000))


def test_the_name_of_a_method_is_compared_nowhere():
    package = Path(lightning_stream.order.__file__).parent.parent
    files = [file for folder in ("order", "loading", "reading") for file in (package / folder).rglob("*.py")]
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Compare):
                words = {one.value for one in ast.walk(node) if isinstance(one, ast.Constant)}
                assert not words & {*METHODS}, f"{file.name}, line {node.lineno}"
                assert "batching_method" not in ast.unparse(node), f"{file.name}, line {node.lineno}"


def test_a_new_method_is_one_value(monkeypatch):
    class Backwards(Order):
        def __init__(self, order):
            self.size, self.nodes, self._order = order.size, order.nodes, order

        def ids(self, at):
            return self._order.ids(self.size - 1 - at[::-1])[::-1]

        def nodes(self, at):
            return self._order.nodes(at)

    def divide(plan, order):
        return divide_evenly(plan, Backwards(order))

    monkeypatch.setitem(METHODS, "stratified", replace(METHODS["random"], divide=divide))
    run = run_of([[40] * 3, [30] * 2], "stratified", shuffle=False)
    plan = BatchPlan(run.epoch(0), batch_size=12)
    assert np.array_equal(np.concatenate([plan.ids(k) for k in range(plan.num_batches)]), np.arange(180)[::-1])
    assert run.active_shards() == 1
