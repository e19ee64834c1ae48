"""Orders over made-up data."""

from __future__ import annotations

from typing import Any

from lightning_stream.order import OrderConfig, RunOrder, Snapshot, StreamWeights


def run_over(sizes: Any, weights: Any = None, *, lengths: Any = None, **settings: Any) -> RunOrder:
    """A run over streams of shards of so many samples, with settings as `OrderConfig.resolve` takes them."""
    return RunOrder(
        Snapshot.of(sizes), weights or [StreamWeights()] * len(sizes), OrderConfig.resolve(**settings), lengths
    )
