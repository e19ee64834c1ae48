"""`train.py` trains on any map-style dataset, by its name, and continues exactly on other devices."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lightning", reason="the recipes need Lightning: uv sync")
pytest.importorskip("torchvision", reason="the recipes need torchvision: uv sync")

from support.launches import launch, train, under

from lightning_stream import MapDataset, verify_delivery

MINE = """
import lightning as L
import torch
from torch.utils.data import Dataset

class Squares(Dataset):
    def __init__(self, size=200):
        self.size = size
    def __len__(self):
        return self.size
    def __getitem__(self, index):
        x = torch.tensor([index / self.size])
        return {"x": x, "y": x**2}

class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(1, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
    def training_step(self, batch, batch_idx):
        return torch.nn.functional.mse_loss(self.layers(batch["x"]), batch["y"])
    def validation_step(self, batch, batch_idx):
        loss = self.training_step(batch, batch_idx)
        self.log("val/loss", loss, batch_size=len(batch["x"]), sync_dist=True)
    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)
"""
DATA = (
    "+data._target_=lightning_stream.StreamingDataModule", "+data.train.dataset._target_=mine.Squares",
    "+data.train.shuffle=true", "+data.train.seed=5", "+data.global_batch_size=16", "+model._target_=mine.Net",
    "hardware=cpu", "trainer.max_epochs=2",
)  # fmt: skip
VALIDATION = ("+data.val._target_=mine.Squares", "+data.val.size=50", "optimized_metric=val/loss")
LAUNCHERS = {"lightning": None, "torch": "torchrun", "composer": "composer"}


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the module of a user."""
    (tmp_path / "mine.py").write_text(MINE)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


@pytest.mark.distributed
@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("default::UserWarning", "default::FutureWarning", "default::DeprecationWarning")
@pytest.mark.parametrize("trainer", ["lightning", pytest.param("torch", marks=pytest.mark.slow), "composer"])
def test_a_run_on_a_dataset_continues_on_two_devices(trainer: str, run: Callable[..., Any], mine: Path) -> None:
    if trainer == "composer":
        pytest.importorskip("composer", reason="Composer is not installed: uv sync --no-dev --extra composer")
    settings = (*DATA, *VALIDATION, f"trainer={trainer}")
    whole = run("whole", *settings)
    record = f"+data.record_delivery={mine / 'record'}"
    run("mine", *settings, record, "trainer.max_steps=5")
    on_two = (f"paths.output={mine / 'mine'}", "ckpt_path=last", "hardware.devices=2")
    command = train(*settings, record, *on_two)
    launcher = LAUNCHERS[trainer]
    done = launch(mine, under(launcher, 2, command) if launcher else command, envs=[{"PYTHONPATH": _path(mine)}])
    assert done.code == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert "0 lost, 0 repeated" in done.stdout + done.stderr
    losses = [float(line.split()[1]) for line in done.stdout.splitlines() if line.startswith("val/loss")]
    assert losses == [pytest.approx(whole, rel=1e-3)]
    planned = MapDataset([0] * 200, shuffle=True, seed=5)
    assert "exactly the planned samples" in verify_delivery(mine / "record", planned).sentence


@pytest.mark.filterwarnings("default::UserWarning", "default::FutureWarning", "default::DeprecationWarning")
@pytest.mark.parametrize("trainer", ["lightning", "torch", "composer"])
def test_every_trainer_trains_all_epochs_with_the_datas_settings_and_after_a_change_of_the_batch_size(
    trainer: str, run: Callable[..., Any], mine: Path
) -> None:
    if trainer == "composer":
        pytest.importorskip("composer", reason="Composer is not installed: uv sync --no-dev --extra composer")
    settings = (*DATA, f"trainer={trainer}", "+data.tail=drop", f"+data.record_delivery={mine / 'record'}")
    planned = MapDataset([0] * 200, shuffle=True, seed=5)
    run("mine", *settings, "trainer.max_steps=5")
    run("mine", *settings, "data.global_batch_size=32", "ckpt_path=last")
    assert verify_delivery(mine / "record", planned).num_steps == 5 + 3 + 6


@pytest.mark.filterwarnings("default::UserWarning", "default::FutureWarning", "default::DeprecationWarning")
@pytest.mark.parametrize("trainer", ["lightning", "torch", "composer"])
def test_a_run_has_no_validation_where_there_is_no_data_for_it(
    trainer: str, run: Callable[..., Any], mine: Path
) -> None:
    if trainer == "composer":
        pytest.importorskip("composer", reason="Composer is not installed: uv sync --no-dev --extra composer")
    run("mine", *DATA, f"trainer={trainer}", "trainer.max_epochs=1")
    assert (mine / "mine" / "checkpoints" / "last.ckpt").exists()


def _path(folder: Path) -> str:
    root = Path(__file__).resolve().parents[2]
    return f"{root}:{root / 'tests'}:{folder}"
