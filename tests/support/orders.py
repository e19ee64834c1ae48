"""Orders over made-up data."""

from __future__ import annotations

from typing import Any

import numpy as np

from lightning_stream.order import OrderConfig, RunOrder, Snapshot, StreamWeights
from lightning_stream.order.packing import LongDocuments, PackedWindow, RowPacking, RowSpans


def run_over(sizes: Any, weights: Any = None, *, lengths: Any = None, amounts: Any = None, **settings: Any) -> RunOrder:
    """A run over streams of shards of so many samples, with settings as `OrderConfig.resolve` takes them."""
    config, weights = OrderConfig.resolve(**settings), weights or [StreamWeights()] * len(sizes)
    amounts = amounts if isinstance(config.even_rows, str) else None
    return RunOrder(Snapshot.of(sizes), weights, config, lengths, amounts=amounts)


def pack_window(lengths: Any, row_length: int, long_documents: LongDocuments = "split") -> RowSpans:
    """The rows of one window, whose ids count its documents."""
    return PackedWindow(np.arange(len(lengths)), lengths, RowPacking(row_length, long_documents=long_documents)).rows()
