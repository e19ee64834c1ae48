"""The logs of Transformers' Trainer show where the time of a run went, and its end says what to change."""

from __future__ import annotations

import logging
from pathlib import Path
from time import perf_counter
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", reason="pip install 'lightning-stream[transformers]'")

import numpy as np  # noqa: E402
from support.metered_loading import spend  # noqa: E402

from lightning_stream import MDSWriter, StreamingDataLoader, StreamingDataset  # noqa: E402
from lightning_stream.monitoring.verdict import Verdict  # noqa: E402
from lightning_stream.trainers import monitor as trainers_monitor  # noqa: E402
from lightning_stream.trainers.transformers import StreamingTrainerCallback  # noqa: E402

NUM_SAMPLES, BATCH, EPOCHS = 64, 8, 2
METRICS = {"data/wait_ms", "data/wait_share", "data/samples_per_s", "data/epoch_fraction"}
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Linear(4, 1)

    def forward(self, x: Any) -> dict[str, Any]:
        spend(0.01)
        return {"loss": self.net(x).square().mean()}


class Kept(transformers.TrainerCallback):  # type: ignore[misc]  # it may be absent
    """Keeps what a logger would write, and takes time for a checkpoint, as the trainer's own writing does."""

    def __init__(self) -> None:
        self.logs: list[dict[str, float]] = []
        self.began = self.ended = 0.0

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.began = perf_counter()

    def on_train_end(self, *_: Any, **__: Any) -> None:
        self.ended = perf_counter()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        self.logs.append(dict(logs))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("transformers_monitor") / "data"
    with MDSWriter(out=str(folder), columns={"x": "ndarray:float32:4"}) as writer:
        for number in range(NUM_SAMPLES):
            writer.write({"x": np.full(4, number / NUM_SAMPLES, np.float32)})
    return folder


def train(data: Path, folder: Path, callback: StreamingTrainerCallback, **options: Any) -> tuple[Any, Kept]:
    loader = StreamingDataLoader(StreamingDataset(local=data), BATCH)

    class Host(transformers.Trainer):  # type: ignore[misc]  # it may be absent
        def get_train_dataloader(self) -> Any:
            return loader

        def get_eval_dataloader(self, _: Any = None) -> Any:
            spend(0.05)
            return StreamingDataLoader(StreamingDataset(local=data), BATCH, evaluation=True)

        def _save(self, *arguments: Any, **named: Any) -> None:
            spend(0.05)
            super()._save(*arguments, **named)

    arguments = transformers.TrainingArguments(
        output_dir=str(folder), num_train_epochs=EPOCHS, per_device_train_batch_size=BATCH, logging_steps=2,
        use_cpu=True, report_to=[], disable_tqdm=True, remove_unused_columns=False, **options,
    )  # fmt: skip
    kept = Kept()
    trainer = Host(Model(), arguments, eval_dataset=[0], callbacks=[kept, callback])
    trainer.train()
    return trainer, kept


def test_the_metrics_reach_the_loggers_and_the_state(data: Path, tmp_path: Path) -> None:
    trainer, kept = train(data, tmp_path, StreamingTrainerCallback(), save_strategy="no")
    logged = [one for one in kept.logs if "loss" in one]
    assert len(logged) == EPOCHS * NUM_SAMPLES // BATCH // 2
    for one in logged:
        assert one.keys() >= METRICS
    assert [one["data/epoch_fraction"] for one in logged] == EPOCHS * [0.25, 0.5, 0.75, 1.0]
    assert trainer.state.log_history[0].keys() >= METRICS


def test_evaluations_and_checkpoints_are_not_training(data: Path, tmp_path: Path) -> None:
    callback = StreamingTrainerCallback()
    _, kept = train(
        data, tmp_path, callback, save_strategy="steps", save_steps=4, eval_strategy="steps", eval_steps=8
    )  # fmt: skip
    stats = callback.stats()
    assert stats.num_samples == EPOCHS * NUM_SAMPLES
    assert stats.pauses["checkpoint"] >= 4 * 0.05
    assert stats.validation_s >= 2 * 0.05 + 2 * 8 * 0.01
    assert stats.training_s >= EPOCHS * NUM_SAMPLES / BATCH * 0.01
    assert stats.elapsed_s + stats.validation_s == pytest.approx(kept.ended - kept.began, rel=0.1)


def test_the_end_of_an_input_bound_run_says_why(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "lightning_stream")
    bound = Verdict("transform", "Input-bound 80%: the transform takes 2 s.", "Raise num_workers from 0 to 5.")
    monkeypatch.setattr(trainers_monitor, "verdict_of", lambda _: bound)
    monkeypatch.setattr(trainers_monitor, "_WORTH_AT_END_S", 0.0)
    train(data, tmp_path, StreamingTrainerCallback(), save_strategy="no")
    assert str(bound) in caplog.text


def test_nothing_is_logged_where_the_monitor_is_off(data: Path, tmp_path: Path) -> None:
    _, kept = train(data, tmp_path, StreamingTrainerCallback(monitor=False), save_strategy="no")
    assert not any(METRICS & one.keys() for one in kept.logs)
