"""Epochs in the orders of mosaicml-streaming, dealt rank by rank exactly as it deals them.

These are materialised: that library decides every rank's samples with the order, so an epoch is an array per world and
starting position. Its repeats at the ends of ranks are part of its global batches; its padding is not.

Positions count the samples of an epoch one global batch after another. Within a batch they follow the sample ids, so
that they mean the same in every world that has the same global batches.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from lightning_stream.order.config import MosaicConfig, OrderConfig
from lightning_stream.order.draw import StreamWeights
from lightning_stream.order.mix import Layout
from lightning_stream.order.mosaic import epoch_work
from lightning_stream.order.rank_split import Share, Tail
from lightning_stream.order.snapshot import Snapshot
from lightning_stream.order.world import World

_PADDING = -1
_KEPT_TABLES = 4


class DealtEpoch:
    """One epoch in an order of mosaicml-streaming; as an `EpochOrder`, that of the world the run began in."""

    def __init__(self, snapshot: Snapshot, weights: Sequence[StreamWeights], config: OrderConfig, epoch: int) -> None:
        self.epoch, self._snapshot, self._weights, self._config = epoch, snapshot, tuple(weights), config
        self._mosaic = config.mosaic or MosaicConfig()
        self._tables: dict[tuple[int, int, int, int], NDArray[np.int64]] = {}
        nodes, ranks = self._mosaic.initial_physical_nodes or 1, self._mosaic.ranks_per_node or 1
        first = World(0, nodes * ranks, ranks)
        batch_size = self._mosaic.batch_size or first.num_ranks
        if batch_size % first.num_ranks:  # the state of another library does not tell its ranks
            first = World()
        self._first = self.deal(first, batch_size, "pad", 0)
        self.num_samples = self._first.end
        self.layout = Layout(self.num_samples, self.num_samples)

    def ids(self, begin: int, end: int) -> NDArray[np.int64]:
        """Sample ids at positions [begin, end); -1 beyond the end, which another world may reach by a few repeats."""
        known = self._first.flat()[begin:end]
        return np.concatenate([known, np.full(max(end - begin, 0) - len(known), _PADDING, dtype=np.int64)])

    def canonical(self, begin: int, end: int) -> NDArray[np.int64]:
        """Ranks are dealt by the order itself, not by canonical nodes: all the same."""
        return np.zeros(max(end - begin, 0), dtype=np.int64)

    def streams(self, begin: int, end: int) -> None:  # noqa: ARG002 (the protocol's)
        """Blocks are dealt by the order itself."""
        return

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
        table = self._table(*shape, start)
        return DealtBatches(table, batch_size // micro, world.replica, tail, start)

    def _table(self, nodes: int, ranks: int, batch_size: int, start: int) -> NDArray[np.int64]:
        """int64[batches, ranks of all nodes, batch size], -1 for padding; batches of nothing but padding left out."""
        key = (nodes, ranks, batch_size, start)
        found = self._tables.get(key)
        if found is None:
            found = self._work(*key)
            self._tables[key] = found
            for old in list(self._tables)[:-_KEPT_TABLES]:
                self._tables.pop(old, None)
        return found

    def _work(self, nodes: int, ranks: int, batch_size: int, start: int) -> NDArray[np.int64]:
        config, mosaic = self._config, self._mosaic
        work = epoch_work(
            self._weights,
            config.sampling_method,
            config.sampling_granularity,
            config.shuffle,
            config.algorithm,
            config.batching_method,
            nodes,
            ranks,
            1,  # workers only add padding
            batch_size,
            config.canonical_nodes,
            self.epoch,
            start,
            config.seed,
            mosaic.shuffle_block_size,
            mosaic.partition,
            shard_sizes=self._snapshot.shard_sizes,
            epoch_size=config.epoch_size,
            initial_physical_nodes=mosaic.initial_physical_nodes,
        )
        table = work.transpose(3, 2, 0, 1, 4).reshape(-1, nodes * ranks, batch_size)
        filled: NDArray[np.int64] = table[(table != _PADDING).any(axis=(1, 2))]
        return filled


class DealtBatches:
    """Global batches of a table of all ranks' samples, see `BatchPlan`.

    Args:
        table: int64[batches, ranks, batch size], -1 for padding.
        accumulate: How many of its batches make one global batch (one optimizer step).
        replica: Whose share is wanted.
        tail: ``"drop"`` leaves out a last global batch that is not whole.
        start: The position of the first batch.
    """

    def __init__(self, table: NDArray[np.int64], accumulate: int, replica: int, tail: Tail, start: int) -> None:
        self._table, self._accumulate, self._replica = table, accumulate, replica
        counts = (table != _PADDING).sum(axis=(1, 2))
        edges = np.concatenate([[0], np.cumsum(counts)])
        edges = np.append(edges[:-1][::accumulate], edges[-1]) if len(counts) else edges
        whole = accumulate * table.shape[1] * table.shape[2]
        self.num_whole = int((np.diff(edges) == whole).sum())
        if tail == "drop":
            edges = edges[: self.num_whole + 1]
        self._edges = start + edges
        self._flat: NDArray[np.int64] | None = None

    @property
    def num_batches(self) -> int:
        """Global batches."""
        return len(self._edges) - 1

    @property
    def end(self) -> int:
        """The position behind the last batch."""
        return int(self._edges[-1])

    def bounds(self, k: int) -> tuple[int, int]:
        """First position of global batch ``k``, and the one behind its last."""
        return int(self._edges[k]), int(self._edges[k + 1])

    def ids(self, k: int) -> NDArray[np.int64]:
        """Sample ids of global batch ``k`` in position order."""
        rows = self._rows(k)
        return np.sort(rows[rows != _PADDING])

    def flat(self) -> NDArray[np.int64]:
        """Sample ids of all batches in position order."""
        if self._flat is None:
            batches = [self.ids(k) for k in range(self.num_batches)]
            self._flat = np.concatenate(batches) if batches else np.empty(0, dtype=np.int64)
        return self._flat

    def share(self, k: int) -> Share:
        """This replica's part of global batch ``k``; where it has none in a batch, another's fills it, flagged."""
        rows = self._rows(k)
        real = rows != _PADDING
        positions = np.full(rows.shape, _PADDING, dtype=np.int64)
        valid = rows[real]
        place = np.empty(len(valid), dtype=np.int64)
        place[np.argsort(valid, kind="stable")] = np.arange(len(valid)) + self.bounds(k)[0]
        positions[real] = place
        pieces = []
        for row, known, position in zip(rows, real, positions, strict=True):
            own = self._replica
            giver = own if known[own].any() else int(known.any(axis=1).argmax())
            kept = known[giver]
            filler = np.full(int(kept.sum()), giver != own)
            pieces.append((row[giver][kept], position[giver][kept], filler))
        ids, at, filler = (np.concatenate(column) for column in zip(*pieces, strict=True))
        return Share(ids, at, filler, ends=tuple(np.cumsum([len(piece[0]) for piece in pieces]).tolist()))

    def shares(self, ks: Sequence[int]) -> list[Share]:
        """This replica's part of each of these batches."""
        return [self.share(k) for k in ks]

    def _rows(self, k: int) -> NDArray[np.int64]:
        """int64[batches of one step, ranks, batch size]."""
        return self._table[k * self._accumulate : (k + 1) * self._accumulate]
