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
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from lightning_stream.lazy import kept
from lightning_stream.order.batching.base import BatchPlan, EpochOrder
from lightning_stream.order.mosaic.partitions import PADDING
from lightning_stream.order.mosaic.work import epoch_batches
from lightning_stream.order.rank_split import ReplicaBatch, ceil_div
from lightning_stream.order.snapshot import max_active

if TYPE_CHECKING:
    from lightning_stream.order.plan import RunOrder

_KEPT_TABLES = 4


@dataclass(frozen=True, eq=False)
class EpochTable:
    """An epoch, or the rest of one, in one world."""

    rows: NDArray[np.int64]  # [batches, ranks, batch size], sample ids, -1 for padding; no batch is all padding
    counted: NDArray[np.bool_]  # of the same shape: where a sample counts, being neither padding nor a repeat
    edges: NDArray[np.int64]  # [batches + 1], samples that count before each batch
    delivered: NDArray[np.int64]  # [batches + 1], the same with repeats

    @classmethod
    def of(cls, rows: NDArray[np.int64], drawn: NDArray[np.int64]) -> EpochTable:
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
        edges, delivered = (np.append(0, np.cumsum(one.sum(axis=(1, 2)))) for one in (counted, known))
        return cls(rows, counted, edges, delivered)

    @cached_property
    def flat(self) -> NDArray[np.int64]:
        """Sample ids in position order."""
        last = np.iinfo(np.int64).max
        ids = np.sort(np.where(self.counted, self.rows, last).reshape(len(self.rows), -1), axis=1)
        found: NDArray[np.int64] = ids[ids != last]
        return found


class _MosaicBatches(BatchPlan):
    """That library's global batches from a position on, as many of them in one of ours as accumulation asks.

    ``tail="drop"`` ends before the first batch that is not full; ``"exact"`` delivers no repeats.
    """

    order: MosaicEpoch

    def __init__(self, order: EpochOrder, **given: Any) -> None:
        super().__init__(order, **given)
        _ = self._cuts  # refuses a world in which this epoch cannot be cut

    def is_whole(self, k: int) -> bool:
        return k < self.num_whole_batches

    def _cut(self) -> tuple[int, tuple[int, ...]]:
        self._table, self._first = self._find_table()
        shape = self._table.rows.shape
        self._accumulate = self.batch_size // (shape[1] * shape[2])
        self._shift = self.start - int(self._table.edges[self._first])
        edges = np.append(self._table.edges[self._first : -1 : self._accumulate], self._table.edges[-1])
        short = np.diff(edges) != self.batch_size
        whole = int(short.argmax()) if short.any() else len(short)
        return whole, () if self.tail == "drop" else tuple((self._shift + edges[whole + 1 :]).tolist())

    def _find_table(self) -> tuple[EpochTable, int]:
        """The epoch in this world, and which of its batches comes first."""
        world, order, batch_size = self.world, self.order, self.batch_size
        micro = order.global_batch or batch_size
        if batch_size % micro or micro % world.num_replicas or world.num_replicas % world.num_nodes:
            raise ValueError(
                f"A run in an order of mosaicml-streaming keeps the batch it began with, {micro} samples over all "
                f"ranks without accumulation, and a step is a multiple of it; found {batch_size} samples a step over "
                f"{world.num_replicas} data replicas on {world.num_nodes} nodes. Choose batch size per device and "
                "accumulation so that they fit."
            )
        shape = (world.num_nodes, world.num_replicas // world.num_nodes, micro // world.num_replicas)
        table = order.table(*shape)
        first = min(int(np.searchsorted(table.edges, self.start)), len(table.rows))
        if table.edges[first] <= self.start:
            return table, first
        return order.table(*shape, self.start), 0  # the start lies within a batch: that library shares out the rest

    @property
    def follows_order(self) -> bool:
        """Whether the batches hold the samples of the order in its places. O(samples)."""
        here = self._table.flat[int(self._table.edges[self._first]) :]
        return np.array_equal(here, self.order.ids(self.start, self.order.num_samples))

    def ids(self, k: int) -> NDArray[np.int64]:
        begin, end = self.bounds(k)
        return self._table.flat[begin - self._shift : end - self._shift]

    def share(self, k: int) -> ReplicaBatch:
        """This replica's part of global batch ``k``; where it has none, another's part serves as padding.

        Repeats have the first position of their batch.
        """
        part = self._part(k)
        rows, counted = self._table.rows[part], self._table.counted[part]
        begins = self._table.edges[part] + self._shift
        positions = np.broadcast_to(begins[:, None, None], rows.shape).copy()
        order = np.lexsort((rows[counted], np.nonzero(counted)[0]))
        place = np.empty(len(order), dtype=np.int64)
        place[order] = np.arange(len(order)) + begins[0]
        positions[counted] = place
        pieces, own = [], self.world.replica
        for row, takes, counts, position in zip(rows, self._takes(part), counted, positions, strict=True):
            giver = own if takes[own].any() else int(takes.any(axis=1).argmax())
            mask = takes[giver]
            pieces.append((row[giver][mask], position[giver][mask], ~counts[giver][mask] | (giver != own)))
        ids, at, filler = (np.concatenate(column) for column in zip(*pieces, strict=True))
        return ReplicaBatch(ids, at, filler, ends=tuple(np.cumsum([len(piece[0]) for piece in pieces]).tolist()))

    places = share  # its ids are in a table

    def num_micro_batches(self, k: int, device_batch_size: int) -> int:
        """See `BatchPlan.num_micro_batches`; as that library cuts, where its batches per device have this size."""
        lengths = self._takes(self._part(k)).sum(axis=2)
        size = self._table.rows.shape[2]
        if device_batch_size == size:
            return len(lengths)
        first = np.take_along_axis(lengths, (lengths > 0).argmax(axis=1)[:, None], axis=1)
        count = ceil_div(int(np.where(lengths > 0, lengths, first).sum(axis=0).max()), device_batch_size)
        return count + (count == len(lengths) and device_batch_size < size)  # so many would be cut as that library does

    def _part(self, k: int) -> slice:
        """The batches of global batch ``k`` in the table."""
        self.bounds(k)
        begin = self._first + k * self._accumulate
        return slice(begin, min(begin + self._accumulate, len(self._table.rows)))

    def _takes(self, part: slice) -> NDArray[np.bool_]:
        """bool[batches, ranks, batch size]: what is delivered."""
        return self._table.counted[part] if self.tail == "exact" else self._table.rows[part] != PADDING


class MosaicEpoch(EpochOrder):
    """One epoch in an order of mosaicml-streaming; `ids` has the order of the world that the training run began in."""

    plan_type: ClassVar[type[BatchPlan]] = _MosaicBatches
    can_be_packed: ClassVar[bool] = False
    splits_samples: ClassVar[bool] = False
    can_be_balanced: ClassVar[bool] = False

    def __init__(self, run: RunOrder, epoch: int) -> None:
        super().__init__(run, epoch)
        self._data = run.snapshot, run.weights, run.config
        self._tables: dict[tuple[int, int, int, int], EpochTable] = {}
        mosaic = run.config.mosaic
        nodes, ranks = (mosaic and mosaic.initial_physical_nodes) or 1, (mosaic and mosaic.ranks_per_node) or 1
        self.global_batch = mosaic and mosaic.batch_size  # of that library; None: as large as ours
        batch_size = self.global_batch or nodes * ranks
        if batch_size % (nodes * ranks):  # the state of another library does not record its ranks
            nodes, ranks = 1, 1
        self._began = nodes, ranks, batch_size // (nodes * ranks)
        self.num_samples = self.full_end = int(self._first.edges[-1])

    @cached_property
    def _first(self) -> EpochTable:
        """The epoch in the world the training run began in."""
        return self.table(*self._began)

    def __getstate__(self) -> dict[str, object]:
        """Pickle the settings, not the arrays made from them."""
        return {name: value for name, value in vars(self).items() if name != "_first"} | {"_tables": {}}

    @classmethod
    def active_shards(cls, run: RunOrder) -> int:
        """Shards in use at once: measured over epoch 0. O(samples)."""
        order = run.epoch(0)
        return max_active(run.snapshot.shards_of(order.ids(0, order.num_samples)))

    def ids(self, begin: int, end: int) -> NDArray[np.int64]:
        """Sample ids at positions [begin, end); -1 beyond the end, which another world may reach by a few samples."""
        known = self._first.flat[begin:end]
        return np.concatenate([known, np.full(max(end - begin, 0) - len(known), PADDING, dtype=np.int64)])

    def canonical(self, begin: int, end: int) -> NDArray[np.int64]:
        """Zeros: the order itself assigns samples to ranks."""
        return np.zeros(max(end - begin, 0), dtype=np.int64)

    def position_after(self, delivered: int) -> int:
        """The position after so many delivered samples, repeats included: that library counts these."""
        table, edges = self._first, self._first.delivered
        at = min(int(np.searchsorted(edges, delivered, side="right")) - 1, len(edges) - 2)
        return min(int(table.edges[at]) + delivered - int(edges[at]), int(table.edges[at + 1]))

    def delivered_before(self, position: int) -> int | None:
        """The opposite of `position_after`, between batches of that library; None within one."""
        table = self._first
        at = int(np.searchsorted(table.edges, position))
        return int(table.delivered[at]) if at < len(table.edges) and table.edges[at] == position else None

    def table(self, nodes: int, ranks: int, batch_size: int, start: int = 0) -> EpochTable:
        """The epoch in a world, from a position on; the last few are kept."""
        return kept(self._tables, (nodes, ranks, batch_size, start), self._make_table, _KEPT_TABLES)

    def _make_table(self, key: tuple[int, int, int, int]) -> EpochTable:
        nodes, ranks, batch_size, start = key
        used, rest = 0, None
        if start:  # the rest of what this world delivers, each sample as often as it is left
            whole = self.table(nodes, ranks, batch_size)
            rest = whole.flat[start:]
            batch = int(np.searchsorted(whole.edges, start)) - 1
            used = int(whole.delivered[batch] + start - whole.edges[batch])
        batches, drawn = epoch_batches(self._data, self.epoch, (nodes, ranks, batch_size), used)
        rows = batches.reshape(-1, nodes * ranks, batch_size)
        return EpochTable.of(rows, np.bincount(drawn if rest is None else rest, minlength=self._data[0].num_samples))
