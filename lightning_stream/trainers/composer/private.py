"""All private names of Composer that this package uses; `test_composer_private` tests each.

Composer gives a loader no handle on its trainer, so the trainer that asks for a batch is looked up on the call stack.
Only the generator by which the training loop takes its batches counts; a callback's look, a pass before `fit` and an
evaluation do not.
"""

from __future__ import annotations

import inspect
from pathlib import Path
from types import FrameType
from typing import Any

from composer import Event, State, Trainer
from composer.callbacks import CheckpointSaver
from composer.trainer.trainer import TrainerMode
from composer.utils import format_name_with_dist, reproducibility

from lightning_stream.errors import StateError

_TAKES_BATCHES = "_iter_dataloader"  # Trainer's generator around the iteration over its loader
_OF_A_DATASET = "get_dataset_state_dict"  # of composer.checkpoint: its caller has the state


def _frame_of_composer() -> FrameType | None:
    """The frame in which Composer called what calls this."""
    frame = inspect.currentframe()
    while frame is not None and not frame.f_globals.get("__name__", "").startswith("composer."):
        frame = frame.f_back
    return frame


def trainer_that_asks(loader: Any) -> Any | None:
    """The trainer whose training loop is asking this loader for a batch; None where another asks."""
    frame = _frame_of_composer()
    if frame is None or frame.f_code.co_name != _TAKES_BATCHES:
        return None
    trainer = frame.f_locals.get("self")
    if frame.f_locals.get("trainer_mode") != TrainerMode.TRAIN or not isinstance(trainer, Trainer):
        return None
    refuse_other_loader(trainer.state)
    return trainer if trainer.state.train_dataloader is loader else None


def refuse_other_loader(state: State) -> None:
    """Raise StateError where Composer would train on data of an evaluation, which an error has ended before."""
    if state.dataloader is not state.train_dataloader:
        raise StateError(
            "a training run trains on its train_dataloader, but an error ended an evaluation of this trainer, and "
            f"Composer would train on the data of {state.dataloader_label!r} now. Pass train_dataloader= to fit "
            "again; or make a new trainer, and resume it from its last checkpoint"
        )


def state_that_asks() -> State | None:
    """The state of the trainer that is saving or loading a checkpoint, of which it asks us; None where another asks."""
    frame = _frame_of_composer()
    if frame is not None and frame.f_code.co_name == _OF_A_DATASET:
        frame = frame.f_back
    state = None if frame is None else frame.f_locals.get("self", frame.f_locals.get("state"))
    return state if isinstance(state, State) else None


def is_in_batch() -> bool:
    """Whether a trainer asks in one of the events of a batch, before it has counted it."""
    frame = inspect.currentframe()
    while frame is not None:
        event = frame.f_locals.get("event")
        if isinstance(event, Event):
            return bool(event.value.startswith(("batch_", "before_", "after_")))
        frame = frame.f_back
    return False


def run_folder(state: Any) -> Path | None:
    """Where the log of a run is by default: beside its checkpoints, if these are in a local folder."""
    for callback in state.callbacks:
        if isinstance(callback, CheckpointSaver) and callback.remote_uploader is None:
            return Path(format_name_with_dist(callback.folder, state.run_name))
    return None


def take_over_resume(trainer: Any) -> None:
    """Keep Composer from fetching and throwing away batches to get to where we start.

    Before it does that, it restores the random state.
    """
    trainer.state.dataset_resumption["train"] = True
    state = trainer._rng_state  # noqa: SLF001
    if state is not None:
        reproducibility.load_rng_state(state)
        trainer._rng_state = None  # noqa: SLF001
