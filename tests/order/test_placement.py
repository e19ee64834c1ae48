"""Which node reads which canonical node, and how little of that moves when nodes come and go."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.orders import run_over

from lightning_stream.order import BatchPlan, OrderConfig, World
from lightning_stream.order.placement import placement_of, sticky_placement

NODES = 48
DIVISORS = [count for count in range(1, NODES + 1) if NODES % count == 0]


def parts_of(canonical_nodes, num_nodes):
    """The canonical nodes that each node reads some of."""
    found = sticky_placement(canonical_nodes, num_nodes)
    members = np.argsort(found.places)
    each = Fraction(canonical_nodes, num_nodes)
    bounds = [(seat * each, (seat + 1) * each) for seat in found.seats]
    return [{int(one) for one in members[int(begin) : -int(-end // 1)]} for begin, end in bounds]


def sequences():
    yield from [[8, 6, 4, 3], [4, 6, 8, 12], [4, 8, 4, 8]]
    rng = np.random.default_rng(36)
    yield from (rng.choice(DIVISORS, size=6).tolist() for _ in range(17))


@pytest.mark.parametrize("worlds", [*sequences()], ids=str)
def test_no_more_moves_than_must_move(worlds):
    """The bound: what no disk holds is fetched by somebody, and a node that comes fetches its share."""
    disks, moved, bound = [], 0, 0
    for count in worlds:
        parts = parts_of(NODES, count)
        disks = [disks[node] if node < len(disks) else set() for node in range(count)]  # those that left are lost
        fetched = sum(len(part - disk) for part, disk in zip(parts, disks, strict=True))
        nobody = NODES - len(set().union(*disks))
        lacking = sum(max(0, NODES // count - len(disk)) for disk in disks)
        moved, bound = moved + fetched, bound + max(nobody, lacking)
        disks = [disk | part for part, disk in zip(parts, disks, strict=True)]
    assert moved <= 1.05 * bound


@pytest.mark.parametrize("canonical_nodes", [1, 2, 4, 7, 12, 16])
def test_as_few_canonical_nodes_as_possible_are_read_by_several_nodes(canonical_nodes):
    for num_nodes in range(1, 40):
        found = sticky_placement(canonical_nodes, num_nodes)
        assert sorted(found.places.tolist()) == [*range(canonical_nodes)]
        assert sorted(found.seats) == [*range(num_nodes)]
        parts = parts_of(canonical_nodes, num_nodes)
        fewest = canonical_nodes + num_nodes - np.gcd(canonical_nodes, num_nodes)
        assert sum(map(len, parts)) == fewest
        if num_nodes % canonical_nodes == 0 and num_nodes > canonical_nodes:  # nobody who stays changes anything
            assert [min(part) for part in parts] == [node % canonical_nodes for node in range(num_nodes)]


def run_with(sticky, **settings):
    return run_over([[40] * 30], batch_size=48, shuffle=True, seed=5, canonical_nodes=12, sticky=sticky, **settings)


@settings(deadline=None, max_examples=30, derandomize=True)
@given(st.data())
def test_global_batches_do_not_depend_on_the_placement(data):
    ranks_per_node = data.draw(st.sampled_from([1, 2, 3]))
    replication = data.draw(st.sampled_from([1, 2, 4]))
    replicas = data.draw(st.sampled_from([1, 2, 3, 4, 6, 8, 12]))
    num_ranks = replicas * replication
    if num_ranks % ranks_per_node:
        ranks_per_node = 1
    world = World(0, num_ranks, ranks_per_node, replication)
    tail = data.draw(st.sampled_from(["pad", "drop", "exact"]))
    of = [
        BatchPlan(run_with(sticky).epoch(0), batch_size=48, world=world, tail=tail).of_replicas()
        for sticky in (True, False)
    ]
    counts = {plan.num_batches for plans in of for plan in plans}
    assert len(counts) == 1
    for k in range(counts.pop()):
        found, former = ([plan.share(k) for plan in plans] for plans in of)
        for shares in (found, former):
            read = np.concatenate([share.ids[~share.filler] for share in shares])
            assert sorted(read.tolist()) == sorted(of[1][0].ids(k).tolist())
        assert len({len(share) for share in found}) <= (2 if tail == "exact" else 1)
    together = [plan.shares([0, 1, 2]) for plan in of[0]]
    assert [[share.ids.tolist() for share in shares] for shares in together] == [
        [plan.share(k).ids.tolist() for k in range(3)] for plan in of[0]
    ]


def test_nodes_that_stay_keep_reading_the_same_shards():
    run = run_with(True)

    def shards(num_nodes):
        plans = BatchPlan(run.epoch(0), batch_size=48, world=World(0, 2 * num_nodes, 2)).of_replicas()
        each = [{*run.snapshot.shards_of(plan.share(k).ids).tolist()} for plan in plans for k in range(25)]
        return [set().union(*each[node * 50 : node * 50 + 50]) for node in range(num_nodes)]

    of_4, of_6 = shards(4), shards(6)
    assert all(now <= before for now, before in zip(of_6, of_4, strict=False))
    assert max(map(len, of_6)) < 30 / 6 + 5


def test_a_new_run_is_sticky_and_an_older_one_keeps_its_placement():
    assert not OrderConfig.resolve(batch_size=48, shuffle=True).sticky  # a state that lacks it
    former = OrderConfig.resolve(batch_size=48, shuffle=True, sticky=False)
    assert not OrderConfig.resolve(batch_size=48, shuffle=True, resumed=former).sticky
    new = OrderConfig.resolve(batch_size=48, shuffle=True, sticky=True)
    assert OrderConfig.resolve(batch_size=48, shuffle=True, resumed=OrderConfig.from_state(new.to_state())).sticky
    assert "sticky" not in former.to_state()
    assert not OrderConfig.resolve(batch_size=48, shuffle=False, sticky=True).sticky
    assert not OrderConfig.resolve(batch_size=48, shuffle=True, algorithm="py1e", sticky=True).sticky


def test_groups_of_ranks_that_span_nodes_unevenly_have_shares_of_their_own():
    world = World(0, 12, ranks_per_node=4, replication=3)  # 4 replicas on 3 nodes
    plans = BatchPlan(run_with(True).epoch(0), batch_size=48, world=world).of_replicas()
    assert sorted(np.concatenate([plan.share(0).ids for plan in plans]).tolist()) == sorted(plans[0].ids(0).tolist())
    same = replace(plans[1], world=replace(world, rank=5))  # of the same replica as rank 3
    assert same.share(0).ids.tolist() == plans[1].share(0).ids.tolist()


def reads_of(found, num_nodes):
    """The canonical nodes that each node reads some of, under a placement."""
    members, each = np.argsort(found.places), Fraction(len(found.places), num_nodes)
    return [{int(one) for one in members[int(s * each) : -int(-(s + 1) * each // 1)]} for s in found.seats]


def as_disks(parts, count):
    return tuple(tuple(100 * (node in part) for node in range(count)) for part in parts)


def fetched_with(disks, num_nodes, count):
    found = placement_of(count, num_nodes, as_disks(disks, count))
    parts = reads_of(found, num_nodes)
    assert sorted(found.places.tolist()) == [*range(count)]
    assert sorted(found.seats) == [*range(num_nodes)]
    return parts, sum(len(part - disk) for part, disk in zip(parts, disks, strict=True))


@pytest.mark.parametrize(("count", "num_nodes"), [(16, 4), (12, 12), (16, 6), (4, 8), (4, 6), (1, 3)])
def test_permuted_nodes_fetch_nothing_and_a_new_one_its_part(count, num_nodes):
    rng = np.random.default_rng(num_nodes)
    parts = parts_of(count, num_nodes)
    for _ in range(5):
        disks = [parts[node] for node in rng.permutation(num_nodes).tolist()]
        assert fetched_with(disks, num_nodes, count)[1] == 0
        lost, disks[0] = disks[0], set()
        assert fetched_with(disks, num_nodes, count)[1] == len(lost)


@pytest.mark.parametrize("seed", range(20))
def test_whichever_nodes_leave_no_more_moves_than_must_move(seed):
    rng = np.random.default_rng(seed)
    disks, moved, bound = [], 0, 0
    for num_nodes in rng.choice([2, 3, 4, 6, 8, 12, 16], size=7).tolist():
        stay = rng.permutation(len(disks))[:num_nodes].tolist()  # in any order of their ranks
        disks = [disks[node] for node in stay] + [set()] * (num_nodes - len(stay))
        parts, fetched = fetched_with(disks, num_nodes, NODES)
        nobody = NODES - len(set().union(*disks))
        lacking = sum(max(0, NODES // num_nodes - len(disk)) for disk in disks)
        moved, bound = moved + fetched, bound + max(nobody, lacking)
        disks = [disk | part for part, disk in zip(parts, disks, strict=True)]
    assert moved <= 1.05 * bound, (moved, bound)


def test_where_nodes_do_not_divide_the_canonical_ones_little_more_moves_than_must_move():
    """The bound: also, nodes share as many canonical nodes as they must, and what no disk holds of these is fetched."""
    rng = np.random.default_rng(36)
    ratios = []
    for _ in range(20):
        disks, moved, bound = [], 0, 0
        for num_nodes in rng.integers(1, 17, size=6).tolist():
            disks = [disks[node] if node < len(disks) else set() for node in range(num_nodes)]
            parts, fetched = fetched_with(disks, num_nodes, NODES)
            nobody = NODES - len(set().union(*disks))
            lacking = sum(max(0, -(-NODES // num_nodes) - len(disk)) for disk in disks)
            shared = NODES + num_nodes - int(np.gcd(NODES, num_nodes)) - sum(map(len, disks))
            moved, bound = moved + fetched, bound + max(nobody, lacking, shared)
            disks = [disk | part for part, disk in zip(parts, disks, strict=True)]
        ratios.append(moved / bound)
    assert np.mean(ratios) <= 1.08
    assert max(ratios) <= 1.25


def test_without_anything_on_disks_or_with_everything_the_placement_is_the_sticky_one():
    sticky = sticky_placement(16, 4)
    for disks in ((), ((0,) * 16,) * 4, ((7,) * 16,) * 4, as_disks(parts_of(16, 4), 16)):
        found = placement_of(16, 4, disks)
        assert (found.places.tolist(), found.seats) == (sticky.places.tolist(), sticky.seats)


def test_packed_sequences_are_placed_by_their_canonical_nodes():
    parts = parts_of(4, 2)  # each sequence packs two of 8 canonical nodes: 0 and 4, 1 and 5, ...
    disks = tuple(tuple(100 * (node % 4 in part) for node in range(8)) for part in reversed(parts))
    assert reads_of(placement_of(4, 2, disks), 2) == parts[::-1]
