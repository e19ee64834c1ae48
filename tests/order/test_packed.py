"""An epoch of packed rows: every token once, in the same rows and batches wherever it is read from."""

from __future__ import annotations

import hashlib
import json
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs
from support.orders import run_over

from lightning_stream.errors import StateError
from lightning_stream.order import (
    BatchPlan,
    OrderConfig,
    Position,
    RunOrder,
    Schedule,
    Snapshot,
    StreamWeights,
    World,
)
from lightning_stream.order.micro_batches import MicroBatches
from lightning_stream.order.packing import RowPacking, RowSpans
from lightning_stream.order.permutation import RngStream, random_u64
from lightning_stream.order.rows import CountedWindows, PackedSequence

prop = settings(max_examples=60, deadline=None, derandomize=True)
lengths_of = st.lists(st.integers(0, 25), min_size=1, max_size=80)
packings = st.builds(RowPacking, st.integers(1, 20), st.integers(1, 30), st.sampled_from(["split", "truncate"]))
evens = st.sampled_from([False, True, "tokens * seven"])
tails = st.sampled_from(["pad", "drop", "exact"])


@dataclass(frozen=True)
class Costs:
    """What samples cost, far from their squared lengths."""

    lengths: np.ndarray

    def __call__(self, ids):
        return self.lengths[ids] * (ids % 7)


def run_of(lengths, packing, *, shards=7, batch_size=8, shuffle=True, streams=1, **given):
    sizes = np.diff(np.linspace(0, len(lengths), shards + 1).astype(int)).tolist()
    per_stream = [sizes[k::streams] for k in range(streams)]
    return run_over(
        per_stream,
        lengths=np.array(lengths, dtype=np.uint32),
        amounts=Costs(np.array(lengths)),
        batch_size=batch_size,
        shuffle=shuffle,
        packing=packing,
        **given,
    )


def rows_of(spans):
    """Each row as a tuple of (sample, first token, tokens)."""
    flat = list(zip(spans.ids.tolist(), spans.first.tolist(), spans.num_tokens.tolist(), strict=True))
    return [tuple(flat[a:b]) for a, b in pairwise(spans.edges.tolist())]


def epoch_rows(run, epoch=0):
    order = run.epoch(epoch)
    return rows_of(order.rows(0, order.num_samples))


def kept_tokens(lengths, packing):
    most = packing.row_length if packing.long_documents == "truncate" else 10**9
    return [(i, t) for i, length in enumerate(lengths) for t in range(min(length, most))]


@prop
@given(lengths_of, packings, st.booleans(), st.sampled_from(["random", "stratified"]), evens)
def test_every_token_of_an_epoch_is_in_one_row(lengths, packing, shuffle, method, even_rows):
    run = run_of(lengths, packing, shuffle=shuffle, streams=2, batching_method=method, even_rows=even_rows)
    tokens = [(i, first + t) for row in epoch_rows(run) for i, first, count in row for t in range(count)]
    assert sorted(tokens) == kept_tokens(lengths, packing)


@prop
@given(lengths_of, packings, tails, st.integers(1, 4), st.integers(1, 4))
def test_the_shares_of_any_world_are_the_same_global_batches(lengths, packing, tail, replicas, per_replica):
    batch_size = replicas * per_replica
    alone = MicroBatches(BatchPlan(run_of(lengths, packing).epoch(0), batch_size=batch_size, tail=tail), batch_size)
    wanted = {b.begin: sorted(rows_of(b.without_padding().rows)) for b in alone.walk()}
    worlds = [World(rank, replicas) for rank in range(replicas)]
    plans = [BatchPlan(run_of(lengths, packing).epoch(0), batch_size=batch_size, tail=tail, world=w) for w in worlds]
    shares = [list(MicroBatches(plan, max(1, per_replica // 2)).walk()) for plan in plans]
    assert len({len(each) for each in shares}) == 1
    rows = [(p, row) for each in shares for b in each for p, row in counted(b)]
    assert sorted(p for p, _ in rows) == list(range(len(rows)))
    if tail != "exact":  # which moves the last border with the number of replicas
        found = {begin: sorted(row for p, row in rows if begin <= p < begin + batch_size) for begin in wanted}
        assert found == wanted


def counted(batch):
    return [
        (p, row)
        for p, row, filler in zip(batch.positions.tolist(), rows_of(batch.rows), batch.filler.tolist(), strict=True)
        if not filler
    ]


@prop
@given(lengths_of, packings, st.data())
def test_a_state_resumes_with_the_same_rows_in_a_new_process(lengths, packing, data):
    even_rows = data.draw(evens)
    run = run_of(lengths, packing, even_rows=even_rows)
    whole = epoch_rows(run, 1)
    at = data.draw(st.integers(0, len(whole)))
    before = Position.start(run, batch_size=8, tail="pad", epoch=1).advanced(run, at)
    state = json.dumps(replace(before, landmark=run.epoch(1).counted_windows(at)).to_state())
    position = Position.from_state(json.loads(state))
    order = position.order_in(run_of(lengths, packing, even_rows=even_rows))
    assert rows_of(order.rows(at, len(whole))) == whole[at:]
    assert order.num_samples == len(whole)
    assert rows_of(order.rows(0, len(whole))) == whole, "and what is before the landmark can be read too"


def most_of_a_node(even_rows, costs_of):
    """The most costs of a canonical node in a global batch of 48 rows of each, over the mean, in the worst batch."""
    lengths = np.random.default_rng(0).lognormal(4, 1.2, 40_000).clip(1, 700).astype(int)
    run = run_of(lengths, RowPacking(1024, 4000), shards=64, batch_size=8 * 48, canonical_nodes=8, even_rows=even_rows)
    spans = run.epoch(0).rows(0, 10 * 8 * 48)
    costs = np.add.reduceat(costs_of(spans, lengths), spans.edges[:-1]).reshape(10, 48, 8).sum(axis=1)
    return (costs.max(axis=1) / costs.mean(axis=1)).max()


def test_canonical_nodes_have_nearly_equal_amounts_where_rows_are_even_by_them():
    def most(even_rows):
        return most_of_a_node(even_rows, lambda spans, lengths: Costs(lengths)(spans.ids))

    assert most("tokens * seven") < 1.06 < 1.09 < min(most(True), most(False))


def test_canonical_nodes_have_nearly_equal_work_where_rows_are_even():
    def most(even_rows):
        return most_of_a_node(even_rows, lambda spans, lengths: spans.num_tokens**2)

    assert most(True) < 1.1 < 1.17 < most(False)


def test_rows_are_even_where_a_new_run_asks_and_older_states_keep_their_order():
    packing, kept = RowPacking(64, 20), {"batch_size": 8, "shuffle": True}
    former = OrderConfig.resolve(packing=packing, **kept)
    assert not former.even_rows
    assert "even_rows" not in former.to_state()
    assert not OrderConfig.resolve(packing=packing, resumed=former, **kept).even_rows
    new = OrderConfig.resolve(packing=packing, even_rows=True, **kept)
    assert OrderConfig.resolve(packing=packing, resumed=OrderConfig.from_state(new.to_state()), **kept).even_rows
    named = OrderConfig.resolve(packing=packing, even_rows="images", **kept)
    resumed = OrderConfig.resolve(packing=packing, resumed=OrderConfig.from_state(named.to_state()), **kept)
    assert resumed.even_rows == "images"
    with pytest.raises(ValueError, match="even by 'images'"):
        RunOrder(Snapshot.of([[8]]), [StreamWeights()], named, np.full(8, 20, np.uint32))
    assert not OrderConfig.resolve(even_rows=True, **kept).even_rows
    assert not OrderConfig.resolve(packing=packing, even_rows=True, batch_size=8, shuffle=False).even_rows


def test_threads_that_share_an_order_read_the_same_rows():
    lengths, packing = np.arange(3000) % 61, RowPacking(128, 20)
    whole = epoch_rows(run_of(lengths, packing))
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for attempt in range(5):
            order = run_of(lengths, packing).epoch(0, run_of(lengths, packing).epoch(0).counted_windows(300)).order

            def read(seed, order=order):
                at = np.random.default_rng(seed).integers(0, len(whole), (40, 5))
                return all(rows_of(order.spans(one)) == [whole[p] for p in one.tolist()] for one in at)

            with ThreadPoolExecutor(6) as pool:
                assert all(pool.map(read, range(6 * attempt, 6 * attempt + 6)))
            assert order.size == len(whole)
    finally:
        sys.setswitchinterval(before)


@pytest.mark.parametrize("window", [1, 3, 11])
def test_an_interrupt_leaves_an_order_as_it_was(window):
    class Interrupting:
        reads = 0

        def __getitem__(self, ids):
            self.reads += 1
            if self.reads == window:
                raise InterruptedError
            return lengths[ids]

    lengths, reader = np.arange(3000) % 61, Interrupting()
    order = run_of(lengths, RowPacking(128, 100)).epoch(0)
    for sequence in order.order._sequences:
        sequence._lengths = reader
    with pytest.raises(InterruptedError):
        order.reaches(10**6)
    assert rows_of(order.rows(0, order.num_samples)) == epoch_rows(run_of(lengths, RowPacking(128, 100)))


def test_a_position_behind_the_last_row_and_a_landmark_of_other_rows_are_refused():
    run = run_of(np.arange(900) % 61, RowPacking(128, 100))
    size = run.epoch(0).num_samples
    at = replace(Position.start(run, batch_size=8, tail="pad"), position=size)
    assert at.check(run) == []
    with pytest.raises(StateError, match=f"position is {size + 1}, but epoch 0 ends at {size}"):
        replace(at, position=size + 1).check(run)
    count = len(run.epoch(0).counted_windows(600).windows)
    order = run_of(np.arange(900) % 61, RowPacking(128, 100)).epoch(0, CountedWindows(0, ((0, 0, 29),) * count))
    with pytest.raises(StateError, match=r"window 0 has \d+ rows, not 29"):
        order.rows(0, 1)


def test_a_resume_plans_one_window_of_the_sequences_that_a_rank_reads():
    lengths, packing = np.arange(4000) % 61, RowPacking(128, 100)
    run = run_of(lengths, packing)
    landmark = run.epoch(0).counted_windows(600)
    again = run_of(lengths, packing).epoch(0, landmark)
    plan = BatchPlan(again, batch_size=8, world=World(1, 4), start=600)
    assert len(plan.share(0)) == 2
    assert [len(one._windows) for one in again.order._sequences] == [0, 0, 1, 1, 0, 0, 0, 0]


def test_a_landmark_at_the_border_of_a_window_holds_after_a_change_there():
    lengths, packing = np.arange(900) % 61, RowPacking(128, 100)
    schedule = Schedule([(0, {"a": 2, "b": 1})])
    run = run_of(lengths, packing, streams=2, schedule=schedule)
    window, _, border = run.epoch(0).counted_windows(50).windows[0]
    at = run.settled(0, border)
    assert at == 100 * (window + 1)
    assert run.settled(0, border + 1) == at + 100
    assert run.settled(0, run.epoch(0).num_samples + 1) == 1000
    changed = partial(run_of, lengths, packing, streams=2, schedule=schedule.changed(at, {"b": 1}))
    order = changed().epoch(0, run.epoch(0).counted_windows(border))
    assert rows_of(order.rows(border, order.num_samples)) == epoch_rows(changed())[border:]
    assert epoch_rows(changed())[:border] == epoch_rows(run)[:border]


def test_a_landmark_of_another_epoch_or_other_data_is_ignored():
    lengths, packing = np.arange(4000) % 61, RowPacking(128, 100)
    run, other = run_of(lengths, packing), run_of(lengths[::-1], packing)
    wanted = epoch_rows(run, 1)
    again = run_of(lengths, packing)
    order = again.epoch(1, run.epoch(0).counted_windows(600))
    assert rows_of(order.rows(0, order.num_samples)) == wanted
    foreign = replace(Position.start(other, batch_size=8, tail="pad"), landmark=other.epoch(0).counted_windows(600))
    elsewhere = replace(foreign, snapshot=structs.replace(foreign.snapshot, digest="0" * 32))
    assert rows_of(elsewhere.order_in(run).rows(600, 640)) == epoch_rows(run)[600:640]


def test_a_state_has_at_most_1_kb():
    lengths = random_u64(RngStream.SAMPLES, 3, size=200_000) % np.uint64(700)
    run = run_of(lengths, RowPacking(512, 256, lengths="0" * 32), batch_size=64, shards=200)
    at = run.epoch(0).num_samples - 5
    state = replace(
        Position.start(run, batch_size=64, tail="pad"), position=at, landmark=run.epoch(0).counted_windows(at)
    )
    assert len(json.dumps(state.to_state())) <= 1024


def test_a_state_far_in_an_epoch_of_a_billion_documents_has_less_than_a_kilobyte():
    packing, rng = RowPacking(8192, 16384, lengths="0" * 32), np.random.default_rng(2)
    config = OrderConfig.resolve(batch_size=1024, shuffle=True, packing=packing)
    snapshot = Snapshot.of([np.full(100_000, 10_000)], stream_digests=["0" * 64])
    run = RunOrder(snapshot, [StreamWeights()], config, np.broadcast_to(np.uint32(700), 10**9))
    begins = np.array([3800, 5_400_000, 5_401_400]) + rng.integers([-9] * 2 + [0], [9, 9000, 9], (16, 3)).cumsum(axis=0)
    windows = tuple(map(tuple, np.sort(begins, axis=1).tolist()))
    start = Position.start(run, batch_size=1024, tail="pad", epoch=3)
    position = replace(start, position=86_000_000, ledger=2**64 - 1, landmark=CountedWindows(3, windows))
    state = json.dumps(position.to_state())
    assert len(state) <= 1024
    assert Position.from_state(json.loads(state)).landmark == position.landmark


@pytest.mark.parametrize("landmark", [[[1]], [[0, -1, 2]], [[4, 9, 8]], [[1, 5, 9], [0, -6, 0]], "all", [[1.5, 2, 3]]])
def test_a_damaged_landmark_is_refused(landmark):
    run = run_of([5] * 40, RowPacking(10, 10))
    state = {**Position.start(run, batch_size=8, tail="pad").to_state(), "landmark": landmark}
    with pytest.raises(StateError, match="landmark must be None or a list of"):
        Position.from_state(state)


def test_other_packings_and_lengths_are_other_settings():
    run = run_of([5] * 40, RowPacking(10, 10, lengths="a"))
    position = Position.start(run, batch_size=8, tail="pad")
    for packing in (RowPacking(12, 10, lengths="a"), RowPacking(10, 10, lengths="b"), RowPacking(10, 9, lengths="a")):
        with pytest.raises(StateError, match="packing was RowPacking"):
            position.check(run_of([5] * 40, packing))
    position.check(run_of([5] * 40, RowPacking(10, 10, lengths="a")))


def test_while_all_sequences_have_rows_a_batch_has_equally_many_of_each():
    run = run_of(np.arange(4000) * 7919 % 97, RowPacking(128, 100), batch_size=32)
    order = run.epoch(0)
    counts = [np.bincount(order.canonical(k * 32, k * 32 + 32), minlength=16).tolist() for k in range(30)]
    assert counts == [[2] * 16] * 30


def test_a_small_epoch_is_packed_in_fewer_sequences():
    few, many = run_of([5] * 40, RowPacking(10, 100)), run_of([5] * 4000, RowPacking(10, 100))
    assert len(few.epoch(0).order._sequences) == 1
    assert len(many.epoch(0).order._sequences) == 8


def test_nodes_that_are_packed_apart_keep_their_shards_to_themselves():
    snapshot = Snapshot.of([[200] * 320])
    lengths = (random_u64(RngStream.SAMPLES, 3, size=snapshot.num_samples) % np.uint64(400)).astype(np.uint32)

    def downloads(window):
        config = OrderConfig.resolve(batch_size=64, shuffle=True, packing=RowPacking(512, window))
        order = RunOrder(snapshot, [StreamWeights()], config, lengths).epoch(0)
        plans = [BatchPlan(order, batch_size=64, world=World(rank, 4, 1)) for rank in range(4)]
        used = [np.unique(snapshot.shards_of(np.concatenate([p.share(k).sample_ids for k in range(p.num_batches)])))
                for p in plans]  # fmt: skip
        return sum(map(len, used)) / snapshot.num_shards

    assert downloads(window=64_000) == 4  # one sequence of all nodes
    assert downloads(window=1000) < 1.2


def test_only_the_last_batches_need_the_number_of_rows():
    run = run_of(np.arange(40_000) % 61, RowPacking(128, 100))
    batches = MicroBatches(BatchPlan(run.epoch(0), batch_size=8), 8)
    assert next(batches.walk()).begin == 0
    assert batches[200].begin == 1600
    assert sum(one.counts._known[1][-1] for one in run.epoch(0).order._sequences) < 5000
    assert len(list(batches.walk())) == len(batches)


def test_the_rows_of_an_epoch_never_change():
    lengths = random_u64(RngStream.SAMPLES, 3, size=5000) % np.uint64(700)
    run = run_of(lengths, RowPacking(512, 256), shards=10, batch_size=64, quick_start=False)
    order = run.epoch(2)
    spans = order.rows(0, order.num_samples)
    columns = np.concatenate([spans.edges, spans.ids, spans.first, spans.num_tokens]).astype("<i8")
    assert hashlib.sha256(columns.tobytes()).hexdigest()[:16] == "9d3fbb3b3127ee55"
    assert (
        hashlib.sha256(order.ids(0, order.num_samples).astype("<i8").tobytes()).hexdigest()[:16] == "60c51e7ae3b046c7"
    )


@prop
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5), st.integers(1, 5)), min_size=1, max_size=6), st.data())
def test_a_fingerprint_differs_for_any_other_row(spans, data):
    def fingerprint(row):
        return RowSpans(np.array([0, len(row)]), *map(np.array, zip(*row, strict=True))).fingerprints()[0]

    other = data.draw(st.permutations(spans))
    if list(other) != spans:
        assert fingerprint(other) != fingerprint(spans)
    k, part = data.draw(st.integers(0, len(spans) - 1)), data.draw(st.integers(0, 2))
    changed = [list(one) for one in spans]
    changed[k][part] += 1
    assert fingerprint(changed) != fingerprint(spans)
    assert 0 <= fingerprint(spans) < 2**63


class Ids:
    def __init__(self, ids):
        self._ids, self.size = np.asarray(ids, dtype=np.int64), len(ids)

    def ids(self, at):
        return self._ids[at]


def test_a_sample_that_is_drawn_twice_is_packed_twice():
    rows = PackedSequence(Ids([0, 1, 0]), np.array([3, 4]), RowPacking(8, 8), None)
    assert rows.counts.up_to(10) == 2
    assert rows_of(rows.spans(np.arange(2))) == [((0, 0, 3), (1, 0, 4)), ((0, 0, 3),)]


def test_windows_of_empty_documents_have_no_rows():
    rows = PackedSequence(Ids(range(6)), np.array([0, 0, 3, 3, 0, 0]), RowPacking(8, 2), None)
    assert rows.counts.up_to(10) == 1
    assert rows_of(rows.spans(np.array([0]))) == [((2, 0, 3), (3, 0, 3))]


@pytest.mark.parametrize("rows", [2, 7, 100])
def test_threads_that_count_rows_at_the_same_time_count_them_once(rows):
    class Interrupted(Ids):
        """While a window is planned, another thread counts rows too: evictions ask for the shards that come next."""

        def ids(self, at):
            if at[0] not in planned:
                planned.append(at[0])
                sequence.counts.up_to(rows)
                sequence.counts.find(rows // 2)
            return super().ids(at)

    planned: list[int] = []
    lengths = np.arange(40) % 7 + 1
    sequence = PackedSequence(Interrupted(range(40)), lengths, RowPacking(8, 5), None)
    alone = PackedSequence(Ids(range(40)), lengths, RowPacking(8, 5), None)
    for row in (1, 5, 12):
        assert sequence.counts.find(row) == alone.counts.find(row)
    assert sequence.counts.up_to(1000) == alone.counts.up_to(1000)
    wanted = np.array([9, 2, 14, 3])
    assert rows_of(sequence.spans(wanted)) == rows_of(alone.spans(wanted))


def test_threads_that_read_an_epoch_at_the_same_time_read_the_same_rows():
    lengths = np.arange(6000) % 61
    wanted = epoch_rows(run_of(lengths, RowPacking(128, 50)))

    def read(begin):
        found = [rows_of(order.rows(at, min(at + 9, len(wanted)))) for at in range(begin, len(wanted), 9)]
        return [row for rows in found for row in rows] == wanted[begin:]

    for _ in range(3):
        order = run_of(lengths, RowPacking(128, 50)).epoch(0)
        with ThreadPoolExecutor(8) as pool:
            assert all(pool.map(read, [0, 40, 0, 300, 7, 900, 0, 40]))


def test_lengths_may_be_memory_mapped(tmp_path):
    lengths = (np.arange(300) % 40).astype("<u4")
    lengths.tofile(tmp_path / "lengths.bin")
    mapped = np.memmap(tmp_path / "lengths.bin", dtype="<u4", mode="r")
    run = run_of(lengths, RowPacking(32, 100))
    again = RunOrder(run.snapshot, run.weights, run.config, mapped)
    assert epoch_rows(again) == epoch_rows(run)


def test_packing_needs_lengths_and_a_method_whose_samples_can_be_packed():
    run = run_of([5] * 10, RowPacking(10))
    with pytest.raises(ValueError, match="needs their lengths"):
        RunOrder(run.snapshot, run.weights, run.config)
    with pytest.raises(ValueError, match="batching_method random or stratified"):
        run_of([5] * 10, RowPacking(10), batching_method="per_stream")
    with pytest.raises(ValueError, match="batching_method random or stratified"):
        run_of([5] * 10, RowPacking(10), algorithm="py1e")


@prop
@given(lengths_of, packings, st.booleans())
def test_the_totals_of_an_epoch_are_those_of_its_rows(lengths, packing, drop):
    packing = replace(packing, long_documents="drop") if drop else packing
    run = run_of(lengths, packing)
    rows, totals = epoch_rows(run), run_of(lengths, packing).epoch(0).order.totals()
    tokens = sum(count for row in rows for _, _, count in row)
    assert (totals.num_rows, totals.num_tokens) == (len(rows), tokens)
    assert totals.padding == len(rows) * packing.row_length - tokens
    assert totals.lost_tokens == sum(lengths) - tokens
    assert totals.num_long == sum(length > packing.row_length for length in lengths)
