"""The batching methods: a subclass of `EpochOrder` and a line of `METHODS` each; nothing else compares their names."""

from __future__ import annotations

from lightning_stream.order.batching.base import EpochOrder, RandomOrder
from lightning_stream.order.batching.interleave import DevicePerStreamOrder, PerStreamOrder, StratifiedOrder

METHODS: dict[str, type[EpochOrder]] = {
    "random": RandomOrder,
    "stratified": StratifiedOrder,
    "per_stream": PerStreamOrder,
    "device_per_stream": DevicePerStreamOrder,
}

SCHEDULED: dict[str, type[EpochOrder]] = {**METHODS, "random": StratifiedOrder}
"""The methods of a run with a mixture schedule, which orders each stream on its own."""
