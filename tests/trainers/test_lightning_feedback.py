"""`MixtureFeedback`: weights follow a metric, and a stopped run sees what an uninterrupted one does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lightning.pytorch")

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_stream import (
    MDSWriter,
    MixtureFeedback,
    Schedule,
    Stream,
    StreamingCallback,
    StreamingDataLoader,
    StreamingDataset,
    verify_delivery,
)

SIZE, STEPS = 40, 15  # samples of each stream; an epoch has 10 steps of 8 samples
pytestmark = [pytest.mark.filterwarnings(f"ignore:.*{text}.*") for text in ("does not have many workers", "You def")]


class Model(LightningModule):
    """Notes what it trains on; its metric is the number of the step."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.seen: list[list[int]] = []

    def training_step(self, batch: Mapping[str, Any]) -> torch.Tensor:
        self.seen.append(sorted(batch["id"].tolist()))
        return self.layer(batch["id"].float()[:, None]).mean()

    def validation_step(self, batch: Mapping[str, Any]) -> None:
        self.log("at", float(self.global_step))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 1e-6)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("mix")
    for first, name in enumerate(("web", "code")):
        with MDSWriter(out=str(root / name), columns={"id": "int"}) as writer:
            for number in range(SIZE):
                writer.write({"id": first * SIZE + number})
    return root


def choose(metrics: Mapping[str, float]) -> dict[str, float] | None:
    return {4: {"web": 1.0, "code": 3.0}, 8: None, 12: {"code": 1.0}}[int(metrics["at"])]


def dataset_of(folder: Path, schedule: Schedule | None = None, epoch_size: int | None = None) -> StreamingDataset:
    streams = [Stream(local=folder / name) for name in ("web", "code")]
    points = [(0, {"web": 1, "code": 1})]
    return StreamingDataset(streams=streams, shuffle=True, epoch_size=epoch_size, schedule=schedule or points)


def fit(
    folder: Path,
    out: Path,
    steps: int,
    *,
    feedback: bool = True,
    schedule: Schedule | None = None,
    devices: int = 1,
    **options: Any,
) -> tuple[list[list[int]], dict[str, Any]]:
    """What a run trains on until it has made so many steps, and its data state; resumes from `out` if that has one."""
    model, callback = Model(), StreamingCallback(record_delivery=out / "record")
    checkpoint = ModelCheckpoint(
        out, filename="last", every_n_train_steps=1, save_top_k=1, enable_version_counter=False
    )
    trainer = Trainer(
        max_steps=steps, max_epochs=-1, val_check_interval=4, check_val_every_n_epoch=None, limit_val_batches=1,
        num_sanity_val_steps=1, accelerator="cpu", devices=devices, logger=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=[callback, checkpoint, *([MixtureFeedback(choose)] if feedback else [])],
    )  # fmt: skip
    loader = StreamingDataLoader(dataset_of(folder, schedule), global_batch_size=8, **options)
    validation = StreamingDataLoader(dataset_of(folder), 4, evaluation=True)
    last = out / "last.ckpt"
    trainer.fit(model, loader, validation, ckpt_path=last if last.exists() else None)
    loader.close()
    return model.seen, callback.tracker.state()


def counts(seen: list[list[int]]) -> list[int]:
    """Samples of "code" in each step."""
    return [sum(one >= SIZE for one in ids) for ids in seen]


@pytest.fixture(scope="module")
def whole(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[list[int]], dict[str, Any]]:
    """An uninterrupted run: what it trained on, and its last state."""
    return fit(folder, tmp_path_factory.mktemp("whole"), STEPS)


@pytest.mark.parametrize("options", [{}, {"num_workers": 2}])
def test_weights_chosen_from_a_metric_hold_two_steps_later(folder: Path, tmp_path: Path, options: Any) -> None:
    seen, state = fit(folder, tmp_path, STEPS, **options)
    assert counts(seen) == [4] * 6 + [6] * 8 + [8]
    assert [one[0] for one in state["order"]["schedule"]["changes"]] == [48, 112]
    found = verify_delivery(tmp_path / "record", dataset_of(folder))
    assert (found.num_steps, found.first_difference) == (STEPS, None), found.sentence


@pytest.mark.parametrize("stop", [4, 7, 10, *(pytest.param(k, marks=pytest.mark.nightly) for k in (3, 5, 12, 13))])
def test_a_stopped_run_sees_what_an_uninterrupted_one_does(folder: Path, tmp_path: Path, whole: Any, stop: int) -> None:
    first, _ = fit(folder, tmp_path / "parts", stop)
    rest, state = fit(folder, tmp_path / "parts", STEPS)
    assert (first + rest, state) == whole
    found = verify_delivery(tmp_path / "parts" / "record", dataset_of(folder))
    assert (found.num_steps, found.first_difference) == (STEPS, None), found.sentence


def test_a_run_repeats_without_the_callback_from_its_last_state(folder: Path, tmp_path: Path, whole: Any) -> None:
    again = Schedule.from_state(whole[1]["order"]["schedule"])
    assert fit(folder, tmp_path, STEPS, feedback=False, schedule=again) == whole


def test_an_epoch_is_shorter_where_all_streams_have_ended(folder: Path, tmp_path: Path) -> None:
    model, callback = Model(), StreamingCallback(record_delivery=tmp_path)
    schedule = Schedule([(0, {"web": 1, "code": 1})], exhausted="stop")
    dataset = dataset_of(folder, schedule, epoch_size=48)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False}
    trainer = Trainer(max_epochs=2, accelerator="cpu", devices=1, callbacks=[callback], **quiet)  # type: ignore[arg-type]
    trainer.fit(model, StreamingDataLoader(dataset, 8))
    assert sorted(one for ids in model.seen for one in ids) == list(range(2 * SIZE))
    assert verify_delivery(tmp_path, dataset).first_difference is None


def test_a_dataset_without_a_schedule_is_refused_before_training(folder: Path) -> None:
    dataset = StreamingDataset(streams=[Stream(local=folder / name) for name in ("web", "code")])
    quiet: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False}
    model, callbacks = Model(), [MixtureFeedback(lambda _: None)]
    trainer = Trainer(max_epochs=1, accelerator="cpu", callbacks=callbacks, **quiet)
    with pytest.raises(ValueError, match="Only a mixture with a schedule can change"):
        trainer.fit(model, StreamingDataLoader(dataset, 8))
    assert not model.seen


@pytest.mark.distributed
def test_two_ranks_change_at_the_same_batch(folder: Path, tmp_path: Path, whole: Any) -> None:
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", __file__]
    subprocess.run([*command, str(folder), str(tmp_path / "two")], env=env, check=True, timeout=300)
    ranks = [json.loads((tmp_path / "two" / f"rank{rank}.json").read_text()) for rank in range(2)]
    assert [sorted(a + b) for a, b in zip(*ranks, strict=True)] == whole[0]
    found = verify_delivery(tmp_path / "two" / "record", dataset_of(folder))
    assert (found.num_steps, found.first_difference) == (STEPS, None), found.sentence


if __name__ == "__main__":
    data, results = map(Path, sys.argv[1:])
    here = fit(data, results, STEPS, devices=2)[0]
    (results / f"rank{os.environ['RANK']}.json").write_text(json.dumps(here))
