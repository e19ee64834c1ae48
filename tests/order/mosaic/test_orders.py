"""Laws of the single functions: they hold for any arguments, and pinned results keep every bit where it is."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from support.mosaic_work import epoch_partition, epoch_work, stream_weights

from lightning_stream.order import Snapshot
from lightning_stream.order.mosaic.partitions import partition
from lightning_stream.order.mosaic.shuffles import SHUFFLES, shuffle
from lightning_stream.order.mosaic.work import chosen, sampling

PINNED = Path(__file__).with_name("pinned.jsonl")
FUNCTIONS: dict[str, Any] = {
    "shuffle": lambda shard_sizes, **given: shuffle(shard_sizes=np.array(shard_sizes, np.int64), **given),
    "partition": epoch_partition,
    "sampling": lambda samples_per_shard, **given: sampling(np.array(samples_per_shard, np.int64), **given),
    "epoch_work": epoch_work,
}
SIZES = st.lists(st.integers(1, 40), min_size=1, max_size=12)


@pytest.mark.parametrize("line", PINNED.read_text().splitlines())
def test_an_order_once_given_stays(line: str) -> None:
    pinned = json.loads(line)
    ids = FUNCTIONS[pinned["function"]](**pinned["in"])
    assert list(ids.shape) == pinned["shape"]
    assert hashlib.sha256(ids.astype("<i8").tobytes()).hexdigest() == pinned["sha256"]


@settings(max_examples=150)
@given(st.sampled_from(SHUFFLES), SIZES, st.integers(1, 9), st.integers(0, 99), st.integers(0, 9), st.integers(2, 99))
def test_a_shuffle_is_a_permutation(
    algo: str, shard_sizes: list[int], nodes: int, seed: int, epoch: int, block: int
) -> None:
    total = sum(shard_sizes)
    assume(algo != "py1e" or total >= nodes)
    ids = shuffle(algo, np.array(shard_sizes), nodes, seed, epoch, block)
    assert ids.dtype == np.int64
    assert np.array_equal(np.sort(ids), np.arange(total))


@settings(max_examples=60)
@given(st.sampled_from(["py1e", "py1br", "py1s", "py2s"]), SIZES, st.integers(1, 5), st.integers(0, 99))
def test_a_canonical_node_keeps_its_samples_in_every_epoch(
    algo: str, shard_sizes: list[int], nodes: int, seed: int
) -> None:
    total = sum(shard_sizes)
    assume(total >= nodes)
    first, other = (shuffle(algo, np.array(shard_sizes), nodes, seed, epoch, 10) for epoch in (0, 7))
    for node in range(nodes):
        own = slice(total * node // nodes, total * (node + 1) // nodes)
        assert set(first[own]) == set(other[own])


@settings(max_examples=150)
@given(
    st.integers(1, 300),
    st.sampled_from([1, 2, 4, 8]),
    st.sampled_from([1, 2, 4]),
    st.integers(1, 4),
    st.integers(1, 4),
    st.integers(1, 6),
)
def test_a_partition_delivers_every_position_and_few_twice(
    num_samples: int, canonical: int, nodes: int, ranks: int, workers: int, batch: int
) -> None:
    assume(canonical >= nodes)
    work = epoch_partition("orig", num_samples, canonical, nodes, ranks, workers, batch)
    assert work.shape[:3] + work.shape[4:] == (nodes, ranks, workers, batch)
    delivered = work[work >= 0]
    assert set(delivered.tolist()) == set(range(num_samples))
    assert len(delivered) < num_samples + canonical + nodes * ranks


@given(st.integers(2, 400), st.integers(0, 400))
def test_a_relaxed_resume_keeps_the_global_batches_of_the_world_that_began(num_samples: int, used: int) -> None:
    assume(used <= num_samples)
    began = partition("relaxed", num_samples, 4, 4, 2, 3, used)
    resumed = partition("relaxed", num_samples, 4, 3, 2, 4, used, initial_nodes=4)
    assert np.array_equal(resumed, began)


@given(SIZES, st.integers(0, 900), st.integers(1, 50), st.integers(0, 9))
def test_a_draw_takes_what_was_asked_and_whole_repeats_first(
    shard_sizes: list[int], choose: int, granularity: int, epoch: int
) -> None:
    drawn = sampling(np.array(shard_sizes), choose, granularity, 7, epoch, use_epoch=True)
    repeats = choose // sum(shard_sizes)
    assert drawn.sum() == choose
    assert (drawn >= np.array(shard_sizes) * repeats).all()
    assert (drawn <= np.array(shard_sizes) * (repeats + 1)).all()


@given(st.lists(st.floats(0.01, 10), min_size=1, max_size=8), st.integers(1, 5000))
def test_proportions_share_out_the_whole_epoch(proportions: list[float], epoch_size: int) -> None:
    weights = stream_weights([{"proportion": one} for one in proportions], len(proportions))
    choose, shares = chosen(Snapshot.of([[10, 5]] * len(proportions)), weights, epoch_size, 9176)
    assert sum(choose) == epoch_size
    for share, count in zip(shares, choose, strict=True):
        assert abs(count - share * epoch_size) <= 1


def test_absolute_weights_say_their_number() -> None:
    weights = stream_weights([{"repeat": 1.5}, {"choose": 3}, None], 3)
    assert chosen(Snapshot.of([[4, 3], [10], [5]]), weights, None, 9176)[0] == [10, 3, 5]


@pytest.mark.parametrize("weights", [[{"choose": 0}, {"choose": 0}], [{"choose": 1}, {"choose": 1}]])
def test_an_epoch_needs_samples_and_streams_that_have_them(weights: list[Any]) -> None:
    with pytest.raises(ValueError, match="an epoch needs samples"):
        chosen(Snapshot.of([[4, 3], [0]]), stream_weights(weights, 2), None, 9176)


@pytest.mark.parametrize(
    ("call", "rule"),
    [
        (lambda: shuffle("py1br", np.array([5]), 1, 0, 0, 1), "shuffle_block_size must be at least 2"),
        (lambda: shuffle("py1e", np.array([5]), 6, 0, 0), "each canonical node"),
        (lambda: partition("orig", 9, 2, 3, 1, 1), "divide the other"),
        (lambda: partition("relaxed", 9, 4, 3, 1, 1, 0, 4), "divide evenly"),
        (lambda: partition("orig", 9, 1, 1, 1, 1, 11), "beyond the epoch's end"),
        (lambda: partition("orig", 9, 1, 8, 1, 1), "too few"),
    ],
)
def test_arguments_out_of_range_are_refused(call: Any, rule: str) -> None:
    with pytest.raises(ValueError, match=rule):
        call()
