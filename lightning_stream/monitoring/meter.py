"""Measures where the time of a training loop goes: each wait for a batch is divided by what its making took.

Every batch carries the times of its making. If the loop waits, the part of the making that falls into the wait, and
nothing else, counts: what was made ahead cost the training no time. So the parts of a wait add up to it exactly.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from operator import add
from pathlib import Path
from time import perf_counter, process_time, thread_time
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from lightning_stream.counters import NAMES, Counters
from lightning_stream.monitoring.measured import PARTS, STAGES
from lightning_stream.monitoring.stats import LoaderStats
from lightning_stream.order.micro_batches import MicroBatch
from lightning_stream.reading.proofs import UnverifiedRead

_UPTIME = Path("/proc/uptime")  # its second number is how long all processor cores of the machine were idle
_TICK_S = 0.01  # of that number
_SHORT_S = 0.001
_UNMEASURED = 63  # after the measured one of the batches or steps that take less time
_NOTHING = (0.0,) * len(PARTS)
_AMOUNTS = (  # of a batch, which are added up
    *("num_batches", "num_ready", "num_samples", "num_tokens", "num_positions"),
    *("wait_s", "cpu_s", "all_cpu_s", "queued_s"),
    *(f"work.{stage}" for stage in STAGES),
    *(f"waits.{part}" for part in PARTS),
)


class Made(NamedTuple):
    """When a batch was made (`perf_counter`, which all processes of a machine share), and the seconds of its stages.

    `cpu_s` is the processor time of the thread that made it, and `all_cpu_s` that of all threads of the process.
    `queued_s` is how long the thread could have computed, but waited for a processor core. `unverified` has the samples
    that were read before their shards were verified.
    """

    began: float
    ended: float
    stages: tuple[float, ...]
    cpu_s: float
    all_cpu_s: float
    queued_s: float = 0.0
    unverified: tuple[UnverifiedRead, ...] = ()


class _GarbageCollections:
    """Adds up the seconds that the garbage collections of this process take, once it is among `gc.callbacks`."""

    seconds = _began = 0.0

    def __call__(self, phase: str, _: object, _now: Callable[[], float] = perf_counter) -> None:
        if phase == "start":
            self._began = _now()
        else:
            self.seconds += _now() - self._began

    def watch(self) -> None:
        """Add up from now on."""
        if self not in gc.callbacks:
            gc.callbacks.append(self)


GARBAGE = _GarbageCollections()


class Mark(NamedTuple):
    """A moment, and the seconds of all garbage collections before it."""

    at: float
    collected: float

    @classmethod
    def of(cls, now: float) -> Mark:
        """The mark of this moment."""
        return cls(now, GARBAGE.seconds)


def divided(asked: float, got: float, made: Made) -> tuple[float, ...]:
    """The seconds of each of `PARTS` in a wait. Their sum is the wait."""
    if asked <= made.began and made.ended <= got:  # the common case takes a third of the time so
        return (made.began - asked, *made.stages, got - made.ended)
    began = min(max(made.began, asked), got)
    ended = min(max(made.ended, asked), got)
    share = (ended - began) / (sum(made.stages) or 1.0)
    stages = [share * seconds for seconds in made.stages]
    return (began - asked, *stages, got - began - sum(stages))


class SampledClocks:
    """What passes on clocks that take longer to read than a short batch or step: of these one in 64 is measured.

    The others are taken to be like it.
    """

    def __init__(self, *clocks: Callable[[], float], short_s: float = _SHORT_S) -> None:
        self._clocks = clocks
        self._short_s = short_s
        self._num_unmeasured = 0
        self._begins = self._shares = [0.0] * len(clocks)

    def begin(self) -> None:
        """Note that a batch or step begins."""
        if not self._num_unmeasured:
            self._begins = [clock() for clock in self._clocks]

    def passed(self, seconds: float) -> list[float]:
        """What has passed on each clock since then, of a batch or step that took so long."""
        if self._num_unmeasured:
            self._num_unmeasured = self._num_unmeasured - 1 if seconds < self._short_s else 0
            return list(map(seconds.__mul__, self._shares))
        passed = [clock() - begin for clock, begin in zip(self._clocks, self._begins, strict=True)]
        if 0 < seconds < self._short_s:
            self._shares = [value / seconds for value in passed]
            self._num_unmeasured = _UNMEASURED
        return passed


def _idle_s() -> float:
    """Seconds that the processor cores of this machine were idle so far, added up; all, where the system is silent."""
    try:
        with _UPTIME.open("rb", buffering=0) as file:
            return float(file.read().split()[1])
    except OSError:
        return perf_counter() * (os.cpu_count() or 1)


class WorkerMemory(Protocol):
    """What a worker writes and its trainer reads while it lives."""

    counters: NDArray[np.float64]  # of its reader, float64[len(NAMES)]
    pid: NDArray[np.float64]  # its process id where it can report where it stands, else 0: float64[1]


class Meter:
    """What a loader has measured so far. A copy begins at zero.

    Attributes:
        rest: What was measured between batches, and what holds for the moment.
        waiting_since: When the batch was requested that the consumer waits for; None while it does not wait.
        noted: Called with the time and the batch, for each one that is about to be handed out; None calls nothing.
    """

    def __init__(self) -> None:
        self.rest = LoaderStats()
        self._sums = [0.0] * len(_AMOUNTS)
        self.noted: Callable[[float, MicroBatch | None], object] | None = None
        self.waiting_since: float | None = None
        self._pause: tuple[str, Mark] | None = None  # what the consumer does instead of training, and since when
        self._training_since: float | None = None
        self._others = SampledClocks(lambda: process_time() - thread_time())  # of other threads
        self._idle = SampledClocks(_idle_s, short_s=_TICK_S)
        self._collected = 0.0  # seconds of garbage collections that are not part of this step
        # The sum of the counters of workers that have ended, and the others: one value, which other threads read.
        self._counted: tuple[NDArray[np.float64], tuple[WorkerMemory, ...]] = np.zeros(len(NAMES)), ()

    def __reduce__(self) -> tuple[type[Meter], tuple[()]]:
        return Meter, ()

    def stats(self, local: Counters) -> LoaderStats:
        """What was measured so far, with the counters of this process and of all workers."""
        ended, workers = self._counted
        counters = sum((worker.counters for worker in workers), local.values + ended)
        total = LoaderStats.of_numbers(dict(zip(_AMOUNTS, self._sums, strict=True))) + self.rest
        return replace(total, counters=dict(zip(NAMES, counters.tolist(), strict=True)))

    def asked(self, now: float, is_first: bool) -> None:
        """Note that a batch is requested; what came before the first one of an iteration is not training."""
        if is_first:
            self.forget_step()
        else:
            self.stop(now)
        self.waiting_since = now
        self._idle.begin()

    def forget_step(self) -> None:
        """Note that no training has gone on since the last batch: an error ended it, or what paused it."""
        self._training_since = self._pause = None

    def gave_up(self, over: float | None) -> None:
        """Note that no batch came: the epoch was over, with its workers, at this time; or an error was raised."""
        if over is not None and self.waiting_since is not None:
            self.rest.wait_s += over - self.waiting_since
            self.rest.first_waits["starting"] += over - self.waiting_since
        self.waiting_since = None

    def stop(self, now: float) -> None:
        """Note that training stops: a batch is requested, or an epoch or iteration ends."""
        if self._training_since is not None:
            seconds = now - self._training_since
            self.rest.compute_s += seconds
            self.rest.beside_s += self._others.passed(seconds)[0]
            self.rest.pauses["garbage_collection"] += GARBAGE.seconds - self._collected
            self._training_since = None

    def add_pause(self, what: str, since: Mark, now: float) -> None:
        """Note what the consumer did since a mark instead of training: ``"validation"``, or one of `PAUSE_LABELS`."""
        seconds = now - since.at
        self._collected += GARBAGE.seconds - since.collected
        if self._training_since is not None:
            self._training_since += seconds
        if what == "validation":
            self.rest.validation_s += seconds
        else:
            self.rest.compute_s += seconds
            self.rest.pauses[what] += seconds

    def begin(self, what: str) -> bool:
        """Note that the consumer begins this instead of training, see `add_pause`; False if it is a part of another."""
        begins = self._pause is None
        if begins:
            self._pause = what, Mark.of(perf_counter())
        return begins

    def end(self, what: str) -> None:
        """Note that the consumer has ended this, if it had begun."""
        if self._pause is not None and self._pause[0] == what:
            self.add_pause(*self._pause, perf_counter())
            self._pause = None

    @contextmanager
    def pausing(self, what: str) -> Iterator[None]:
        """Measure a block as a validation or a checkpoint, see `StreamingDataLoader.aside`."""
        if what not in ("validation", "checkpoint"):
            raise ValueError(f'aside() measures a "validation" or a "checkpoint"; found {what!r}')
        begins = self.begin(what)
        try:
            yield
        finally:
            if begins:
                self.end(what)

    def note(self, asked: float, got: float, made: Made, batch: MicroBatch | None, is_first: bool) -> None:
        """Count a batch that is about to be handed out."""
        self.waiting_since = None
        self._training_since = got
        self._others.begin()
        self._collected = GARBAGE.seconds
        wait_s = got - asked
        rest = self.rest
        rest.longest_wait_s = max(rest.longest_wait_s, wait_s)
        rest.idle_s += self._idle.passed(wait_s)[0]
        num_samples = num_tokens = num_positions = 0
        if batch is not None:
            num_samples = batch.num_samples
            num_tokens = batch.num_tokens
            num_positions = batch.end - batch.begin if batch.completes_step else 0
            rest.epoch_fraction = min(1.0, batch.end / rest.epoch_positions)
        waits = divided(asked, got, made)
        if is_first:
            GARBAGE.watch()
            rest.num_iterations += 1
            rest.first_waits = dict(zip(PARTS, map(add, rest.first_waits.values(), waits), strict=True))
            waits = _NOTHING
        amounts = (
            *(1, made.ended < asked, num_samples, num_tokens, num_positions),
            *(wait_s, made.cpu_s, made.all_cpu_s, made.queued_s),
            *made.stages,
            *waits,
        )
        self._sums = list(map(add, self._sums, amounts))
        if self.noted is not None:
            self.noted(got, batch)

    def worker_pids(self) -> list[int]:
        """The process ids of the workers that can report where they stand."""
        return [pid for worker in self._counted[1] if (pid := int(worker.pid[0]))]

    def attach(self, new: Sequence[WorkerMemory]) -> None:
        """Count what new workers count in their memory."""
        ended, workers = self._counted
        self._counted = ended, (*workers, *new)

    def detach(self, old: Sequence[WorkerMemory]) -> None:
        """Keep the sum of the counters of workers that have ended."""
        ended, workers = self._counted
        ended = sum((worker.counters for worker in old), ended)
        self._counted = ended, tuple(worker for worker in workers if worker not in old)
