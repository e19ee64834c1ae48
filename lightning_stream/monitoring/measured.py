"""`Measured`: what a loader has measured, as one value that adds itself up, and what follows from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Self

from lightning_stream.counters import NAMES

STAGES = ("planning", "fetching", "reading", "transforming", "collating")  # of the making of a batch
PARTS = ("starting", *STAGES, "sending")  # of a wait: before its batch was begun, and after it was made
INPUT_BOUND = 0.05  # the part of the time spent waiting from which on training counts as input-bound
Amounts = dict[str, float]  # seconds or counts, by name
MB = 1e6
_OF_THE_MOMENT = ("settings", "epoch_positions", "epoch_fraction", "longest_wait_s")
PAUSE_LABELS = {  # of the pauses between batches
    "checkpoint": "writing checkpoints",
    "garbage_collection": "garbage collection",
    "other_ranks": "other ranks were late",
}


@dataclass(frozen=True)
class LoadingSettings:
    """The settings of a loader that decide how fast it is.

    Attributes:
        batch_size: Samples of a micro-batch on one device.
        num_workers, workers: Workers, and whether these are processes or threads; 0: the training process makes the
            batches itself.
        num_cores: Processor cores that this process and its workers may use.
        fetch_threads: Shards that each of these processes fetches at the same time.
        persistent_workers: Whether the workers stay between epochs.
        predownload: Samples that each worker looks ahead at most.
        cache_limit, dataset_bytes: Bytes that the cache may hold (None: no limit); bytes of all raw shards.
    """

    batch_size: int = 1
    num_workers: int = 0
    workers: str = "processes"  # or "threads"
    num_cores: int = 1
    fetch_threads: int = 4
    persistent_workers: bool = False
    predownload: int = 8
    cache_limit: int | None = None
    dataset_bytes: int = 0

    @property
    def num_readers(self) -> int:
        """Processes that fetch shards and make batches."""
        return 1 if self.workers == "threads" else max(1, self.num_workers)


@dataclass
class Measured:
    """What one process has measured at its loader: since it was made, or between two moments.

    Attributes:
        num_batches, num_samples, num_tokens: What was handed out, padding excluded; tokens of packed rows only.
        num_positions: Positions of the epoch's order (samples, or rows that they are packed into) in the steps that
            were handed out, over all replicas.
        epoch_positions, epoch_fraction: About how many the current epoch has; the part of them that was handed out.
        num_iterations: Iterations (epochs, usually) that handed out a batch.
        num_ready: Batches that were ready when they were requested.
        wait_s, longest_wait_s: Seconds that training waited for its batches: the exposed data time; the longest wait.
        compute_s: Seconds between batches in which training did not wait, validations excluded.
        pauses: The parts of `compute_s` in which nothing was trained either: ``"checkpoint"``,
            ``"garbage_collection"``, ``"other_ranks"`` (which were late; under a trainer that reports them).
        validation_s: Seconds of validations, under a trainer or `StreamingDataLoader.aside`.
        waits: The parts of `wait_s`, without those of each iteration's first batch and end, which are in `first_waits`.
        work: Seconds of making batches by stage, over all workers, also of what was made ahead.
        cpu_s, all_cpu_s: Processor time of the threads that made them; of all threads of their processes meanwhile.
        beside_s: Processor time of the other threads of this process, while training did not wait.
        queued_s: How long these threads waited for a processor core; 0 where the system does not tell (Linux does).
        idle_s: Seconds that processor cores of the machine were idle while training waited, added up over them.
        counters: What `lightning_stream.counters` counts, over all workers.
        settings: Those of the loader.
    """

    num_batches: int = 0
    num_samples: int = 0
    num_tokens: int = 0
    num_iterations: int = 0
    num_ready: int = 0
    num_positions: int = 0
    epoch_positions: float = 0.0
    epoch_fraction: float = 0.0
    wait_s: float = 0.0
    longest_wait_s: float = 0.0
    compute_s: float = 0.0
    cpu_s: float = 0.0
    all_cpu_s: float = 0.0
    beside_s: float = 0.0
    queued_s: float = 0.0
    idle_s: float = 0.0
    validation_s: float = 0.0
    pauses: Amounts = field(default_factory=lambda: dict.fromkeys(PAUSE_LABELS, 0.0))
    waits: Amounts = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))
    first_waits: Amounts = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))
    work: Amounts = field(default_factory=lambda: dict.fromkeys(STAGES, 0.0))
    counters: Amounts = field(default_factory=lambda: dict.fromkeys(NAMES, 0.0))
    settings: LoadingSettings = field(default_factory=LoadingSettings)

    def __sub__(self, before: Self) -> Self:
        """What was measured since `before`; the longest wait stays that of the whole time."""
        return self._combined(before, -1)

    def __add__(self, later: Self) -> Self:
        """What was measured in both."""
        return replace(later._combined(self, 1), longest_wait_s=max(self.longest_wait_s, later.longest_wait_s))

    def _combined(self, other: Self, sign: int) -> Self:
        others = other.numbers()
        summed = {name: value + sign * others[name] for name, value in self.numbers().items()}
        return replace(self.of_numbers(summed), **{name: getattr(self, name) for name in _OF_THE_MOMENT})

    @property
    def elapsed_s(self) -> float:
        """Seconds of training, waiting and pauses included."""
        return self.wait_s + self.compute_s

    @property
    def training_s(self) -> float:
        """Seconds between batches, pauses excluded."""
        return self.compute_s - sum(self.pauses.values())

    @property
    def wait_share(self) -> float:
        """The part of the time that training waited for data, from 0 to 1."""
        return ratio(self.wait_s, self.elapsed_s)

    @property
    def first_wait_s(self) -> float:
        """The seconds of `wait_s` that were spent on the first batches of iterations, and on their ends."""
        return sum(self.first_waits.values())

    @property
    def steady_wait_s(self) -> float:
        """The other seconds of `wait_s`."""
        return self.wait_s - self.first_wait_s

    @property
    def first_wait_share(self) -> float:
        """The part of the time that training waited for first batches, which is a part of `wait_share`."""
        return ratio(self.first_wait_s, self.elapsed_s)

    @property
    def waited(self) -> str:
        """The waiting in seconds, e.g. ``"3.25 s for data, 0.60 s of it for first batches"``."""
        return f"{self.wait_s:.2f} s for data, {self.first_wait_s:.2f} s of it for first batches"

    @property
    def samples_per_s(self) -> float:
        """Samples that this process trained on in a second."""
        return ratio(self.num_samples, self.elapsed_s)

    @property
    def download_mb_s(self) -> float:
        """Megabytes (10^6 bytes) that came from the store in a second, over all workers."""
        return ratio(self.counters["fetched_bytes"] / MB, self.elapsed_s)

    @property
    def cache_hit(self) -> float:
        """The part of the opened shards that were in the cache already, from 0 to 1; 1 if none was opened."""
        here = self.counters["shards_here"]
        fetched = self.counters["shards_fetched"]
        return here / (here + fetched) if here + fetched else 1.0

    @property
    def ready_share(self) -> float:
        """The part of the batches that were ready when they were requested, from 0 to 1."""
        return ratio(self.num_ready, self.num_batches)

    @property
    def fetching_s(self) -> float:
        """Seconds that threads have fetched and unpacked shards, added up over all of them."""
        return sum(self.counters[name] for name in ("download_s", "verify_s", "decompress_s", "convert_s"))

    @property
    def fetchers(self) -> int:
        """Shards that a process fetches at the same time: more than it has threads for where a batch waits for many."""
        settings = self.settings
        return max(settings.fetch_threads, round(ratio(self.fetching_s, settings.num_readers * self.elapsed_s)))

    @property
    def work_s(self) -> float:
        """Seconds of making batches, over all workers."""
        return sum(self.work.values())

    @property
    def computing_s(self) -> float:
        """Those of them in which no shard was waited for."""
        return self.work_s - self.work["fetching"]

    @property
    def queued_share(self) -> float:
        """The part of these in which the threads that make batches waited for a processor core."""
        return ratio(min(self.queued_s, max(0.0, self.computing_s - self.cpu_s)), self.computing_s)

    @property
    def idle_cores(self) -> float:
        """Processor cores of the machine that were idle while training waited."""
        return ratio(self.idle_s, self.wait_s)

    @property
    def held_share(self) -> float:
        """The part in which they neither computed nor could have: they slept, read, or waited for a lock."""
        return 1 - ratio(self.cpu_s, self.computing_s) - self.queued_share

    def making_s(self, computing_s: float) -> float:
        """Seconds in which the workers make these batches, which takes so long in one of them.

        Workers share the making, and all their threads the fetching: the slower of both counts.
        """
        fetching_s = self.fetching_s / (self.settings.num_readers * self.fetchers)
        return max(computing_s / max(1, self.settings.num_workers), fetching_s)

    @property
    def headroom(self) -> float:
        """How many times as fast as training the data could be; below 1, training waits. 0 if nothing was measured.

        The workers have so much time to make batches, and their threads to fetch shards, as training takes; without
        workers, training waits in any case.
        """
        return ratio(self.compute_s, self.making_s(self.computing_s)) if self.settings.num_workers else 0.0

    @property
    def epoch_left_s(self) -> float:
        """Seconds until the end of the epoch at this speed; 0 if nothing was measured."""
        return ratio((1 - self.epoch_fraction) * self.epoch_positions * self.elapsed_s, self.num_positions)

    def numbers(self) -> Amounts:
        """All that can be added up, as flat numbers by name, e.g. ``"waits.fetching"``; see `of_numbers`."""
        numbers: Amounts = {}
        for name in _SUMMED:
            value = getattr(self, name)
            if isinstance(value, dict):
                numbers |= {f"{name}.{key}": amount for key, amount in value.items()}
            else:
                numbers[name] = value
        return numbers

    @classmethod
    def of_numbers(cls, numbers: Mapping[str, float]) -> Self:
        """The value that had these `numbers`; those that are missing are 0."""
        stats = cls()
        for name in _SUMMED:
            zero = getattr(stats, name)
            if isinstance(zero, dict):
                zero.update({key: numbers.get(f"{name}.{key}", 0.0) for key in zero})
            else:
                setattr(stats, name, type(zero)(numbers.get(name, 0)))
        return stats


def ratio(amount: float, total: float) -> float:
    """The amount for each of the total; 0 if nothing was measured."""
    return amount / total if total > 0 else 0.0


def percent(share: float) -> str:
    """A part of the time as text, e.g. ``"1.2%"`` or ``"37%"``: the same wherever it is shown."""
    return f"{100 * share:.1f}%" if share < INPUT_BOUND else f"{100 * share:.0f}%"


_SUMMED = tuple(column.name for column in fields(Measured) if column.name not in _OF_THE_MOMENT)
