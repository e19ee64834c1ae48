"""What a Lightning run has trained on, counted by optimizer steps: the callback that keeps a loader's position.

Batches fetched are not batches trained on, and Lightning's own counters are wrong at one stop or another. The one
signal that is right for automatic and manual optimization, at any place where a checkpoint can be written, is that
`trainer.global_step` grew since the batch began.
"""

from __future__ import annotations

import os
import warnings
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from lightning_stream.errors import StateError
from lightning_stream.loader import StreamingDataLoader
from lightning_stream.loading.randomness import sample_seed
from lightning_stream.order import Position
from lightning_stream.order.micro_batches import BatchInfo
from lightning_stream.order.mosaic_state import is_mosaic_state
from lightning_stream.trainers.agreement import check_ranks_agree
from lightning_stream.trainers.audit import DeliveryRecord
from lightning_stream.trainers.delivery import DeliveryCheck
from lightning_stream.trainers.lightning.loops import (
    LoopPosition,
    begin_epoch_afresh,
    forget_fetched,
    let_ranks_stop_together,
    limited,
    loader_states,
    rewrite_loops,
    train_loader_of,
    validation_is_due,
    warn_if_untried,
)
from lightning_stream.trainers.lightning.package import Callback
from lightning_stream.trainers.lightning.rules import check_alignment, check_callbacks, check_loader
from lightning_stream.trainers.lightning.show import show_in_progress_bar

STATE_KEY = "lightning_stream"
_NEVER = -1


class StreamingCallback(Callback):
    """Keeps the position of a `StreamingDataLoader` in Lightning's checkpoints, and continues from it exactly.

    `StreamingDataModule` adds one by itself. Add one to ``Trainer(callbacks=[...])`` where a LightningModule's own
    `train_dataloader`, or `Trainer.fit(model, loader)`, hands Lightning a `StreamingDataLoader`.

    Args:
        seed_steps: Seed torch before every training batch from (this, step, rank, micro-batch), so that dropout
            draws the same whether or not the run was stopped; None leaves torch's generator alone.
        on_missing_state: What to do with a checkpoint that holds no position: ``"error"``, or ``"restart"`` to begin
            the data anew.
        check_delivery: Compare every batch with the plan, and raise `LedgerError` at the first that differs.
        show_position: Show the position in the progress bar.
        record_delivery: A folder where each rank writes down what it trained on, 8 bytes a step, for
            `lightning_ledger.verify_delivery`; None writes nothing.
    """

    def __init__(
        self,
        seed_steps: int | None = None,
        on_missing_state: str = "error",
        *,
        check_delivery: bool = True,
        show_position: bool = True,
        record_delivery: str | os.PathLike[str] | None = None,
    ) -> None:
        if on_missing_state not in ("error", "restart"):
            raise ValueError(f"on_missing_state is 'error' or 'restart'; found {on_missing_state!r}")
        self.seed_steps = seed_steps
        self.on_missing_state = on_missing_state
        self.check_delivery = check_delivery
        self.show_position = show_position
        self.record_delivery = record_delivery
        self.make_loader: Callable[[], StreamingDataLoader] | None = None  # the data module's, where there is one
        self._loader: StreamingDataLoader | None = None
        self._handed_out: deque[BatchInfo] = deque()
        self._delivery: DeliveryCheck | None = None
        self._record: DeliveryRecord | None = None
        self._hide_position: Callable[[], None] = _nothing
        self._training: BatchInfo | None = None
        self._num_substituted = 0  # in the batch in training
        self._seen_step = 0
        self._committed: Position | None = None
        self._proven: Position | None = None  # the last one with a ledger's sum of its own
        self._start: Mapping[str, Any] | None = None
        self._first_epoch = 0
        self._asked = False  # whether a checkpoint was asked for its position
        self._last_epoch_trained = _NEVER
        self._validated_step = _NEVER
        self._at_boundary = False

    @property
    def state_key(self) -> str:
        """The same for every subclass, so that a renamed class still finds its state."""
        return STATE_KEY

    # The loader

    def attach(self, loader: StreamingDataLoader) -> None:
        """Follow this loader: what it hands out, and where it begins."""
        self._loader = loader
        self._handed_out.clear()
        self._delivery = DeliveryCheck(loader) if self.check_delivery else None
        self._record = None if self.record_delivery is None else DeliveryRecord(self.record_delivery, loader)
        loader.followed_by(self._handed_out.append, self._position)
        if self._committed is None and self._start is not None:
            self._committed = self._proven = loader.accept(self._start)
        if self._committed is None and self._first_epoch:
            self._committed = replace(loader.first_position(), epoch=self._first_epoch)
        if self._committed is not None:
            loader.continue_from(self._committed)
        if self._proven is not None:
            loader.builds_on(self._proven)

    def start_at(self, state: Mapping[str, Any]) -> None:
        """Begin the data where the state of another run, e.g. under another trainer, stands; before `fit`."""
        self._start = state

    def _find_loader(self, trainer: Any) -> StreamingDataLoader:
        if self._loader is not None:
            return self._loader
        if self.make_loader is not None:
            return self.make_loader()
        loader = train_loader_of(trainer)
        if not isinstance(loader, StreamingDataLoader):
            raise TypeError(
                f"StreamingCallback keeps the position of a StreamingDataLoader; the trainer trains on "
                f"{type(loader).__name__}. Hand it one, or leave the callback away"
            )
        self.attach(loader)
        return loader

    # What Lightning tells

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Refuse what cannot be exact, and forget what belongs to another fit.

        Raises:
            ValueError: A callback of the trainer's would hang it, or change the global batch behind the data's back.
        """
        if stage != "fit":
            return
        warn_if_untried(trainer)
        check_callbacks(trainer)
        self._loader, self._training = None, None
        self._handed_out.clear()
        self._asked, self._first_epoch = False, 0
        if trainer.global_step == 0:
            self._committed = self._proven = None
        elif self._committed is None:  # the trainer has fitted before, with other data: its epochs count on
            self._first_epoch = trainer.current_epoch
        elif self._committed.position:
            self._committed = self._committed.next_epoch()  # a second fit begins with an epoch, as Lightning does

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Leave the progress bar as it was, and close the record."""
        self._hide_position()
        self._hide_position = _nothing
        if self._record is not None:
            self._record.close()

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin where the checkpoint stood."""
        self._seen_step = trainer.global_step
        if trainer.ckpt_path is not None and not self._asked:  # Lightning asks nobody if it lacks "callbacks"
            self._state_in({"global_step": trainer.global_step})
        loader = self._find_loader(trainer)
        check_loader(trainer, loader)
        check_ranks_agree(self._position())
        let_ranks_stop_together(trainer)
        if self._at_boundary:
            begin_epoch_afresh(trainer)
            self._at_boundary = False
        if self.show_position:
            self._hide_position = show_in_progress_bar(trainer, loader, self._position)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Take up the next batch handed out: Lightning trains on them in turn."""
        self._sync(trainer)
        if not self._handed_out:
            raise StateError(
                "every batch that Lightning trains on must come from the StreamingDataLoader one by one, so that it "
                "can be counted; this one did not. `training_step(self, dataloader_iter)` cannot be: take `batch`"
            )
        self._training = self._handed_out.popleft()
        self._num_substituted = self._training.num_substituted
        if self._delivery is not None:
            due = self._position() if pl_module.automatic_optimization else None
            self._delivery.compare(self._training, due)
        if self._record is not None:
            self._record.take(self._training)
        self._last_epoch_trained = self._training.epoch
        if self.seed_steps is not None:
            torch.manual_seed(
                sample_seed(self.seed_steps, trainer.global_step * 65536 + trainer.global_rank, batch_idx)
            )

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Commit the step that this batch completed, and count what was delivered in place of bad samples: the metric
        is the epoch's, over all ranks, and is there where the dataset was told to substitute."""
        self._sync(trainer)
        dataset: Any = self._loader and self._loader.dataset
        if dataset.bad_data.policy.substitutes:
            count = float(self._num_substituted)
            pl_module.log(
                "stream/num_substituted", count, on_step=False, on_epoch=True, sync_dist=True, reduce_fx="sum"
            )

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """The order's next epoch begins when Lightning's does, also where a limit or the model cut this one short.

        Lightning also comes by where `max_steps`, `max_time` or a callback stopped it: the epoch is not over then.
        """
        self._sync(trainer)
        position = self._position()
        stopped = trainer.should_stop or 0 <= trainer.max_steps <= trainer.global_step
        if position.epoch == self._last_epoch_trained and (trainer.is_last_batch or not stopped):
            self._committed = position.next_epoch()

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Remember that the validation due at this step has run; comes before ModelCheckpoint's."""
        if not trainer.sanity_checking:
            self._validated_step = trainer.global_step

    def _sync(self, trainer: Any) -> None:
        """Commit the batch in training if the optimizer stepped since it began.

        A signal's handler may save a checkpoint, and so come by here, between any two lines: the commit is first, and
        made again it is the same.
        """
        step, info = trainer.global_step, self._training
        if step <= self._seen_step:
            return
        if info is not None:
            self._commit(trainer, info)
        self._training = None
        self._seen_step = step
        if self._record is not None:
            self._record.commit()

    def _commit(self, trainer: Any, info: BatchInfo) -> None:
        position = self._position()
        if info.ends_epoch or trainer.is_last_batch:
            self._committed = replace(position, epoch=info.epoch).next_epoch()
        elif info.completes_step:
            self._committed = replace(position, epoch=info.epoch, position=info.end)
        elif trainer.lightning_module.automatic_optimization:
            raise StateError(
                "an optimizer step must use up whole global batches, but Lightning stepped in the middle of the one "
                f"at positions {info.begin} to {info.end}: the trainer accumulates {trainer.accumulate_grad_batches} "
                f"micro-batches, the loader {self._loader and self._loader.accumulate}. Give both the same number"
            )

    def _position(self) -> Position:
        if self._committed is None:
            assert self._loader is not None
            self._committed = self._loader.first_position()
        return self._committed

    # Checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Plain values, the same on every rank; no collective."""
        if self._loader is None:  # before any data
            return {"position": None, "validated_step": _NEVER}
        self._proven = self._loader.proven(self._position())
        return {"position": self._proven.to_state(), "validated_step": self._validated_step}

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Bring the state up to the optimizer's last step: an exception may have come before our batch end."""
        self._sync(trainer)
        if self._loader is not None:
            checkpoint["callbacks"][STATE_KEY] = self.state_dict()

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Continue from the position, and make Lightning's counters agree with it before it restores them."""
        if trainer.state.fn != "fit":
            return
        self._asked = True
        state, step = self._state_in(checkpoint), int(checkpoint["global_step"])
        if state is None:
            return
        if forget_fetched(trainer):
            self._loader = None
        loader = self._find_loader(trainer)
        position = loader.first_position() if state["position"] is None else loader.accept(state["position"])
        if loader.batches_before(position) >= limited(len(loader), trainer.limit_train_batches):
            position = position.next_epoch()  # the trainer's limit on an epoch is tighter now
        self._validated_step = state["validated_step"]
        at = self._loop_position(trainer, loader, position, step)
        check_alignment(loader, at)
        self._committed = self._proven = position
        self._at_boundary = at.at_boundary
        self._last_epoch_trained = at.epoch if not at.at_boundary and position.epoch == at.epoch else _NEVER
        rewrite_loops(checkpoint, at)
        if self._loader is not None:
            self._loader.continue_from(position)

    def _loop_position(self, trainer: Any, loader: StreamingDataLoader, position: Position, step: int) -> LoopPosition:
        """Where Lightning's loops are; a validation that was due and has not run is what comes first."""
        num_batches = limited(len(loader), trainer.limit_train_batches)
        done = loader.batches_before(position)
        here = LoopPosition(position.epoch, done, num_batches, validated=self._validated_step == step)
        if done == 0 and position.epoch > 0:  # the epoch before is over, but for its validation
            before = replace(here, epoch=position.epoch - 1, batch=num_batches)
            before = replace(before, validation_due=validation_is_due(trainer, before))
            return before if before.runs_validation else here
        return replace(here, validation_due=validation_is_due(trainer, here))

    def _state_in(self, checkpoint: Mapping[str, Any]) -> dict[str, Any] | None:
        state = checkpoint.get("callbacks", {}).get(STATE_KEY)
        if state and (state["position"] is not None or checkpoint["global_step"] == 0):
            return dict(state)
        others = loader_states(checkpoint)
        for other in others:
            if is_mosaic_state(other):
                return {"position": other, "validated_step": _NEVER}
        found = [sorted(map(str, other)) for other in others]
        sentence = (
            "a run continues from the data position in its checkpoint, but this one holds none of ours"
            + (f" (it holds loader states with {found[0]})" if found else "")
            + ": it was written without StreamingDataModule or StreamingCallback. "
            "Pass on_missing_state='restart' to keep its weights and begin the data anew"
        )
        if self.on_missing_state == "error":
            raise StateError(sentence)
        warnings.warn(sentence, stacklevel=2)
        return None


def _nothing() -> None:
    """The progress bar shows nothing of ours."""
