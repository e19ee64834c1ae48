"""Composer's trainer in the three ways that it gets data."""

from __future__ import annotations

from typing import Any

import composer.algorithms  # noqa: F401  # the trainer loads it at its first use, which is slow
import torch
from composer import Callback, ComposerModel, Trainer
from composer.callbacks import CheckpointSaver

from hosts.run import EPOCHS, GLOBAL_BATCH, Run, trained
from lightning_stream import data_spec


class _Model(ComposerModel):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Linear(1, 1)

    def forward(self, batch: dict[str, Any]) -> Any:
        return self.net(batch["id"].float()[:, None])

    def loss(self, outputs: Any, batch: dict[str, Any]) -> Any:
        return outputs.square().mean()

    def get_metrics(self, is_train: bool) -> dict[str, Any]:
        return {}


class _Log(Callback):
    def __init__(self, run: Run) -> None:
        self.run = run

    def batch_start(self, state: Any, logger: Any) -> None:
        self.run.log(int(state.timestamp.batch), trained(state.batch, state.train_dataloader))


def _fit(run: Run, data: Any) -> None:
    model = _Model()
    saver = {"folder": str(run.saves), "overwrite": True}
    trainer = Trainer(
        model=model, train_dataloader=data, max_duration=f"{EPOCHS}ep", device="cpu", progress_bar=False,
        optimizers=torch.optim.SGD(model.parameters(), 1e-9), load_path=run.checkpoint and str(run.checkpoint),
        callbacks=[
            _Log(run),
            CheckpointSaver(filename="step-{batch}", save_interval="1ba", **saver),
            CheckpointSaver(filename="epoch-{epoch}", save_interval="1ep", **saver),
        ],
    )  # fmt: skip
    trainer.fit()
    trainer.close()


def spec(run: Run) -> None:
    _fit(run, data_spec(run.dataset(), global_batch_size=GLOBAL_BATCH))


def bare_loader(run: Run) -> None:
    _fit(run, run.loader())


def torch_loader(run: Run) -> None:
    _fit(run, run.torch_loader())
