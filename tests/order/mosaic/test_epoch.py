"""A run of the compatible orders: worlds, workers, resume, state."""

from __future__ import annotations

from itertools import chain, product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_stream.order.mosaic import (
    BATCHING_METHODS,
    SHUFFLES,
    MosaicOrder,
    MosaicSettings,
    MosaicState,
    MosaicWorld,
)

SHARDS = [[37, 37, 37, 9], [50, 50, 20], [11] * 7]
ALL = sum(map(sum, SHARDS))


def order(weights: Any = None, **settings: Any) -> MosaicOrder:
    chosen = {"batch_size": 4, "shuffle": True, "num_canonical_nodes": 4, "shuffle_block_size": 60, **settings}
    return MosaicOrder(SHARDS, weights, MosaicSettings(**chosen))


@pytest.mark.parametrize("algo", SHUFFLES)
@pytest.mark.parametrize("partition_algo", ["orig", "relaxed"])
def test_an_epoch_delivers_every_sample(algo: str, partition_algo: str) -> None:
    run = order(shuffle_algo=algo, partition_algo=partition_algo)
    ids = run.epoch(3, MosaicWorld(2, 2, 3)).ids()
    assert set(ids.tolist()) == set(range(ALL))
    assert len(ids) < ALL + 8


@pytest.mark.parametrize("method", BATCHING_METHODS)
def test_workers_ranks_and_global_batches_tell_the_same(method: str) -> None:
    world = MosaicWorld(2, 2, 3)
    epoch = order(batching_method=method).epoch(1, world)
    for rank in range(world.num_ranks):
        by_step = [epoch.rank_batch(step, rank).tolist() for step in range(epoch.num_batches)]
        for worker in range(3):
            assert list(chain.from_iterable(by_step[worker::3])) == epoch.worker_ids(rank, worker).tolist()
    for step in range(epoch.num_batches):
        parts = [epoch.rank_batch(step, rank) for rank in range(world.num_ranks)]
        assert np.array_equal(np.concatenate(parts), epoch.global_batch(step))
    assert epoch.num_samples == len(epoch.ids()) == sum(len(epoch.global_batch(k)) for k in range(epoch.num_batches))


@pytest.mark.parametrize("method", BATCHING_METHODS)
def test_workers_do_not_change_a_batch(method: str) -> None:
    run = order(batching_method=method)
    alone = run.epoch(2, MosaicWorld(2, 2, 1))
    for workers in (2, 5):
        shared = run.epoch(2, MosaicWorld(2, 2, workers))
        assert np.array_equal(shared.ids(), alone.ids())
        assert shared.num_batches == alone.num_batches


@settings(max_examples=60)
@given(st.sampled_from(BATCHING_METHODS), st.integers(0, 12), st.sampled_from([(1, 2), (2, 2), (2, 1)]))
def test_a_resume_is_the_rest_of_the_epoch(method: str, steps: int, nodes_and_ranks: tuple[int, int]) -> None:
    world = MosaicWorld(*nodes_and_ranks, 2)
    run = order(batching_method=method)
    whole = run.epoch(1, world)
    rest = run.epoch(1, world, steps * world.num_ranks * 4)
    assert rest.num_batches == whole.num_batches - steps
    for step in range(rest.num_batches - 1):  # the last may repeat other late samples
        assert np.array_equal(rest.global_batch(step), whole.global_batch(steps + step))


@pytest.mark.parametrize("algo", SHUFFLES)
def test_worlds_that_divide_canonical_nodes_see_the_same_batches(algo: str) -> None:
    whole = order(shuffle_algo=algo, batch_size=8).epoch(0, MosaicWorld(1, 1, 1))
    for nodes, ranks, used in product((1, 2, 4), (1, 2), (0, 5)):
        run = order(shuffle_algo=algo, batch_size=8 // (nodes * ranks))
        other = run.epoch(0, MosaicWorld(nodes, ranks, 2), used * 8)
        for step in range(other.num_batches - 1):
            assert set(other.global_batch(step).tolist()) == set(whole.global_batch(used + step).tolist())


def test_a_relaxed_run_goes_on_on_nodes_that_do_not_divide() -> None:
    began = order(num_canonical_nodes=None, shuffle_block_size=None, batch_size=6)
    first = began.epoch(0, MosaicWorld(4, 1, 1))
    state = began.state(0, 3 * 24, MosaicWorld(4, 1, 1))
    assert state == MosaicState(0, 72, 4, 9176, 4)
    resumed = MosaicOrder(SHARDS, None, MosaicSettings(batch_size=4, shuffle=True).resumed(state))
    rest = resumed.epoch(0, MosaicWorld(3, 2, 2), state.sample_in_epoch)
    assert rest.num_batches == first.num_batches - 3
    for step in range(rest.num_batches - 1):
        assert set(rest.global_batch(step).tolist()) == set(first.global_batch(step + 3).tolist())
    assert resumed.state(1, 0, MosaicWorld(3, 2, 2)).initial_physical_nodes == 4


def test_only_fixed_sampling_draws_the_same_again() -> None:
    weights = [{"proportion": 1}, {"proportion": 1}, {"proportion": 2}]
    for method, same in (("fixed", True), ("balanced", False)):
        run = order(weights, sampling_method=method, epoch_size=150)
        first, second = (np.unique(run.epoch(epoch, MosaicWorld()).ids()) for epoch in (0, 1))
        assert np.array_equal(first, second) == same


@pytest.mark.parametrize(
    ("world", "replication", "expected"),
    [((2, 8), 2, (1, 8)), ((4, 2), 2, (2, 2)), ((3, 4), 2, (1, 6)), ((2, 2), 4, (1, 1)), ((2, 2), 1, (2, 2))],
)
def test_replicas_count_once(world: tuple[int, int], replication: int, expected: tuple[int, int]) -> None:
    assert MosaicWorld(*world, 3).replicated(replication) == MosaicWorld(*expected, 3)


def test_a_state_goes_to_the_peer_and_back() -> None:
    state = {
        "epoch": 2,
        "sample_in_epoch": 640,
        "num_canonical_nodes": 16,
        "shuffle_seed": 17,
        "initial_physical_nodes": 2,
    }
    assert MosaicState.from_dict(state).to_dict() == state
    del state["initial_physical_nodes"]
    assert MosaicState.from_dict(state).initial_physical_nodes is None
    del state["epoch"]
    with pytest.raises(ValueError, match="lacks epoch"):
        MosaicState.from_dict(state)


def test_defaults_follow_the_first_world() -> None:
    def resolved(nodes: int, **settings: Any) -> tuple[int | None, int | None]:
        done = MosaicSettings(batch_size=1, **settings).resolved(nodes)
        return done.num_canonical_nodes, done.shuffle_block_size

    assert resolved(2) == (2, 2_000_000)
    assert resolved(2, shuffle_algo="py2s") == (128, 1 << 18)
    assert resolved(4, num_canonical_nodes=8, shuffle_block_size=9) == (8, 9)


def test_all_wrong_settings_are_named_at_once() -> None:
    with pytest.raises(ValueError, match=r"shuffle_algo .* batching_method .* batch_size .* num_canonical_nodes"):
        MosaicSettings(batch_size=0, shuffle_algo="best", batching_method="all", num_canonical_nodes=0)


@pytest.mark.parametrize(
    ("settings", "world", "rule"),
    [
        ({"batching_method": "stratified", "batch_size": 1}, MosaicWorld(), "no place in a global batch"),
        ({"batching_method": "per_stream", "batch_size": 90}, MosaicWorld(), "fill at least one batch"),
        ({"batching_method": "device_per_stream", "batch_size": 90}, MosaicWorld(), "fill at least one batch"),
        ({"batching_method": "device_per_stream"}, MosaicWorld(8), "nodes to divide"),
        ({"batching_method": "device_per_stream", "shuffle_block_size": 3}, MosaicWorld(), "gets none"),
    ],
)
def test_streams_and_worlds_that_do_not_fit_are_refused(settings: Any, world: MosaicWorld, rule: str) -> None:
    with pytest.raises(ValueError, match=rule):
        order(**settings).epoch(0, world)


def test_a_world_or_place_that_cannot_be_is_refused() -> None:
    for call in (
        lambda: MosaicWorld(0),
        lambda: MosaicWorld(2, 2).replicated(3),
        lambda: order().epoch(-1, MosaicWorld()),
    ):
        with pytest.raises(ValueError, match="found"):
            call()
