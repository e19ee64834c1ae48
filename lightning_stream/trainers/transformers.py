"""The data's position in the checkpoints of Transformers' `Trainer`, and in its logs where the time went."""

from __future__ import annotations

import inspect
import logging
import os
from pathlib import Path
from time import perf_counter
from typing import Any, Unpack

from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState

from lightning_stream.errors import StateError
from lightning_stream.loader import StreamingDataLoader
from lightning_stream.loading.cursor import TrainerClock
from lightning_stream.loading.iteration import LoaderIterator
from lightning_stream.monitoring.meter import Mark
from lightning_stream.monitoring.stats import LoaderStats
from lightning_stream.order.micro_batches import MicroBatch
from lightning_stream.trainers.monitor import DataMonitor
from lightning_stream.trainers.options import RunOptions
from lightning_stream.trainers.run import Run

_log = logging.getLogger(__name__)


class _Run(Run):
    """A run whose trainer fetches all batches of a step before it trains on the first of them.

    The trainer steps at every so many batches of its epoch, and at as many as an epoch has; a resume begins its count
    at 0 again. So this sets where an epoch's last step has fewer batches than others.
    """

    def __init__(self, **options: Unpack[RunOptions]) -> None:
        super().__init__(**options)
        self.fetched: list[MicroBatch | None] = []  # of the trainer's, not yet taken
        self.arguments: Any = None  # the trainer's
        self.accumulate = 1  # as the user set it there
        self.is_short = False  # whether the arguments are those of a step of fewer batches

    def step_after(self, num_batches: int) -> None:
        """Let the trainer step after so many batches of its epoch."""
        self.arguments.gradient_accumulation_steps = num_batches
        self.is_short = True

    def step_as_set(self) -> None:
        """Let the trainer step as the user set it."""
        self.arguments.gradient_accumulation_steps = self.accumulate
        self.is_short = False

    def note_batch(self, iterator: LoaderIterator) -> None:
        """Note a batch of the trainer's that is about to be handed out."""
        super().note_batch(iterator)
        if iterator is self.iteration:
            batch = iterator.last_batch
            self.fetched.append(batch)
            if len(self.fetched) == 1 and batch is not None and batch.ends_epoch:
                self.step_after(1)


class StreamingTrainerCallback(TrainerCallback, ExportableState, TrainerClock):  # type: ignore[misc]  # may be absent
    """Keeps the position of a `StreamingDataLoader` in ``trainer_state.json``, and continues from there.

    Args:
        options: `seed_steps`, `on_missing_state`, `check_delivery` and `record_delivery`, see `PositionTracker`;
            `monitor`, `watch_after_s` and `report`, see `RunOptions`. Messages are logged at INFO; a report is written
            in the trainer's `output_dir`. Where gradients are accumulated, the seed of a step's last micro-batch is
            that of the step.

    Example: ``callbacks=[StreamingTrainerCallback()]``, and a `get_train_dataloader` that returns the loader.
    """

    reads_states = True

    def __init__(self, **options: Unpack[RunOptions]) -> None:
        self.run = _Run(**options)
        self.run.output = _log.info
        self._options = {  # as JSON takes them
            name: os.fspath(value) if isinstance(value, os.PathLike) else value for name, value in options.items()
        }
        self._state: Any = None  # the trainer's
        self._begins_epoch = False  # whether the trainer has begun an epoch, and trained on nothing of it
        self._control: Any = None  # the trainer's, by which callbacks end an epoch
        self._is_in_epoch = False
        self._num_epochs = 0  # that are over, as the trainer has begun them: a resume counts whole ones of its steps
        self._batch_index = 0  # of the micro-batch that is taken next
        self._steps_per_epoch = 1  # as the trainer counted them before the training
        self._num_left = 0  # micro-batches of a step of fewer than others that are not trained on
        self._num_in_epoch = 0  # micro-batches, as the trainer counts them: from 0 again after a resume
        self._since: Mark | None = None  # when the trainer's latest event was over

    @property
    def monitor(self) -> DataMonitor:
        """Of the latest training."""
        return self.run.monitor

    def stats(self) -> LoaderStats:
        """Where the time of the latest training has gone so far, see `StreamingDataLoader.stats`."""
        return self.monitor.stats()

    # What the run asks

    @property
    def takes_whole_batches(self) -> bool:
        """The trainer may accumulate batches of a loader that does not know of it."""
        return False

    def micro_batch(self) -> int:
        """The number of the batch that is taken next."""
        return self._batch_index

    def step(self) -> int:
        """How many steps there were."""
        return 0 if self._state is None else int(self._state.global_step)

    def owns(self, iterator: LoaderIterator) -> bool:
        """Begin the rest of an epoch, if the trainer is about to fetch its first batch.

        The iteration that begins last before the first step is its own.
        """
        if self._begins_epoch:
            self._begin_epoch()
            if self.run.loader.epochs_differ:  # the trainer's are all as long as it took the first one to be
                num_steps = self._steps_per_epoch - self.step() % self._steps_per_epoch
                iterator.limit = num_steps * self.run.accumulate
        return self._begins_epoch

    def _begin_epoch(self) -> None:
        run = self.run
        run.move_to(run.loader.normalised(run.position))
        run.fetched = []
        self._batch_index = run.loader.batches_before(run.position)
        run.begin_epoch(self._batch_index)

    # The trainer's events

    def on_init_end(self, args: Any, *_: Any, **__: Any) -> None:
        """Keep the trainer from reading the batches again that a checkpoint is past."""
        args.ignore_data_skip = True

    def on_train_begin(self, args: Any, state: Any, *_: Any, train_dataloader: Any = None, **__: Any) -> None:
        """Continue from the checkpoint's position.

        Raises:
            TypeError: The trainer has another loader.
            ValueError: Epochs differ in length, and the loader does not know how many batches a step takes.
            StateError: The checkpoint holds no position, or steps of smaller batches, so that the trainer would end
                before its last epoch; or an error has left other arguments than the user's.
        """
        run = self.run
        if run.is_short and run.arguments is args:
            run.step_as_set()
            raise StateError(
                "an error ended the training before this one in a step of fewer batches than others, for which "
                "gradient_accumulation_steps was changed. It is as you set it again: call train() once more"
            )
        if not isinstance(train_dataloader, StreamingDataLoader):
            raise TypeError(
                "StreamingTrainerCallback keeps the position of a StreamingDataLoader; found "
                f"{type(train_dataloader).__name__}. Return one from the trainer's get_train_dataloader"
            )
        accumulate = args.gradient_accumulation_steps
        if train_dataloader.epochs_differ and train_dataloader.accumulate % accumulate:
            raise ValueError(
                f"epochs differ in length here, so the loader must know that a step takes {accumulate} batches; found "
                f"accumulate={train_dataloader.accumulate}. Pass accumulate={accumulate} to it"
            )
        run.arguments = args
        run.accumulate = accumulate
        self._steps_per_epoch = max(1, -(-len(train_dataloader) // accumulate))
        self._state = state
        self.monitor.stop("before its end")
        run.attach(train_dataloader, clock=self)
        self._come_first()
        # The trainer fails to save the state of a callback that the checkpoint lacked.
        saved = state.stateful_callbacks.setdefault(type(self).__name__, {})
        position = saved.get("attributes", {}).get("position")
        self._is_in_epoch = False
        self._num_epochs = state.global_step // self._steps_per_epoch
        if state.global_step and position is not None:  # a training from the start has that of the one before
            self._num_epochs = saved["attributes"].get("num_epochs", self._num_epochs)
            run.load(position)
            self._refuse_fewer_steps(args, state.global_step)
        elif state.global_step:
            run.report_missing(f"that of step {state.global_step} was written without StreamingTrainerCallback")
        run.begin_run()
        run.measure(lambda: Path(args.output_dir))

    def _refuse_fewer_steps(self, args: Any, step: int) -> None:
        """StateError where the trainer, which counts all steps as if they were of today's batches, would end early."""
        loader = self.run.loader
        num_epochs = int(args.num_train_epochs)
        if args.max_steps > 0 or loader.epochs_differ or num_epochs != args.num_train_epochs:
            return
        batches = loader.micro_batches_from(loader.normalised(self.run.position))
        num_whole = num_epochs - self._num_epochs - 1  # after this one
        left = -(-len(batches) // self.run.accumulate) + num_whole * self._steps_per_epoch
        limit = num_epochs * self._steps_per_epoch
        if left > 0 and step + left > limit:
            raise StateError(
                f"the trainer ends its epochs after {limit} steps, as a run of today's batches would; found {step} "
                f"steps of smaller ones, and {left} left to train. Pass max_steps={step + left}, or batches as before"
            )

    def state(self) -> dict[str, Any]:
        """The position, as the trainer saves it."""
        self._leave_epoch()
        position = self.run.state() if self.run.has_run else None
        is_over = self._is_in_epoch and self.run.has_run and self.run.position.epoch > self.run.epoch_in_training
        attributes = {"position": position, "num_epochs": self._num_epochs + is_over}
        return {"args": self._options, "attributes": attributes}

    def _leave_epoch(self) -> None:
        """Begin the next epoch where a callback has ended the one before: a resume does not know of that."""
        run = self.run
        is_cut = self._control is not None and self._control.should_epoch_stop
        if is_cut and run.epoch_in_training == run.position.epoch:
            run.epoch_over()

    def _come_first(self) -> None:
        """Let the trainer call this before the callbacks that write logs: they get the metrics too."""
        frame = inspect.currentframe()
        while frame is not None:
            callbacks = getattr(frame.f_locals.get("self"), "callbacks", None)
            if isinstance(callbacks, list) and self in callbacks:
                callbacks.insert(0, callbacks.pop(callbacks.index(self)))
                return
            frame = frame.f_back

    def on_epoch_begin(self, *_: Any, **__: Any) -> None:
        """Note that the trainer is about to fetch an epoch's first batch."""
        self._begins_epoch = self._is_in_epoch = True
        self._num_in_epoch = 0

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """Take up the batches of this step; an iteration that begins later is another's.

        Raises:
            StateError: They did not come from the loader.
        """
        self._begins_epoch = False
        fetched = self.run.fetched
        self.run.fetched = []
        if not fetched:
            raise StateError(
                "every batch that the trainer trains on must come from its StreamingDataLoader, so that it can be "
                "counted; those of this step did not. Take no batches in get_batch_samples but from its iterator"
            )
        for self.run.current in fetched:
            self.run.take()
            self._batch_index += 1
        self.run.step_as_set()
        self._num_left = len(fetched) if len(fetched) < self.run.accumulate else 0

    def on_substep_end(self, *_: Any, **__: Any) -> None:
        """Let the trainer step at the last batch of this step, also where it has fewer than others."""
        self._num_in_epoch += 1
        self._num_left -= 1
        if self._num_left == 1:
            self.run.step_after(self._num_in_epoch + 1)

    def on_step_end(self, args: Any, _: Any, control: Any, **__: Any) -> None:
        """Commit the step, and note when it was over: what comes next may be an evaluation or a checkpoint."""
        run = self.run
        self._control = control
        run.step_as_set()
        self._num_in_epoch += 1
        run.sync()
        iteration = run.iteration
        is_over = run.current is not None and run.current.ends_epoch
        if is_over and run.loader.epochs_differ and iteration is not None:
            self._begin_epoch()
            iteration.continue_at(run.position)
            if args.max_steps <= 0 and run.position.epoch >= args.num_train_epochs:
                control.should_training_stop = True
        self._note_event()

    def _note_event(self) -> None:
        self._since = Mark.of(perf_counter())

    def on_epoch_end(self, args: Any, _: Any, control: Any, **__: Any) -> None:
        """End the epoch, also where a callback asked for it; and the training after as many as there are to be."""
        self._leave_epoch()
        self._is_in_epoch = False
        self._num_epochs += 1
        if args.max_steps <= 0 and self._num_epochs >= args.num_train_epochs and not self.run.loader.epochs_differ:
            control.should_training_stop = True
        self.monitor.end_epoch()
        self._note_event()

    def on_log(self, *_: Any, logs: dict[str, float] | None = None, **__: Any) -> None:
        """Add the metrics of the data to those of the training."""
        if logs is None or "loss" not in logs:  # an evaluation's, before `on_evaluate`
            return
        if self.monitor.is_on:
            metrics = self.run.metrics()
            logs.update(metrics)
            self._state.log_history[-1].update(metrics)
        self._note_event()

    def on_evaluate(self, *_: Any, **__: Any) -> None:
        """Measure training without its evaluations."""
        self._add_pause("validation")

    def on_save(self, *_: Any, **__: Any) -> None:
        """Measure how long checkpoints are written."""
        self._add_pause("checkpoint")

    def _add_pause(self, what: str) -> None:
        if self._since is not None and self.run.is_attached:
            self.run.loader.meter.add_pause(what, self._since, perf_counter())
            self._note_event()

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """Tell what to change if training waited for its data, and report what a resumed run lost and repeated."""
        if self.run.is_attached:
            self.run.tell()
            self.monitor.stop(None)
            self.run.end_run()
            self.run.detach()
        self._since = None
