"""Composer's loggers and progress bar show where the time of a run went, and its end says what to change."""

from __future__ import annotations

from pathlib import Path
from time import perf_counter
from typing import Any

import pytest
from support.composer_runs import EPOCHS, NUM_SAMPLES, STEPS_PER_EPOCH, Run, write_shards
from support.metered_loading import check_parts, spend

from lightning_stream.monitoring.verdict import Verdict
from lightning_stream.trainers import monitor as trainers_monitor
from lightning_stream.trainers.composer import callback as composer_callback

composer: Any = pytest.importorskip("composer")
METRICS = {"data/wait_ms", "data/wait_share", "data/samples_per_s", "data/download_mb_s", "data/cache_hit"}


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_shards(tmp_path_factory.mktemp("composer_monitor") / "data")


class Clock(composer.Callback):  # type: ignore[misc]  # Composer has no types
    """A clock that every step and every evaluation moves."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, step: float, evaluation: float, saving: float = 0.0) -> None:
        self.now_s, self.step, self.evaluation, self.saving = 0.0, step, evaluation, saving
        for module in ("loading.iteration", "monitoring.meter", "trainers.monitor"):
            monkeypatch.setattr(f"lightning_stream.{module}.perf_counter", lambda: self.now_s)

    def before_forward(self, state: Any, logger: Any) -> None:
        self.now_s += self.step

    def eval_start(self, state: Any, logger: Any) -> None:
        self.now_s += self.evaluation

    def batch_checkpoint(self, state: Any, logger: Any) -> None:
        self.now_s += self.saving

    epoch_checkpoint = batch_checkpoint


def test_the_metrics_reach_the_loggers(shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(composer_callback, "_LOGGED_EVERY", 4)
    kept = composer.loggers.InMemoryLogger()
    Run(shards, tmp_path, loggers=[kept])
    assert kept.data.keys() >= METRICS
    steps = [int(stamp.batch) for stamp, _ in kept.data["data/wait_ms"]]
    ends = [STEPS_PER_EPOCH * epoch for epoch in range(1, EPOCHS + 1)]
    assert steps == sorted([*range(4, EPOCHS * STEPS_PER_EPOCH + 1, 4), *ends])


def test_training_is_measured_without_its_evaluations(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch, step=0.5, evaluation=100.0, saving=0.25)
    run = Run(shards, tmp_path, callbacks=[clock], evaluates="4ba")
    monitor = run.trainer.state.callbacks[0].monitor
    stats = monitor.stats()
    assert (stats.num_samples, stats.num_batches) == (EPOCHS * NUM_SAMPLES, EPOCHS * STEPS_PER_EPOCH)
    assert stats.pauses["checkpoint"] == (STEPS_PER_EPOCH + 1) * EPOCHS * 0.25
    assert stats.compute_s - stats.pauses["checkpoint"] == EPOCHS * STEPS_PER_EPOCH * 0.5
    assert stats.validation_s == 9 * 100.0


@pytest.mark.parametrize("hook", ["before_forward", "batch_checkpoint", "eval_batch_start"])
def test_what_comes_between_an_error_and_the_next_fit_is_no_training(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hook: str
) -> None:
    class Fails(composer.Callback):  # type: ignore[misc]  # Composer has no types
        error: Exception | None = None  # which keeps the iteration alive

        def run_event(self, event: Any, state: Any, logger: Any) -> None:
            if event.value == hook and int(state.timestamp.batch) == 4 and self.error is None:
                self.error = ArithmeticError()
                raise self.error

    clock = Clock(monkeypatch, step=0.5, evaluation=100.0)
    with monkeypatch.context() as patched:
        patched.setattr(composer.Trainer, "close", lambda _: None)
        run = Run(shards, tmp_path, callbacks=[clock, Fails()], evaluates="4ba", raises=ArithmeticError)
    assert run.error is not None
    clock.now_s += 1000.0
    run.trainer.fit(train_dataloader=run.spec)
    stats = run.trainer.state.callbacks[0].monitor.stats()
    run.trainer.close()
    assert stats.validation_s <= 9 * 100.0
    assert stats.training_s == pytest.approx(EPOCHS * STEPS_PER_EPOCH * 0.5, abs=0.6)  # the step that failed is unknown


def test_the_progress_bar_shows_the_time_spent_waiting(
    shards: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    Run(shards, tmp_path, progress_bar=True, max_duration="3ba")
    assert "data=0%" in capfd.readouterr().err


def test_the_end_of_an_input_bound_run_says_why(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bound = Verdict("transform", "Input-bound 80%: the transform takes 2 s.", "Raise num_workers from 0 to 5.")
    monkeypatch.setattr(trainers_monitor, "verdict_of", lambda _: bound)
    monkeypatch.setattr(trainers_monitor, "_WORTH_AT_END_S", 0.0)
    Run(shards, tmp_path, max_duration="3ba")
    assert str(bound) in capsys.readouterr().out


def test_nothing_is_logged_where_the_monitor_is_off(shards: Path, tmp_path: Path) -> None:
    kept = composer.loggers.InMemoryLogger()
    Run(shards, tmp_path, loggers=[kept], data={"monitor": False})
    assert not METRICS & kept.data.keys()


class Spends(composer.Callback):  # type: ignore[misc]  # Composer has no types
    """Lets steps, evaluations and checkpoints take real time, and measures the training loop."""

    began = ended = 0.0

    def fit_start(self, state: Any, logger: Any) -> None:
        self.began = perf_counter()

    def before_forward(self, state: Any, logger: Any) -> None:
        spend(0.01)

    def eval_start(self, state: Any, logger: Any) -> None:
        spend(0.02)

    def batch_checkpoint(self, state: Any, logger: Any) -> None:
        spend(0.01)

    epoch_checkpoint = batch_checkpoint

    def fit_end(self, state: Any, logger: Any) -> None:
        self.ended = perf_counter()

    eval_after_all = fit_end  # the last one comes after the end


@pytest.mark.parametrize(
    ("num_workers", "micro_batch"),
    [(0, 4), (2, 16), *(pytest.param(*case, marks=pytest.mark.nightly) for case in ((0, 16), (2, 4)))],
)
def test_the_parts_of_a_run_add_up_to_it(shards: Path, tmp_path: Path, num_workers: int, micro_batch: int) -> None:
    folders = (tmp_path / str(number) for number in range(3))

    def measure() -> tuple[float, float]:
        spends = Spends()
        run = Run(
            shards, next(folders), callbacks=[spends], evaluates="4ba", save_interval="5ba",
            device_train_microbatch_size=micro_batch, data={"num_workers": num_workers},
        )  # fmt: skip
        stats = run.trainer.state.callbacks[0].monitor.stats()
        assert stats.pauses["checkpoint"] >= 6 * 0.01
        assert stats.validation_s >= 8 * 0.02
        assert stats.training_s >= EPOCHS * STEPS_PER_EPOCH * 0.01
        return stats.elapsed_s + stats.validation_s, spends.ended - spends.began

    check_parts(measure)
