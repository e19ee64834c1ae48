"""`plan`: what a training run downloads, costs and needs, and the most samples per second that each resource allows.

A roofline: each bound is what a resource can do, divided by what the epoch asks of it on the node that downloads most,
as if nothing else took time. The lowest bound is the limit. Training is never faster, and often somewhat slower.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from functools import cached_property
from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_stream.dataset import source_of
from lightning_stream.loader import StreamingDataLoader
from lightning_stream.loading.checks import cache_need, quality, refusal_of_limit
from lightning_stream.loading.shared_position import Start
from lightning_stream.loading.source import BatchSettings, SampleSource
from lightning_stream.order import RunOrder
from lightning_stream.order.balance import imbalance
from lightning_stream.order.chain import readable
from lightning_stream.order.downloads import estimate_downloads, plan_downloads
from lightning_stream.order.quality import Quality
from lightning_stream.reading.fetches import hurried_threads
from lightning_stream.reading.look_ahead import furthest_ahead
from lightning_stream.stores.retry import RetryPolicy, parts_of

_EXACT_SAMPLES, _EXACT_REPLICAS = 1 << 21, 256  # above these, downloads are estimated
_INDEX_REQUESTS = 2  # for each stream: one asks for versions
_MB, _GB = 1e6, 1e9
_POLICY = RetryPolicy()
_WORTH_WORKERS = 0.05  # the part of the training process's time from which on making batches in it is a cause
_NEEDS = {
    "link of a node": ("node_bytes_per_s",),
    "bucket": ("bucket_bytes_per_s",),
    "connections": ("latency_s", "connection_bytes_per_s", "unpack_s_per_mb"),
    "look-ahead": ("latency_s", "connection_bytes_per_s", "unpack_s_per_mb"),
    "disk": ("disk_bytes_per_s",),
    "workers": ("sample_s",),
    "cores": ("num_cores", "sample_s", "unpack_s_per_mb"),
    "training process": ("step_s",),
}
_REMEDIES = {
    "link of a node": "Write smaller samples (compression='zstd'), or train on more nodes.",
    "bucket": "Write smaller samples (compression='zstd'), or lower the download factor.",
    "connections": "Raise num_workers, which opens more connections; larger shards (size_limit) need fewer requests.",
    "look-ahead": "Raise predownload: shards are requested too late.",
    "disk": "Put the cache (local) on a faster disk.",
    "workers": "Raise num_workers, or make the transform cheaper.",
    "cores": "Take nodes with more cores, make the transform cheaper, or write shards without compression.",
    "training process": "Everything else that was given is faster: nothing to change.",
}
_FREE = {  # what costs no time
    "latency_s": 0.0,
    "connection_bytes_per_s": np.inf,
    "node_bytes_per_s": np.inf,
    "bucket_bytes_per_s": np.inf,
    "disk_bytes_per_s": np.inf,
    "step_s": 0.0,
    "sample_s": 0.0,
    "unpack_s_per_mb": 0.0,
    "num_cores": np.inf,
}


@dataclass(frozen=True)
class Rates:
    """What is known of the store and of each node. None: not given, and nothing is assumed.

    Attributes:
        latency_s: Seconds from a request to the first byte of its answer.
        connection_bytes_per_s: What one connection brings after that.
        node_bytes_per_s: What all connections of a node bring together.
        bucket_bytes_per_s: What all nodes get together.
        disk_bytes_per_s: What a node writes to its cache folder.
        step_s: One optimizer step, without its data.
        sample_s: Reading, decoding, transforming and collating a sample (or a packed row) on one core.
        unpack_s_per_mb: Verifying and decompressing 10^6 bytes of a raw shard on one core.
        num_cores: Cores of a node that workers may use.

    Example: ``Rates(latency_s=0.02, connection_bytes_per_s=60e6, node_bytes_per_s=1.25e9, step_s=0.25)``.

    Raises:
        ValueError: A value is negative, or a rate is 0.
    """

    latency_s: float | None = None
    connection_bytes_per_s: float | None = None
    node_bytes_per_s: float | None = None
    bucket_bytes_per_s: float | None = None
    disk_bytes_per_s: float | None = None
    step_s: float | None = None
    sample_s: float | None = None
    unpack_s_per_mb: float | None = None
    num_cores: int | None = None

    def __post_init__(self) -> None:
        for name, value in self.given.items():
            if not (value > 0 or value == _FREE[name]):
                rule = "above 0" if _FREE[name] else "0 or more"
                raise ValueError(f"{name} is {rule}; found {value}. Correct it")

    @property
    def given(self) -> dict[str, float]:
        """Those that are given, by name."""
        return {name: value for name, value in vars(self).items() if value is not None}


@dataclass(frozen=True)
class Prices:
    """What a store charges for reading, in dollars: for a GB (10^9 bytes) that leaves it, and for 1,000 requests.

    Raises:
        ValueError: A price is negative.
    """

    per_gb: float = 0.0
    per_1000_requests: float = 0.0

    def __post_init__(self) -> None:
        if not min(self.per_gb, self.per_1000_requests) >= 0:
            raise ValueError(f"prices are 0 or more; found {self}. Correct them")

    def of(self, num_bytes: float, num_requests: float) -> float:
        """Dollars for so many bytes and requests."""
        return num_bytes / _GB * self.per_gb + num_requests / 1000 * self.per_1000_requests


PRICES = {
    "s3": Prices(0.0, 0.0004),
    "s3-internet": Prices(0.09, 0.0004),
    "gcs": Prices(0.0, 0.0004),
    "gcs-internet": Prices(0.12, 0.0004),
    "azure": Prices(0.0, 0.0005),
    "azure-internet": Prices(0.087, 0.0005),
    "r2": Prices(0.0, 0.00036),
}
"""List prices of 2026, from machines in the bucket's region or over the internet; check them against your contract."""


@dataclass(frozen=True)
class Bound:
    """The most samples per second of all nodes that one resource allows.

    Attributes:
        resource: ``"link of a node"``, ``"bucket"``, ``"connections"``, ``"look-ahead"``, ``"disk"``, ``"cache"``,
            ``"workers"``, ``"cores"`` or ``"training process"``.
        samples_per_s: None where a rate that it needs was not given, or where the resource limits nothing.
        why: What was divided by what, or what was not given.
    """

    resource: str
    samples_per_s: float | None
    why: str


@dataclass(frozen=True)
class Plan:
    """What `plan` found for one number of nodes. The first epoch begins with empty caches.

    Attributes:
        num_nodes, global_batch_size, num_steps: The steps are those of an epoch.
        num_samples: Of an epoch; rows, where samples are packed into rows.
        download_bytes, busiest_node_bytes: In the first epoch: of all nodes, and of the one that downloads most.
        download_factor: How often a byte is downloaded on average; 1.0 is perfect.
        is_estimated: Whether the downloads are those of an even share, because counting them would take long.
        num_requests: Of all nodes in the first epoch, without retries and without samples that come by range.
        later_bytes: What all nodes download at least in each later epoch.
        price_usd: Of the first epoch; None without prices.
        cache_bytes: What the cache of a node must hold at once, or shards would be fetched several times in an epoch.
        refusal: Why the loader would not start with its `cache_limit`; None if it would.
        quality: How well the order shuffles; None where batches differ in size.
        rank_costs: Cost of the most expensive rank over the mean, without and with the balance; None without one.
        planning_s: Seconds that it took here to compute the number of batches and the samples of the first one.
        first_batch_s: An estimate, without the start of processes; None without a latency and a connection's rate.
        bounds: Of the first epoch, one for each resource.
        later_bound: The lowest one of each later epoch; None if no rate was given.
        warning: What to change where much is downloaded more than once.
        remedy: What to change about the limit.
    """

    num_nodes: int
    global_batch_size: int
    num_steps: int
    num_samples: int
    download_bytes: int
    busiest_node_bytes: int
    download_factor: float
    is_estimated: bool
    num_requests: int
    later_bytes: int
    price_usd: float | None
    cache_bytes: int
    refusal: str | None
    quality: Quality | None
    rank_costs: tuple[float, float] | None
    planning_s: float
    first_batch_s: float | None
    bounds: tuple[Bound, ...]
    later_bound: Bound | None
    warning: str | None
    remedy: str

    @property
    def limit(self) -> Bound | None:
        """The lowest bound; None if no rate was given."""
        return _lowest(self.bounds)

    @property
    def finding(self) -> str:
        """What limits the run and what to change, in a sentence or two."""
        limit = self.limit
        if limit is None:
            return "No rate was given, so nothing is known about time."
        if not limit.samples_per_s:
            return f"The loader would not start: {self.refusal}"
        epoch = duration(self.num_samples / limit.samples_per_s)
        return (
            f"The {limit.resource} limits: at most {limit.samples_per_s:,.0f} samples/s, so an epoch takes at least "
            f"{epoch}. {self.remedy}"
        )

    def to_json(self) -> dict[str, Any]:
        """The plan as JSON values."""
        limit = self.limit
        return {**asdict(self), "limit": None if limit is None else asdict(limit), "finding": self.finding}


def plan(loader: StreamingDataLoader, rates: Rates | None = None, prices: Prices | None = None) -> Plan:
    """Plan a training run of this loader from its indexes and its order alone: no sample is read.

    Args:
        loader: The data and all settings. Its `world` says how many nodes and devices train.
        rates: What is known of the store and the nodes.
        prices: What the store charges, e.g. ``PRICES["s3-internet"]``.

    Example::

        dataset = StreamingDataset("s3://bucket/train", shuffle=True)
        loader = StreamingDataLoader(dataset, batch_size=32, num_workers=8, world=World(0, 64, 8))
        print(plan(loader, Rates(latency_s=0.02, connection_bytes_per_s=60e6, step_s=0.25)).limit)

    Raises:
        ValueError: The settings contradict each other, or an epoch has no batch.
    """
    source = replace(source_of(loader.streaming))
    source.orders = {}  # so that planning it is timed
    source.reader.require_samples()
    settings = loader.settings()
    began = perf_counter()
    run = source.order(settings.order)
    batches = settings.plan(source, Start(0))
    if not batches.has(0):
        raise ValueError("an epoch must have a batch, but it has fewer samples. Choose a smaller batch, or tail='pad'")
    num_steps = batches.num_batches
    first_batch = settings.micro_batches(source, Start(0))[0].sample_ids
    planning_s = perf_counter() - began
    need = _Need(loader, source, settings, run, num_steps)
    rates = rates or Rates()
    bounds = need.bounds(rates)
    later_share = need.later_bytes / max(1, need.all_bytes)
    return Plan(
        num_nodes=settings.world.num_nodes,
        global_batch_size=settings.global_batch_size,
        num_steps=num_steps,
        num_samples=need.num_samples,
        download_bytes=need.all_bytes,
        busiest_node_bytes=need.num_bytes,
        download_factor=need.downloads.factor,
        is_estimated=need.downloads.is_estimated,
        num_requests=need.all_requests,
        later_bytes=need.later_bytes,
        price_usd=None if prices is None else prices.of(need.all_bytes, need.all_requests),
        cache_bytes=need.cache_bytes,
        refusal=need.refusal,
        quality=quality(source.reader, run, settings.global_batch_size) if source.batch_tokens is None else None,
        rank_costs=None if settings.balance is None else imbalance(batches, settings.balance),
        planning_s=planning_s,
        first_batch_s=need.first_batch_s(first_batch, rates),
        bounds=bounds,
        later_bound=_lowest(need.bounds(rates, later_share)),
        warning=need.downloads.warning,
        remedy=need.remedy(_lowest(bounds), rates),
    )


class _Need:
    """What the first epoch needs: of all nodes, and of the one that downloads most."""

    def __init__(
        self, loader: StreamingDataLoader, source: SampleSource, settings: BatchSettings, run: RunOrder, num_steps: int
    ) -> None:
        world, reader, size = settings.world, source.reader, settings.device_batch_size
        self.run, self.world = run, world
        self.index_bytes = sum(len(index.data) for index in reader.indexes)
        self.num_samples = run.epoch(0).num_samples
        self.num_steps, self.num_workers = num_steps, loader.num_workers
        self.rank_samples = settings.global_batch_size / world.num_replicas  # of a step
        self.raw_bytes = np.concatenate([index.raw_bytes for index in reader.indexes])
        self.stored_bytes = np.concatenate([index.stored_bytes for index in reader.indexes])
        parts = np.array([max(1, len(parts_of(num_bytes, 1, _POLICY))) for num_bytes in self.stored_bytes.tolist()])
        of_epoch: dict[str, Any] = {"epoch": 0, "batch_size": settings.global_batch_size, "world": world}
        of_epoch["shard_bytes"] = self.stored_bytes
        if run.num_samples > _EXACT_SAMPLES or world.num_replicas > _EXACT_REPLICAS:
            self.downloads = estimate_downloads(run, **of_epoch)
        else:
            self.downloads = plan_downloads(run, tail=settings.tail, **of_epoch)
        per_node = self.downloads.num_bytes
        self.num_bytes, self.all_bytes = int(per_node.max()), int(per_node.sum())
        requests = [int(parts[shards].sum()) for shards in self.downloads.shards]
        even_share = round(int(parts.sum()) * self.downloads.factor / world.num_nodes)
        requests = requests or [even_share] * world.num_nodes
        self.num_requests = max(requests)
        self.all_requests = sum(requests) + _INDEX_REQUESTS * len(reader.streams) * world.num_nodes
        limit = reader.defaults.config.limit_bytes
        self.later_bytes = 0 if limit is None else int(np.maximum(per_node - limit, 0).sum())
        ahead = loader.read_ahead(settings)
        self.cache_bytes = cache_need(reader, run, settings, ahead).num_bytes
        self.refusal = None if limit is None else refusal_of_limit(reader, run, settings, ahead, limit)
        # While training waits for data, no finished batch waits in a worker; threads make theirs together.
        finished = loader.num_workers if loader.workers == "threads" else 0
        furthest = furthest_ahead(source.predownload, size, is_limited=limit is not None)
        busy = cache_need(reader, run, settings, replace(ahead, batches=furthest, finished=finished))
        at_once = min(int(parts.max()), _POLICY.parts_at_once)
        self.threads = hurried_threads(reader.config.fetch_threads, min(size, busy.active_shards))
        self.connections = world.ranks_per_node * ahead.workers * self.threads * at_once
        self.requests_ahead = max(1, busy.entering_shards) * at_once
        self.node_raw_bytes = self.num_bytes * int(self.raw_bytes.sum()) / max(1, int(self.stored_bytes.sum()))
        self.is_packed = bool((self.raw_bytes != self.stored_bytes).any())  # then both files are written
        self.written_bytes = self.num_bytes + (self.node_raw_bytes if self.is_packed else 0.0)
        self.requested_later = 1 - run.active_shards() / len(self.raw_bytes)

    def bounds(self, rates: Rates, share: float = 1.0) -> tuple[Bound, ...]:
        """The bound of each resource in an epoch that downloads so much of the data."""
        found = [self._bound(name, seconds, rates) for name, seconds in self._seconds(rates, share).items()]
        why = f"{readable(self.cache_bytes)} on each node at once"
        cache = Bound("cache", None, why) if self.refusal is None else Bound("cache", 0.0, f"{why}: above cache_limit")
        return (*found, cache)

    def _seconds(self, rates: Rates, share: float) -> dict[str, float]:
        """How long each resource is busy in an epoch, where what was not given takes no time."""
        filled = _FREE | rates.given
        size, raw_bytes, requests = (
            amount * share for amount in (self.num_bytes, self.node_raw_bytes, self.num_requests)
        )
        begin_s = requests * filled["latency_s"]
        transfer_s = size / filled["connection_bytes_per_s"]
        unpack_s = raw_bytes / _MB * filled["unpack_s_per_mb"]
        making_s = self.num_steps * self.rank_samples * filled["sample_s"]  # of a rank
        waiting_s = (begin_s + unpack_s) / self.requests_ahead + transfer_s / max(self.requests_ahead, self.connections)
        ranks = self.world.ranks_per_node
        return {
            "link of a node": size / filled["node_bytes_per_s"],
            "bucket": self.all_bytes * share / filled["bucket_bytes_per_s"],
            "connections": (begin_s + transfer_s + unpack_s) / self.connections,
            "look-ahead": self.requested_later * waiting_s,
            "disk": self.written_bytes * share / filled["disk_bytes_per_s"],
            "workers": making_s / self.num_workers if self.num_workers else 0.0,
            "cores": (making_s * ranks + unpack_s) / filled["num_cores"],
            "training process": self.num_steps * filled["step_s"] + (0.0 if self.num_workers else making_s),
        }

    def _bound(self, resource: str, seconds: float, rates: Rates) -> Bound:
        missing = [name for name in self._needed(resource) if name not in rates.given]
        why = f"not given: {', '.join(missing)}"
        if seconds or not missing:
            why = f"{self._facts[resource]}; {why}" if missing else self._facts[resource]
        return Bound(resource, self.num_samples / seconds if seconds else None, why)

    def _needed(self, resource: str) -> list[str]:
        """The rates that a bound is computed from."""
        if resource == "workers" and not self.num_workers:
            return []
        if resource == "look-ahead" and not self.requested_later:
            return []
        extra = ["sample_s"] if resource == "training process" and not self.num_workers else []
        return [name for name in _NEEDS[resource] if self.is_packed or name != "unpack_s_per_mb"] + extra

    @cached_property
    def _facts(self) -> dict[str, str]:
        """What each resource has to do, or has for it."""
        ranks = self.world.ranks_per_node
        makers = f"{ranks * self.num_workers:,} on each node"
        late = f"at most {self.requests_ahead:,} requests of a node ahead of training"
        return {
            "link of a node": f"{readable(self.num_bytes)} for the busiest node",
            "bucket": f"{readable(self.all_bytes)} for all nodes",
            "connections": f"{self.connections:,} of each node for {self.num_requests:,} requests",
            "look-ahead": late if self.requested_later else "all shards are requested at the start",
            "disk": f"{readable(self.written_bytes)} written on each node",
            "workers": makers if self.num_workers else "none: the training process makes the batches",
            "cores": "for making batches and unpacking shards",
            "training process": f"{self.num_steps:,} steps" + ("" if self.num_workers else " and their batches"),
        }

    def remedy(self, limit: Bound | None, rates: Rates) -> str:
        """What to change about the limit."""
        if limit is None or limit.resource == "cache":
            return ""
        making_s = 0.0 if self.num_workers else self.rank_samples * (rates.sample_s or 0.0)
        spent_s = making_s + (rates.step_s or 0.0)
        if limit.resource == "training process" and making_s > _WORTH_WORKERS * spent_s:
            return "Raise num_workers: this process makes its batches itself, between its steps."
        return _REMEDIES[limit.resource]

    def first_batch_s(self, ids: NDArray[np.int64], rates: Rates) -> float | None:
        """Seconds from the index to the first batch of all ranks, without the start of processes."""
        if rates.latency_s is None or rates.connection_bytes_per_s is None:
            return None
        filled = _FREE | rates.given
        numbers, within = self.run.snapshot.locate(ids)
        stored, raw = self.stored_bytes[numbers], self.raw_bytes[numbers]
        # The beginning of a shard can be read while the rest arrives, unless it is compressed.
        part = np.where(stored == raw, (within + 1) / self.run.snapshot.sizes[numbers], 1.0)
        needed = np.zeros(len(self.stored_bytes))
        np.maximum.at(needed, numbers, part * stored)
        rate = min(self.threads * rates.connection_bytes_per_s, filled["node_bytes_per_s"] / self.world.ranks_per_node)
        transfer_s = max(needed.max() / rates.connection_bytes_per_s, needed.sum() / rate)
        index_s = _INDEX_REQUESTS * rates.latency_s + self.index_bytes / rates.connection_bytes_per_s
        unpack_s = raw.max() / _MB * filled["unpack_s_per_mb"] if part.max() == 1.0 else 0.0
        return float(index_s + rates.latency_s + transfer_s + unpack_s + len(ids) * filled["sample_s"])


def duration(seconds: float) -> str:
    """Seconds as text with a fitting unit."""
    for limit, unit, divisor in ((120, "s", 1), (7200, "min", 60), (172_800, "hours", 3600)):
        if seconds < limit:
            return f"{seconds / divisor:.3g} {unit}"
    return f"{seconds / 86400:,.1f} days"


def _lowest(bounds: tuple[Bound, ...]) -> Bound | None:
    given = [bound for bound in bounds if bound.samples_per_s is not None]
    return min(given, key=lambda bound: bound.samples_per_s or 0.0, default=None)
