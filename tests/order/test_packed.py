"""An order of packed rows: every token once, in the same rows wherever it is read from."""

from __future__ import annotations

import hashlib
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_stream.order import OrderConfig, RunOrder, Snapshot, StreamWeights
from lightning_stream.order.packed_order import PackedOrder, RowPosition, RowRange, RowSpans
from lightning_stream.order.packing import Packing
from lightning_stream.order.permutation import RngStream, random_u64

prop = settings(max_examples=100, deadline=None, derandomize=True)
lengths_of = st.lists(st.integers(0, 25), min_size=1, max_size=80)
packings = st.builds(Packing, st.integers(1, 20), st.integers(1, 30))


class Recorded:
    """An order of samples that remembers which positions were asked for."""

    def __init__(self, ids):
        self._ids = np.asarray(ids, dtype=np.int64)
        self.num_samples = len(self._ids)
        self.asked = []

    def ids(self, begin, end):
        self.asked.append((begin, end))
        return self._ids[begin:end]


def order_of(num_samples, seed=5):
    return Recorded(np.argsort(random_u64(RngStream.SAMPLES, seed, size=num_samples)))


def packed_of(lengths, packing, **given):
    return PackedOrder(order_of(len(lengths)), np.array(lengths, dtype=np.uint32), packing, **{"key": (7, 0), **given})


def rows_of(spans):
    """Each row as a list of (sample, first token, tokens)."""
    flat = list(zip(spans.ids.tolist(), spans.first.tolist(), spans.num_tokens.tolist(), strict=True))
    edges = spans.edges.tolist()
    return [flat[a:b] for a, b in pairwise(edges)]


def all_rows(packed):
    return rows_of(RowSpans.of(packed.walk(RowPosition())))


@prop
@given(lengths_of, packings)
def test_every_token_of_an_epoch_is_in_one_row(lengths, packing):
    packed = packed_of(lengths, packing)
    tokens = [(i, first + t) for row in all_rows(packed) for i, first, count in row for t in range(count)]
    assert sorted(tokens) == [(i, t) for i, length in enumerate(lengths) for t in range(length)]


@prop
@given(lengths_of, packings)
def test_a_span_names_the_position_of_its_sample_and_stays_in_its_window(lengths, packing):
    packed = packed_of(lengths, packing)
    drawn = order_of(len(lengths)).ids(0, len(lengths))
    for rows in packed.walk(RowPosition()):
        spans = RowSpans.of([rows])
        assert np.array_equal(drawn[spans.positions], spans.ids)
        assert set((spans.positions // packing.window).tolist()) == {rows.window.number}


@prop
@given(lengths_of, packings, st.data())
def test_a_seek_plans_the_window_of_its_position_alone(lengths, packing, data):
    packed = packed_of(lengths, packing)
    windows = [one.window.number for one in packed_of(lengths, packing).walk(RowPosition())]
    if windows:
        number = data.draw(st.sampled_from(windows))
        next(packed.walk(RowPosition(number, 0)))
        size = packing.window
        assert packed._order.asked == [(number * size, min((number + 1) * size, len(lengths)))]


@prop
@given(lengths_of, packings)
def test_rows_are_numbered_over_the_epoch(lengths, packing):
    packed = packed_of(lengths, packing)
    positions = [RowPosition(one.window.number, row) for one in packed.walk(RowPosition()) for row in range(one.end)]
    assert [packed.position_of(number) for number in range(len(positions))] == positions
    assert [packed.row_number(position) for position in positions] == list(range(len(positions)))
    assert packed.num_rows == len(positions) == packed.first_rows[-1]
    with pytest.raises(ValueError, match="Rows count from 0"):
        packed.position_of(len(positions))


def test_saved_numbers_of_rows_spare_the_planning():
    lengths, packing = np.arange(100) % 13, Packing(16, 10)
    packed = packed_of(lengths, packing)
    assert packed.first_rows.tolist() == [0]
    packed.row_number(RowPosition(4, 0))
    assert len(packed.first_rows) == 5
    other = packed_of(lengths, packing, first_rows=packed.first_rows)
    assert other.num_rows == packed_of(lengths, packing).num_rows
    assert other._order.asked[0] == (40, 50)


@pytest.mark.parametrize("first_rows", [[], [1, 2], [0, 3, 2], [0] * 12])
def test_numbers_of_rows_of_another_epoch_are_refused(first_rows):
    with pytest.raises(ValueError, match="first_rows must rise from 0 and have at most 11 numbers"):
        packed_of(np.ones(100), Packing(16, 10), first_rows=np.array(first_rows, dtype=np.int64))


def test_seed_epoch_and_window_each_permute_the_rows_and_nothing_else():
    lengths, packing = [5] * 400, Packing(10, 200)
    plain = packed_of(lengths, packing, key=None)
    orders = {}
    for key in ((7, 0), (7, 1), (8, 0), None):
        packed = packed_of(lengths, packing, key=key)
        for number in (0, 1):
            rows = rows_of(RowSpans.of([RowRange(packed.window(number), 0, 100)]))
            in_order = rows_of(RowSpans.of([RowRange(plain.window(number), 0, 100)]))
            assert sorted(rows) == sorted(in_order)
            orders[key, number] = tuple(in_order.index(row) for row in rows)
    assert orders[None, 0] == orders[None, 1] == tuple(range(100))
    assert len(set(orders.values())) == 7


def test_the_rows_of_an_epoch_never_change():
    lengths = random_u64(RngStream.SAMPLES, 3, size=5000) % np.uint64(700)
    run = RunOrder(Snapshot.of([[500] * 10]), [StreamWeights()], OrderConfig.resolve(batch_size=64, shuffle=True))
    packed = PackedOrder(run.epoch(2), lengths.astype(np.uint32), Packing(512, 1024), key=(9176, 2))
    spans = RowSpans.of(packed.walk(RowPosition()))
    columns = np.concatenate([spans.edges, spans.ids, spans.positions, spans.first, spans.num_tokens]).astype("<i8")
    assert hashlib.sha256(columns.tobytes()).hexdigest()[:16] == "732640d45ae203f5"


def test_lengths_may_be_memory_mapped(tmp_path):
    lengths = (np.arange(300) % 40).astype("<u4")
    lengths.tofile(tmp_path / "lengths.bin")
    mapped = np.memmap(tmp_path / "lengths.bin", dtype="<u4", mode="r")
    packed = PackedOrder(order_of(300), mapped, Packing(32, 100), key=(7, 0))
    assert all_rows(packed) == all_rows(packed_of(lengths, Packing(32, 100)))


def test_a_sample_that_is_drawn_twice_is_packed_twice():
    packed = PackedOrder(Recorded([0, 1, 0]), np.array([3, 4]), Packing(8, 8))
    assert all_rows(packed) == [[(0, 0, 3), (1, 0, 4)], [(0, 0, 3)]]


def test_windows_of_empty_documents_have_no_rows():
    packed = PackedOrder(Recorded(range(6)), np.array([0, 0, 3, 3, 0, 0]), Packing(8, 2))
    assert [one.window.number for one in packed.walk(RowPosition())] == [1]
    assert packed.first_rows.tolist() == [0]
    assert packed.num_rows == 1


@pytest.mark.parametrize("start", [RowPosition(0, 99), RowPosition(0, -1), RowPosition(-1, 0)])
def test_positions_outside_the_epoch_are_refused(start):
    with pytest.raises(ValueError, match=r"the position is row|Windows count from 0"):
        next(packed_of([5] * 10, Packing(10, 4)).walk(start))


@pytest.mark.parametrize("lengths", [np.ones((2, 2), np.int64), np.ones(4)])
def test_lengths_of_another_kind_are_refused(lengths):
    with pytest.raises(ValueError, match="Lengths must be a 1-d array of integers; found"):
        PackedOrder(order_of(4), lengths, Packing(8))
