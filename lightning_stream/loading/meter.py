"""Measures where the time of a training loop goes: each wait for a batch is divided by what its making took.

Every batch carries the times of its making. If the loop waits, the part of the making that falls into the wait, and
nothing else, counts: what was made ahead cost the training no time. So the parts of a wait add up to it exactly.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from multiprocessing import context, reduction
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_stream.counters import NAMES
from lightning_stream.loading.shared_position import memory_file
from lightning_stream.order.micro_batches import MicroBatch

STAGES = ("planning", "fetching", "reading", "transforming", "collating")  # of the making of a batch
PARTS = ("starting", *STAGES, "sending")  # of a wait: before its batch was begun, and after it was made
_ROW_BYTES = 8 * (len(NAMES) + 1)


class Made(NamedTuple):
    """When a batch was made (`perf_counter`, which all processes of a machine share), and the seconds of its stages.

    `cpu_s` is the processor time of the thread that made it, and `all_cpu_s` that of all threads of the process.
    """

    began: float
    ended: float
    stages: tuple[float, ...]
    cpu_s: float
    all_cpu_s: float


def divided(asked: float, got: float, made: Made) -> tuple[float, ...]:
    """The seconds of each of `PARTS` in a wait. Their sum is the wait."""
    began, ended = min(max(made.began, asked), got), min(max(made.ended, asked), got)
    share = (ended - began) / whole if (whole := sum(made.stages)) > 0 else 0.0
    stages = [share * seconds for seconds in made.stages]
    return (began - asked, *stages, got - asked - (began - asked) - sum(stages))


class Meter:
    """What a loader has measured so far. A copy begins at zero.

    Attributes:
        wait_s, longest_wait_s: Seconds that the consumer waited for batches; the longest wait.
        compute_s: Seconds between the hand-out of a batch and the request for the next one of the same iteration.
        num_batches, num_samples, num_tokens: What was handed out, padding excluded.
        num_iterations: Iterations that have handed out a batch.
        num_ready: Batches that were made before they were requested.
        first_waits, waits: Seconds by `PARTS`, of the waits for first batches of iterations, and for all others.
        work: Seconds by `STAGES` of the making of all batches, also of what cost no time.
        cpu_s, all_cpu_s: As in `Made`, added up.
        waiting_since: When the batch was requested that the consumer waits for; None while it does not wait.
        settings: The `LoadingSettings` when the latest iteration began; None before.
        noted: Called with the time and the batch, for each one that is about to be handed out; None calls nothing.
    """

    def __init__(self) -> None:
        self.wait_s = self.longest_wait_s = self.compute_s = self.cpu_s = self.all_cpu_s = 0.0
        self.num_batches = self.num_samples = self.num_tokens = self.num_iterations = self.num_ready = 0
        self.first_waits, self.waits, self.work = [0.0] * len(PARTS), [0.0] * len(PARTS), [0.0] * len(STAGES)
        self.settings: Any = None
        self.noted: Callable[[float, MicroBatch | None], object] | None = None
        self.waiting_since: float | None = None
        self._training_since: float | None = None
        self._is_paused = False
        self._live: list[SharedCounters] = []
        self._ended = np.zeros(len(NAMES))

    def __reduce__(self) -> tuple[type[Meter], tuple[()]]:
        return Meter, ()

    def asked(self, now: float, is_first: bool) -> None:
        """Note that a batch is requested; what came before the first one of an iteration is not training."""
        self._trained(now, counts=not is_first)
        self.waiting_since = now

    def gave_up(self) -> None:
        """Note that no batch came: the epoch is over, or an error was raised."""
        self.waiting_since = None

    def _trained(self, now: float, counts: bool = True) -> None:
        if self._training_since is not None and counts:
            self.compute_s += now - self._training_since
        self._training_since = None

    def pause(self, now: float) -> None:
        """Note that training stops: for a validation, or at the end of an epoch."""
        self._is_paused = self._training_since is not None
        self._trained(now)

    def resume(self, now: float) -> None:
        """Note that training continues after a pause."""
        if self._is_paused:
            self._training_since, self._is_paused = now, False

    def note(self, asked: float, got: float, made: Made, batch: MicroBatch | None, is_first: bool) -> None:
        """Count a batch that is about to be handed out."""
        wait_s, self.waiting_since, self._training_since, self._is_paused = got - asked, None, got, False
        self.wait_s += wait_s
        self.longest_wait_s = max(self.longest_wait_s, wait_s)
        self.num_batches += 1
        self.num_iterations += is_first
        if batch is not None:
            self.num_samples += batch.num_samples
            self.num_tokens += batch.num_tokens
        if made.ended < asked:
            self.num_ready += 1
        waits, work = self.first_waits if is_first else self.waits, self.work
        for number, seconds in enumerate(divided(asked, got, made)):
            waits[number] += seconds
        for number, seconds in enumerate(made.stages):
            work[number] += seconds
        self.cpu_s += made.cpu_s
        self.all_cpu_s += made.all_cpu_s
        if self.noted is not None:
            self.noted(got, batch)

    def counters(self) -> NDArray[np.float64]:
        """The counters of all worker processes so far, float64[len(NAMES)]."""
        return self._ended + sum((shared.values.sum(axis=0) for shared in list(self._live)), np.zeros(len(NAMES)))

    def worker_pids(self) -> list[int]:
        """The process ids of the workers that can report where they stand."""
        return [int(pid) for shared in list(self._live) for pid in shared.pids if pid]

    def attach(self, num_workers: int) -> SharedCounters:
        """Make the counters of so many new workers, which count until they are detached."""
        shared = SharedCounters(num_workers)
        self._live.append(shared)
        return shared

    def detach(self, shared: SharedCounters | None) -> None:
        """Keep the sum of the counters of workers that have ended."""
        if shared in self._live:
            self._live.remove(shared)
            self._ended += shared.values.sum(axis=0)


class SharedCounters:
    """The counters of the workers of one iteration, in memory that they share with their trainer.

    Forked workers inherit it, spawned ones get its descriptor. `values` is float64[num_workers, len(NAMES)], and `pids`
    float64[num_workers] has the process id of each worker that can report where it stands, and 0 for others.
    """

    _fd = -1

    def __init__(self, num_workers: int, fd: int | None = None) -> None:
        num_bytes = num_workers * _ROW_BYTES
        self._fd = memory_file("counters", num_bytes) if fd is None else fd
        memory = np.frombuffer(mmap.mmap(self._fd, num_bytes), np.float64).reshape(num_workers, -1)
        self.values: NDArray[np.float64] = memory[:, :-1]
        self.pids: NDArray[np.float64] = memory[:, -1]

    def __reduce__(self) -> tuple[Callable[..., SharedCounters], tuple[Any, ...]]:
        if context.get_spawning_popen() is not None:  # on its way to a worker process
            return _attach, (len(self.values), reduction.DupFd(self._fd))
        return SharedCounters, (len(self.values),)

    def __del__(self, _close: Callable[[int], None] = os.close) -> None:  # at exit modules are gone
        if self._fd >= 0:
            _close(self._fd)


def _attach(num_workers: int, handle: Any) -> SharedCounters:
    return SharedCounters(num_workers, handle.detach())
