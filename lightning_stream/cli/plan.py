"""``plan``: what a training run downloads, costs and needs, and what limits its speed, before it is started."""

from __future__ import annotations

import re
import warnings
from argparse import ArgumentParser, ArgumentTypeError, BooleanOptionalAction, Namespace
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning_stream
from lightning_stream.cli.arguments import add_dataset, add_flags, add_mixture, positive, readers_of, whole_number
from lightning_stream.cli.output import ExitCode, Facts, Output
from lightning_stream.formats.sizes import parse_bytes, parse_count
from lightning_stream.order import World
from lightning_stream.questions.describe import duration, readable
from lightning_stream.reading.filters import ids_of
from lightning_stream.reading.length_expression import is_expression
from lightning_stream.reading.stream import Stream
from lightning_stream.shared_files import scratch_folder

if TYPE_CHECKING:
    from lightning_stream.dataset import StreamingDataset
    from lightning_stream.plan import Plan

EXAMPLES = """examples:
  lightning-stream plan s3://bucket/train --batch-size 32 --nodes 2 --devices 8 --num-workers 8 --step-ms 250 \\
      --link latency=20ms,connection=60mb,node=10gbit --sample-ms 4 --cores 64 --price s3-internet
  lightning-stream plan --shards 100000 --shard-bytes 64mb --batch-size 32 --nodes 1,8,64,512 --devices 8
  lightning-stream plan --stream s3://bucket/code=0.3 --stream s3://bucket/text=0.7 --global-batch-size 512
"""
# Arguments of StreamingDataset and StreamingDataLoader, and what they take; their defaults are those of the classes.
_DATASET = {
    "num_canonical_nodes": "N", "window": "N", "shuffle_algo": "NAME", "shuffle_block_size": "N",
    "batching_method": "NAME", "epoch_size": "SAMPLES", "replication": "N", "predownload": "I", "cache_limit": "SIZE",
    "bucket_by": "COLUMN", "batch_tokens": "N", "balance": "COLUMN",
}  # fmt: skip
_LOADER = {"global_batch_size": "N", "batch_size": "N", "accumulate": "N", "num_workers": "I", "tail": "NAME"}
# Flags, and what they are among `Rates`.
_LINK = {"latency": "latency_s", "connection": "connection_bytes_per_s", "node": "node_bytes_per_s",
         "bucket": "bucket_bytes_per_s"}  # fmt: skip
_RATES = {"disk": "disk_bytes_per_s", "cores": "num_cores", "step_ms": "step_s", "sample_ms": "sample_s",
          "unpack_ms": "unpack_s_per_mb"}  # fmt: skip
_PRICE = {"gb": "usd_per_gb", "requests": "usd_per_1000_requests"}
# List prices of 2026 for a GB and for 1,000 requests, from machines in the bucket's region or over the internet.
_PRICES = {
    "s3": "requests=0.0004", "s3-internet": "gb=0.09,requests=0.0004", "gcs": "requests=0.0004",
    "gcs-internet": "gb=0.12,requests=0.0004", "azure": "requests=0.0005",
    "azure-internet": "gb=0.087,requests=0.0005", "r2": "requests=0.00036",
}  # fmt: skip
_FLAGS = {rate: f"--link {name}=" for name, rate in _LINK.items()}
_FLAGS |= {name: f"--{flag.replace('_', '-')}" for flag, name in _RATES.items()}
_FLAGS |= {name: f"--{name.replace('_', '-')}" for name in (*_LOADER, *_DATASET) if "_" in name}
_TIMES = {"ms": 1e-3, "s": 1.0}
_SPEEDS = {"kb": 1e3, "mb": 1e6, "gb": 1e9, "mbit": 1e6 / 8, "gbit": 1e9 / 8}
_VALUE = re.compile(r"([0-9]*\.?[0-9]+)([a-z]+)")
_ENTRY = (
    '{"column_encodings":["bytes"],"column_names":["sample"],"column_sizes":[null],"compression":null,"format":"mds",'
    '"hashes":[],"raw_data":{"basename":"shard.%d.mds","bytes":%d,"hashes":{}},"samples":%d,"size_limit":%d,'
    '"version":2,"zip_data":null}'
)


def add_arguments(parser: ArgumentParser) -> None:
    """Add the arguments of ``plan``."""
    add_dataset(parser, nargs="?")
    add_mixture(parser)
    imagined = parser.add_argument_group("a dataset that does not exist yet, instead of PATH|URL")
    add_flags(imagined, {
        "--shards N": "its shards",
        "--shard-bytes SIZE": "bytes of each, e.g. 64mb",
        "--samples-per-shard N": "default: 1000",
    })  # fmt: skip
    training = parser.add_argument_group("training run")
    add_flags(training, {
        "--nodes N,...": "machines: a number, or several to compare, e.g. 1,8,64 (default: 1)",
        "--devices N": "devices of each (default: 1)",
    }, **{"N,...": _counts})  # fmt: skip
    known = parser.add_argument_group("what is known of the store and of each node; what is omitted limits nothing")
    rates = "latency=20ms, and rates a second: connection=60mb,node=10gbit,bucket=50gb"
    prices = f"list prices of 2026: {', '.join(_PRICES)}; or gb=0.09,requests=0.0004, in dollars (of 1,000)"
    add_flags(known, {
        "--link NAME=VALUE,...": f"{rates}; `doctor URL --read` measures them",
        "--disk RATE": "what a node writes to its cache, e.g. 1gb a second",
        "--cores N": "cores of a node that workers may use",
        "--step-ms F": "an optimizer step, without its data",
        "--sample-ms F": "reading, decoding and transforming a sample on one core, see `doctor URL --read`",
        "--unpack-ms F": "verifying and decompressing 1 MB of a shard on one core",
        "--price NAME": prices,
    }, **{"NAME=VALUE,...": _link, "RATE": _speed, "NAME": _price})  # fmt: skip
    same = parser.add_argument_group("arguments of StreamingDataset and StreamingDataLoader, by their names")
    same.add_argument("--shuffle", action=BooleanOptionalAction, default=True, help="default: --shuffle")
    text = (
        "pack documents of this column into rows of so many tokens (default: 2048), or whole samples by an expression "
        "of lengths; batches then count rows"
    )
    named = {f"--{name.replace('_', '-')} {kind}": "" for name, kind in {**_LOADER, **_DATASET}.items()}
    add_flags(same, {**named, "--pack COLUMN[=TOKENS]": text}, **{"COLUMN[=TOKENS]": str})
    parser.set_defaults(samples_per_shard=1000, nodes=[1], devices=1, link={}, price={})


def run(options: Namespace, out: Output) -> int:
    """Plan every dataset at the path or URL, or the mixture of the streams; print after all succeeded."""
    if [options.remote is not None, bool(options.stream), options.shards is not None].count(True) != 1:
        raise ValueError("plan takes one of PATH|URL, --stream URL[=WEIGHT] for each of a mixture, and --shards")
    if (options.shards is None) != (options.shard_bytes is None):
        raise ValueError("--shards needs the size of each, e.g. --shard-bytes 64mb, and no other dataset has that flag")
    if not (options.batch_size or options.global_batch_size or options.batch_tokens):
        raise ValueError("pass --batch-size N, of a device, or --global-batch-size N, of an optimizer step")
    planned = {}
    with scratch_folder() as folder:
        for name, streams in _datasets(options, folder).items():
            dataset = _dataset(streams, options)
            planned[name] = [_plan(dataset, nodes, options) for nodes in options.nodes]
    for name, plans in planned.items():
        out.line(name)
        _print(plans, options, out)
    out.data = {
        "datasets": [{"name": name, "plans": [plan.to_json() for plan in plans]} for name, plans in planned.items()]
    }
    return ExitCode.OK


def _datasets(options: Namespace, folder: str) -> dict[str, list[Stream]]:
    """The streams of each dataset by its name, to be read as if each were in a store: local data, too."""
    if options.shards is not None:
        return _imagined(options, folder)
    datasets: dict[str, list[Stream]] = {}
    for reader in readers_of(options.stream or [options.remote], options, folder):
        name = " + ".join(reader.snapshot.stream_names)
        datasets[name] = list(reader.streams)
        for place, stream in enumerate(datasets[name]):
            stream.local = f"{folder}/cache/{len(datasets)}/{place}"
    return datasets


def _imagined(options: Namespace, folder: str) -> dict[str, list[Stream]]:
    """A dataset that has an index alone."""
    size = parse_bytes(options.shard_bytes, "shard_bytes")
    entries = ",".join(_ENTRY % (shard, size, options.samples_per_shard, size) for shard in range(options.shards))
    (Path(folder) / "index.json").write_text(f'{{"version":2,"shards":[{entries}]}}')
    name = f"{options.shards:,} shards of {readable(size)}, {options.samples_per_shard:,} samples each"
    return {name: [Stream(folder, local=f"{folder}/cache")]}


def _dataset(streams: Sequence[Stream], options: Namespace) -> StreamingDataset:
    name, _, length = (options.pack or "").partition("=")
    what = "lengths" if is_expression(name) else "column"
    rows: dict[str, Any] = {what: name, "row_length": parse_count(length or 2048, "pack")} if name else {}
    return lightning_stream.StreamingDataset(  # imports torch, or raises an error that names the extra
        streams=streams,
        shuffle=options.shuffle,
        filter={"lengths": options.filter_lengths, "exclude_ids": options.exclude_ids},
        forget=None if options.forget is None else ids_of(options.forget),
        pack=lightning_stream.Packing(**rows) if rows else None,
        **_passed(options, _DATASET),
    )


def _plan(dataset: StreamingDataset, num_nodes: int, options: Namespace) -> Plan:
    from lightning_stream.plan import Rates, plan

    world = World(0, num_nodes * options.devices, options.devices, options.replication or 1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch counts the cores of this machine
        loader = lightning_stream.StreamingDataLoader(dataset, world=world, **_passed(options, _LOADER))
    rates = {
        _RATES[flag]: value / (1000 if flag.endswith("_ms") else 1) for flag, value in _passed(options, _RATES).items()
    }
    return plan(loader, Rates(**options.link, **options.price, **rates))


def _passed(options: Namespace, names: Mapping[str, Any]) -> dict[str, Any]:
    """The options of these names that were passed."""
    return {name: value for name, value in vars(options).items() if name in names and value is not None}


def _counts(text: str) -> list[int]:
    return sorted(set(map(whole_number, text.split(","))))


def _link(text: str) -> dict[str, float]:
    """The rates of ``latency=20ms,connection=60mb``; ArgumentTypeError for other text."""
    rates = {}
    for name, value in _pairs(text):
        if name not in _LINK:
            raise ArgumentTypeError(f"takes {', '.join(_LINK)}, each with =VALUE; found {name!r}")
        rates[_LINK[name]] = _measure(value, _TIMES, "20ms") if name == "latency" else _speed(value)
    return rates


def _price(text: str) -> dict[str, float]:
    """The prices of a name, or of ``gb=0.09,requests=0.0004``; ArgumentTypeError for other text."""
    with suppress(KeyError):
        return {_PRICE[name]: positive(value) for name, value in _pairs(_PRICES.get(text, text))}
    raise ArgumentTypeError(f"takes {', '.join(_PRICES)}, or gb=0.09,requests=0.0004; found {text!r}")


def _pairs(text: str) -> list[tuple[str, str]]:
    return [(name.strip(), value.strip()) for name, _, value in (pair.partition("=") for pair in text.split(","))]


def _speed(text: str) -> float:
    return _measure(text, _SPEEDS, "60mb or 10gbit")


def _measure(text: str, units: Mapping[str, float], example: str) -> float:
    """A number with its unit; ArgumentTypeError for other text."""
    match = _VALUE.fullmatch(text.lower())
    if match is None or match[2] not in units or not float(match[1]):
        known = ", ".join(units)
        raise ArgumentTypeError(f"takes a number with a unit ({known}), e.g. {example}; found {text!r}")
    return float(match[1]) * units[match[2]]


def _print(plans: Sequence[Plan], options: Namespace, out: Output) -> None:
    """Print what limits the run, then what each resource allows, then what the run needs."""
    plan = plans[0]
    at_most = {
        bound.resource: f"{bound.samples_per_s:>12,.0f} samples/s  {_in_flags(bound.why)}"
        for bound in plan.bounds
        if bound.samples_per_s
    }
    unknown = [bound for bound in plan.bounds if bound.samples_per_s is None]
    reasons = [f"{bound.resource} ({bound.why.removeprefix('not given: ')})" for bound in unknown]
    facts = {
        "limit": _in_flags(plan.finding),
        "warning": _in_flags(plan.warning or ""),
        "at most": at_most,
        "not given": _in_flags("; ".join(reasons)),
    }
    out.show({name: fact for name, fact in facts.items() if fact} | _needs(plan, options))
    if len(plans) > 1:
        out.table("compared", [_compared(plan) for plan in plans])


def _needs(plan: Plan, options: Namespace) -> dict[str, str]:
    """What is known of a plan beside its bounds."""
    mean = plan.num_samples / plan.num_steps if options.batch_tokens else plan.global_batch_size
    price = f"; ${plan.price_usd:,.2f}" if options.price else ""
    needs = {
        "nodes x devices": f"{plan.num_nodes:,} x {options.devices:,}",
        "epoch": f"{plan.num_steps:,} global batches of {mean:,.0f} {'rows' if options.pack else 'samples'}",
        "downloads": f"{readable(plan.download_bytes)} in {plan.num_requests:,} requests{price}",
        "download factor": f"{plan.download_factor:.2f}{' (an estimate)' * plan.is_estimated}",
        "busiest node": f"{readable(plan.busiest_node_bytes)} to download",
        "later epochs": f"{readable(plan.later_bytes)} or more to download in each"
        if plan.later_bytes
        else "no downloads",
        "cache": f"{readable(plan.cache_bytes)} needed on each node",
    }
    if plan.later_bound is not None and plan.later_bound.samples_per_s:
        needs["later epochs"] += (
            f"; at most {plan.later_bound.samples_per_s:,.0f} samples/s ({plan.later_bound.resource})"
        )
    if plan.first_batch_s is not None:
        needs["first batch"] = f"about {duration(plan.first_batch_s)} after the start of the processes"
    needs["planning"] = f"{duration(plan.planning_s)} before the first batch"
    if plan.quality is not None:
        needs["shuffle quality"] = f"{plan.quality.mean:.0f} of 100; a perfect shuffle has {plan.quality.random:.0f}"
    if plan.rank_costs is not None:
        needs["costliest rank"] = "{1:.3f} times the mean; {0:.3f} without the balance".format(*plan.rank_costs)
    return needs


def _compared(plan: Plan) -> Facts:
    """A row of the table of several numbers of nodes."""
    limit = plan.limit
    return {
        "nodes": plan.num_nodes,
        "batch": plan.global_batch_size,
        "samples_per_s": "" if limit is None else f"{limit.samples_per_s:,.0f}",
        "download_bytes": plan.download_bytes,
        "factor": f"{plan.download_factor:.2f}",
        "a node_bytes": plan.busiest_node_bytes,
        "price": f"${plan.price_usd:,.2f}" if plan.price_usd else "",
        "cache_bytes": plan.cache_bytes,
        "limit": "unknown" if limit is None else limit.resource,
    }


def _in_flags(text: str) -> str:
    """A text with the flags for the names of rates and arguments."""
    for name, flag in _FLAGS.items():
        text = text.replace(name, flag)
    return text
