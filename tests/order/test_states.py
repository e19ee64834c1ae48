"""Loading a state: what is damaged is refused, what was accepted is adopted, what another world changes is said."""

from __future__ import annotations

import contextlib
import copy
import tracemalloc
import warnings
from dataclasses import dataclass, field, replace
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("torch", reason="a loader loads states: uv sync")

from lightning_stream.errors import SettingsMismatch, SnapshotMismatch, StateError
from lightning_stream.loading.resume import order_in, position_in
from lightning_stream.loading.source import BatchSettings
from lightning_stream.order import BatchPlan, OrderConfig, Position, RunOrder, Snapshot, StreamWeights, World

SIZES = ((60, 40), (30, 37))


@dataclass
class Run:
    """A dataset in one world: all that loading a state asks for."""

    arguments: dict[str, object] = field(default_factory=dict)
    world: World = field(default_factory=World)
    batch_size: int = 24
    tail: str = "pad"
    sizes: tuple[tuple[int, ...], ...] = SIZES
    reader = SimpleNamespace(indexes=(), caches=())

    def order(self, config):
        return RunOrder(Snapshot.of(self.sizes), [StreamWeights()] * len(self.sizes), config)

    def settings(self, resumed=None):
        device = self.batch_size // self.world.num_replicas
        config = OrderConfig.resolve(
            batch_size=self.batch_size, device_batch_size=device, world=self.world, resumed=resumed,
            **{"shuffle": True, "mosaic": None} | self.arguments,
        )  # fmt: skip
        return BatchSettings(self.world, device, self.batch_size, self.tail, config)

    def state(self, steps=3):
        settings = self.settings()
        run = self.order(settings.order)
        start = Position.start(run, batch_size=self.batch_size, tail=self.tail, epoch=1)
        plan = BatchPlan(run.epoch(1), batch_size=self.batch_size, world=self.world, tail=self.tail)
        return start.advanced(run, plan.bounds(steps - 1)[1]).to_state()

    def load(self, state, on_mismatch="error"):
        return position_in(state, self, self.settings(order_in(state)), on_mismatch)


RUNS = {
    "random": Run(),
    "per_stream": Run({"batching_method": "per_stream"}),
    "device_per_stream": Run({"batching_method": "device_per_stream"}),
    "py1e": Run({"algorithm": "py1e"}),
    "py2s": Run({"algorithm": "py2s", "batching_method": "stratified"}, World(0, 2, 2)),
}
VALUES = (
    None, True, -1, 0, 1, 2, 3, 7, 48, 64, 166, 168, 2**16, 2**24, 2**31, 2**40, 2**63 - 1, 2**63, 0.5, float("nan"),
    "", "py1br", "drop", "0" * 16, [], [[0, 24]], {}, b"x",
)  # fmt: skip


def unsealed(state):
    """Without its checksum, so that only the values themselves can be wrong."""
    return {name: value for name, value in copy.deepcopy(state).items() if name != "checksum"}


@pytest.mark.parametrize("mutations", [120, pytest.param(2_000, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("name", RUNS)
def test_a_state_comes_back_and_any_damage_is_a_state_error_in_little_memory(name, mutations):
    run, rng = RUNS[name], np.random.default_rng(5)
    state = run.state()
    assert run.load(state).to_state() == state == run.load(unsealed(state)).to_state()
    tracemalloc.start()
    for _ in range(mutations):
        broken = unsealed(state)
        for _ in range(int(rng.integers(1, 3))):
            at = [broken, broken["order"], (broken["order"] or {}).get("mosaic"), broken["snapshot"]][rng.integers(4)]
            if isinstance(at, dict):
                at[str(rng.choice([*at, "unknown"]))] = VALUES[rng.integers(len(VALUES))]
            if not (isinstance(broken["order"], dict) and isinstance(broken["snapshot"], dict)):
                break
        with contextlib.suppress(StateError), warnings.catch_warnings():  # any other error is a failure
            warnings.simplefilter("ignore")
            run.load(broken, str(rng.choice(["error", "warn"])))
    assert tracemalloc.get_traced_memory()[1] < 2**31
    tracemalloc.stop()


@pytest.mark.parametrize("field", ["sample_in_epoch", "num_canonical_nodes", "initial_physical_nodes", "epoch"])
def test_a_damaged_state_of_mosaicml_streaming_is_a_state_error(field):
    good = {"epoch": 1, "sample_in_epoch": 48, "num_canonical_nodes": 2, "shuffle_seed": 5, "initial_physical_nodes": 1}
    run = replace(RUNS["py1e"])
    settings = run.settings()
    assert position_in(good, run, settings).position == 48
    for value in VALUES:
        with contextlib.suppress(StateError), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            position_in({**good, field: value}, run, settings)


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize(("key", "value"), [("position", 24), ("epoch", 0), ("ledger", "0" * 16)])
def test_a_position_that_contradicts_its_ledger_is_refused(name, key, value):
    state = {**RUNS[name].state(), key: value}
    with pytest.raises(StateError, match="damaged"):
        RUNS[name].load(state)
    with pytest.raises(StateError, match="ledger must be the sum"):
        RUNS[name].load(unsealed(state))


def test_another_tail_is_refused_or_accepted_with_a_warning():
    state, other = RUNS["random"].state(), Run(tail="drop")
    with pytest.raises(SettingsMismatch, match="tail was 'pad' and is 'drop' now"):
        other.load(state)
    with pytest.warns(UserWarning, match="tail was 'pad'"):
        accepted = other.load(state, "warn")
    assert other.load(accepted.to_state()) == accepted


def test_other_data_accepted_once_is_accepted_for_good():
    state, other = RUNS["random"].state(), Run({"seed": 3}, sizes=((60, 40), (30, 38)))
    with pytest.raises(SnapshotMismatch):
        other.load(state)
    with pytest.warns(UserWarning, match="seed was"), pytest.warns(UserWarning, match="167 samples"):
        accepted = other.load(state, "warn")
    assert other.load(accepted.to_state()) == accepted


@pytest.mark.parametrize("tail", ["pad", "drop", "exact"])
@pytest.mark.parametrize("algorithm", ["py1e", "py1s", "naive", None])
def test_random_batches_continue_in_another_world_without_a_word(algorithm, tail):
    first, second = (Run({"algorithm": algorithm}, World(0, ranks, 2), tail=tail) for ranks in (2, 4))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert second.load(first.state()).to_state() == first.state()


def test_a_world_that_changes_the_batches_of_mosaicml_streaming_is_warned_of():
    arguments = {"algorithm": "py1e", "batching_method": "device_per_stream", "canonical_nodes": 2}
    first, second = (Run(arguments, World(0, ranks, ranks), 8) for ranks in (1, 4))
    with pytest.warns(UserWarning, match="other global batches on this number of nodes and ranks"):
        second.load(first.state())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        first.load(first.state())


def test_a_world_that_cannot_continue_is_refused_with_the_cure():
    with pytest.raises(StateError, match=r"24 samples over all ranks.*Pass the batch size, devices"):
        Run({"algorithm": "py1e"}, World(0, 5, 5), 25).load(RUNS["py1e"].state())
