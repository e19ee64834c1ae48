"""``stratified``: every global batch holds each stream's part of the epoch, within two or three samples."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from lightning_stream.order.batching.interleave import InterleavedOrder

if TYPE_CHECKING:
    from lightning_stream.order.plan import RunOrder


class StratifiedOrder(InterleavedOrder):
    """Samples of all streams, interleaved one by one in equal distances."""

    mixes_streams: ClassVar[bool] = True

    @classmethod
    def make(cls, run: RunOrder, epoch: int) -> StratifiedOrder:
        """The order of one epoch of a run."""
        return cls(run, epoch, 1, None)
