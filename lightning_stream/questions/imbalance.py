"""What a balance of costs over the replicas changes."""

from __future__ import annotations

import numpy as np

from lightning_stream.order.balance import Balance, num_groups
from lightning_stream.order.batches import BatchPlan
from lightning_stream.order.orders import positions_of
from lightning_stream.order.run import RunOrder
from lightning_stream.order.world import World


def can_balance(run: RunOrder, world: World) -> bool:
    """Whether any group has several replicas."""
    return num_groups(run.config.canonical_nodes if run.config.shuffle else 1, world) < world.num_replicas


def imbalance(plan: BatchPlan, balance: Balance) -> tuple[float, float]:
    """Cost of the most expensive replica / mean, without this balance and with it: the mean over some batches.

    These are up to 16 whole batches spread evenly over the epoch, fewer with many replicas.
    """
    count = max(1, min(16, plan.num_whole_batches, 256 // plan.world.num_replicas))
    batches = np.unique(np.arange(count) * plan.num_whole_batches // count).tolist()

    def mean_ratio(plans: list[BatchPlan]) -> float:
        return float(np.mean([_ratio(plans, balance, k) for k in batches]))

    return mean_ratio(plan.of_replicas(None)), mean_ratio(plan.of_replicas(balance))


def _ratio(plans: list[BatchPlan], balance: Balance, k: int) -> float:
    """Cost of the most expensive replica / mean, in one batch."""
    begin, end = plans[0].bounds(k)
    costs = balance.costs_of(plans[0].order.order, positions_of(begin, end)).astype(np.float64)
    shares = [plan.share(k) for plan in plans]
    sums = np.array([costs[share.positions[~share.filler] - begin].sum() for share in shares])
    return float(sums.max() / max(sums.mean(), 1e-9))
