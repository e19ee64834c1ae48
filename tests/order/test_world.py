"""Ranks, nodes and replicas of a world, and worlds that are refused."""

from __future__ import annotations

import pytest

from lightning_stream.order import World


def test_replicas_count_groups_of_ranks():
    world = World(rank=13, num_ranks=16, ranks_per_node=8, replication=4)
    assert (world.replica, world.num_replicas, world.node, world.num_nodes) == (3, 4, 1, 2)


def test_groups_larger_than_a_node_are_the_nodes_of_the_data():
    world = World(rank=13, num_ranks=16, ranks_per_node=2, replication=8)
    assert (world.num_nodes, world.node) == (2, 1)


def test_every_contradiction_of_a_world_is_named_at_once():
    with pytest.raises(ValueError, match=r"rank 9.*3 does not divide 8.*5 does not divide 8"):
        World(rank=9, num_ranks=8, ranks_per_node=3, replication=5)


@pytest.mark.parametrize("name", ["num_ranks", "ranks_per_node", "replication"])
def test_no_number_of_a_world_may_be_zero(name):
    with pytest.raises(ValueError, match="at least 1"):
        World(**{name: 0})
