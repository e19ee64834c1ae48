"""How mosaicml-streaming 0.13 deals the positions of an epoch to nodes, ranks, workers and batches.

The result is the whole epoch as one array of shape (nodes, ranks per node, workers per rank, batches per worker, batch
size). -1 is padding. Batch g of a rank comes from its worker g % workers; hence `global_batches`.

A position may appear twice: shorter canonical nodes, and ranks that would get one sample less, repeat a late position
of their own. These repeats are part of what the peer delivers, so they are part of this.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from lightning_stream.order.rank_split import ceil_div
from lightning_stream.order.rules import broken, count, one_of

Ids = NDArray[np.int64]

PARTITIONS = ("orig", "relaxed")
PADDING = -1
_COUNTS = ("num_samples", "num_canonical_nodes", "num_physical_nodes", "ranks_per_node", "workers_per_rank")
_RULES = {"partition_algo": one_of(*PARTITIONS), **dict.fromkeys((*_COUNTS, "batch_size"), count(1))}


def partition(
    algo: str,
    num_samples: int,
    num_canonical_nodes: int,
    num_physical_nodes: int,
    ranks_per_node: int,
    workers_per_rank: int,
    batch_size: int,
    drop_first: int = 0,
    initial_physical_nodes: int | None = None,
) -> Ids:
    """Give the positions of an epoch as int64[nodes, ranks per node, workers, batches, batch size], -1 for padding.

    Args:
        algo: `orig`, or `relaxed`: as `orig` wherever canonical and physical nodes divide, else the epoch of the
            world that began it, dealt again.
        num_samples, num_canonical_nodes: Positions in the epoch, and its rows: each holds consecutive positions.
        num_physical_nodes, ranks_per_node, workers_per_rank, batch_size: This world, and samples of a rank's batch.
        drop_first: Samples of the epoch that are already used up; rounded down to a multiple of the nodes.
        initial_physical_nodes: Nodes of the world that began this epoch; only `relaxed` looks at it.

    Raises:
        ValueError: A number out of range, nodes that divide neither way, or a `drop_first` beyond the epoch.
    """
    counts = (num_samples, num_canonical_nodes, num_physical_nodes, ranks_per_node, workers_per_rank, batch_size)
    if problems := broken(dict(zip(_RULES, (algo, *counts), strict=True)), _RULES):
        raise ValueError(" ".join(problems))
    world, began = num_physical_nodes * ranks_per_node, (initial_physical_nodes or 0) * ranks_per_node
    if not 0 <= drop_first <= (num_samples // world + 1) * world:
        raise ValueError(
            f"a resume cannot lie beyond the epoch's end; found {drop_first} samples used of {num_samples}; "
            f"start the next epoch, or check that the data is that of the run"
        )
    if algo == "orig" or not began or _divides(num_canonical_nodes, num_physical_nodes):
        rows = _rank_rows(num_samples, num_canonical_nodes, num_physical_nodes, ranks_per_node, drop_first)
        return _to_workers(rows, ranks_per_node, workers_per_rank, batch_size)
    if world * batch_size % began:
        raise ValueError(
            f"a resumed `relaxed` epoch keeps its global batch, which must divide evenly over the ranks that began it; "
            f"found {world * batch_size} samples and {began} ranks; resume with the first run's global batch size"
        )
    began_batch = world * batch_size // began
    rows = _rank_rows(num_samples, num_canonical_nodes, began // ranks_per_node, ranks_per_node, drop_first)
    batches = global_batches(_to_workers(rows, ranks_per_node, 1, began_batch))
    return deal_global_batches(batches, (num_physical_nodes, ranks_per_node, workers_per_rank, batch_size))


def global_batches(work: Ids) -> Ids:
    """Give an epoch's array as int64[batches, ranks * batch size]: what all ranks together take, in order of time."""
    nodes, ranks, _, _, batch_size = work.shape
    batches: Ids = work.transpose(3, 2, 0, 1, 4).reshape(-1, nodes * ranks * batch_size)
    return batches


def deal_global_batches(batches: Ids, world: Sequence[int]) -> Ids:
    """Deal int64[n, ranks * batch size] to `world` = (nodes, ranks per node, workers, batch size); undo the above."""
    nodes, ranks, workers, batch_size = world
    rows = batches.reshape(-1, nodes * ranks, batch_size).transpose(1, 0, 2).reshape(nodes * ranks, -1)
    return _to_workers(rows, ranks, workers, batch_size)


def _divides(one: int, other: int) -> bool:
    return one % other == 0 or other % one == 0


def _rank_rows(num_samples: int, canonical: int, nodes: int, ranks_per_node: int, drop_first: int) -> Ids:
    """Positions of each rank in order of time: int64[ranks, samples of a rank]."""
    if not _divides(canonical, nodes):
        raise ValueError(
            f"one of num_canonical_nodes and the number of nodes must divide the other, or every node would need every "
            f"shard; found {canonical} and {nodes}; set num_canonical_nodes, or resume with partition_algo='relaxed'"
        )
    epoch = _canonical_rows(num_samples, canonical, nodes).T.reshape(-1)
    rows = _level(epoch[drop_first - drop_first % nodes :].reshape(-1, nodes).T, ranks_per_node)
    per_rank = rows.shape[1] // ranks_per_node
    ranks: Ids = rows.reshape(nodes, per_rank, ranks_per_node).transpose(0, 2, 1)
    return ranks.reshape(nodes * ranks_per_node, per_rank)


def _canonical_rows(num_samples: int, canonical: int, nodes: int) -> Ids:
    """Positions of each canonical node: int64[canonical, the same for all], short rows filled up with repeats."""
    ratio = max(nodes // canonical, 1)
    longest = ceil_div(num_samples, canonical)
    width = ceil_div(longest, ratio) * ratio
    if num_samples <= canonical:
        return np.resize(np.arange(num_samples, dtype=np.int64), (canonical, width))
    borders = np.arange(canonical + 1, dtype=np.int64) * num_samples // canonical
    rows = np.minimum(borders[:-1, None] + np.arange(longest, dtype=np.int64), borders[1:, None] - 1)
    padding = width - longest
    if padding and width < 2 * padding + ratio - 1:
        raise ValueError(
            f"{num_samples} samples are too few to spread {canonical} canonical nodes over {nodes} nodes; "
            f"use fewer nodes, or num_canonical_nodes={nodes}"
        )
    return _repeat_late(rows, padding, ratio)


def _level(rows: Ids, ranks: int) -> Ids:
    """Fill up the rows of nodes so that their ranks get equally many."""
    length = rows.shape[1]
    if 0 < length < ranks:
        return np.concatenate([rows] * ceil_div(ranks, length), axis=1)[:, :ranks]
    return _repeat_late(rows, -length % ranks, ranks)


def _repeat_late(rows: Ids, padding: int, ratio: int) -> Ids:
    """Append `padding` columns: a late stretch of the row, moved so that no receiver gets what it just had."""
    first = max(rows.shape[1] - padding - ratio + 1, 0)
    return np.concatenate([rows, rows[:, first : first + padding]], axis=1) if padding else rows


def _to_workers(rows: Ids, ranks_per_node: int, workers: int, batch_size: int) -> Ids:
    """Deal the batches of each rank to its workers in turn; fill up with -1."""
    ranks, length = rows.shape
    batches = ceil_div(length, workers * batch_size)
    padded = np.full((ranks, batches * workers * batch_size), PADDING, dtype=np.int64)
    padded[:, :length] = rows
    dealt = padded.reshape(ranks, batches, workers, batch_size).transpose(0, 2, 1, 3)
    return np.ascontiguousarray(dealt).reshape(ranks // ranks_per_node, ranks_per_node, workers, batches, batch_size)
