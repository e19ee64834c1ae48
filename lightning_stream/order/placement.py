"""Which node reads which canonical node: a pure function that moves least when nodes come and go.

The canonical nodes stand in a row that is cut evenly into as many *seats* as there are nodes. A placement says the
place of each canonical node in the row, and the seat of each node. So all nodes read equally much in every world, the
seats share as few canonical nodes as they can, and global batches are the same under any placement.

With each node that comes, every node gives up what it has too much and takes nothing: of 24 canonical nodes each of 4
nodes reads 6, and 4 of the same 6 beside 2 new nodes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from .arrays import Ints
from .world import World


@dataclass(frozen=True, eq=False)
class Placement:
    """Where the canonical nodes stand, and who reads what.

    Example: nodes 0 and 1 each read two of four canonical nodes: ``Placement(np.array([0, 1, 3, 2]), (0, 1))``.
    """

    places: Ints  # int64[C]: the place of each canonical node in the row
    seats: tuple[int, ...]  # of each node: which stretch of the row it reads

    def seated(self, world: World) -> World:
        """The first rank of the replica that would read, if all nodes sat in their order, what this one reads."""
        per_node = world.num_replicas // len(self.seats)
        node, inside = divmod(world.replica, per_node)
        return replace(world, rank=(self.seats[node] * per_node + inside) * world.replication)


def num_readers(world: World) -> int:
    """The nodes that read parts of their own; where groups of ranks span nodes unevenly, sets of nodes."""
    return math.gcd(world.num_nodes, world.num_replicas)


@lru_cache(maxsize=64)
def sticky_placement(canonical_nodes: int, num_nodes: int) -> Placement:
    """The placement for so many nodes: that for one node less, of which as little moves as can be.

    Example: ``sticky_placement(24, 4)``.
    """
    if num_nodes <= canonical_nodes:
        places, seats = _in_row(_grown(canonical_nodes, num_nodes))
    else:  # a canonical node has several nodes: each that comes joins the next one
        seats, places = _in_row([range(first, num_nodes, canonical_nodes) for first in range(canonical_nodes)])
    return Placement(np.array(places), tuple(seats))


def _grown(canonical_nodes: int, num_nodes: int) -> list[list[int]]:
    """The canonical nodes of each node, as even as whole numbers can be."""
    held = [[*range(canonical_nodes)]]
    for count in range(2, num_nodes + 1):
        held.append([max(held, key=len).pop() for _ in range(canonical_nodes // count)])
    return held


def _in_row(groups: Sequence[Sequence[int]]) -> tuple[list[int], list[int]]:
    """The places of the members, and of their groups: so that an even cut of the row falls near the groups' borders.

    Sizes differ by one at most; longer groups are spread among the shorter ones.
    """
    total, count = sum(map(len, groups)), len(groups)
    waiting = sorted(range(count), key=lambda group: (len(groups[group]), -group))
    num_short = sum(len(group) == total // count for group in groups)
    short, longer = waiting[:num_short], waiting[num_short:]
    places, seats = [0] * total, [0] * count
    at = 0
    for seat in range(count):
        size = (seat + 1) * total // count - seat * total // count
        group = (short if size == total // count else longer).pop()
        seats[group] = seat
        for member in sorted(groups[group]):
            places[member], at = at, at + 1
    return places, seats
