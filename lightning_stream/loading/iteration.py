"""One iteration over a loader, and the position that a loader's iterations have reached."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from time import perf_counter
from typing import Any, Protocol
from weakref import WeakSet, ref

from lightning_stream.errors import StateError, StoreError
from lightning_stream.loading.source import BatchSettings
from lightning_stream.loading.workers import MadeBatches
from lightning_stream.monitoring.meter import Made, Meter
from lightning_stream.monitoring.stats import LoaderStats
from lightning_stream.order import OrderConfig, Position, RunOrder, ledger
from lightning_stream.order.micro_batches import MicroBatch
from lightning_stream.order.rows import Landmark
from lightning_stream.questions import Occurrence
from lightning_stream.questions.describe import Chain

_LOOKS_BEFORE_WARNING = 3


class Driver(Protocol):
    """A trainer that drives a loader: it has the training run's position, and recognises its own iteration.

    `PositionTracker` documents its methods.
    """

    padding: bool  # whether a rank gets padding beside samples of its own
    counts: bool  # whether a trainer reports what was trained on
    takes_states: bool  # whether the trainer loads states through the loader

    @property
    def known(self) -> Position | None: ...
    @property
    def current(self) -> MicroBatch | None: ...
    @property
    def iteration(self) -> LoaderIterator | None: ...
    def reorder(self, order: OrderConfig) -> None: ...
    def begin(self, iterator: LoaderIterator) -> Position | None: ...
    def note_batch(self, iterator: LoaderIterator) -> None: ...
    def state(self) -> dict[str, Any]: ...
    def load(self, state: Mapping[str, Any] | None) -> None: ...


class Loader(Protocol):
    """A `StreamingDataLoader`, which documents these methods, as its iterators and its dataset use it."""

    @property
    def position(self) -> Position: ...
    def __len__(self) -> int: ...

    evaluation: bool
    packs_states: bool

    @property
    def is_driven(self) -> bool: ...
    @property
    def meter(self) -> Meter: ...
    @property
    def last_batch(self) -> MicroBatch | None: ...
    def stats(self) -> LoaderStats: ...
    def begin_iteration(self, iterator: LoaderIterator) -> tuple[Position, MadeBatches]: ...
    def batches_from(self, start: Position) -> MadeBatches: ...
    def note_batch(self, iterator: LoaderIterator, asked: float, got: float, made: Made) -> None: ...
    def note_end(self, iterator: LoaderIterator) -> None: ...
    def compare_arrived(self) -> None: ...
    def compare_early(self, *, wait: bool = True) -> None: ...
    def set_epoch(self, epoch: int) -> None: ...
    def state_of(self, position: Position) -> dict[str, Any]: ...
    def state_after(self, num_samples: int | None) -> dict[str, Any]: ...
    def load_state_dict(self, state: Mapping[str, Any] | None) -> None: ...
    def describe(self, count_rows: bool | None = None) -> Chain: ...
    def where(self, sample_id: int, epochs: Iterable[int] | None = None) -> list[Occurrence]: ...


class _Turns:
    """Counts how often another loader of this process is asked for a batch than the one before."""

    def __init__(self) -> None:
        self.number, self._asked_last = 0, 0

    def take(self, loader: Loader) -> int:
        """Note that a loader is asked for a batch; returns the number of its turn."""
        if self._asked_last != id(loader):
            self._asked_last = id(loader)
            self.number += 1
        return self.number


_TURNS = _Turns()


class LoaderIterator:
    """One iteration over a `StreamingDataLoader`, with workers and a position of its own.

    It begins at the first ``next``. `close` or dropping it ends its workers and releases its shards.

    Attributes:
        start: Where it began; None before its first batch.
        last_batch: The samples of the batch that it handed out last.
        num_batches: How many it handed out.
        is_exhausted: Whether it came to the end of its epoch.
        limit: How many it hands out at most; None for all of the epoch.

    Example::

        batches = iter(loader)
        first = next(batches)
        state = batches.state_dict()  # resumes at the second batch
        batches.close()
    """

    _is_over = True  # of a half-made one

    def __init__(self, loader: Loader, moves: bool = True) -> None:
        self._loader, self.moves = loader, moves
        self._made: MadeBatches | None = None
        self._is_over = self._is_outdated = self.is_exhausted = False
        self.start: Position | None = None
        self.last_batch: MicroBatch | None = None
        self.num_batches = self._turn = 0
        self.limit: int | None = None

    def __iter__(self) -> LoaderIterator:
        return self

    def __len__(self) -> int:
        return len(self._loader)

    def __next__(self) -> Any:
        if self._is_over:
            raise StopIteration
        asked, last, self._turn = perf_counter(), self.last_batch, _TURNS.take(self._loader)
        try:
            if self._made is None:
                self.start, self._made = self._loader.begin_iteration(self)
            if self.is_measured:
                self._loader.meter.asked(asked, is_first=not self.num_batches)
            if self.limit is not None and self.num_batches >= self.limit:
                raise StopIteration
            if self._is_outdated and (last is None or (last.completes_step and not last.ends_epoch)):
                self._made.close()
                self._made, self._is_outdated = self._loader.batches_from(self.position), False
            self._loader.compare_arrived()
            batch, self.last_batch, made = next(self._made)
        except BaseException as error:
            self.is_exhausted = isinstance(error, StopIteration) and self.num_batches != self.limit
            self._end()
            self._loader.meter.gave_up(perf_counter() if isinstance(error, StopIteration) else None)
            if isinstance(error, (StopIteration, StoreError)):  # that of a worker does not know the batches
                self._loader.compare_early(wait=isinstance(error, StopIteration))
            raise
        self.num_batches += 1
        self._loader.note_batch(self, asked, perf_counter(), made)
        return batch

    @property
    def is_measured(self) -> bool:
        """Whether the loader measures its waits: not where somebody only looks at batches."""
        return self.moves or self._loader.evaluation

    @property
    def position(self) -> Position:
        """Everything before it was handed out; inside an accumulation: the last whole optimizer step."""
        return self._loader.position if (stop := self.stop) is None else stop.position

    @property
    def stop(self) -> _Stop | None:
        """Where it is; None before its first batch."""
        if self.start is None:
            return None
        return _Stop(self.start, self.last_batch, self.num_batches, self.is_exhausted, _TURNS.number != self._turn)

    @property
    def upcoming(self) -> Position | None:
        """Where the first global batch begins of which nothing was handed out; None before the first batch."""
        if self.start is None or self.last_batch is None:
            return self.start
        return replace(self.start, position=self.last_batch.end)

    def reorder(self, order: OrderConfig, landmark: Landmark | None) -> None:
        """Continue in another order, which is the same up to `upcoming`; a global batch in progress is completed.

        ``landmark`` is what is known of both orders here.
        """
        if self.start is not None:
            self.start, self._is_outdated = replace(self.start, order=order, landmark=landmark), True

    def state_dict(self) -> dict[str, Any]:
        """The position of this iteration as plain values; other iterations do not change it."""
        return self._loader.state_of(self.position)

    def close(self) -> None:
        """End the iteration and what it owns.

        Raises:
            StoreError: Samples that it delivered before their shards were verified had wrong bytes.
        """
        if not self._is_over:
            self._end()
            self._loader.compare_early()

    def _end(self) -> None:
        if not self._is_over:
            self._is_over = True
            made, self._made = self._made, None
            if self.is_measured and self.last_batch is self._loader.last_batch:  # else another one trains by now
                self._loader.meter.stop(perf_counter())
            if made is not None:
                made.close()
            self._loader.note_end(self)

    def __del__(self, _ends: Callable[[], bool] = sys.is_finalizing) -> None:
        if not _ends():  # modules are gone then, and its workers too
            self._end()


def composer_callback() -> Any:
    """The module that joins Composer's trainers, a higher layer; None where the program does not use Composer."""
    return import_module("lightning_stream.trainers.composer.callback") if "composer" in sys.modules else None


def driver_of(loader: Loader) -> Driver | None:
    """The Composer trainer that asks for batches; None if another program does. Other trainers call `driven_by`."""
    join = composer_callback()
    driver: Driver | None = None if join is None else join.driver_of(loader)
    return driver


@dataclass(frozen=True)
class _Stop:
    """Where an iteration began, its last batch, how many it handed out, and whether it came to the epoch's end."""

    start: Position
    last: MicroBatch | None = None
    num_batches: int = 0
    is_exhausted: bool = False
    others_went_on: bool = False  # whether another loader was asked for a batch since

    @property
    def position(self) -> Position:
        """Everything before it was handed out; inside an accumulation, the last whole optimizer step."""
        last = self.last
        if last is None and not self.is_exhausted:
            return self.start
        if last is None or last.ends_epoch:  # an epoch may have no batch, and is over then
            return self.start.next_epoch()
        return replace(self.start, position=last.end if last.completes_step else last.begin)

    @property
    def is_inside_epoch(self) -> bool:
        """Whether some, but not all of the epoch was handed out."""
        return self.last is not None and not self.last.ends_epoch


class Progress:
    """The position of a loader that no trainer drives, and the ledger's sum up to there.

    One iteration leads, and its batches move the position; others look on and move nothing while the leader lives.
    An iteration that handed out a single batch, and was not asked for another, was a look, as in
    ``next(iter(loader))``, unless a state was taken then: the next iteration begins where it began. It was none where
    it came to the epoch's last batch in step with other loaders, as in ``zip(one, other)``: only one of them is asked
    for the end there.
    """

    def __init__(self) -> None:
        self._stop: _Stop | None = None  # of the iteration that led last
        self._leader: ref[LoaderIterator] | None = None
        self._live: WeakSet[LoaderIterator] = WeakSet()
        self._was_asked = False  # whether a state was taken since the leader's last start
        self._num_looks = 0  # how many iterations in a row were looks at the same batch
        self._summed = (0, 0, 0)  # the ledger's expected sum: of this epoch, up to this position, so much

    def __getstate__(self) -> dict[str, object]:
        """A copy stands where this one does, and follows no iteration."""
        return {
            "_stop": self._now,
            "_was_asked": self._was_asked or self.leading is not None,
            "_summed": self._summed,
        }

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__init__()  # type: ignore[misc]
        vars(self).update(state)

    @property
    def _now(self) -> _Stop | None:
        leader = None if self._leader is None else self._leader()
        return (None if leader is None else leader.stop) or self._stop

    @property
    def leading(self) -> LoaderIterator | None:
        """The iteration whose batches move the position; None if none is in progress."""
        return None if self._leader is None else self._leader()

    @property
    def position(self) -> Position | None:
        """Where the training run is; None before anything began. A look whose iteration is over has not moved it."""
        now = self._now
        if now is None:
            return None
        return now.start if self.leading is None and self._only_looked(now) else now.position

    def asked(self) -> None:
        """Note that a state is taken here.

        Raises:
            StateError: Two iterations are in progress, and either of them may be the one that trains.
        """
        going = [one.num_batches for one in self._live if one.num_batches > 1]
        if len(going) > 1:
            raise StateError(
                "a loader's state is that of the iteration that trains, but several iterations over this loader are in "
                f"progress, after {' and '.join(map(str, going))} batches. Take iterator.state_dict() of the one that "
                "trains, or close() the others"
            )
        self._was_asked = True

    def took(self, position: Position) -> None:
        """Note that a state of this position was taken, which decides whether the last batch was only a look."""
        now = self._now
        if now is not None and position == now.position:
            self._was_asked = True
        elif now is not None and position == self.position:
            self._stop = _Stop(position)

    def go_to(self, position: Position) -> None:
        """Let the next iteration begin here; those in progress no longer move the position."""
        self._stop, self._leader, self._live = _Stop(position), None, WeakSet()
        self._was_asked, self._num_looks = False, 0

    def begin(self, iteration: LoaderIterator, run: RunOrder, settings: BatchSettings) -> Position:
        """Where a new iteration begins: where the last one began if it was a look, else after it or its epoch."""
        size, tail, now = settings.global_batch_size, settings.tail, self._now
        if now is None:
            here = Position.start(run, batch_size=size, tail=tail)
        elif self._only_looked(now):
            here = now.start
            self._note_look(here)
        else:
            self._num_looks = 0
            here = now.position.next_epoch() if now.is_inside_epoch else now.position
            here = here.rebased_on(run, batch_size=size, tail=tail, world=settings.world)
        self._live.add(iteration)
        if self._leader is None:
            self._stop, self._leader, self._was_asked = _Stop(here), ref(iteration), False
        return here

    def moved(self, iteration: LoaderIterator) -> None:
        """Note that an iteration handed out a batch: a second one makes it the leader where that one only looked."""
        now = self._now
        if iteration.num_batches == 2 and (now is None or self._only_looked(now)) and iteration in self._live:
            self._leader = ref(iteration)

    def _only_looked(self, stop: _Stop) -> bool:
        if stop.num_batches != 1 or stop.is_exhausted or self._was_asked:
            return False
        return stop.last is None or not (stop.last.ends_epoch and stop.others_went_on)

    def ended(self, iteration: LoaderIterator) -> None:
        """Note that an iteration was closed, dropped or exhausted."""
        self._live.discard(iteration)
        if self._leader is not None and self._leader() in (iteration, None):
            if iteration.num_batches or iteration.is_exhausted:
                self._stop = iteration.stop
            self._leader = None

    def _note_look(self, at: Position) -> None:
        """Warn of a loop that takes each batch from a new iteration, which is the same batch each time."""
        self._num_looks += 1
        if self._num_looks == _LOOKS_BEFORE_WARNING:
            warnings.warn(
                "an iteration of one batch is a look, and the next iteration begins with the same batch: found "
                f"{self._num_looks} looks in a row at the batch at epoch {at.epoch}, position {at.position}. To train, "
                "keep one iterator, batches = iter(loader), and call next(batches)",
                stacklevel=2,
            )

    def begins_in(self, epoch: int) -> bool:
        """Whether the next iteration reads this epoch, from wherever in it was set."""
        now = self._now
        if now is None or self._only_looked(now):
            return epoch == (0 if now is None else now.start.epoch)
        return not now.is_inside_epoch and epoch == now.position.epoch

    def proven(self, run: RunOrder, position: Position) -> Position:
        """A position with the ledger's expected sum up to it. Costs the samples since it was last asked."""
        epoch, begin, total = self._summed
        if epoch != position.epoch or begin > position.position:
            begin, total = 0, 0
        order = position.order_in(run)
        grown = ledger.expected(order, begin, position.position)
        landmark = order.landmark(position.position)
        return self.builds_on(replace(position, ledger=(total + grown) % ledger.MODULUS, landmark=landmark))

    def builds_on(self, proven: Position) -> Position:
        """Continue with the ledger's sum of this position, instead of summing again what came before."""
        self._summed = (proven.epoch, proven.position, proven.ledger)
        return proven
