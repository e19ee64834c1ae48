"""`SampleLog` and `GracefulStop`."""

from __future__ import annotations

import json
import os
import pickle
import re
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lightning.pytorch")

import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint, TQDMProgressBar
from support.lightning_runs import Run, saved_on_exception
from support.resume_contract import WARNINGS, At, Stopped, expect_exact

from lightning_stream import GracefulStop, SampleLog, TrainingInterrupted
from lightning_stream.errors import StateError
from lightning_stream.trainers.lightning import graceful_stop

STEPS_PER_EPOCH = 11
pytestmark = WARNINGS


class Clock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def perf_counter(self) -> float:
        return self.now_s

    monotonic = perf_counter


class Takes(Callback):
    """Lets each step of a run take time."""

    def __init__(self, clock: Clock, step: float) -> None:
        self.clock, self.step = clock, step

    def on_train_batch_start(self, *_: Any) -> None:
        self.clock.now_s += self.step


def logged_samples(folder: Path) -> dict[int, list[int]]:
    lines = [json.loads(line) for line in (folder / "rank-0.jsonl").read_text().splitlines()]
    assert len({line["step"] for line in lines}) == len(lines)
    return {line["step"] - 1: sorted(line["ids"]) for line in lines}


# SampleLog


@pytest.mark.parametrize("accumulate", [1, 4])
@pytest.mark.parametrize(
    "stop", [At("training_step", 5), At("on_before_zero_grad", 5), At("on_train_batch_end", 13)], ids=str
)
def test_the_sample_log_of_a_stopped_and_resumed_run_is_that_of_a_whole_one(
    shards: Path, tmp_path: Path, stop: At, accumulate: int
) -> None:
    whole = Run(shards, tmp_path / "whole", accumulate_grad_batches=accumulate).steps
    options: dict[str, Any] = {"accumulate_grad_batches": accumulate}
    folder = tmp_path / "samples"
    if stop.hook == "on_train_batch_end":
        stop = replace(stop, micro=accumulate - 1)
    first = [SampleLog(folder), saved_on_exception(tmp_path)]
    Run(shards, tmp_path, callbacks=first, raises=Stopped, module={"at": stop}, **options)
    (saved,) = tmp_path.glob("*.ckpt")
    with (folder / "rank-0.jsonl").open("a") as file:
        file.write('{"step": 4, "ep')  # a process that was killed while it wrote
    Run(shards, tmp_path, saved, callbacks=[SampleLog(folder)], **options)
    assert logged_samples(folder) == whole


def test_a_run_from_the_start_replaces_the_sample_log(shards: Path, tmp_path: Path) -> None:
    Run(shards, tmp_path, callbacks=[SampleLog(tmp_path)], max_steps=7)
    whole = Run(shards, tmp_path, callbacks=[SampleLog(tmp_path)], max_steps=3)
    assert logged_samples(tmp_path) == whole.steps


def test_a_run_resumed_on_fewer_ranks_drops_the_later_steps_of_all_ranks(shards: Path, tmp_path: Path) -> None:
    folder = tmp_path / "samples"
    first = [SampleLog(folder), saved_on_exception(tmp_path)]
    Run(shards, tmp_path, callbacks=first, raises=Stopped, module={"at": At("training_step", 5)})
    (saved,) = tmp_path.glob("*.ckpt")
    later = '{"step": 6, "epoch": 0, "ids": [1]}\n'
    begun = (folder / "rank-0.jsonl").read_text()
    (folder / "rank-1.jsonl").write_text(begun + later)  # of the second of two ranks, which had gone further
    Run(shards, tmp_path, saved, callbacks=[SampleLog(folder)])
    assert (folder / "rank-1.jsonl").read_text() == begun


# GracefulStop


class Signals(Callback):
    """Sends signals to this process in a hook of a step."""

    def __init__(self, step: int, *signals: int, hook: str = "on_train_batch_start") -> None:
        self.step, self.signals = step, signals
        setattr(self, hook, self.send)

    def send(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == self.step and not trainer.sanity_checking:
            for signum in self.signals:
                os.kill(os.getpid(), signum)


@pytest.mark.parametrize(
    ("hook", "signum", "saved_step"),
    [
        ("on_train_batch_start", signal.SIGINT, 6),
        ("on_train_batch_start", signal.SIGTERM, 6),
        ("on_validation_start", signal.SIGTERM, 11),
    ],
)
def test_a_signal_saves_the_step_it_came_in_and_the_run_resumes_exactly(
    shards: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], hook: str, signum: int, saved_step: int
) -> None:
    before = [signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)]
    whole = Run(shards, tmp_path / "whole")
    stop = GracefulStop(tmp_path / "ckpt")
    callbacks = [stop, Signals(saved_step - (hook == "on_train_batch_start"), signum, hook=hook)]
    stopped = Run(shards, tmp_path, callbacks=callbacks, raises=TrainingInterrupted)
    error, path = stopped.error, tmp_path / "ckpt" / "last.ckpt"
    assert isinstance(error, TrainingInterrupted)
    assert (error.signum, error.saved) == (signum, str(path))
    name = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM"}[signal.Signals(signum)]
    message = f"{name}: finishing this step, then saving a checkpoint (again to quit now)."
    assert message in capfd.readouterr().err
    assert [signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)] == before
    assert torch.load(path, weights_only=True)["global_step"] == saved_step
    expect_exact(whole, Run(shards, tmp_path, path), saved_step)


def test_a_signal_inside_an_accumulation_waits_for_the_whole_step(shards: Path, tmp_path: Path) -> None:
    callbacks = [GracefulStop(tmp_path), Signals(2, signal.SIGTERM)]
    Run(shards, tmp_path, callbacks=callbacks, raises=TrainingInterrupted, accumulate_grad_batches=4)
    assert torch.load(tmp_path / "last.ckpt", weights_only=True)["global_step"] == 3


def test_the_same_signal_from_terminal_and_launcher_counts_once(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graceful_stop, "time", Clock())
    callbacks = [GracefulStop(tmp_path), Signals(5, signal.SIGINT, signal.SIGINT, signal.SIGTERM)]
    Run(shards, tmp_path, callbacks=callbacks, raises=TrainingInterrupted)
    assert torch.load(tmp_path / "last.ckpt", weights_only=True)["global_step"] == 6


def test_a_second_signal_ends_the_run_at_once(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    clock = Clock()
    monkeypatch.setattr(graceful_stop, "time", clock)
    callbacks = [GracefulStop(tmp_path), Signals(5, signal.SIGTERM), Takes(clock, step=2.0), Signals(5, signal.SIGTERM)]
    run = Run(shards, tmp_path, callbacks=callbacks, raises=(KeyboardInterrupt, SystemExit))
    assert run.error is not None
    assert "Quitting now" in capfd.readouterr().err
    assert not (tmp_path / "last.ckpt").exists()


def test_the_progress_bar_is_not_drawn_below_what_a_program_prints_after_the_stop(
    shards: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def run() -> None:
        bar = TQDMProgressBar(refresh_rate=1)
        callbacks = [bar, GracefulStop(tmp_path), Signals(5, signal.SIGTERM)]
        options: dict[str, Any] = {"enable_progress_bar": True, "raises": TrainingInterrupted, "val": False}
        print("Stopped.", Run(shards, tmp_path, callbacks=callbacks, **options).error, file=sys.stderr)

    run()  # the bar is gone when it returns
    *_, last = [line for line in re.split(r"[\r\n]", capfd.readouterr().err) if line.strip()]
    assert last.startswith("Stopped. SIGTERM ended training; resume with ckpt_path=")


def test_a_checkpoint_may_be_saved_at_a_url(tmp_path: Path) -> None:
    assert GracefulStop("s3://bucket/runs/a/")._path == "s3://bucket/runs/a/last.ckpt"


def test_launchers_can_copy_the_callbacks_to_their_processes(tmp_path: Path) -> None:
    for one in (SampleLog(tmp_path), GracefulStop(tmp_path)):
        assert type(pickle.loads(pickle.dumps(one))) is type(one)


def test_the_stop_saves_after_all_other_callbacks_and_replaces_no_checkpoint_callback(
    shards: Path, tmp_path: Path
) -> None:
    run = Run(shards, tmp_path, callbacks=[GracefulStop(tmp_path / "stop"), SampleLog(tmp_path)], max_steps=1)
    *others, last = run.trainer.callbacks
    assert isinstance(last, GracefulStop)
    assert len(others) == len({id(one) for one in run.trainer.callbacks}) - 1
    assert any(isinstance(one, ModelCheckpoint) for one in others)
    Run(shards, tmp_path, callbacks=[GracefulStop(tmp_path / "stop")], max_steps=1, enable_checkpointing=False)


def test_a_last_checkpoint_of_a_stop_that_lightning_does_not_find_is_an_error(shards: Path, tmp_path: Path) -> None:
    callbacks = [GracefulStop(tmp_path), Signals(5, signal.SIGTERM)]
    Run(shards, tmp_path, callbacks=callbacks, raises=TrainingInterrupted, enable_checkpointing=False)
    with pytest.raises(StateError, match=r"none is marked as last .* name the file: ckpt_path='.*last\.ckpt'"):
        Run(shards, tmp_path, "last", callbacks=[GracefulStop(tmp_path)], enable_checkpointing=False)  # type: ignore[arg-type]
