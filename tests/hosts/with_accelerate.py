"""Accelerate, which deals batches to processes itself unless the loader has done it."""

from __future__ import annotations

from typing import Any

import torch
from accelerate import Accelerator

from hosts.run import NUM_STEPS, STEPS_PER_EPOCH, Run, trained


def _train(run: Run, loader: Any, *, replays: bool) -> None:
    host = Accelerator(cpu=True)
    net = torch.nn.Linear(1, 1)
    net, optimizer, loader = host.prepare(net, torch.optim.SGD(net.parameters(), 1e-9), loader)
    if run.checkpoint is not None:
        host.load_state(str(run.checkpoint))
    epoch, skipped = divmod(run.first_step, STEPS_PER_EPOCH)
    step = run.first_step
    while step < NUM_STEPS:
        if replays:  # as Accelerate's own examples do
            loader.set_epoch(epoch)
        for batch in host.skip_first_batches(loader, skipped) if replays and skipped else loader:
            run.log(step, trained(batch, loader))
            host.backward(net(batch["id"].float()[:, None]).square().mean())
            optimizer.step()
            step += 1
            if step % STEPS_PER_EPOCH in (0, 3):
                host.save_state(str(run.saves / f"step-{step}"))
        epoch, skipped = epoch + 1, 0
        host.save_state(str(run.saves / f"epoch-{epoch}"))


def bare_loader(run: Run) -> None:
    _train(run, run.loader(), replays=False)


def torch_loader(run: Run) -> None:
    _train(run, run.torch_loader(), replays=True)
