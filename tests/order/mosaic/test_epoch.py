"""A run in an order of mosaicml-streaming: worlds, workers, resume."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.mosaic_work import epoch_work
from support.orders import run_over

from lightning_stream.order import BatchPlan, MosaicConfig, RunOrder, StreamWeights, World
from lightning_stream.order.methods import METHODS
from lightning_stream.order.mosaic.shuffles import SHUFFLES

SHARDS = [[37, 37, 37, 9], [50, 50, 20], [11] * 7]
ALL = sum(map(sum, SHARDS))


def run_of(world: World, weights: Any = None, device: int = 4, **settings: Any) -> RunOrder:
    mosaic = MosaicConfig(settings.pop("partition", "relaxed"), settings.pop("shuffle_block_size", 60))
    chosen = {"shuffle": True, "algorithm": "py1e", "canonical_nodes": 4, "mosaic": mosaic, **settings}
    size = device * world.num_replicas
    return run_over(
        SHARDS, weights or [StreamWeights()] * 3, batch_size=size, device_batch_size=device, world=world, **chosen
    )


def batches_of(run: RunOrder, world: World, epoch: int, start: int = 0, device: int = 4) -> list[np.ndarray]:
    plan = BatchPlan(run.epoch(epoch), batch_size=device * world.num_replicas, world=world, start=start)
    return [plan.ids(k) for k in range(plan.num_batches)]


def work_of(method: str, workers: int, used: int = 0) -> np.ndarray:
    return epoch_work(
        None, "balanced", 1, True, "py1e", method, 2, 2, workers, 4, 4, 2, used, 9176, 60, "relaxed", shard_sizes=SHARDS
    )


@pytest.mark.parametrize("algo", SHUFFLES)
@pytest.mark.parametrize("partition", ["orig", "relaxed"])
def test_an_epoch_delivers_every_sample_once(algo: str, partition: str) -> None:
    world = World(0, 4, 2)
    run = run_of(world, algorithm=algo, partition=partition)
    assert np.array_equal(np.sort(np.concatenate(batches_of(run, world, 3))), np.arange(ALL))


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(list(METHODS)), st.integers(0, 12))
def test_a_resume_is_the_rest_of_the_epoch(method: str, steps: int) -> None:
    whole, rest = work_of(method, 1), work_of(method, 1, steps * 16)
    assert rest.shape[3] == whole.shape[3] - steps
    assert np.array_equal(rest[..., :-1, :], whole[..., steps:-1, :])  # the last may repeat other late samples


@pytest.mark.parametrize("algo", SHUFFLES)
def test_worlds_that_divide_canonical_nodes_see_the_same_batches(algo: str) -> None:
    one = World()
    whole = batches_of(run_of(one, algorithm=algo, device=8), one, 0, device=8)
    for nodes, ranks, used in product((1, 2, 4), (1, 2), (0, 5)):
        world, device = World(0, nodes * ranks, ranks), 8 // (nodes * ranks)
        other = batches_of(run_of(world, algorithm=algo, device=device), world, 0, used * 8, device)
        for found, wanted in zip(other[:-1], whole[used:], strict=False):
            assert set(found.tolist()) == set(wanted.tolist())


def test_a_relaxed_run_continues_on_nodes_that_do_not_divide() -> None:
    first, second = World(0, 4, 1), World(0, 6, 2)
    run = run_of(first, canonical_nodes=None, device=6)
    assert run.config.canonical_nodes == 4
    whole, rest = batches_of(run, first, 0, device=6), batches_of(run, second, 0, start=3 * 24)
    assert len(rest) == len(whole) - 3
    for found, wanted in zip(rest[:-1], whole[3:], strict=False):
        assert set(found.tolist()) == set(wanted.tolist())


def test_only_fixed_sampling_draws_the_same_again() -> None:
    weights = [StreamWeights(proportion=one) for one in (1, 1, 2)]
    for method, same in (("fixed", True), ("balanced", False)):
        run = run_of(World(), weights, sampling_method=method, epoch_size=150)
        first, second = (np.unique(np.concatenate(batches_of(run, World(), epoch))) for epoch in (0, 1))
        assert np.array_equal(first, second) == same


def test_canonical_nodes_follow_the_first_world() -> None:
    assert run_of(World(0, 2, 1), canonical_nodes=None).config.canonical_nodes == 2
    assert run_of(World(0, 2, 1), canonical_nodes=None, algorithm="py2s").config.canonical_nodes == 128


@pytest.mark.parametrize(
    ("settings", "world", "rule"),
    [
        ({"batching_method": "stratified", "device": 1}, World(), "gets none of a global batch"),
        ({"batching_method": "stratified", "device": 400}, World(), "fill at least one batch"),
        ({"batching_method": "per_stream", "device": 90}, World(), "fill at least one batch"),
        ({"batching_method": "device_per_stream", "device": 90}, World(), "fill at least one batch"),
        ({"batching_method": "device_per_stream"}, World(0, 8, 1), "nodes to divide"),
        ({"batching_method": "device_per_stream", "shuffle_block_size": 3}, World(), "gets none"),
    ],
)
def test_streams_and_worlds_that_do_not_fit_are_refused(settings: Any, world: World, rule: str) -> None:
    with pytest.raises(ValueError, match=rule):
        run_of(world, **settings).epoch(0)


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("method", ["per_stream", "device_per_stream"])
def test_batches_of_one_stream_refuse_an_empty_stream_by_its_name(method: str, shuffle: bool) -> None:
    weights = [StreamWeights(), StreamWeights(choose=0), StreamWeights()]
    rule = (
        r"stream 1 \(stream 1\) draws 0 samples for batches of \d+; lower the batch size, raise its weight, or omit it"
    )
    with pytest.raises(ValueError, match=rule):
        run_of(World(), weights, batching_method=method, shuffle=shuffle).epoch(0)
