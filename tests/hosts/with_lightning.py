"""Lightning's trainer in the three ways that it gets data, and Fabric."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import lightning as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from hosts.run import EPOCHS, GLOBAL_BATCH, NUM_STEPS, STEPS_PER_EPOCH, Run, trained
from lightning_stream import StreamingCallback, StreamingDataModule

for name in ("lightning.pytorch.utilities.rank_zero", "lightning.fabric.utilities.rank_zero"):
    logging.getLogger(name).setLevel(logging.ERROR)


class _Module(pl.LightningModule):
    def __init__(self, run: Run) -> None:
        super().__init__()
        self.run, self.net = run, torch.nn.Linear(1, 1)

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Any:
        self.run.log(self.trainer.global_step, trained(batch, self.trainer.train_dataloader))
        return self.net(batch["id"].float()[:, None]).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 1e-9)


def _fit(run: Run, data: Any, *callbacks: Any) -> None:
    keep: dict[str, Any] = {"dirpath": run.saves, "save_top_k": -1, "auto_insert_metric_name": False}
    trainer = pl.Trainer(
        max_epochs=EPOCHS, accelerator="cpu", devices=run.world, strategy="ddp" if run.world > 1 else "auto",
        logger=False, enable_progress_bar=False, enable_model_summary=False, default_root_dir=run.folder,
        callbacks=[
            *callbacks,
            ModelCheckpoint(filename="step-{step}", every_n_train_steps=1, **keep),
            ModelCheckpoint(filename="epoch-{epoch}", every_n_epochs=1, save_on_train_epoch_end=True, **keep),
        ],
    )  # fmt: skip
    trainer.fit(_Module(run), data, ckpt_path=_checkpoint(run))


def _checkpoint(run: Run) -> Path | None:
    if run.checkpoint is None:
        return None
    # Lightning counts the epoch that ends, the stops count the epochs that are done.
    name = "epoch-0" if run.stop == "epoch end" else run.checkpoint.name
    return run.checkpoint.with_name(f"{name}.ckpt")


def data_module(run: Run) -> None:
    _fit(run, StreamingDataModule(train=run.dataset(), global_batch_size=GLOBAL_BATCH))


def bare_loader(run: Run) -> None:
    _fit(run, run.loader())


def callback(run: Run) -> None:
    _fit(run, run.loader(), StreamingCallback())


def fabric(run: Run) -> None:
    """Fabric hides the loader's methods behind its own class: the state is that of the loader itself."""
    strategy = "ddp" if run.world > 1 else "auto"
    host = pl.Fabric(accelerator="cpu", devices=run.world, strategy=strategy)
    host.launch()
    loader = run.loader()
    batches = host.setup_dataloaders(loader)
    if run.checkpoint is not None:
        host.load(run.checkpoint, {"loader": loader})
    step = run.first_step
    while step < NUM_STEPS:
        for batch in batches:
            run.log(step, trained(batch, loader))
            step += 1
            host.save(run.saves / f"step-{step}", {"loader": loader})
        host.save(run.saves / f"epoch-{step // STEPS_PER_EPOCH}", {"loader": loader})
