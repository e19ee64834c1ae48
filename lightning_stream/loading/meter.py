"""Measures where the time of a training loop goes: each wait for a batch is divided by what its making took.

Every batch carries the times of its making. If the loop waits, the part of the making that falls into the wait, and
nothing else, counts: what was made ahead cost the training no time. So the parts of a wait add up to it exactly.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_stream.counters import LIVE_SETTINGS, NAMES
from lightning_stream.order.micro_batches import MicroBatch
from lightning_stream.reading.proofs import EarlyRead

if TYPE_CHECKING:
    from lightning_stream.loading.arena import Arena

STAGES = ("planning", "fetching", "reading", "transforming", "collating")  # of the making of a batch
PARTS = ("starting", *STAGES, "sending")  # of a wait: before its batch was begun, and after it was made
PAUSES = ("checkpoint", "garbage_collection", "other_ranks")  # of the time between batches
_NOTHING = (0.0,) * (len(PARTS) - 1)


class Made(NamedTuple):
    """When a batch was made (`perf_counter`, which all processes of a machine share), and the seconds of its stages.

    `cpu_s` is the processor time of the thread that made it, and `all_cpu_s` that of all threads of the process.
    `queued_s` is how long the thread could have computed, but waited for a processor core. `early` has the samples that
    were read before their shards were verified.
    """

    began: float
    ended: float
    stages: tuple[float, ...]
    cpu_s: float
    all_cpu_s: float
    queued_s: float = 0.0
    early: tuple[EarlyRead, ...] = ()


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
    if asked <= made.began and made.ended <= got:  # the common cases take a third of the time so
        return (made.began - asked, *made.stages, got - made.ended)
    if made.ended <= asked:
        return (*_NOTHING, got - asked)
    began, ended = min(max(made.began, asked), got), min(max(made.ended, asked), got)
    share = (ended - began) / whole if (whole := sum(made.stages)) > 0 else 0.0
    stages = [share * seconds for seconds in made.stages]
    return (began - asked, *stages, got - asked - (began - asked) - sum(stages))


class Meter:
    """What a loader has measured so far. A copy begins at zero.

    Attributes:
        wait_s, longest_wait_s: Seconds that the consumer waited for batches; the longest wait.
        compute_s: Seconds between the hand-out of a batch and the request for the next one of the same iteration, or
            the end of the iteration, validations excluded; and of checkpoints written between iterations.
        pauses: The parts of `compute_s`, by `PAUSES`, in which the consumer did not train.
        validation_s: Seconds of validations.
        num_batches, num_samples, num_tokens: What was handed out, padding excluded.
        num_positions: Positions of the epoch's order in the steps that were handed out, over all replicas.
        reached, epoch_positions: The position behind the latest batch; about how many its epoch has.
        num_iterations: Iterations that have handed out a batch.
        num_ready: Batches that were made before they were requested.
        first_waits, waits: Seconds by `PARTS`, of the waits for first batches of iterations, and for all others. The
            first part of `first_waits` has the ends of iterations, too, at which their workers end.
        work: Seconds by `STAGES` of the making of all batches, also of what cost no time.
        cpu_s, all_cpu_s, queued_s: As in `Made`, added up.
        waiting_since: When the batch was requested that the consumer waits for; None while it does not wait.
        settings: The `LoadingSettings` when the latest iteration began, or they were changed; None before.
        live_settings: See `Counters`; those of this process and its workers.
        is_aside: Whether the consumer does something else than training, which is measured when it ends.
        noted: Called with the time and the batch, for each one that is about to be handed out; None calls nothing.
    """

    def __init__(self) -> None:
        self.wait_s = self.longest_wait_s = self.compute_s = self.cpu_s = self.all_cpu_s = 0.0
        self.queued_s = 0.0
        self.num_batches = self.num_samples = self.num_tokens = self.num_iterations = self.num_ready = 0
        self.num_positions = self.reached = 0
        self.epoch_positions = 0.0
        self.first_waits, self.waits, self.work = [0.0] * len(PARTS), [0.0] * len(PARTS), [0.0] * len(STAGES)
        self.pauses, self.validation_s = dict.fromkeys(PAUSES, 0.0), 0.0
        self.settings: Any = None
        self.noted: Callable[[float, MicroBatch | None], object] | None = None
        self.waiting_since: float | None = None
        self.is_aside = False
        self._training_since: float | None = None
        self._collected = 0.0  # seconds of garbage collections that are not part of this step
        self.live_settings: NDArray[np.float64] = np.zeros(len(LIVE_SETTINGS))
        self._arenas: list[Arena] = []  # of workers that have not ended
        self._ended = np.zeros(len(NAMES))

    def __reduce__(self) -> tuple[type[Meter], tuple[()]]:
        return Meter, ()

    def asked(self, now: float, is_first: bool) -> None:
        """Note that a batch is requested; what came before the first one of an iteration is not training."""
        if is_first:
            self._training_since = None
        else:
            self.stop(now)
        self.waiting_since = now

    def gave_up(self, over: float | None) -> None:
        """Note that no batch came: the epoch was over, with its workers, at this time; or an error was raised."""
        if over is not None and self.waiting_since is not None:
            self.wait_s += over - self.waiting_since
            self.first_waits[0] += over - self.waiting_since
        self.waiting_since = None

    def stop(self, now: float) -> None:
        """Note that training stops: a batch is requested, or an epoch or iteration ends."""
        if self._training_since is not None:
            self.compute_s += now - self._training_since
            self.pauses["garbage_collection"] += GARBAGE.seconds - self._collected
            self._training_since = None

    def spent(self, what: str, since: Mark, now: float) -> None:
        """Note what the consumer did since a mark instead of training: ``"validation"``, or one of `PAUSES`."""
        seconds = now - since.at
        self._collected += GARBAGE.seconds - since.collected
        if self._training_since is not None:
            self._training_since += seconds
        if what == "validation":
            self.validation_s += seconds
        else:
            self.compute_s += seconds
            self.pauses[what] += seconds

    def note(self, asked: float, got: float, made: Made, batch: MicroBatch | None, is_first: bool) -> None:
        """Count a batch that is about to be handed out."""
        wait_s, self.waiting_since, self._training_since, self._collected = got - asked, None, got, GARBAGE.seconds
        self.wait_s += wait_s
        self.longest_wait_s = max(self.longest_wait_s, wait_s)
        self.num_batches += 1
        if is_first:
            self.num_iterations += 1
            GARBAGE.watch()
        if batch is not None:
            self.num_samples += batch.num_samples
            self.num_tokens += batch.num_tokens
            self.reached = batch.end
            if batch.completes_step:
                self.num_positions += batch.end - batch.begin
        if made.ended < asked:
            self.num_ready += 1
        waits, work = self.first_waits if is_first else self.waits, self.work
        for number, seconds in enumerate(divided(asked, got, made)):
            waits[number] += seconds
        for number, seconds in enumerate(made.stages):
            work[number] += seconds
        self.cpu_s += made.cpu_s
        self.all_cpu_s += made.all_cpu_s
        self.queued_s += made.queued_s
        if self.noted is not None:
            self.noted(got, batch)

    def counters(self) -> NDArray[np.float64]:
        """The counters of all worker processes so far, float64[len(NAMES)]."""
        return self._ended + sum((arena.counters for arena in list(self._arenas)), np.zeros(len(NAMES)))

    def worker_pids(self) -> list[int]:
        """The process ids of the workers that can report where they stand."""
        return [pid for arena in list(self._arenas) if (pid := int(arena.pid[0]))]

    def attach(self, arenas: Sequence[Arena]) -> None:
        """Count what new workers count in their memory."""
        self._arenas += arenas
        self.set_live(self.live_settings)

    def set_live(self, settings: NDArray[np.float64]) -> None:
        """Change the settings of this process, and of its workers."""
        for place in (self.live_settings, *(arena.live_settings for arena in list(self._arenas))):
            place[:] = settings

    def detach(self, arenas: Sequence[Arena]) -> None:
        """Keep the sum of the counters of workers that have ended."""
        for arena in arenas:
            if arena in self._arenas:
                self._arenas.remove(arena)
                self._ended += arena.counters
