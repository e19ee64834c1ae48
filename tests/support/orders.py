"""Orders over made-up data."""

from __future__ import annotations

from typing import Any

import numpy as np

from lightning_stream.order import OrderConfig, RunOrder, Snapshot, StreamWeights
from lightning_stream.order.packing import LongDocuments, PackedWindow, RowPacking, RowSpans


def run_over(sizes: Any, weights: Any = None, *, lengths: Any = None, **settings: Any) -> RunOrder:
    """A run over streams of shards of so many samples, with settings as `OrderConfig.resolve` takes them."""
    return RunOrder(
        Snapshot.of(sizes), weights or [StreamWeights()] * len(sizes), OrderConfig.resolve(**settings), lengths
    )


def pack_window(lengths: Any, row_length: int, long_documents: LongDocuments = "split") -> RowSpans:
    """The rows of one window, whose ids count its documents."""
    return PackedWindow(np.arange(len(lengths)), lengths, RowPacking(row_length, long_documents=long_documents)).rows()
