"""`GracefulStop`: Ctrl-C and SIGTERM save a checkpoint at the end of an optimizer step, then end the training run."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

from lightning_stream.trainers.lightning.package import Callback

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
# A terminal signals all processes, and a launcher (uv, torchrun) passes its own signal on: the same one comes twice.
_SAME_SIGNAL_S = 1.0
_STDERR = 2


class TrainingInterrupted(Exception):
    """A signal ended training at the end of an optimizer step.

    Attributes:
        signum: The signal; a shell expects the exit code ``128 + signum``.
        saved: Path or URL of the checkpoint that was saved for it; None if none was.
    """

    def __init__(self, signum: int, saved: str | os.PathLike[str] | None) -> None:
        name = signal.Signals(signum).name
        self.signum = signum
        self.saved = None if saved is None else os.fspath(saved)
        how = "no checkpoint was saved for it" if saved is None else f"resume with ckpt_path={self.saved!r}"
        super().__init__(f"{name} ended training; {how}")


class GracefulStop(Callback):
    """Saves a checkpoint and raises `TrainingInterrupted` at the end of the step in which SIGINT or SIGTERM arrives.

    A second signal, at least a second later, ends the run at once. On several ranks a signal to any of them is enough:
    they agree every `agree_every_n_steps` steps, so all save the same step.

    Args:
        dirpath: Folder or URL in which ``last.ckpt`` is saved. With a ``ModelCheckpoint(dirpath, save_last=True)`` of
            the same folder, ``ckpt_path="last"`` finds it.
        agree_every_n_steps: Optimizer steps between agreements of several ranks, each of which waits for the device.

    Example::

        try:
            Trainer(callbacks=[GracefulStop("runs/a")]).fit(model, data)
        except TrainingInterrupted as stop:
            sys.exit(128 + stop.signum)
    """

    def __init__(self, dirpath: str | os.PathLike[str], *, agree_every_n_steps: int = 10) -> None:
        self.dirpath = os.fspath(dirpath).rstrip("/")
        self._path = f"{self.dirpath}/last.ckpt"
        self._agree_every_n_steps = agree_every_n_steps
        self._is_rank_zero = True
        self._signum: int | None = None
        self._signalled_at = 0.0
        self._step_before = 0
        self._handlers: dict[int, Any] = {}  # those that were there before ours

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Move this callback to the end: what other callbacks keep must be up to date when it saves."""
        trainer.callbacks = [*(callback for callback in trainer.callbacks if callback is not self), self]

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Install the signal handlers; Python allows it in the main thread only."""
        self._signum = None
        self._step_before = trainer.global_step
        self._is_rank_zero = trainer.is_global_zero
        if not self._handlers and threading.current_thread() is threading.main_thread():
            self._handlers = {signum: signal.signal(signum, self._handle) for signum in _SIGNALS}

    def _handle(self, signum: int, _frame: object) -> None:
        now = time.monotonic()
        if self._signum is None:
            self._signum = signum
            self._signalled_at = now
            name = "Ctrl-C" if signum == signal.SIGINT else signal.Signals(signum).name
            self._say(f"{name}: finishing this step, then saving a checkpoint (again to quit now).")
        elif now - self._signalled_at >= _SAME_SIGNAL_S:
            self._say("Quitting now, without a checkpoint of this step.")
            raise KeyboardInterrupt

    def _say(self, sentence: str) -> None:
        if self._is_rank_zero:  # `print` may not be called from a handler: the program may be inside of it
            os.write(_STDERR, f"\n{sentence}\n".encode())

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Remember the step that this batch is part of."""
        self._step_before = trainer.global_step

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Stop after a signal, unless gradients are still being accumulated."""
        every = 1 if trainer.world_size == 1 else self._agree_every_n_steps
        if trainer.global_step > self._step_before and trainer.global_step % every == 0:
            self._stop_if_asked(trainer, pl_module)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Stop if the signal came during validation."""
        self._stop_if_asked(trainer, pl_module)

    def _stop_if_asked(self, trainer: Any, pl_module: Any) -> None:
        if not trainer.strategy.reduce_boolean_decision(self._signum is not None, all=False):
            return
        trainer.save_checkpoint(self._path)
        bar = trainer.progress_bar_callback
        if bar is not None:
            bar.on_train_end(trainer, pl_module)  # else it is drawn once more, below what the program prints next
        raise TrainingInterrupted(self._signum or signal.SIGTERM, self._path)

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """Restore the signal handlers."""
        handlers = self._handlers
        self._handlers = {}
        for signum, handler in handlers.items():
            signal.signal(signum, handler)

    on_exception = on_train_end
