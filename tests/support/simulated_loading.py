"""A training loop with workers, connections and queues on a simulated clock: what a loader would measure."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

from lightning_stream.counters import NAMES, Counters
from lightning_stream.monitoring.measured import LoadingSettings
from lightning_stream.monitoring.meter import Made, Mark, Meter
from lightning_stream.monitoring.stats import LoaderStats


@dataclass(frozen=True)
class Loop:
    """What a batch costs in each stage, in seconds on average; and how the shards come.

    Attributes:
        shard_every: Batches of a worker until it needs a new shard; 0: all are here.
        ahead: Batches that a worker looks ahead.
        latency, transfer, unpack: Seconds until the first byte of a shard, of its other bytes, and of unpacking.
        unpacks_as: The counter of this unpacking.
        cpu, others_cpu: The part of making a batch in which its thread, and other threads of its process, compute.
        queued: The part in which its thread waits for a processor core.
        idle: Processor cores that are idle meanwhile.
        counted: Further counters, by shard that is fetched.
        paused: Seconds after each step, by what training pauses for.
    """

    compute: float = 0.1
    planning: float = 0.001
    reading: float = 0.01
    transforming: float = 0.0
    collating: float = 0.001
    sending: float = 0.001
    startup: float = 0.0
    shard_every: int = 0
    ahead: int = 8
    latency: float = 0.0
    transfer: float = 0.0
    unpack: float = 0.0
    unpacks_as: str = "decompress_s"
    cpu: float = 0.98
    others_cpu: float = 0.0
    queued: float = 0.0
    idle: float = 64.0
    steps: int = 200
    epochs: int = 1
    counted: dict[str, float] = field(default_factory=dict)
    paused: dict[str, float] = field(default_factory=dict)
    settings: LoadingSettings = field(
        default_factory=lambda: LoadingSettings(batch_size=32, num_workers=2, num_cores=8)
    )


class _Worker:
    """One worker's clock, and the connections that it fetches with."""

    def __init__(self, loop: Loop, rng: random.Random, at: float) -> None:
        self.loop, self.rng, self.free_at = loop, rng, at + loop.startup
        self.connections = [0.0] * loop.settings.fetch_threads
        self.begun: list[float] = []
        self.busy = self.latency = self.unpacked = 0.0
        self.num_fetched = 0

    def make(self, allowed_at: float) -> Made:
        loop, number = self.loop, len(self.begun)
        began = max(self.free_at, allowed_at)
        self.begun.append(began)
        planning, reading, transforming, collating = (
            self.noisy(one) for one in (loop.planning, loop.reading, loop.transforming, loop.collating)
        )
        fetching = 0.0
        if loop.shard_every and number % loop.shard_every == 0:
            fetching = max(0.0, self.fetched_at(number) - began - planning)
        stages = (planning, fetching, reading, transforming, collating)
        self.free_at = began + sum(stages)
        computed = sum(stages) - fetching
        shares = (loop.cpu, loop.cpu + loop.others_cpu, loop.queued)
        return Made(began, self.free_at, stages, *(share * computed for share in shares))

    def fetched_at(self, number: int) -> float:
        """When the shard that this batch needs is here: it was requested when an earlier batch was begun."""
        announced = self.begun[max(0, number - self.loop.ahead)]
        latency, transfer, unpack = (
            self.noisy(one) for one in (self.loop.latency, self.loop.transfer, self.loop.unpack)
        )
        self.busy, self.latency = self.busy + latency + transfer, self.latency + latency
        self.unpacked += unpack
        self.num_fetched += 1
        first = min(range(len(self.connections)), key=self.connections.__getitem__)
        self.connections[first] = max(announced, self.connections[first]) + latency + transfer + unpack
        return self.connections[first]

    def noisy(self, mean: float) -> float:
        return mean * self.rng.lognormvariate(0.0, 0.15)


def measured(loop: Loop, seed: int) -> LoaderStats:
    """What a loader measures in this loop."""
    rng, meter, clock = random.Random(seed), Meter(), 1000.0
    counters = dict.fromkeys(NAMES, 0.0)
    for _ in range(loop.epochs):
        clock = _epoch(loop, rng, meter, clock, counters)
    settings = replace(loop.settings, predownload=loop.ahead * loop.settings.batch_size)
    beside_s = loop.others_cpu * meter.rest.compute_s  # they do not wait for batches
    idle_s = loop.idle * meter.stats(Counters()).wait_s
    return replace(meter.stats(Counters()), counters=counters, settings=settings, beside_s=beside_s, idle_s=idle_s)


def _epoch(loop: Loop, rng: random.Random, meter: Meter, clock: float, counters: dict[str, float]) -> float:
    num_workers = loop.settings.num_workers
    workers = [_Worker(loop, rng, clock) for _ in range(max(1, num_workers))]
    if loop.settings.num_readers == 1:  # threads fetch by the same connections
        for worker in workers:
            worker.connections = workers[0].connections
    in_progress, handed = 2 * num_workers, [clock]
    for number in range(loop.steps):
        asked = handed[-1]
        if number:
            asked += workers[0].noisy(loop.compute)
            for what, seconds in loop.paused.items():
                since, asked = Mark.of(asked), asked + workers[0].noisy(seconds)
                meter.add_pause(what, since, asked)
        meter.asked(asked, number == 0)
        worker = workers[number % len(workers)]
        allowed = handed[max(0, number - in_progress)] if num_workers else asked
        made = worker.make(allowed)
        got = max(asked, made.ended) + (worker.noisy(loop.sending) if num_workers else 0.0)
        meter.note(asked, got, made, None, number == 0)
        meter.rest.num_samples += loop.settings.batch_size
        handed.append(got)
    fetched = sum(worker.num_fetched for worker in workers)
    counters["shards_fetched"] += fetched
    counters["requests"] += fetched
    counters["shards_here"] += fetched if loop.shard_every else 1
    counters["fetched_bytes"] += 64e6 * fetched
    counters["download_s"] += sum(worker.busy for worker in workers)
    counters["first_byte_s"] += sum(worker.latency for worker in workers)
    counters[loop.unpacks_as] += sum(worker.unpacked for worker in workers)
    for name, each in loop.counted.items():
        counters[name] += each * max(1, fetched)
    return handed[-1]
