"""The batching methods as values: what each does with the streams. Nothing else compares their names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .arrays import Ints
from .batches import BatchPlan, Division, divide_blocks, divide_by_stream, divide_evenly, divide_itself
from .orders import Order

if TYPE_CHECKING:
    from .snapshot import Snapshot


@dataclass(frozen=True)
class BatchingMethod:
    """How the streams come into batches.

    Attributes:
        divide: How an epoch is divided into batches.
        is_mixed: Whether streams have orders of their own, which are interleaved.
        jitter: Whether a shuffled run draws the distances between a stream's blocks at random.
        fixed: The batch size that the order keeps from its first start, by its name in `OrderConfig`: so many samples
            of one stream stay together.
        mixes_streams: Whether every global batch holds samples of several streams.
        can_be_packed: Whether its samples can be packed into rows.
        can_be_balanced: Whether costs may decide which replica gets which sample.
    """

    divide: Callable[[BatchPlan, Order], Division]
    is_mixed: bool = True
    jitter: bool = True
    fixed: str | None = None
    mixes_streams: bool = False
    can_be_packed: bool = True
    can_be_balanced: bool = True

    def shard_groups(self, snapshot: Snapshot) -> Sequence[Ints]:
        """The shard sizes of each set of shards that has an order of its own."""
        return snapshot.shard_sizes if self.is_mixed else (snapshot.sizes,)


METHODS: dict[str, BatchingMethod] = {
    "random": BatchingMethod(divide_evenly, is_mixed=False),
    "stratified": BatchingMethod(divide_evenly, jitter=False, mixes_streams=True),
    "per_stream": BatchingMethod(
        divide_by_stream,
        fixed="batch_size",
        can_be_packed=False,  # a batch is of one stream, and rows are of several documents
    ),
    "device_per_stream": BatchingMethod(
        divide_blocks,
        fixed="device_block",
        mixes_streams=True,
        can_be_packed=False,
        can_be_balanced=False,
    ),
}

SCHEDULED: dict[str, BatchingMethod] = {**METHODS, "random": METHODS["stratified"]}
"""The methods of a run with a mixture schedule, which orders each stream on its own."""

MOSAIC = BatchingMethod(divide_itself, is_mixed=False, can_be_packed=False, can_be_balanced=False)
"""The orders of mosaicml-streaming, which decide all by themselves."""
