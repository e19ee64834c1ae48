"""The batching methods: one file and one line of `METHODS` each, the only place where their names are looked up."""

from __future__ import annotations

from lightning_stream.order.batching.base import EpochOrder
from lightning_stream.order.batching.device_per_stream import DevicePerStreamOrder
from lightning_stream.order.batching.per_stream import PerStreamOrder
from lightning_stream.order.batching.random import RandomOrder
from lightning_stream.order.batching.stratified import StratifiedOrder

METHODS: dict[str, type[EpochOrder]] = {
    "random": RandomOrder,
    "stratified": StratifiedOrder,
    "per_stream": PerStreamOrder,
    "device_per_stream": DevicePerStreamOrder,
}
