"""Ways to stop a run under Lightning, and a chain of runs each stopped in its own way."""

from __future__ import annotations

import inspect
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, OnExceptionCheckpoint

from support.lightning_runs import Recorder, Run, Steps


class Stopped(Exception):
    """What a test raises to stop a run."""


def raise_stopped() -> None:
    raise Stopped


@dataclass(frozen=True)
class At:
    """A place in a run: a hook's name, and the optimizer step and micro-batch of the step it comes in."""

    hook: str
    step: int
    micro: int = 0

    def __str__(self) -> str:
        return f"{self.hook} {self.step}.{self.micro}"


class StopsIn(Recorder):
    """A `Recorder` that acts (by default: raises) at a place in the run."""

    def __init__(self, at: At | None, act: Callable[[], None] = raise_stopped, **options: Any) -> None:
        super().__init__(**options)
        self.at, self.act, self._step, self._micro = at, act, -1, 0

    def _pass(self, hook: str) -> None:
        if self.at is not None and (hook, self.trainer.global_step, self._micro) == (
            self.at.hook, self.at.step, self.at.micro,
        ):  # fmt: skip
            self.at = None
            self.act()

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Any:
        same = self._step == self.trainer.global_step
        self._step, self._micro = self.trainer.global_step, self._micro + 1 if same else 0
        self._pass("training_step")
        return super().training_step(batch, batch_idx)

    def on_before_zero_grad(self, *_: Any) -> None:
        self._pass("on_before_zero_grad")

    def on_train_batch_end(self, *_: Any) -> None:
        self._pass("on_train_batch_end")

    def validation_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        if batch_idx == 1 and not self.trainer.sanity_checking:
            self._pass("validation_step")
        super().validation_step(batch, batch_idx)

    def on_train_epoch_end(self) -> None:
        self._pass("on_train_epoch_end")


class ActsEarly(Callback):
    """Acts in `on_train_batch_end` before any other callback has seen the batch's end."""

    def __init__(self, step: int, act: Callable[[], None] = raise_stopped) -> None:
        self.step, self.act = step, act

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == self.step:
            self.step = -1
            self.act()


# Since Lightning 2.5.
SAVES_ON_EXCEPTION = "save_on_exception" in inspect.signature(ModelCheckpoint).parameters
KINDS = ["OnExceptionCheckpoint", "ModelCheckpoint"] if SAVES_ON_EXCEPTION else ["OnExceptionCheckpoint"]


def saved_on_exception(folder: Path, kind: str) -> ModelCheckpoint | OnExceptionCheckpoint:
    if kind == "OnExceptionCheckpoint":
        return OnExceptionCheckpoint(folder)
    return ModelCheckpoint(folder, filename="on_exception", save_on_exception=True, save_top_k=-1, every_n_epochs=99)


def run_stopped(
    shards: Path, folder: Path, stops: Sequence[At], kind: str = "OnExceptionCheckpoint", **options: Any
) -> tuple[Steps, Run]:
    """Run, stop at each place in turn, resume from what was saved then; gives the steps that counted, and the last."""
    ckpt: Path | None = None
    steps: Steps = {}
    for number, at in enumerate([*stops, None]):
        own = folder / f"run{number}"
        stop = at
        run = Run(
            shards, own, ckpt, raises=(Stopped, SystemExit), callbacks=[saved_on_exception(own, kind)],
            recorder=lambda stop=stop, **module: StopsIn(stop, **module), **options,
        )  # fmt: skip
        if at is None:
            return steps | run.steps, run
        assert run.error is not None, f"the run was to stop at {at}"
        (ckpt,) = own.glob("*on_exception*.ckpt")
        done = torch.load(ckpt, weights_only=True)["global_step"]
        steps |= {step: ids for step, ids in run.steps.items() if step < done}
    raise AssertionError


def send(number: int) -> Callable[[], None]:
    """An act that sends this process a signal."""
    return lambda: signal.raise_signal(number)
