"""What we rely on inside Composer: this file fails when a new version lays it out otherwise."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
composer = pytest.importorskip("composer", reason="needs Composer: uv sync --no-dev --extra composer --group test")

from composer import DataSpec, Trainer  # noqa: E402
from composer.core import State  # noqa: E402
from support.composer_runs import Run, write_shards  # noqa: E402

from lightning_stream import StreamingDataLoader, StreamingDataset  # noqa: E402
from lightning_stream.trainers.composer import private  # noqa: E402


def test_the_trainers_parts_that_we_reach_into_are_there(tmp_path: Path) -> None:
    trainer = Run(write_shards(tmp_path / "shards"), tmp_path, max_duration="1ba").trainer
    assert "trainer_mode" in inspect.signature(Trainer._iter_dataloader).parameters
    assert inspect.isgeneratorfunction(Trainer._iter_dataloader)
    for place, name in (
        (trainer, "_rng_state"), (trainer, "first_train_batch_complete"), (trainer.state, "dataset_resumption"),
        (trainer.state, "train_dataloader"), (trainer.state, "dataloader_len"),
        (trainer.state.timestamp, "batch_in_epoch"),
    ):  # fmt: skip
        assert hasattr(place, name), f"{type(place).__name__}.{name}"
    assert list(inspect.signature(State._dataset_of).parameters) == ["self", "dataloader"]


def test_only_the_training_loop_asks_for_a_batch(tmp_path: Path) -> None:
    asked: list[Any] = []

    class Asks(StreamingDataLoader):
        def begin_iteration(self, iterator: Any) -> Any:
            asked.append(private.trainer_that_asks(self))
            return super().begin_iteration(iterator)

    loader = Asks(StreamingDataset(remote=write_shards(tmp_path / "shards")), 16)
    next(iter(loader))
    run = Run(tmp_path / "shards", tmp_path, max_duration="2ba", spec=DataSpec(loader))
    assert asked == [None, run.trainer]
