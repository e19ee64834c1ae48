"""``simulate``: how well an order shuffles a dataset, and what each node would download."""

from __future__ import annotations

import argparse
from collections import defaultdict
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from lightning_stream.cli.arguments import Mixture, add_dataset, add_store_options, add_streams, mixtures_of
from lightning_stream.cli.explain import settings_of
from lightning_stream.cli.output import ExitCode, Output, in_flags, readable
from lightning_stream.formats.sizes import parse_bytes, parse_count
from lightning_stream.order import BatchPlan, MosaicConfig, OrderConfig, RunOrder, World
from lightning_stream.order.batching import METHODS
from lightning_stream.order.config import MOSAIC_ALGORITHMS
from lightning_stream.order.downloads import plan_downloads
from lightning_stream.order.quality import measure
from lightning_stream.order.snapshot import max_active

HELP = "simulate the shuffle quality and the downloads of an order"
EXAMPLES = """examples:
  lightning-stream simulate s3://bucket/train --global-batch-size 256 --nodes 2 --devices 8
  lightning-stream simulate s3://bucket/train --global-batch-size 256 --shuffle-algo py1e
  lightning-stream simulate --global-batch-size 64 --stream s3://bucket/code=0.3 --stream s3://bucket/text=0.7
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``simulate``: the devices of a training run, and the settings of StreamingDataset."""
    add_dataset(parser, nargs="?")
    add_streams(parser)
    number: dict[str, Any] = {"type": int, "metavar": "N"}
    training = parser.add_argument_group("training run")
    training.add_argument("--global-batch-size", required=True, help="samples of one optimizer step", **number)
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
    add_store_options(parser)


def run(options: argparse.Namespace, out: Output) -> int:
    """Simulate every dataset at the path or URL, or the mixture of the streams; print after all succeeded."""
    streams = options.stream or [options.remote]
    if (options.remote is None) == (not options.stream):
        raise ValueError("simulate takes either a PATH|URL, or --stream URL[=WEIGHT] for each dataset of a mixture")
    world = World(0, options.nodes * options.devices, options.devices, options.replication)
    config = _order(options, world)
    simulated = [
        _simulate(mixture, mixture.order(config), world, options)
        for mixture in mixtures_of(streams, options.store_options)
    ]
    out.data = {"order": settings_of(config), "datasets": simulated}
    for about in simulated:
        out.line(" + ".join(about["urls"]))
        out.show({name: value for name, value in about.items() if name != "urls"})
    out.show({"order": out.data["order"]})
    return ExitCode.OK


def _order(options: argparse.Namespace, world: World) -> OrderConfig:
    mosaic = MosaicConfig(options.partition_algo, options.shuffle_block_size)
    return OrderConfig.resolve(
        batch_size=options.global_batch_size,
        device_batch_size=options.batch_size or max(1, options.global_batch_size // world.num_replicas),
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
        world=world,
    )


def _simulate(mixture: Mixture, order: RunOrder, world: World, options: argparse.Namespace) -> dict[str, Any]:
    sizes = np.concatenate([dataset.index.raw_bytes for dataset in mixture.datasets])
    stored = np.concatenate([dataset.index.stored_bytes for dataset in mixture.datasets])
    batches: dict[str, Any] = {"epoch": options.epoch, "batch_size": options.global_batch_size}
    plan = plan_downloads(order, world=world, tail=options.tail, shard_bytes=stored, **batches)
    about: dict[str, Any] = {
        "urls": [dataset.store.url for dataset in mixture.datasets],
        "samples": order.snapshot.num_samples,
        "shards": order.snapshot.num_shards,
        "epoch_samples": order.num_samples,
        "shuffle_quality": asdict(measure(order, shard_bytes=sizes, **batches)),
        "download_per_node_bytes": plan.num_bytes.tolist(),
        "download_factor": plan.factor,
    }
    if plan.warning:
        about["warning"] = in_flags(plan.warning, options.parser)
    if options.cache_limit is None and options.predownload is None:
        return about
    active = _active_shards(order, world, options)
    needed = about["cache_needed_per_node_bytes"] = int(np.sort(sizes)[::-1][:active].sum())
    if options.cache_limit is not None and parse_bytes(options.cache_limit, "cache_limit") < needed:
        about["cache_warning"] = (
            f"--cache-limit {options.cache_limit} is below {readable(needed)}, the largest {active} shards: those that "
            "a node has begun and not finished. Shards may be downloaded several times in an epoch."
        )
    return about


def _active_shards(order: RunOrder, world: World, options: argparse.Namespace) -> int:
    """The most shards that a node has downloaded and will use again, over all nodes."""
    per_device = options.global_batch_size // world.num_replicas
    ahead = 8 * per_device if options.predownload is None else options.predownload
    epoch, nodes = order.epoch(options.epoch), defaultdict[int, list[BatchPlan]](list)
    for rank in [replace(world, rank=rank) for rank in range(0, world.num_ranks, world.replication)]:
        plan = BatchPlan(epoch, batch_size=options.global_batch_size, world=rank, tail=options.tail)
        nodes[rank.node].append(plan)
    most = 0
    for plans in nodes.values():
        ids = [plan.share(k).sample_ids for k in range(plans[0].num_batches) for plan in plans]
        most = max(most, max_active(order.snapshot.shards_of(np.concatenate(ids)), ahead * len(plans)))
    return most
