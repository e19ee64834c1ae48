"""The trainer of Transformers, which is built on Accelerate."""

from __future__ import annotations

from typing import Any

import torch
from transformers import Trainer, TrainingArguments

from hosts.run import EPOCHS, GLOBAL_BATCH, Run, trained
from lightning_stream.trainers.transformers import StreamingTrainerCallback


class _Model(torch.nn.Module):
    def __init__(self, run: Run) -> None:
        super().__init__()
        self.run, self.net, self.trainer = run, torch.nn.Linear(1, 1), None

    def forward(self, id: Any) -> dict[str, Any]:  # noqa: A002  # the column's name
        trainer: Any = self.trainer
        loader = trainer.callback_handler.train_dataloader
        self.run.log(trainer.state.global_step, trained({"id": id}, loader))
        return {"loss": self.net(id.float()[:, None]).square().mean()}


def _train(run: Run, loader: Any = None, *callbacks: Any, **options: Any) -> None:
    class Host(Trainer):
        def get_train_dataloader(self) -> Any:
            return loader or super().get_train_dataloader()

    arguments = TrainingArguments(
        output_dir=str(run.saves), num_train_epochs=EPOCHS, per_device_train_batch_size=GLOBAL_BATCH // run.world,
        save_steps=1, use_cpu=True, report_to=[], disable_tqdm=True, remove_unused_columns=False, **options,
    )  # fmt: skip
    model = _Model(run)
    data = run.dataset(batch_size=GLOBAL_BATCH // run.world)
    trainer = Host(model, arguments, train_dataset=data, callbacks=list(callbacks))
    vars(model)["trainer"] = trainer
    path = run.checkpoint and run.checkpoint.with_name(f"checkpoint-{run.first_step}")
    trainer.train(resume_from_checkpoint=path and str(path))


def dataset(run: Run) -> None:
    _train(run)


def bare_loader(run: Run) -> None:
    _train(run, run.loader(), StreamingTrainerCallback())
