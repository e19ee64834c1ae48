"""Runs in the orders of mosaicml-streaming: dealt rank by rank as it deals them, and continued from its states."""

from __future__ import annotations

import gzip
import json
import pickle

import numpy as np
import pytest
from support.mosaic_work import epoch_work
from support.orders import run_over

from lightning_stream.errors import StateError
from lightning_stream.order import (
    BatchPlan,
    MosaicConfig,
    OrderConfig,
    Position,
    RunOrder,
    Snapshot,
    StreamWeights,
    World,
    is_mosaic_state,
    ledger,
    mosaic_config,
    mosaic_position,
    mosaic_state,
)

SIZES = [[37, 37, 37, 9], [50, 50, 20]]


def config_of(world, device=4, **arguments):
    defaults = {"shuffle": True, "algorithm": "py1e", "canonical_nodes": 4, "world": world}
    batch_size = device * world.num_replicas
    return OrderConfig.resolve(batch_size=batch_size, device_batch_size=device, **defaults | arguments)


def run_of(world, **arguments):
    return RunOrder(Snapshot.of(SIZES), [StreamWeights()] * 2, config_of(world, **arguments))


def sum_of(share):
    """The ledger's sum of one rank's share of epoch 0."""
    return ledger.total(0, share.positions[~share.filler], share.ids[~share.filler])


def pieces(plan, device):
    """A rank's micro-batches."""
    steps = range(plan.num_batches)
    return [one for k in steps for one in plan.share(k).micro_batches(plan.num_micro_batches(k, device))]


def delivered(plan, device):
    """A rank's micro-batches with the repeats of the original, but without those of our own, which another rank has."""
    return [one.ids.tolist() for one in pieces(plan, device) if not (one.filler.all() and plan.world.num_ranks > 1)]


def golden_cases(folder):
    spec = json.loads((folder / "order" / "spec.json").read_text())
    with gzip.open(folder / "order" / "work.jsonl.gz", "rt") as lines:
        for line in lines:
            case = json.loads(line)
            streams, extra = spec["weights"][case["in"]["weights"]]
            sizes = [spec["spec"][stream["local"]] for stream in streams]
            weights = [StreamWeights(**{k: v for k, v in stream.items() if k != "local"}) for stream in streams]
            epoch_size = {"1k": 1000}.get(extra.get("epoch_size"), extra.get("epoch_size"))
            if "ids" in case:
                yield case["in"], np.array(case["ids"]).reshape(case["shape"]), sizes, weights, epoch_size


def test_every_ranks_batches_are_those_of_the_original(shared_golden):
    compared = 0
    for case, work, sizes, weights, epoch_size in golden_cases(shared_golden):
        nodes, ranks, workers, _, device = work.shape
        world = World(0, nodes * ranks, ranks)
        order = run_over(
            sizes,
            weights,
            batch_size=nodes * ranks * device,
            shuffle=case["shuffle"],
            seed=case["shuffle_seed"],
            algorithm=case["shuffle_algo"],
            canonical_nodes=case["num_canonical_nodes"],
            batching_method=case["batching_method"],
            device_batch_size=device,
            sampling_method=case["sampling_method"],
            sampling_granularity=case["sampling_granularity"],
            epoch_size=epoch_size,
            mosaic=MosaicConfig(case["partition_algo"], case["shuffle_block_size"]),
            world=world,
        ).epoch(case["epoch"])
        start = order.order.position_after(case["sample_in_epoch"])
        batches = [g for g in range(workers * work.shape[3]) if (work[:, :, g % workers, g // workers] >= 0).any()]
        for rank in range(nodes * ranks):
            here = World(rank, nodes * ranks, ranks)
            plan = BatchPlan(order, batch_size=nodes * ranks * device, world=here, start=start)
            rows = work[rank // ranks, rank % ranks]
            wanted = [rows[g % workers, g // workers] for g in batches]
            wanted = [row[row >= 0].tolist() for row in wanted]
            found = pieces(plan, device)
            assert len(found) == len(wanted)
            for piece, ids in zip(found, wanted, strict=True):
                assert piece.ids.tolist() == ids if ids else piece.filler.all()
            compared += 1
    assert compared > 1000


@pytest.mark.parametrize("method", ["random", "stratified", "per_stream"])
def test_accumulation_takes_the_originals_batches_one_after_another(method):
    world = World(1, 2, 2)
    run = run_of(world, batching_method=method)
    once = BatchPlan(run.epoch(0), batch_size=8, world=world)
    twice = BatchPlan(run.epoch(0), batch_size=16, world=world)
    assert delivered(twice, 4) == delivered(once, 4)
    assert twice.num_batches == -(-once.num_batches // 2)


def test_a_rank_left_without_a_batch_gets_flagged_filler():
    run = run_of(World(0, 8, 8), device=3, batching_method="device_per_stream")
    plans = [BatchPlan(run.epoch(0), batch_size=24, world=World(rank, 8, 8)) for rank in range(8)]
    last = plans[0].num_batches - 1
    shares = [plan.share(last) for plan in plans]
    assert {len(share) for share in shares} == {3}
    assert 0 < sum(share.filler.all() for share in shares) < 8
    positions = np.concatenate([share.positions[~share.filler] for share in shares])
    assert sorted(positions.tolist()) == list(range(*plans[0].bounds(last)))


def test_another_world_continues_the_same_global_batches_and_the_ledger():
    first, second = World(0, 4, 2), World(0, 2, 1)
    run = run_of(first, device=4)
    position = Position.start(run, batch_size=16, tail="pad").advanced(run, 48)
    position = Position.from_state(json.loads(json.dumps(position.to_state())))
    config = config_of(second, device=8, resumed=position.order)
    again = RunOrder(run.snapshot, run.weights, config)
    assert position.check(again) == []
    before = BatchPlan(run.epoch(0), batch_size=16, world=first)
    after = BatchPlan(again.epoch(0), batch_size=16, world=second, start=48)
    for k in range(5):
        assert np.array_equal(before.ids(3 + k), after.ids(k))
        shares = [BatchPlan(again.epoch(0), batch_size=16, world=World(r, 2, 1), start=48).share(k) for r in range(2)]
        begin, end = after.bounds(k)
        total = sum(map(sum_of, shares)) % ledger.MODULUS
        assert total == ledger.total(0, np.arange(begin, end), before.ids(3 + k))


ALGORITHMS = ("py1e", "py1br", "py1s", "py2s", "naive")


def random_run(rng):
    """A run in such an order; None where that library cannot deal it."""
    nodes, ranks = (int(rng.choice([1, 2])), int(rng.choice([1, 2, 4])))
    device = int(rng.choice([1, 3, 4, 8]))
    method = rng.choice(["random", "random", "stratified", "per_stream", "device_per_stream"])
    sizes = [rng.integers(1, 40, rng.integers(1, 6)).tolist() for _ in range(rng.integers(1, 4))]
    config = config_of(
        World(0, nodes * ranks, ranks), device, algorithm=str(rng.choice(ALGORITHMS)), batching_method=str(method),
        shuffle=bool(rng.integers(4)), canonical_nodes=nodes * int(rng.choice([1, 1, 2, 64])),
        mosaic=MosaicConfig(str(rng.choice(["relaxed", "orig"])), int(rng.choice([32, 2**18]))),
    )  # fmt: skip
    weights = [StreamWeights(repeat=float(rng.choice([1, 1, 0.5, 2.3])))] * len(sizes)
    try:
        run = RunOrder(Snapshot.of(sizes), weights, config)
        run.epoch(0)
    except ValueError:
        return None
    return run, nodes, ranks, config.mosaic.batch_size


def worlds_of(num_samples, rng):
    """Every rank of a random world over which a batch divides."""
    nodes = int(rng.choice([1, 2])) if num_samples % 2 == 0 else 1
    ranks = int(rng.choice([one for one in (1, 2, 3, 4) if num_samples % (nodes * one) == 0]))
    return [World(rank, nodes * ranks, ranks) for rank in range(nodes * ranks)]


def check_plans(plans, device):
    """All that ranks get, as often as the plan says; micro-batches alike on all of them, and none too large."""
    whole = plans[0].num_whole_batches
    for k in range(plans[0].num_batches):
        begin, end = plans[0].bounds(k)
        assert begin < end
        assert all(plan.bounds(k) == (begin, end) for plan in plans)
        shares = [plan.share(k) for plan in plans]
        at, ids = (np.concatenate([getattr(s, name)[~s.filler] for s in shares]) for name in ("positions", "ids"))
        order = np.argsort(at)
        assert np.array_equal(at[order], np.arange(begin, end))
        assert np.array_equal(ids[order], plans[0].ids(k))
        assert (end - begin == plans[0].batch_size) == all(not s.filler.any() for s in shares) or k >= whole
        counts = {plan.num_micro_batches(k, device) for plan in plans}
        assert len(counts) == 1
        for share in shares:
            sizes = [len(piece) for piece in share.micro_batches(min(counts))]
            assert 1 <= min(sizes) <= max(sizes) <= device
            assert begin <= share.positions.min() <= share.positions.max() < end
        total = sum(map(sum_of, shares)) % ledger.MODULUS
        assert total == ledger.of_steps(plans[0], k, k + 1)[0]


def test_shares_positions_and_ledger_agree_in_any_world_for_any_accumulation():
    rng, tried = np.random.default_rng(7), 0
    while tried < 150:
        found = random_run(rng)
        if found is None:
            continue
        run, nodes, ranks, micro = found
        order, tail = run.epoch(0), str(rng.choice(["pad", "pad", "drop", "exact"]))
        size, first = (
            micro * int(rng.integers(1, 4)),
            [World(rank, nodes * ranks, ranks) for rank in range(nodes * ranks)],
        )
        plans = [BatchPlan(order, batch_size=size, world=world, tail=tail) for world in first]
        check_plans(plans, micro // len(first))
        for k in range(plans[0].num_batches):
            assert np.array_equal(order.ids(*plans[0].bounds(k)), plans[0].ids(k))
        if not plans[0].num_batches:
            continue
        position = Position.start(run, batch_size=size, tail=tail)
        start = plans[0].bounds(int(rng.integers(plans[0].num_batches)))[1]
        position = position.advanced(run, start)
        assert position.ledger_matches(run)
        again = [BatchPlan(order, batch_size=size, world=world, tail=tail, start=start) for world in first]
        done = plans[0].num_batches - again[0].num_batches
        for k in range(again[0].num_batches):
            assert np.array_equal(again[0].ids(k), plans[0].ids(done + k))
        try:
            others = worlds_of(micro, rng)
            plans = [BatchPlan(order, batch_size=size, world=world, tail=tail, start=start) for world in others]
        except ValueError:
            continue
        check_plans(plans, int(rng.choice([1, 2, micro // len(others), size // len(others)])))
        for k in range(plans[0].num_batches):
            position = position.advanced(run, plans[0].bounds(k)[1])
            assert position.ledger_matches(run)
        tried += 1


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize(("tail", "steps", "samples"), [("pad", 7, 167), ("exact", 7, 167), ("drop", 6, 144)])
def test_repeats_that_fill_up_ranks_are_filler_and_count_in_no_world(ranks, tail, steps, samples):
    run = RunOrder(Snapshot.of([[100, 67]]), [StreamWeights()], config_of(World(0, ranks, ranks), 24 // ranks))
    plans = [BatchPlan(run.epoch(0), batch_size=24, world=World(r, ranks, ranks), tail=tail) for r in range(ranks)]
    shares = [plan.share(k) for plan in plans for k in range(plan.num_batches)]
    counted = np.concatenate([share.ids[~share.filler] for share in shares])
    assert (plans[0].num_batches, len(counted), len(np.unique(counted))) == (steps, samples, samples)
    assert sum(map(len, shares)) == (168 if tail == "pad" else samples)


def test_a_plan_of_a_dealt_epoch_is_pickled_without_its_samples():
    run = RunOrder(Snapshot.of([[20_000]]), [StreamWeights()], config_of(World(0, 4, 2)))
    plan = BatchPlan(run.epoch(0), batch_size=16, world=World(1, 4, 2), start=48)
    text = pickle.dumps(plan)
    assert len(text) < 5000
    assert np.array_equal(pickle.loads(text).share(7).ids, plan.share(7).ids)


def test_a_state_of_mosaicml_streaming_is_continued_at_its_sample():
    state = {
        "epoch": 1,
        "sample_in_epoch": 32,
        "num_canonical_nodes": 2,
        "shuffle_seed": 5,
        "initial_physical_nodes": 2,
    }
    assert is_mosaic_state(state)
    world = World(1, 4, 2)
    config = mosaic_config(state, config_of(world, canonical_nodes=None))
    run = RunOrder(Snapshot.of(SIZES), [StreamWeights()] * 2, config)
    position = mosaic_position(state, run, batch_size=16, tail="pad").rebased_on(
        run, batch_size=16, tail="pad", world=world
    )
    assert (position.epoch, position.position) == (1, 32)
    plan = BatchPlan(run.epoch(1), batch_size=16, world=world, start=position.position)
    work = epoch_work(
        [StreamWeights()] * 2, "balanced", 1, True, "py1e", "random", 2, 2, 1, 4, 2, 1, 32, 5, None, "relaxed",
        shard_sizes=SIZES, initial_physical_nodes=2,
    )  # fmt: skip
    assert delivered(plan, 4) == [row[row >= 0].tolist() for row in work[0, 1, 0] if (row >= 0).any()]


def test_without_the_algorithm_such_a_state_is_refused():
    state = {"epoch": 1, "sample_in_epoch": 32, "num_canonical_nodes": 2, "shuffle_seed": 5}
    with pytest.raises(StateError, match=r"does not record its algorithm.*shuffle, shuffle_algo, partition_algo and"):
        mosaic_config(state, OrderConfig.resolve(batch_size=16, shuffle=True))


def test_such_a_state_with_wrong_numbers_is_refused():
    state = {"epoch": -1, "sample_in_epoch": "x", "num_canonical_nodes": 0, "shuffle_seed": 5}
    with pytest.raises(
        StateError, match=r"epoch must .* not -1. sample_in_epoch must .* not 'x'. num_canonical_nodes must .* not 0"
    ):
        mosaic_config(state, config_of(World(0, 4, 2)))


def test_such_a_state_beyond_its_epoch_is_refused():
    """That library refuses it, too: it is of other data, or counts the samples that ranks share more than once."""
    run = run_of(World(0, 4, 2))
    state = {"epoch": 0, "sample_in_epoch": 248, "num_canonical_nodes": 4, "shuffle_seed": 9176}
    assert mosaic_position(state, run, batch_size=16, tail="pad").position == run.epoch(0).num_samples
    with pytest.raises(ValueError, match="at most 256 samples, repeats included; found sample_in_epoch=257"):
        mosaic_position(state | {"sample_in_epoch": 257}, run, batch_size=16, tail="pad")


def test_a_state_of_our_own_is_not_taken_for_one_of_theirs():
    run = run_of(World(0, 4, 2))
    assert not is_mosaic_state(Position.start(run, batch_size=16, tail="pad").to_state())
    assert not is_mosaic_state(None)


def test_at_the_end_of_an_epoch_the_next_begins():
    world = World(0, 4, 2)
    run = run_of(world)
    state = {"epoch": 0, "sample_in_epoch": run.epoch(0).num_samples, "num_canonical_nodes": 4, "shuffle_seed": 9176}
    position = mosaic_position(state, run, batch_size=16, tail="pad")
    assert position.rebased_on(run, batch_size=16, tail="pad", world=world).epoch == 1


def test_a_world_that_cannot_hold_the_first_global_batch_is_refused():
    run = run_of(World(0, 4, 2))
    with pytest.raises(ValueError, match=r"16 samples over all ranks.*24 samples a step"):
        BatchPlan(run.epoch(0), batch_size=24, world=World(0, 4, 2))


@pytest.mark.parametrize("algorithm", ["py1e", "py1br", "py1s", "py2s", "naive"])
def test_a_stream_of_an_empty_dataset_changes_nothing(algorithm: str) -> None:
    def ids(sizes: list[list[int]]) -> list[int]:
        epoch = run_over(sizes, batch_size=4, device_batch_size=4, shuffle=True, algorithm=algorithm, seed=3).epoch(1)
        return epoch.ids(0, epoch.num_samples).tolist()

    assert set(ids([[9, 4], []])) == set(range(13))
    assert ids([[9, 4], []]) == ids([[], [9, 4]]) == ids([[9, 4]])


@pytest.mark.parametrize("world", [World(), World(0, 4, 2), World(0, 6, 6)])
@pytest.mark.parametrize("algorithm", ["py1e", "py2s"])
def test_a_position_between_batches_has_a_state_of_that_library_and_no_other_has(world, algorithm):
    run = run_of(world, algorithm=algorithm)
    plan = BatchPlan(run.epoch(1), batch_size=4 * world.num_replicas, world=world)
    settings = {"batch_size": plan.batch_size, "tail": "pad"}
    for end in [0, *(plan.bounds(k)[1] for k in range(plan.num_batches))]:
        position = Position.start(run, epoch=1, **settings).advanced(run, end)
        state = mosaic_state(position, run)
        assert state["sample_in_epoch"] >= end  # that library counts repeats
        assert mosaic_position(state, run, **settings) == position
        if 0 < end < run.epoch(1).num_samples:
            with pytest.raises(StateError, match="within one"):
                mosaic_state(position.advanced(run, end + 1), run)


def test_a_position_in_our_own_order_has_no_state_of_that_library():
    run = run_over(SIZES, batch_size=8, shuffle=True)
    with pytest.raises(StateError, match="shuffle_algo='window'"):
        mosaic_state(Position.start(run, batch_size=8, tail="pad"), run)
