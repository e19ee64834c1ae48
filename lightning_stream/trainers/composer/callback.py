"""The callback that keeps a loader's position in Composer's checkpoints.

Composer passes the samples of the current epoch to a dataset, never the epoch, and passes nothing to a loader. Its
clock has the batches trained on; the callback joins the trainer when the training loop first asks for a batch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Unpack

from composer import Callback, Event, Logger, State, TimeUnit
from composer.loggers import ProgressBarLogger
from msgspec import structs

from lightning_stream.dataset import plain_iterations_of, source_of
from lightning_stream.loader import StreamingDataLoader
from lightning_stream.loading.cursor import TrainerClock
from lightning_stream.loading.iteration import LoaderIterator
from lightning_stream.loading.plain import PlainIterations
from lightning_stream.trainers.agreement import gathered
from lightning_stream.trainers.composer import private
from lightning_stream.trainers.composer.private import is_in_batch as is_in_batch  # for torch's loader
from lightning_stream.trainers.composer.private import state_that_asks
from lightning_stream.trainers.monitor import DataMonitor
from lightning_stream.trainers.options import RunOptions
from lightning_stream.trainers.run import Run

_LOGGED_EVERY = 50  # batches, as under Lightning: Composer has no interval of its own


class StreamingPosition(Callback, TrainerClock):  # type: ignore[misc]  # Composer has no types
    """Keeps the position of a training loader equal to that of Composer's trainer; for `options` see `RunOptions`.

    Every `StreamingDataLoader` that a Composer trainer trains on gets one: nothing has to be added to the trainer. It
    also restores the random state of a run resumed in the middle of an epoch, which Composer does not; keeps
    `train_subset_num_batches` right after a resume; and logs and shows the position, and unless ``monitor=False`` where
    the time goes.
    """

    counts = False  # until a trainer has joined
    padding = False
    takes_states = True

    def __init__(self, loader: StreamingDataLoader, **options: Unpack[RunOptions]) -> None:
        self.loader = loader
        self.run = Run(**options)
        self._trainer: Any = None  # that joined last
        self._num_resumes = 0  # that the trainer has followed
        self._is_elsewhere = True  # whether the trainer has come to where it is without training on this loader
        self._epoch_clock = 0
        self._sized: int | None = None  # the length of an epoch that Composer was given last; None: of the first one
        self._num_substituted = 0  # in the batches that this rank has trained on
        self._pretended = False  # to Composer, that it has trained on a batch
        self._ended_at = -1  # the step after which this fit was given an epoch's empty rest
        self.run.attach(loader, clock=self)

    @property
    def monitor(self) -> DataMonitor:
        """Of the trainer that joined last."""
        return self.run.monitor

    # What the run asks

    def micro_batch(self) -> int:
        """The number of the batch in training."""
        return int(self._trainer.state.timestamp.batch_in_epoch)

    def step(self) -> int:
        """How many batches were trained on."""
        return 0 if self._trainer is None else int(self._trainer.state.timestamp.batch)

    def settle(self) -> None:
        """Count what Composer's clock has: an error may have come, or a state be taken, before our event."""
        if self._trainer is not None:
            self._sync()

    def follow_length(self, epoch: int) -> None:  # noqa: ARG002 - it is the loader's
        """Let Composer ask for the length again, if it has just loaded a state."""
        self._follow_length(state_that_asks())

    def owns(self, iterator: LoaderIterator) -> bool:
        """Whether the trainer's own iteration begins; puts the position where that is to start."""
        trainer = private.trainer_that_asks(self.loader)
        if trainer is None:
            return False
        if trainer is not self._trainer:
            self._join(trainer)
        if self._pretended:
            trainer.first_train_batch_complete = self._pretended = False
        private.take_over_resume(trainer)
        self._sync()
        position = self.run.position
        here = self.loader.normalised(position)
        done = int(trainer.state.timestamp.batch_in_epoch)
        limit = self._limit(trainer)
        is_over = (here.epoch > position.epoch and position.position > 0) or (limit is not None and done >= limit)
        if done and is_over and self.step() != self._ended_at:
            # Saved after the epoch's last batch: Composer has yet to end that epoch, and warns if it trains on nothing.
            # It does not end one in which an iteration of so many tokens has ended, but asks for more of it.
            self._ended_at = self.step()
            iterator.limit = 0
            self._pretended = not trainer.first_train_batch_complete
            trainer.first_train_batch_complete = True
            return True
        self.run.move_to(here)
        self.run.begin_epoch(done)
        iterator.limit = None if limit is None else limit - done
        return True

    def _join(self, trainer: Any) -> None:
        run = self.run
        clock = trainer.state.timestamp
        self.begin_anew(trainer.state)
        self._trainer = trainer
        self._is_elsewhere = True
        self._ended_at = -1
        self.counts = True
        # Over another loader:
        has_fitted = any(isinstance(callback, StreamingPosition) for callback in trainer.state.callbacks)
        trainer.state.callbacks.insert(0, self)
        if int(clock.batch) > 0 and not (has_fitted or trainer.first_train_batch_complete or run.is_resumed):
            run.report_missing("the checkpoint was loaded without its data position")
        here = run.position
        if run.is_of_mosaic and here.position == 0 and int(clock.batch_in_epoch) == 0:
            # At the end of an epoch that library saves the epoch that is over.
            run.move_to(replace(here, epoch=max(here.epoch, int(clock.epoch))))
        run.begin_run()
        run.measure(partial(private.run_folder, trainer.state))

    def begin_anew(self, state: State) -> None:
        """Let a second trainer, whose state this is, begin the data from its start."""
        run = self.run
        is_second = self._trainer is not None and state is not self._trainer.state
        if is_second and run.num_resumes == self._num_resumes:
            run.is_resumed = False
            run.move_to(self.loader.first_position())

    def _limit(self, trainer: Any) -> int | None:
        """Batches of an epoch, where the trainer takes fewer than there are."""
        length = trainer.state.dataloader_len
        if self.loader.epochs_differ and not self._is_subset(trainer.state):
            if length is not None and int(length) < self.loader.num_batches(self.run.position.epoch):
                raise ValueError(
                    f"epochs differ in length here, and Composer would end this one after {length} "
                    f"batches of {len(self.loader)}. Pass the trainer a DataSpec of data_spec(...), not the loader"
                )
            return None
        return int(length) if length is not None and int(length) < len(self.loader) else None

    def _is_subset(self, state: State) -> bool:
        """Whether the user lets each epoch take fewer batches: Composer has asked for the length of the first epoch."""
        length = state.dataloader_len
        sized = self._sized
        if sized is None:
            here = replace(self.run.position, epoch=0, position=0, landmark=None)
            schedule = source_of(self.loader.streaming).schedule  # without later changes
            order = structs.replace(here.order, schedule=schedule)
            sized = len(self.loader.micro_batches_from(replace(here, order=order)))
        return length is not None and int(length) < sized

    def _follow_length(self, state: State | None) -> None:
        """Let Composer expect as many batches as this epoch has, where epochs differ."""
        if self.loader.epochs_differ and state is not None and not self._is_subset(state):
            state.dataloader_len = -1  # then it asks for the length again
            self._sized = len(self.loader)

    # Composer's events

    def run_event(self, event: Event, state: State, logger: Logger) -> None:
        """Follow a trainer while it trains on this loader."""
        if state.train_dataloader is self.loader:
            super().run_event(event, state, logger)
        else:
            self._is_elsewhere = True

    def fit_start(self, state: State, logger: Logger) -> None:  # noqa: ARG002 - Composer's signature
        """Give each fit the empty rest of an epoch that it has yet to end."""
        private.refuse_other_loader(state)
        self.loader.meter.forget_step()
        self._ended_at = -1

    def epoch_start(self, state: State, logger: Logger) -> None:
        """Follow the length of the epoch; end the training where no stream of a mixture has samples left."""
        self.before_dataloader(state, logger)
        self._sync()
        self._follow_length(state)
        batches = self.loader.micro_batches_from(self.run.position)
        if not batches.has(0) and not batches.plan.order.num_samples:
            self.run.say("The training ends here: all streams of its mixture have ended.")
            state.stop_training()  # else Composer would begin one empty epoch after the other

    def batch_start(self, state: State, logger: Logger) -> None:  # noqa: ARG002
        """Take up the batch of this number."""
        self._num_substituted += self.run.take().num_substituted

    def batch_end(self, state: State, logger: Logger) -> None:
        """Commit the batch, and show the position. ValueError where training would never end, since nothing counts."""
        self._sync()
        if state.max_duration.unit is TimeUnit.TOKEN and int(state.timestamp.token) == 0:
            raise ValueError(
                f"max_duration={state.max_duration.to_timestring()} counts tokens, and the batch had none. Name their "
                "column: data_spec(token_column=...); of others, pass get_num_tokens_in_batch="
            )
        position = self.run.position
        logger.log_metrics({"stream/epoch": position.epoch, "stream/position": position.position})
        if self.monitor.is_on and int(state.timestamp.batch) % _LOGGED_EVERY == 0:
            logger.log_metrics(self.run.metrics())
        for destination in logger.destinations:
            if isinstance(destination, ProgressBarLogger) and (bar := destination.train_pbar) is not None:
                # Composer's progress bar shows only losses. The position comes first, since lines are cut.
                others = {name: value for name, value in bar.metrics.items() if name not in ("at", "data")}
                bar.metrics = {"at": f"{position.epoch}:{position.position}", **self.run.shown(), **others}
                bar.pbar.set_postfix(bar.metrics, refresh=False)

    def epoch_end(self, state: State, logger: Logger) -> None:  # noqa: ARG002
        """Begin the order's next epoch with Composer's, also where it cut this one short."""
        self._sync()
        self._log_substituted(logger)
        self.monitor.end_epoch()
        if self.monitor.is_on:
            logger.log_metrics(self.run.metrics())

    def eval_before_all(self, state: State, logger: Logger) -> None:  # noqa: ARG002
        """Measure training without its evaluations."""
        self.loader.meter.begin("validation")

    def eval_after_all(self, state: State, logger: Logger) -> None:  # noqa: ARG002
        """Measure training again."""
        self.loader.meter.end("validation")

    def batch_checkpoint(self, state: State, logger: Logger) -> None:
        """Measure how long checkpoints are written: until Composer's next event."""
        self.before_dataloader(state, logger)
        self.loader.meter.begin("checkpoint")

    epoch_checkpoint = iteration_checkpoint = batch_checkpoint

    def before_dataloader(self, state: State, logger: Logger) -> None:  # noqa: ARG002
        """Measure training again."""
        self.loader.meter.end("checkpoint")

    def fit_end(self, state: State, logger: Logger) -> None:
        """A run may end in the middle of an epoch; tell what to change if it waited for its data."""
        self.before_dataloader(state, logger)
        self._log_substituted(logger)
        self.run.tell()
        self.run.end_run()

    def _log_substituted(self, logger: Logger) -> None:
        """Samples delivered so far in place of bad ones, over all ranks, where the dataset substitutes."""
        if self.loader.substitutes:
            logger.log_metrics({"stream/num_substituted": sum(gathered(self._num_substituted))})

    def close(self, state: State, logger: Logger) -> None:  # noqa: ARG002 - Composer's signature
        """End the workers of all our loaders, and the monitor; Composer has no event for an error.

        Shards are closed, and opened again where they are read: Composer keeps each trainer until the program ends.
        """
        self.monitor.stop(sys.exc_info()[1] or getattr(sys, "last_value", None) or "before its end")
        for loader in (self.loader, *(evaluator.dataloader.dataloader for evaluator in state.evaluators)):
            if isinstance(loader, StreamingDataLoader):
                loader.close()
                source_of(loader.streaming).reader.shards.release()

    def _sync(self) -> None:
        """Commit the batches that were trained on by the trainer's clock."""
        clock = self._trainer.state.timestamp
        if self._is_elsewhere or self.run.num_resumes > self._num_resumes:
            self._is_elsewhere = False
            self._num_resumes = self.run.num_resumes
            self._epoch_clock = int(clock.epoch)
            self.run.move_to(self.run.position)
        self.run.sync()
        if int(clock.epoch) > self._epoch_clock and self.run.position.position > 0:
            here = self.run.position
            is_whole = self.loader.epochs_differ and not self._is_subset(self._trainer.state)
            # A change of the mixture may have made the epoch longer than Composer knew: its next one has the rest.
            self.run.move_to(self.loader.normalised(here) if is_whole else here.next_epoch())
        self._epoch_clock = int(clock.epoch)


class _RestOfEpoch(Callback):  # type: ignore[misc]  # Composer has no types
    """Lets a run resumed inside an epoch take the batches from torch's DataLoader that Composer has not taken of it.

    Composer would take as many as a whole epoch has, where the data has them: under `train_subset_num_batches`, and in
    orders of mosaicml-streaming, which repeat samples beyond that number. It reads the number where it begins to
    iterate; schedules read it later.
    """

    def __init__(self, loader: Any, num_done: int, skip_epoch: Callable[[], None]) -> None:
        self.loader = loader
        self.num_done = num_done
        self.skip_epoch = skip_epoch
        self.limit: int | None = None

    def fit_start(self, state: State, logger: Logger) -> None:  # noqa: ARG002 - Composer's signature
        """Let Composer read how many batches are left."""
        limit = state.dataloader_len
        loader = self.loader
        self.loader = None  # only the first epoch is begun already
        if limit is None or state.train_dataloader is not loader or int(state.timestamp.batch_in_epoch) == 0:
            return
        if self.num_done >= int(limit):
            self.skip_epoch()
        else:
            self.limit = int(limit)
            state.dataloader_len = int(limit) - self.num_done

    def before_dataloader(self, state: State, logger: Logger) -> None:  # noqa: ARG002
        """Restore the length of an epoch: Composer has begun to iterate."""
        if self.limit is not None:
            state.dataloader_len = self.limit
            self.limit = None


def continue_epoch(state: State, num_done: int, skip_epoch: Callable[[], None]) -> None:
    """Let a run continue in the epoch of the state that torch's DataLoader has loaded, of which batches are done.

    `skip_epoch` leaves none of it.
    """
    state.callbacks.append(_RestOfEpoch(state.train_dataloader, num_done, skip_epoch))


def loader_of(state: State, plain: PlainIterations) -> StreamingDataLoader | None:
    """The loader of ours that a trainer trains on, which follows that trainer from now on; None if it has another."""
    loader = state.train_dataloader
    if not isinstance(loader, StreamingDataLoader) or plain_iterations_of(loader.streaming) is not plain:
        return None
    run = loader.cursor.driver or _follower(loader)
    if isinstance(run.clock, StreamingPosition):
        run.clock.begin_anew(state)
    return loader


def driver_of(loader: StreamingDataLoader) -> Run | None:
    """Follow the Composer trainer that is about to train on a loader that has no tracker yet, if there is one."""
    return None if private.trainer_that_asks(loader) is None else _follower(loader)


def _follower(loader: StreamingDataLoader) -> Run:
    run = StreamingPosition(loader).run
    loaded = plain_iterations_of(loader.streaming).state_for(loader)
    if loaded is not None:  # the user gave it to the dataset
        run.load(loaded)
    return run
