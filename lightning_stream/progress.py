"""Where a loader's run is, by the batches that it handed out; and the ledger's sum up to there."""

from __future__ import annotations

from dataclasses import replace

from lightning_stream.batch_settings import BatchSettings
from lightning_stream.batches import BatchInfo
from lightning_stream.order import Position, RunOrder, ledger


class Progress:
    """The position of one loader: moved by what is handed out, set by states and trainers.

    Attributes:
        position: Where the run is; None before anything began.
    """

    def __init__(self) -> None:
        self.position: Position | None = None
        self._begun = False  # whether any batch of the position's epoch was handed out since it began or was set
        self._summed = (0, 0, 0)  # the ledger's expected sum: of this epoch, up to this position, so much

    def go_to(self, position: Position) -> None:
        """The next iteration begins here."""
        self.position, self._begun = position, False

    def begin(self, run: RunOrder, settings: BatchSettings) -> Position:
        """Begin an iteration: at the position that was set, or at the next epoch that was not begun yet."""
        size, tail = settings.global_batch_size, settings.tail
        if self.position is None:
            position = Position.start(run, batch_size=size, tail=tail)
        else:
            position = self.position.next_epoch() if self._begun else self.position
            position = position.normalised(run, batch_size=size, tail=tail, world=settings.world)
        self.go_to(position)
        return position

    def hand_out(self, position: Position, info: BatchInfo) -> Position:
        """Count a micro-batch of an iteration that is at this position; returns where it then is.

        To be called before the batch is handed out: trainers never ask past the last one, so nothing behind its
        `yield` would run.
        """
        if info.ends_epoch:
            position = position.next_epoch()
        elif info.completes_step:
            position = replace(position, position=info.end)
        self.position, self._begun = position, not info.ends_epoch
        return position

    def begins_in(self, epoch: int) -> bool:
        """Whether the next iteration reads this epoch, from wherever in it was set."""
        return not self._begun and epoch == (0 if self.position is None else self.position.epoch)

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
