"""A plain loop, and torchdata's loader in its place."""

from __future__ import annotations

import json
from typing import Any

from hosts.run import NUM_STEPS, STEPS_PER_EPOCH, Run, trained


def loop(run: Run, loader: Any, save: Any) -> None:
    """Train to the end; save after some steps and after each epoch."""
    step = run.first_step
    while step < NUM_STEPS:
        before = step
        for batch in loader:
            run.log(step, trained(batch, loader))
            step += 1
            if step % STEPS_PER_EPOCH in (0, 3):
                save(f"step-{step}")
        if step % STEPS_PER_EPOCH == 0 and step > before:
            save(f"epoch-{step // STEPS_PER_EPOCH}")


def plain_loop(run: Run) -> None:
    """A loop that keeps the loader's state as JSON, as Databricks' `Checkpointable` does."""
    loader = run.loader()
    if run.checkpoint is not None:
        loader.load_state_dict(json.loads(run.checkpoint.read_text()))

    def save(name: str) -> None:
        if run.rank == 0:
            (run.saves / name).write_text(json.dumps(loader.state_dict()))

    loop(run, loader, save)


def torchdata(run: Run) -> None:
    """torchdata's loader over the dataset; each rank keeps its own state."""
    import torch
    from torchdata.stateful_dataloader import StatefulDataLoader

    loader = run.torch_loader(StatefulDataLoader)
    if run.checkpoint is not None:
        loader.load_state_dict(torch.load(f"{run.checkpoint}.0"))
    loop(run, loader, lambda name: torch.save(loader.state_dict(), run.saves / f"{name}.{run.rank}"))
