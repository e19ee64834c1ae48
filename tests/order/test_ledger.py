"""The ledger catches what differs, at its step, in any world."""

from __future__ import annotations

import numpy as np
import pytest
from support.orders import run_over

from lightning_stream.order import BatchPlan, Snapshot, World, ledger


def run_of(method="random"):
    return run_over([[60, 40], [30, 20]], batch_size=24, shuffle=True, batching_method=method, device_batch_size=2)


def sum_of(epoch, share):
    """The sum of one rank's share, filler excluded."""
    return ledger.total(epoch, share.positions[~share.filler], share.ids[~share.filler])


def rank_sums(run, replicas, tail="pad", replication=1):
    sums = []
    for rank in range(replicas * replication):
        world = World(rank, replicas * replication, 1, replication)
        plan = BatchPlan(run.epoch(1), batch_size=24, world=world, tail=tail)
        sums.append(np.array([sum_of(1, plan.share(k)) for k in range(plan.num_batches)], dtype=np.uint64))
    return sums


def wanted(run, tail="pad"):
    plan = BatchPlan(run.epoch(1), batch_size=24, tail=tail)
    return ledger.of_steps(plan, 0, plan.num_batches)


@pytest.mark.parametrize("method", ["random", "stratified", "per_stream", "device_per_stream"])
@pytest.mark.parametrize(("replicas", "replication"), [(1, 1), (4, 1), (12, 1), (3, 2)])
def test_the_shares_of_any_world_add_up_to_what_was_planned(method, replicas, replication):
    run = run_of(method)
    verdict = ledger.verify(wanted(run), rank_sums(run, replicas, replication=replication), replication=replication)
    assert verdict.first_difference is None
    assert verdict.num_steps == len(wanted(run))
    assert int(wanted(run).sum(dtype=np.uint64)) == ledger.expected(run.epoch(1), 0, 150)


@pytest.mark.parametrize("harm", ["swap", "drop", "repeat", "move"])
def test_one_sample_swapped_dropped_repeated_or_moved_is_caught_at_its_step(harm):
    run = run_of()
    sums = rank_sums(run, 4)
    share = BatchPlan(run.epoch(1), batch_size=24, world=World(2, 4, 1), tail="pad").share(3)
    ids, positions = share.ids.copy(), share.positions.copy()
    if harm == "swap":
        ids[1] = (ids[1] + 1) % 150
    elif harm == "drop":
        ids, positions = ids[1:], positions[1:]
    elif harm == "repeat":
        ids, positions = np.append(ids, ids[0]), np.append(positions, positions[0])
    else:
        ids[[0, 1]] = ids[[1, 0]]
    sums[2][3] = ledger.total(1, positions, ids)
    verdict = ledger.verify(wanted(run), sums)
    assert verdict.first_difference == 3
    assert "step 3" in verdict.message


def test_ranks_of_one_replica_that_disagree_are_caught():
    run = run_of()
    sums = rank_sums(run, 2, replication=2)
    sums[1][2] += np.uint64(1)
    verdict = ledger.verify(wanted(run), sums, replication=2)
    assert verdict.first_difference == 2
    assert "one replica" in verdict.message


def test_a_file_cut_in_the_middle_of_a_sum_is_read_up_to_it():
    sums = wanted(run_of())
    assert np.array_equal(ledger.from_bytes(ledger.to_bytes(sums)[:-3]), sums[:-1])


def test_a_planned_substitution_is_applied_to_the_expectation():
    run = run_of()
    order = run.epoch(1)
    ids = order.ids(0, 150)
    drawn = int(ids[7])
    delivered = next(ledger.replacements(run.snapshot, 9176, 1, 7, drawn))
    seen = ids.copy()
    seen[7] = delivered
    planned = ledger.expected(order, 0, 150)
    corrected = ledger.substituted(planned, 1, [ledger.Substitution(7, drawn, delivered)])
    assert corrected == ledger.total(1, np.arange(150), seen) != planned


def test_replacements_are_of_the_same_stream_never_the_drawn_one_and_always_the_same():
    snapshot = run_of().snapshot
    for drawn in (0, 99, 100, 149):
        one, two = (list(ledger.replacements(snapshot, 9176, 1, 7, drawn)) for _ in range(2))
        assert one == two
        assert len(set(one)) > 4
        assert drawn not in one
        assert {int(snapshot.streams_of(np.array([i]))[0]) for i in one} == {int(drawn >= 100)}
    assert list(ledger.replacements(Snapshot.of([[1]]), 0, 0, 0, 0)) == []
