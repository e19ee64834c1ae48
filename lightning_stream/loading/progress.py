"""A loader's position, by the batches that its iterations handed out, and the ledger's sum up to there."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol
from weakref import WeakSet, ref

from lightning_stream.errors import StateError
from lightning_stream.loading.settings import BatchSettings
from lightning_stream.order import Position, RunOrder, ledger
from lightning_stream.order.micro_batches import MicroBatch


class Iteration(Protocol):
    """One iteration over a loader: a `LoaderIterator`."""

    start: Position | None
    last_batch: MicroBatch | None
    num_batches: int


def position_after(start: Position, last: MicroBatch | None) -> Position:
    """Where an iteration is: everything before it was handed out; inside an accumulation, the last whole step.

    Args:
        start: Where it began.
        last: What it handed out last; None for nothing yet.
    """
    if last is None:
        return start
    return (
        start.next_epoch()
        if last.ends_epoch
        else replace(start, position=last.end if last.completes_step else last.begin)
    )


@dataclass(frozen=True)
class _Stop:
    """Where an iteration began, its last batch, and the number of its batches."""

    start: Position
    last: MicroBatch | None = None
    num_batches: int = 0

    @property
    def position(self) -> Position:
        """Everything before it was handed out."""
        return position_after(self.start, self.last)

    @property
    def is_inside_epoch(self) -> bool:
        """Whether some, but not all of the epoch was handed out."""
        return self.last is not None and not self.last.ends_epoch


class Progress:
    """The position of a loader that no trainer drives.

    One iteration leads, and its batches move the position; others look on and move nothing while the leader lives.
    An iteration that handed out a single batch was a look, as in ``next(iter(loader))``, unless a state was taken
    then: the next iteration begins where it began.
    """

    def __init__(self) -> None:
        self._stop: _Stop | None = None  # of the iteration that led last
        self._leader: ref[Iteration] | None = None
        self._live: WeakSet[Iteration] = WeakSet()
        self._was_asked = False  # whether a state was taken since the leader's last start
        self._summed = (0, 0, 0)  # the ledger's expected sum: of this epoch, up to this position, so much

    def __getstate__(self) -> dict[str, object]:
        """A copy stands where this one does, and follows no iteration."""
        return {"_stop": self._now, "_was_asked": True, "_summed": self._summed}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__init__()  # type: ignore[misc]
        vars(self).update(state)

    @property
    def _now(self) -> _Stop | None:
        leader = None if self._leader is None else self._leader()
        if leader is None or leader.start is None:
            return self._stop
        return _Stop(leader.start, leader.last_batch, leader.num_batches)

    @property
    def position(self) -> Position | None:
        """Where the training run is; None before anything began."""
        return None if (now := self._now) is None else now.position

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

    def go_to(self, position: Position) -> None:
        """Let the next iteration begin here; those in progress no longer move the position."""
        self._stop, self._leader, self._live, self._was_asked = _Stop(position), None, WeakSet(), False

    def begin(self, iteration: Iteration, run: RunOrder, settings: BatchSettings) -> Position:
        """Where a new iteration begins: where the last one began if it was a look, else after it or its epoch."""
        size, tail, now = settings.global_batch_size, settings.tail, self._now
        if now is None:
            here = Position.start(run, batch_size=size, tail=tail)
        elif self._only_looked(now):
            here = now.start
        else:
            here = now.position.next_epoch() if now.is_inside_epoch else now.position
            here = here.normalised(run, batch_size=size, tail=tail, world=settings.world)
        self._live.add(iteration)
        if self._leader is None:
            self._stop, self._leader, self._was_asked = _Stop(here), ref(iteration), False
        return here

    def moved(self, iteration: Iteration) -> None:
        """Note that an iteration handed out a batch: a second one makes it the leader where that one only looked."""
        now = self._now
        if iteration.num_batches == 2 and (now is None or self._only_looked(now)) and iteration in self._live:
            self._leader = ref(iteration)

    def _only_looked(self, stop: _Stop) -> bool:
        return stop.num_batches <= 1 and stop.is_inside_epoch and not self._was_asked

    def ended(self, iteration: Iteration) -> None:
        """Note that an iteration was closed, dropped or exhausted."""
        self._live.discard(iteration)
        if self._leader is not None and self._leader() in (iteration, None):
            if iteration.start is not None and iteration.num_batches:
                self._stop = _Stop(iteration.start, iteration.last_batch, iteration.num_batches)
            self._leader = None

    def begins_in(self, epoch: int) -> bool:
        """Whether the next iteration reads this epoch, from wherever in it was set."""
        now = self._now
        return epoch == 0 if now is None else not now.is_inside_epoch and epoch == now.position.epoch

    def proven(self, run: RunOrder, position: Position) -> Position:
        """A position with the ledger's expected sum up to it. Costs the samples since it was last asked."""
        epoch, begin, total = self._summed
        if epoch != position.epoch or begin > position.position:
            begin, total = 0, 0
        grown = ledger.expected(run.epoch(position.epoch), begin, position.position)
        return self.builds_on(replace(position, ledger=(total + grown) % ledger.MODULUS))

    def builds_on(self, proven: Position) -> Position:
        """Continue with the ledger's sum of this position, instead of summing again what came before."""
        self._summed = (proven.epoch, proven.position, proven.ledger)
        return proven
