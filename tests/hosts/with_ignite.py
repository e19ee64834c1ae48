"""PyTorch Ignite, whose engine keeps its progress, and the loader its position."""

from __future__ import annotations

import json
from typing import Any

from ignite.engine import Engine, Events

from hosts.run import EPOCHS, STEPS_PER_EPOCH, Run, trained


def bare_loader(run: Run) -> None:
    """Both states are saved together."""
    loader = run.loader()
    engine = Engine(lambda engine, batch: run.log(engine.state.iteration - 1, trained(batch, loader)))
    if run.checkpoint is not None:
        states = json.loads(run.checkpoint.read_text())
        engine.load_state_dict(states["engine"])
        loader.load_state_dict(states["loader"])

    def save(name: str) -> None:
        if run.rank == 0:
            states = {"engine": dict(engine.state_dict()), "loader": loader.state_dict()}
            (run.saves / name).write_text(json.dumps(states))

    @engine.on(Events.ITERATION_COMPLETED)
    def save_step(engine: Any) -> None:
        if engine.state.iteration % STEPS_PER_EPOCH in (0, 3):
            save(f"step-{engine.state.iteration}")

    @engine.on(Events.EPOCH_COMPLETED)
    def save_epoch(engine: Any) -> None:
        save(f"epoch-{engine.state.epoch}")

    engine.run(loader, max_epochs=EPOCHS)
