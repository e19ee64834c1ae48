"""Training options of Lightning, ways to hand over the data, and checkpoints of others."""

from __future__ import annotations

import subprocess
import sys
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler, ModelCheckpoint, TQDMProgressBar
from lightning.pytorch.loggers import CSVLogger
from support.chains import number_row, write_streams
from support.lightning_host import HOST
from support.lightning_runs import GLOBAL_BATCH, NUM_SAMPLES, QUIET, Recorder, Run, checkpoints
from support.resume_contract import (
    WARNINGS,
    before_step,
    expect_every_resume_exact,
    expect_exact,
    from_step,
    merged,
)

from lightning_stream import Packing, Stream, StreamingDataLoader, StreamingDataModule, StreamingDataset
from lightning_stream.errors import LedgerError, StateError
from lightning_stream.trainers.lightning import loops
from lightning_stream.trainers.lightning.callback import StreamingCallback

STEPS_PER_EPOCH = 11
pytestmark = [
    *WARNINGS,
    pytest.mark.filterwarnings("ignore:.*Total length of `list` across ranks is zero.*"),
    pytest.mark.filterwarnings("ignore:.*You have overridden.*"),
]


# The loader handed over in other ways


def streaming(shards: Path, **options: Any) -> StreamingDataLoader:
    return StreamingDataLoader(StreamingDataset(remote=shards, shuffle=True), GLOBAL_BATCH, **options)


def test_an_option_that_no_door_has_is_refused_with_the_one_that_was_meant(shards: Path) -> None:
    misspelt = {
        "num_worker": "num_workers",
        "monitors": "monitor",
        "show_positions": "show_position",
        "eval_batchsize": "eval_batch_size",
    }
    for wrong, meant in misspelt.items():
        with pytest.raises(TypeError, match=f"argument '{wrong}'. Did you mean '{meant}'"):
            StreamingDataModule(train=shards, batch_size=4, **{wrong: 2})  # type: ignore[arg-type]


def test_other_loaders_and_two_callbacks_are_refused(shards: Path, tmp_path: Path) -> None:
    other = torch.utils.data.DataLoader([{"id": 0, "x": torch.zeros(4)}] * 8)
    with pytest.raises(TypeError, match="keeps the position of a StreamingDataLoader"):
        Trainer(callbacks=[StreamingCallback()], max_epochs=1, **QUIET).fit(Recorder(), other)
    with pytest.raises(ValueError, match="StreamingDataModule brings its own"):
        Run(shards, tmp_path, callbacks=[StreamingCallback()])
    trainer = Trainer(callbacks=[StreamingCallback()], max_epochs=1, accumulate_grad_batches=2, **QUIET)
    with pytest.raises(ValueError, match="accumulates 2 micro-batches a step and the loader 1"):
        trainer.fit(Recorder(), streaming(shards))


def test_a_fit_that_would_train_on_nothing_is_refused(shards: Path) -> None:
    trainer = Trainer(max_epochs=1, **QUIET)
    with pytest.raises(ValueError, match=r"an epoch must have a batch, but tail='drop' leaves none"):
        trainer.fit(Recorder(), StreamingDataModule(train=shards, global_batch_size=1 << 20, tail="drop"))


def test_fitting_again_begins_the_next_epoch_and_another_trainer_starts_over(shards: Path, tmp_path: Path) -> None:
    whole = Run(shards, tmp_path / "whole", max_epochs=4)
    run = Run(shards, tmp_path, max_epochs=1)
    run.trainer.fit_loop.max_epochs = 2
    run.trainer.fit(run.module, datamodule=run.data)
    assert run.trainer.current_epoch == 2
    run.trainer.fit_loop.max_epochs, run.trainer.fit_loop.epoch_loop.max_steps = 3, 27
    run.trainer.fit(run.module, datamodule=run.data)
    assert run.steps == before_step(whole.steps, 27)
    assert run.trainer.current_epoch == 3  # as Lightning counts: the epoch that max_steps cut short is over
    run.trainer.fit_loop.max_epochs, run.trainer.fit_loop.epoch_loop.max_steps = 4, -1
    run.trainer.fit(run.module, datamodule=run.data)
    assert [*from_step(run.steps, 27).values()] == [*from_step(whole.steps, 33).values()]

    second = Recorder()
    Trainer(max_epochs=1, default_root_dir=tmp_path, **QUIET).fit(second, datamodule=run.data)
    assert merged([second.steps]) == before_step(whole.steps, 11)


def test_a_data_module_under_another_name_still_finds_its_state(shards: Path, tmp_path: Path) -> None:
    class Renamed(StreamingDataModule):
        pass

    whole = Run(shards, tmp_path, save_at=(5,))
    step, path = checkpoints(tmp_path)[0]
    module, data = Recorder(), Renamed(train={"remote": shards, "shuffle": True}, global_batch_size=GLOBAL_BATCH)
    Trainer(max_epochs=3, **QUIET).fit(module, datamodule=data, ckpt_path=path)
    assert merged([module.steps]) == from_step(whole.steps, step)


# Options of the trainer


def test_overfitting_trains_on_the_same_batches_or_is_refused(shards: Path, tmp_path: Path) -> None:
    options = {"overfit_batches": 3, "dataset": {"shuffle": False}}
    whole = expect_every_resume_exact(HOST, shards, tmp_path, range(1, 9), **options)
    assert all(whole.steps[step] == whole.steps[step % 3] for step in range(9))
    with pytest.raises(ValueError, match="overfit_batches=3 trains on the same batches in every epoch"):
        Run(shards, tmp_path, overfit_batches=3)


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1)])
def test_an_accumulation_that_a_callback_changes_is_refused_by_its_name(
    shards: Path, tmp_path: Path, before: int, after: int
) -> None:
    class Changes(Callback):
        def on_train_start(self, trainer: Any, *_: Any) -> None:
            trainer.accumulate_grad_batches = after

    with pytest.raises(StateError, match=r"Give Trainer\(accumulate_grad_batches=\.\.\.\)"):
        Run(shards, tmp_path, callbacks=[Changes()], accumulate_grad_batches=before)


def test_an_accumulation_that_changes_with_the_epochs_is_refused(shards: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="one optimizer step must take one global batch"):
        Run(shards, tmp_path, callbacks=[GradientAccumulationScheduler({0: 1, 1: 2})])


@pytest.mark.parametrize(("size", "accumulate"), [(32, 1), (8, 1), (32, 2), (48, 1)])
def test_another_global_batch_neither_loses_nor_repeats_a_sample_or_is_refused(
    shards: Path, tmp_path: Path, size: int, accumulate: int
) -> None:
    whole = Run(shards, tmp_path, save_at=(3, 4, 10, 11, 16))
    ordered = {e: [i for s in range(e * 11, e * 11 + 11) for i in whole.module.steps[s]] for e in range(3)}
    options = {"data": {"global_batch_size": size}, "accumulate_grad_batches": accumulate, "val_check_interval": 2}
    for step, path in checkpoints(tmp_path):
        if accumulate > 1 and step % 11 in (3, 5):
            with pytest.raises(StateError, match="in the middle of an epoch, at what would be micro-batch"):
                Run(shards, tmp_path / "again", path, **options)
            continue
        resumed = Run(shards, tmp_path / "again", path, **options)
        by_epoch: dict[int, list[int]] = defaultdict(list)
        for number, ids in resumed.module.steps.items():
            by_epoch[resumed.module.epoch_of_step[number]] += ids
        begun, done = divmod(step, 11)
        assert sorted(by_epoch) == list(range(begun, 3))
        for epoch, ids in by_epoch.items():
            expected = ordered[epoch][done * GLOBAL_BATCH if epoch == begun else 0 :]
            assert sorted(ids) == sorted(expected), f"epoch {epoch} after step {step}"


def test_several_optimizers_stepped_by_hand_count_as_one_step_of_the_data(shards: Path, tmp_path: Path) -> None:
    class Two(Recorder):
        stop_at = -1

        def __init__(self) -> None:
            super().__init__(manual=True)
            self.seen: list[list[int]] = []

        def training_step(self, batch: dict[str, Any], batch_idx: int) -> None:
            if len(self.seen) == self.stop_at:
                self.trainer.save_checkpoint(tmp_path / "two.ckpt")
            self.seen.append(sorted(batch["id"].tolist()))
            for optimizer in self.optimizers():
                optimizer.zero_grad()
                self.manual_backward(self.net(batch["x"]).square().mean())
                optimizer.step()

        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD(self.parameters(), lr=0.01) for _ in range(2)]

    class Stops(Two):
        stop_at = 5

    whole = Run(shards, tmp_path, recorder=Stops, max_epochs=2)
    resumed = Run(shards, tmp_path, tmp_path / "two.ckpt", recorder=Two, max_epochs=2)
    assert resumed.module.seen == whole.module.seen[5:]
    assert resumed.weights == whole.weights


def test_rests_of_streams_that_have_fewer_samples_than_a_step_has_micro_batches_are_refused(tmp_path: Path) -> None:
    root = write_streams(tmp_path / "data")
    streams = [Stream(remote=root / name, proportion=share) for name, share in (("a", 0.7), ("b", 0.3))]
    dataset = {"remote": None, "streams": streams, "batching_method": "per_stream", "epoch_size": 167}
    with pytest.raises(ValueError, match="the rests of the streams are global batches of fewer"):
        Run(root / "a", tmp_path, dataset=dataset, accumulate_grad_batches=2)


def test_a_share_of_the_epoch_holds_in_every_epoch_although_they_differ_in_length(tmp_path: Path) -> None:
    rows = {"pack": Packing(row_length=40, window=50), "transform": number_row}
    folder = write_streams(tmp_path / "data") / "a"
    run = Run(folder, tmp_path, dataset=rows, limit_train_batches=0.5, val_check_interval=0.5, val=False)
    lengths = [run.trainer.train_dataloader.num_batches(epoch) // 2 for epoch in range(3)]
    assert len(set(lengths)) > 1, "the test needs epochs of different lengths"
    assert run.trainer.global_step == sum(lengths)


def test_the_monitor_counts_the_tokens_of_rows_without_padding(tmp_path: Path) -> None:
    rows = {"pack": Packing(row_length=40, window=50), "transform": number_row}
    dataset = StreamingDataset(remote=write_streams(tmp_path) / "a", shuffle=True, **rows)
    callback = StreamingCallback()
    trainer = Trainer(**{**QUIET, "max_epochs": 1, "callbacks": [callback], "log_every_n_steps": 5})
    trainer.fit(Recorder(), StreamingDataLoader(dataset, 12))
    assert callback.monitor.stats().num_tokens == int(dataset.lengths("tokens").sum())
    assert float(trainer.callback_metrics["data/tokens_per_s"]) > float(trainer.callback_metrics["data/samples_per_s"])


@pytest.mark.parametrize(("workers", "persistent"), [(0, False), (1, False), (2, True)])
def test_augmentation_and_dropout_draw_what_the_uninterrupted_run_drew(
    shards: Path, tmp_path: Path, workers: int, persistent: bool
) -> None:
    def options(num_workers: int, persistent: bool = False) -> dict[str, Any]:
        return {
            "dataset": {"transform": augmented},
            "data": {"num_workers": num_workers, "persistent_workers": persistent, "seed_steps": 3},
            "module": {"dropout": 0.5}, "max_epochs": 2,
        }  # fmt: skip

    whole = Run(shards, tmp_path, save_at=(5, 11, 15), **options(0))
    for step, path in checkpoints(tmp_path):
        expect_exact(whole, Run(shards, tmp_path / "again", path, **options(workers, persistent)), step)


def augmented(sample: dict[str, Any]) -> dict[str, Any]:
    noise = np.random.standard_normal(4).astype(np.float32) + torch.rand(4).numpy()
    return {**sample, "x": sample["x"] + noise}


# Evaluation


def test_prediction_and_test_see_every_sample_once(shards: Path, tmp_path: Path) -> None:
    class Predicts(Recorder):
        def predict_step(self, batch: dict[str, Any], batch_idx: int) -> list[int]:
            return batch["id"].tolist()

        test_step = Recorder.validation_step

        def on_test_epoch_end(self) -> None:
            self.tested = sorted(self._validating)

    module = Predicts()
    data = StreamingDataModule(test={"remote": shards}, predict={"remote": shards}, batch_size=16)
    trainer = Trainer(default_root_dir=tmp_path, **QUIET)
    for batches in (
        trainer.predict(module, datamodule=data),
        trainer.predict(module, StreamingDataLoader(StreamingDataset(remote=shards), 16, evaluation=True)),
    ):
        assert sorted(number for batch in batches for number in batch) == list(range(NUM_SAMPLES))
    trainer.test(module, datamodule=data, verbose=False)
    assert module.tested == list(range(NUM_SAMPLES))


# Checkpoints of others, and what does not fit


def test_a_checkpoint_without_a_position_is_refused_or_starts_over(shards: Path, tmp_path: Path) -> None:
    trainer = Trainer(max_steps=3, **QUIET)
    trainer.fit(Recorder(), streaming(shards))
    trainer.save_checkpoint(tmp_path / "plain.ckpt")
    checkpoint = torch.load(tmp_path / "plain.ckpt", weights_only=True)
    del checkpoint["callbacks"]["lightning_stream"]
    torch.save(checkpoint, tmp_path / "plain.ckpt")
    with pytest.raises(StateError, match="written without StreamingDataModule or StreamingCallback"):
        Run(shards, tmp_path, tmp_path / "plain.ckpt")
    with pytest.warns(UserWarning, match="this one holds none of ours"):
        run = Run(shards, tmp_path, tmp_path / "plain.ckpt", data={"on_missing_state": "restart"})
    assert min(run.steps) == 3
    whole = Run(shards, tmp_path / "whole")
    assert run.steps[3] == whole.steps[0]


def test_a_checkpoint_of_mosaicml_streaming_continues_where_its_algorithm_is_named(
    shards: Path, tmp_path: Path
) -> None:
    dataset = {"shuffle_algo": "py1e", "num_canonical_nodes": 2}
    whole = Run(shards, tmp_path, save_at=(16,), dataset=dataset)
    path = checkpoints(tmp_path)[0][1]
    checkpoint = torch.load(path, weights_only=True)
    del checkpoint["callbacks"]["lightning_stream"], checkpoint["StreamingDataModule"]
    state = {"epoch": 1, "sample_in_epoch": 5 * GLOBAL_BATCH, "num_canonical_nodes": 2, "shuffle_seed": 9176}
    checkpoint["loops"]["fit_loop"]["state_dict"]["combined_loader"] = [{**state, "initial_physical_nodes": 1}]
    torch.save(checkpoint, tmp_path / "theirs.ckpt")
    expect_exact(whole, Run(shards, tmp_path, tmp_path / "theirs.ckpt", dataset=dataset), 16)
    with pytest.raises(StateError, match="Pass the shuffle, shuffle_algo, partition_algo and"):
        Run(shards, tmp_path, tmp_path / "theirs.ckpt")


class SortsIds:
    """Makes batches as the wrapped one does, but of other samples than were planned."""

    def __init__(self, made: Any) -> None:
        self.made, self.close = made, made.close

    def __next__(self) -> Any:
        batch, info, made = next(self.made)
        return batch, replace(info, ids=np.sort(info.ids)), made


def test_a_batch_that_was_not_planned_ends_the_run_at_its_step(shards: Path, tmp_path: Path) -> None:
    class Swaps(Recorder):
        def on_train_batch_end(self, *_: Any) -> None:
            (own,) = loops.iterators(self.trainer)
            if self.trainer.global_step == 4:
                own._made = SortsIds(own._made)

    run = Run(shards, tmp_path, recorder=Swaps, raises=LedgerError)
    assert "epoch 0, position 64, the loader delivered samples" in str(run.error)
    assert max(run.steps) == 3
    Run(shards, tmp_path, recorder=Swaps, data={"check_delivery": False})


def test_the_progress_bar_shows_the_position_and_is_left_as_it_was(shards: Path, tmp_path: Path) -> None:
    shown = []

    class Bar(TQDMProgressBar):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *arguments: Any) -> None:
            super().on_train_batch_end(trainer, pl_module, *arguments)
            shown.append(self.get_metrics(trainer, pl_module)["samples"])
            assert "%" in self.get_metrics(trainer, pl_module)["data"]

    bar = Bar()
    Run(shards, tmp_path, callbacks=[bar], enable_progress_bar=True, max_steps=3, max_epochs=-1)
    assert shown == ["16/167", "32/167", "48/167"]
    assert "get_metrics" not in vars(bar)

    shown.clear()
    Run(shards, tmp_path, callbacks=[Bar()], enable_progress_bar=True, max_epochs=2)
    assert shown[10] == shown[-1] == "167/167"  # 11 batches an epoch
    assert shown[11] == "16/167"


@pytest.mark.parametrize(
    "first",
    [
        "import pytorch_lightning as pl",
        pytest.param("from lightning_stream import StreamingDataModule", marks=pytest.mark.nightly),
    ],
)
def test_pytorch_lightning_under_its_own_name_works(shards: Path, tmp_path: Path, first: str) -> None:
    program = (
        f"{first}\n"
        "import sys, torch, pytorch_lightning as pl\n"
        "from lightning_stream import StreamingDataModule\n"
        "class Net(pl.LightningModule):\n"
        "    def __init__(self):\n"
        "        super().__init__(); self.net = torch.nn.Linear(4, 1)\n"
        "    def training_step(self, batch, i):\n"
        "        return self.net(batch['x']).square().mean()\n"
        "    def configure_optimizers(self):\n"
        "        return torch.optim.SGD(self.parameters(), lr=0.1)\n"
        "data = StreamingDataModule(train={'remote': sys.argv[1]}, batch_size=16)\n"
        "trainer = pl.Trainer(max_steps=3, accelerator='cpu', logger=False, enable_progress_bar=False,\n"
        "                     enable_model_summary=False, default_root_dir=sys.argv[2])\n"
        "trainer.fit(Net(), datamodule=data)\n"
        "trainer.save_checkpoint(sys.argv[2] + '/a.ckpt')\n"
    )
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program, str(shards), str(tmp_path)],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-2000:]
    state = torch.load(tmp_path / "a.ckpt", weights_only=True)["callbacks"]["lightning_stream"]
    assert state["position"]["position"] == 48


@pytest.mark.filterwarnings("ignore:.*there is no last checkpoint available", "ignore:You defined a `validation_step`")
@pytest.mark.parametrize("bare", [False, True], ids=["module", "loader"])
def test_a_missing_last_checkpoint_is_an_error_where_the_run_has_others(
    shards: Path, tmp_path: Path, bare: bool
) -> None:
    def fit(save_last: bool, ckpt_path: str | None = "last", max_steps: int = 3) -> Recorder:
        keeps = ModelCheckpoint(dirpath=tmp_path / "ckpt", every_n_train_steps=2, save_last=save_last)
        trainer = Trainer(max_steps=max_steps, **{**QUIET, "enable_checkpointing": True}, callbacks=[keeps])
        module = Recorder()
        if bare:
            trainer.fit(module, streaming(shards), ckpt_path=ckpt_path)
        else:
            data = StreamingDataModule(train={"remote": shards, "shuffle": True}, global_batch_size=GLOBAL_BATCH)
            trainer.fit(module, datamodule=data, ckpt_path=ckpt_path)
        return module

    fit(save_last=False)  # nothing is there yet
    with pytest.raises(StateError, match=r"none is marked as last .* among the 1 .* save_last=True"):
        fit(save_last=False)
    fit(save_last=True, ckpt_path=None)
    last = torch.load(tmp_path / "ckpt" / "last.ckpt", weights_only=False)["global_step"]
    assert min(fit(save_last=True, max_steps=5).steps) == last


@pytest.mark.filterwarnings("ignore:.*there is no last checkpoint available", "ignore:.*val_dataloader")
@pytest.mark.parametrize("save_last", [False, True])
def test_a_last_checkpoint_in_the_folder_of_another_version_is_an_error(
    shards: Path, tmp_path: Path, save_last: bool
) -> None:
    def fit() -> None:
        options = {**QUIET, "enable_checkpointing": True, "logger": CSVLogger(tmp_path), "default_root_dir": tmp_path}
        keeps = ModelCheckpoint(every_n_train_steps=2, save_last=save_last)  # without dirpath=
        trainer = Trainer(max_steps=3, **options, callbacks=[keeps, StreamingCallback()])
        trainer.fit(Recorder(), streaming(shards), ckpt_path="last")

    fit()  # nothing is there yet
    assert list(tmp_path.glob("lightning_logs/version_0/checkpoints/*.ckpt"))
    with pytest.raises(StateError, match=r"none is marked as last .*version_0.*ModelCheckpoint\(dirpath="):
        fit()
