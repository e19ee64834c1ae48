"""A small run under Lightning that writes down which samples fed which optimizer step."""

from __future__ import annotations

import logging
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pl = pytest.importorskip("lightning.pytorch")

import numpy as np  # noqa: E402
from lightning.pytorch.callbacks import ModelCheckpoint  # noqa: E402

from lightning_stream import MDSWriter, StreamingDataModule  # noqa: E402

NUM_SAMPLES, GLOBAL_BATCH, EPOCHS = 167, 16, 3
Steps = dict[int, list[int]]

for name in ("lightning.pytorch.utilities.rank_zero", "lightning.pytorch.accelerators.cuda"):
    logging.getLogger(name).setLevel(logging.ERROR)


def write_shards(folder: Path, first: int = 0) -> Path:
    """167 samples in shards of about a dozen, numbered from `first`."""
    columns, lengths = {"id": "int", "x": "ndarray:float32:4"}, {"tokens": lambda sample: 1 + sample["id"] ** 2 % 97}
    with MDSWriter(out=str(folder), columns=columns, size_limit=1000, lengths=lengths) as writer:
        for number in range(first, first + NUM_SAMPLES):
            writer.write({"id": number, "x": np.full(4, number / NUM_SAMPLES, np.float32)})
    return folder


class Recorder(pl.LightningModule):
    """A small net that notes the samples of every optimizer step, filler aside, and every validation."""

    def __init__(self, dropout: float = 0.0, manual: bool = False, reads_stepping_batches: bool = False) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(dropout), torch.nn.Linear(8, 1))
        self.steps: Steps = defaultdict(list)
        self.validations: list[tuple[int, tuple[int, ...]]] = []
        self.epoch_of_step: dict[int, int] = {}
        self._validating: list[int] = []
        self.automatic_optimization = not manual
        self.reads_stepping_batches = reads_stepping_batches

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Any:
        filler = self.trainer.train_dataloader.last_batch.filler
        step = self.trainer.global_step
        self.steps[step] += batch["id"][~torch.from_numpy(filler)].tolist()
        self.epoch_of_step[step] = self.trainer.current_epoch
        loss = self.net(batch["x"]).square().mean()
        if not self.automatic_optimization:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        return loss

    def validation_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        self._validating += batch["id"].tolist()

    def on_validation_epoch_end(self) -> None:
        if not self.trainer.sanity_checking:
            self.validations.append((self.trainer.global_step, tuple(sorted(self._validating))))
        self._validating = []

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.01)
        if not self.reads_stepping_batches:
            return optimizer
        total = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.01, total_steps=total)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Run:
    """One fit: its module afterwards, the steps it took, and the checkpoints it left."""

    def __init__(self, shards: Path, folder: Path, ckpt_path: Path | None = None, **options: Any) -> None:
        module_options = options.pop("module", {})
        data_options = {"global_batch_size": GLOBAL_BATCH, **options.pop("data", {})}
        dataset_options = options.pop("dataset", {})
        callbacks = options.pop("callbacks", [])
        if every := options.pop("every_n_train_steps", None):
            callbacks = [*callbacks, keep_all(folder, every_n_train_steps=every)]
        torch.manual_seed(0)
        self.module = options.pop("recorder", Recorder)(**module_options)
        self.data = options.pop("data_class", StreamingDataModule)(
            train={"remote": shards, "shuffle": True, **dataset_options},
            val={"remote": shards} if options.pop("val", True) else None,
            eval_batch_size=32,
            **data_options,
        )
        raises = options.pop("raises", None)
        self.trainer = pl.Trainer(
            **{
                "max_epochs": EPOCHS,
                "accelerator": "cpu",
                "devices": 1,
                "logger": False,
                "enable_progress_bar": False,
                "enable_model_summary": False,
                "enable_checkpointing": bool(callbacks),
                "callbacks": callbacks,
                "default_root_dir": folder,
                "num_sanity_val_steps": 0,
                **options,
            }
        )
        self.error: BaseException | None = None
        try:
            self.fit(ckpt_path)
        except BaseException as error:  # whatever stops a run is what the test asked for
            if raises is None or not isinstance(error, raises):
                raise
            self.error = error

    def fit(self, ckpt_path: Path | None) -> None:
        """Train, as a user would write it."""
        self.trainer.fit(self.module, datamodule=self.data, ckpt_path=ckpt_path)

    @property
    def steps(self) -> Steps:
        """Optimizer step -> sorted sample ids that fed it."""
        return {step: sorted(ids) for step, ids in self.module.steps.items()}

    @property
    def weights(self) -> list[float]:
        return torch.cat([p.detach().flatten() for p in self.module.parameters()]).tolist()


def keep_all(folder: Path, **when: Any) -> ModelCheckpoint:
    """A ModelCheckpoint that keeps every checkpoint it writes, named by step."""
    return ModelCheckpoint(
        dirpath=folder / "ckpt", filename="{step}-{epoch}", save_top_k=-1, auto_insert_metric_name=False, **when
    )


def checkpoints(folder: Path) -> list[tuple[int, Path]]:
    """(optimizer step, file) of what `keep_all` wrote, in order."""
    found = []
    for path in (folder / "ckpt").glob("*.ckpt"):
        file = path / "meta.pt" if path.is_dir() else path  # sharded ones are folders
        found.append((torch.load(file, weights_only=True)["global_step"], path))
    return sorted(found, key=lambda pair: (pair[0], pair[1].name))


def expect_exact(whole: Run, resumed: Run, step: int) -> None:
    """The resumed run fed every step from `step` on with what the uninterrupted one did."""
    expected = {s: ids for s, ids in whole.steps.items() if s >= step}
    assert resumed.steps == expected
    assert {s: e for s, e in whole.module.epoch_of_step.items() if s >= step} == resumed.module.epoch_of_step
