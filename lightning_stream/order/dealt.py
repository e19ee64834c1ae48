"""Epochs in the orders of mosaicml-streaming, dealt rank by rank exactly as it deals them.

These are materialised: that library decides every rank's samples with the order, so an epoch is an array per world.
It repeats samples to fill up the ends of ranks and nodes. These repeats are delivered where it delivers them, flagged
as filler: a sample counts as often as it was drawn.

Positions number the samples that count, one of that library's global batches after another. Within each of them they
follow the sample ids. So they mean the same for any accumulation, and in every world that has the same global batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from lightning_stream.order.batching.interleave import Layout
from lightning_stream.order.config import MosaicConfig, OrderConfig
from lightning_stream.order.draw import StreamWeights
from lightning_stream.order.mosaic import MosaicOrder, MosaicSettings, MosaicWorld
from lightning_stream.order.rank_split import ReplicaBatch, Tail, ceil_div
from lightning_stream.order.snapshot import Snapshot
from lightning_stream.order.world import World

_PADDING = -1
_KEPT_TABLES = 4


class DealtEpoch:
    """One epoch in an order of mosaicml-streaming; as an `EpochOrder`, that of the world the run began in."""

    def __init__(self, snapshot: Snapshot, weights: Sequence[StreamWeights], config: OrderConfig, epoch: int) -> None:
        self.epoch, self._snapshot, self._weights, self._config = epoch, snapshot, tuple(weights), config
        self._mosaic = config.mosaic or MosaicConfig()
        self._tables: dict[tuple[int, int, int, int], DealtTable] = {}
        nodes, ranks = self._mosaic.initial_physical_nodes or 1, self._mosaic.ranks_per_node or 1
        batch_size = self._mosaic.batch_size or nodes * ranks
        if batch_size % (nodes * ranks):  # the state of another library does not tell its ranks
            nodes, ranks = 1, 1
        self._first = self._table(nodes, ranks, batch_size // (nodes * ranks))
        self.num_samples = int(self._first.edges[-1])
        self.layout = Layout(self.num_samples, self.num_samples)

    def __reduce__(self) -> tuple[type[DealtEpoch], tuple[Snapshot, tuple[StreamWeights, ...], OrderConfig, int]]:
        """Pickle the settings, not what was dealt by them."""
        return DealtEpoch, (self._snapshot, self._weights, self._config, self.epoch)

    def ids(self, begin: int, end: int) -> NDArray[np.int64]:
        """Sample ids at positions [begin, end); -1 beyond the end, which another world may reach by a few samples."""
        known = self._first.flat[begin:end]
        return np.concatenate([known, np.full(max(end - begin, 0) - len(known), _PADDING, dtype=np.int64)])

    def canonical(self, begin: int, end: int) -> NDArray[np.int64]:
        """Ranks are dealt by the order itself, not by canonical nodes: all the same."""
        return np.zeros(max(end - begin, 0), dtype=np.int64)

    def streams(self, begin: int, end: int) -> None:  # noqa: ARG002 (the protocol's)
        """Blocks are dealt by the order itself."""
        return

    def position_after(self, delivered: int) -> int:
        """The position after so many samples were delivered, repeats included: how that library counts."""
        edges, table = self._first.delivered, self._first
        at = min(int(np.searchsorted(edges, delivered, side="right")) - 1, len(edges) - 2)
        return min(int(table.edges[at]) + delivered - int(edges[at]), int(table.edges[at + 1]))

    def deal(self, world: World, batch_size: int, tail: Tail, start: int) -> DealtBatches:
        """The batches of a world from a position on.

        Raises:
            ValueError: The world cannot go on with this order, or B is not a multiple of that library's batch.
        """
        micro = self._mosaic.batch_size or batch_size
        if batch_size % micro or micro % world.num_replicas or world.num_replicas % world.num_nodes:
            raise ValueError(
                f"A run in an order of mosaicml-streaming keeps the global batch it began with, {micro} samples over "
                f"all ranks, and a step is a multiple of it; found {batch_size} samples a step over "
                f"{world.num_replicas} data replicas on {world.num_nodes} nodes. Choose batch size per device and "
                "accumulation so that they fit."
            )
        shape = (world.num_nodes, world.num_replicas // world.num_nodes, micro // world.num_replicas)
        table = self._table(*shape)
        first = min(int(np.searchsorted(table.edges, start)), len(table.rows))
        if table.edges[first] > start:  # amid a batch: that library deals the rest
            table, first = self._table(*shape, start), 0
        return DealtBatches(table, first, batch_size // micro, world.replica, tail, start)

    def _table(self, nodes: int, ranks: int, batch_size: int, start: int = 0) -> DealtTable:
        """The epoch in a world, from a position on."""
        key = (nodes, ranks, batch_size, start)
        found = self._tables.get(key)
        if found is None:
            found = self._tables[key] = self._make_table(*key)
            for old in list(self._tables)[:-_KEPT_TABLES]:
                self._tables.pop(old, None)
        return found

    def _make_table(self, nodes: int, ranks: int, batch_size: int, start: int) -> DealtTable:
        config, mosaic = self._config, self._mosaic
        settings = MosaicSettings(
            batch_size,
            shuffle=config.shuffle,
            shuffle_algo=config.algorithm,
            shuffle_seed=config.seed,
            shuffle_block_size=mosaic.shuffle_block_size,
            partition_algo=mosaic.partition,
            num_canonical_nodes=config.canonical_nodes,
            batching_method=config.batching_method,
            sampling_method=config.sampling_method,
            sampling_granularity=config.sampling_granularity,
            epoch_size=config.epoch_size,
            initial_physical_nodes=mosaic.initial_physical_nodes,
        )
        order = MosaicOrder(self._snapshot.shard_sizes, self._weights, settings)
        drawn, used = order.drawn(self.epoch), 0
        if start:  # what this world delivers from there on, each sample as often as is left of it
            whole = self._table(nodes, ranks, batch_size)
            drawn = whole.flat[start:]
            batch = int(np.searchsorted(whole.edges, start)) - 1
            used = int(whole.delivered[batch] + start - whole.edges[batch])
        work = order.epoch(self.epoch, MosaicWorld(nodes, ranks), used).work  # workers would only add padding
        rows = work.transpose(3, 2, 0, 1, 4).reshape(-1, nodes * ranks, batch_size)
        return DealtTable.of(rows, np.bincount(drawn, minlength=self._snapshot.num_samples))


@dataclass(frozen=True, eq=False)
class DealtTable:
    """An epoch, or the rest of one, in one world.

    Args:
        rows: int64[batches, ranks, batch size], sample ids, -1 for padding; no batch is all padding.
        counted: bool, where a sample counts: neither padding nor a repeat.
        edges: int64[batches + 1], samples that count before each batch.
        delivered: int64[batches + 1], the same with repeats.
    """

    rows: NDArray[np.int64]
    counted: NDArray[np.bool_]
    edges: NDArray[np.int64]
    delivered: NDArray[np.int64]

    @classmethod
    def of(cls, rows: NDArray[np.int64], drawn: NDArray[np.int64]) -> DealtTable:
        """Flag what comes more often than it was drawn (int64[sample ids]), the later times.

        A batch of nothing but repeats counts one of them: a step needs a sample, and a position of its own.
        """
        rows = rows[(rows != _PADDING).any(axis=(1, 2))]
        counted = known = rows != _PADDING
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


class DealtBatches:
    """Global batches of an epoch that was dealt, see `BatchPlan`.

    Args:
        table: The epoch in this world.
        first: The batch of it that comes first.
        accumulate: How many of its batches make one global batch (one optimizer step).
        replica: Whose share is wanted.
        tail: ``"drop"`` ends before the first global batch that is not whole, ``"exact"`` delivers no repeats.
        start: The position of the first batch.
    """

    def __init__(self, table: DealtTable, first: int, accumulate: int, replica: int, tail: Tail, start: int) -> None:
        self._table, self._first, self._accumulate, self._replica = table, first, accumulate, replica
        self._takes_repeats = tail != "exact"
        self._shift = start - int(table.edges[first])
        edges = np.append(table.edges[first:-1:accumulate], table.edges[-1])
        broken = np.diff(edges) != accumulate * table.rows.shape[1] * table.rows.shape[2]
        self.num_whole = int(broken.argmax()) if broken.any() else len(broken)
        self._edges = self._shift + (edges[: self.num_whole + 1] if tail == "drop" else edges)

    @property
    def num_batches(self) -> int:
        """Global batches."""
        return len(self._edges) - 1

    @property
    def end(self) -> int:
        """The position behind the last batch."""
        return int(self._edges[-1])

    @property
    def flat(self) -> NDArray[np.int64]:
        """Sample ids from the start to the end of the epoch, in position order."""
        return self._table.flat[int(self._table.edges[self._first]) :]

    def bounds(self, k: int) -> tuple[int, int]:
        """First position of global batch ``k``, and the one behind its last."""
        return int(self._edges[k]), int(self._edges[k + 1])

    def ids(self, k: int) -> NDArray[np.int64]:
        """Sample ids of global batch ``k`` in position order."""
        begin, end = (self._edges[k : k + 2] - self._shift).tolist()
        return self._table.flat[begin:end]

    def share(self, k: int) -> ReplicaBatch:
        """This replica's part of global batch ``k``; where it has none in a batch, another's fills it, flagged.

        Repeats stand at the first position of their batch.
        """
        part = self._part(k)
        rows, counted = self._table.rows[part], self._table.counted[part]
        begins = self._table.edges[part] + self._shift
        positions = np.broadcast_to(begins[:, None, None], rows.shape).copy()
        order = np.lexsort((rows[counted], np.nonzero(counted)[0]))
        place = np.empty(len(order), dtype=np.int64)
        place[order] = np.arange(len(order)) + begins[0]
        positions[counted] = place
        pieces = []
        for row, takes, counts, position in zip(rows, self._takes(part), counted, positions, strict=True):
            own = self._replica
            giver = own if takes[own].any() else int(takes.any(axis=1).argmax())
            kept = takes[giver]
            filler = ~counts[giver][kept] | (giver != own)
            pieces.append((row[giver][kept], position[giver][kept], filler))
        ids, at, filler = (np.concatenate(column) for column in zip(*pieces, strict=True))
        return ReplicaBatch(ids, at, filler, ends=tuple(np.cumsum([len(piece[0]) for piece in pieces]).tolist()))

    def shares(self, ks: Sequence[int]) -> list[ReplicaBatch]:
        """This replica's part of each of these batches."""
        return [self.share(k) for k in ks]

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
        begin = self._first + k * self._accumulate
        return slice(begin, min(begin + self._accumulate, len(self._table.rows)))

    def _takes(self, part: slice) -> NDArray[np.bool_]:
        """bool[batches, ranks, batch size]: what is delivered."""
        return self._table.rows[part] != _PADDING if self._takes_repeats else self._table.counted[part]
