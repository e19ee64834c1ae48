"""Forgotten samples: a replay from the last checkpoint before them equals a run that has never had them."""

from __future__ import annotations

import hashlib
import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.orders import run_over

from lightning_stream.errors import SettingsMismatch
from lightning_stream.order import BatchPlan, OrderConfig, Position, RunOrder, Schedule, Snapshot, StreamWeights
from lightning_stream.order.buckets import LengthBuckets
from lightning_stream.order.forget import Forgotten
from lightning_stream.order.packing import RowPacking
from lightning_stream.order.replay import plan_replay

SIZES = [[40, 31, 22], [], [17, 60]]
METHODS = ["random", "stratified", "per_stream", "device_per_stream"]


def run_of(**settings):
    weights = [StreamWeights(repeat=settings.pop("repeat", None))] * len(SIZES)
    config = OrderConfig.resolve(batch_size=12, device_batch_size=4, **{"shuffle": True, **settings})
    lengths = None if config.packing is None else np.arange(170, dtype=np.uint32) * 37 % 31
    return RunOrder(Snapshot.of(SIZES), weights, config, lengths)


class Training:
    """A model whose weights are a hash of all it was trained on, and its checkpoints after every few steps."""

    def __init__(self, run, position=None, weights=b"", every=3):
        self.run, self.weights, self.checkpoints, self.every = run, weights, [], every
        self.position = position or Position.start(run, batch_size=12, tail="pad")

    def train(self, epochs):
        while self.position.epoch < epochs:
            plan = BatchPlan(self.run.epoch(self.position.epoch), batch_size=12, start=self.position.position)
            for k in range(plan.num_batches):
                self.weights = hashlib.sha256(self.weights + plan.ids(k).tobytes()).digest()
                self.position = self.position.advanced(self.run, plan.bounds(k)[1])
                if k % self.every == 0:
                    self.checkpoints.append((self.position.to_state(), self.weights))
            self.position = self.position.next_epoch()
        return self


def ids_of(run, epoch=0):
    order = run.epoch(epoch)
    return order.ids(0, order.num_samples)


@settings(max_examples=24, deadline=None, derandomize=True)
@given(st.data())
def test_a_replay_equals_a_run_that_never_had_the_samples(data):
    run = run_of(
        shuffle=data.draw(st.booleans()),
        batching_method=data.draw(st.sampled_from(METHODS)),
        sampling_method=data.draw(st.sampled_from(["balanced", "fixed"])),
        repeat=data.draw(st.sampled_from([1, 0.4, 2.5])),
        seed=data.draw(st.integers(0, 2**30)),
    )
    ids = data.draw(st.lists(st.integers(0, 169), min_size=1, max_size=5))
    whole = Training(run).train(3)
    states = [Position.from_state(state) for state, _ in whole.checkpoints]
    replay = plan_replay(run, ids, states)
    again = run.forgetting(replay.forgotten)
    never = Training(again).train(3)
    seen = [(epoch, at) for epoch in range(3) for at in np.flatnonzero(np.isin(ids_of(run, epoch), ids)).tolist()]
    newest = max((one.epoch, one.position) for one in states)
    assert (replay.epoch, replay.position) == next((one for one in seen if one < newest), (None, None))
    assert not any(np.isin(ids_of(again, epoch), ids).any() for epoch in range(3))
    if replay.checkpoint is None:
        assert seen[0] < (states[0].epoch, states[0].position)
        return
    state, weights = whole.checkpoints[replay.checkpoint]
    here = Position.from_state(state)
    assert here.check(again, tail="pad") == []
    assert here.ledger_matches(again)
    here = here.rebased_on(again, batch_size=12, tail="pad")
    replayed = Training(again, here, weights).train(3)
    assert replayed.weights == never.weights
    assert replayed.position == never.position
    assert replayed.weights != whole.weights or not seen


LENGTHS = np.arange(170) * 37 % 90 + 1
WINDOWS = {
    "rows": {"packing": RowPacking(64, window=20)},
    "buckets": {"buckets": LengthBuckets(24, 12)},
    "budget": {"buckets": LengthBuckets.resolved(LENGTHS, batch_size=12, window=36, batch_tokens=1400)},
}


@pytest.mark.parametrize("kind", WINDOWS)
def test_a_replay_of_rearranged_windows_equals_a_run_that_never_had_the_samples(kind):
    run = run_over(SIZES, lengths=LENGTHS, batch_size=12, shuffle=True, canonical_nodes=2, **WINDOWS[kind])
    whole = Training(run, every=1).train(2)
    states = [Position.from_state(state) for state, _ in whole.checkpoints]
    for ids in ([5], [100], [160, 20], [int(run.epoch(0).order.below.ids(np.arange(170))[-1])], range(80, 93)):
        replay = plan_replay(run, ids, states)
        again = run.forgetting(replay.forgotten)
        never = Training(again, every=1).train(2)
        for number, (state, weights) in enumerate(whole.checkpoints):
            here = Position.from_state(state)
            is_clean = (here.epoch, here.position) <= (replay.epoch, replay.position)
            assert is_clean == (replay.checkpoint is not None and number <= replay.checkpoint)
            if is_clean:
                here = here.rebased_on(again, batch_size=12, tail="pad")
                assert Training(again, here, weights).train(2).weights == never.weights != whole.weights
        assert plan_replay(again, [7], [states[0]]).forgotten.ids.tolist() == sorted({7, *ids})


@settings(max_examples=10, deadline=None, derandomize=True)
@given(st.data())
def test_a_replay_of_packed_rows_equals_a_run_that_never_had_the_documents(data):
    packing = RowPacking(12, data.draw(st.integers(1, 30)), data.draw(st.sampled_from(["split", "drop"])))
    method, repeat = data.draw(st.sampled_from(["random", "stratified"])), data.draw(st.sampled_from([1, 0.4, 2.5]))
    schedule = Schedule([(0, {"0": 1, "2": 2})], streams="012") if data.draw(st.booleans()) else None
    given = {"repeat": repeat} if schedule is None else {"schedule": schedule, "epoch_size": 150}
    run = run_of(packing=packing, batching_method=method, shuffle=data.draw(st.booleans()), **given)
    ids = data.draw(st.lists(st.integers(0, 169), min_size=1, max_size=3))
    whole = Training(run).train(2)
    states = [Position.from_state(state) for state, _ in whole.checkpoints]
    many = data.draw(st.booleans())
    replay = plan_replay(run, [*ids, *range(20, 25 * many)], states)
    again = run.forgetting(replay.forgotten)
    never = Training(again).train(2)
    for epoch in range(2):
        documents = again.epoch(epoch).documents
        assert not replay.forgotten.among(documents.ids(0, documents.num_samples)).any()
        seen = [at for one in replay.forgotten.ids.tolist() for at in run.where(one, epoch).tolist()]
        assert replay.position is None or not seen or (replay.epoch, replay.position) <= (epoch, min(seen))
    if replay.checkpoint is None:
        return
    state, weights = whole.checkpoints[replay.checkpoint]
    here = Position.from_state(state)
    assert here.check(again, tail="pad") == []
    assert here.ledger_matches(again)
    replayed = Training(again, here.rebased_on(again, batch_size=12, tail="pad"), weights).train(2)
    assert replayed.weights == never.weights
    assert replayed.position == never.position


@settings(max_examples=12, deadline=None, derandomize=True)
@given(st.data())
def test_a_replay_of_packed_rows_equals_a_run_that_never_had_the_samples(data):
    long_documents = data.draw(st.sampled_from(["split", "truncate", "drop"]))
    packing = RowPacking(data.draw(st.integers(5, 30)), data.draw(st.integers(3, 40)), long_documents)
    run = run_of(
        packing=packing,
        shuffle=data.draw(st.booleans()),
        batching_method=data.draw(st.sampled_from(["random", "stratified"])),
        repeat=data.draw(st.sampled_from([1, 0.4, 2.5])),
        seed=data.draw(st.integers(0, 2**30)),
    )
    ids = data.draw(st.lists(st.integers(0, 169), min_size=1, max_size=3))
    whole = Training(run, every=1).train(2)
    states = [Position.from_state(state) for state, _ in whole.checkpoints]
    replay = plan_replay(run, ids, states)
    again = run.forgetting(replay.forgotten)
    never = Training(again).train(2)
    for epoch in range(2):
        order = again.epoch(epoch)
        assert not np.isin(order.rows(0, order.num_samples).ids, ids).any()
    first = (9, 0) if replay.epoch is None else (replay.epoch, replay.position)
    clean = [number for number, here in enumerate(states) if (here.epoch, here.position) <= first]
    for here in states[len(clean) :]:
        with pytest.raises(SettingsMismatch, match="forgotten was None and is"):
            here.check(again)
    for number in clean:
        assert states[number].check(again, tail="pad") == []
    for number in {clean[-1], data.draw(st.sampled_from(clean))} if clean else ():
        assert states[number].ledger_matches(again)
        here = states[number].rebased_on(again, batch_size=12, tail="pad")
        assert Training(again, here, whole.checkpoints[number][1]).train(2).weights == never.weights


def test_a_forgotten_document_changes_its_window_of_rows_and_none_before():
    run = run_of(packing=RowPacking(20, 30), shuffle=True)
    order = run.epoch(0)
    for position in range(order.num_samples):
        document = int(order.rows(position, position + 1).ids[0])
        seen = run.first_seen(Forgotten.of(run.snapshot, [document]), (0, order.num_samples))
        again = run.forgetting(Forgotten.of(run.snapshot, [document])).epoch(0)
        assert seen is not None
        assert seen[1] <= position
        assert np.array_equal(again.ids(0, seen[1]), order.ids(0, seen[1]))


def test_checkpoints_that_have_seen_a_forgotten_sample_are_refused():
    run = run_of()
    whole = Training(run).train(1)
    forgotten = Forgotten.of(run.snapshot, [int(ids_of(run)[50])])
    again = run.forgetting(forgotten)
    for state, _ in whole.checkpoints:
        position = Position.from_state(state)
        if position.position <= 50:
            assert position.check(again) == []
        else:
            with pytest.raises(SettingsMismatch, match="forgotten was None and is"):
                position.check(again)
    with pytest.raises(SettingsMismatch, match=r"forgotten was .* and is None now"):
        Position.start(again, batch_size=12, tail="pad").check(run)


def test_a_replay_can_be_asked_for_again():
    run = run_of()
    first, second = int(ids_of(run)[100]), int(ids_of(run)[40])
    again = run.forgetting(Forgotten.of(run.snapshot, [first]))
    ends = [(run, 24), (again, 36), (run, 12), (run, 96), (again, 144)]
    positions = [Position.start(one, batch_size=12, tail="pad").advanced(one, at) for one, at in ends]
    replay = plan_replay(again, [second], positions)
    assert (replay.epoch, replay.position, replay.checkpoint, replay.num_samples) == (0, 40, 0, 144 - 24)
    assert replay.forgotten.ids.tolist() == sorted([first, second])


def test_a_sample_that_was_not_seen_needs_no_replay():
    run = run_of()
    later = int(ids_of(run)[100])
    positions = [Position.start(run, batch_size=12, tail="pad").advanced(run, at) for at in (36, 60)]
    replay = plan_replay(run, [later], positions)
    assert (replay.epoch, replay.position, replay.checkpoint, replay.num_samples) == (None, None, 1, 0)
    assert plan_replay(run, [int(ids_of(run)[0])], positions).checkpoint is None
    with pytest.raises(ValueError, match="found none"):
        plan_replay(run, [later], [])


@pytest.mark.parametrize("method", METHODS)
def test_where_finds_samples_also_in_the_places_of_forgotten_ones(method):
    run = run_of(batching_method=method, repeat=1.6)
    again = run.forgetting(Forgotten.of(run.snapshot, range(0, 170, 3)))
    ids, before = ids_of(again, 2), ids_of(run, 2)
    for sample_id in range(170):
        assert again.where(sample_id, 2).tolist() == np.flatnonzero(ids == sample_id).tolist()
    replaced = np.flatnonzero(ids != before)
    assert np.array_equal(replaced, np.flatnonzero(before % 3 == 0))
    assert np.array_equal(run.snapshot.streams_of(ids), run.snapshot.streams_of(before))
    assert len(np.unique(ids[replaced])) > 30


def test_many_forgotten_samples_are_found_by_a_scan_and_few_by_a_search():
    run = run_over([[1000] * 400], batch_size=64, shuffle=True)
    order = run.epoch(0).ids(0, 400_000)
    for ids in (order[300_000:300_100], order[300_000:301_000]):
        forgotten = Forgotten.of(run.snapshot, ids)
        assert run.first_seen(forgotten, (0, 400_000)) == (0, 300_000)
        assert run.first_seen(forgotten, (0, 300_000)) is None
        assert run.first_seen(forgotten, (1, 0)) == (0, 300_000)


def test_an_order_with_forgotten_samples_is_pickled_with_them():
    run = run_of()
    again = run.forgetting(Forgotten.of(run.snapshot, [3, 5]))
    assert np.array_equal(ids_of(pickle.loads(pickle.dumps(again)), 1), ids_of(again, 1))
    assert OrderConfig.from_state(again.config.to_state()) == again.config
    assert "forgotten" not in run.config.to_state()


def test_samples_that_cannot_be_forgotten_are_refused():
    snapshot = Snapshot.of(SIZES)
    for ids in ([], [-1, 3], [170]):
        with pytest.raises(ValueError, match="at least one of the 170 of the data"):
            Forgotten.of(snapshot, ids)
    for ids in ([1.5], [True, False], np.ones(170, dtype=np.bool_)):
        with pytest.raises(TypeError, match="forgotten samples are whole numbers; found"):
            Forgotten.of(snapshot, ids)
    with pytest.raises(ValueError, match="all of stream 2 are forgotten"):
        Forgotten.of(snapshot, range(93, 170))
    with pytest.raises(ValueError, match="must be those of its settings"):
        RunOrder(snapshot, [StreamWeights()] * 3, run_of().config, forgotten=Forgotten.of(snapshot, [3]))
    config = OrderConfig.resolve(batch_size=8, device_batch_size=8, algorithm="py1s")
    with pytest.raises(ValueError, match="native order only"):
        RunOrder(snapshot, [StreamWeights()] * 3, config).forgetting(Forgotten.of(snapshot, [3]))


def test_an_order_that_a_user_lists_forgets_too():
    config = OrderConfig.resolve(batch_size=4, algorithm="sampler", canonical_nodes=1, window=1)
    run = RunOrder(Snapshot.of([[10]]), [StreamWeights()], config, lists=Backwards())
    assert run.epoch(0).ids(0, 10).tolist() == [*range(9, -1, -1)]
    without = run.forgetting(Forgotten.of(run.snapshot, [7]))
    ids = without.epoch(0).ids(0, 10)
    assert (ids == run.epoch(0).ids(0, 10)).sum() == 9
    assert 7 not in ids
    assert pickle.loads(pickle.dumps(without)).epoch(0).ids(0, 10).tolist() == ids.tolist()
    positions = [Position.start(run, batch_size=4, tail="pad"), Position.start(run, batch_size=4, tail="pad", epoch=1)]
    assert plan_replay(run, [7], positions).position == 2


class Backwards:
    """Lists ten samples."""

    num_samples = 10

    def epoch(self, epoch):
        """From the last to the first one."""
        return np.arange(10)[::-1]
