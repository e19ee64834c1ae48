"""What `StreamingDataModule` may be given, and what it says where it was given something else."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lightning.pytorch")

import lightning.pytorch as pl
import torch
from support.lightning_runs import NUM_SAMPLES, QUIET, Recorder, Run, checkpoints, write_shards

from lightning_stream import StreamingDataModule
from lightning_stream.errors import SettingsMismatch, SnapshotMismatch, StateError
from lightning_stream.trainers.checkpoints import read_position

pytestmark = pytest.mark.filterwarnings("ignore:.*callbacks used to create the checkpoint.*")


class TrainsOnly(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Linear(4, 1)
        self.seen: list[int] = []

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Any:
        self.seen += batch["id"].tolist()
        return self.net(batch["x"]).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize("kind", [str, Path, lambda path: f"file://{path}"], ids=["str", "path", "url"])
def test_a_place_is_enough(shards: Path, tmp_path: Path, kind: Any) -> None:
    module = TrainsOnly()
    data = StreamingDataModule(train=kind(shards), batch_size=16)
    pl.Trainer(max_epochs=1, **QUIET).fit(module, datamodule=data)
    assert sorted(set(module.seen)) == list(range(NUM_SAMPLES))


@pytest.mark.parametrize("module", [TrainsOnly, Recorder])
@pytest.mark.parametrize("val", [False, True])
def test_a_whole_run_warns_of_nothing(shards: Path, tmp_path: Path, module: Any, val: bool) -> None:
    if module is TrainsOnly and val:
        return  # Lightning says that nobody looks at the validation data, and is right
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        data = StreamingDataModule(
            train={"remote": shards, "shuffle": True}, val=str(shards) if val else None, batch_size=16
        )
        trainer = pl.Trainer(max_epochs=1, **QUIET)
        trainer.fit(module(), datamodule=data)
        trainer.save_checkpoint(tmp_path / "a.ckpt")
        pl.Trainer(max_epochs=2, **QUIET).fit(module(), datamodule=data, ckpt_path=tmp_path / "a.ckpt")
    assert [str(one.message) for one in caught] == []


def test_a_data_module_is_copied_to_the_processes_of_a_launcher(shards: Path) -> None:
    data = pickle.loads(pickle.dumps(StreamingDataModule(train=shards, batch_size=16)))
    module = TrainsOnly()
    pl.Trainer(max_epochs=1, **QUIET).fit(module, datamodule=data)
    assert sorted(set(module.seen)) == list(range(NUM_SAMPLES))
    data.close()


def test_a_missing_dataset_is_named(shards: Path) -> None:
    data = StreamingDataModule(train=str(shards), batch_size=16)
    trainer = pl.Trainer(max_epochs=1, **QUIET)
    with pytest.raises(ValueError, match="asked for val data, but StreamingDataModule got none: pass val="):
        trainer.validate(Recorder(), datamodule=data)
    with pytest.raises(ValueError, match="asked for train data, but StreamingDataModule got none: pass train="):
        trainer.fit(Recorder(), datamodule=StreamingDataModule(val=str(shards), batch_size=16))


def test_a_misspelt_argument_is_refused_with_the_one_that_was_meant(shards: Path) -> None:
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'shufle'\. Did you mean 'shuffle'\?"):
        StreamingDataModule(train={"remote": shards, "shufle": True}, batch_size=16)
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'qqq'\. Its arguments are remote, streams, "):
        StreamingDataModule(val={"remote": shards, "qqq": 1}, batch_size=16)
    with pytest.raises(TypeError, match=r"test= takes a StreamingDataset, a mapping .*; found int"):
        StreamingDataModule(test=3, batch_size=16)  # type: ignore[arg-type]


def test_a_mismatch_is_refused_or_taken_with_a_warning(shards: Path, tmp_path: Path) -> None:
    Run(shards, tmp_path, save_at=(5,), max_epochs=1)
    path = checkpoints(tmp_path)[0][1]
    other: dict[str, Any] = {"dataset": {"shuffle_seed": 7}, "max_epochs": 1}
    with pytest.raises(SettingsMismatch, match="on_mismatch='warn'"):
        Run(shards, tmp_path / "refused", path, **other)
    with pytest.warns(UserWarning, match="seed was 9176 and is 7 now"):
        run = Run(shards, tmp_path / "taken", path, data={"on_mismatch": "warn"}, **other)
    assert sorted(run.steps) == list(range(5, 11))
    with pytest.raises(SnapshotMismatch, match="167 samples in"):
        Run(write_shards(tmp_path / "other", 90), tmp_path / "refused", path, max_epochs=1)


def test_a_missing_checkpoint_is_an_error(shards: Path, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="there is none at"):
        read_position(tmp_path / "nope.ckpt")
    with pytest.raises(FileNotFoundError, match=r"has \.metadata or meta\.pt or trainer_state\.json in it; found none"):
        read_position(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"nope\.ckpt"):
        Run(shards, tmp_path, tmp_path / "nope.ckpt")
    torch.save({"state_dict": {}}, tmp_path / "bare.ckpt")
    with pytest.raises(StateError, match="holds the data's position"):
        read_position(tmp_path / "bare.ckpt")


@pytest.mark.parametrize("error", ["ImportError", pytest.param("AttributeError", marks=pytest.mark.nightly)])
def test_our_classes_are_there_beside_a_broken_second_lightning(tmp_path: Path, error: str) -> None:
    (tmp_path / "pytorch_lightning").mkdir()
    (tmp_path / "pytorch_lightning" / "__init__.py").write_text(f"raise {error}('too old')")
    code = """import lightning as L
from lightning_stream import StreamingDataModule
print(issubclass(StreamingDataModule, L.LightningDataModule))"""
    path = os.pathsep.join([str(tmp_path), *sys.path])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.stdout == "True\n", done.stderr


def test_a_position_is_read_from_a_sharded_folder_without_its_weights(shards: Path, tmp_path: Path) -> None:
    Run(shards, tmp_path, save_at=(5,), max_epochs=1)
    path = checkpoints(tmp_path)[0][1]
    content = torch.load(path, weights_only=True)
    (tmp_path / "sharded").mkdir()
    torch.save({k: v for k, v in content.items() if k != "state_dict"}, tmp_path / "sharded" / "meta.pt")
    assert read_position(tmp_path / "sharded") == read_position(path)
    torch.save(
        {**content, "state_dict": {"w": torch.zeros(1000)}}, tmp_path / "old.ckpt", _use_new_zipfile_serialization=False
    )
    assert read_position(tmp_path / "old.ckpt") == read_position(path)
    torch.save({**content, "state_dict": {"w": torch.zeros(4 << 20)}}, tmp_path / "large.ckpt")
    before = _bytes_read()
    assert read_position(tmp_path / "large.ckpt") == read_position(path)
    assert _bytes_read() - before < 1 << 20  # of 16 MB


def _bytes_read() -> int:
    """What this process has read from files so far, by calls; mapped pages are not counted."""
    return int(Path("/proc/self/io").read_text().split()[1])


class Names:
    """A worker_init_fn that notes the worker's number."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self, number: int) -> None:
        (self.folder / f"worker {number}").touch()


def test_the_module_passes_timeout_and_worker_init_fn_to_its_loaders(shards: Path, tmp_path: Path) -> None:
    data = StreamingDataModule(train=shards, batch_size=16, num_workers=2, timeout=120, worker_init_fn=Names(tmp_path))
    loader = data.train_dataloader()
    assert loader.timeout == 120
    list(loader)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["worker 0", "worker 1"]


def test_an_evaluation_without_workers_leaves_their_options_to_the_training(shards: Path) -> None:
    options: dict[str, Any] = {"prefetch_factor": 3, "persistent_workers": True, "multiprocessing_context": "fork"}
    data = StreamingDataModule(train=shards, val=shards, batch_size=16, num_workers=1, eval_num_workers=0, **options)
    loader = data.val_dataloader()
    assert sum(len(batch["id"]) for batch in loader) == NUM_SAMPLES
    assert (loader.num_workers, data.train_dataloader().prefetch_factor) == (0, 3)
