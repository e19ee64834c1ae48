"""The training run that the flags of ``simulate`` describe."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from lightning_stream.cli.arguments import Mixture
from lightning_stream.formats.sizes import parse_count
from lightning_stream.loading.packing import Packing
from lightning_stream.order import MosaicConfig, OrderConfig, Schedule, World
from lightning_stream.order.batching.buckets import LengthBuckets
from lightning_stream.order.config import MOSAIC_ALGORITHMS
from lightning_stream.reading.reader import SampleReader
from lightning_stream.reading.stream import Stream, labels_of
from lightning_stream.simulation import Training


def _packing(options: argparse.Namespace) -> Packing | None:
    given = {"row_length": options.row_length, "window": options.pack_window, "long_documents": options.long_documents}
    given = {name: value for name, value in given.items() if value is not None}
    if options.pack_column is None and given:
        raise ValueError("rows are packed from the lengths of a column: pass --pack-column, e.g. --pack-column tokens")
    return None if options.pack_column is None else Packing(options.pack_column, **given)


def _schedule(options: argparse.Namespace, streams: Sequence[Stream]) -> Schedule | None:
    if options.schedule is None:
        return None
    try:
        given = json.loads(Path(options.schedule).read_text())
        schedule = Schedule.from_state(given) if isinstance(given, dict) else Schedule(given)
    except (TypeError, json.JSONDecodeError) as error:
        raise ValueError(
            f"a schedule is a JSON list of points, [[0, {{name: weight}}], ...], or an object with the arguments of "
            f"Schedule; found another one in {options.schedule} ({error})"
        ) from error
    return schedule.of_streams(labels_of(streams))


def _buckets(options: argparse.Namespace, reader: SampleReader) -> LengthBuckets | None:
    tokens, window, multiple = options.batch_tokens, options.bucket_window, options.batch_multiple
    name = options.bucket_by or (None if tokens is None else "tokens")
    if name is None:
        return None
    size = options.global_batch_size if tokens is None else multiple
    sizes = {"batch_size": size, "window": window, "batch_tokens": tokens}
    return LengthBuckets.resolved(reader.lengths(name), digest=reader.lengths_digest(name), **sizes)


def _order(options: argparse.Namespace, world: World, reader: SampleReader) -> OrderConfig:
    mosaic = MosaicConfig(options.partition_algo, options.shuffle_block_size)
    packing, buckets = _packing(options), _buckets(options, reader)
    size = _batch_size(options, buckets)
    return OrderConfig.resolve(
        batch_size=size,
        device_batch_size=_device_batch_size(options, size, world),
        shuffle=options.shuffle,
        seed=options.shuffle_seed,
        algorithm=options.shuffle_algo,
        canonical_nodes=options.num_canonical_nodes,
        window=options.window,
        quick_start=options.quick_start,
        batching_method=options.batching_method,
        sampling_method=options.sampling_method,
        sampling_granularity=options.sampling_granularity,
        epoch_size=None if options.epoch_size is None else parse_count(options.epoch_size, "epoch_size"),
        mosaic=mosaic if options.shuffle_algo in MOSAIC_ALGORITHMS else None,
        packing=None if packing is None else packing.resolved(reader, None),
        schedule=_schedule(options, reader.streams),
        buckets=buckets,
        world=world,
    )


def _batch_size(options: argparse.Namespace, buckets: LengthBuckets | None) -> int:
    """Samples of a global batch; where it has a budget of tokens, what its size is a multiple of."""
    return int(options.global_batch_size) if buckets is None or options.batch_tokens is None else buckets.batch_size


def _device_batch_size(options: argparse.Namespace, size: int, world: World) -> int:
    return int(options.batch_size or max(1, size // world.num_replicas))


def lengths_name(options: argparse.Namespace) -> str | None:
    """The lengths that the order needs; None if it needs none."""
    if (packing := _packing(options)) is not None:
        return packing.lengths_name
    return options.bucket_by or (None if options.batch_tokens is None else "tokens")


def training_of(mixture: Mixture, options: argparse.Namespace) -> Training:
    """The training run of these options."""
    mixture.reader.require_samples()
    world = World(0, options.nodes * options.devices, options.devices, options.replication)
    config = _order(options, world, mixture.reader)
    size = _batch_size(options, config.buckets)
    order = mixture.order(config, lengths_name(options), options.forget)
    return Training(order, size, _device_batch_size(options, size, world), world, options.epoch, options.tail)
