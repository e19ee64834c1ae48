"""``plan``: what a training run downloads, costs and needs, and what limits its speed, before it is started."""

from __future__ import annotations

import argparse
import math
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning_stream
from lightning_stream.cli.arguments import (
    add_dataset,
    add_reading,
    add_rules,
    add_store_options,
    add_streams,
    readers_of,
)
from lightning_stream.cli.output import ExitCode, Output
from lightning_stream.formats.sizes import parse_bytes, parse_count
from lightning_stream.order import World
from lightning_stream.order.chain import readable
from lightning_stream.reading.filters import ids_of
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
# Arguments of StreamingDataset and StreamingDataLoader by kind; their defaults are those of the classes.
_DATASET = {
    "num_canonical_nodes": int, "window": int, "shuffle_algo": str, "shuffle_block_size": int, "batching_method": str,
    "epoch_size": str, "replication": int, "predownload": int, "cache_limit": str, "bucket_by": str,
    "batch_tokens": int, "balance": str,
}  # fmt: skip
_LOADER = {"global_batch_size": int, "batch_size": int, "accumulate": int, "num_workers": int, "tail": str}
_LINK = {"latency": "latency_s", "connection": "connection_bytes_per_s", "node": "node_bytes_per_s",
         "bucket": "bucket_bytes_per_s"}  # fmt: skip
_PRICE = {"gb": "usd_per_gb", "requests": "usd_per_1000_requests"}
# List prices of 2026 for a GB and for 1,000 requests, from machines in the bucket's region or over the internet.
_PRICES = {
    "s3": (0.0, 0.0004), "s3-internet": (0.09, 0.0004), "gcs": (0.0, 0.0004), "gcs-internet": (0.12, 0.0004),
    "azure": (0.0, 0.0005), "azure-internet": (0.087, 0.0005), "r2": (0.0, 0.00036),
}  # fmt: skip
_RATES = {name: f"--link {short}=" for short, name in _LINK.items()}
_RATES |= {"disk_bytes_per_s": "--disk", "step_s": "--step-ms", "sample_s": "--sample-ms"}
_RATES |= {"unpack_s_per_mb": "--unpack-ms", "num_cores": "--cores"}
_FLAGS = _RATES | {name: f"--{name.replace('_', '-')}" for name in (*_LOADER, *_DATASET) if "_" in name}
_UNITS = {"ms": 1e-3, "s": 1.0, "kb": 1e3, "mb": 1e6, "gb": 1e9, "mbit": 1e6 / 8, "gbit": 1e9 / 8}
_MISSING = "not given: "
_ROW = "  {:>5} {:>9} {:>11} {:>10} {:>7} {:>9} {:>11} {:>9}  {}"
_VALUE = re.compile(r"([0-9]*\.?[0-9]+)([a-z]+)")
_ENTRY = (
    '{"column_encodings":["bytes"],"column_names":["sample"],"column_sizes":[null],"compression":null,"format":"mds",'
    '"hashes":[],"raw_data":{"basename":"shard.%d.mds","bytes":%d,"hashes":{}},"samples":%d,"size_limit":%d,'
    '"version":2,"zip_data":null}'
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``plan``."""
    add_dataset(parser, nargs="?")
    add_streams(parser)
    add_reading(parser)
    imagined = parser.add_argument_group("a dataset that does not exist yet, instead of PATH|URL")
    imagined.add_argument("--shards", type=_count, metavar="N", help="its shards")
    imagined.add_argument("--shard-bytes", metavar="SIZE", help="bytes of each, e.g. 64mb")
    imagined.add_argument("--samples-per-shard", type=_count, default=1000, metavar="N", help="default: 1000")
    training = parser.add_argument_group("training run")
    text = "machines: a number, or several to compare, e.g. 1,8,64 (default: 1)"
    training.add_argument("--nodes", type=_counts, default=[1], metavar="N,...", help=text)
    training.add_argument("--devices", type=_count, default=1, metavar="N", help="devices of each (default: 1)")
    known = parser.add_argument_group("what is known of the store and of each node; what is omitted limits nothing")
    text = (
        "latency=20ms, and rates a second: connection=60mb,node=10gbit,bucket=50gb; `doctor URL --read` measures them"
    )
    known.add_argument("--link", type=_link, default={}, metavar="NAME=VALUE,...", help=text)
    known.add_argument(
        "--disk",
        dest="disk_bytes_per_s",
        type=_rate,
        metavar="RATE",
        help="what a node writes to its cache, e.g. 1gb a second",
    )
    known.add_argument(
        "--cores", dest="num_cores", type=_count, metavar="N", help="cores of a node that workers may use"
    )
    known.add_argument(
        "--step-ms", dest="step_s", type=_seconds, metavar="MS", help="an optimizer step, without its data"
    )
    text = "reading, decoding and transforming a sample on one core, see `doctor URL --read`"
    known.add_argument("--sample-ms", dest="sample_s", type=_seconds, metavar="MS", help=text)
    text = "verifying and decompressing 1 MB of a shard on one core"
    known.add_argument("--unpack-ms", dest="unpack_s_per_mb", type=_seconds, metavar="MS", help=text)
    text = f"list prices of 2026: {', '.join(_PRICES)}; or gb=0.09,requests=0.0004: dollars for a GB and 1,000 requests"
    known.add_argument("--price", type=_price, default={}, metavar="NAME", help=text)
    same = parser.add_argument_group("arguments of StreamingDataset and StreamingDataLoader, by their names")
    same.add_argument("--shuffle", action=argparse.BooleanOptionalAction, default=True, help="default: --shuffle")
    for name, kind in {**_LOADER, **_DATASET}.items():
        same.add_argument(f"--{name.replace('_', '-')}", type=kind, metavar="N" if kind is int else "VALUE")
    text = "pack documents of this column into rows of so many tokens (default: 2048); batches then count rows"
    same.add_argument("--pack", metavar="COLUMN[=TOKENS]", help=text)
    add_rules(parser)
    add_store_options(parser)


def run(options: argparse.Namespace, out: Output) -> int:
    """Plan every dataset at the path or URL, or the mixture of the streams; print after all succeeded."""
    if [options.remote is not None, bool(options.stream), options.shards is not None].count(True) != 1:
        raise ValueError("plan takes one of PATH|URL, --stream URL[=WEIGHT] for each of a mixture, and --shards")
    found = {}
    with scratch_folder() as folder:
        for name, streams in _datasets(options, folder).items():
            dataset = _dataset(streams, options)
            found[name] = [_plan(dataset, nodes, options) for nodes in options.nodes]
    for name, plans in found.items():
        out.line(name)
        _print(plans, options, out)
    out.data = {
        "datasets": [{"name": name, "plans": [one.to_json() for one in plans]} for name, plans in found.items()]
    }
    return ExitCode.OK


def _datasets(options: argparse.Namespace, folder: str) -> dict[str, list[Stream]]:
    """The streams of each dataset by its name, to be read as if each were in a store: local data, too."""
    if options.shards is not None:
        return _imagined(options, folder)
    found: dict[str, list[Stream]] = {}
    for reader in readers_of(options.stream or [options.remote], options, folder):
        name = " + ".join(reader.snapshot.stream_names)
        found[name] = list(reader.streams)
        for number, stream in enumerate(found[name]):
            stream.local = f"{folder}/cache/{len(found)}/{number}"
    return found


def _imagined(options: argparse.Namespace, folder: str) -> dict[str, list[Stream]]:
    """A dataset that has an index alone."""
    if options.shard_bytes is None:
        raise ValueError("--shards needs the size of each, e.g. --shard-bytes 64mb")
    size = parse_bytes(options.shard_bytes, "shard_bytes")
    entries = ",".join(_ENTRY % (number, size, options.samples_per_shard, size) for number in range(options.shards))
    (Path(folder) / "index.json").write_text(f'{{"version":2,"shards":[{entries}]}}')
    name = f"{options.shards:,} shards of {readable(size)}, {options.samples_per_shard:,} samples each"
    return {name: [Stream(folder, local=f"{folder}/cache")]}


def _dataset(streams: Sequence[Stream], options: argparse.Namespace) -> StreamingDataset:
    column, _, length = (options.pack or "").partition("=")
    return lightning_stream.StreamingDataset(  # imports torch, or raises an error that names the extra
        streams=streams,
        shuffle=options.shuffle,
        filter_lengths=options.filter_lengths,
        exclude_ids=options.exclude_ids,
        forget=None if options.forget is None else ids_of(options.forget),
        pack=lightning_stream.Packing(column, parse_count(length or 2048, "pack")) if column else None,
        **_given(options, _DATASET),
    )


def _plan(dataset: StreamingDataset, num_nodes: int, options: argparse.Namespace) -> Plan:
    from lightning_stream.plan import Rates, plan

    world = World(0, num_nodes * options.devices, options.devices, options.replication or 1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch counts the cores of this machine
        loader = lightning_stream.StreamingDataLoader(dataset, world=world, **_given(options, _LOADER))
    return plan(loader, Rates(**options.link, **options.price, **_given(options, _RATES)))


def _given(options: argparse.Namespace, names: Mapping[str, Any]) -> dict[str, Any]:
    """The options of these names that were passed."""
    return {name: value for name, value in vars(options).items() if name in names and value is not None}


def _price(text: str) -> dict[str, float]:
    """The prices of a name, or of ``gb=0.09,requests=0.0004``; ArgumentTypeError for other text."""
    if text in _PRICES:
        return dict(zip(_PRICE.values(), _PRICES[text], strict=True))
    with suppress(KeyError):
        return {_PRICE[name]: _number(value) for name, value in _pairs(text)}
    raise argparse.ArgumentTypeError(f"takes {', '.join(_PRICES)}, or gb=0.09,requests=0.0004; found {text!r}")


def _number(text: str, kind: Any = float) -> Any:
    """A number above 0; ArgumentTypeError for other text."""
    with suppress(ValueError):
        if 0 < kind(text) < math.inf:
            return kind(text)
    raise argparse.ArgumentTypeError(f"takes a {'whole ' if kind is int else ''}number above 0; found {text!r}")


def _seconds(text: str) -> float:
    return float(_number(text)) / 1000


def _count(text: str) -> int:
    return int(_number(text, int))


def _counts(text: str) -> list[int]:
    return sorted(set(map(_count, text.split(","))))


def _link(text: str) -> dict[str, float]:
    """The rates of ``latency=20ms,connection=60mb``; ArgumentTypeError for other text."""
    found = {}
    for name, value in _pairs(text):
        if name not in _LINK:
            raise argparse.ArgumentTypeError(f"takes {', '.join(_LINK)}, each with =VALUE; found {name!r}")
        found[_LINK[name]] = _rate(value, is_time=name == "latency")
    return found


def _rate(text: str, is_time: bool = False) -> float:
    """A rate or a time with its unit, all decimal; ArgumentTypeError for other text."""
    match = _VALUE.fullmatch(text.lower())
    units = [unit for unit in _UNITS if unit.endswith("s") is is_time]
    if match is None or match[2] not in units or not float(match[1]):
        example = "20ms" if is_time else "60mb or 10gbit"
        raise argparse.ArgumentTypeError(
            f"takes a number with a unit ({', '.join(units)}), e.g. {example}; found {text!r}"
        )
    return float(match[1]) * _UNITS[match[2]]


def _pairs(text: str) -> list[tuple[str, str]]:
    return [(name.strip(), value.strip()) for name, _, value in (pair.partition("=") for pair in text.split(","))]


def _print(plans: Sequence[Plan], options: argparse.Namespace, out: Output) -> None:
    plan = plans[0]
    why = {bound.resource: _in_flags(bound.why) for bound in plan.bounds}
    rates = {bound.resource: bound.samples_per_s for bound in plan.bounds}
    bounds = {name: f"{rate:>12,.0f} samples/s  {why[name]}" for name, rate in rates.items() if rate is not None}
    others = [f"{name} ({why[name].removeprefix(_MISSING)})" for name, rate in rates.items() if rate is None]
    out.show({"limit": _in_flags(plan.finding), **({"at most": bounds} if bounds else {})})
    out.show({"not given": "; ".join(others) or "nothing", **_about(plan, options)})
    if plan.warning is not None:
        out.show({"warning": _in_flags(plan.warning)})
    for cells in _compared(plans) if len(plans) > 1 else ():
        out.line(_ROW.format(*cells))


def _about(plan: Plan, options: argparse.Namespace) -> dict[str, str]:
    """What is known of a plan beside its bounds."""
    from lightning_stream.plan import duration

    mean = plan.num_samples / plan.num_steps if options.batch_tokens else plan.global_batch_size
    size = f"{mean:,.0f} {'samples' if options.pack is None else 'rows'}"
    price = f"${plan.price_usd:,.2f}" if options.price else "no --price given"
    later = f"{readable(plan.later_bytes)} or more to download in each" if plan.later_bytes else "nothing to download"
    about = {
        "batches": f"{plan.num_steps:,} of {size} on {plan.num_nodes:,} x {options.devices:,} devices",
        "downloads": f"{readable(plan.download_bytes)} in {plan.num_requests:,} requests; {price}",
        "download factor": f"{plan.download_factor:.2f}{' (an estimate)' * plan.is_estimated}",
        "busiest node": readable(plan.busiest_node_bytes),
        "later epochs": later,
        "cache": f"{readable(plan.cache_bytes)} needed on each node",
        "planning": f"{duration(plan.planning_s)} to compute the order",
    }
    if plan.later_bound is not None:
        about["later epochs"] += (
            f"; at most {plan.later_bound.samples_per_s:,.0f} samples/s ({plan.later_bound.resource})"
        )
    if plan.first_batch_s is not None:
        about["first batch"] = f"after about {duration(plan.first_batch_s)} (an estimate), and the start of processes"
    if plan.quality is not None:
        about["shuffle quality"] = f"{plan.quality.mean:.0f} of 100; a perfect shuffle has {plan.quality.random:.0f}"
    if plan.rank_costs is not None:
        about["costliest rank"] = "{:.3f} times the mean; {:.3f} without the balance".format(*plan.rank_costs[::-1])
    return about


def _compared(plans: Sequence[Plan]) -> Iterator[tuple[str, ...]]:
    """A row for each number of nodes, below a head."""
    yield "nodes", "batch", "samples/s", "downloads", "factor", "a node", "price", "cache", "limit"
    for plan in plans:
        limit = plan.limit
        rate = "" if limit is None else f"{limit.samples_per_s:,.0f}"
        price = f"${plan.price_usd:,.2f}" if plan.price_usd else ""
        sizes = readable(plan.download_bytes), f"{plan.download_factor:.2f}", readable(plan.busiest_node_bytes)
        name = "unknown" if limit is None else limit.resource
        yield (
            f"{plan.num_nodes:,}",
            f"{plan.global_batch_size:,}",
            rate,
            *sizes,
            price,
            readable(plan.cache_bytes),
            name,
        )


def _in_flags(text: str) -> str:
    """A text with the flags for the names of rates and arguments."""
    for name, flag in _FLAGS.items():
        text = text.replace(name, flag)
    return text
