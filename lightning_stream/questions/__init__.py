"""What an order means: its stages, where and when samples come, and what it costs, computed without reading data."""

from __future__ import annotations

from .downloads import DownloadPlan, plan_downloads
from .tracing import (
    Delivery,
    Explanation,
    Occurrence,
    TracedBatch,
    explain,
    trace,
    where,
)

__all__ = [
    "Delivery",
    "DownloadPlan",
    "Explanation",
    "Occurrence",
    "TracedBatch",
    "explain",
    "plan_downloads",
    "trace",
    "where",
]
