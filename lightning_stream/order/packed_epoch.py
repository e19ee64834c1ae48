"""The global batches of packed rows of an epoch, whose samples may be in several orders: one of each canonical node.

Packing one order over all nodes would put documents of all nodes into every row, and every machine would download all
the data. So each canonical node's documents are packed by themselves, and the nodes give one row each in turn. Where C
divides B, a global batch then has B / C rows of each node, and machines that divide C share no row, as with samples.
The nodes have different numbers of rows; at the end of the epoch, those that have rows left continue.

    node 0     a0 a1 a2 a3 a4          B = 4    batch 0   a0 a1 b0 b1       batch 2   a4 b4 b5
    node 1     b0 b1 b2 b3 b4 b5                batch 1   a2 a3 b2 b3       (the last: `tail`)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lightning_stream.order.packed_order import PackedOrder, RowPosition, RowRange, RowSpans, Samples, take
from lightning_stream.order.packing import Packing
from lightning_stream.order.rank_split import TAILS, Tail, ceil_div


@dataclass(frozen=True)
class EpochPosition:
    """A position in an epoch of rows: that of each order, and the order whose turn is next.

    ``orders`` has one `RowPosition` for each order; () is the beginning of the epoch.
    """

    orders: tuple[RowPosition, ...] = ()
    turn: int = 0


_BEGINNING = EpochPosition()


@dataclass(frozen=True, eq=False)
class RowBatch:
    """The rows from position ``begin`` to position ``end``, grouped by order: int64[rows] ``order_of`` ascends."""

    begin: EpochPosition
    end: EpochPosition
    rows: RowSpans
    order_of: NDArray[np.int64]


class PackedEpoch:
    """All rows of one epoch.

    Args:
        orders: Orders of samples that are packed apart: one for each canonical node or stream, or only one.
        lengths, packing, key: See `PackedOrder`; the number of the order becomes a part of its key.

    Example::

        packed = PackedEpoch([run.epoch(0)], lengths, Packing(row_length=2048), key=(seed, 0))
        for batch in packed.batches(64, start=position, tail="drop"):
            batch.rows.ids, batch.end
    """

    def __init__(
        self,
        orders: Sequence[Samples],
        lengths: NDArray[np.integer],
        packing: Packing,
        *,
        key: tuple[int, ...] | None = None,
    ) -> None:
        keys = [None if key is None else (*key, number) for number in range(len(orders))]
        self.orders = [PackedOrder(one, lengths, packing, key=own) for one, own in zip(orders, keys, strict=True)]

    @property
    def num_rows(self) -> int:
        """Rows of the epoch. This plans every window that was not counted before."""
        return sum(one.num_rows for one in self.orders)

    def row_number(self, position: EpochPosition) -> int:
        """Rows before a position. This plans the windows before it that were not counted before."""
        return sum(one.row_number(at) for one, at in zip(self.orders, position.orders, strict=False))

    def batches(
        self, batch_size: int, *, start: EpochPosition = _BEGINNING, tail: Tail = "pad", num_replicas: int = 1
    ) -> Iterator[RowBatch]:
        """The global batches of ``batch_size`` rows from a position to the end of the epoch.

        Only the last ones depend on ``tail``. ``"drop"`` omits a partial batch and ``"pad"`` returns it as it is (the
        padding is added when it is split over replicas). So does ``"exact"``, but a partial batch of fewer rows than
        replicas gets rows of the batch before it.
        """
        if tail not in TAILS or batch_size < 1 or batch_size % num_replicas:
            raise ValueError(
                f"tail must be one of {', '.join(TAILS)}, and a global batch must have some rows for each of the "
                f"{num_replicas} replicas, equally many; found {tail!r} and {batch_size} rows."
            )
        at = EpochPosition(start.orders or (RowPosition(),) * len(self.orders), start.turn)
        if len(at.orders) != len(self.orders):
            raise ValueError(f"A position must have {len(self.orders)} orders, as this epoch; found {len(at.orders)}.")
        ahead = num_replicas if tail == "exact" else 0
        while True:
            ranges = self._next(at, batch_size + ahead)
            available = [sum(one.end - one.begin for one in some) for some in ranges]
            total = sum(available)
            count = total - num_replicas if batch_size < total < batch_size + ahead else min(total, batch_size)
            if not count or (tail == "drop" and count < batch_size):
                return
            counts, turn = in_turn(available, at.turn, count)
            batch = self._batch(at, [take(some, few) for some, few in zip(ranges, counts, strict=True)], turn)
            yield batch
            at = batch.end

    def _next(self, at: EpochPosition, count: int) -> list[list[RowRange]]:
        """The next rows of each order: as many as ``count`` rows in turn can take of it, or more."""
        each = ceil_div(count, len(self.orders))
        while True:
            ranges = [take(order.walk(own), each) for order, own in zip(self.orders, at.orders, strict=True)]
            found = [sum(one.end - one.begin for one in some) for some in ranges]
            if sum(found) >= count or max(found) < each:
                return ranges
            each *= 2

    def _batch(self, begin: EpochPosition, ranges: list[list[RowRange]], turn: int) -> RowBatch:
        ends = tuple(some[-1].stop if some else own for some, own in zip(ranges, begin.orders, strict=True))
        counts = [sum(one.end - one.begin for one in some) for some in ranges]
        rows = RowSpans.of(one for some in ranges for one in some)
        return RowBatch(begin, EpochPosition(ends, turn), rows, np.repeat(np.arange(len(counts)), counts))


def in_turn(available: Sequence[int], turn: int, count: int) -> tuple[list[int], int]:
    """How many things each of several takes from its own, if all take one in turn, ``count`` in all; and the next turn.

    ``turn`` begins. One that has none left is passed over.

    Example::

        in_turn([5, 1, 5], turn=1, count=6)  # ([2, 1, 3], 0): 1 2 0 2 0 2
    """
    counts = [0] * len(available)
    while count:
        cycle = [(turn + i) % len(available) for i in range(len(available))]
        able = [one for one in cycle if counts[one] < available[one]]
        rounds = min(count // len(able), *(available[one] - counts[one] for one in able))
        for one in able if rounds else able[:count]:
            counts[one] += rounds or 1
        if not rounds:
            return counts, (able[count - 1] + 1) % len(available)
        count -= rounds * len(able)
    return counts, turn
