"""An epoch in an order of mosaicml-streaming, made as the product makes it, in the shape in which it was recorded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from lightning_stream.order import MosaicConfig, OrderConfig, RunOrder, Snapshot, StreamWeights
from lightning_stream.order.mosaic.partitions import PADDING, partition
from lightning_stream.order.mosaic.work import epoch_batches

_SPREAD = {"py1s": 64, "py2s": 64}


def stream_weights(weights: Sequence[Any] | None, num_streams: int) -> list[StreamWeights]:
    """Weights given as mappings, as weights, or as None."""
    given = [None] * num_streams if weights is None else weights
    return [StreamWeights(**one) if isinstance(one, Mapping) else one or StreamWeights() for one in given]


def samples(epoch_size: int | str | None) -> int | None:
    """An epoch size, which may be written "1k"."""
    return int(epoch_size[:-1]) * 1000 if isinstance(epoch_size, str) else epoch_size


def epoch_work(
    weights: Sequence[Any] | None,
    sampling_method: str,
    sampling_granularity: int,
    shuffle: bool,
    shuffle_algo: str,
    batching_method: str,
    num_physical_nodes: int,
    ranks_per_node: int,
    workers_per_rank: int,
    batch_size: int,
    num_canonical_nodes: int | None,
    epoch: int,
    sample_in_epoch: int,
    shuffle_seed: int,
    shuffle_block_size: int | None,
    partition_algo: str,
    *,
    shard_sizes: Sequence[Any],
    epoch_size: int | str | None = None,
    initial_physical_nodes: int | None = None,
) -> np.ndarray:
    """The rest of an epoch: int64[nodes, ranks per node, workers per rank, batches, batch size], -1 for padding."""
    config = OrderConfig(
        shuffle=shuffle,
        seed=shuffle_seed,
        algorithm=shuffle_algo,
        canonical_nodes=num_canonical_nodes or num_physical_nodes * _SPREAD.get(shuffle_algo, 1),
        window=1,
        batching_method=batching_method,
        device_block=batch_size,
        batch_size=batch_size,
        sampling_method=sampling_method,
        sampling_granularity=sampling_granularity,
        epoch_size=samples(epoch_size),
        mosaic=MosaicConfig(partition_algo, shuffle_block_size, initial_physical_nodes),
    )
    run = RunOrder(Snapshot.of(shard_sizes), stream_weights(weights, len(shard_sizes)), config)
    world = (num_physical_nodes, ranks_per_node, batch_size)
    batches, _ = epoch_batches((run.snapshot, run.weights, config), epoch, world, sample_in_epoch)
    return by_worker(batches, (num_physical_nodes, ranks_per_node, workers_per_rank, batch_size))


def epoch_partition(
    algo: str,
    num_samples: int,
    num_canonical_nodes: int,
    num_physical_nodes: int,
    ranks_per_node: int,
    workers_per_rank: int,
    batch_size: int,
    drop_first: int = 0,
    initial_physical_nodes: int | None = None,
) -> np.ndarray:
    """The positions of an epoch, under the arguments and in the shape in which they were recorded."""
    world = (num_physical_nodes, ranks_per_node, batch_size)
    batches = partition(algo, num_samples, num_canonical_nodes, *world, drop_first, initial_physical_nodes)
    return by_worker(batches, (num_physical_nodes, ranks_per_node, workers_per_rank, batch_size))


def by_worker(batches: np.ndarray, world: Sequence[int]) -> np.ndarray:
    """Split global batches over world = (nodes, ranks per node, workers, batch size): worker g % workers has batch g.

    int64[nodes, ranks per node, workers per rank, batches, batch size], -1 for padding.
    """
    nodes, ranks, workers, batch_size = world
    padding = np.full((-len(batches) % workers, batches.shape[1]), PADDING)
    dealt = np.concatenate([batches, padding]).reshape(-1, workers, nodes, ranks, batch_size)
    return np.ascontiguousarray(dealt.transpose(2, 3, 1, 0, 4))
