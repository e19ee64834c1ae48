"""What a simulation is given besides the order: a link, prices, the work on a batch, and the settings of a node."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any


@dataclass(frozen=True)
class Link:
    """The way from the store to a node.

    Attributes:
        latency_s: Seconds from a request to the first byte of its answer.
        connection_bytes_per_s: Of each connection.
        node_bytes_per_s: Of all connections of a node together; None: no limit.
        bucket_bytes_per_s: Of all nodes together; None: no limit.

    Raises:
        ValueError: A value is not positive (a latency may be 0).

    Example: ``Link(latency_s=0.02, connection_bytes_per_s=60e6, node_bytes_per_s=1.25e9)``.
    """

    latency_s: float = 0.03
    connection_bytes_per_s: float = 60e6
    node_bytes_per_s: float | None = None
    bucket_bytes_per_s: float | None = None

    def __post_init__(self) -> None:
        _check(self, positive=("connection_bytes_per_s", "node_bytes_per_s", "bucket_bytes_per_s"))

    def of_node(self, num_nodes: int) -> float | None:
        """The bytes per second of each of so many nodes; None: no limit."""
        shares = [] if self.bucket_bytes_per_s is None else [self.bucket_bytes_per_s / num_nodes]
        shares += [] if self.node_bytes_per_s is None else [self.node_bytes_per_s]
        return min(shares, default=None)


@dataclass(frozen=True)
class Prices:
    """What a store charges for reading, in dollars: per GB (10^9 bytes) that leaves it, and per 1,000 requests."""

    per_gb: float = 0.0
    per_1000_requests: float = 0.0

    def __post_init__(self) -> None:
        _check(self)

    def of(self, num_bytes: float, num_requests: float) -> float:
        """Dollars for so many bytes and requests."""
        return num_bytes / 1e9 * self.per_gb + num_requests / 1000 * self.per_1000_requests


@dataclass(frozen=True)
class Work:
    """What the processors of a node do for a batch, and how long training takes. All in seconds.

    Attributes:
        step_s: Of training: one optimizer step, without waiting for data.
        sample_s: To read, decode, transform and collate one sample, in a worker.
        shard_s: To request a shard and to put it into the cache, in a thread that fetches.
        unpack_s_per_mb: To verify and decompress one MB (10^6 bytes) of a shard, in such a thread.
        send_s: To move a batch from a worker to the training process.
        start_s: From the start of an iteration to the first worker: making the dataset, and its index without the link.
        worker_s: To start one worker process; they start one after another.
        client_s: To make the store's client, in each process that fetches.
    """

    step_s: float = 0.1
    sample_s: float = 0.0001
    shard_s: float = 0.003
    unpack_s_per_mb: float = 0.0005
    send_s: float = 0.001
    start_s: float = 0.1
    worker_s: float = 0.02
    client_s: float = 0.1

    def __post_init__(self) -> None:
        _check(self)


@dataclass(frozen=True)
class Node:
    """The settings of each node, named as those of `StreamingDataset` and `StreamingDataLoader`.

    Attributes:
        num_workers: Worker processes of each device; 0: the training process makes the batches itself.
        predownload: Samples that each worker downloads ahead; None to choose, as the loader does.
        cache_limit: Bytes of the cache of a node; None: no limit.
        prefetch_factor: Batches that each worker makes ahead.
        fetch_threads: Shards that each worker fetches at the same time.
        start_by_range: Whether samples may come by ranges while their shards are being fetched; None: where a whole
            batch may, and that adds few requests.
        num_cores: Processor cores of a node that workers may use; None: as many as they need.

    Raises:
        ValueError: A number is out of its range.
    """

    num_workers: int = 0
    predownload: int | None = None
    cache_limit: int | None = None
    prefetch_factor: int = 2
    fetch_threads: int = 4
    start_by_range: bool | None = None
    num_cores: int | None = None

    def __post_init__(self) -> None:
        _check(self, positive=("prefetch_factor", "fetch_threads", "num_cores"))


@dataclass(frozen=True)
class Machine:
    """What is assumed of the store and of each node; no `prices`: they are unknown.

    Example: ``Machine(Link(latency_s=0.1), Work(step_s=0.25), Node(num_workers=8))``.
    """

    link: Link = field(default_factory=Link)
    work: Work = field(default_factory=Work)
    node: Node = field(default_factory=Node)
    prices: Prices | None = None


def _check(value: Any, positive: tuple[str, ...] = ()) -> None:
    """Raise ValueError for numbers below 0, or not above 0 where they must be positive."""
    for name in (one.name for one in fields(value)):
        number = getattr(value, name)
        if number is not None and not (number > 0 if name in positive else number >= 0):
            rule = "positive" if name in positive else "0 or more"
            raise ValueError(f"{name} is {rule}; found {number}")


CLOUDS_DATE = "2026"
"""The year of the list prices in `CLOUDS`; check them against your contract."""

CLOUDS = {
    "s3": Prices(0.0, 0.0004),
    "s3-internet": Prices(0.09, 0.0004),
    "gcs": Prices(0.0, 0.0004),
    "gcs-internet": Prices(0.12, 0.0004),
    "azure": Prices(0.0, 0.0005),
    "azure-internet": Prices(0.087, 0.0005),
    "r2": Prices(0.0, 0.00036),
}
"""List prices of reading: from machines in the region of the bucket, or over the internet (the first terabytes)."""
