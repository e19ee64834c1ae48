"""The callback that keeps a loader's position in Lightning's checkpoints.

Batches fetched are not batches trained on, and Lightning's own counters are wrong at one stop or another. Two things
are right for automatic and manual optimization, wherever a checkpoint can be written: the number of the batch in
training, and that `trainer.global_step` grew since it began.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from inspect import signature
from typing import Any, Unpack

from lightning_stream.errors import StateError, checking, refuse_unknown
from lightning_stream.loader import StreamingDataLoader
from lightning_stream.loading.plain import STATE_KEY
from lightning_stream.monitoring.stats import LoaderStats
from lightning_stream.order import Position
from lightning_stream.order.mosaic.state import is_mosaic_state
from lightning_stream.trainers.checkpoints import inner
from lightning_stream.trainers.lightning import loops, rules
from lightning_stream.trainers.lightning.loops import LoopPosition
from lightning_stream.trainers.lightning.package import Callback
from lightning_stream.trainers.monitor import DataMonitor
from lightning_stream.trainers.options import RunOptions
from lightning_stream.trainers.run import Run

_NEVER = -1
_AHEAD = "epochs_ahead"


def _continued(loader: StreamingDataLoader, here: Position) -> Position:
    """Where a run at this position continues with another loader: at the epoch's start, if its data or order differ."""
    first = loader.first_position()
    order = loader.settings(here.order).order
    is_same = (first.snapshot, first.weights, order) == (here.snapshot, here.weights, here.order)
    return loader.normalised(here) if is_same else replace(first, epoch=here.epoch)


def _last_epoch(checkpoint: Mapping[str, Any]) -> int:
    """The epoch that the run of a checkpoint trained in last, by Lightning's count."""
    state = inner(checkpoint, "callbacks", STATE_KEY)
    position = inner(state, "position")
    epoch = int(position.get("epoch", 0)) - int(state.get(_AHEAD, 0))
    return epoch if position.get("position") else max(0, epoch - 1)


class CallbackOptions(RunOptions, total=False):
    """The options of a `StreamingCallback`."""

    show_position: bool


class StreamingCallback(Callback):
    """Keeps the position of a `StreamingDataLoader` in Lightning's checkpoints, and continues from it exactly.

    `StreamingDataModule` adds one, and so does Lightning to every trainer once this package is installed: add
    one to ``Trainer(callbacks=[...])`` only for other settings than the defaults.

    Args:
        show_position: Show the position in the progress bar.
        is_passive: Do nothing unless the trainer trains on a `StreamingDataLoader`.
        options: `seed_steps`, `on_missing_state`, `check_delivery` and `record_delivery`, see `PositionTracker`;
            `monitor`, `watch_after_s` and `report`, see `RunOptions`. Metrics are logged every
            ``Trainer(log_every_n_steps=...)`` steps; a report is written in the trainer's `default_root_dir` if one was
            chosen, else in the folder of this run's logs, if it has any.

    Example::

        trainer = Trainer(callbacks=[StreamingCallback(seed_steps=7), ModelCheckpoint(every_n_train_steps=100)])
        trainer.fit(model, StreamingDataLoader(dataset, batch_size=32))
    """

    state_key = STATE_KEY  # the same for every subclass, so that a renamed class still finds its state

    @checking
    def __init__(self, *, show_position: bool = True, is_passive: bool = False, **options: Unpack[RunOptions]) -> None:
        known = [*signature(StreamingCallback.__init__).parameters, *CallbackOptions.__annotations__]
        refuse_unknown(type(self).__name__, options, known)
        self.run = Run(**options)
        self.is_passive = is_passive
        self.show_position = show_position
        self._changes = ExitStack()  # of the trainer during a fit
        self._logging = ExitStack()  # of its next logging
        self.make_loader: Callable[[], StreamingDataLoader] | None = None  # the data module's, where there is one
        self._from: Position | None = None  # where this fit begins
        self._start: Mapping[str, Any] | None = None  # another run's state to begin with
        self._first_epoch = 0
        self._is_restored = False  # whether this fit has loaded a checkpoint
        self._continues_inside = False  # whether that one was of the middle of an epoch, and its data is not ours
        self._was_asked = False  # whether a checkpoint was asked for its position
        self._resumed_epoch = _NEVER  # the epoch that a resume continued inside of
        self._validated_step = _NEVER
        self._left: dict[int, Position] = {}  # by step: from where on an epoch has ended without another one
        self._epochs_ahead = 0  # of the data before Lightning, see `LoopPosition`
        self._enters_at: LoopPosition | None = None

    @property
    def monitor(self) -> DataMonitor:
        """Of the latest fit."""
        return self.run.monitor

    def start_at(self, state: Mapping[str, Any]) -> None:
        """Begin the data where the state of another run, e.g. under another trainer, stands; before `fit`."""
        self._start = state
        self._from = None

    def place(self, loader: StreamingDataLoader) -> None:
        """Let a loader stand where a checkpoint did: Lightning asks for its length before it trains."""
        if self._enters_at is not None and self._from is not None:
            loader.cursor.seek(self._from)

    def stats(self) -> LoaderStats:
        """Where the time of the latest fit has gone so far, see `StreamingDataLoader.stats`."""
        return self.monitor.stats()

    # The loader

    def _attach(self, trainer: Any) -> StreamingDataLoader | None:
        """Follow what the trainer trains on now; None where that is not ours and this callback is passive."""
        return self._follow(trainer, loops.train_loader_of(trainer))

    def _follow(self, trainer: Any, loader: Any) -> StreamingDataLoader | None:
        if not isinstance(loader, StreamingDataLoader):
            if self.is_passive:
                return None
            raise TypeError(
                f"StreamingCallback keeps the position of a StreamingDataLoader; the trainer trains on "
                f"{type(loader).__name__}. Pass one to fit, or remove the callback"
            )
        if self.run.is_attached and self.run.loader is loader:
            return loader
        position = _continued(loader, self.run.position) if self.run.is_attached else self._begins_at(loader)
        self.run.attach(loader, position, loops.LightningClock(trainer, loader))
        return loader

    def _follow_next(self, trainer: Any, loader: Any) -> None:
        """Follow a loader that Lightning has set up in the middle of a fit."""
        former = self.run.loader
        following = self._follow(trainer, loader)
        if following is not None and following is not former:
            self.monitor.attach(following)
            self.run.clock.follow_length(self.run.position.epoch)

    def _begins_at(self, loader: StreamingDataLoader) -> Position | None:
        if self._from is None and self._start is not None:
            self._from = loader.accept(self._start)
        if self._from is not None:
            return _continued(loader, self._from)
        return replace(loader.first_position(), epoch=self._first_epoch) if self._first_epoch else None

    # Lightning's hooks

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Refuse what cannot be exact, and reset what belongs to another fit.

        Raises:
            ValueError: A callback of the trainer's would hang it, or change the global batch.
            StateError: ``ckpt_path="last"`` found nothing although the run has checkpoints.
        """
        if stage != "fit":
            return
        if self.make_loader is not None:  # its module need not be what this fit trains on
            self.is_passive = getattr(loops.data_source_of(trainer), "position_callback", None) is not self
        if not self.is_passive:
            self._check(trainer)
        self._was_asked = False
        self._first_epoch = 0
        self._enters_at = None
        self._resumed_epoch = _NEVER
        self._is_restored = self._continues_inside = False
        self._left = {}
        source = loops.data_source_of(trainer)
        begins_at = source.begins_at if isinstance(source, StreamingDataLoader) else None
        if trainer.global_step == 0:
            self._from = None
            self._validated_step = _NEVER  # that was of another trainer
        elif begins_at is not None:  # the user has put it there since the fit before
            self._from = begins_at
        elif self._from is None:  # the trainer has fitted before, with other data: its epochs count on
            self._first_epoch = trainer.current_epoch
        elif self._from.position:
            self._from = self._from.next_epoch()  # a second fit begins with an epoch, as Lightning does
        if isinstance(source, StreamingDataLoader) and source.epochs_differ and begins_at is None:
            # Lightning asks for its length first, and trains nothing if the fit before this one came to its data's end.
            source.cursor.seek(self._begins_at(source) or source.first_position())

    def _check(self, trainer: Any) -> None:
        loops.warn_if_untried(trainer)
        rules.check_callbacks(trainer)
        rules.check_last(trainer)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Report what was lost and repeated, and release the loader."""
        if stage == "fit" and self.run.is_attached:
            self._end_monitor(None)
            self.run.end_run()
            self._release()
        elif stage == "fit" and self._continues_inside and not 0 <= trainer.max_steps <= trainer.global_step:
            # After max_steps, Lightning may take the epoch for a whole one, and train on nothing of its rest.
            rules.check_others(loops.train_loaders_of(trainer), is_resumed=True)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Leave bar and loader to the user, and end the monitor: Lightning asks for no teardown after an error."""
        self._end_monitor(exception)
        if self.run.is_attached:
            if not isinstance(exception, StateError):
                self.run.sync()  # it may have come before our batch end
            self._release()

    def _release(self) -> None:
        self._from = self.run.position
        self.run.detach()

    def _end_monitor(self, error: BaseException | None) -> None:
        self._changes.close()
        self._logging.close()
        self.monitor.stop(error)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin where the checkpoint stood."""
        loader = self._attach(trainer)
        if loader is None:
            is_resumed = trainer.global_step > 0 and (self._is_restored or trainer.ckpt_path is not None)
            rules.check_others(loops.train_loaders_of(trainer), is_resumed=is_resumed)
            return
        self.run.output = partial(loops.say, trainer)
        if self.is_passive:
            self._check(trainer)
        if trainer.ckpt_path is not None and not self._was_asked and trainer.global_step:
            raise StateError(  # also where the data may begin again: Lightning's loops are inside the epoch already
                "A training run continues from the data position in its checkpoint, but this one holds none of ours: "
                "it has no 'callbacks', so that Lightning asked no callback, and restored its loops alone. Load a "
                "whole checkpoint. To keep the weights and begin the data from its start, save this one with "
                "checkpoint['callbacks'] = {}, and pass on_missing_state='restart'"
            )
        rules.check_loader(trainer, loader)
        self.run.begin_run()
        loader.check()  # logs before the progress bar is drawn
        loops.let_ranks_stop_together(trainer)
        self._end_monitor(None)
        self.run.measure(partial(loops.run_folder, trainer))
        loops.follow_loaders(trainer, partial(self._follow_next, trainer), self._changes)
        loops.time_checkpoints(trainer, self.run, self._changes)
        if self.show_position:
            loops.show_in_bar(trainer, self.run, self._changes)
        at = self._enters_at
        self._enters_at = None
        if at is None:
            self._epochs_ahead = self.run.position.epoch - trainer.current_epoch
        self.run.clock.follow_length(self.run.position.epoch if at is None else at.epoch)
        is_inside = at is not None and at.epoch == self.run.position.epoch
        if at is not None and is_inside:
            rules.check_counted(loader.batches_before(self.run.position), at)
        self.run.begin_epoch(at.batch if at is not None and is_inside else 0)  # as Lightning counts from here
        if at is not None:
            loops.enter(trainer, at)

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Follow the epoch's length."""
        self._enters_at = None  # of a checkpoint that a tuner restored in the middle of the run
        if self.run.is_attached:
            self.run.clock.follow_length(self.run.position.epoch)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Take up the batch of this number."""
        if not self.run.is_attached:
            return
        self.run.sync()
        if self.run.current is None:
            raise StateError(
                "every batch that Lightning trains on must come from the StreamingDataLoader one by one, so that it "
                "can be counted; this one did not. `training_step(self, dataloader_iter)` cannot be: take `batch`"
            )
        self.run.take()

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
        """Give every sample of an optimizer step the same weight, also in an epoch's last, partial step."""
        current = self.run.current if self.run.is_attached else None
        if current is None or not pl_module.automatic_optimization or trainer.strategy.handles_gradient_accumulation:
            return
        weight = rules.weight_of(current, self.run.settings)
        if weight != 1 and loss.requires_grad:
            loss.register_hook(lambda grad: grad * weight)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Commit the step that this batch completed; log what concerns the data, over all ranks."""
        if not self.run.is_attached:
            return
        self.run.sync()
        if self.monitor.is_on and loops.logs_now(trainer):
            loops.log(trainer, self.run.metrics(), self._logging)
        if self.run.loader.substitutes and self.run.current is not None:
            options: dict[str, Any] = {"on_step": False, "on_epoch": True, "sync_dist": True, "reduce_fx": "sum"}
            pl_module.log("stream/num_substituted", float(self.run.current.num_substituted), **options)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Begin the order's next epoch with Lightning's, also where a limit or the model cut this one short.

        Lightning also calls this where `max_steps`, `max_time` or a callback stopped it: the epoch is not over then.
        """
        if not self.run.is_attached:
            return
        self.run.sync()
        self.monitor.end_epoch()
        epoch = self.run.position.epoch
        stopped = trainer.should_stop or 0 <= trainer.max_steps <= trainer.global_step
        if epoch in (self.run.epoch_in_training, self._resumed_epoch) and (trainer.is_last_batch or not stopped):
            if self.run.place and not (pl_module.automatic_optimization or loops.left_out_batch(trainer)):
                self._left.setdefault(trainer.global_step, self.run.position)
            self.run.epoch_over()
        if loops.left_out_batch(trainer):
            self.run.move_to(self.run.position)  # no step will use up what was taken
        loops.end_restart(trainer)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Tell what to change if training waited for its data."""
        if self.run.is_attached:
            self.run.tell()

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """Measure training without its validations."""
        if self.run.is_attached and not trainer.sanity_checking:
            self.run.loader.meter.begin("validation")

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Remember that the validation due at this step has run; comes before ModelCheckpoint's."""
        if not trainer.sanity_checking:
            self._validated_step = trainer.global_step
            if self.run.is_attached:
                self.run.loader.meter.end("validation")

    # Checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Plain values, the same on every rank; no collective."""
        if self.run.has_run:
            position = self.run.state()
        elif self._from is not None:  # of a checkpoint after which nothing is left to train
            position = self._from.to_state()
        else:  # before any data
            return {} if self.is_passive else {"position": None, "validated_step": _NEVER}
        ahead = {_AHEAD: self._epochs_ahead} if self._epochs_ahead else {}
        return {"position": position, "validated_step": self._validated_step, **ahead}

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Bring the state up to the optimizer's last step: an exception may have come before our batch end."""
        if self.run.has_run:
            self.run.sync()
            checkpoint["callbacks"][STATE_KEY] = self.state_dict()
        if (here := self._left.get(trainer.global_step)) is not None:
            warnings.warn(
                "a checkpoint has no gradients, so a resume from this one loses the samples that no optimizer step has "
                f"used up: those of epoch {here.epoch} from position {here.position} on. With manual optimization, "
                "step at an epoch's last batch too, or resume from a checkpoint after the next step",
                stacklevel=2,
            )

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Continue from the position, and make Lightning's counters agree with it before it restores them."""
        self._is_restored = trainer.state.fn == "fit"
        self._continues_inside = self._is_restored and loops.stopped_inside(checkpoint)
        if not self._is_restored or (self.is_passive and not self._concerns_us(trainer, checkpoint)):
            return
        rules.check_tuners(trainer, checkpoint)
        loops.forget_fetched(trainer)
        # Lightning has not set up its data yet.
        loops.ask_as_in(trainer, _last_epoch(checkpoint))
        loader = self.make_loader() if self.make_loader and not self.is_passive else self._attach(trainer)
        self._was_asked = True
        self._continues_inside &= loader is None
        if loader is None:
            return
        state = self._state_in(checkpoint)
        position = loader.first_position() if state["position"] is None else loader.accept(state["position"])
        if position.position and loader.batches_before(position) >= loops.epoch_length(trainer, loader, position):
            position = position.next_epoch()  # the trainer's limit on an epoch is tighter now
        self._validated_step = state["validated_step"]
        self._epochs_ahead = state[_AHEAD]
        at = self._loop_position(trainer, loader, position, checkpoint)
        rules.check_alignment(loader, at)
        self._from = position
        self.run.resume(position)
        self._enters_at = at
        self._resumed_epoch = at.epoch if not at.at_boundary and position.epoch == at.epoch else _NEVER
        loops.rewrite_loops(checkpoint, at)

    @staticmethod
    def _concerns_us(trainer: Any, checkpoint: Mapping[str, Any]) -> bool:
        """Whether a checkpoint is of a run over our data, as far as is known before the data is made."""
        has_position = bool(inner(checkpoint, "callbacks", STATE_KEY))
        return has_position or isinstance(loops.data_source_of(trainer), StreamingDataLoader)

    def _loop_position(
        self, trainer: Any, loader: StreamingDataLoader, position: Position, checkpoint: Mapping[str, Any]
    ) -> LoopPosition:
        """Where Lightning's loops are; the end of an epoch, and a validation, that have not run come first."""
        num_batches = loops.epoch_length(trainer, loader, position)
        done = loader.batches_before(position)
        validated = self._validated_step == int(checkpoint["global_step"])
        ahead = self._epochs_ahead
        here = LoopPosition(position.epoch, done, num_batches, validated=validated, epochs_ahead=ahead)
        # The epoch before is over, but perhaps not its validation and its end.
        if done == 0 and position.epoch > max(0, ahead):
            num_batches = loops.epoch_length(trainer, loader, replace(position, epoch=position.epoch - 1))
            before = replace(here, epoch=position.epoch - 1, batch=num_batches, num_batches=num_batches)
            before = replace(before, validation_due=loops.validation_is_due(trainer, before))
            is_due = before.runs_validation or loops.epoch_end_is_due(checkpoint, here.epochs_completed)
            return before if is_due else here
        return replace(here, validation_due=loops.validation_is_due(trainer, here))

    def _state_in(self, checkpoint: Mapping[str, Any]) -> dict[str, Any]:
        saved = inner(checkpoint, "callbacks", STATE_KEY)
        state = {"position": None, "validated_step": _NEVER, _AHEAD: 0, **saved}
        others = loops.loader_states(checkpoint)
        if state["position"] is None:
            state["position"] = next(filter(is_mosaic_state, others), None)
        if state["position"] is not None or checkpoint["global_step"] == 0:  # nothing was trained on yet
            return state
        hint = f" (it holds loader states with {sorted(map(str, others[0]))})" if others else ""
        self.run.report_missing(
            f"this one holds none of ours{hint}: it was written without StreamingDataModule or StreamingCallback"
        )
        return {**state, _AHEAD: -int(checkpoint.get("epoch", 0))}  # the data begins again, and Lightning counts on
