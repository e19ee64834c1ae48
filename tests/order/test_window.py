"""The rolling window: blocks, canonical nodes, and what is active when."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.orders import run_over

from lightning_stream.order import window as windows
from lightning_stream.order.spread import deal_shards, spread_parts
from lightning_stream.order.window import piece_begins

prop = settings(max_examples=150, deadline=None, derandomize=True)


def run_of(sizes, **arguments):
    return run_over([sizes], batch_size=16, **{"shuffle": True} | arguments)


def node_shards(run, epoch, node):
    order = run.epoch(epoch)
    ids = order.ids(0, order.num_samples)[order.canonical(0, order.num_samples) == node]
    return run.snapshot.shards_of(ids)


def pieces_of(size, place, window):
    return np.diff(piece_begins(size, place, window))


@prop
@given(st.integers(1, 50), st.integers(0, 30), st.integers(1, 12))
def test_the_pieces_of_a_part_are_all_of_it(size, place, window):
    pieces = pieces_of(size, place, window)
    assert pieces.sum() == size
    assert (pieces >= 0).all()


@prop
@given(st.lists(st.integers(1, 50), min_size=1, max_size=30), st.integers(1, 12))
def test_blocks_have_the_pieces_of_their_parts_one_after_another(sizes, window):
    node = window_of(sizes, window)._node(0)
    ordered = [sizes[part] for part in node._part_at.tolist()]
    blocks = np.zeros(len(sizes), dtype=np.int64)
    for place, size in enumerate(ordered):
        for piece, count in enumerate(pieces_of(size, place, window).tolist()):
            blocks[min(place + piece, len(sizes) - 1)] += count
    starts = np.cumsum(blocks) - blocks
    assert node._begins.tolist() == [*starts.tolist(), sum(sizes)]
    for block in np.flatnonzero(blocks).tolist():
        for entry in (starts[block], starts[block] + blocks[block] - 1):
            node.read(int(entry), int(entry) + 1)
            assert [*node._slices][-1] == (block, starts[block])
            node._slices.clear()


def window_of(sizes, window, **settings):
    return run_of(sizes, canonical_nodes=1, window=window, **settings).epoch(0).order


def test_in_the_middle_of_an_epoch_pieces_are_equal_and_in_the_beginning_half_as_large():
    assert pieces_of(80, place=9, window=4).tolist() == [20, 20, 20, 20]
    assert pieces_of(80, place=0, window=4).tolist() == [10, 10, 10, 50]


def test_parts_that_are_read_piece_by_piece_are_read_alike(monkeypatch):
    sizes = [300, 20, 500, 250, 40, 301, 90]
    whole = window_of(sizes, 3, quick_start=False)
    wanted = whole.ids(np.arange(whole.size))
    monkeypatch.setattr(windows, "_KEPT_PART", 100)
    monkeypatch.setattr(windows, "_SLICE", 60)
    for step in (1, 37, 400):
        order = window_of(sizes, 3, quick_start=False)
        for begin in [*range(0, order.size, step), 5, 1300, 0]:
            at = np.arange(begin, min(begin + 64, order.size))
            assert np.array_equal(order._read(at), wanted[at])


@pytest.mark.parametrize("size", [20_000, 200_000, 1_000_000])
def test_a_node_keeps_at_most_two_megabytes_whatever_its_shards_have(size):
    node = window_of([size] * 12, 8)._node(0)
    for block in range(12):
        begin = int(node._begins[block])
        node.read(begin, begin + 10)
        ids = [*node._slices.values(), *node._small_parts.values()]
        assert sum(array.nbytes for array in ids) <= 4 * (2 * windows._SLICE + 8 * windows._KEPT_PART)


@pytest.mark.parametrize(("nodes", "window"), [(16, 8), (2, 3), (1, 128)])
def test_a_quick_start_reads_shards_from_their_beginnings(nodes, window):
    size = 1024
    settings = {"batch_size": 256, "shuffle": True, "canonical_nodes": nodes, "window": window}
    for epoch in (0, 3):
        pieces = []
        for quick_start in (True, False):
            order = run_over([[size] * 400], **settings, quick_start=quick_start).epoch(epoch)
            ids = order.ids(0, order.num_samples)
            assert np.array_equal(np.sort(ids), np.arange(order.num_samples))
            pieces.append(ids)
        quick, other = pieces
        half_piece = size // (2 * window)
        first = quick[: nodes * half_piece]  # the first mixing block of each node
        shards, within = np.divmod(first, size)
        assert np.unique(shards).tolist() == np.unique(other[: nodes * half_piece] // size).tolist()
        assert len(np.unique(shards)) == nodes
        assert sorted(within.tolist()) == sorted(list(range(half_piece)) * nodes)
        assert within.tolist() != sorted(within.tolist())  # in each block, they are shuffled
        filled = nodes * half_piece * window * (window - 1) // 2  # so many samples come before the window is full
        for shard in np.unique(quick[:filled] // size).tolist():
            own = np.sort(quick[:filled][quick[:filled] // size == shard] % size)
            assert own.tolist() == list(range(len(own)))


def test_without_a_window_there_is_no_quick_start():
    runs = [run_over([[50] * 20], batch_size=8, shuffle=True, window=1, quick_start=quick) for quick in (True, False)]
    assert np.array_equal(*(run.epoch(0).ids(0, 1000) for run in runs))


@prop
@given(st.integers(1, 300), st.integers(1, 20), st.integers(0, 2**62))
def test_a_deal_gives_each_node_one_of_every_group_of_neighbours(num_shards, nodes, seed):
    place = deal_shards(seed, num_shards, nodes)
    assert sorted(place.tolist()) == list(range(num_shards))
    groups = np.argsort(place) // nodes
    stretches = np.split(groups, np.flatnonzero(np.diff(groups) <= 0) + 1)
    assert len(stretches) <= nodes
    assert all(stretch.tolist() == list(range(len(stretch))) for stretch in stretches)
    assert {len(stretch) for stretch in stretches} <= {num_shards // nodes, -(-num_shards // nodes)}


@prop
@given(
    st.lists(st.integers(0, 60), max_size=200),
    st.integers(1, 20),
    st.integers(1, 9),
    st.integers(0, 19),
    st.integers(0, 9),
)
def test_a_spread_takes_every_part_once(groups, nodes, window, node, epoch):
    order = spread_parts((9176, epoch, 0, node % nodes), np.array(groups, dtype=np.int64), 61, nodes, window)
    assert sorted(order.tolist()) == list(range(len(groups)))


def test_active_parts_of_all_nodes_lie_in_different_strata():
    nodes, window, parts = 4, 3, 120  # ten parts to a stratum
    orders = [spread_parts((9176, 0, 0, node), np.arange(parts), parts, nodes, window) for node in range(nodes)]
    for at in range(parts - window + 1):
        strata = [part // 10 for order in orders for part in order[at : at + window].tolist()]
        assert len(set(strata)) == nodes * window


def test_a_node_reads_the_same_shards_in_every_epoch_and_in_another_order():
    run = run_of([10] * 64)
    for node in range(16):
        first, second = node_shards(run, 0, node), node_shards(run, 1, node)
        assert set(first.tolist()) == set(second.tolist())
    assert not np.array_equal(run.epoch(0).ids(0, 640), run.epoch(1).ids(0, 640))


def test_positions_are_dense_and_nodes_differ_by_one_sample_at_most():
    run = run_of([7] * 13)
    counts = np.bincount(run.epoch(0).canonical(0, 91), minlength=16)
    assert counts.sum() == 91
    assert counts.max() - counts.min() <= 1


@pytest.mark.parametrize("window", [1, 2, 5])
def test_never_more_than_w_parts_of_a_node_are_active_and_one_enters_at_a_time(window):
    run = run_of([40] * 48, canonical_nodes=2, window=window)
    for node in range(2):
        shards = node_shards(run, 0, node)
        first = np.unique(shards, return_index=True)[1]
        last = len(shards) - np.unique(shards[::-1], return_index=True)[1]
        active = [int(((first <= at) & (at < last)).sum()) for at in range(len(shards))]
        assert max(active) == window


def test_the_first_batch_needs_only_the_first_part_of_each_node():
    run = run_of([600] * 400)
    assert len(set(run.snapshot.shards_of(run.epoch(0).ids(0, 256)).tolist())) == 16


def test_another_seed_is_another_order():
    first, second = (run_of([10] * 64, seed=seed).epoch(0).ids(0, 640) for seed in (1, 2))
    assert not np.array_equal(first, second)


def test_the_largest_seed_and_a_late_epoch_work():
    order = run_of([10] * 64, seed=2**63 - 1).epoch(10**9)
    assert sorted(order.ids(0, 640).tolist()) == list(range(640))
