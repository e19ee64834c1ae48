"""What a training run has trained on, by the trainer's own counts; the same for every trainer.

Global batch k of an epoch is a pure function, so nothing that was handed out has to be remembered: the trainer
has the number of its micro-batch, and this module knows the samples of that number. Lightning, Composer and a plain
loop are clocks of a `PositionTracker`, which checks deliveries, keeps the audit record, seeds steps, and handles
checkpoints that hold no position.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import torch

from lightning_stream.dataset import source_of
from lightning_stream.errors import LedgerError, StateError, checking
from lightning_stream.loader import StreamingDataLoader
from lightning_stream.loading.cursor import TrainerClock
from lightning_stream.loading.iteration import LoaderIterator
from lightning_stream.loading.randomness import sample_seed
from lightning_stream.loading.source import BatchSettings
from lightning_stream.order import OrderConfig, Position, World, is_mosaic_state
from lightning_stream.order.micro_batches import MicroBatch, MicroBatches
from lightning_stream.order.placement import NO_REPORT, Report, disks_of
from lightning_stream.trainers.agreement import check_ranks_agree
from lightning_stream.trainers.audit import DeliveryRecord

_ON_MISSING = ("error", "restart")


class RunRecord(Protocol):
    """Is called with what a run trains on."""

    def take(self, batch: MicroBatch) -> None:
        """Note a micro-batch that is about to be trained on."""
        ...

    def commit(self, step: int) -> None:
        """Note that the optimizer has used up what was taken, in this step of the trainer's clock.

        It is called again with a step in which Ctrl-C ended it.
        """
        ...

    def drop(self) -> None:
        """Forget what was taken since the last step: no step will use it up."""
        ...

    def close(self) -> None:
        """End what is written now: another loader, or another order, follows."""
        ...


class _Loop(TrainerClock):
    """The clock of a loop of one's own, which takes its batches from a tracker."""

    def __init__(self) -> None:
        self.iteration: LoaderIterator | None = None
        self.batch_index = self.epoch = 0
        self.next_epoch: int | None = None  # that was set for the next iteration

    def micro_batch(self) -> int:
        return self.batch_index

    def step(self) -> int:
        """The epoch: the process may have resumed, and then its own steps count from 0."""
        return self.epoch

    def owns(self, iterator: LoaderIterator) -> bool:
        return iterator is self.iteration


class _PlannedEpoch:
    """The micro-batches from where an iteration of an epoch began, by the trainer's numbers."""

    def __init__(self, batches: MicroBatches, first: int) -> None:
        self.plan = batches.plan
        self.epoch = batches.plan.order.epoch
        self.first = first
        self.due: int | None = None  # the number of the micro-batch that the walk gives next; None before any
        self._batches = batches
        self._walk = batches.walk()

    def take(self, batch_index: int) -> MicroBatch:
        """The micro-batch of this number."""
        j = batch_index - self.first
        if j < 0 or not self._batches.has(j):
            raise LedgerError(
                f"an epoch has the micro-batches that were planned, {len(self._batches)} from here on, but the trainer "
                f"asks for number {j}. The weights of the last checkpoint are still right: resume from it"
            )
        if batch_index != self.due:
            self._walk = self._batches.walk(j)
        self.due = batch_index + 1
        return next(self._walk)

    def num_samples(self, begin: int, end: int) -> int:
        """Samples of the micro-batches from one number up to, and without, another."""
        return sum(self._batches[k - self.first].num_samples for k in range(begin, end))


class PositionTracker:
    """Follows one training run over a `StreamingDataLoader`, by the clock of its trainer.

    Args:
        loader: The loader of the run; see `attach` if it is not known yet.
        check_delivery: Compare every batch with the plan, and raise `LedgerError` at the first that differs.
        record_delivery: A folder where each rank records what it trained on, 8 bytes a step, for
            `verify_delivery`; None writes nothing.
        seed_steps: A seed: torch is seeded before every batch from (this, step, rank, micro-batch), so that dropout
            draws the same whether or not the run was stopped; a plain loop takes the epoch instead of the step. None
            leaves torch's generator alone.
        on_missing_state: What to do with a checkpoint that holds no position: ``"error"``, or ``"restart"`` to begin
            the data from its start.

    Attributes:
        output: Called on rank 0 with each message to the user.

    Example: a plain loop with all of it::

        tracker = PositionTracker(loader, seed_steps=7, record_delivery="audit")
        if resuming:
            tracker.load(torch.load("run.pt")["data"])
        for batch in tracker:
            model(batch).backward()
            if tracker.current.completes_step:
                optimizer.step()
                tracker.stepped()
        torch.save({"data": tracker.state(), ...}, "run.pt")
        tracker.end_run()  # prints "... 0 lost, 0 repeated" for a resumed run
    """

    @checking
    def __init__(
        self,
        loader: StreamingDataLoader | None = None,
        *,
        check_delivery: bool = True,
        record_delivery: str | os.PathLike[str] | None = None,
        seed_steps: int | None = None,
        on_missing_state: str = "error",
    ) -> None:
        if on_missing_state not in _ON_MISSING:
            raise ValueError(f"on_missing_state is {' or '.join(map(repr, _ON_MISSING))}; found {on_missing_state!r}")
        self.check_delivery = check_delivery
        self.record_delivery = record_delivery
        self.seed_steps = seed_steps
        self.on_missing_state = on_missing_state
        self._loader: StreamingDataLoader | None = None
        self.num_steps = 0  # optimizer steps of this run so far, where the trainer counts none itself
        self.num_lost = self.num_repeated = 0  # samples of this process's run, against the plan
        self.output: Callable[[str], object] = print
        self.known: Position | None = None  # everything before it was trained on; None before that was asked for
        self.current: MicroBatch | None = None  # the micro-batch in training
        self.epoch_in_training = -1  # the epoch of the micro-batch that was taken last; -1 before any
        self._proven: Position | None = None  # the last position with a ledger's sum of its own
        self._planned: _PlannedEpoch | None = None
        self.place: MicroBatch | None = None  # of the micro-batch that no optimizer step has used up yet
        self._used_up: MicroBatch | None = None  # by a step, which the position has, and the records may lack
        self._is_committing = False
        self._spans = False  # whether a whole global batch was trained on before it without a step
        self.records: list[RunRecord] = []  # of the run that it follows now
        self._settings: BatchSettings | None = None
        self.iteration: LoaderIterator | None = None  # its own, if one began since its position was last set
        self._loop = _Loop()
        self.clock: TrainerClock = self._loop
        self._step = 0  # of the clock, when the run was last brought up to it
        self.num_resumes = 0
        self.is_resumed = self.is_of_mosaic = self.is_attached = self._has_said = False
        if loader is not None:
            self.attach(loader)

    # The loader

    def attach(
        self,
        loader: StreamingDataLoader,
        position: Position | None = None,
        clock: TrainerClock | None = None,
    ) -> None:
        """Follow a training run over this loader.

        Args:
            loader: The loader.
            position: Where the run is; None for where the loader was set to begin.
            clock: The trainer's; None in a plain loop over this tracker.
        """
        check_loader(loader, "PositionTracker")
        if self.is_attached and self._loader is not loader:
            self.loader.cursor.release(self.loader.position)
        self._loader = loader
        self.is_attached = True
        self.known = position
        self.clock = clock or self._loop
        self._step = self.clock.step()
        self._close_records()
        self.records = [record for record in self.records if not isinstance(record, DeliveryRecord)]
        if self.record_delivery is not None:
            self.records.append(DeliveryRecord(self.record_delivery, loader))
        self._forget_epoch()
        loader.cursor.driver = self
        if self._proven is not None:
            loader.cursor.builds_on(self._proven)

    def detach(self) -> None:
        """End the training run: the loader stands where it ended, and the record is closed."""
        self._close_records()
        self.records = []
        if self.is_attached:
            self.loader.cursor.release(self.loader.position)
        self.is_attached = False
        self.iteration = None
        self.current = None

    @property
    def loader(self) -> StreamingDataLoader:
        """The loader of the run."""
        if self._loader is None:
            raise StateError("a PositionTracker follows a StreamingDataLoader: call attach(loader) first")
        return self._loader

    @property
    def has_run(self) -> bool:
        """Whether it follows a loader, or did: there is a position then."""
        return self._loader is not None

    @property
    def settings(self) -> BatchSettings:
        """How the run's data is divided into batches."""
        if self._settings is None:
            self._settings = self.loader.settings()
        return self._settings

    # What the loader asks, see `Driver`

    @property
    def position(self) -> Position:
        """Everything before it was trained on."""
        if self.known is None:
            self.known = self.loader.begins_at or self.loader.first_position()
        return self.known

    def begin(self, iterator: LoaderIterator) -> Position | None:
        """Where the run's own iteration begins; None for any other."""
        if not self.clock.owns(iterator):
            return None
        self.iteration = iterator
        return self.position

    def note_batch(self, iterator: LoaderIterator) -> None:
        """Take note of a batch that is about to be handed out."""
        if iterator is self.iteration:
            self.current = iterator.last_batch

    def reorder(self, order: OrderConfig) -> None:
        """Plan the rest of the epoch in an order that differs only in batches that were not handed out yet."""
        self.known = replace(self.position, order=order)
        self._settings = None
        if (planned := self._planned) is not None:
            begin = replace(self.known, epoch=planned.epoch, position=planned.plan.start)
            self._planned = _PlannedEpoch(self.loader.micro_batches_from(begin), planned.first)
        self._close_records()
        if self.known.epoch == self.epoch_in_training:
            self.clock.follow_length(self.epoch_in_training)

    def set_epoch(self, epoch: int) -> None:
        """Let the next loop begin in this epoch, or where a state in it stands; a trainer counts itself."""
        self._loop.next_epoch = epoch

    def state(self) -> dict[str, Any]:
        """The position as plain values, the same on every rank; no collective."""
        self.clock.settle()
        self._commit()
        self._refuse_missing_steps()
        self._proven = self.loader.proven(self.position)
        return self.loader.state_of(self._proven)

    # The trainer's progress

    def load(self, state: Mapping[str, Any] | None) -> None:
        """Continue where a state stands.

        Raises:
            StateError: It cannot be continued over this data under these settings; or there is none.
        """
        if state is None:
            self.report_missing("this one holds none")
            self.move_to(self.loader.first_position())
            return
        self.is_of_mosaic = is_mosaic_state(state)
        here = self.loader.accept(state)
        self.resume(here)
        if self.clock.takes_states and here.epoch > (epoch := int(state["epoch"])):
            # At the end of an epoch's data the trainer may have yet to end that epoch: keep which it was.
            order = self.loader.micro_batches_from(replace(here, epoch=epoch, position=0)).plan.order
            reached = int(state["sample_in_epoch"] if self.is_of_mosaic else state["position"])
            self.move_to(replace(here, epoch=epoch, position=min(reached, order.num_samples)))
        self.clock.follow_length(self.position.epoch)

    def move_to(self, position: Position) -> None:
        """Set where the run is."""
        self.known = position
        self._forget_epoch()

    def resume(self, position: Position) -> None:
        """Continue from a position that a state gave."""
        self._proven = position
        self.is_resumed = True
        self.iteration = None
        self.num_resumes += 1
        self.move_to(position)

    def report_missing(self, reason: str) -> None:
        """Raise or warn, as the user chose, where a checkpoint holds no position."""
        sentence = f"A training run continues from the data position in its checkpoint, but {reason}. "
        if self.on_missing_state == "error":
            raise StateError(
                sentence + "Load a checkpoint that holds one, or pass on_missing_state='restart' to keep the weights "
                "and begin the data from its start"
            )
        warnings.warn(f"{sentence}The data begins from its start", stacklevel=3)

    def begin_run(self) -> None:
        """Check that all ranks have the same position, let nodes read what they hold, and announce a resume.

        Collective.
        """
        self._step = self.clock.step()
        loader = self.loader
        reports = check_ranks_agree(self._standing)
        if loader.disks is None:
            loader.disks = disks_of(self.settings.world, reports)
            self._settings = None
        if self.is_resumed and not self._has_said:
            self._has_said = True
            self.say(self.loader.resumed_at(self.position))

    def _standing(self) -> tuple[Position, Report, World, str | None]:
        source = source_of(self.loader.streaming)
        report = source.disk(self.settings) if self.loader.disks is None else NO_REPORT
        return self.position, report, self.settings.world, source.balance_digest()

    def end_run(self) -> None:
        """Report what a resumed run lost and repeated, which is nothing; StoreError if samples had wrong bytes."""
        self.loader.compare_unverified()
        if self.is_resumed:
            here = self.position
            summary = f"{self.num_lost} lost, {self.num_repeated} repeated"
            self.say(f"Trained up to epoch {here.epoch}, sample {here.position:,}: {summary}")
            self.is_resumed = self._has_said = False

    def say(self, sentence: str) -> None:
        """Show the user a message, once for all ranks."""
        if not self.settings.world.rank:
            self.output(sentence)

    def begin_epoch(self, first_batch: int) -> _PlannedEpoch:
        """Plan the rest of an epoch, whose first micro-batch has this number in the trainer's count."""
        self._settings = self.loader.settings()
        self._planned = _PlannedEpoch(self.loader.micro_batches_from(self.position), first_batch)
        return self._planned

    def take(self) -> MicroBatch:
        """Take up the micro-batch that the trainer trains on now.

        Raises:
            LedgerError: It is not the one that was planned.
        """
        self._commit()
        batch_index = self.clock.micro_batch()
        epoch = self._planned
        if epoch is None or self.position.epoch > epoch.epoch:
            epoch = self.begin_epoch(self.loader.batches_before(self.position))
        due = batch_index if epoch.due is None else epoch.due
        planned = epoch.take(batch_index)
        self.num_lost += epoch.num_samples(due, batch_index)
        self.num_repeated += epoch.num_samples(batch_index, due)
        if self.check_delivery:
            _compare(planned, self.current, batch_index)
        self._spans |= self.place is not None and self.place.completes_step
        self.place = planned
        seen = self.current or planned
        self.epoch_in_training = planned.epoch
        for record in self.records:
            record.take(seen)
        if self.seed_steps is not None:
            step = self.clock.step() * 65536 + self.settings.world.rank
            torch.manual_seed(sample_seed(self.seed_steps, step, batch_index))
        return seen

    def sync(self) -> None:
        """Commit the micro-batch in training if its trainer has stepped since it began.

        A signal's handler may save a checkpoint, and so call this, or raise an error, between any two lines: repeating
        it changes nothing but what was not done.
        """
        step = self.clock.step()
        if step != self._step:  # a trainer's clock may be set back
            self.stepped()
            self._step = step

    def stepped(self) -> None:
        """Commit the micro-batch in training: the optimizer has stepped.

        Raises:
            StateError: The optimizer stepped in the middle of a global batch, or over more than one.
        """
        place = self.place
        clock = self.clock
        if place is None:
            return
        if clock.takes_whole_batches and self._spans:
            raise StateError(
                "an optimizer step must use up one global batch, but none came after the one before positions "
                f"{place.begin} to {place.end}. {clock.how_to_step}"
            )
        known = self.position
        if not clock.takes_states and (place.ends_epoch or clock.ends_epoch()):
            known = replace(known, epoch=place.epoch).next_epoch()
        elif place.completes_step:
            known = replace(known, epoch=place.epoch, position=place.end)
        elif clock.takes_whole_batches:
            raise StateError(
                "an optimizer step must use up whole global batches, but the trainer stepped in the middle of the one "
                f"at positions {place.begin} to {place.end}: it accumulates another number of micro-batches than the "
                f"loader, which has accumulate={self.loader.accumulate}. {clock.how_to_step}"
            )
        if place is not self._used_up and place is self.place:  # else it is done, perhaps by a signal's handler
            self.known = known
            self._used_up = place
        self._commit()

    def _commit(self) -> None:
        """Let the records note the step that the position has, also where Ctrl-C came in between."""
        if self.place is None or self.place is not self._used_up or self._is_committing:
            return
        self._is_committing = True
        is_over = True
        try:
            for record in self.records:
                record.commit(self.clock.step())
        except BaseException as error:
            is_over = isinstance(error, Exception)  # of a full disk, which would be raised again; else Ctrl-C
            raise
        finally:
            self._is_committing = False
            if is_over:
                self.place = self._used_up = None
                self._spans = False
                self.num_steps += 1

    def _refuse_missing_steps(self) -> None:
        """StateError where a loop trains on one global batch after the other, and never says that it steps."""
        if self._spans and self.clock is self._loop:
            self.stepped()

    def epoch_over(self) -> None:
        """Begin the next epoch, also where the trainer cut this one short."""
        if self._planned is not None and self.position.epoch == self._planned.epoch:
            self.known = self.position.next_epoch()
        self.place = None
        self._spans = False

    def _close_records(self) -> None:
        self._commit()
        for record in self.records:
            record.close()

    def _forget_epoch(self) -> None:
        self._commit()
        for record in self.records:
            record.drop()
        self._planned = self.place = self._settings = None
        self._spans = False
        self.epoch_in_training = -1

    # A plain loop

    def __iter__(self) -> Iterator[Any]:
        """Yield the rest of an epoch's batches; call `stepped` after each optimizer step."""
        loop = self._loop
        if loop.next_epoch not in (None, self.position.epoch):
            self.move_to(replace(self.loader.first_position(), epoch=loop.next_epoch))
        loop.next_epoch = None
        self._refuse_missing_steps()
        self._forget_epoch()  # a loop may have left one step undone
        first = self.loader.batches_before(self.position)
        self.begin_run()
        self.begin_epoch(first)
        batches = loop.iteration = iter(self.loader)
        loop.epoch = self.position.epoch
        for loop.batch_index, batch in enumerate(batches, first):
            self.take()
            yield batch
        if not batches.num_batches:
            self.epoch_over()


def check_loader(loader: Any, follower: str) -> None:
    """Raise TypeError for what is no loader of ours, such as a dataset."""
    if not hasattr(loader, "cursor"):
        kind = type(loader).__name__
        raise TypeError(f"a {follower} follows a loader; found {kind}. Pass the StreamingDataLoader over it")


def _compare(planned: MicroBatch, delivered: MicroBatch | None, batch_index: int) -> None:
    """Raise LedgerError unless the worker delivered the planned micro-batch."""
    if delivered is None:
        reason = "nothing came out of the loader's own iteration"
    elif (delivered.epoch, delivered.begin) != (planned.epoch, planned.begin):
        reason = f"the loader delivered the one at epoch {delivered.epoch}, position {delivered.begin}"
    elif not (np.array_equal(planned.ids, delivered.ids) and np.array_equal(planned.positions, delivered.positions)):
        reason = f"the loader delivered samples {_short(delivered)} instead of {_short(planned)}"
    else:
        return
    raise LedgerError(
        f"a batch trained on must be the one planned, but for micro-batch {batch_index}, at epoch {planned.epoch}, "
        f"position {planned.begin}, {reason}. The weights of the last checkpoint are still right: resume from it. If "
        "nobody takes batches from the trainer's own iterator, this is an error of lightning_stream"
    )


def _short(batch: MicroBatch) -> str:
    return f"{batch.ids[:8].tolist()}{' and more' if len(batch.ids) > 8 else ''}"
