"""``plan``: what a training run downloads, costs and needs, and what limits its speed, before it is started."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_stream.cli.arguments import (
    add_dataset,
    add_reading,
    add_rules,
    add_store_options,
    add_streams,
    mixtures_of,
)
from lightning_stream.cli.output import ExitCode, Output, in_flags
from lightning_stream.formats.sizes import parse_bytes
from lightning_stream.order import World
from lightning_stream.order.chain import readable
from lightning_stream.reading.filters import ids_of
from lightning_stream.reading.stream import Stream
from lightning_stream.shared_files import scratch_folder

if TYPE_CHECKING:
    from lightning_stream.dataset import StreamingDataset
    from lightning_stream.plan import Bound, Plan, Prices, Rates

HELP = "plan a training run: downloads, price, cache and shuffle, and what limits its speed"
EXAMPLES = """examples:
  lightning-stream plan s3://bucket/train --batch-size 32 --nodes 2 --devices 8 --num-workers 8 --step-ms 250 \\
      --link latency=20ms,connection=60mb,node=10gbit --sample-ms 4 --cores 64 --price s3-internet
  lightning-stream plan --shards 100000 --shard-bytes 64mb --batch-size 32 --nodes 1,8,64,512 --devices 8
  lightning-stream plan --stream s3://bucket/code=0.3 --stream s3://bucket/text=0.7 --global-batch-size 512
"""
# Of StreamingDataset and StreamingDataLoader, by kind; their defaults are those of the classes.
_DATASET = {
    "num_canonical_nodes": int, "window": int, "shuffle_seed": int, "shuffle_algo": str, "shuffle_block_size": int,
    "batching_method": str, "epoch_size": str, "replication": int, "predownload": int, "cache_limit": str,
    "bucket_by": str, "bucket_window": int, "batch_tokens": int, "batch_multiple": int, "balance": str,
}  # fmt: skip
_LOADER = {
    "global_batch_size": int, "batch_size": int, "accumulate": int, "num_workers": int, "prefetch_factor": int,
    "tail": str,
}  # fmt: skip
_LINK = {"latency": "latency_s", "connection": "connection_bytes_per_s", "node": "node_bytes_per_s",
         "bucket": "bucket_bytes_per_s"}  # fmt: skip
_PRICE = {"gb": "per_gb", "requests": "per_1000_requests"}
_FLAGS = {name: f"--link {short}=" for short, name in _LINK.items()}
_FLAGS |= {"disk_bytes_per_s": "--disk", "step_s": "--step-ms", "sample_s": "--sample-ms"}
_FLAGS |= {"unpack_s_per_mb": "--unpack-ms", "num_cores": "--cores"}
_UNITS = {"ms": 1e-3, "s": 1.0, "kb": 1e3, "mb": 1e6, "gb": 1e9, "mbit": 1e6 / 8, "gbit": 1e9 / 8}
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
    imagined.add_argument("--shards", type=int, metavar="N", help="its shards")
    imagined.add_argument("--shard-bytes", metavar="SIZE", help="bytes of each, e.g. 64mb")
    imagined.add_argument("--samples-per-shard", type=int, default=1000, metavar="N", help="default: 1000")
    training = parser.add_argument_group("training run")
    text = "machines, e.g. 8; or several numbers to compare, e.g. 1,8,64 (default: 1)"
    training.add_argument("--nodes", type=_numbers, default=[1], metavar="N,...", help=text)
    training.add_argument("--devices", type=int, default=1, metavar="N", help="devices of each (default: 1)")
    known = parser.add_argument_group("what is known of the store and of each node: nothing is assumed for the others")
    text = "rates a second: latency=20ms,connection=60mb,node=10gbit,bucket=50gb; `doctor URL --read` measures them"
    known.add_argument("--link", type=_link, default={}, metavar="NAME=VALUE,...", help=text)
    known.add_argument(
        "--disk", type=_rate, metavar="RATE", help="what the disk of the cache writes a second, e.g. 1gb"
    )
    known.add_argument("--cores", type=int, metavar="N", help="cores of a node that workers may use")
    known.add_argument("--step-ms", type=float, metavar="MS", help="an optimizer step, without its data")
    text = "reading, decoding and transforming a sample on one core; print(loader.stats()) has it"
    known.add_argument("--sample-ms", type=float, metavar="MS", help=text)
    text = "verifying and decompressing 1 MB of a shard on one core"
    known.add_argument("--unpack-ms", type=float, metavar="MS", help=text)
    text = (
        "list prices of 2026 of s3, gcs, azure (or with -internet) or r2; or gb=0.09,requests=0.0004: dollars for a GB "
    )
    known.add_argument("--price", metavar="NAME", help=f"{text}and for 1,000 requests")
    same = parser.add_argument_group("arguments of StreamingDataset and StreamingDataLoader, by their names")
    same.add_argument("--shuffle", action=argparse.BooleanOptionalAction, default=True, help="default: --shuffle")
    for name, kind in {**_LOADER, **_DATASET}.items():
        same.add_argument(f"--{name.replace('_', '-')}", type=kind, metavar="N" if kind is int else "VALUE")
    same.add_argument(
        "--pack", metavar="COLUMN", help="pack documents of this column into rows; batches count rows then"
    )
    same.add_argument("--row-length", type=int, metavar="N", help="tokens of a row (default: 2048)")
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
        _print(plans, options.parser, out)
    out.data = {
        "datasets": [{"name": name, "plans": [one.to_json() for one in plans]} for name, plans in found.items()]
    }
    return ExitCode.OK


def _datasets(options: argparse.Namespace, folder: str) -> dict[str, list[Stream]]:
    """The streams of each dataset by its name, to be read as if each were in a store: local data, too."""
    if options.shards is not None:
        return _imagined(options, folder)
    found: dict[str, list[Stream]] = {}
    for mixture in mixtures_of(options.stream or [options.remote], options, folder):
        name = " + ".join(mixture.snapshot.stream_names)
        found[name] = list(mixture.reader.streams)
        for number, stream in enumerate(found[name]):
            stream.local = f"{folder}/cache/{len(found)}/{number}"
    return found


def _imagined(options: argparse.Namespace, folder: str) -> dict[str, list[Stream]]:
    """A dataset that has an index alone."""
    if options.shard_bytes is None:
        raise ValueError("--shards needs the size of each, e.g. --shard-bytes 64mb")
    if min(options.shards, options.samples_per_shard) < 1:
        raise ValueError("--shards and --samples-per-shard are at least 1")
    size = parse_bytes(options.shard_bytes, "shard_bytes")
    entries = ",".join(_ENTRY % (number, size, options.samples_per_shard, size) for number in range(options.shards))
    (Path(folder) / "index.json").write_text(f'{{"version":2,"shards":[{entries}]}}')
    name = f"{options.shards:,} shards of {readable(size)}, {options.samples_per_shard:,} samples each"
    return {name: [Stream(folder, local=f"{folder}/cache")]}


def _dataset(streams: Sequence[Stream], options: argparse.Namespace) -> StreamingDataset:
    from lightning_stream.dataset import StreamingDataset
    from lightning_stream.loading.packing import Packing

    if options.row_length is not None and options.pack is None:
        raise ValueError("rows are packed from the lengths of a column: pass --pack, e.g. --pack tokens")
    length = {} if options.row_length is None else {"row_length": options.row_length}
    return StreamingDataset(
        streams=streams,
        shuffle=options.shuffle,
        filter_lengths=options.filter_lengths,
        exclude_ids=options.exclude_ids,
        forget=None if options.forget is None else ids_of(options.forget),
        pack=None if options.pack is None else Packing(options.pack, **length),
        **_given(options, _DATASET),
    )


def _plan(dataset: StreamingDataset, num_nodes: int, options: argparse.Namespace) -> Plan:
    from lightning_stream.loader import StreamingDataLoader
    from lightning_stream.plan import plan

    world = World(0, num_nodes * options.devices, options.devices, options.replication or 1)
    loader = StreamingDataLoader(dataset, world=world, **_given(options, _LOADER))
    return plan(loader, _rates(options), _prices(options.price))


def _given(options: argparse.Namespace, names: Mapping[str, Any]) -> dict[str, Any]:
    """The options of these names that were passed."""
    return {name: value for name, value in vars(options).items() if name in names and value is not None}


def _rates(options: argparse.Namespace) -> Rates:
    from lightning_stream.plan import Rates

    times = {"step_s": options.step_ms, "sample_s": options.sample_ms, "unpack_s_per_mb": options.unpack_ms}
    seconds = {name: None if value is None else value / 1000 for name, value in times.items()}
    return Rates(**options.link, **seconds, disk_bytes_per_s=options.disk, num_cores=options.cores)


def _prices(text: str | None) -> Prices | None:
    from lightning_stream.plan import PRICES, Prices

    if text is None or text in PRICES:
        return None if text is None else PRICES[text]
    rule = f"--price takes {', '.join(PRICES)}, or e.g. gb=0.09,requests=0.0004; found {text!r}"
    try:
        return Prices(**{_PRICE[name]: float(value) for name, value in _pairs(text)})
    except (KeyError, ValueError) as error:
        raise ValueError(rule) from error


def _numbers(text: str) -> list[int]:
    """Whole numbers between commas; ArgumentTypeError for others."""
    numbers = text.replace(",", " ").split()
    if not numbers or not all(number.isdecimal() and int(number) for number in numbers):
        raise argparse.ArgumentTypeError(f"takes numbers of machines, e.g. 8 or 1,8,64; found {text!r}")
    return sorted({int(number) for number in numbers})


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
    if match is None or match[2] not in units:
        example = "20ms" if is_time else "60mb or 10gbit"
        raise argparse.ArgumentTypeError(
            f"takes a number with a unit ({', '.join(units)}), e.g. {example}; found {text!r}"
        )
    return float(match[1]) * _UNITS[match[2]]


def _pairs(text: str) -> list[tuple[str, str]]:
    return [(name.strip(), value.strip()) for name, _, value in (pair.partition("=") for pair in text.split(","))]


def _print(plans: Sequence[Plan], parser: argparse.ArgumentParser, out: Output) -> None:
    plan = plans[0]
    out.show({"finding": in_flags(plan.finding, parser)})
    rows: list[tuple[str, ...]] = [("at most", "samples/s", "because")]
    for bound in plan.bounds:
        mark = "> " if bound == plan.limit else "  "
        rows.append((f"{mark}{bound.resource}", _rate_text(bound), _in_flags(bound.why, parser)))
    _print_table(rows, out)
    out.show(_about(plan, parser))
    if len(plans) > 1:
        _print_table(_curve(plans), out)


def _print_table(rows: Sequence[Sequence[str]], out: Output) -> None:
    """Print rows; all columns but the first and the last are aligned on the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for first, *cells, last in rows:
        middle = [f"{cell:>{width}}" for cell, width in zip(cells, widths[1:-1], strict=True)]
        out.line("  ".join([f"  {first:<{widths[0]}}", *middle, last]))


def _about(plan: Plan, parser: argparse.ArgumentParser) -> dict[str, str]:
    """Everything but the bounds, as text."""
    from lightning_stream.plan import duration

    estimated = ", estimated" if plan.is_estimated else ""
    later = readable(plan.later_bytes) if plan.later_bytes else "nothing"
    found = {
        "training": f"{plan.num_steps:,} steps of {plan.global_batch_size:,} samples on {plan.num_nodes:,} nodes",
        "downloads": f"{readable(plan.download_bytes)}, {readable(plan.busiest_node_bytes)} of it on the busiest node; "
        f"{plan.download_factor:.2f} times the data{estimated}",
        "requests": f"{plan.num_requests:,}",
        "price": "not given: --price" if plan.price_usd is None else f"${plan.price_usd:,.2f} for the first epoch",
        "later epochs": f"at least {later} to download each; at most {_rate_text(plan.later_bound)} samples/s",
        "first batch": "not given: --link latency=,connection=",
        "planning": f"{duration(plan.planning_s)} to compute the order",
    }
    if plan.first_batch_s is not None:
        found["first batch"] = f"about {duration(plan.first_batch_s)}, and the start of the processes (an estimate)"
    if plan.quality is not None:
        found["shuffle quality"] = f"{plan.quality.mean:.0f} of 100 (a perfect shuffle: {plan.quality.random:.0f})"
    if plan.rank_costs is not None:
        found["costliest rank"] = "{:.3f} of the mean, without balance {:.3f}".format(*plan.rank_costs[::-1])
    if plan.warning is not None:
        found["warning"] = in_flags(plan.warning, parser)
    return found


def _curve(plans: Sequence[Plan]) -> list[tuple[str, ...]]:
    """One row for each number of nodes."""
    rows: list[tuple[str, ...]] = [
        ("nodes", "batch", "samples/s", "downloads", "a node", "requests", "price", "cache", "limited by")
    ]
    for plan in plans:
        limit = "not given" if plan.limit is None else plan.limit.resource
        price = "" if plan.price_usd is None else f"${plan.price_usd:,.2f}"
        sizes = [readable(size) for size in (plan.download_bytes, plan.busiest_node_bytes)]
        need = readable(plan.cache_bytes)
        counts = (f"{plan.num_nodes:,}", f"{plan.global_batch_size:,}", _rate_text(plan.limit))
        rows.append((*counts, *sizes, f"{plan.num_requests:,}", price, need, limit))
    return rows


def _rate_text(bound: Bound | None) -> str:
    return "-" if bound is None or bound.samples_per_s is None else f"{bound.samples_per_s:,.0f}"


def _in_flags(text: str, parser: argparse.ArgumentParser) -> str:
    """A text with the flags for the names of rates and arguments."""
    for name, flag in _FLAGS.items():
        text = text.replace(name, flag)
    return in_flags(text, parser)
