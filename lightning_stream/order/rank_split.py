"""Which rank gets which samples of a global batch, and how the rank's share is cut into micro-batches."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from lightning_stream.order.packing import RowSpans

Tail = Literal["pad", "drop", "exact"]
TAILS: tuple[Tail, ...] = ("pad", "drop", "exact")


@dataclass(frozen=True, eq=False)
class ReplicaBatch:
    """One replica's part of one global batch, or of a micro-batch of it."""

    ids: NDArray[np.int64]  # int64[n], sample ids
    positions: NDArray[np.int64]  # int64[n], the position of each in the epoch
    filler: NDArray[np.bool_]  # bool[n], True for padding: a repeat that no count, metric or ledger includes
    device_block: int = 1  # samples that must stay together in a micro-batch (1 unless ``device_per_stream``)
    ends: tuple[int, ...] | None = None  # where the micro-batches end, if the order itself fixes that
    rows: RowSpans | None = None  # what the rows hold, where samples are packed into rows; then `ids` are fingerprints

    def __len__(self) -> int:
        """Samples, padding included."""
        return len(self.ids)

    @property
    def sample_ids(self) -> NDArray[np.int64]:
        """The samples that must be read."""
        return self.ids if self.rows is None else self.rows.ids

    @property
    def num_samples(self) -> int:
        """Samples, padding excluded."""
        return len(self.ids) - int(self.filler.sum())

    def micro_batches(self, count: int) -> list[ReplicaBatch]:
        """Cut evenly into ``count`` pieces, see `BatchPlan.num_micro_batches`; sizes differ by at most one block.

        Blocks are cut only where there are more pieces than blocks. A share of fewer samples than pieces gets padding.
        """
        if count == 1:
            return [self]
        if len(self) < count:
            at = np.minimum(np.arange(count), len(self) - 1)
            filler = self.filler[at] | (np.arange(count) >= len(self))
            return self._take(at, filler).micro_batches(count)
        block = self.device_block if ceil_div(len(self), self.device_block) >= count else 1
        blocks = ceil_div(len(self), block)
        ends = [min(blocks * i // count * block, len(self)) for i in range(count + 1)]
        if self.ends is not None and len(self.ends) == count:
            ends = [0, *self.ends]
        return [self._take(np.arange(a, b), self.filler[a:b], block) for a, b in pairwise(ends)]

    def _take(self, at: NDArray[np.int64], filler: NDArray[np.bool_], block: int = 1) -> ReplicaBatch:
        rows = None if self.rows is None else self.rows.take(at)
        return ReplicaBatch(self.ids[at], self.positions[at], filler, block, rows=rows)


def num_micro_batches(num_samples: int, batch_size: int, num_replicas: int) -> int:
    """How many micro-batches of at most ``batch_size`` every replica cuts its even share of ``num_samples`` into."""
    return max(1, ceil_div(ceil_div(num_samples, num_replicas), batch_size))


def ceil_div(number: int, divisor: int) -> int:
    """``number / divisor`` rounded up."""
    return (number + divisor - 1) // divisor


def split(
    canonical: NDArray[np.int64], num_replicas: int, replica: int, *, equal: bool
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """One replica's part of a global batch: offsets into the batch, and which of them are padding.

    The batch is stably grouped by canonical node (``canonical``: int64[n], n >= 1, the node of each sample) and cut
    evenly. With ``equal`` all replicas get the same number: where one has a sample less, padding repeats a near one of
    the same batch. Without, only an empty replica gets one sample of padding.
    """
    num_samples = len(canonical)
    grouped = np.argsort(canonical, kind="stable")
    begin, end = num_samples * replica // num_replicas, num_samples * (replica + 1) // num_replicas
    length = ceil_div(num_samples, num_replicas) if equal else max(1, end - begin)
    offsets = grouped[begin:end]
    filler = np.zeros(length, dtype=np.bool_)
    if length > end - begin:
        repeated = grouped[min(begin, num_samples - 1)]
        filler[end - begin :] = True
        offsets = np.concatenate([offsets, np.full(length - (end - begin), repeated)])
    return offsets, filler
