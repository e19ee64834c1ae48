"""A function trains on Spark's workers, from one dataset, with the variables that its store needs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightning_stream import MDSWriter
from lightning_stream import spark as room


def test_the_variables_of_stores_are_carried_and_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATABRICKS_HOST", "https://here")
    monkeypatch.setenv("DATABRICKS_RUNTIME_VERSION", "15.2")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "me")
    monkeypatch.setenv("UNRELATED", "x")
    env = room.distributor_env({"DATABRICKS_TOKEN": "secret"})
    assert env["DATABRICKS_HOST"] == "https://here"
    assert env["AWS_ACCESS_KEY_ID"] == "me"
    assert env["DATABRICKS_TOKEN"] == "secret"
    assert not env.keys() & {"UNRELATED", "DATABRICKS_RUNTIME_VERSION", "PATH"}
    assert "secret" not in repr(room.with_env(print, {"DATABRICKS_TOKEN": "secret"}))


def test_devices_are_those_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(RuntimeError, match="WORLD_SIZE is not set"):
        room.lightning_trainer_kwargs()
    monkeypatch.setenv("WORLD_SIZE", "6")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    assert room.lightning_trainer_kwargs() == {"devices": 3, "num_nodes": 2}


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    rng = np.random.default_rng(1)
    x = rng.normal(size=(64, 4)).astype(np.float32)
    columns = {"x": "ndarray:float32:4", "y": "float32", "id": "int64"}
    with MDSWriter(out=tmp_path / "data", columns=columns, size_limit="1kb") as writer:
        writer.write_batch({"x": x, "y": x.sum(1), "id": np.arange(64)})
    return tmp_path / "data"


def make_native() -> Any:
    def train(place: str) -> Any:
        """Plain PyTorch: a process group, DDP, and a loader."""
        import os

        import torch
        from torch.nn.parallel import DistributedDataParallel

        from lightning_stream import StreamingDataLoader, StreamingDataset

        torch.distributed.init_process_group("gloo")
        model = DistributedDataParallel(torch.nn.Linear(4, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        seen = []
        for batch in StreamingDataLoader(StreamingDataset(remote=place, shuffle=True), batch_size=8):
            loss = torch.nn.functional.mse_loss(model(batch["x"])[:, 0], batch["y"])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            seen += batch["id"].tolist()
        gathered: list[Any] = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(gathered, seen)
        weights = model.module.weight.detach().flatten().tolist()
        return gathered, weights, os.environ.get("DATABRICKS_HOST")

    return train


def make_lightning() -> Any:
    def train(place: str) -> Any:
        """Lightning: the trainer's devices are those that Spark gave."""
        import torch
        from lightning.pytorch import LightningModule, Trainer

        from lightning_stream import StreamingDataModule
        from lightning_stream.spark import lightning_trainer_kwargs

        class Line(LightningModule):
            def __init__(self) -> None:
                super().__init__()
                self.line = torch.nn.Linear(4, 1)
                self.seen: list[int] = []

            def training_step(self, batch: Any) -> Any:
                self.seen += batch["id"].tolist()
                return torch.nn.functional.mse_loss(self.line(batch["x"])[:, 0], batch["y"])

            def configure_optimizers(self) -> Any:
                return torch.optim.SGD(self.parameters(), lr=0.1)

        model = Line()
        trainer = Trainer(
            accelerator="cpu",
            strategy="ddp",
            max_epochs=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            **lightning_trainer_kwargs(),
        )
        trainer.fit(model, datamodule=StreamingDataModule({"remote": place, "shuffle": True}, batch_size=8))
        gathered: list[Any] = [None] * trainer.world_size
        torch.distributed.all_gather_object(gathered, model.seen)
        return gathered, model.line.weight.detach().flatten().tolist(), None

    return train


@pytest.mark.distributed
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "local_mode", [pytest.param(True, marks=pytest.mark.nightly), False], ids=["local", "on workers"]
)
def test_native_ddp_trains_on_every_sample_once(
    spark: Any, dataset: Path, local_mode: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pyspark.ml.torch.distributor import TorchDistributor

    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    train = room.with_env(make_native(), {"DATABRICKS_HOST": "https://somewhere"})
    distributor = TorchDistributor(num_processes=2, local_mode=local_mode, use_gpu=False)
    seen, weights, host = distributor.run(train, str(dataset))
    assert sorted([*seen[0], *seen[1]]) == list(range(64))
    assert len(weights) == 4
    assert host == "https://somewhere"


@pytest.mark.distributed
@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("local_mode", [True, False], ids=["local", "on workers"])
def test_lightning_trains_on_every_sample_once(
    spark: Any, dataset: Path, local_mode: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pyspark.ml.torch.distributor import TorchDistributor

    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    distributor = TorchDistributor(num_processes=2, local_mode=local_mode, use_gpu=False)
    seen, weights, _ = distributor.run(make_lightning(), str(dataset))
    assert sorted([*seen[0], *seen[1]]) == list(range(64))
    assert len(weights) == 4
