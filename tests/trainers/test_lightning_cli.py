"""`LightningCLI` makes a `StreamingDataModule` from a file, and a run that it continues is exact."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lightning.pytorch")
pytest.importorskip("jsonargparse", reason="LightningCLI needs it: uv sync --group dev")

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.cli import LightningCLI
from support.lightning_runs import NUM_SAMPLES, QUIET

from lightning_stream import StreamingDataModule

CONFIG = """
data:
  train:
    class_path: lightning_stream.StreamingDataset
    init_args:
      remote: {shards}
      shuffle: true
      cache_limit: 1gb
      transform: {module}.negated
  val: {shards}
  global_batch_size: 16
  num_workers: 1
"""
trained: list[int] = []


def negated(sample: dict[str, Any]) -> dict[str, Any]:
    return {**sample, "id": -sample["id"]}


class Net(pl.LightningModule):
    def __init__(self, rate: float = 0.1) -> None:
        super().__init__()
        self.rate = rate
        self.net = torch.nn.Linear(4, 1)

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Any:
        trained.extend((-batch["id"]).tolist())
        return self.net(batch["x"]).square().mean()

    def validation_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        self.log("loss", self.net(batch["x"]).square().mean())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), self.rate)


def test_a_run_from_a_file_continues_in_mid_epoch(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(CONFIG.format(shards=shards, module=__name__))
    saves = tmp_path / "saves"
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")  # of what Lightning calls

    def fit(**options: Any) -> None:
        save = ModelCheckpoint(saves, save_last=True)
        settings = {**QUIET, "enable_checkpointing": True, "callbacks": save, **options}
        arguments = ["cli.py", "fit", f"--config={config}"]
        if saves.exists():
            arguments.append(f"--ckpt_path={saves / 'last.ckpt'}")
        monkeypatch.setattr("sys.argv", arguments)
        LightningCLI(
            Net,
            StreamingDataModule,
            save_config_callback=None,
            trainer_defaults=settings,
            seed_everything_default=False,
        )

    trained.clear()
    fit(max_steps=3)
    assert len(trained) == 48
    fit(max_epochs=2)
    assert Counter(trained[:NUM_SAMPLES]) == Counter(range(NUM_SAMPLES))
    assert set(trained[-NUM_SAMPLES:]) == set(range(NUM_SAMPLES))
