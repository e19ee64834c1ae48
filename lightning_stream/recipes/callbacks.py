"""What a run does beside learning: note the samples it trained on, stop when told to, keep the time."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.profilers import Profiler

from lightning_stream.loader import StreamingDataLoader
from lightning_stream.order.micro_batches import MicroBatch
from lightning_stream.recipes.places import LAST

_STOPPING = (signal.SIGINT, signal.SIGTERM)


def batch_in_training(trainer: Trainer) -> MicroBatch:
    """What the batch that the trainer is at is made of."""
    loader = trainer.train_dataloader
    if not isinstance(loader, StreamingDataLoader) or loader.last_batch is None:
        raise TypeError(f"this callback reads the batches of a StreamingDataLoader; found {type(loader).__name__}.")
    return loader.last_batch


class RunStopped(Exception):
    """A signal asked the run to stop, and it did at a step's end.

    Attributes:
        signum: The signal.
        saved: The checkpoint written for it; None where the last periodic one serves.
    """

    def __init__(self, signum: int, saved: Path | None) -> None:
        super().__init__(f"stopped by {signal.Signals(signum).name}")
        self.signum = signum
        self.saved = saved


class StopOnSignal(Checkpoint):
    """SIGINT and SIGTERM end the run at the next step's end, after a checkpoint; a second one ends it at once.

    On several ranks no checkpoint can be written that one rank alone decides on: the last periodic one serves.

    Args:
        dirpath: Where ``last.ckpt`` lies.
    """

    def __init__(self, dirpath: str) -> None:
        self._path = Path(dirpath) / LAST
        self._signum: int | None = None
        self._step_before = 0
        self._handlers: dict[int, Any] = {}

    def on_train_start(self, trainer: Trainer, _module: LightningModule) -> None:
        """Take the signals over; on several ranks, leave them to Lightning."""
        self._step_before = trainer.global_step
        if trainer.world_size == 1:
            self._handlers = {signum: signal.signal(signum, self._remember) for signum in _STOPPING}

    def _remember(self, signum: int, _frame: object) -> None:
        if self._signum is not None:
            raise KeyboardInterrupt
        self._signum = signum
        print(f"\n{signal.Signals(signum).name}: stopping at the end of this step ...", flush=True)

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        """Remember where the step began."""
        self._step_before = trainer.global_step

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        """Stop, unless gradients are still being gathered."""
        if trainer.global_step > self._step_before:
            self._stop(trainer)

    def on_train_epoch_end(self, trainer: Trainer, _module: LightningModule) -> None:
        """Stop, if the signal came during the validation."""
        self._stop(trainer)

    def _stop(self, trainer: Trainer) -> None:
        if self._signum is not None:
            trainer.save_checkpoint(self._path)
            raise RunStopped(self._signum, self._path)

    def on_train_end(self, _trainer: Trainer, _module: LightningModule) -> None:
        """Give the signals back."""
        self._restore()

    def on_exception(self, _trainer: Trainer, _module: LightningModule, _exception: BaseException) -> None:
        """Give the signals back."""
        self._restore()

    def _restore(self) -> None:
        for signum, handler in self._handlers.items():
            signal.signal(signum, handler)
        self._handlers = {}


class TrainedIds(Callback):
    """Notes the ids of the samples that each optimizer step was made of: one JSON line a step, one file a rank.

    A run that resumes takes back the lines of steps that its checkpoint does not know, and goes on from there. So the
    file says which samples the weights have seen, each exactly as often as it is listed.

    Args:
        dirpath: Folder of the files ``rank-<n>.jsonl``.
    """

    def __init__(self, dirpath: str) -> None:
        self._folder = Path(dirpath)
        self._path = self._folder / "rank-0.jsonl"
        self._gathered: list[int] = []
        self._step_before = 0

    def on_train_start(self, trainer: Trainer, _module: LightningModule) -> None:
        """Drop what came after the checkpoint that the run continues from; all, in a new run."""
        self._path = self._folder / f"rank-{trainer.global_rank}.jsonl"
        self._folder.mkdir(parents=True, exist_ok=True)
        lines = self._path.read_text().splitlines() if self._path.exists() else []
        kept = [line for line in lines if line.endswith("}") and json.loads(line)["step"] <= trainer.global_step]
        self._path.write_text("".join(f"{line}\n" for line in kept))

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        """Remember where the step began."""
        self._step_before = trainer.global_step

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        """Add this batch's ids; write them down once its step is made."""
        made_of = batch_in_training(trainer)
        self._gathered += made_of.ids[~made_of.filler].tolist()
        if trainer.global_step > self._step_before:
            line = {"step": trainer.global_step, "epoch": made_of.epoch, "ids": self._gathered}
            with self._path.open("a") as file:
                file.write(json.dumps(line) + "\n")
            self._gathered = []


class DataWait(Profiler):
    """Adds up the seconds in which training waited for its next batch: a profiler, as only those see it."""

    _ACTION = "[_TrainingEpochLoop].train_dataloader_next"

    def __init__(self) -> None:
        super().__init__()
        self.waited_s = 0.0
        self.longest_s = 0.0
        self._began = 0.0

    def start(self, action_name: str) -> None:
        """Note when a wait begins."""
        if action_name == self._ACTION:
            self._began = time.perf_counter()

    def stop(self, action_name: str) -> None:
        """Add it up."""
        if action_name == self._ACTION:
            waited = time.perf_counter() - self._began
            self.waited_s += waited
            self.longest_s = max(self.longest_s, waited)


class RunClock(Callback):
    """Counts this process's samples, and the seconds it trains and validates. Read it after the run."""

    def __init__(self) -> None:
        self.num_samples = 0
        self.num_steps = 0
        self.validating_s = 0.0
        self.ended = self._began = self._validation_began = 0.0
        self._steps_before = 0

    @property
    def training_s(self) -> float:
        """Seconds from the first step to the last, less those of validation."""
        return max(0.0, self.ended - self._began - self.validating_s)

    def on_train_start(self, trainer: Trainer, _module: LightningModule) -> None:
        """The clock starts once everything is set up."""
        self._began = self.ended = time.perf_counter()
        self._steps_before = trainer.global_step

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        """Count this batch."""
        self.num_samples += batch_in_training(trainer).num_samples
        self.num_steps = trainer.global_step - self._steps_before
        self.ended = time.perf_counter()

    def on_validation_start(self, _trainer: Trainer, _module: LightningModule) -> None:
        """Validation begins."""
        self._validation_began = time.perf_counter()

    def on_validation_end(self, trainer: Trainer, _module: LightningModule) -> None:
        """Validation is over; the check before training counts for nothing."""
        if not trainer.sanity_checking:
            self.validating_s += time.perf_counter() - self._validation_began
            self.ended = time.perf_counter()
