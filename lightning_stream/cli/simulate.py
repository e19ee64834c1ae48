"""``simulate``: how well an order shuffles a dataset, what nodes download, how rows are packed, and what waits."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import partial
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
from lightning_stream.cli.machine import about_link, add_machine, machine_of, positive
from lightning_stream.cli.output import ExitCode, Output, in_flags
from lightning_stream.cli.simulate_page import add_pages, serve_page, write_report
from lightning_stream.cli.training_run import lengths_name, training_of
from lightning_stream.formats.index import Index
from lightning_stream.formats.sizes import parse_bytes
from lightning_stream.order import BatchPlan, RunOrder, StreamWeights
from lightning_stream.order.balance import Balance, imbalance
from lightning_stream.order.batching import METHODS
from lightning_stream.order.chain import Chain, Stage, readable, stage_of_batches, stages_of_order
from lightning_stream.order.config import MOSAIC_ALGORITHMS
from lightning_stream.order.packing import LONG_DOCUMENTS
from lightning_stream.order.quality import measure
from lightning_stream.pages.server import Drawn
from lightning_stream.reading.data_stages import stages_of_reader
from lightning_stream.reading.reader import SampleReader
from lightning_stream.reading.stream import CacheDefaults, Stream
from lightning_stream.reading.stream_shards import ReaderConfig
from lightning_stream.shared_files import scratch_folder
from lightning_stream.simulation import QUICK, Machine, Part, Shards, Simulated, Training, simulate
from lightning_stream.simulation.page import curve_table, duration, sections_of

HELP = "predict a training run: its first batch, throughput and limit, downloads and price, shuffle and packing"
EXAMPLES = """examples:
  lightning-stream simulate s3://bucket/train --global-batch-size 256 --nodes 2 --devices 8
  lightning-stream simulate s3://bucket/train --global-batch-size 256 --shuffle-algo py1e
  lightning-stream simulate --global-batch-size 64 --stream s3://bucket/code=0.3 --stream s3://bucket/text=0.7
  lightning-stream simulate s3://bucket/tokens --global-batch-size 64 --pack-column tokens --row-length 8192
  lightning-stream simulate s3://bucket/train --global-batch-size 256 --devices 8 --num-workers 8 --step-ms 250 --probe
  lightning-stream simulate --shards 100000 --shard-bytes 64mb --global-batch-size 256 --link latency=20ms,node=1gb
"""
_APART = ("urls", "samples", "shards", "epoch_samples", "epoch_rows", "batches", "order", "chain")
_NO_BATCH = "Nothing can be simulated: the epoch has fewer samples than a batch, and --tail=drop drops them."
_NODES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1000)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``simulate``: the devices of a training run, and the settings of StreamingDataset."""
    add_dataset(parser, nargs="?")
    add_streams(parser)
    add_reading(parser)
    number: dict[str, Any] = {"type": positive, "metavar": "N"}
    training = parser.add_argument_group("training run")
    training.add_argument("--global-batch-size", help="samples of one optimizer step", **number)
    training.add_argument("--batch-size", help="samples of a micro-batch on one device", **number)
    training.add_argument("--nodes", default=1, help="machines (default: 1)", **number)
    training.add_argument("--devices", default=1, help="devices of each machine (default: 1)", **number)
    training.add_argument("--epoch", default=0, help="the epoch to simulate (default: 0)", type=int, metavar="N")
    training.add_argument("--tail", default="pad", choices=("pad", "exact", "drop"), help="last partial batch")
    dataset = parser.add_argument_group("settings of StreamingDataset, with its defaults, but shuffled")
    dataset.add_argument("--shuffle", action=argparse.BooleanOptionalAction, default=True, help="shuffle the samples")
    dataset.add_argument("--shuffle-seed", default=9176, type=int, metavar="N")
    dataset.add_argument("--shuffle-algo", choices=("window", *MOSAIC_ALGORITHMS))
    dataset.add_argument("--shuffle-block-size", **number)
    dataset.add_argument("--partition-algo", default="relaxed", choices=("relaxed", "orig"))
    dataset.add_argument("--batching-method", default="random", choices=tuple(METHODS))
    dataset.add_argument("--num-canonical-nodes", **number)
    dataset.add_argument("--window", **number)
    dataset.add_argument("--quick-start", action=argparse.BooleanOptionalAction, default=True, help="default: on")
    dataset.add_argument("--sampling-method", default="balanced", choices=("balanced", "fixed"))
    dataset.add_argument("--sampling-granularity", default=1, **number)
    dataset.add_argument("--epoch-size", metavar="N", help="samples of an epoch, e.g. 100k")
    dataset.add_argument("--replication", default=1, **number)
    dataset.add_argument("--predownload", help="samples that each worker downloads ahead", type=int, metavar="N")
    dataset.add_argument("--cache-limit", metavar="SIZE", help="bytes of the cache of a node, e.g. 100gb")
    dataset.add_argument("--schedule", metavar="FILE", help="JSON file: a Schedule's points, or all of its arguments")
    dataset.add_argument("--balance", metavar="NAME", help="the lengths that shares are balanced by, e.g. tokens")
    dataset.add_argument("--bucket-by", metavar="NAME", help="lengths by which batches have similar samples")
    dataset.add_argument("--bucket-window", help="samples that are sorted by length together", **number)
    dataset.add_argument("--batch-tokens", help="tokens of a global batch, instead of --global-batch-size", **number)
    dataset.add_argument("--batch-multiple", help="what the sizes of such batches are multiples of", **number)
    imagined = parser.add_argument_group("a dataset that does not exist yet, instead of PATH|URL")
    imagined.add_argument("--shards", help="its shards", **number)
    imagined.add_argument("--shard-bytes", metavar="SIZE", help="bytes of each, e.g. 64mb")
    imagined.add_argument("--samples-per-shard", default=1000, help="samples of each (default: 1000)", **number)
    add_machine(parser)
    add_pages(parser)
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
    if [options.remote is not None, bool(options.stream), options.shards is not None].count(True) != 1:
        raise ValueError(
            "simulate takes either a PATH|URL, or --stream URL[=WEIGHT] for each dataset of a mixture, or --shards"
        )
    if (options.global_batch_size is None) == (options.batch_tokens is None):
        raise ValueError("simulate takes either --global-batch-size or --batch-tokens")
    with scratch_folder() as folder:
        mixtures = [_imagined(options)] if options.shards is not None else mixtures_of(streams, options, folder)
        if len(mixtures) > 1 and (options.report is not None or options.serve is not None):
            raise ValueError("--report and --serve show one dataset; this is a folder of splits. Pass one of them")
        if options.serve is not None:
            return _serve(mixtures[0], options)
        found = [_simulate(mixture, options) for mixture in mixtures]
    for chain, about, simulated in found:
        out.line(" + ".join(about["urls"]))
        out.lines(str(chain))
        out.show({name: value for name, value in about.items() if name not in _APART})
        if simulated:
            _print_simulated(simulated[0], simulated[1:], options, out)
            about["simulated"], *about["curve"] = [one.to_json() for one in simulated]
    out.data = {"datasets": [about for _, about, _ in found]}
    return ExitCode.OK


def _imagined(options: argparse.Namespace) -> Mixture:
    """A dataset that has an index alone, in memory."""
    if options.probe is not None:
        raise ValueError("--probe reads a dataset, and --shards imagines one: pass its link by --link")
    if options.shard_bytes is None:
        raise ValueError("--shards needs the size of each, e.g. --shard-bytes 64mb")
    size = parse_bytes(options.shard_bytes, "shard_bytes")
    entry = (
        '{"column_encodings":["bytes"],"column_names":["sample"],"column_sizes":[null],"compression":null,'
        '"format":"mds","hashes":[],"raw_data":{"basename":"shard.%d.mds","bytes":'
        f'{size},"hashes":{{}}}},"samples":{options.samples_per_shard},"size_limit":{size},"version":2,"zip_data":null}}'
    )
    name = f"{options.shards:,} shards of {readable(size)}"
    text = f'{{"version":2,"shards":[{",".join([entry % number for number in range(options.shards)])}]}}'
    reader = SampleReader([Stream(local=name)], CacheDefaults(), ReaderConfig())
    reader.indexes = (Index.from_bytes(text.encode(), name),)
    return Mixture(reader, [StreamWeights()])


def _simulate(mixture: Mixture, options: argparse.Namespace) -> tuple[Chain, dict[str, Any], list[Simulated]]:
    """The chain of a training run, what its order says, and what was simulated: of its nodes, and of the curve."""
    training, indexes = training_of(mixture, options), mixture.reader.indexes
    order, plan = training.run, training.plan()
    begin, num_batches = time.perf_counter(), plan.num_batches  # which plans all rows or batches of different sizes
    planned_s = time.perf_counter() - begin
    chain = _chain(mixture, order, plan, lengths_name(options), options)
    part = Part(training, Shards.of(indexes))
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
    if order.config.packing is not None or options.batch_tokens is not None:
        about |= {"planning_s": planned_s, "documents_per_s": int(order.num_samples / planned_s)}
    if quality := _quality(part, options):
        about["shuffle_quality"] = quality
    about |= _downloads(part, options)
    if options.balance is not None:
        balance = Balance.by_lengths(partial(mixture.reader.lengths, options.balance), training.device_batch_size)
        ratios = zip(("without_balance", "with_balance"), imbalance(plan, balance), strict=True)
        about["most_expensive_rank_over_mean"] = dict(ratios)
    machine = machine_of(options, mixture.reader.caches[0].store, indexes[0])
    if options.cache_limit is not None or options.predownload is not None:
        about |= _cache_need(part, machine, options)
    simulated: list[Simulated] = []
    if not num_batches and not options.report:
        about["warning"] = _NO_BATCH
    elif _is_timed(mixture, options):
        simulated = _simulated(mixture, part, machine, options)
    if options.report:
        write_report(options.report, _title(mixture), sections_of(simulated[0], simulated[1:], str(chain), quality))
    return chain, about, simulated


def _is_timed(mixture: Mixture, options: argparse.Namespace) -> bool:
    """Whether time is simulated: for data in a store, or where a flag asks for it."""
    asks = (options.link, options.probe, options.price, options.report, options.curve, options.cores, options.shards)
    is_asked = any(one is not None for one in asks) or options.step_ms or options.num_workers
    return bool(is_asked) or not all(cache.in_place for cache in mixture.reader.caches)


def _simulated(
    mixture: Mixture, part: Part, machine: Machine, options: argparse.Namespace, is_quick: bool = False
) -> list[Simulated]:
    """The training run, and the same on other numbers of nodes, unless that takes too long."""
    found = simulate(part, machine)
    return [found, *(() if is_quick else _curve(mixture, found, machine, options))]


def _serve(mixture: Mixture, options: argparse.Namespace) -> int:
    """Show a page whose sliders change the options, until Ctrl-C."""
    if options.json:
        raise ValueError("--serve shows a page, and prints no JSON: omit --json")
    store, index = mixture.reader.caches[0].store, mixture.reader.indexes[0]

    def drawn(options: argparse.Namespace, is_quick: bool) -> Drawn:
        training, machine = training_of(mixture, options), machine_of(options, store, index)
        part = Part(training, Shards.of(mixture.reader.indexes))
        found, *curve = _simulated(mixture, part, machine, options, is_quick)
        chain = _chain(mixture, training.run, training.plan(), lengths_name(options), options)
        return sections_of(found, curve, str(chain), _quality(part, options))

    link = machine_of(options, store, index).link
    serve_page(_title(mixture), options, link, drawn, partial(print, flush=True))
    return ExitCode.OK


def _title(mixture: Mixture) -> str:
    return f"Simulated: {' + '.join(name.rpartition('/')[2] or name for name in mixture.snapshot.stream_names)}"


def _quality(part: Part, options: argparse.Namespace) -> dict[str, Any]:
    """The shuffle's quality; empty for a budget of tokens, since a perfect shuffle has batches of other sizes."""
    if options.batch_tokens is not None:
        return {}
    training = part.training
    batches = {"batch_size": training.batch_size, "epoch": training.epoch}
    return asdict(measure(training.run, shard_bytes=part.shards.raw_bytes, **batches))


def _downloads(part: Part, options: argparse.Namespace) -> dict[str, Any]:
    """What each node downloads: counted, or estimated for a large epoch or many nodes."""
    found = part.downloads
    about: dict[str, Any] = {
        "download_per_node_bytes": found.num_bytes.tolist(),
        "download_factor": found.factor,
        **({"downloads_are": "estimated"} if found.is_estimated else {}),
    }
    return about if found.warning is None else {**about, "warning": in_flags(found.warning, options.parser)}


def _curve(mixture: Mixture, found: Simulated, machine: Machine, options: argparse.Namespace) -> Iterator[Simulated]:
    """The same for other numbers of nodes, each of which trains on as many samples of a batch."""
    plans_all = lengths_name(options) is not None or options.shuffle_algo in MOSAIC_ALGORITHMS
    if plans_all and options.curve:
        raise ValueError(
            "--curve takes an order that is computed piece by piece; packing, batches by length and the orders of "
            "mosaicml-streaming are planned as a whole for each number of nodes. Omit --curve"
        )
    is_wanted = options.curve is not False and not plans_all and not found.problem
    for nodes in sorted({*_NODES, options.nodes}) if is_wanted else ():
        if nodes == options.nodes:
            yield replace(found, timeline=None)
        elif (training := _scaled(mixture, nodes, options)) is not None:
            part = Part(training, Shards.of(mixture.reader.indexes), QUICK)
            yield replace(simulate(part, machine), timeline=None)


def _scaled(mixture: Mixture, nodes: int, options: argparse.Namespace) -> Training | None:
    """The training run on another number of nodes; None where its order cannot be cut so."""
    ranks, given = nodes * options.devices, options.nodes * options.devices
    if ranks % options.replication or options.global_batch_size * ranks % given:
        return None
    size = options.global_batch_size * ranks // given
    scaled = argparse.Namespace(**{**vars(options), "nodes": nodes, "global_batch_size": size})
    try:
        training = training_of(mixture, scaled)
        return training if training.plan().num_batches else None
    except ValueError:  # e.g. batches that no longer have a sample of each stream
        return None


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


def _cache_need(part: Part, machine: Machine, options: argparse.Namespace) -> dict[str, Any]:
    """What the cache of a node must hold, and whether the loader would refuse its limit."""
    about: dict[str, Any] = {"cache_needed_per_node_bytes": part.cache_need(machine.node).num_bytes}
    if (problem := part.problem(machine.node)) is not None:
        about["cache_warning"] = in_flags(problem, options.parser)
    return about


def _padding_percent(plan: BatchPlan, lengths: NDArray[np.integer]) -> float:
    """The padding of an epoch whose global batches are padded to their longest samples."""
    tokens = padded = 0
    for k in range(plan.num_batches):
        own = lengths[plan.ids(k)]
        tokens, padded = tokens + int(own.sum(dtype=np.int64)), padded + len(own) * int(own.max())
    return 100 * (1 - tokens / max(1, padded))


def _print_simulated(found: Simulated, curve: list[Simulated], options: argparse.Namespace, out: Output) -> None:
    """Print what a training run waits for, with a line for each number of nodes."""
    resumed = (
        "" if found.resume_s is None else f"; {duration(found.resume_s)} after a resume in the middle of the epoch"
    )
    price = "" if found.price_usd is None else f", ${found.price_usd:,.2f}"
    shown = {
        "link": about_link(found.machine.link),
        "first batch": f"{duration(found.first_batch_s)}{resumed}",
        "throughput": f"{found.samples_per_s:,.0f} samples/s, the epoch in {duration(found.epoch_s)}",
        "downloads": f"{readable(found.download_bytes)} in {found.num_requests:,} requests{price}",
    }
    finding = {"waiting": in_flags(found.finding, options.parser)}
    out.show({**shown, **finding} if found.problem is None else finding)
    table = list(zip(*curve_table(curve), strict=True)) if len(curve) > 1 else []
    widths = [max(map(len, column)) for column in table]
    for row in zip(*table, strict=True):
        out.line("  " + "  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True)))
