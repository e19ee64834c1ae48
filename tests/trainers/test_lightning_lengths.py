"""Packed rows and budgets of tokens under Lightning: all of them once, although the epochs differ in length."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

L = pytest.importorskip("lightning")
from lightning.pytorch.callbacks import Callback, ModelCheckpoint  # noqa: E402
from support.uneven_documents import BUDGET, PACK, padded, write_documents  # noqa: E402

from lightning_stream import (  # noqa: E402
    MDSWriter,
    Schedule,
    Stream,
    StreamingCallback,
    StreamingDataLoader,
    StreamingDataModule,
    StreamingDataset,
    World,
)

pytestmark = pytest.mark.filterwarnings("ignore:The dirpath has changed")


class Model(L.LightningModule):  # type: ignore[misc, name-defined]
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = torch.nn.Embedding(100, 4), torch.nn.Linear(4, 100)
        self.seen: dict[int, list[Any]] = defaultdict(list)
        self.validated = 0

    def training_step(self, batch: Any, _: int) -> Any:
        self.seen[self.current_epoch] += [tuple(row.tolist()) for row in batch["input_ids"]]
        scores, labels = self.head(self.embedding(batch["input_ids"])), batch["labels"]
        return torch.nn.functional.cross_entropy(scores[:, :-1].flatten(0, 1), labels[:, 1:].flatten())

    def validation_step(self, batch: Any, _: int) -> None:
        self.validated += len(batch["input_ids"])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_documents(tmp_path_factory.mktemp("documents"))


def fit(folder: str, checkpoints: Path, kind: Any, ckpt_path: str | None = None, **given: Any) -> tuple[Model, Any]:
    data = StreamingDataModule(
        train=StreamingDataset(local=folder, shuffle=True, shuffle_seed=1, **kind),
        val=StreamingDataset(local=folder, **kind),
        global_batch_size=12 if kind is PACK else None,
        collate_fn=padded,
    )
    keep = ModelCheckpoint(dirpath=checkpoints, filename="{step}", every_n_train_steps=4, save_top_k=-1)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = L.Trainer(accelerator="cpu", devices=1, callbacks=[keep], **{"max_epochs": 3, **quiet, **given})
    model = Model()
    trainer.fit(model, datamodule=data, ckpt_path=ckpt_path)
    return model, trainer


@pytest.fixture(scope="module", params=[PACK, BUDGET], ids=["packed", "budget"])
def whole(folder: str, tmp_path_factory: pytest.TempPathFactory, request: Any) -> tuple[Model, Any, Path, Any]:
    checkpoints = tmp_path_factory.mktemp("whole")
    return (*fit(folder, checkpoints, request.param), checkpoints, request.param)


def test_epochs_of_different_lengths_are_trained_to_their_ends(whole: tuple[Model, Any, Path, Any]) -> None:
    model, trainer, _, _ = whole
    loader = trainer.train_dataloader
    lengths = [loader.num_batches(epoch) for epoch in range(3)]
    assert len(set(lengths)) > 1, "the test needs epochs of different lengths"
    assert trainer.global_step == sum(lengths)
    rows = [loader.micro_batches_from(loader.first_position()).plan.order.num_samples]
    assert len(set(model.seen[0])) == rows[0]
    assert model.validated > 0


@pytest.mark.parametrize("step", [8, 40, 44, 84, 88, 124])
def test_a_resume_continues_at_the_next_row(
    folder: str, whole: tuple[Model, Any, Path, Any], tmp_path: Path, step: int
) -> None:
    model, trainer, checkpoints, kind = whole
    resumed, again = fit(folder, tmp_path, kind, str(checkpoints / f"step={step}.ckpt"))
    assert again.global_step == trainer.global_step
    for epoch, rows in resumed.seen.items():
        assert rows == model.seen[epoch][-len(rows) :]
    seen = sum(map(len, resumed.seen.values()))
    assert sum(map(len, model.seen.values())) - seen <= step * (12 if kind is PACK else 1200)
    assert seen > 0


def test_a_limit_and_a_share_of_the_epoch_hold_in_every_epoch(folder: str, tmp_path: Path) -> None:
    assert fit(folder, tmp_path, PACK, limit_train_batches=5, max_epochs=2)[1].global_step == 10
    _, trainer = fit(folder, tmp_path, PACK, limit_train_batches=0.5, val_check_interval=0.5, max_epochs=2)
    assert trainer.global_step == sum(trainer.train_dataloader.num_batches(epoch) // 2 for epoch in range(2))


def test_the_monitor_counts_the_tokens_of_rows_without_padding(folder: str) -> None:
    dataset, callback = StreamingDataset(local=folder, shuffle=True, **PACK), StreamingCallback()
    quiet = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False}
    trainer = L.Trainer(accelerator="cpu", max_epochs=1, callbacks=[callback], log_every_n_steps=5, **quiet)
    val = StreamingDataLoader(StreamingDataset(local=folder, **PACK), 12, evaluation=True)
    trainer.fit(Model(), StreamingDataLoader(dataset, 12), val)
    assert callback.monitor.stats().num_tokens == int(dataset.lengths("tokens").sum())
    assert float(trainer.callback_metrics["data/tokens_per_s"]) > float(trainer.callback_metrics["data/samples_per_s"])


# A mixture that changes while training: its epochs have as many documents as before, but more rows


@pytest.fixture(scope="module")
def mix(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rng, root = np.random.default_rng(0), tmp_path_factory.mktemp("mix")
    written: Any = {"columns": {"tokens": "ndarray:int32"}, "lengths": {"tokens": len}, "size_limit": 1 << 13}
    for name, most in (("short", 30), ("long", 120)):
        with MDSWriter(out=str(root / name), **written) as writer:
            for size in rng.integers(1, most, 200):
                writer.write({"tokens": rng.integers(1, 100, size).astype(np.int32)})
    return root


class Change(Callback):  # type: ignore[misc]
    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == 5:
            trainer.train_dataloader.change_mixture({"long": 1}, after_steps=2)


def mix_of(mix: Path, schedule: Any = None) -> StreamingDataset:
    streams = [Stream(local=mix / name) for name in ("short", "long")]
    schedule = schedule or Schedule([(0, {"short": 1})])
    return StreamingDataset(streams=streams, shuffle=True, schedule=schedule, **PACK, epoch_size=400)


def fit_mix(mix: Path, out: Path, steps: int, *callbacks: Any, schedule: Any = None) -> tuple[list[Any], Any]:
    """The rows of a run up to this step, and its data state; resumes from `out` if that has a checkpoint."""
    dataset = mix_of(mix, schedule)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False, "num_sanity_val_steps": 0}
    trainer = L.Trainer(accelerator="cpu", devices=1, max_steps=steps, callbacks=[*callbacks], **quiet)
    model, last = Model(), out / "last.ckpt"
    data = StreamingDataModule(train=dataset, val={"local": str(mix / "long"), **PACK}, global_batch_size=8)
    trainer.fit(model, datamodule=data, ckpt_path=str(last) if last.exists() else None)
    trainer.save_checkpoint(last)
    return [row for rows in model.seen.values() for row in rows], trainer.train_dataloader.state_dict()


def test_an_epoch_that_a_change_makes_longer_is_trained_to_its_end_also_after_a_resume(
    mix: Path, tmp_path: Path
) -> None:
    plain, _ = fit_mix(mix, tmp_path / "plain", 60)
    rows, state = fit_mix(mix, tmp_path / "whole", 60, Change())
    assert rows != plain
    again = Schedule.from_state(state["order"]["schedule"])
    before, end = (StreamingDataLoader(mix_of(mix, one), 8, world=World()).num_batches(0) for one in (None, again))
    assert 10 < before < end < 60, "the test needs an epoch that becomes longer"
    assert fit_mix(mix, tmp_path / "again", 60, schedule=again) == (rows, state)
    for stop in (5, before + 1, end):
        first, _ = fit_mix(mix, tmp_path / str(stop), stop, Change())
        rest, last = fit_mix(mix, tmp_path / str(stop), 60)
        assert (first + rest, last) == (rows, state), stop


@pytest.mark.filterwarnings("ignore:.*have no `val_dataloader`")
def test_a_loader_whose_mixture_has_ended_serves_another_trainer_from_the_start(mix: Path) -> None:
    schedule = Schedule([(0, {"short": 1, "long": 1})], exhausted="stop")
    loader = StreamingDataLoader(mix_of(mix, schedule), 8, tail="drop", collate_fn=padded)
    models = [Model(), Model()]
    for model in models:
        quiet = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False}
        L.Trainer(accelerator="cpu", devices=1, max_epochs=4, **quiet).fit(model, loader)
    assert loader.num_batches(3) == 0, "the test needs a mixture that ends"
    assert models[0].seen == models[1].seen
    assert models[0].seen
