"""``device_per_stream``: every block of m consecutive positions holds samples of one stream and goes to one device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from numpy.typing import NDArray

from lightning_stream.order.batching.base import BatchPlan
from lightning_stream.order.batching.interleave import InterleavedOrder
from lightning_stream.order.rank_split import ReplicaBatch, ceil_div

if TYPE_CHECKING:
    from lightning_stream.order.plan import RunOrder


class _BlockBatches(BatchPlan):
    """Replicas get whole blocks; single samples only where m is 1, or with ``"exact"`` in the remainder."""

    order: DevicePerStreamOrder

    def _remainder_ends(self, at: int, least: int = 0) -> tuple[int, ...]:
        order, block = self.order, self.order.stretch_length
        if block == 1 or self.tail == "exact":
            return super()._remainder_ends(at, least if block == 1 else order.full_end)
        edges = [*range(at + block, order.full_end + 1, block), *order.remainder_ends.tolist()]
        edges = [end for end in edges if end > at]
        per_batch = self.batch_size // block
        return (*edges[per_batch - 1 :: per_batch], *edges[len(edges) // per_batch * per_batch :][-1:])

    def _deals_blocks(self, k: int) -> bool:
        return self.order.stretch_length > 1 and (self.tail != "exact" or k < self.num_whole_batches)

    def share(self, k: int) -> ReplicaBatch:
        if not self._deals_blocks(k):
            return super().share(k)
        begin, end = self.bounds(k)
        world, block = self.world, self.order.stretch_length
        streams, _ = self.order.locate(begin, end)
        canonical = self.order.canonical(begin, end)
        offsets, filler = split_blocks(canonical, streams, block, world.num_replicas, world.replica)
        return ReplicaBatch(self.order.ids(begin, end)[offsets], begin + offsets, filler, block)

    def num_micro_batches(self, k: int, device_batch_size: int) -> int:
        """See `BatchPlan.num_micro_batches`; blocks are filled up, so the share itself is counted."""
        block = self.order.stretch_length
        if not self._deals_blocks(k):
            return super().num_micro_batches(k, device_batch_size)
        if device_batch_size % block and block % device_batch_size:
            raise ValueError(
                f"device_per_stream keeps blocks of {block} samples, the batch per device that the run began with; a "
                f"batch per device must hold whole blocks or divide one, but it is {device_batch_size}. Choose another."
            )
        length = self.batch_size // self.world.num_replicas if k < self.num_whole_batches else len(self.share(k))
        return ceil_div(length, device_batch_size)

    def _problems(self) -> list[str]:
        problems = [*super()._problems(), *self.order.start_problems(self.start)]
        block = self.order.stretch_length
        per_replica, left = divmod(self.batch_size, self.world.num_replicas)
        if not left and per_replica % block:
            problems.append(
                f"device_per_stream keeps blocks of {block} samples, so a replica's part of a global batch must be a "
                f"multiple of that, but {self.batch_size} samples over {self.world.num_replicas} replicas are "
                f"{per_replica} each."
            )
        return problems


class DevicePerStreamOrder(InterleavedOrder):
    """Device blocks of m samples of one stream, interleaved; then each stream's remainder as a short block."""

    plan_type: ClassVar[type[BatchPlan]] = _BlockBatches
    fixes: ClassVar[Mapping[str, str]] = {
        "device_block": "device_per_stream needs the batch size per device from the start."
    }
    mixes_streams: ClassVar[bool] = True
    splits_samples: ClassVar[bool] = False

    def __init__(self, run: RunOrder, epoch: int) -> None:
        super().__init__(run, epoch, run.config.device_block or 1)


def split_blocks(
    canonical: NDArray[np.int64], streams: NDArray[np.int64], block: int, num_replicas: int, replica: int
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """As `rank_split.split` with ``equal``, but in blocks of one stream each.

    Within each stream the batch is stably grouped by canonical node and cut into blocks; a short last block is filled
    up. Blocks are ordered by the middle of the canonical nodes they hold, so that neighbours share shards.
    """
    table, filler, rank = [], [], []
    for stream in np.unique(streams).tolist():
        mine = np.flatnonzero(streams == stream)
        mine = mine[np.argsort(canonical[mine], kind="stable")]
        count = ceil_div(len(mine), block)
        fill = count * block - len(mine)
        table.append(np.concatenate([mine, np.full(fill, mine[-1])]).reshape(count, block))
        filler.append((np.arange(count * block) >= len(mine)).reshape(count, block))
        rank.append((np.arange(count) + 0.5) / count)
    order = np.argsort(np.concatenate(rank), kind="stable")
    blocks, fillers = np.concatenate(table)[order], np.concatenate(filler)[order]
    begin, end = len(blocks) * replica // num_replicas, len(blocks) * (replica + 1) // num_replicas
    lacks = ceil_div(len(blocks), num_replicas) - (end - begin)  # then one block comes again, all of it padding
    own = np.concatenate([np.arange(begin, end), np.full(lacks, min(begin, len(blocks) - 1))])
    fillers = fillers[own]
    fillers[end - begin :] = True
    return blocks[own].reshape(-1), fillers.reshape(-1)
