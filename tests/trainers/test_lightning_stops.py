"""A run under Lightning may be stopped in any way: by an exception anywhere, a signal, a clock, a scheduler."""

from __future__ import annotations

import random
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    Callback,
    LearningRateFinder,
    ModelCheckpoint,
    OnExceptionCheckpoint,
    Timer,
)
from support.lightning_runs import GLOBAL_BATCH, KINDS, Recorder, Run, checkpoints, keep_all, saved_on_exception
from support.resume_contract import WARNINGS, At, Steps, Stopped, before_step, expect_exact, from_step, raise_stopped

from lightning_stream.errors import StateError
from lightning_stream.trainers.lightning import callback as lightning_position

STEPS_PER_EPOCH = 11
pytestmark = WARNINGS


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """Lightning leaves SIGINT ignored after a Ctrl-C."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)}
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs are started without it
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def position_after(step: int, position: int = GLOBAL_BATCH) -> dict[str, int]:
    """What a state must say after so many optimizer steps."""
    return {"epoch": step // STEPS_PER_EPOCH, "position": step % STEPS_PER_EPOCH * GLOBAL_BATCH}


def position_in(path: Path) -> dict[str, int]:
    state = torch.load(path, weights_only=True)["callbacks"]["lightning_stream"]["position"]
    return {name: state[name] for name in ("epoch", "position")}


def send(number: int) -> Callable[[], None]:
    """An act that sends this process a signal."""
    return lambda: signal.raise_signal(number)


class ActsEarly(Callback):
    """Stops the run in `on_train_batch_end` before any other callback has seen the batch's end."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == self.step:
            self.step = -1
            raise_stopped()


def run_stopped(
    shards: Path, folder: Path, stops: Sequence[At], kind: str = "OnExceptionCheckpoint", **options: Any
) -> tuple[Steps, Run]:
    """Run, stop at each place in turn, resume from what was saved then; gives the steps that counted, and the last."""
    path: Path | None = None
    steps: Steps = {}
    for number, at in enumerate(stops):
        own = folder / f"run{number}"
        run = Run(
            shards, own, path, raises=Stopped, callbacks=[saved_on_exception(own, kind)], module={"at": at}, **options
        )
        assert run.error is not None, f"the run was to stop at {at}"
        (path,) = own.glob("*on_exception*.ckpt")
        steps |= before_step(run.steps, torch.load(path, weights_only=True)["global_step"])
    last = Run(shards, folder / "last", path, **options)
    return steps | last.steps, last


CHAINS = {
    "steps": [At("training_step", 3), At("training_step", 3), At("training_step", 4), At("training_step", 11)],
    "after steps": [At("on_train_batch_end", 5), At("on_train_batch_end", 11), At("on_train_batch_end", 12)],
    "zero grad": [At("on_before_zero_grad", 2), At("on_before_zero_grad", 10)],
    "validation": [At("validation_step", 11), At("validation_step", 11), At("validation_step", 22)],
    "epoch ends": [At("on_train_epoch_end", 11), At("training_step", 11), At("on_train_epoch_end", 22)],
    "first step": [At("training_step", 0), At("training_step", 0), At("training_step", 1)],
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", CHAINS)
def test_a_run_stopped_by_exceptions_anywhere_continues_exactly(
    shards: Path, tmp_path: Path, name: str, kind: str
) -> None:
    whole = Run(shards, tmp_path / "whole")
    # ModelCheckpoint saves nothing before the first step
    stops = [at for at in CHAINS[name] if at.step or kind == "OnExceptionCheckpoint"]
    steps, last = run_stopped(shards, tmp_path, stops, kind)
    assert steps == whole.steps
    assert last.weights == whole.weights
    assert (
        last.module.validations
        == [v for v in whole.module.validations if v[0] >= min(last.steps)][-len(last.module.validations) :]
    )


@pytest.mark.parametrize(
    "options",
    [
        {"accumulate_grad_batches": 4},
        {"accumulate_grad_batches": 4, "data": {"num_workers": 2}},
        {"accumulate_grad_batches": 2, "val_check_interval": 6},
    ],
    ids=str,
)
def test_an_exception_in_the_middle_of_an_accumulation_repeats_that_step_whole(
    shards: Path, tmp_path: Path, options: dict[str, Any]
) -> None:
    whole = Run(shards, tmp_path / "whole", **options)
    stops = [
        At("training_step", 2, 1),
        At("training_step", 2, 1),
        At("on_train_batch_end", 7),
        At("training_step", 10),
    ]
    steps, last = run_stopped(shards, tmp_path, stops, **options)
    assert steps == whole.steps
    assert last.weights == whole.weights


def test_an_exception_before_our_own_hook_counts_the_step_that_was_made(shards: Path, tmp_path: Path) -> None:
    whole = Run(shards, tmp_path / "whole")
    for step in (4, 11):
        own = tmp_path / str(step)

        class Early(Recorder):
            def configure_callbacks(self, step: int = step) -> list[Any]:
                return []

            def on_fit_start(self, step: int = step) -> None:
                self.trainer.callbacks.insert(0, ActsEarly(step))

        run = Run(shards, own, recorder=Early, callbacks=[OnExceptionCheckpoint(own)], raises=Stopped)
        assert run.error is not None
        assert position_in(own / "on_exception.ckpt") == position_after(step)
        resumed = Run(shards, own, own / "on_exception.ckpt")
        expect_exact(whole, resumed, step)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])
@pytest.mark.parametrize("options", [{}, {"accumulate_grad_batches": 4}], ids=str)
def test_a_signal_leaves_a_checkpoint_that_continues_exactly(
    shards: Path, tmp_path: Path, number: int, options: dict[str, Any]
) -> None:
    whole = Run(shards, tmp_path / "whole", **options)
    for step in (0, 5, 10, 21):
        own = tmp_path / str(step)
        run = Run(
            shards, own, module={"at": At("training_step", step), "act": send(number)},
            callbacks=[saved_on_exception(own)], raises=SystemExit, **options,
        )  # fmt: skip
        assert run.error is not None
        ckpt = own / "on_exception.ckpt"
        done = torch.load(ckpt, weights_only=True)["global_step"]
        resumed = Run(shards, own, ckpt, **options)
        expect_exact(whole, resumed, done)


def test_a_requeued_slurm_job_continues_exactly_by_itself(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = Run(shards, tmp_path / "whole", accumulate_grad_batches=2)
    job = {"JOB_ID": "7", "JOB_NAME": "train", "NTASKS": "1", "PROCID": "0", "LOCALID": "0", "NODEID": "0"}
    for name, value in job.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    monkeypatch.setattr("lightning.pytorch.trainer.connectors.signal_connector.call", lambda *_, **__: 0)
    steps, at = {}, [At("training_step", 3, 1), At("training_step", 11, 0), At("validation_step", 22, 0)]
    for place in at:
        run = Run(shards, tmp_path, accumulate_grad_batches=2, module={"at": place, "act": send(signal.SIGUSR1)})
        ckpt = max(tmp_path.glob("hpc_ckpt_*.ckpt"))
        done = torch.load(ckpt, weights_only=True)["global_step"]
        assert done == place.step
        steps |= before_step(run.steps, done)
    last = Run(shards, tmp_path, accumulate_grad_batches=2)
    assert min(last.steps) == 22
    assert steps | last.steps == whole.steps
    assert last.weights == whole.weights


def test_a_checkpoint_saved_by_a_signal_at_any_line_of_ours_has_the_position_of_its_step(
    shards: Path, tmp_path: Path
) -> None:
    """A scheduler's signal saves inside its handler, between any two lines."""
    saved: dict[tuple[str, int, bool], Path] = {}

    class Traced(Recorder):
        def trace(self, frame: Any, event: str, _: Any) -> Any:
            if frame.f_code.co_filename != lightning_position.__file__:
                return None
            place = (frame.f_code.co_name, frame.f_lineno, self.trainer.is_last_batch)
            if event == "line" and place not in saved:
                saved[place] = tmp_path / f"{len(saved)}.ckpt"
                self.trainer.save_checkpoint(saved[place])
            return self.trace

        def on_train_start(self) -> None:
            sys.settrace(self.trace)

        def on_train_end(self) -> None:
            sys.settrace(None)

    before = sys.gettrace()
    try:
        Run(shards, tmp_path, recorder=Traced, max_epochs=2)
    finally:
        sys.settrace(before)
    assert len(saved) > 20
    for place, path in saved.items():
        state = torch.load(path, weights_only=True)
        assert position_in(path) == position_after(state["global_step"]), place


@pytest.mark.parametrize("accumulate", [1, 4])
def test_checkpoints_by_the_clock_continue_exactly_even_inside_an_accumulation(
    shards: Path, tmp_path: Path, accumulate: int
) -> None:
    always = [keep_all(tmp_path, train_time_interval=timedelta(microseconds=1))]
    whole = Run(shards, tmp_path, callbacks=always, accumulate_grad_batches=accumulate)
    saved = checkpoints(tmp_path)
    assert len(saved) >= 33
    for step, path in random.Random(accumulate).sample(saved, 6):
        resumed = Run(shards, tmp_path / "again", path, accumulate_grad_batches=accumulate)
        expect_exact(whole, resumed, step)


def test_a_checkpoint_right_after_a_resume_is_worth_the_one_before(shards: Path, tmp_path: Path) -> None:
    """Lightning saves again after the first micro-batch of a resumed accumulation: of the same step."""
    options = {"accumulate_grad_batches": 4}
    whole = Run(shards, tmp_path / "whole", **options)
    Run(shards, tmp_path / "a", save_at=(6,), max_steps=6, **options)
    _, ckpt = checkpoints(tmp_path / "a")[-1]
    Run(shards, tmp_path / "b", ckpt, every_n_train_steps=2, max_steps=8, **options)
    for step, path in checkpoints(tmp_path / "b"):
        resumed = Run(shards, tmp_path / "c", path, **options)
        expect_exact(whole, resumed, step)


@pytest.mark.parametrize("how", ["max_steps", "max_time"])
def test_an_epoch_that_a_limit_on_the_run_cut_short_is_continued(shards: Path, tmp_path: Path, how: str) -> None:
    """`max_steps` and `max_time` end Lightning's epoch as if it were over."""
    whole = Run(shards, tmp_path / "whole")

    class Slow(Recorder):
        def on_train_batch_end(self, *_: Any) -> None:
            if self.trainer.global_step == 15:
                next(c for c in self.trainer.callbacks if isinstance(c, Timer))._duration = 0.000001

    limit: dict[str, Any] = {"max_steps": 15} if how == "max_steps" else {"max_time": "00:01:00:00", "recorder": Slow}
    at_end = ModelCheckpoint(tmp_path / "ckpt", save_on_train_epoch_end=True, every_n_epochs=1, filename="{step}")
    run = Run(shards, tmp_path, callbacks=[at_end], **limit)
    done = max(run.steps) + 1
    assert 11 < done < 22
    run.trainer.save_checkpoint(tmp_path / "by hand.ckpt")
    for path in (tmp_path / "by hand.ckpt", Path(at_end.best_model_path)):
        resumed = Run(shards, tmp_path / "again", path)
        expect_exact(whole, resumed, done)


def test_a_checkpoint_from_before_any_data_begins_at_the_start(shards: Path, tmp_path: Path) -> None:
    """The learning rate finder saves one, trains a while, and goes back to it."""
    whole = Run(shards, tmp_path / "whole")
    finder = LearningRateFinder(num_training_steps=4, update_attr=False)
    run = Run(shards, tmp_path, callbacks=[finder], recorder=WithRate)
    assert from_step(run.steps, 5) == from_step(whole.steps, 5)


class WithRate(Recorder):
    lr = 0.01


@pytest.mark.parametrize("tuner", [LearningRateFinder, BatchSizeFinder])
def test_a_resume_after_which_a_tuner_would_begin_again_is_refused(
    tuner: Callable[[], Callback], shards: Path, tmp_path: Path
) -> None:
    Run(shards, tmp_path, save_at=(3,), max_steps=3)
    with pytest.raises(StateError, match="trains from step 0 again"):
        Run(shards, tmp_path / "again", checkpoints(tmp_path)[0][1], callbacks=[tuner()], recorder=WithRate)


def test_a_checkpoint_after_a_validation_does_not_validate_again(shards: Path, tmp_path: Path) -> None:
    options = {"val_check_interval": 4}
    whole = Run(shards, tmp_path, callbacks=[keep_all(tmp_path, save_on_train_epoch_end=False)], **options)
    for step, path in checkpoints(tmp_path):
        resumed = Run(shards, tmp_path / "again", path, **options)
        expect_exact(whole, resumed, step)
        assert resumed.evaluations == [one for one in whole.evaluations if one[0] > step]


@pytest.mark.parametrize("kind", KINDS)
def test_saving_on_an_exception_is_refused_on_several_ranks(kind: str, tmp_path: Path) -> None:
    from lightning_stream.trainers.lightning.rules import check_callbacks

    trainer = SimpleNamespace(world_size=2, callbacks=[saved_on_exception(tmp_path, kind)])
    with pytest.raises(ValueError, match="the other of the 2 ranks would wait for ever"):
        check_callbacks(trainer)
