"""`plan`: what a training run downloads, costs and needs, and the most samples per second that each resource allows.

A roofline: each bound is what a resource can do, divided by what the epoch asks of it on the node that downloads most,
as if nothing else took time. The lowest bound is the limit. Training is never faster, and often somewhat slower.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_stream.dataset import source_of
from lightning_stream.errors import checking
from lightning_stream.loader import StreamingDataLoader
from lightning_stream.loading.checks import cache_need, quality, refusal_of_limit
from lightning_stream.loading.shared_position import Start
from lightning_stream.loading.source import BatchSettings, SampleSource
from lightning_stream.order import RunOrder
from lightning_stream.questions.describe import duration, readable
from lightning_stream.questions.downloads import estimate_downloads, plan_downloads
from lightning_stream.questions.imbalance import imbalance
from lightning_stream.questions.quality import Quality
from lightning_stream.reading.fetch_queue import urgent_threads
from lightning_stream.reading.look_ahead import furthest_ahead
from lightning_stream.stores.retry import RetryPolicy, parts_of

# Above these, downloads are estimated
_EXACT_SAMPLES = 1 << 21
_EXACT_REPLICAS = 256
_INDEX_REQUESTS = 2  # for each stream: one asks for versions
_MB = 1e6
_GB = 1e9
_POLICY = RetryPolicy()
_REMEDIES = {
    "link of a node": "Write smaller samples (compression='zstd'), or train on more nodes.",
    "bucket": "Write smaller samples (compression='zstd'), or lower the download factor.",
    "connections": "Raise num_workers, which opens more connections; larger shards (size_limit) need fewer requests.",
    "look-ahead": "Raise predownload: shards are requested too late.",
    "disk": "Put the cache (local) on a faster disk.",
    "workers": "Raise num_workers, or make the transform cheaper.",
    "cores": "Take nodes with more cores, make the transform cheaper, or write shards without compression.",
    "training process": "All other rates that were given allow more: nothing to change.",
}


@checking
@dataclass(frozen=True)
class Rates:
    """What is known of the store and of each node. What is not given limits and costs nothing, and `plan` says so.

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
        usd_per_gb: What the store charges for 10^9 bytes that leave it.
        usd_per_1000_requests: What it charges for reading.

    Example: ``Rates(latency_s=0.02, connection_bytes_per_s=60e6, node_bytes_per_s=1.25e9, step_s=0.25)``.

    Raises:
        ValueError: A value is negative, or a rate is 0.
    """

    latency_s: float = 0.0
    connection_bytes_per_s: float = np.inf
    node_bytes_per_s: float = np.inf
    bucket_bytes_per_s: float = np.inf
    disk_bytes_per_s: float = np.inf
    step_s: float = 0.0
    sample_s: float = 0.0
    unpack_s_per_mb: float = 0.0
    num_cores: float = np.inf
    usd_per_gb: float = 0.0
    usd_per_1000_requests: float = 0.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not value >= 0 or (value in (0, np.inf) and self.is_given(name)):
                raise ValueError(f"{name} is above 0 and finite; found {value}. Correct or omit it")

    def is_given(self, name: str) -> bool:
        """Whether this one is known."""
        return bool(getattr(self, name) != getattr(Rates, name))


@dataclass(frozen=True)
class Bound:
    """The most samples per second of all nodes that one resource allows.

    Attributes:
        resource: ``"link of a node"``, ``"bucket"``, ``"connections"``, ``"look-ahead"`` (where not all shards are
            requested at the start), ``"disk"``, ``"workers"`` (where there are some), ``"cores"``, ``"training
            process"``, or ``"cache"`` where the loader would refuse its limit.
        samples_per_s: None where no rate that it needs was given.
        why: What it has to do, or has for that; and what was not given.
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
        price_usd: Of the first epoch; 0 without prices.
        cache_bytes: What the cache of a node must hold at once, or shards would be fetched several times in an epoch.
        refusal: Why the loader would not start with its `cache_limit`; None if it would.
        quality: How well the order shuffles; None where batches differ in size.
        rank_costs: Cost of the most expensive rank over the mean, without and with the balance; None without one.
        planning_s: Seconds that it took here to compute the number of batches and the samples of the first one.
        first_batch_s: An estimate, without the start of processes; None without a connection's rate.
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
    price_usd: float
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
            return (
                "No rate was given, so the speed is unknown: `lightning-stream doctor URL --read` measures the rates."
            )
        if not limit.samples_per_s:
            return f"The loader would not start: {self.refusal}"
        epoch = duration(self.num_samples / limit.samples_per_s)
        return (
            f"The {limit.resource} limits: at most {limit.samples_per_s:,.0f} samples/s, so an epoch takes at least "
            f"{epoch}. {self.remedy}"
        )

    def to_json(self) -> dict[str, Any]:
        """The plan as JSON values."""
        return {**asdict(self), "limit": self.limit and asdict(self.limit), "finding": self.finding}


def plan(loader: StreamingDataLoader, rates: Rates | None = None) -> Plan:
    """Plan a training run of this loader from its indexes and its order alone: no sample is read.

    Data that is read in place is planned as if it were downloaded.

    Args:
        loader: The data and all settings. Its `world` says how many nodes and devices train.
        rates: What is known of the store and the nodes.

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
        price_usd=need.all_bytes / _GB * rates.usd_per_gb + need.all_requests / 1000 * rates.usd_per_1000_requests,
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
        world = settings.world
        reader = source.reader
        size = settings.device_batch_size
        self.run = run
        self.world = world
        self.index_bytes = sum(len(index.data) for index in reader.indexes)
        self.num_samples = run.epoch(0).num_samples
        self.num_steps = num_steps
        self.num_workers = loader.num_workers
        self.rank_samples = self.num_samples / world.num_replicas
        self.raw_bytes = np.concatenate([index.raw_bytes for index in reader.indexes])
        self.stored_bytes = np.concatenate([index.stored_bytes for index in reader.indexes])
        parts = np.array([max(1, len(parts_of(num_bytes, 1, _POLICY))) for num_bytes in self.stored_bytes.tolist()])
        of_epoch: dict[str, Any] = {
            "epoch": 0,
            "batch_size": settings.global_batch_size,
            "world": world,
            "shard_bytes": self.stored_bytes,
        }
        if run.num_samples > _EXACT_SAMPLES or world.num_replicas > _EXACT_REPLICAS:
            self.downloads = estimate_downloads(run, **of_epoch)
        else:
            self.downloads = plan_downloads(run, tail=settings.tail, **of_epoch)
        per_node = self.downloads.num_bytes
        self.num_bytes = int(per_node.max())
        self.all_bytes = int(per_node.sum())
        requests = [int(parts[shards].sum()) for shards in self.downloads.shards]
        even_share = round(int(parts.sum()) * self.downloads.factor / world.num_nodes)
        requests = requests or [even_share] * world.num_nodes
        self.num_requests = max(requests)
        self.all_requests = sum(requests) + _INDEX_REQUESTS * len(reader.streams) * world.num_nodes
        limit = reader.shards.defaults.config.limit_bytes
        ratio = int(self.raw_bytes.sum()) / max(1, int(self.stored_bytes.sum()))  # the cache holds raw shards
        self.node_raw_bytes = self.num_bytes * ratio
        self.later_bytes = 0 if limit is None else int(np.maximum(per_node - limit / ratio, 0).sum())
        ahead = loader.read_ahead(settings)
        self.cache_bytes = cache_need(reader, run, settings, ahead).num_bytes
        self.refusal = None if limit is None else refusal_of_limit(reader, run, settings, ahead, limit)
        # While training waits for data, no finished batch waits in a worker; threads make theirs together.
        finished = loader.num_workers if loader.workers == "threads" else 0
        furthest = furthest_ahead(source.predownload, size, is_limited=limit is not None)
        busy = cache_need(reader, run, settings, replace(ahead, batches=furthest, finished=finished))
        at_once = min(int(parts.max()), _POLICY.parts_at_once)
        is_uniform = source.batch_tokens is None  # else a batch may need any number of shards
        waited = min(size, busy.active_shards) if is_uniform else busy.active_shards
        self.threads = urgent_threads(reader.shards.config.fetch_threads, waited)
        self.connections = world.ranks_per_node * ahead.workers * self.threads * at_once
        self.requests_ahead = max(1, busy.entering_shards) * at_once
        self.is_packed = bool((self.raw_bytes != self.stored_bytes).any())
        shards = self.downloads.shards
        num_shards = len(np.unique(np.concatenate(shards))) if shards else len(parts)
        self.requested_later = max(0.0, 1 - run.active_shards() / num_shards) if is_uniform else 0.0

    def bounds(self, rates: Rates, share: float = 1.0) -> tuple[Bound, ...]:
        """The bound of each resource in an epoch that downloads so much of the data."""
        bounds = []
        for resource, seconds, why, needed in self._uses(rates, share):
            missing = [name for name in needed if not rates.is_given(name)]
            parts = ([why] if seconds else []) + ([f"not given: {', '.join(missing)}"] if missing else [])
            bounds.append(Bound(resource, self.num_samples / seconds if seconds else None, "; ".join(parts)))
        if self.refusal is not None:
            bounds.append(Bound("cache", 0.0, f"{readable(self.cache_bytes)} needed"))
        return tuple(bounds)

    def _uses(self, rates: Rates, share: float) -> Iterator[tuple[str, float, str, tuple[str, ...]]]:
        """Each resource, how long it is busy in an epoch and with what, and the rates that decide it."""
        size, raw_bytes, requests = (
            amount * share for amount in (self.num_bytes, self.node_raw_bytes, self.num_requests)
        )
        transfer_s = size / rates.connection_bytes_per_s
        begin_s = requests * rates.latency_s
        unpack_s = raw_bytes / _MB * rates.unpack_s_per_mb
        making_s = self.rank_samples * rates.sample_s  # of a rank
        ranks = self.world.ranks_per_node
        ahead = self.requests_ahead
        unpacking = ("unpack_s_per_mb",) if self.is_packed else ()
        fetching = ("latency_s", "connection_bytes_per_s", *unpacking)
        yield "link of a node", size / rates.node_bytes_per_s, "the busiest node", ("node_bytes_per_s",)
        yield "bucket", self.all_bytes * share / rates.bucket_bytes_per_s, "all nodes", ("bucket_bytes_per_s",)
        why = f"{self.connections:,} of a node for {requests:,.0f} requests"
        yield "connections", (begin_s + transfer_s + unpack_s) / self.connections, why, fetching
        if self.requested_later:
            waiting_s = (begin_s + unpack_s) / ahead + transfer_s / max(ahead, self.connections)
            why = f"{ahead:,} requests of a node at once, at most"
            yield "look-ahead", self.requested_later * waiting_s, why, fetching
        written = size + raw_bytes * self.is_packed
        yield "disk", written / rates.disk_bytes_per_s, f"{readable(written)} written", ("disk_bytes_per_s",)
        if self.num_workers:
            yield "workers", making_s / self.num_workers, f"{ranks * self.num_workers:,} of a node", ("sample_s",)
        needed = ("num_cores", "sample_s", *unpacking)
        yield "cores", (making_s * ranks + unpack_s) / rates.num_cores, f"{rates.num_cores:,} of a node", needed
        serial_s = 0.0 if self.num_workers else making_s
        needed = ("step_s",) if self.num_workers else ("step_s", "sample_s")
        yield "training process", self.num_steps * rates.step_s + serial_s, f"{self.num_steps:,} steps", needed

    def remedy(self, limit: Bound | None, rates: Rates) -> str:
        """What to change about the limit."""
        if limit is None or limit.resource == "cache":
            return ""
        making_s = 0.0 if self.num_workers else self.rank_samples * rates.sample_s
        steps_s = self.num_steps * rates.step_s
        if limit.resource == "training process" and making_s > 0.05 * steps_s:
            return "Raise num_workers: it makes the batches itself, between its steps."
        return _REMEDIES[limit.resource]

    def first_batch_s(self, ids: NDArray[np.int64], rates: Rates) -> float | None:
        """Seconds from the index to the first batch of all ranks, without the start of processes."""
        if not rates.is_given("connection_bytes_per_s"):
            return None
        numbers, within = self.run.snapshot.locate(ids)
        stored = self.stored_bytes[numbers]
        raw = self.raw_bytes[numbers]
        # The beginning of a shard can be read while the rest arrives, unless it is compressed.
        part = np.where(stored == raw, (within + 1) / self.run.snapshot.sizes[numbers], 1.0)
        needed = np.zeros(len(self.stored_bytes))
        np.maximum.at(needed, numbers, part * stored)
        rate = min(self.threads * rates.connection_bytes_per_s, rates.node_bytes_per_s / self.world.ranks_per_node)
        transfer_s = max(needed.max() / rates.connection_bytes_per_s, needed.sum() / rate)
        index_s = _INDEX_REQUESTS * rates.latency_s + self.index_bytes / rates.connection_bytes_per_s
        unpack_s = raw.max() / _MB * rates.unpack_s_per_mb if part.max() == 1.0 else 0.0
        return float(index_s + rates.latency_s + transfer_s + unpack_s + len(ids) * rates.sample_s)


def _lowest(bounds: tuple[Bound, ...]) -> Bound | None:
    known = [bound for bound in bounds if bound.samples_per_s is not None]
    return min(known, key=lambda bound: bound.samples_per_s or 0.0, default=None)
