"""How mosaicml-streaming 0.13 assigns the positions of an epoch to nodes, ranks and batches.

That library splits a rank's batches over its loader's workers as well, which does not change their order: so an epoch
is int64[batches, nodes * ranks * batch size] here, what all ranks together take in order of time. -1 is padding.

A position may appear twice: shorter canonical nodes, and ranks that would get one sample less, repeat one of their own
late positions. That library delivers these repeats, so they belong to its order.
"""

from __future__ import annotations

import numpy as np

from lightning_stream.order.arrays import Ints
from lightning_stream.order.orders import ceil_div

PARTITIONS = ("orig", "relaxed")
PADDING = -1


def partition(
    algo: str,
    num_samples: int,
    canonical: int,
    nodes: int,
    ranks_per_node: int,
    batch_size: int,
    drop_first: int = 0,
    initial_nodes: int | None = None,
) -> Ints:
    """Assign the positions of an epoch: int64[batches, nodes * ranks * batch size], -1 for padding.

    Each of the ``canonical`` nodes holds consecutive positions. `relaxed` differs from `orig` where these and the
    physical nodes do not divide: there this world splits the batches of the ``initial_nodes`` that began the epoch.
    ``drop_first`` samples, rounded down to a multiple of the nodes, were used already.

    Raises:
        ValueError: Nodes that divide neither way, or a `drop_first` beyond the epoch.
    """
    world = nodes * ranks_per_node
    began = (initial_nodes or 0) * ranks_per_node
    if not 0 <= drop_first <= (num_samples // world + 1) * world:
        raise ValueError(
            f"a resume cannot lie beyond the epoch's end; found {drop_first} samples used of {num_samples}; "
            f"start the next epoch, or check that the data is that of the run"
        )
    if algo == "orig" or not began or _divides(canonical, nodes):
        return _batches(_rank_rows(num_samples, canonical, nodes, ranks_per_node, drop_first), batch_size)
    if world * batch_size % began:
        raise ValueError(
            f"a resumed `relaxed` epoch keeps its global batch, which must divide evenly over the ranks that began it; "
            f"found {world * batch_size} samples and {began} ranks; resume with the first run's global batch size"
        )
    rows = _rank_rows(num_samples, canonical, began // ranks_per_node, ranks_per_node, drop_first)
    return _batches(rows, world * batch_size // began)


def _divides(canonical: int, nodes: int) -> bool:
    return canonical % nodes == 0 or nodes % canonical == 0


def _rank_rows(num_samples: int, canonical: int, nodes: int, ranks_per_node: int, drop_first: int) -> Ints:
    """Positions of each rank in order of time: int64[ranks, samples of a rank]."""
    if not _divides(canonical, nodes):
        raise ValueError(
            f"One of num_canonical_nodes and the number of nodes must divide the other, or every node would need every "
            f"shard; found {canonical} and {nodes}. Set num_canonical_nodes, or resume with partition_algo='relaxed'."
        )
    epoch = _canonical_rows(num_samples, canonical, nodes).T.reshape(-1)
    rows = epoch[drop_first - drop_first % nodes :].reshape(-1, nodes).T
    length = rows.shape[1]
    if 0 < length < ranks_per_node:
        rows = np.concatenate([rows] * ceil_div(ranks_per_node, length), axis=1)[:, :ranks_per_node]
    rows = _repeat_late(rows, -rows.shape[1] % ranks_per_node, ranks_per_node)
    ranks: Ints = rows.reshape(nodes, -1, ranks_per_node).transpose(0, 2, 1)
    return ranks.reshape(nodes * ranks_per_node, -1)


def _canonical_rows(num_samples: int, canonical: int, nodes: int) -> Ints:
    """Positions of each canonical node: int64[canonical, the same for all], short rows filled up with repeats."""
    ratio = max(nodes // canonical, 1)
    longest = ceil_div(num_samples, canonical)
    width = ceil_div(longest, ratio) * ratio
    if num_samples <= canonical:
        return np.resize(np.arange(num_samples), (canonical, width))
    borders = np.arange(canonical + 1) * num_samples // canonical
    rows = np.minimum(borders[:-1, None] + np.arange(longest), borders[1:, None] - 1)
    padding = width - longest
    if padding and width < 2 * padding + ratio - 1:
        raise ValueError(
            f"{num_samples} samples are too few to spread {canonical} canonical nodes over {nodes} nodes; "
            f"use fewer nodes, or num_canonical_nodes={nodes}"
        )
    return _repeat_late(rows, padding, ratio)


def _repeat_late(rows: Ints, padding: int, ratio: int) -> Ints:
    """Append `padding` columns: late columns of the row, moved so that no receiver gets what it just had."""
    first = max(rows.shape[1] - padding - ratio + 1, 0)
    return np.concatenate([rows, rows[:, first : first + padding]], axis=1) if padding else rows


def _batches(rows: Ints, batch_size: int) -> Ints:
    """The batches of all ranks, from each rank's positions: the last ones filled up with -1."""
    padded = np.pad(rows, ((0, 0), (0, -rows.shape[1] % batch_size)), constant_values=PADDING)
    batches: Ints = padded.reshape(len(rows), -1, batch_size).transpose(1, 0, 2)
    return np.ascontiguousarray(batches).reshape(-1, len(rows) * batch_size)
