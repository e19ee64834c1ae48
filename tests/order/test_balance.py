"""Balanced shares: the same samples as without a balance, divided so that every replica has equally much to compute."""

from __future__ import annotations

import pickle
from dataclasses import replace
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.orders import run_over

from lightning_stream.order import BatchPlan, World
from lightning_stream.order.balance import Balance, deal, num_groups, whole_costs
from lightning_stream.order.ledger import expected, total
from lightning_stream.order.micro_batches import MicroBatches
from lightning_stream.questions.imbalance import imbalance

law = settings(max_examples=60, deadline=None, derandomize=True)
LENGTHS = np.clip(np.random.default_rng(5).lognormal(6, 1.2, 4000), 1, 8192).astype(np.int64)


def squares(ids):
    return LENGTHS[ids] ** 2


def run_of(batch_size, sizes=((700, 300, 500), (900,)), **settings):
    return run_over(sizes, batch_size=batch_size, shuffle=True, **settings)


def plans(run, batch_size, world, balance=None, epoch=0, tail="pad", start=0):
    """The plan of each replica of a world."""
    ranks = range(0, world.num_ranks, world.replication)
    settings = {"batch_size": batch_size, "tail": tail, "start": start, "balance": balance}
    return [BatchPlan(run.epoch(epoch), world=replace(world, rank=rank), **settings) for rank in ranks]


def counted(share):
    return share.positions[~share.filler].tolist()


def rows(num_rows, seed):
    """The costs of rows of 8,192 tokens that are packed with log-normal documents, almost full."""
    lengths = np.random.default_rng(seed).lognormal(np.log(700) - 0.72, 1.2, 30 * num_rows)
    lengths = np.sort(np.clip(lengths.astype(np.int64) + 1, 1, 8192))[::-1]
    room, cost = np.full(num_rows, 8192), np.zeros(num_rows, dtype=np.int64)
    for length in np.random.default_rng(seed + 1).permutation(lengths)[: 12 * num_rows].tolist():
        row = int(np.argmax(room >= length))
        if room[row] >= length:
            room[row] -= length
            cost[row] += length**2
    return np.random.default_rng(seed + 2).permutation(cost)


@law
@given(st.lists(st.integers(0, 30), min_size=1, max_size=40), st.integers(1, 6), st.randoms())
def test_groups_have_the_given_sizes_and_hold_everything_once(costs, count, random):
    cuts = sorted(random.randint(0, len(costs)) for _ in range(count - 1))
    sizes = np.diff([0, *cuts, len(costs)]).tolist()
    groups = deal(np.array(costs), sizes)
    assert [len(group) for group in groups] == sizes
    assert sorted(np.concatenate(groups).tolist()) == list(range(len(costs)))


@law
@given(st.lists(st.integers(0, 99), min_size=6, max_size=6))
def test_the_most_expensive_group_is_at_most_a_third_above_the_best_possible(costs):
    best = min(max(sum(order[:3]), sum(order[3:])) for order in permutations(costs))
    assert 3 * max(int(np.array(costs)[group].sum()) for group in deal(np.array(costs), [3, 3])) <= 4 * best


@pytest.mark.parametrize("replicas", [8, 64, 512])
def test_eight_packed_rows_for_each_replica_are_within_one_percent(replicas):
    costs = rows(8 * replicas, seed=replicas)
    loads = [int(costs[group].sum()) for group in deal(costs, [8] * replicas)]
    assert max(loads) <= max(1.01 * np.mean(loads), costs.max())


@pytest.mark.parametrize("replicas", [8, 64])
def test_64_documents_for_each_replica_are_within_three_percent_of_the_bound(replicas):
    costs = np.random.default_rng(replicas).lognormal(6, 1.2, 64 * replicas).astype(np.int64) ** 2
    loads = [int(costs[group].sum()) for group in deal(costs, [64] * replicas)]
    assert max(loads) <= 1.03 * max(np.mean(loads), costs.max())


@law
@given(st.data())
def test_a_balance_changes_who_gets_a_sample_but_no_global_batch_and_no_count(data):
    method = data.draw(st.sampled_from(["random", "stratified", "per_stream"]))
    world = data.draw(
        st.sampled_from([World(0, 1), World(0, 4, 2), World(0, 6, 2), World(0, 8, 4, 2), World(0, 12, 3, 2)])
    )
    nodes = data.draw(st.sampled_from([None, 1, 2, 3, 4]))
    tail, device = data.draw(st.sampled_from(["pad", "drop", "exact"])), data.draw(st.integers(1, 5))
    run = run_of(48, [[61, 17, 40], [33, 30]], canonical_nodes=nodes, batching_method=method)
    plain, balanced = (plans(run, 48, world, one, 2, tail) for one in (None, Balance(squares, device)))
    assert balanced[0].num_batches == plain[0].num_batches
    for k in range(plain[0].num_batches):
        before, after = ([plan.share(k) for plan in some] for some in (plain, balanced))
        assert [(len(one), one.num_samples) for one in after] == [(len(one), one.num_samples) for one in before]
        assert sorted(position for share in after for position in counted(share)) == list(range(*plain[0].bounds(k)))
        for plan, share in zip(balanced, after, strict=True):
            ids = plan.order.ids(*plan.bounds(k))
            assert np.array_equal(ids[share.positions - plan.bounds(k)[0]], share.ids)
            count = plan.num_micro_batches(k, device)
            pieces = share.micro_batches(count)
            assert len(pieces) == count
            assert max(map(len, pieces)) <= device
            assert all(counted(piece) == sorted(counted(piece)) for piece in pieces)
        if tail != "exact":
            assert len({tuple(map(len, one.micro_batches(count))) for one in after}) == 1


@pytest.mark.parametrize(
    ("nodes", "world"), [(4, World(0, 8, 4)), (2, World(0, 8, 2)), (1, World(0, 8, 2)), (4, World(0, 4))]
)
def test_a_machine_reads_the_shards_that_it_reads_without_a_balance(nodes, world):
    run = run_of(64, [[100] * 32], canonical_nodes=nodes, window=4)

    def reads(balance):
        found = {}
        for plan in plans(run, 64, world, balance):
            for k in range(plan.num_whole_batches):
                shards = run.snapshot.shards_of(plan.share(k).ids)
                found.setdefault(plan.world.node // (world.num_nodes // num_groups(nodes, world)), set()).update(shards)
        return found

    assert reads(Balance(squares, 8)) == reads(None)


def test_replicas_are_grouped_by_machines_or_by_the_canonical_nodes_that_machines_share():
    machines = [(16, 2), (16, 16), (4, 16), (1, 16), (16, 1), (6, 4)]
    assert [num_groups(nodes, World(0, 8 * count, 8)) for nodes, count in machines] == [2, 16, 4, 1, 1, 4]
    assert num_groups(16, World(0, 12, 3, 2)) == 2  # 6 replicas on 4 machines: every second border is one of machines


def test_one_canonical_node_balances_over_all_machines():
    run, world = run_of(256, [[4000]], canonical_nodes=1), World(0, 16, 2)
    loads = [
        [int(squares(plan.share(0).ids).sum()) for plan in plans(run, 256, world, one)]
        for one in (None, Balance(squares, 16))
    ]
    bound = max(np.mean(loads[0]), squares(plans(run, 256, world)[0].ids(0)).max())
    assert max(loads[0]) > 1.3 * bound
    assert max(loads[1]) < 1.03 * bound


def test_micro_batches_run_in_step_from_the_most_expensive_on():
    run, world = run_of(256, [[4000]], canonical_nodes=1), World(0, 4)

    def step_costs(balance):
        pieces = [plan.share(1).micro_batches(8) for plan in plans(run, 256, world, balance)]
        return np.array([[squares(piece.ids).sum() for piece in some] for some in pieces])

    plain, balanced = step_costs(None), step_costs(Balance(squares, 8))
    assert (np.diff(balanced, axis=1) <= 0).all()
    assert balanced.sum(axis=1).max() < 1.01 * balanced.sum(axis=1).mean()
    assert balanced.max(axis=0).sum() < plain.max(axis=0).sum() / 1.2


def test_a_run_may_switch_the_balance_and_the_world_between_steps():
    run = run_of(48, canonical_nodes=4)
    order, at, sums = run.epoch(1), 0, 0
    links = [
        (World(0, 4, 2), None),
        (World(0, 6, 6), Balance(squares, 4)),
        (World(0, 1), Balance(squares, 8)),
        (World(0, 3), None),
    ]
    for number, (world, balance) in enumerate(links):
        some = plans(run, 48, world, balance, epoch=1, start=at)
        steps = range(7) if number < 3 else range(some[0].num_batches)
        shares = [plan.share(k) for plan in some for k in steps]
        sums += sum(total(1, one.positions[~one.filler], one.ids[~one.filler]) for one in shares)
        at = some[0].bounds(steps[-1])[1]
    assert at == order.num_samples
    assert sums % 2**64 == expected(order, 0, at)


def test_micro_batches_of_a_balanced_plan_are_the_same_one_by_one_by_a_walk_and_pickled():
    plan = plans(run_of(48), 48, World(0, 4, 2), Balance(squares, 4))[1]
    batches, again = MicroBatches(plan, 4), MicroBatches(pickle.loads(pickle.dumps(plan)), 4)
    walked = [*batches.walk(1, 2)]
    assert len(walked) == len(batches) // 2
    for j, one in zip(range(1, len(batches), 2), walked, strict=True):
        assert np.array_equal(one.positions, batches[j].positions)
        assert np.array_equal(one.positions, again[j].positions)


def test_fractions_and_huge_costs_are_scaled_to_whole_numbers():
    def whole(*costs):
        return whole_costs(costs, len(costs)).tolist()

    assert whole(3, 0, 2**32) == [3, 0, 2**32]
    assert whole(0.5, 0.25, 0, 1) == [2**31, 2**30, 0, 2**32]
    assert whole(0.0, 0.0) == [0, 0]
    assert whole(2**63 - 1, 2**62, 0) == [2**32, 2**31, 0]
    assert whole(*np.array([1, 0.5], dtype=np.float16)) == [2**32, 2**31]


@pytest.mark.parametrize(
    "costs", [[1.0, 2.0], [[1, 2, 3]], [1, -1, 2], [1, float("nan"), 2], [1, float("inf"), 2], ["a", "b", "c"]]
)
def test_costs_that_are_no_numbers_of_at_least_0_are_refused(costs):
    with pytest.raises(ValueError, match="one number for each sample, at least 0"):
        whole_costs(costs, 3)


def test_orders_that_assign_samples_themselves_have_no_balance():
    run = run_of(48, batching_method="device_per_stream", device_batch_size=4)
    with pytest.raises(ValueError, match="balance must be None"):
        BatchPlan(run.epoch(0), batch_size=48, balance=Balance(squares, 4))


def test_the_imbalance_is_that_of_the_shares_without_and_with_the_balance():
    run, world = run_of(64), World(num_ranks=4, ranks_per_node=4)
    plan, balance = BatchPlan(run.epoch(0), batch_size=64, world=world), Balance(squares, device_batch_size=16)
    found = imbalance(plan, balance)
    for ratio, one in zip(found, (None, balance), strict=True):
        ratios = []
        for k in np.arange(16) * plan.num_whole_batches // 16:
            costs = [squares(each.share(int(k)).ids).sum() for each in plans(run, 64, world, one)]
            ratios.append(max(costs) / np.mean(costs))
        assert ratio == pytest.approx(np.mean(ratios), rel=1e-6)
    assert found[1] < 0.9 * found[0]
