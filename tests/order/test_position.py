"""The state: what it holds, what it refuses, how it is read by another run."""

from __future__ import annotations

import contextlib
import copy
import json
from dataclasses import replace
from pathlib import Path
from zlib import crc32

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.orders import run_over

from lightning_stream.errors import SettingsMismatch, SnapshotMismatch, StateError, VersionMismatch
from lightning_stream.order import OrderConfig, Position, StreamWeights, World, ledger
from lightning_stream.order.packing import RowPacking


def run_of(sizes=((60, 40), (30, 20)), weights=None, batch_size=8, **arguments):
    return run_over(
        sizes, weights or [StreamWeights()] * len(sizes), batch_size=batch_size, **{"shuffle": True} | arguments
    )


def start(run, **arguments):
    return Position.start(run, **{"batch_size": 8, "tail": "pad"} | arguments)


def test_a_state_is_json_a_few_hundred_bytes_and_comes_back_equal():
    run = run_of()
    position = start(run).advanced(run, 48).rebased_on(run, batch_size=4, tail="exact").advanced(run, 60)
    text = json.dumps(position.to_state())
    assert Position.from_state(json.loads(text)) == position
    assert len(text) < 800
    assert position.batch_changes == ((0, 8), (48, 4))


def test_a_state_is_no_larger_for_a_thousand_times_the_data():
    small, large = run_of(), run_of([np.full(10_000, 1000)] * 5)
    sizes = [len(json.dumps(start(run, epoch=9).to_state())) for run in (small, large)]
    assert sizes[1] - sizes[0] < 20


def test_a_state_loads_with_weights_only(tmp_path):
    torch = pytest.importorskip("torch")
    state = start(run_of()).to_state()
    torch.save(state, tmp_path / "state.pt")
    assert torch.load(tmp_path / "state.pt", weights_only=True) == state


def test_the_ledger_of_a_position_is_the_expected_sum_however_it_was_reached():
    run = run_of()
    steps = start(run)
    for end in (8, 16, 100):
        steps = steps.advanced(run, end)
    assert steps.ledger == start(run).advanced(run, 100).ledger == ledger.expected(run.epoch(0), 0, 100)


def test_a_position_never_goes_back():
    run = run_of()
    with pytest.raises(ValueError, match=r"only moves forward.*8 is before 16"):
        start(run).advanced(run, 16).advanced(run, 8)


@pytest.mark.parametrize(
    ("position", "batch_size", "tail", "replicas", "wanted"),
    [
        (150, 8, "pad", 1, (1, 0)),
        (144, 8, "pad", 1, (0, 144)),
        (144, 8, "drop", 1, (1, 0)),
        (144, 4, "drop", 1, (0, 144)),
        (148, 4, "drop", 2, (1, 0)),
        (144, 8, "exact", 8, (0, 144)),
        (160, 8, "pad", 1, (1, 0)),
        (0, 200, "drop", 1, (0, 0)),
    ],
)
def test_where_no_further_batch_can_come_the_next_epoch_begins(position, batch_size, tail, replicas, wanted):
    run = run_of()
    world = World(0, replicas, 1)
    here = replace(start(run), position=position).rebased_on(run, batch_size=batch_size, tail=tail, world=world)
    assert (here.epoch, here.position) == wanted
    assert here.batch_size == batch_size


def test_changes_of_batch_size_are_kept_for_the_epoch_and_forgotten_after_it():
    run = run_of()
    position = start(run).advanced(run, 16).rebased_on(run, batch_size=16, tail="pad")
    position = position.advanced(run, 48).rebased_on(run, batch_size=8, tail="pad")
    assert position.batch_changes == ((0, 8), (16, 16), (48, 8))
    assert position.next_epoch().batch_changes == ()
    assert start(run).rebased_on(run, batch_size=16, tail="pad").batch_changes == ()


def test_what_the_user_left_open_is_taken_from_the_state_and_never_recomputed():
    first = OrderConfig.resolve(batch_size=48, shuffle=True)
    later = OrderConfig.resolve(batch_size=7, shuffle=True, resumed=first)
    assert (first.canonical_nodes, first.window) == (16, 8)
    assert later == first
    assert OrderConfig.resolve(batch_size=7, shuffle=True).canonical_nodes == 7


def test_a_changed_snapshot_is_refused_unless_the_user_says_so():
    position = start(run_of())
    other = run_of(((60, 40), (30, 21)))
    with pytest.raises(SnapshotMismatch, match=r"150 samples in 4 shards.*151 samples in 4 shards.*on_mismatch='warn'"):
        position.check(other)
    assert len(position.check(other, on_mismatch="warn")) == 1


def test_every_changed_setting_is_named_with_its_old_and_new_value():
    position = start(run_of())
    other = run_of(seed=1, canonical_nodes=4, batching_method="stratified", weights=[StreamWeights(repeat=2)] * 2)
    with pytest.raises(SettingsMismatch) as found:
        position.check(other)
    for words in (
        "shuffle_seed was 9176 and is 1",
        "num_canonical_nodes was 8 and is 4",
        "'random' and is 'stratified'",
        "weights",
    ):
        assert words in str(found.value)


def test_a_position_outside_the_epoch_is_refused():
    with pytest.raises(StateError, match=r"position is 151, but epoch \d ends at 150"):
        replace(start(run_of()), position=151).check(run_of())


@pytest.mark.parametrize("changes", [[[8, 8]], [[0, 8], [0, 8]], [[0, 4], [16, 8]], [[0, 4]]])
def test_changes_of_batch_size_that_cannot_be_are_refused(changes):
    state = {**start(run_of()).advanced(run_of(), 8).to_state(), "batch_changes": changes}
    with pytest.raises(StateError, match="batch_changes must rise"):
        Position.from_state(state)


def test_the_batch_size_may_change_any_number_of_times_at_one_position():
    run, twice = run_of(), run_of()
    position = Position.from_state(start(run).advanced(run, 48).to_state())
    for size in (4, 16, 2):
        position = Position.from_state(position.rebased_on(run, batch_size=size, tail="pad").to_state())
    once = start(twice).advanced(twice, 48).rebased_on(twice, batch_size=2, tail="pad")
    assert position == once
    assert position.batch_changes == ((0, 8), (48, 2))
    assert position.advanced(run, 52).num_steps(run) == 6 + 2


def test_a_state_with_two_changes_of_the_batch_size_at_one_position_is_read_as_with_the_later():
    position = start(run_of()).advanced(run_of(), 48)
    state = {**position.to_state(), "batch_size": 4, "batch_changes": [[0, 8], [48, 16], [48, 4]]}
    del state["checksum"]
    assert Position.from_state(state).batch_changes == ((0, 8), (48, 4))


def test_a_tampered_ledger_is_found():
    position = start(run_of()).advanced(run_of(), 40)
    assert position.ledger_matches(run_of())
    assert not replace(position, position=48).ledger_matches(run_of())


@pytest.mark.parametrize(
    ("name", "value"),
    [("position", 48), ("epoch", 1), ("batch_size", 4), ("ledger", "0" * 16), ("tail", "drop"), ("checksum", "x")],
)
def test_a_state_with_one_damaged_value_is_refused(name, value):
    state = start(run_of()).advanced(run_of(), 40).to_state()
    with pytest.raises(StateError, match=r"its checksum is .* It is damaged"):
        Position.from_state({**state, name: value})
    assert Position.from_state({key: kept for key, kept in state.items() if key != "checksum"}).position == 40


def test_a_state_of_packed_rows_without_its_checksum_is_refused():
    """Packed rows are newer than checksums, and their ledger is not compared: nothing else tells of damage."""
    run = run_over([[80]], lengths=np.full(80, 5, np.uint32), batch_size=8, shuffle=True, packing=RowPacking(20, 30))
    state = start(run).advanced(run, 8).to_state()
    assert Position.from_state(state).position == 8
    del state["checksum"]
    with pytest.raises(StateError, match=r"it has no checksum\. It is damaged"):
        Position.from_state({**state, "position": 16})


def test_another_tail_is_a_difference_that_names_both():
    with pytest.raises(SettingsMismatch, match="tail was 'pad' and is 'drop' now"):
        start(run_of()).check(run_of(), tail="drop")
    assert len(start(run_of()).check(run_of(), tail="drop", on_mismatch="warn")) == 1


def test_a_position_accepted_under_other_data_and_settings_is_that_of_the_new_run_for_good():
    position = start(run_of()).advanced(run_of(), 40)
    other = run_of(((60, 40), (30, 21)), [StreamWeights(repeat=2)] * 2, seed=1)
    assert position.check(other, on_mismatch="warn")
    accepted = position.rebased_on(other, batch_size=8, tail="pad").advanced(other, 48)
    assert accepted.ledger_matches(other)
    assert Position.from_state(accepted.to_state()).check(other, tail="pad") == []


def test_a_state_written_by_the_first_version_is_read_for_ever():
    state = json.loads((Path(__file__).parent / "golden" / "state_1.json").read_text())
    position = Position.from_state(state)
    assert {name: value for name, value in position.to_state().items() if name != "checksum"} == state
    assert (position.epoch, position.position, position.batch_changes) == (3, 60, ((0, 8), (48, 4)))
    run = run_of(batching_method="stratified", resumed=position.order)
    assert not run.config.quick_start  # which states did not have then
    assert position.ledger_matches(run)
    assert position.check(run) == []


def test_the_same_run_is_accepted():
    assert start(run_of()).check(run_of()) == []


def test_a_state_of_a_newer_version_is_refused_first():
    state = {**start(run_of()).to_state(), "version": 2, "epoch": "?"}
    with pytest.raises(VersionMismatch, match=r"version 2.*newer lightning-stream.*Install"):
        Position.from_state(state)


@pytest.mark.parametrize("is_checked", [True, False])
@pytest.mark.parametrize("at", ["order", "packing", "buckets", "mosaic", "schedule"])
def test_a_state_with_a_setting_of_a_newer_version_is_called_newer(at, is_checked):
    state = start(run_of()).to_state()
    if at == "order":
        state["order"]["new_setting"] = 1
    else:
        state["order"][at] = {**(state["order"].get(at) or {}), "new_setting": 1}
    del state["checksum"]
    if is_checked:
        state["checksum"] = f"{crc32(json.dumps(state, sort_keys=True, separators=(',', ':')).encode()):08x}"
    with pytest.raises(VersionMismatch, match=r"none named \['new_setting'\].*newer lightning-stream.*Install"):
        Position.from_state(state)


def test_a_state_of_another_order_is_refused():
    state = {**start(run_of()).to_state(), "order_version": 9}
    with pytest.raises(VersionMismatch, match=r"order 1.*order 9"):
        Position.from_state(state)


def test_everything_wrong_with_a_state_is_named_at_once():
    state = {**start(run_of()).to_state(), "epoch": -1, "position": True, "tail": "keep", "ledger": "xyz"}
    with pytest.raises(StateError) as found:
        Position.from_state(state)
    for words in ("epoch", "position", "tail", "ledger", "load another checkpoint"):
        assert words in str(found.value)


@pytest.mark.parametrize("state", [None, [], "x", 3, {}, {"version": 1}])
def test_what_is_no_state_is_refused(state):
    with pytest.raises(StateError):
        Position.from_state(state)


hostile = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.binary(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@settings(max_examples=400, deadline=None, derandomize=True)
@given(st.data())
def test_a_hostile_state_is_refused_as_a_state_error(data):
    state = copy.deepcopy(start(run_of()).to_state())
    at = data.draw(st.sampled_from([state, state["order"], state["snapshot"]]))
    name = data.draw(st.sampled_from([*at, "unknown"]))
    at[name] = data.draw(hostile)
    with contextlib.suppress(StateError):  # every other error is a failure
        Position.from_state(state)


def test_settings_that_are_wrong_are_named_together():
    with pytest.raises(ValueError, match=r"shuffle_algo.*'py9'.*batching_method.*'any'.*window.*0.*shuffle_seed.*-1"):
        OrderConfig.resolve(batch_size=8, algorithm="py9", batching_method="any", window=0, seed=-1)


def test_batching_methods_that_need_a_batch_size_say_so():
    with pytest.raises(ValueError, match=r"per_stream.*needs a batch size"):
        OrderConfig.resolve(batch_size=None, batching_method="per_stream")
    with pytest.raises(ValueError, match="needs the batch size per device"):
        OrderConfig.resolve(batch_size=8, batching_method="device_per_stream")
