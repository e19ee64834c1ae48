"""Which replica computes which samples of a global batch, so that all replicas have equally much to compute.

Inside a global batch this is free: the gradient is the same. Every rank computes the same map from the costs of the
samples, so that nothing is communicated and no state is kept. Each replica gets as many samples as without a balance.
Its share is cut into micro-batches of nearly equal cost, the most expensive one first on every rank, since ranks may
wait for each other at every micro-batch.

Measured on packed rows of 8,192 tokens (cost: the sum of the squared lengths of a row's documents), 8 rows for each
replica, most expensive replica / mean: 1.57 -> 1.002 at 8 replicas, 1.85 -> 1.004 at 64, 2.25 -> 1.005 at 512. With one
row for each replica nothing can be balanced; with two, the bound is the most expensive row beside the cheapest one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heappop, heapreplace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .arrays import Bools, Integers, Ints
from .orders import Order, ceil_div
from .world import World

Cost = Callable[[Ints], NDArray[Any]]  # from sample ids, or from lengths

_LARGEST = 2**32  # so that the sum of a batch's costs fits into 64 bits
_MOST_EXCHANGES = 32
_EXCHANGED = 64  # in larger groups, the differences left are below 0.1 % without


@dataclass(frozen=True)
class Balance:
    """What a `BatchPlan` balances its shares by.

    Args:
        costs: From lengths (int64[n]) to what each costs: n numbers of at least 0, the same on every machine. So they
            must follow from + - * / and square roots of the data; exponents and logarithms may differ in the last bit
            from machine to machine. None: a sample costs its length.
        device_batch_size: Samples of a micro-batch on one device.
        lengths: Gives those of all samples; those of a packed row's documents are their tokens in it. None: ``costs``
            takes sample ids. A packed row costs what its documents cost together.

    Example::

        Balance(lambda ids: lengths[ids].astype(np.int64) ** 2, device_batch_size=8)
    """

    costs: Cost | None
    device_batch_size: int
    lengths: Callable[[], Integers] | None = None

    def costs_of(self, order: Order, at: Ints) -> Ints:
        """The costs of some positions as whole numbers."""
        costs = self.costs or np.asarray
        rows = order.spans(at)
        if rows is not None:
            inputs = rows.ids if self.lengths is None else rows.num_tokens
            return np.add.reduceat(whole_costs(costs(inputs), len(inputs)), rows.edges[:-1])
        ids = order.ids(at)
        return whole_costs(costs(ids if self.lengths is None else self.lengths()[ids].astype(np.int64)), len(at))


def whole_costs(values: ArrayLike, count: int) -> Ints:
    """The costs of ``count`` samples as whole numbers of at most 2**32: fractions and larger ones are scaled to that.

    Raises:
        ValueError: They are not so many numbers of at least 0.
    """
    costs = np.asarray(values)
    is_number = costs.dtype.kind in "iuf"
    costs = costs.astype(np.float64) if costs.dtype.kind == "f" else costs
    if costs.shape != (count,) or not is_number or not ((costs >= 0) & (costs < 2**63)).all():
        raise ValueError(
            "The costs of a balance must be one number for each sample, at least 0 and below 2**63; for "
            f"{count} samples, found {costs.dtype}{list(costs.shape)}: {costs.reshape(-1)[:4]}. Correct the "
            "function that was given as balance."
        )
    most = float(costs.max(initial=0))
    if most and (most > _LARGEST or np.issubdtype(costs.dtype, np.floating)):
        costs = np.rint(costs.astype(np.float64) / most * _LARGEST)
    return costs.astype(np.int64)


def deal(costs: Ints, sizes: Sequence[int]) -> list[Ints]:
    """Divide things into groups of given sizes and nearly equal cost: the indices of each group, ascending.

    From the most expensive on (ties: the first one), each goes to the group that has the lowest cost so far among those
    with room (ties: the first one). Then, if all sizes are equal, exchanges of two things remove most of the difference
    that is left: from 2 % to 0.4 % with 8 things in each of 512 groups. The sizes must add up to the number of things.

    Example: ``deal(np.array([9, 1, 5, 5]), [2, 2])`` gives ``[array([0, 1]), array([2, 3])]``.
    """
    groups: list[list[int]] = [[] for _ in sizes]
    open_groups = [(0, group) for group, size in enumerate(sizes) if size]  # ordered, hence a heap
    cost_of = costs.tolist()
    for index in np.argsort(-costs, kind="stable").tolist():
        cost, group = open_groups[0]
        groups[group].append(index)
        if len(groups[group]) == sizes[group]:
            heappop(open_groups)
        else:
            heapreplace(open_groups, (cost + cost_of[index], group))
    if len(groups) > 1 and 1 < len(groups[0]) <= _EXCHANGED and len({*sizes}) == 1:
        return [*np.sort(_exchanged(costs, np.array(groups)), axis=1)]
    return [np.array(sorted(group), np.int64) for group in groups]


def _exchanged(costs: Ints, groups: Ints) -> Ints:
    """Groups (int64[groups, size]) after exchanges between the most expensive and the cheapest one, the next two, ...

    Each pair exchanges the two things that make the pair most equal, until the most expensive group is within 0.1 % of
    the lower bound, or no exchange helps.
    """
    half = len(groups) // 2
    bound = max(int(costs.sum()) // len(groups), int(costs.max()))
    for _ in range(_MOST_EXCHANGES):
        group_costs = costs[groups]
        sums = group_costs.sum(axis=1)
        order = np.argsort(sums, kind="stable")
        if sums[order[-1]] <= bound + bound // 1000:
            break
        low = order[:half]
        high = order[::-1][:half]
        gap = sums[high] - sums[low]
        left = np.abs(gap[:, None, None] - 2 * (group_costs[high][:, :, None] - group_costs[low][:, None, :])).reshape(
            half, -1
        )
        best = left.argmin(axis=1)
        helps = left[np.arange(half), best] < gap
        if not helps.any():
            break
        low, high, (give, take) = low[helps], high[helps], np.divmod(best[helps], groups.shape[1])
        groups[high, give], groups[low, take] = groups[low, take], groups[high, give]
    return groups


def num_groups(canonical_nodes: int, world: World) -> int:
    """How many groups of replicas are balanced separately, so that no machine reads more shards.

    These are the machines; or the canonical nodes, if several whole machines share each.
    """
    machines = math.gcd(world.num_nodes, world.num_replicas)
    return canonical_nodes if machines % canonical_nodes == 0 else machines


def balanced_split(
    canonical: Integers, costs: Ints, world: World, *, equal: bool, num_micro_batches: int
) -> tuple[Ints, Bools, tuple[int, ...]]:
    """As `ByNode`, for the replica of ``world``; and where its micro-batches end.

    Only the groups of :func:`num_groups` are grouped by canonical node. Inside them, costs decide. Padding repeats the
    cheapest sample of the replica.
    """
    num_samples = len(canonical)
    replicas = world.num_replicas
    grouped = np.argsort(canonical, kind="stable")
    per_group = replicas // num_groups(len(np.unique(canonical)), world)
    group, place = divmod(world.replica, per_group)
    edges = num_samples * np.arange(group * per_group, (group + 1) * per_group + 1) // replicas
    candidates = np.sort(grouped[edges[0] : edges[-1]])
    samples = candidates[deal(costs[candidates], np.diff(edges).tolist())[place]]
    length = ceil_div(num_samples, replicas) if equal else max(1, len(samples))
    filler = np.arange(length) >= len(samples)
    if filler.any():
        near = samples[costs[samples].argmin()] if len(samples) else grouped[min(edges[0], num_samples - 1)]
        samples = np.append(samples, near)
    order, ends = _cut(costs[samples], min(num_micro_batches, length))
    return samples[order], filler[order], ends


def _cut(costs: Ints, count: int) -> tuple[Ints, tuple[int, ...]]:
    """Cut a share into micro-batches: the new order of its samples, and where each micro-batch ends."""
    sizes = sorted((len(costs) * (i + 1) // count - len(costs) * i // count for i in range(count)), reverse=True)
    parts = sorted(deal(costs, sizes), key=lambda part: (-len(part), -int(costs[part].sum())))
    return np.concatenate(parts), tuple(np.cumsum(sizes).tolist())
