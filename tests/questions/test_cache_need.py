"""What the cache of a node must hold, compared with the orders of many epochs."""

from __future__ import annotations

import numpy as np
import pytest
from support.orders import run_over

from lightning_stream.order import BatchPlan
from lightning_stream.order.draw import StreamWeights
from lightning_stream.order.forget import Forgotten
from lightning_stream.order.snapshot import max_active
from lightning_stream.order.world import World
from lightning_stream.questions.cache_need import ReadAhead, need_of_node

EQUAL = np.full(67, 18)
LAST_IS_SMALLER = np.append(EQUAL[:-1], 5)
FEW = 4  # samples of a micro-batch


@pytest.mark.parametrize("sizes", [EQUAL, LAST_IS_SMALLER], ids=["equal", "last is smaller"])
@pytest.mark.parametrize(("nodes", "window"), [(1, 3), (2, 3), (4, 3), (4, 8)])
def test_it_holds_all_that_is_in_use_or_read_ahead_at_any_time_of_any_epoch(sizes, nodes, window):
    run = run_over([sizes], batch_size=FEW, shuffle=True, canonical_nodes=nodes, window=window)
    epochs = [run.snapshot.shards_of(run.epoch(epoch).ids(0, run.num_samples)) for epoch in range(8)]
    for batches in range(1, 40, 2):
        need = need_of_node(
            run,
            np.ones(len(sizes), np.int64),
            ReadAhead(1, batches - 1, 0),
            device_batch_size=FEW,
            world=World(),
            packed=0.0,
            cached=0.0,
        )
        most = max(max_active(shards, batches * FEW) for shards in epochs)
        assert most <= need.num_bytes <= most + 2 * nodes


@pytest.mark.parametrize(
    ("nodes", "window", "machines", "shuffle"),
    [
        (1, 8, 4, True),
        (2, 4, 4, True),
        (2, 4, 3, True),
        (4, 3, 3, True),
        (6, 2, 2, True),
        (8, 2, 2, True),
        (8, 2, 4, False),
    ],
)
def test_it_holds_what_each_machine_reads_also_where_machines_do_not_divide_canonical_nodes(
    nodes, window, machines, shuffle
):
    size = 8 * machines
    run = run_over([LAST_IS_SMALLER], batch_size=size, shuffle=shuffle, canonical_nodes=nodes, window=window)
    worlds = [World(rank, machines, 1) for rank in range(machines)]
    for batches in (1, 2, 5):
        need = need_of_node(
            run,
            np.ones(len(LAST_IS_SMALLER), np.int64),
            ReadAhead(1, batches - 1, 0),
            device_batch_size=8,
            world=worlds[0],
            packed=0.0,
            cached=0.0,
        )
        most = 0
        for epoch in range(2):
            for world in worlds:
                plan = BatchPlan(run.epoch(epoch), batch_size=size, world=world, tail="pad")
                ids = np.concatenate([plan.share(k).ids for k in range(plan.num_batches)])
                most = max(most, max_active(run.snapshot.shards_of(ids), batches * 8))
        assert most <= need.active_shards + need.entering_shards <= most + 2 * nodes


def test_without_a_shuffle_it_is_the_open_shard_and_those_read_ahead():
    run = run_over([EQUAL], batch_size=FEW, shuffle=False)
    ahead = ReadAhead(1, 8, 0)
    options = {"device_batch_size": FEW, "world": World(), "packed": 0.0, "cached": 0.0}
    assert need_of_node(run, np.ones(len(EQUAL), np.int64), ahead, **options).num_bytes == 1 + 2


def _needed(run, batches=1, packed=0.0, world=None):
    return need_of_node(
        run,
        np.ones(run.snapshot.num_shards, np.int64),
        ReadAhead(1, batches - 1, 0),
        device_batch_size=FEW,
        world=world or World(),
        packed=packed,
        cached=0.0,
    )


def test_where_few_samples_of_each_shard_are_drawn_more_shards_are_read_ahead():
    options = {"batch_size": FEW, "shuffle": True, "canonical_nodes": 1, "window": 2}
    run = run_over([EQUAL], [StreamWeights(choose=len(EQUAL))], sampling_granularity=1, **options)
    shards = run.snapshot.shards_of(run.epoch(0).ids(0, run.num_samples))
    for batches in (1, 3, 8):
        need = _needed(run, batches)
        assert max_active(shards, batches * FEW) <= need.num_bytes <= max_active(shards, batches * FEW) + 2


def test_compressed_files_have_room_also_where_all_shards_are_in_use():
    run = run_over([EQUAL[:8]], batch_size=FEW, shuffle=True, canonical_nodes=2, window=8)
    need = _needed(run, batches=4, packed=1.0)
    assert (need.active_shards, need.entering_shards) == (8, 0)
    assert need.num_bytes >= 8 + 2  # two of them come within four batches


def test_orders_of_mosaicml_streaming_count_what_one_machine_reads():
    options = {"batch_size": 3 * FEW, "shuffle": True, "canonical_nodes": 6, "algorithm": "py2s"}
    run = run_over([EQUAL], world=World(0, 3, 1), device_batch_size=FEW, **options)
    worlds = [World(rank, 3, 1) for rank in range(3)]
    need = _needed(run, world=worlds[0])
    plans = [BatchPlan(run.epoch(0), batch_size=3 * FEW, world=world, tail="pad") for world in worlds]
    read = [np.concatenate([plan.share(k).ids for k in range(plan.num_batches)]) for plan in plans]
    assert max(max_active(run.snapshot.shards_of(ids), FEW) for ids in read) <= need.num_bytes


def test_the_samples_that_take_the_places_of_forgotten_ones_have_room():
    run = run_over([EQUAL], batch_size=FEW, shuffle=True, canonical_nodes=2, window=3)
    forgetting = run.forgetting(Forgotten.of(run.snapshot, range(100, 700, 10)))
    few, more = _needed(forgetting), _needed(forgetting, batches=10)
    assert (few.num_bytes, more.num_bytes) == (_needed(run).num_bytes + 1, _needed(run, batches=10).num_bytes + 2)
