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


def reader_of(world: World) -> int:
    """The node of this rank, below `num_readers`."""
    return world.replica * num_readers(world) // world.num_replicas


def disks_of(world: World, reports: Sequence[Report]) -> Disks:
    """What the nodes hold, from the reports of all ranks; () unless all nodes reported."""
    found: dict[int, Ints] = {}
    for node, samples in reports:
        found[node] = np.maximum(found.get(node, 0), samples)
    if len(found) < num_readers(world) or NO_REPORT in reports:
        return ()
    return tuple(tuple(found[node].tolist()) for node in sorted(found))


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
    held = np.array(disks).reshape(num_nodes, -1, canonical_nodes).sum(axis=1)
    seats = _seats_for(held, sticky)
    if num_nodes > canonical_nodes:
        return Placement(sticky.places, seats)
    at_seat = np.empty_like(held)
    at_seat[list(seats)] = held
    return Placement(_places_for(at_seat, sticky.places), seats)


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


def _seats_for(held: Ints, sticky: Placement) -> tuple[int, ...]:
    """The seat of each node: the best pairs of node and seat first, of like ones those of the sticky placement."""
    num_nodes, count = held.shape
    seats, places = np.arange(num_nodes)[:, None], sticky.places[None]
    reads = (places * num_nodes < (seats + 1) * count) & ((places + 1) * num_nodes > seats * count)
    kept = held @ reads.T.astype(np.int64)
    is_other = np.array(sticky.seats)[:, None] != seats.T
    found: dict[int, int] = {}
    for pair in np.lexsort((is_other.reshape(-1), -kept.reshape(-1))).tolist():
        node, seat = divmod(pair, num_nodes)
        if node not in found and seat not in found.values():
            found[node] = seat
    return tuple(found[node] for node in range(num_nodes))


def _places_for(held: Ints, places: Ints) -> Ints:
    """The places of the canonical nodes: at a seat that holds them, where that can be; int64[C].

    Args:
        held: int64[seats, C]: the samples that the disk at each seat holds.
        places: int64[C], which stay where nothing is gained.
    """
    num_seats, count = held.shape
    former = (places * num_seats // count).tolist()
    holds = (held > 0) & (2 * held >= held.max(axis=0))  # little is left on a disk that read another part before
    seats_of = [np.flatnonzero(column).tolist() for column in holds.T]
    seat_of = {node: seat for node, seat in enumerate(former) if holds[seat, node]}
    sizes = np.bincount(former, minlength=num_seats).tolist()
    for node in range(count):
        if node not in seat_of:
            _find_seat(node, seats_of, seat_of, sizes)
    for node in range(count):
        if node not in seat_of:
            taken = [*seat_of.values()]
            vacant = [seat for seat in range(num_seats) if taken.count(seat) < sizes[seat]]
            seat_of[node] = max(vacant, key=lambda seat: (held[seat, node], seat == former[node]))
    moved = [node for node in range(count) if seat_of[node] != former[node]]
    found = places.copy()
    arriving, leaving = (sorted(moved, key=key.__getitem__) for key in (seat_of, former))
    found[arriving] = places[leaving]
    return found


def _find_seat(node: int, seats_of: Sequence[Sequence[int]], seat_of: dict[int, int], sizes: Sequence[int]) -> None:
    """Seat a canonical node where it is held, if others can move on to where these are held too."""
    entering: dict[int, int] = {}  # the canonical node that would take each seat
    moving = [node]
    for one in moving:
        for seat in seats_of[one]:
            if seat in entering:
                continue
            entering[seat] = one
            there = [other for other, taken in seat_of.items() if taken == seat]
            moving += there
            if len(there) < sizes[seat]:
                _move_on(seat, entering, seat_of)
                return


def _move_on(seat: int | None, entering: dict[int, int], seat_of: dict[int, int]) -> None:
    while seat is not None:
        node = entering[seat]
        former = seat_of.get(node)
        seat_of[node] = seat
        seat = former
