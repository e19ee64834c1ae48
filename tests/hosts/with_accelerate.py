"""Accelerate, which deals batches to processes itself, and the trainer of Transformers, which is built on it."""

from __future__ import annotations

from typing import Any

import torch
from accelerate import Accelerator

from hosts.run import EPOCHS, GLOBAL_BATCH, NUM_STEPS, STEPS_PER_EPOCH, Run, trained


def _accelerate(run: Run, loader: Any) -> None:
    host = Accelerator(cpu=True)
    net = torch.nn.Linear(1, 1)
    net, optimizer, loader = host.prepare(net, torch.optim.SGD(net.parameters(), 1e-9), loader)
    if run.checkpoint is not None:
        host.load_state(str(run.checkpoint))
    step = run.first_step
    while step < NUM_STEPS:
        for batch in loader:
            run.log(step, trained(batch, loader))
            host.backward(net(batch["id"].float()[:, None]).square().mean())
            optimizer.step()
            step += 1
            if step % STEPS_PER_EPOCH in (0, 3):
                host.save_state(str(run.saves / f"step-{step}"))
        host.save_state(str(run.saves / f"epoch-{step // STEPS_PER_EPOCH}"))


def bare_loader(run: Run) -> None:
    _accelerate(run, run.loader())


def torch_loader(run: Run) -> None:
    _accelerate(run, run.torch_loader())


class _Model(torch.nn.Module):
    def __init__(self, run: Run) -> None:
        super().__init__()
        self.run, self.net, self.trainer = run, torch.nn.Linear(1, 1), None

    def forward(self, id: Any) -> dict[str, Any]:  # noqa: A002  # the column's name
        trainer: Any = self.trainer
        loader = trainer.callback_handler.train_dataloader
        self.run.log(trainer.state.global_step, trained({"id": id}, loader))
        return {"loss": self.net(id.float()[:, None]).square().mean()}


def _transformers(run: Run, loader: Any = None, *callbacks: Any, **options: Any) -> None:
    from transformers import Trainer, TrainingArguments

    class Host(Trainer):
        def get_train_dataloader(self) -> Any:
            return loader or super().get_train_dataloader()

    arguments = TrainingArguments(
        output_dir=str(run.saves), num_train_epochs=EPOCHS, per_device_train_batch_size=GLOBAL_BATCH // run.world,
        save_steps=1, use_cpu=True, report_to=[], disable_tqdm=True, remove_unused_columns=False, **options,
    )  # fmt: skip
    model = _Model(run)
    dataset = run.dataset(batch_size=GLOBAL_BATCH // run.world)
    trainer = Host(model, arguments, train_dataset=dataset, callbacks=list(callbacks))
    vars(model)["trainer"] = trainer
    path = run.checkpoint and run.checkpoint.with_name(f"checkpoint-{run.first_step}")
    trainer.train(resume_from_checkpoint=path and str(path))


def transformers_dataset(run: Run) -> None:
    _transformers(run)


def transformers_loader(run: Run) -> None:
    _transformers(run, run.loader())
