"""The shuffle score, and what it costs."""

from __future__ import annotations

import re
import time

import numpy as np
import pytest
from support.orders import run_over

from lightning_stream.order.snapshot import max_active
from lightning_stream.questions.quality import measure, random_score, score


def run_of(shards=400, samples=600, batch_size=256, streams=1, **arguments):
    return run_over([np.full(shards, samples)] * streams, batch_size=batch_size, **{"shuffle": True} | arguments)


def whole_epoch(run, batch_size=256):
    order = run.epoch(0)
    ids = order.ids(0, order.num_samples)[: order.num_samples // batch_size * batch_size].reshape(-1, batch_size)
    return np.array([score(batch, run.snapshot.num_samples) for batch in ids])


def test_on_the_table_of_400_shards_the_native_order_comes_near_a_random_one():
    scores = whole_epoch(run_of())
    edge = len(scores) // 16
    assert random_score(256) == pytest.approx(92.4, abs=0.1)
    assert scores.mean() > 86
    assert scores[:edge].mean() > 60
    assert scores[-edge:].mean() > 80
    assert scores[0] >= 13  # from the 16 shards the first batch needs


def test_shards_of_unlike_sizes_cost_little():
    sizes = np.random.default_rng(0).integers(450, 750, 400)
    run = run_over([sizes], batch_size=256, shuffle=True)
    assert whole_epoch(run).mean() > 83


def test_a_sampled_measurement_agrees_with_the_whole_epoch():
    for run in (run_of(), run_of(shards=3000, samples=80), run_of(canonical_nodes=4), run_of(shards=40, samples=6000)):
        quality, scores = measure(run, batch_size=256), whole_epoch(run)
        assert quality.mean == pytest.approx(scores.mean(), abs=4)
        assert quality.minimum <= scores[0]


@pytest.mark.parametrize(("nodes", "window"), [(16, 8), (16, 2), (1, 128), (4, 5)])
def test_never_more_shards_are_active_than_said(nodes, window):
    run = run_of(samples=64, canonical_nodes=nodes, window=window)
    measured = max_active(run.snapshot.shards_of(run.epoch(0).ids(0, run.num_samples)))
    assert measured <= measure(run, batch_size=256).active_shards + nodes  # shards cut by a border: once per neighbour


def test_a_million_shards_are_scored_in_seconds():
    run = run_of(shards=1_000_000, samples=1000)
    run.epoch(0).ids(0, 1)
    begin = time.perf_counter()
    assert measure(run, batch_size=256).mean > 70
    assert time.perf_counter() - begin < 20  # about one; other machines are slower and busy


def test_the_cache_it_needs_is_counted_in_bytes():
    quality = measure(run_of(), batch_size=256, shard_bytes=np.full(400, 10**6))
    assert quality.cache_bytes == 128 * 10**6
    assert re.fullmatch(
        r"Shuffle quality 8\d/100 \(perfect shuffle: 92\)\. Cache needed: 128 MB for 128 active shards\.", str(quality)
    )


def test_index_order_is_seen_for_what_it_is():
    run = run_of(shuffle=False)
    assert measure(run, batch_size=256).mean < 2


def test_active_shards_are_those_between_first_and_last_use():
    assert max_active(np.array([1, 1, 2, 1, 3, 3, 2])) == 2
    assert max_active(np.array([], dtype=np.int64)) == 0
