"""What a Composer run has trained on, counted by optimizer steps: the callback that keeps a loader's position.

Composer tells a dataset the samples of the current epoch, never the epoch, and tells a loader nothing. So whoever
iterates the training loader is asked: if it is a trainer's loop, its clock says which batches were trained on, and
where in an epoch the next one begins. The callback joins the trainer by itself.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from types import FrameType
from typing import Any

import torch
from composer import Callback, Logger, State, Trainer
from composer.loggers import ProgressBarLogger
from composer.utils import dist, reproducibility

from lightning_stream.errors import StateError
from lightning_stream.order import Position
from lightning_stream.order.micro_batches import BatchInfo
from lightning_stream.trainers.agreement import check_ranks_agree
from lightning_stream.trainers.composer.loader import ComposerLoader

ON_MISSING = ("restart", "error")


class StreamingPosition(Callback):  # type: ignore[misc]  # Composer has no types
    """Keeps the position of a training loader in step with Composer's trainer.

    `data_spec` makes it, and it adds itself to the trainer's callbacks when the trainer first asks for data. It
    restores the random state of a run resumed in the middle of an epoch, which Composer leaves out there; keeps
    `train_subset_num_batches` right after a resume; logs the position; and shows it in the progress bar.

    Args:
        on_missing_state: What to do with a checkpoint that holds no position: ``"restart"`` begins the data anew with
            a warning, ``"error"`` refuses.
    """

    def __init__(self, on_missing_state: str = "restart") -> None:
        if on_missing_state not in ON_MISSING:
            raise ValueError(f"on_missing_state is one of {', '.join(ON_MISSING)}; found {on_missing_state!r}")
        self.on_missing_state = on_missing_state
        self.on_batch: list[Callable[[BatchInfo], object]] = []
        self._loader: ComposerLoader | None = None
        self._trainer: Any = None
        self._committed: Position | None = None
        self._pending: tuple[BatchInfo, int] | None = None  # handed out, at which batch of the clock
        self._epoch_clock = 0
        self._num_substituted = 0  # in the batches that this rank has trained on
        self._warned = False
        self._of_mosaic = False
        self._resumed = False

    def follow(self, loader: ComposerLoader) -> None:
        """Keep this loader's position."""
        self._loader = loader

    @property
    def loader(self) -> ComposerLoader:
        """Whose position is kept."""
        assert self._loader is not None
        return self._loader

    # What the loader asks, see `Follower`

    def joins(self, caller: FrameType | None) -> bool:
        """Whether the frame that iterates the loader is a trainer's training loop; begins to follow it if so."""
        trainer = None if caller is None else caller.f_locals.get("self")
        if not isinstance(trainer, Trainer) or trainer.state.train_dataloader is not self.loader:
            return False
        if trainer is not self._trainer:
            self._join(trainer)
        # Composer would fetch and throw away batches to get to where we start.
        trainer.state.dataset_resumption["train"] = True
        return True

    def _join(self, trainer: Any) -> None:
        if self._trainer is not None and not self._resumed:  # a second trainer begins the data anew
            self._committed = self.loader.first_position()
        self._trainer = trainer
        self._epoch_clock = int(trainer.state.timestamp.epoch)
        trainer.state.callbacks.insert(0, self)
        self.loader.followed_by(self.handed_out, self._position)
        self._check_clock(trainer)
        check_ranks_agree(self._position())
        self._resumed = False

    def upcoming(self) -> int | None:
        """Let the loader begin where the trainer stands; at most how many batches of this epoch are to come."""
        self._sync()
        position = self._position()
        here = self.loader.accept(self.loader.proven(position).to_state())
        done, limit = int(self._trainer.state.timestamp.batch_in_epoch), self._limit()
        over = (here.epoch > position.epoch and position.position > 0) or (limit is not None and done >= limit)
        if done and over:  # saved after the epoch's last batch: Composer has yet to end that epoch
            self._restore_random_state()
            warnings.filterwarnings("ignore", message="No batches were trained for global rank")
            return 0
        self.loader.continue_from(here)
        self._committed = here
        return None if limit is None else limit - done

    def _limit(self) -> int | None:
        """Batches of an epoch, where the trainer takes fewer than there are."""
        length = self._trainer.state.dataloader_len
        return int(length) if length is not None and int(length) < len(self.loader) else None

    def handed_out(self, info: BatchInfo) -> None:
        """Note a batch that is about to be trained on."""
        self._restore_random_state()
        self._sync()
        self._pending = info, int(self._trainer.state.timestamp.batch)
        for listener in self.on_batch:
            listener(info)

    def trained(self) -> Position | None:
        """The position of the optimizer's last step; None while no trainer is followed."""
        if self._trainer is None:
            return None
        self._sync()
        return self._position()

    def resume(self, position: Position | None, of_mosaic: bool) -> None:
        """Take up what a checkpoint holds; None if it holds nothing."""
        self._committed, self._pending = position, None
        self._of_mosaic, self._resumed = of_mosaic, True
        if position is None:
            self._say_missing("the checkpoint holds no data position: it was saved without data_spec")

    # What Composer tells

    def batch_end(self, state: State, logger: Logger) -> None:
        """Commit the batch, and show the position."""
        if state.train_dataloader is not self._loader:
            return
        self._sync()
        position = self._position()
        logger.log_metrics({"stream/epoch": position.epoch, "stream/position": position.position})
        for destination in logger.destinations:
            if isinstance(destination, ProgressBarLogger) and destination.train_pbar is not None:
                _show(destination.train_pbar, position)

    def epoch_end(self, state: State, logger: Logger) -> None:
        """The order's next epoch begins when Composer's does, also where it cut this one short."""
        if state.train_dataloader is self._loader:
            self._sync()
            self._log_substituted(state, logger)

    def fit_end(self, state: State, logger: Logger) -> None:
        """A run may end in the middle of an epoch."""
        if state.train_dataloader is self._loader:
            self._log_substituted(state, logger)

    def _log_substituted(self, state: State, logger: Logger) -> None:
        """Samples delivered so far in place of bad ones, over all ranks, where the dataset was told to substitute."""
        dataset: Any = self.loader.dataset
        if dataset.streaming.bad_data.policy.substitutes:
            count = state.device.tensor_to_device(torch.tensor([self._num_substituted]))
            dist.all_reduce(count)
            logger.log_metrics({"stream/num_substituted": int(count)})

    def close(self, state: State, logger: Logger) -> None:  # noqa: ARG002 - Composer's signature
        """End the workers of all our loaders."""
        for loader in (self._loader, *(evaluator.dataloader.dataloader for evaluator in state.evaluators)):
            if isinstance(loader, ComposerLoader):
                loader.close()

    def _sync(self) -> None:
        """Commit what the trainer's clock says was trained on."""
        clock = self._trainer.state.timestamp
        if self._pending is not None and int(clock.batch) > self._pending[1]:
            info, self._pending = self._pending[0], None
            self._committed = replace(self._position(), epoch=info.epoch, position=info.end)
            self._num_substituted += info.num_substituted
        if int(clock.epoch) > self._epoch_clock and self._position().position > 0:
            self._committed = self._position().next_epoch()
        self._epoch_clock = int(clock.epoch)

    def _position(self) -> Position:
        if self._committed is None:
            self._committed = self.loader.position
        return self._committed

    def _check_clock(self, trainer: Any) -> None:
        """Meet a clock that a checkpoint has set, with or without a position of the data."""
        clock = trainer.state.timestamp
        if int(clock.batch) > 0 and not trainer.first_train_batch_complete and not self._resumed:
            self._say_missing("the checkpoint's data position was left out in loading it")
        if self._of_mosaic and self._position().position == 0 and int(clock.batch_in_epoch) == 0:
            # At the end of an epoch that library saves the epoch that is over.
            self._committed = replace(self._position(), epoch=max(self._position().epoch, int(clock.epoch)))

    def _say_missing(self, what: str) -> None:
        sentence = f"A run continues from the data position in its checkpoint, but {what}. "
        if self.on_missing_state == "error":
            raise StateError(
                sentence + "Pass on_missing_state='restart' to data_spec to begin the data anew at epoch 0, or load "
                "only the weights with load_weights_only=True"
            )
        if not self._warned:
            self._warned = True
            warnings.warn(sentence + "The data begins anew at epoch 0", stacklevel=3)

    def _restore_random_state(self) -> None:
        """As Composer does just before the first batch; it leaves that out where a dataset resumes by itself."""
        state = self._trainer._rng_state  # noqa: SLF001 - kept nowhere else
        if state is not None:
            reproducibility.load_rng_state(state)
            self._trainer._rng_state = None  # noqa: SLF001


def _show(bar: Any, position: Position) -> None:
    """Put the position into Composer's progress bar, which shows only losses by itself; first, as lines are cut."""
    bar.metrics = {"at": f"{position.epoch}:{position.position}", **{k: v for k, v in bar.metrics.items() if k != "at"}}
    bar.pbar.set_postfix(bar.metrics, refresh=False)
