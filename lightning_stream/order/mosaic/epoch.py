"""Epochs in the orders of mosaicml-streaming: each rank gets exactly the samples that it gets there.

That library decides every rank's samples with the order, so an epoch is an array for each world. It repeats samples to
fill up the ends of ranks and nodes. These repeats are delivered too, flagged as padding: a sample counts as often as it
was drawn.

Positions number the samples that count, one of that library's global batches after another, and within each of them in
the order of the sample ids. So they mean the same with any accumulation, and in every world with the same batches.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from lightning_stream.lazy import cached
from lightning_stream.order.arrays import Bools, Ints, starts_of
from lightning_stream.order.batches import BatchPlan, Cuts, Division, SelfDivided, problems_of, refuse
from lightning_stream.order.orders import Order, ceil_div
from lightning_stream.order.shares import ByNode, ReplicaBatch, Sharing

from .partitions import PADDING
from .work import epoch_batches

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lightning_stream.order.config import OrderConfig
    from lightning_stream.order.draw import StreamWeights
    from lightning_stream.order.snapshot import Snapshot

_KEPT_TABLES = 4


@dataclass(frozen=True, eq=False)
class EpochTable:
    """An epoch, or the rest of one, in one world."""

    rows: Ints  # [batches, ranks, batch size], sample ids, -1 for padding; no batch is all padding
    counted: Bools  # of the same shape: where a sample counts, being neither padding nor a repeat
    edges: Ints  # [batches + 1], samples that count before each batch
    delivered: Ints  # [batches + 1], the same with repeats

    @classmethod
    def of(cls, rows: Ints, drawn: Ints) -> EpochTable:
        """Flag the repeats of a sample beyond the times it was drawn (int64[sample ids]).

        A batch of repeats alone counts one of them: a step needs a position of its own.
        """
        rows = rows[(rows != PADDING).any(axis=(1, 2))]
        counted = known = rows != PADDING
        often = np.bincount(rows[known], minlength=len(drawn)) > drawn
        if often.any():
            slots = np.flatnonzero(known & often[rows])
            slots = slots[np.argsort(rows.flat[slots], kind="stable")]
            ids = rows.flat[slots]
            counted = known.copy()
            counted.flat[slots[np.arange(len(ids)) - np.searchsorted(ids, ids) >= drawn[ids]]] = False
            for batch in np.flatnonzero(~counted.any(axis=(1, 2))).tolist():
                counted[batch].flat[known[batch].argmax()] = True
        return cls(rows, counted, starts_of(counted.sum(axis=(1, 2))), starts_of(known.sum(axis=(1, 2))))

    @cached_property
    def flat(self) -> Ints:
        """Sample ids in position order."""
        last = np.iinfo(np.int64).max
        ids = np.sort(np.where(self.counted, self.rows, last).reshape(len(self.rows), -1), axis=1)
        flat: Ints = ids[ids != last]
        return flat

    def positions(self, part: slice) -> Ints:
        """The position of each sample that counts in some batches; of all else, the first of its batch."""
        rows = self.rows[part]
        counted = self.counted[part]
        begins = self.edges[part]
        positions: Ints = np.broadcast_to(begins[:, None, None], rows.shape).copy()
        by_position = np.lexsort((rows[counted], np.nonzero(counted)[0]))
        positions[counted] = begins[0] + np.argsort(by_position)
        return positions


class _TableOrder(Order):
    """The samples of a table in position order, the first one at position ``shift``."""

    def __init__(self, table: EpochTable, shift: int) -> None:
        self._ids = table.flat
        self._shift = shift
        self.size = shift + len(table.flat)

    def ids(self, at: Ints) -> Ints:
        """The sample ids; -1 beyond the end, which another world may reach by a few samples."""
        inside = at < self.size
        ids = np.full(len(at), PADDING, np.int64)
        ids[inside] = self._ids[at[inside] - self._shift]
        return ids

    def reads_to(self, end: int) -> bool:
        """Whether the positions before this one can be read: another world may reach further."""
        return True


class MosaicOrder(_TableOrder, SelfDivided):
    """One epoch in an order of mosaicml-streaming; `ids` has the order of the world that the training run began in."""

    def __init__(self, snapshot: Snapshot, weights: Sequence[StreamWeights], config: OrderConfig, epoch: int) -> None:
        self._data = snapshot, weights, config
        self._epoch = epoch
        self._tables: dict[tuple[int, int, int, int], EpochTable] = {}
        assert config.mosaic is not None
        nodes = config.mosaic.initial_physical_nodes or 1
        ranks = config.mosaic.ranks_per_node or 1
        self.global_batch = config.mosaic.batch_size  # of that library; None: as large as ours
        batch_size = self.global_batch or nodes * ranks
        if batch_size % (nodes * ranks):  # the state of another library does not record its ranks
            nodes = 1
            ranks = 1
        self._first = self.table(nodes, ranks, batch_size // (nodes * ranks))
        super().__init__(self._first, 0)

    def __reduce__(self) -> tuple[type[MosaicOrder], tuple[object, ...]]:
        """Pickle the settings, not the arrays made from them."""
        return MosaicOrder, (*self._data, self._epoch)

    @property
    def num_delivered(self) -> int:
        """Samples of an epoch, repeats included."""
        return int(self._first.delivered[-1])

    def position_after(self, delivered: int) -> int:
        """The position after so many delivered samples, repeats included: that library counts these."""
        table = self._first
        edges = self._first.delivered
        at = min(int(np.searchsorted(edges, delivered, side="right")) - 1, len(edges) - 2)
        return min(int(table.edges[at]) + delivered - int(edges[at]), int(table.edges[at + 1]))

    def delivered_before(self, position: int) -> int | None:
        """The opposite of `position_after`, between batches of that library; None within one."""
        table = self._first
        at = int(np.searchsorted(table.edges, position))
        return int(table.delivered[at]) if at < len(table.edges) and table.edges[at] == position else None

    def table(self, nodes: int, ranks: int, batch_size: int, start: int = 0) -> EpochTable:
        """The epoch in a world, from a position on; the last few are kept."""
        return cached(self._tables, (nodes, ranks, batch_size, start), self._make_table, _KEPT_TABLES)

    def _make_table(self, key: tuple[int, int, int, int]) -> EpochTable:
        nodes, ranks, batch_size, start = key
        used = 0
        rest = None
        if start:  # the rest of what this world delivers, each sample as often as it is left
            full = self.table(nodes, ranks, batch_size)
            rest = full.flat[start:]
            batch = int(np.searchsorted(full.edges, start)) - 1
            used = int(full.delivered[batch] + start - full.edges[batch])
        batches, drawn = epoch_batches(self._data, self._epoch, (nodes, ranks, batch_size), used)
        rows = batches.reshape(-1, nodes * ranks, batch_size)
        return EpochTable.of(rows, np.bincount(drawn if rest is None else rest, minlength=self._data[0].num_samples))

    def division(self, plan: BatchPlan) -> Division:
        """That library's global batches, as many of them in one of ours as accumulation asks.

        ``tail="drop"`` ends before the first batch that is not full; ``"exact"`` delivers no repeats.
        """
        refuse(problems_of(plan, self, owns=True))
        table, first = _table_of(plan, self)
        accumulate = plan.batch_size // (table.rows.shape[1] * table.rows.shape[2])
        edges = np.append(np.arange(first, len(table.rows), accumulate), len(table.rows))
        shift = plan.start - int(table.edges[first])
        is_short = np.diff(table.edges[edges]) != plan.batch_size
        num_whole = int(is_short.argmax()) if is_short.any() else len(is_short)
        ends = [] if plan.tail == "drop" else (shift + table.edges[edges[num_whole + 1 :]]).tolist()
        cuts = Cuts(plan.start, plan.batch_size, lambda _: False, lambda: (num_whole, ends))
        return Division(cuts, _ByTable(_TableOrder(table, shift), plan.sharing, table, edges, shift))


class _ByTable(ByNode):
    """Each rank gets what it gets in that library; where it has nothing, another's part serves as padding.

    Args:
        order, sharing: See `ByNode`.
        table: The epoch in this world.
        edges: int64[global batches + 1]: where each begins in the table.
        shift: The position of the table's first sample.
    """

    def __init__(self, order: Order, sharing: Sharing, table: EpochTable, edges: Ints, shift: int) -> None:
        super().__init__(order, sharing)
        self._table = table
        self._edges = edges
        self._shift = shift

    def share(self, k: int, at: Ints) -> ReplicaBatch:
        """Repeats have the first position of their batch."""
        table = self._table
        part = self._part(k)
        replica = self.sharing.world.replica
        takes = self._takes(part)
        has_some: Bools = np.any(takes, axis=2)
        givers = np.where(has_some[:, replica], replica, has_some.argmax(axis=1))
        chosen = np.arange(len(takes)), givers
        mask = takes[chosen]
        filler = ~table.counted[part][chosen] | (givers != replica)[:, None]
        ends = np.cumsum(mask.sum(axis=1)).tolist()
        positions = table.positions(part)[chosen][mask] + self._shift
        return ReplicaBatch(table.rows[part][chosen][mask], positions, filler[mask], ends=tuple(ends))

    places = share  # its ids are in a table

    def num_micro_batches(self, k: int, at: Ints, device_batch_size: int) -> int:
        """As that library cuts, where its batches per device have this size."""
        lengths = self._takes(self._part(k)).sum(axis=2)
        size = self._table.rows.shape[2]
        if device_batch_size == size:
            return len(lengths)
        first = np.take_along_axis(lengths, (lengths > 0).argmax(axis=1)[:, None], axis=1)
        count = ceil_div(int(np.where(lengths > 0, lengths, first).sum(axis=0).max()), device_batch_size)
        return count + (count == len(lengths) and device_batch_size < size)  # so many would be cut as that library does

    def _part(self, k: int) -> slice:
        """The batches of global batch ``k`` in the table."""
        return slice(*self._edges[k : k + 2].tolist())

    def _takes(self, part: slice) -> Bools:
        """bool[batches, ranks, batch size]: what is delivered."""
        is_sample: Bools = self._table.rows[part] != PADDING
        return self._table.counted[part] if not self.sharing.is_equal else is_sample


def _table_of(plan: BatchPlan, order: MosaicOrder) -> tuple[EpochTable, int]:
    """The epoch in this world, and which of its batches comes first."""
    world = plan.world
    size = order.global_batch or plan.batch_size
    if plan.batch_size % size or size % world.num_replicas or world.num_replicas % world.num_nodes:
        raise ValueError(
            f"A run in an order of mosaicml-streaming keeps the batch it began with, {size} samples over all "
            f"ranks without accumulation, and a step is a multiple of it; found {plan.batch_size} samples a step "
            f"over {world.num_replicas} data replicas on {world.num_nodes} nodes. Choose batch size per device and "
            "accumulation so that they fit."
        )
    shape = (world.num_nodes, world.num_replicas // world.num_nodes, size // world.num_replicas)
    table = order.table(*shape)
    first = min(int(np.searchsorted(table.edges, plan.start)), len(table.rows))
    if table.edges[first] <= plan.start:
        return table, first
    return order.table(*shape, plan.start), 0  # the start lies within a batch: that library shares out the rest
