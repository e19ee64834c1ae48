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

Disks = tuple[tuple[int, ...], ...]
Report = tuple[int, tuple[int, ...]]
"""A node, and the samples of each canonical node that its disk holds."""
NO_REPORT: Report = (0, ())
_STEPS = 2**20  # of what a slot can be worth, so that squares fit


@dataclass(frozen=True, eq=False)
class Placement:
    """Where the canonical nodes stand, and who reads what.

    Example: nodes 0 and 1 each read two of four canonical nodes: ``Placement(np.array([0, 1, 3, 2]), (0, 1))``.
    """

    places: Ints  # int64[C]: the place of each canonical node in the row
    seats: tuple[int, ...]  # of each node: which part of the row it reads

    def seated(self, world: World) -> World:
        """The first rank of the replica that would read, if all nodes sat in their order, what this one reads."""
        per_node = world.num_replicas // len(self.seats)
        node, inside = divmod(world.replica, per_node)
        return replace(world, rank=(self.seats[node] * per_node + inside) * world.replication)


def num_readers(world: World) -> int:
    """The nodes that read parts of their own; where groups of ranks span nodes unevenly, sets of nodes."""
    return math.gcd(world.num_nodes, world.num_replicas)


def reader_of(world: World) -> int:
    """The node of this rank, below `num_readers`."""
    return world.replica * num_readers(world) // world.num_replicas


def disks_of(world: World, reports: Sequence[Report]) -> Disks:
    """What the nodes hold, from the reports of all ranks; () unless all nodes reported."""
    by_node: dict[int, Ints] = {}
    for node, samples in reports:
        by_node[node] = np.maximum(by_node.get(node, 0), samples)
    if len(by_node) < num_readers(world) or NO_REPORT in reports:
        return ()
    return tuple(tuple(by_node[node].tolist()) for node in sorted(by_node))


@lru_cache(maxsize=16)
def placement_of(canonical_nodes: int, num_nodes: int, disks: Disks) -> Placement:
    """The placement that keeps most of what the nodes' disks hold; the sticky one where that keeps as much.

    Args:
        canonical_nodes, num_nodes: C and P.
        disks: For each node, the samples of each canonical node that it holds; () where nobody asked. Where samples
            are packed into fewer sequences, C divides the number of canonical nodes.

    Example: ``placement_of(2, 2, ((0, 50), (50, 0))).seats`` is ``(1, 0)``.
    """
    sticky = sticky_placement(canonical_nodes, num_nodes)
    if not any(map(any, disks)):
        return sticky
    samples = np.array(disks).reshape(num_nodes, -1, canonical_nodes).sum(axis=1)
    seat = np.arange(num_nodes)[:, None]
    place = np.arange(canonical_nodes)
    reads = (place * num_nodes < (seat + 1) * canonical_nodes) & ((place + 1) * num_nodes > seat * canonical_nodes)
    at_place = np.empty_like(samples)
    at_seat = np.empty_like(samples)
    at_place[:, sticky.places] = samples
    seats = np.array(sticky.seats)
    seats = seats[_exchanged(seats, reads @ at_place.T)]
    at_seat[seats] = samples
    places = sticky.places[_exchanged(sticky.places, reads.T @ at_seat)]
    return Placement(places, tuple(seats.tolist()))


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
    owned = [[*range(canonical_nodes)]]
    for count in range(2, num_nodes + 1):
        owned.append([max(owned, key=len).pop() for _ in range(canonical_nodes // count)])
    return owned


def _in_row(groups: Sequence[Sequence[int]]) -> tuple[list[int], list[int]]:
    """The places of the members, and of their groups: so that an even cut of the row falls near the groups' borders.

    Sizes differ by one at most; longer groups are spread among the shorter ones.
    """
    total = sum(map(len, groups))
    count = len(groups)
    waiting = sorted(range(count), key=lambda group: (len(groups[group]), -group))
    num_short = sum(len(group) == total // count for group in groups)
    short = waiting[:num_short]
    longer = waiting[num_short:]
    places = [0] * total
    seats = [0] * count
    at = 0
    for seat in range(count):
        size = (seat + 1) * total // count - seat * total // count
        group = (short if size == total // count else longer).pop()
        seats[group] = seat
        for member in sorted(groups[group]):
            places[member], at = at, at + 1
    return places, seats


def _exchanged(slots: Ints, worth: Ints) -> Ints:
    """int64[n]: whose slot each of n things takes, after all exchanges of two that raise what the slots are worth.

    That is the sum of the squares of ``worth[slot, thing]``: one slot that has all is better than two that have half.
    """
    worth = (worth * _STEPS // max(1, int(worth.max()))) ** 2
    things = np.arange(len(slots))
    takes = things.copy()
    is_changed = True
    while is_changed:
        is_changed = False
        for thing in things.tolist():
            taken = slots[takes]
            now = worth[taken, things]
            gains = worth[taken, thing] + worth[taken[thing]] - now - now[thing]
            other = int(gains.argmax())
            if gains[other] > 0:
                takes[[thing, other]] = takes[[other, thing]]
                is_changed = True
    return takes
