"""``simulate``: how well an order shuffles a dataset, what each node would download, and how rows are packed."""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_stream.cli.arguments import (
    Mixture,
    add_dataset,
    add_reading,
    add_rules,
    add_store_options,
    add_streams,
    mixtures_of,
)
from lightning_stream.cli.checkpoint import settings_of
from lightning_stream.cli.output import ExitCode, Output, in_flags
from lightning_stream.formats.sizes import parse_bytes, parse_count
from lightning_stream.loading.packing import Packing
from lightning_stream.order import BatchPlan, MosaicConfig, OrderConfig, RunOrder, Schedule, World
from lightning_stream.order.balance import Balance, imbalance
from lightning_stream.order.batching import METHODS
from lightning_stream.order.batching.buckets import LengthBuckets
from lightning_stream.order.chain import Chain, Stage, readable, stage_of_batches, stages_of_order
from lightning_stream.order.config import MOSAIC_ALGORITHMS
from lightning_stream.order.downloads import plan_downloads
from lightning_stream.order.packing import LONG_DOCUMENTS
from lightning_stream.order.quality import measure
from lightning_stream.order.snapshot import max_active
from lightning_stream.reading.data_stages import stages_of_reader
from lightning_stream.reading.reader import SampleReader
from lightning_stream.reading.stream import Stream, labels_of

HELP = "simulate an order: its shuffle quality, its downloads, its packed rows and its balance"
EXAMPLES = """examples:
  lightning-stream simulate s3://bucket/train --global-batch-size 256 --nodes 2 --devices 8
  lightning-stream simulate s3://bucket/train --global-batch-size 256 --shuffle-algo py1e
  lightning-stream simulate --global-batch-size 64 --stream s3://bucket/code=0.3 --stream s3://bucket/text=0.7
  lightning-stream simulate s3://bucket/tokens --global-batch-size 64 --pack-column tokens --row-length 8192
"""
_IN_CHAIN = ("urls", "samples", "shards", "epoch_samples", "epoch_rows", "batches", "order", "chain")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``simulate``: the devices of a training run, and the settings of StreamingDataset."""
    add_dataset(parser, nargs="?")
    add_streams(parser)
    add_reading(parser)
    number: dict[str, Any] = {"type": int, "metavar": "N"}
    training = parser.add_argument_group("training run")
    training.add_argument("--global-batch-size", help="samples of one optimizer step", **number)
    training.add_argument("--batch-size", help="samples of a micro-batch on one device", **number)
    training.add_argument("--nodes", default=1, help="machines (default: 1)", **number)
    training.add_argument("--devices", default=1, help="devices of each machine (default: 1)", **number)
    training.add_argument("--epoch", default=0, help="the epoch to simulate (default: 0)", **number)
    training.add_argument("--tail", default="pad", choices=("pad", "exact", "drop"), help="last partial batch")
    dataset = parser.add_argument_group("settings of StreamingDataset, with its defaults, but shuffled")
    dataset.add_argument("--shuffle", action=argparse.BooleanOptionalAction, default=True, help="shuffle the samples")
    dataset.add_argument("--shuffle-seed", default=9176, **number)
    dataset.add_argument("--shuffle-algo", choices=("window", *MOSAIC_ALGORITHMS))
    dataset.add_argument("--shuffle-block-size", **number)
    dataset.add_argument("--partition-algo", default="relaxed", choices=("relaxed", "orig"))
    dataset.add_argument("--batching-method", default="random", choices=tuple(METHODS))
    dataset.add_argument("--num-canonical-nodes", **number)
    dataset.add_argument("--window", **number)
    dataset.add_argument("--sampling-method", default="balanced", choices=("balanced", "fixed"))
    dataset.add_argument("--sampling-granularity", default=1, **number)
    dataset.add_argument("--epoch-size", metavar="N", help="samples of an epoch, e.g. 100k")
    dataset.add_argument("--replication", default=1, **number)
    dataset.add_argument("--predownload", help="samples that each device downloads ahead", **number)
    dataset.add_argument("--cache-limit", metavar="SIZE", help="bytes of the cache of a node, e.g. 100gb")
    dataset.add_argument("--schedule", metavar="FILE", help="JSON file: a Schedule's points, or all of its arguments")
    dataset.add_argument("--balance", metavar="NAME", help="the lengths that shares are balanced by, e.g. tokens")
    dataset.add_argument("--bucket-by", metavar="NAME", help="lengths by which batches have similar samples")
    dataset.add_argument("--bucket-window", help="samples that are sorted by length together", **number)
    dataset.add_argument("--batch-tokens", help="tokens of a global batch, instead of --global-batch-size", **number)
    dataset.add_argument("--batch-multiple", help="what the sizes of such batches are multiples of", **number)
    packing = parser.add_argument_group("packing of documents into rows; batch sizes then count rows")
    packing.add_argument("--pack-column", metavar="NAME", help="column of the tokens, whose lengths are known")
    packing.add_argument("--row-length", help="tokens of a row (default: 2048)", **number)
    packing.add_argument("--pack-window", help="documents packed together (default: as Packing)", **number)
    packing.add_argument("--long-documents", choices=LONG_DOCUMENTS, help="those longer than a row (default: split)")
    add_rules(parser)
    add_store_options(parser)


def run(options: argparse.Namespace, out: Output) -> int:
    """Simulate every dataset at the path or URL, or the mixture of the streams; print after all succeeded."""
    streams = options.stream or [options.remote]
    if (options.remote is None) == (not options.stream):
        raise ValueError("simulate takes either a PATH|URL, or --stream URL[=WEIGHT] for each dataset of a mixture")
    if (options.global_batch_size is None) == (options.batch_tokens is None):
        raise ValueError("simulate takes either --global-batch-size or --batch-tokens")
    world = World(0, options.nodes * options.devices, options.devices, options.replication)
    with tempfile.TemporaryDirectory(prefix="lightning-stream-") as folder:
        found = [_simulate(mixture, world, options) for mixture in mixtures_of(streams, options, folder)]
    for chain, about in found:
        out.line(" + ".join(about["urls"]))
        out.lines(str(chain))
        out.show({name: value for name, value in about.items() if name not in _IN_CHAIN})
    out.data = {"datasets": [about for _, about in found]}
    return ExitCode.OK


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


def _order(options: argparse.Namespace, world: World, reader: SampleReader, packing: Packing | None) -> OrderConfig:
    mosaic, buckets = MosaicConfig(options.partition_algo, options.shuffle_block_size), _buckets(options, reader)
    size = _batch_size(options, buckets)
    return OrderConfig.resolve(
        batch_size=size,
        device_batch_size=_device_batch_size(options, size, world),
        shuffle=options.shuffle,
        seed=options.shuffle_seed,
        algorithm=options.shuffle_algo,
        canonical_nodes=options.num_canonical_nodes,
        window=options.window,
        batching_method=options.batching_method,
        sampling_method=options.sampling_method,
        sampling_granularity=options.sampling_granularity,
        epoch_size=None if options.epoch_size is None else parse_count(options.epoch_size, "epoch_size"),
        mosaic=mosaic if options.shuffle_algo in MOSAIC_ALGORITHMS else None,
        packing=None if packing is None else packing.rows(reader.lengths_digest(packing.lengths_name)),
        schedule=_schedule(options, reader.streams),
        buckets=buckets,
        world=world,
    )


def _batch_size(options: argparse.Namespace, buckets: LengthBuckets | None) -> int:
    """Samples of a global batch; where it has a budget of tokens, what its size is a multiple of."""
    return int(options.global_batch_size) if buckets is None or options.batch_tokens is None else buckets.batch_size


def _device_batch_size(options: argparse.Namespace, size: int, world: World) -> int:
    return int(options.batch_size or max(1, size // world.num_replicas))


def _simulate(mixture: Mixture, world: World, options: argparse.Namespace) -> tuple[Chain, dict[str, Any]]:
    """The chain of a training run, and what was simulated of it."""
    packing, indexes = _packing(options), mixture.reader.indexes
    config = _order(options, world, mixture.reader, packing)
    size = _batch_size(options, config.buckets)
    lengths = packing.lengths_name if packing else (options.bucket_by or "tokens") if config.buckets else None
    order = mixture.order(config, lengths, options.forget)
    batches: dict[str, Any] = {"epoch": options.epoch, "batch_size": size}
    plan = BatchPlan(order.epoch(options.epoch), batch_size=size, world=world, tail=options.tail)
    begin, num_batches = time.perf_counter(), plan.num_batches  # which plans all rows or batches of different sizes
    planned_s = time.perf_counter() - begin
    chain = _chain(mixture, order, plan, lengths, options)
    sizes = np.concatenate([index.raw_bytes for index in indexes])
    stored = np.concatenate([index.stored_bytes for index in indexes])
    downloads = plan_downloads(order, world=world, tail=options.tail, shard_bytes=stored, **batches)
    about: dict[str, Any] = {
        "urls": list(order.snapshot.stream_names),
        "samples": order.snapshot.num_samples,
        "shards": order.snapshot.num_shards,
        "epoch_samples": order.num_samples,
        "batches": num_batches,
        "order": settings_of(order.config),
        "chain": chain.to_json(),
    }
    if order.config.packing is not None:
        about["epoch_rows"] = plan.order.num_samples
    if order.config.buckets is not None and order.lengths is not None:
        about["padding_percent"] = _padding_percent(plan, order.lengths)
    if packing is not None or options.batch_tokens is not None:
        about |= {"planning_s": planned_s, "documents_per_s": int(order.num_samples / planned_s)}
    if options.batch_tokens is None:  # else a perfect shuffle has batches of other sizes
        about["shuffle_quality"] = asdict(measure(order, shard_bytes=sizes, **batches))
    about["download_per_node_bytes"] = downloads.num_bytes.tolist()
    about["download_factor"] = downloads.factor
    if downloads.warning:
        about["warning"] = in_flags(downloads.warning, options.parser)
    if options.balance is not None:
        balance = Balance.by_lengths(
            partial(mixture.reader.lengths, options.balance), _device_batch_size(options, size, world)
        )
        ratios = zip(("without_balance", "with_balance"), imbalance(plan, balance), strict=True)
        about["most_expensive_rank_over_mean"] = dict(ratios)
    return chain, {**about, **_cache_need(order, plan, sizes, options)}


def _chain(
    mixture: Mixture, order: RunOrder, plan: BatchPlan, lengths: str | None, options: argparse.Namespace
) -> Chain:
    names = [name for name in dict.fromkeys((lengths, options.balance)) if name]
    settings = {"replicas": plan.world.num_replicas, "num_batches": plan.num_batches}
    note = f"in epoch {options.epoch}"
    return Chain((
        *stages_of_reader(mixture.reader, names, order),
        *stages_of_order(order.config, order, epoch=options.epoch, count_rows=True),
        stage_of_batches(order.config, plan.batch_size, options.tail, note=note, **settings),
        *([Stage("balance", {"balance": options.balance})] if options.balance else []),
    ))  # fmt: skip


def _cache_need(
    order: RunOrder, plan: BatchPlan, shard_bytes: NDArray[np.int64], options: argparse.Namespace
) -> dict[str, Any]:
    """What the cache of a node must hold, where options ask for it."""
    if options.cache_limit is None and options.predownload is None:
        return {}
    active = _active_shards(order, plan, options)
    needed = int(np.sort(shard_bytes)[::-1][:active].sum())
    about: dict[str, Any] = {"cache_needed_per_node_bytes": needed}
    if options.cache_limit is not None and parse_bytes(options.cache_limit, "cache_limit") < needed:
        about["cache_warning"] = (
            f"--cache-limit {options.cache_limit} is below {readable(needed)}, the largest {active} shards: those that "
            "a node has begun and not finished. Shards may be downloaded several times in an epoch."
        )
    return about


def _active_shards(order: RunOrder, plan: BatchPlan, options: argparse.Namespace) -> int:
    """The most shards that a node has downloaded and will use again, over all nodes."""
    world, nodes = plan.world, defaultdict[int, list[BatchPlan]](list)
    ahead = 8 * plan.batch_size // world.num_replicas if options.predownload is None else options.predownload
    ahead *= plan.order.samples_per_position
    for rank in range(0, world.num_ranks, world.replication):
        own = plan.of(replace(world, rank=rank), None)
        nodes[own.world.node].append(own)
    most = 0
    for plans in nodes.values():
        ids = [plan.share(k).sample_ids for k in range(plans[0].num_batches) for plan in plans]
        most = max(most, max_active(order.snapshot.shards_of(np.concatenate(ids)), ahead * len(plans)))
    return most


def _padding_percent(plan: BatchPlan, lengths: NDArray[np.integer]) -> float:
    """The padding of an epoch whose global batches are padded to their longest samples."""
    tokens = padded = 0
    for k in range(plan.num_batches):
        own = lengths[plan.ids(k)]
        tokens, padded = tokens + int(own.sum(dtype=np.int64)), padded + len(own) * int(own.max())
    return 100 * (1 - tokens / max(1, padded))
