"""`Simulated`: what a simulation found for one number of nodes, as one frozen value."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from lightning_stream.simulation.settings import Machine

INPUT_BOUND = 0.05  # the part of the time spent waiting from which on training counts as input-bound


@dataclass(frozen=True)
class Timeline:
    """What is ready and what is needed over time, at 500 moments at most: of all nodes, in the first part of the epoch.

    Attributes:
        seconds: Since the start of the training run.
        ready: Samples in batches that are made.
        needed: Samples that training would have used by then if it never waited after its first batch.
        trained: Samples that training has used.
        fetched_bytes: What a node has fetched.
    """

    seconds: list[float] = field(default_factory=list)
    ready: list[int] = field(default_factory=list)
    needed: list[int] = field(default_factory=list)
    trained: list[int] = field(default_factory=list)
    fetched_bytes: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Simulated:
    """What a training run over so many nodes will do in its first epoch, into empty caches.

    Attributes:
        num_nodes, global_batch_size: The nodes, and the samples of an optimizer step over all of them.
        first_batch_s: Seconds until the first batch.
        resume_s: Seconds until the first batch of a run that resumes in the middle of the epoch into an empty cache.
        epoch_s: Seconds of the epoch, the time to the first batch included.
        samples_per_s: Samples per second over all nodes after the first batch, in the simulated part of the epoch.
        steady_samples_per_s: The same after the start, when the look-ahead is full.
        needed_samples_per_s: Those that training uses if it never waits; None if a step takes no time.
        wait_share: The part of the time after the first batch that training waits for data, from 0 to 1.
        limited_by: What limits the throughput: ``"training"`` (it is not input-bound), ``"latency"``,
            ``"connection"`` (its bytes per second), ``"link"`` (of a node or of the bucket), ``"workers"``,
            ``"cores"``, ``"unpacking"``, ``"look_ahead"`` or ``"cache"``.
        finding: A sentence that says so, with what to change.
        gains: For each of these, the throughput relative to now if it were unlimited, at most 100; empty if not
            input-bound.
        download_bytes: Of all nodes in the epoch.
        busiest_node_bytes: Of the node that downloads most.
        num_requests: Of all nodes in the epoch.
        download_factor: How often a byte is downloaded on average; 1.0 is perfect.
        fetched_again: Shards of all nodes in the epoch that are fetched again, because the cache is too small.
        price_usd: Of the epoch's bytes and requests; None without prices.
        cache_needed_bytes: The most bytes of shards that a node has in use at once.
        cache_peak_bytes: The most bytes that the cache of a node holds in the simulated part.
        simulated_share: The part of the epoch that was simulated step by step; the rest continues like its end.
        problem: Why the loader would stop, e.g. a cache limit below what is in use; None if it would not.
        timeline: Samples over time; not in curves over the number of nodes.
        machine: What was assumed of the store and the nodes.
    """

    num_nodes: int
    global_batch_size: int
    first_batch_s: float
    resume_s: float | None
    epoch_s: float
    samples_per_s: float
    steady_samples_per_s: float
    needed_samples_per_s: float | None
    wait_share: float
    limited_by: str
    finding: str
    gains: dict[str, float]
    download_bytes: int
    busiest_node_bytes: int
    num_requests: int
    download_factor: float
    fetched_again: int
    price_usd: float | None
    cache_needed_bytes: int
    cache_peak_bytes: int
    simulated_share: float
    problem: str | None
    timeline: Timeline | None
    machine: Machine

    def to_json(self) -> dict[str, Any]:
        """The fields as JSON values."""
        return {**asdict(self), "is_input_bound": self.wait_share >= INPUT_BOUND}
