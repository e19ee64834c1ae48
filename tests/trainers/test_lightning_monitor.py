"""Lightning's loggers and progress bar show where the time of a run went, and its end says what to change."""

from __future__ import annotations

import csv
import logging
import pickle
from pathlib import Path
from time import perf_counter
from typing import Any

import pytest

pytest.importorskip("lightning.pytorch")

from lightning.pytorch import Callback
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint, TQDMProgressBar
from lightning.pytorch.loggers import CSVLogger, Logger
from support.lightning_runs import EPOCHS, NUM_SAMPLES, Recorder, Run, checkpoints, keep_all
from support.metered_loading import check_parts, spend

from lightning_stream import StreamingCallback, StreamingDataLoader
from lightning_stream.monitoring.verdict import Verdict
from lightning_stream.trainers import monitor as trainers_monitor

STEPS_PER_EPOCH = 11
NUM_STEPS = EPOCHS * STEPS_PER_EPOCH
METRICS = {
    f"data/{name}"
    for name in (
        "samples_per_s", "wait_ms", "wait_share", "ready_share", "download_mb_s", "cache_hit", "retries", "bad_samples",
    )
}  # fmt: skip
pytestmark = pytest.mark.filterwarnings("ignore:.*(callbacks used to create|without a model|You def).*")


class Clock:
    """A clock that a test moves."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 0.0
        for module in ("loading.iteration", "monitoring.meter", "trainers.monitor"):
            monkeypatch.setattr(f"lightning_stream.{module}.perf_counter", lambda: self.now_s)


class Spends(Callback):
    """Lets steps, validations and checkpoints take real time, and measures the training loop."""

    began = ended = 0.0

    def on_train_start(self, *_: Any) -> None:
        self.began = perf_counter()

    def on_train_end(self, *_: Any) -> None:
        self.ended = perf_counter()

    def on_train_batch_start(self, *_: Any) -> None:
        spend(0.01)

    def on_validation_start(self, *_: Any) -> None:
        spend(0.05)

    def on_save_checkpoint(self, *_: Any) -> None:
        spend(0.05)


class Takes(Callback):
    """Lets some hooks of a run, and every transform, take time."""

    def __init__(self, clock: Clock, step: float, validation: float = 0.0) -> None:
        self.clock, self.step, self.validation = clock, step, validation

    def on_train_batch_start(self, *_: Any) -> None:
        self.clock.now_s += self.step

    def on_validation_epoch_start(self, *_: Any) -> None:
        self.clock.now_s += self.validation


def slow_transform(clock: Clock, seconds: float) -> Any:
    def transform(sample: Any) -> Any:
        clock.now_s += seconds
        return sample

    return transform


def logged(folder: Path) -> list[dict[str, str]]:
    """The rows of the log that have our metrics."""
    (table,) = folder.glob("lightning_logs/*/metrics.csv")
    return [row for row in csv.DictReader(table.read_text().splitlines()) if row.get("data/wait_ms")]


def monitor_of(run: Run) -> trainers_monitor.DataMonitor:
    return run.data.position_callback.monitor


@pytest.mark.parametrize("val_check_interval", [1.0, 4])
def test_training_is_measured_without_its_validations(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, val_check_interval: float
) -> None:
    clock = Clock(monkeypatch)
    takes = Takes(clock, step=0.5, validation=100.0)
    run = Run(shards, tmp_path, callbacks=[takes], val_check_interval=val_check_interval)
    stats = monitor_of(run).stats()
    assert (stats.num_samples, stats.num_batches, stats.num_iterations) == (EPOCHS * NUM_SAMPLES, NUM_STEPS, EPOCHS)
    assert stats.compute_s == NUM_STEPS * 0.5
    assert stats.wait_s == 0.0
    assert stats.validation_s == EPOCHS * 100.0 * (1 if val_check_interval == 1.0 else 2)


@pytest.mark.parametrize(
    ("num_workers", "when", "accumulated"),
    [
        (0, {"every_n_train_steps": 4}, 1),
        (2, {"every_n_train_steps": 4}, 2),
        *(
            pytest.param(*case, marks=pytest.mark.nightly)
            for case in (
                (0, {"every_n_epochs": 1}, 2),
                (0, {"every_n_train_steps": 4}, 2),
                (0, {"every_n_epochs": 1}, 1),
                (2, {"every_n_train_steps": 4}, 1),
                (2, {"every_n_epochs": 1}, 1),
                (2, {"every_n_epochs": 1}, 2),
            )
        ),
    ],
)
def test_the_parts_of_a_run_add_up_to_it(
    shards: Path, tmp_path: Path, num_workers: int, when: dict[str, int], accumulated: int
) -> None:
    folders = (tmp_path / str(number) for number in range(3))

    def measure() -> tuple[float, float]:
        folder, spends = next(folders), Spends()
        run = Run(
            shards, folder, callbacks=[spends, keep_all(folder, **when)], val_check_interval=4,
            accumulate_grad_batches=accumulated, data={"num_workers": num_workers},
        )  # fmt: skip
        stats, num_checkpoints = monitor_of(run).stats(), len(checkpoints(folder))
        assert num_checkpoints >= EPOCHS
        assert num_checkpoints * 0.05 <= stats.pauses["checkpoint"] <= stats.elapsed_s - NUM_STEPS * 0.01
        assert stats.validation_s >= 2 * EPOCHS * 0.05
        assert stats.training_s >= NUM_STEPS * 0.01
        assert "save_checkpoint" not in vars(run.trainer)
        return stats.elapsed_s + stats.validation_s, spends.ended - spends.began

    check_parts(measure)


def test_a_trainers_own_way_to_save_is_restored(shards: Path, tmp_path: Path) -> None:
    class Replaces(Callback):
        def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
            trainer.save_checkpoint = own

    saved: list[Path] = []
    own = lambda path, *_, **__: saved.append(path)  # noqa: E731
    run = Run(shards, tmp_path, callbacks=[Replaces()], every_n_train_steps=4, max_epochs=1)
    assert len(saved) == 2
    assert run.trainer.save_checkpoint is own


def test_an_error_restores_the_trainer(shards: Path, tmp_path: Path) -> None:
    class Fails(Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            raise OSError("as a model's might")

    run = Run(shards, tmp_path, callbacks=[Fails()], raises=OSError)
    assert "save_checkpoint" not in vars(run.trainer)
    assert monitor_of(run)._watch is None


@pytest.mark.parametrize("watch_after_s", [7.5, None])
def test_the_time_of_the_watch_is_a_setting(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, watch_after_s: float | None
) -> None:
    asked: list[float] = []
    monkeypatch.setattr(StreamingDataLoader, "watch", lambda _, after_s, say: asked.append(after_s))
    Run(shards, tmp_path, data={"watch_after_s": watch_after_s}, max_steps=1)
    assert asked == ([] if watch_after_s is None else [watch_after_s])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"monitor": "tune"}, "monitor must be True or False; found 'tune'"),
        ({"watch_after_s": "60"}, "watch_after_s must be a number; found '60'"),
        ({"show_position": "false"}, "show_position must be True or False; found 'false'"),
        ({"is_passive": "false"}, "is_passive must be True or False; found 'false'"),
        ({"report": "False"}, "or True or False; found 'False'"),
        ({"report": ""}, "or True or False; found ''"),
        ({"report": ["runs"]}, "report must be True or False or a string or a path"),
    ],
)
def test_an_option_of_another_type_is_refused_at_once(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        StreamingCallback(**options)


def test_the_metrics_reach_the_logger_at_lightnings_own_steps(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch)
    dataset = {"transform": slow_transform(clock, 0.01)}
    Run(
        shards, tmp_path, callbacks=[Takes(clock, step=0.34)], dataset=dataset, val=False,
        logger=CSVLogger(tmp_path), log_every_n_steps=3,
    )  # fmt: skip
    rows = logged(tmp_path)
    assert rows[0].keys() >= METRICS
    assert [int(row["step"]) for row in rows] == list(range(2, NUM_STEPS, 3))
    first = rows[0]
    assert float(first["data/samples_per_s"]) == pytest.approx(32.0, rel=0.35)
    assert float(first["data/wait_ms"]) == pytest.approx(160.0)
    assert float(first["data/cache_hit"]) == 1.0


def test_a_resumed_run_logs_at_the_steps_of_a_whole_one(shards: Path, tmp_path: Path) -> None:
    Run(shards, tmp_path, every_n_train_steps=4, max_steps=4)
    run = Run(
        shards, tmp_path, checkpoints(tmp_path)[0][1],
        logger=CSVLogger(tmp_path), log_every_n_steps=3, max_steps=9,
    )  # fmt: skip
    steps = [int(row["step"]) for row in logged(tmp_path)]
    assert steps == [5, 8]
    assert monitor_of(run).stats().num_batches == 5


def test_accumulated_batches_are_logged_once_per_step(shards: Path, tmp_path: Path) -> None:
    run = Run(shards, tmp_path, accumulate_grad_batches=2, logger=CSVLogger(tmp_path), log_every_n_steps=2, max_steps=4)
    assert [int(row["step"]) for row in logged(tmp_path)] == [1, 3]
    assert monitor_of(run).stats().num_batches == 8


class Loses(Recorder):
    """Logs its loss, and the axis that the user wants for it."""

    axis: int | None = None

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss)
        if self.axis is not None:
            self.log("step", float(self.axis * (batch_idx + 1)))
        return loss


class OwnAxis(Loses):
    axis = 1000


class SameName(Loses):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("data/wait_ms", -1.0)
        return super().training_step(batch, batch_idx)


class KeepsAll(Logger):
    """A logger of the user's, which gets each call."""

    name, version = "kept", 0

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[int, dict[str, float]]] = []

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        assert step is not None
        self.calls.append((step, dict(metrics)))

    def log_hyperparams(self, *_: Any, **__: Any) -> None:
        pass


@pytest.mark.parametrize(("recorder", "steps"), [(Loses, [2, 5, 8]), (OwnAxis, [3000, 6000, 9000])])
@pytest.mark.parametrize("manual", [False, True])
def test_the_metrics_are_in_the_row_of_the_loss_in_all_loggers(
    shards: Path, tmp_path: Path, recorder: type[Recorder], steps: list[int], manual: bool
) -> None:
    loggers = [CSVLogger(tmp_path), KeepsAll(), KeepsAll()]
    run = Run(
        shards, tmp_path, recorder=recorder, logger=loggers, log_every_n_steps=3, max_steps=9, module={"manual": manual}
    )  # fmt: skip
    (table,) = tmp_path.glob("lightning_logs/*/metrics.csv")
    rows = list(csv.DictReader(table.read_text().splitlines()))
    assert [float(row["data/wait_ms"]) >= 0 for row in rows if row["loss"]] == 3 * [True]
    assert len(rows) == 3
    assert loggers[1].calls == loggers[2].calls
    assert [step for step, metrics in loggers[1].calls if metrics.keys() >= METRICS | {"loss"}] == steps
    assert run.trainer.logged_metrics.keys() >= METRICS | {"loss"}
    assert "log_metrics" not in vars(run.trainer._logger_connector)


def test_what_a_model_logs_under_the_same_name_counts(shards: Path, tmp_path: Path) -> None:
    run = Run(shards, tmp_path, recorder=SameName, logger=CSVLogger(tmp_path), log_every_n_steps=3, max_steps=3)
    assert [float(row["data/wait_ms"]) for row in logged(tmp_path)] == [-1.0]
    assert run.trainer.callback_metrics["data/wait_ms"] == run.trainer.logged_metrics["data/wait_ms"] == -1.0


@pytest.mark.parametrize("options", [{"logger": False}, {"fast_dev_run": 2}, {"logger": False, "val": False}])
def test_the_metrics_reach_the_trainer_without_a_logger(shards: Path, tmp_path: Path, options: dict[str, Any]) -> None:
    run = Run(shards, tmp_path, recorder=Loses, log_every_n_steps=2, max_steps=2, **options)
    assert run.trainer.logged_metrics.keys() >= METRICS
    assert run.trainer.callback_metrics.keys() >= METRICS
    assert not METRICS & run.trainer.progress_bar_metrics.keys()


def test_callbacks_monitor_the_metrics(shards: Path, tmp_path: Path) -> None:
    best = ModelCheckpoint(
        tmp_path / "ckpt", "{step}", monitor="data/samples_per_s", mode="max", save_top_k=1, every_n_train_steps=4
    )  # fmt: skip
    stops = EarlyStopping("data/samples_per_s", mode="max", stopping_threshold=1e-9, check_on_train_epoch_end=True)
    run = Run(shards, tmp_path, callbacks=[best, stops], log_every_n_steps=4, logger=CSVLogger(tmp_path))
    assert stops.stopped_epoch == 0 < run.trainer.current_epoch < EPOCHS
    assert len(checkpoints(tmp_path)) == 1
    assert float(best.best_model_score) in {float(row["data/samples_per_s"]) for row in logged(tmp_path)}


def test_metrics_of_a_step_that_failed_are_not_logged_with_the_next_fit(shards: Path, tmp_path: Path) -> None:
    class Fails(Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == 3:
                raise OSError("as a model's might")

    kept = KeepsAll()
    run = Run(
        shards, tmp_path, recorder=Loses, callbacks=[Fails()], raises=OSError, logger=kept, log_every_n_steps=3
    )  # fmt: skip
    assert "log_metrics" not in vars(run.trainer._logger_connector)
    assert not any(METRICS & metrics.keys() for _, metrics in kept.calls)


def test_nothing_is_logged_shown_or_said_where_the_monitor_is_off(
    shards: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO)
    clock = Clock(monkeypatch)
    dataset = {"transform": slow_transform(clock, 1.0)}
    run = Run(shards, tmp_path, dataset=dataset, data={"monitor": False}, log_every_n_steps=1)
    assert not METRICS & set(run.trainer.callback_metrics)
    assert "Input-bound" not in caplog.text


def test_the_end_of_an_input_bound_run_says_why_and_what_to_change(
    shards: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO)
    bound = Verdict("transform", "Input-bound 80%: the transform takes 2 s.", "Raise num_workers from 0 to 5.")
    monkeypatch.setattr(trainers_monitor, "verdict_of", lambda _: bound)
    clock = Clock(monkeypatch)
    Run(shards, tmp_path, dataset={"transform": slow_transform(clock, 0.1)}, log_every_n_steps=1, max_epochs=10)
    said = [one.message for one in caplog.records if one.message == str(bound)]
    assert len(said) == 2  # once after the first minute, and at the end


def test_a_short_healthy_run_says_nothing(
    shards: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO)
    clock = Clock(monkeypatch)
    Run(shards, tmp_path, callbacks=[Takes(clock, step=0.5)])
    assert "nput-bound" not in caplog.text


def test_the_text_of_the_progress_bar_is_about_the_last_seconds(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, shown = Clock(monkeypatch), []

    class Bar(TQDMProgressBar):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *arguments: Any) -> None:
            super().on_train_batch_end(trainer, pl_module, *arguments)
            shown.append(self.get_metrics(trainer, pl_module)["data"])

    dataset = {"transform": slow_transform(clock, 0.0625)}
    Run(
        shards, tmp_path, callbacks=[Bar(), Takes(clock, step=1.0)], dataset=dataset, val=False,
        enable_progress_bar=True, max_epochs=2,
    )  # fmt: skip
    assert shown[0] == "0%"  # nothing is known yet
    assert set(shown[6:11]) == {"50%"}


def test_a_second_fit_is_measured_from_zero(shards: Path, tmp_path: Path) -> None:
    run = Run(shards, tmp_path, max_epochs=1)
    run.trainer.fit_loop.max_epochs = 3
    run.fit(None)
    assert monitor_of(run).stats().num_samples == 2 * NUM_SAMPLES


def test_the_loaders_that_lightning_makes_for_each_epoch_are_measured_together(shards: Path, tmp_path: Path) -> None:
    run = Run(shards, tmp_path, reload_dataloaders_every_n_epochs=1)
    assert monitor_of(run).stats().num_samples == EPOCHS * NUM_SAMPLES


def test_launchers_can_copy_the_callback_to_their_processes() -> None:
    assert isinstance(pickle.loads(pickle.dumps(StreamingCallback())), StreamingCallback)
