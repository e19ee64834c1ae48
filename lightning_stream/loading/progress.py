"""Where a loader's run is, by the batches that it handed out; and the ledger's sum up to there."""

from __future__ import annotations

from dataclasses import replace

from lightning_stream.loading.settings import BatchSettings
from lightning_stream.order import Position, RunOrder, ledger
from lightning_stream.order.micro_batches import BatchInfo


class Progress:
    """The position of one loader: moved by what is handed out, set by states and trainers."""

    def __init__(self) -> None:
        # Where the iteration began or the next one will, and what was handed out last since then. Replaced as one,
        # since several threads may iterate.
        self._at: tuple[Position, BatchInfo | None] | None = None
        self.last: BatchInfo | None = None  # the batch handed out last, of an evaluation too
        self._summed = (0, 0, 0)  # the ledger's expected sum: of this epoch, up to this position, so much

    @property
    def position(self) -> Position | None:
        """Where the run is; None before anything began."""
        if self._at is None:
            return None
        start, last = self._at
        if last is None:
            return start
        if last.ends_epoch:
            return start.next_epoch()
        return replace(start, position=last.end if last.completes_step else last.begin)

    def go_to(self, position: Position) -> None:
        """The next iteration begins here."""
        self._at = position, None

    def begin(self, run: RunOrder, settings: BatchSettings) -> Position:
        """Begin an iteration: where the next one was to begin, or at the next epoch if this one was begun already."""
        size, tail = settings.global_batch_size, settings.tail
        here = self.position
        if here is None:
            here = Position.start(run, batch_size=size, tail=tail)
        else:
            here = here.next_epoch() if self._is_inside_epoch else here
            here = here.normalised(run, batch_size=size, tail=tail, world=settings.world)
        self.go_to(here)
        return here

    def hand_out(self, start: Position, info: BatchInfo) -> None:
        """Count a micro-batch of the iteration that began at this position.

        To be called before the batch is handed out: trainers never ask past the last one, so nothing behind its
        `yield` would run.
        """
        self._at = start, info

    def begins_in(self, epoch: int) -> bool:
        """Whether the next iteration reads this epoch, from wherever in it was set."""
        here = self.position
        return not self._is_inside_epoch and epoch == (0 if here is None else here.epoch)

    @property
    def _is_inside_epoch(self) -> bool:
        """Whether some, but not all of the epoch was handed out by the last iteration."""
        last = None if self._at is None else self._at[1]
        return last is not None and not last.ends_epoch

    def proven(self, run: RunOrder, position: Position) -> Position:
        """A position with the ledger's expected sum up to it. Costs the samples since it was last asked."""
        epoch, begin, total = self._summed
        if epoch != position.epoch or begin > position.position:
            begin, total = 0, 0
        grown = ledger.expected(run.epoch(position.epoch), begin, position.position)
        return self.builds_on(replace(position, ledger=(total + grown) % ledger.MODULUS))

    def builds_on(self, proven: Position) -> Position:
        """Go on with the ledger's sum of this position, instead of summing what came before anew."""
        self._summed = (proven.epoch, proven.position, proven.ledger)
        return proven
