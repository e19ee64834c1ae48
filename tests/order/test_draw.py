"""What an epoch draws, and what is refused."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.orders import run_over

from lightning_stream.errors import SettingsMismatch
from lightning_stream.order import (
    OrderConfig,
    Position,
    RunOrder,
    Snapshot,
    StreamWeights,
    choose_per_stream,
    weights_digest,
)
from lightning_stream.order import draw as draws
from lightning_stream.order.bitmap import Bitmap
from lightning_stream.order.draw import Draw, _spread
from lightning_stream.order.permutation import permutation

TWO = Snapshot.of([[60, 40], [30, 20]], names=["web", "code"])


def chosen(*weights, epoch_size=None):
    return choose_per_stream(TWO, weights, epoch_size, seed=9176)


def drawn(sizes, epoch=0, weights=None, **arguments):
    run = run_over(sizes, [weights or StreamWeights()] * len(sizes), batch_size=4, **arguments)
    return np.bincount(run.epoch(epoch).ids(0, run.num_samples), minlength=run.snapshot.num_samples)


def test_no_weights_draw_every_sample_once():
    assert chosen(StreamWeights(), StreamWeights()) == (100, 50)


def test_proportions_share_the_epoch():
    assert chosen(StreamWeights(proportion=3), StreamWeights(proportion=1)) in {(113, 37), (112, 38)}
    assert chosen(StreamWeights(proportion=3), StreamWeights(proportion=1), epoch_size=1000) == (750, 250)


def test_what_rounding_loses_is_dealt_by_the_seed():
    weights = [StreamWeights(proportion=1)] * 2
    deals = {choose_per_stream(TWO, weights, 101, seed) for seed in range(20)}
    assert deals == {(51, 50), (50, 51)}


def test_repeat_and_choose_say_the_number_themselves():
    assert chosen(StreamWeights(repeat=1.5), StreamWeights(choose=7)) == (150, 7)


def test_an_epoch_size_without_weights_is_shared_by_size():
    assert chosen(StreamWeights(), StreamWeights(), epoch_size=30) == (20, 10)


@pytest.mark.parametrize(
    ("weights", "epoch_size", "message"),
    [
        ([StreamWeights(proportion=1), StreamWeights()], None, r"proportion.*means one for all.*'code'"),
        ([StreamWeights(repeat=2), StreamWeights()], 10, r"epoch_size=10.*'web'.*drop epoch_size"),
        ([StreamWeights(repeat=1, choose=2), StreamWeights()], None, r"'web' has repeat and choose"),
        ([StreamWeights(repeat=-1), StreamWeights(choose=-2)], None, r"repeat=-1.*choose=-2"),
        ([StreamWeights(proportion=0), StreamWeights(proportion=0)], None, "above 0"),
        ([StreamWeights(proportion=float("nan"))] * 2, None, "proportion=nan"),
        ([StreamWeights()], None, "2 streams, 1 weights"),
        ([StreamWeights(), StreamWeights()], 0, "epoch_size must be at least 1"),
        ([StreamWeights(repeat=1e18), StreamWeights()], None, r"fewer than 2\*\*63 samples"),
    ],
)
def test_weights_that_cannot_be_met_are_refused_with_the_reason(weights, epoch_size, message):
    with pytest.raises(ValueError, match=message):
        choose_per_stream(TWO, weights, epoch_size, seed=0)


def test_a_stream_that_cannot_fill_what_is_asked_is_named():
    empty = Snapshot.of([[10], [0]], names=["full", "empty"])
    with pytest.raises(ValueError, match=r"'empty' has no samples, but its weight asks for 5"):
        choose_per_stream(empty, [StreamWeights(), StreamWeights(choose=5)], None, seed=0)
    assert choose_per_stream(empty, [StreamWeights(), StreamWeights()], None, seed=0) == (10, 0)


@pytest.mark.parametrize("shuffle", [True, False])
def test_balanced_draws_again_each_epoch_and_fixed_does_not(shuffle):
    half = StreamWeights(repeat=0.5)
    epochs = [drawn([[50] * 4], epoch, half, shuffle=shuffle) for epoch in range(2)]
    fixed = [drawn([[50] * 4], epoch, half, shuffle=shuffle, sampling_method="fixed") for epoch in range(2)]
    assert not np.array_equal(*epochs)
    assert np.array_equal(*fixed)


def test_fine_granularity_draws_evenly_from_all_shards_and_coarse_from_few():
    fine = drawn([[50] * 20], weights=StreamWeights(choose=100)).reshape(20, 50).sum(axis=1)
    coarse = drawn([[50] * 20], weights=StreamWeights(choose=100), sampling_granularity=50).reshape(20, 50).sum(axis=1)
    assert set(fine.tolist()) == {5}
    assert sorted(coarse.tolist()) == [0] * 18 + [50, 50]


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.lists(st.integers(0, 30), min_size=1, max_size=20), st.integers(1, 40), st.data())
def test_a_spread_takes_exactly_what_is_asked_and_never_more_than_there_is(sizes, granularity, data):
    sizes = np.array(sizes, dtype=np.int64)
    if sizes.sum() == 0:
        return
    total = data.draw(st.integers(0, int(sizes.sum())))
    taken = _spread(sizes, total, granularity)
    assert taken.sum() == total
    assert (taken >= 0).all()
    assert (taken <= sizes).all()


def test_a_spread_stays_exact_at_a_trillion_samples():
    sizes = np.full(1000, 10**9, dtype=np.int64)
    assert int(_spread(sizes, 333_333_333_333, 1).sum()) == 333_333_333_333


def test_index_order_is_the_identity():
    run = RunOrder(TWO, [StreamWeights()] * 2, OrderConfig.resolve(batch_size=8))
    assert np.array_equal(run.epoch(3).ids(0, 150), np.arange(150))


@pytest.mark.parametrize("shuffle", [True, False])
def test_a_draw_takes_memory_by_shards_not_by_repeats(shuffle):
    snapshot = Snapshot.of([np.full(100_000, 10)])
    tracemalloc.start()
    drawn = Draw(snapshot, (1_000_000_003,), 9176, balanced=True, granularity=1).shards(0, [0])
    config = OrderConfig.resolve(batch_size=256, shuffle=shuffle)
    repeat = 1000 if not shuffle else 1
    order = RunOrder(snapshot, [StreamWeights(repeat=repeat)], config).epoch(0)
    order.ids(order.num_samples - 256, order.num_samples)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert drawn.count.sum() == 1_000_000_003
    assert peak < 30e6


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("repeat", [2, 2.5, 7.3])
def test_every_pass_over_a_shard_comes_whole_in_an_epoch_read_in_pieces(shuffle, repeat):
    run = RunOrder(
        TWO, [StreamWeights(repeat=repeat)] * 2, OrderConfig.resolve(batch_size=8, shuffle=shuffle, canonical_nodes=3)
    )
    order, total = run.epoch(1), run.num_samples
    pieces = np.concatenate([order.ids(at, min(at + 13, total)) for at in range(0, total, 13)])
    assert np.array_equal(pieces, order.ids(0, total))
    counts = np.bincount(pieces, minlength=150)
    assert (counts.min(), counts.max()) == (int(repeat), int(np.ceil(repeat)))


def test_an_epoch_of_more_passes_than_memory_holds_is_refused():
    run = RunOrder(TWO, [StreamWeights(repeat=1e9)] * 2, OrderConfig.resolve(batch_size=8, shuffle=True))
    with pytest.raises(ValueError, match=r"16 bytes for each pass.*4000000000 are drawn.*Lower repeat"):
        run.epoch(0)
    run = RunOrder(TWO, [StreamWeights(repeat=1e9)] * 2, OrderConfig.resolve(batch_size=8))
    assert run.epoch(0).ids(60 * 10**9 - 60, 60 * 10**9).tolist() == list(range(60))


def test_index_order_draws_a_partly_drawn_shard_once_for_all_its_batches(monkeypatch):
    drawn = []
    monkeypatch.setattr(draws, "permutation", lambda *key, size: drawn.append(size) or permutation(*key, size=size))
    order = run_over([[1000, 1000]], [StreamWeights(repeat=0.5)], batch_size=8)
    order = order.epoch(0)
    ids = np.concatenate([order.ids(at, at + 8) for at in range(0, 1000, 8)])
    assert np.array_equal(ids, np.sort(ids))
    assert [size for size in drawn if size == 1000] == [1000, 1000]


def test_weights_have_a_digest_of_their_own():
    digests = {weights_digest([one]) for one in (StreamWeights(), StreamWeights(repeat=1), StreamWeights(choose=1))}
    assert len(digests) == 3


def test_weights_of_equal_values_continue_a_run():
    def run(*repeats):
        return RunOrder(TWO, [StreamWeights(repeat=repeat) for repeat in repeats], OrderConfig.resolve(batch_size=4))

    for before, after in (((1, 2), (1.0, 2.0)), ((1.0, 0.5), (1, 0.5)), ((1.0, 0.5), (np.float64(1), 0.5))):
        begun = Position.start(run(*before), batch_size=4, tail="pad")
        assert begun.check(run(*after)) == []
        with pytest.raises(SettingsMismatch, match="weights"):
            begun.check(run(*after[:1], 3))


def test_a_snapshot_differs_by_sizes_split_and_digests():
    snapshots = [Snapshot.of([[1, 2]]), Snapshot.of([[1], [2]]), Snapshot.of([[2, 1]])]
    snapshots += [Snapshot.of([[1, 2]], stream_digests=["a"]), Snapshot.of([[1, 2]], stream_digests=["b"])]
    assert len({snapshot.digest for snapshot in snapshots}) == 5


def test_empty_shards_own_no_ids():
    snapshot = Snapshot.of([[0, 3, 0], [2, 0]])
    assert snapshot.shards_of(np.arange(5)).tolist() == [1, 1, 1, 3, 3]
    assert snapshot.streams_of(np.arange(5)).tolist() == [0, 0, 0, 1, 1]


def test_a_subset_has_an_order_and_a_digest_of_its_own():
    ids = np.array([149, 3, 61, 100])
    chosen = Bitmap.of_ids(ids, TWO.num_samples)
    snapshot = TWO.subset(chosen)
    assert [sizes.tolist() for sizes in snapshot.shard_sizes] == [[1, 1], [1, 1]]
    run = RunOrder(snapshot, [StreamWeights()] * 2, OrderConfig.resolve(batch_size=2, shuffle=True))
    assert sorted(chosen.select(run.epoch(0).ids(0, 4)).tolist()) == sorted(ids.tolist())
    other = TWO.subset(Bitmap.of_ids(ids[:3], TWO.num_samples))
    assert len({snapshot.digest, TWO.digest, other.digest}) == 3


@pytest.mark.parametrize("ids", [[3, 3], [150], [-1]])
def test_a_subset_of_unknown_or_repeated_samples_is_refused(ids):
    with pytest.raises(ValueError, match="each sample at most once, of ids 0 to 149"):
        Bitmap.of_ids(ids, 150)
