"""What ``simulate`` assumes of a store and a node: their flags, and a probe of the real store."""

from __future__ import annotations

import argparse
import math
import re
import statistics
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import cycle
from typing import Any

from lightning_stream.formats.index import Index
from lightning_stream.formats.sizes import parse_bytes
from lightning_stream.order.chain import readable
from lightning_stream.simulation import CLOUDS, CLOUDS_DATE, Link, Machine, Node, Prices, Work
from lightning_stream.stores import Store

PROBED_BYTES = 8 << 20  # of one shard
_CONNECTIONS = (4, 16)
_IS_LIMIT = 0.75  # of what the connections should bring together
_VALUE = re.compile(r"([0-9]*\.?[0-9]+)([a-z]+)")
_SECONDS = {"ms": 1e-3, "s": 1.0}
_RATES = {"kb": 1e3, "mb": 1e6, "gb": 1e9, "mbit": 1e6 / 8, "gbit": 1e9 / 8}  # decimal, as networks are sold
_PARTS = {"latency": "latency_s", "connection": "connection_bytes_per_s", "node": "node_bytes_per_s",
          "bucket": "bucket_bytes_per_s"}  # fmt: skip
_CLOUD_OF_SCHEME = {"s3": "s3", "gs": "gcs", "az": "azure", "abfss": "azure", "abfs": "azure"}


def add_machine(parser: argparse.ArgumentParser) -> None:
    """Let a command take a link, prices, and what a node does."""
    number: dict[str, Any] = {"type": positive, "metavar": "N"}
    found = parser.add_argument_group("simulated time: the link to the store, and the nodes")
    text = "e.g. latency=20ms,connection=60mb,node=10gbit,bucket=50gb: a second (default: 30ms and 60mb)"
    found.add_argument("--link", type=link_of, metavar="NAME=VALUE,...", help=text)
    text = "measure the link by reading from the store for so many seconds (default: 20)"
    found.add_argument("--probe", nargs="?", const=20.0, type=float, metavar="SECONDS", help=text)
    text = "time of a training step without its data (default: 0, which shows what the loader can deliver)"
    found.add_argument("--step-ms", type=float, default=0.0, metavar="MS", help=text)
    text = "time to read, decode and transform a sample on one core (default: 0.1); bench measures it"
    found.add_argument("--sample-ms", type=float, default=0.1, metavar="MS", help=text)
    text = "time to verify and decompress a MB of a shard on one core (default: 0.5)"
    found.add_argument("--unpack-ms", type=float, default=0.5, metavar="MS", help=text)
    found.add_argument("--num-workers", default=0, type=int, help="workers of each device (default: 0)", metavar="N")
    found.add_argument("--prefetch-factor", default=2, help="batches that a worker makes ahead (default: 2)", **number)
    found.add_argument("--cores", help="cores of a node that workers may use (default: as many as needed)", **number)
    found.add_argument(
        "--start-by-range", action=argparse.BooleanOptionalAction, help="read the first samples by ranges"
    )
    text = f"list prices of {CLOUDS_DATE} by name ({', '.join(CLOUDS)}), or e.g. gb=0.09,requests=0.0004: dollars "
    text += "for a GB and for 1,000 requests (default: by the URL, from machines in the bucket's region)"
    found.add_argument("--price", type=prices_of, metavar="NAME", help=text)
    text = "also for 1 to 1,000 nodes (default: unless the order must be planned sample by sample)"
    found.add_argument("--curve", action=argparse.BooleanOptionalAction, help=text)


def machine_of(options: argparse.Namespace, store: Store, index: Index) -> Machine:
    """What the flags of :func:`add_machine` say, with the probed link."""
    times = {"step_s": options.step_ms, "sample_s": options.sample_ms, "unpack_s_per_mb": options.unpack_ms}
    for flag, value in zip(("--step-ms", "--sample-ms", "--unpack-ms"), times.values(), strict=True):
        if not 0 <= value < math.inf:
            raise ValueError(f"{flag} is 0 or more; found {value:g}")
    limit = None if options.cache_limit is None else parse_bytes(options.cache_limit, "cache_limit")
    names = ("num_workers", "predownload", "prefetch_factor", "start_by_range")
    given = {name: getattr(options, name) for name in names}
    link = options.link or Link()
    if options.probe is not None:
        link = replace(link, **probed(store, index, options.probe))
    cloud = CLOUDS.get(_CLOUD_OF_SCHEME.get(store.url.partition("://")[0], ""))
    work = Work(**{name: value / 1000 for name, value in times.items()})
    return Machine(link, work, Node(**given, cache_limit=limit, num_cores=options.cores), options.price or cloud)


def positive(text: str) -> int:
    """A whole number of at least 1; ArgumentTypeError for another text."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"takes a whole number, 1 or more; found {text!r}")
    return int(text)


def link_of(text: str) -> Link:
    """The link of ``latency=20ms,connection=60mb,node=1.25gb``; ArgumentTypeError for another text."""
    found: dict[str, float] = {}
    for name, value in _pairs(text, "--link", _PARTS, "latency=20ms,connection=60mb,node=1.25gb"):
        match, units = _VALUE.fullmatch(value.lower()), _SECONDS if name == "latency" else _RATES
        if match is None or match[2] not in units or not (float(match[1]) or name == "latency"):
            rule = "a latency is e.g. 20ms or 0.1s, and a rate more than 0, e.g. 60mb or 10gbit"
            raise argparse.ArgumentTypeError(f"{rule}; found {name}={value}")
        found[_PARTS[name]] = float(match[1]) * units[match[2]]
    return Link(**found)


def prices_of(text: str) -> Prices:
    """The prices of a cloud, or of ``gb=0.09,requests=0.0004``; ArgumentTypeError for another text."""
    if text in CLOUDS:
        return CLOUDS[text]
    names = {"gb": "per_gb", "requests": "per_1000_requests"}
    try:
        pairs = _pairs(text, "--price", names, f"gb=0.09,requests=0.0004, or {', '.join(CLOUDS)}")
        return Prices(**{names[name]: float(value) for name, value in pairs})
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"prices are dollars, 0 or more; found {text!r}") from error


def _pairs(text: str, flag: str, names: Any, example: str) -> Iterator[tuple[str, str]]:
    for pair in text.split(","):
        name, equals, value = pair.strip().partition("=")
        if not equals or name not in names or not value:
            raise argparse.ArgumentTypeError(f"{flag} takes {example}; found {pair!r}")
        yield name, value


@dataclass(frozen=True)
class TimedRead:
    """A read on one connection: seconds to its first byte and in all, and its bytes."""

    first_s: float
    seconds: float
    num_bytes: int

    @property
    def bytes_per_s(self) -> float:
        """After the first byte."""
        return self.num_bytes / max(self.seconds - self.first_s, 1e-9)


def timed_read(store: Store, index: Index, shard: int) -> TimedRead:
    """Read some MB of a shard from the store, without the cache."""
    (raw, compressed), *_ = index.entry(shard).files
    file = compressed or raw
    name, num_bytes = (file.basename, file.num_bytes) if file.origin is None else (file.origin.name, PROBED_BYTES)
    begin, first_s, count = time.perf_counter(), 0.0, 0
    with store.open(name, 0, min(num_bytes, PROBED_BYTES)) as body:
        for chunk in body:
            first_s = first_s or time.perf_counter() - begin
            count += len(chunk)
    return TimedRead(first_s, time.perf_counter() - begin, count)


def probed(store: Store, index: Index, seconds: float) -> dict[str, float | None]:
    """Measure the link of this machine to a store: on one connection, and on many at once."""
    if not seconds > 0 or not index.num_shards:
        raise ValueError(f"--probe takes the seconds for which shards are read; found {seconds:g}")
    shards = cycle(range(index.num_shards))
    timed_read(store, index, next(shards))  # which opens the connection
    alone = _reads(store, index, shards, 1, seconds / 3)[0]
    latency_s = statistics.median(one.first_s for one in alone)
    rate = statistics.median(one.bytes_per_s for one in alone)
    together, limit = 0.0, None
    for connections in _CONNECTIONS:
        reads, spent_s = _reads(store, index, shards, connections, seconds / 3)
        found = sum(one.num_bytes for one in reads) / spent_s
        expected = connections * sum(one.num_bytes for one in alone) / sum(one.seconds for one in alone)
        together = max(together, found)
        limit = together if found < _IS_LIMIT * expected else None
    return {"latency_s": latency_s, "connection_bytes_per_s": rate, "node_bytes_per_s": limit}


def _reads(
    store: Store, index: Index, shards: Iterator[int], connections: int, seconds: float
) -> tuple[list[TimedRead], float]:
    """What so many connections read at once, and in how many seconds."""
    begin = time.perf_counter()

    def read(_: int) -> list[TimedRead]:
        found: list[TimedRead] = []
        while not found or time.perf_counter() - begin < seconds:
            found.append(timed_read(store, index, next(shards)))
        return found

    with ThreadPoolExecutor(connections) as pool:
        reads = [one for some in pool.map(read, range(connections)) for one in some]
    return reads, time.perf_counter() - begin


def about_link(link: Link) -> str:
    """The parts of a link that are limited, as a line of text."""
    parts = {"a connection": link.connection_bytes_per_s, "a node": link.node_bytes_per_s}
    parts["the bucket"] = link.bucket_bytes_per_s
    rates = [f"{readable(int(rate))}/s {name}" for name, rate in parts.items() if rate is not None]
    return ", ".join([f"{1000 * link.latency_s:.3g} ms to the first byte", *rates])
