"""The uniform order is a permutation of what an epoch draws, and any part of it is computed alone."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from lightning_stream.order import OrderConfig, RunOrder, Snapshot, StreamWeights
from lightning_stream.order.permutation import RngStream
from lightning_stream.order.uniform import scattered


def run_of(sizes: list[int], weights: list[StreamWeights], **settings: object) -> RunOrder:
    own = {"algorithm": "uniform", "canonical_nodes": 1, "window": 1, "quick_start": False}
    config = OrderConfig.resolve(batch_size=8, shuffle=True, **own, **settings)
    return RunOrder(Snapshot.of([[size] for size in sizes]), weights, config)


@pytest.mark.parametrize("size", [1, 2, 3, 63, 64, 65, 1000, 4097])
def test_every_number_has_one_place(size: int) -> None:
    found = scattered(np.arange(size), size, RngStream.UNIFORM, 5, 0)
    assert sorted(found.tolist()) == [*range(size)]
    at = np.arange(0, size, 7)
    assert (scattered(at, size, RngStream.UNIFORM, 5, 0) == found[at]).all()


def test_places_and_neighbours_are_independent() -> None:
    found = scattered(np.arange(20_000), 20_000, RngStream.UNIFORM, 1, 0)
    assert abs(np.corrcoef(np.arange(20_000), found)[0, 1]) < 0.03
    assert abs(np.corrcoef(found[1:], found[:-1])[0, 1]) < 0.03
    epochs = np.stack([scattered(np.arange(16), 16, RngStream.UNIFORM, 1, epoch) for epoch in range(800)])
    counts = np.stack([np.bincount(epochs[:, place], minlength=16) for place in range(16)])
    assert abs(counts - 50).max() < 37  # five standard deviations


def test_streams_give_what_is_drawn_of_each_and_other_samples_each_epoch() -> None:
    weights = [StreamWeights(proportion=1), StreamWeights(proportion=3)]
    run = run_of([10, 1000], weights, epoch_size=200)
    epochs = [run.epoch(epoch).ids(0, 200).tolist() for epoch in range(2)]
    for ids in epochs:
        counts = Counter(ids)
        assert [counts[sample] for sample in range(10)] == [5] * 10
        assert sorted(counts[sample] for sample in counts if sample >= 10) == [1] * 150
    assert set(epochs[0]) != set(epochs[1])
    assert [run.where(sample, 1).tolist() for sample in epochs[1][:3]] == [
        [place for place, other in enumerate(epochs[1]) if other == sample] for sample in epochs[1][:3]
    ]


def test_the_order_stays_as_it_was_released() -> None:
    run = run_of([10**9], [StreamWeights()], seed=9176)
    assert run.epoch(0).ids(0, 4).tolist() == [317107927, 491787283, 899733370, 709087031]
    assert run.epoch(3).ids(10**9 - 4, 10**9).tolist() == [764348837, 610153471, 345912799, 456376756]
