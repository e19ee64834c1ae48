"""One process of a distributed run: trains up to a step, and writes down what this rank's samples were.

python -m support.lightning_worker '{"shards": ..., "out": ..., "ckpt": ..., ...}'
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import Callback

from support.lightning_runs import Run, keep_all


class KillAt(Callback):
    """Ends the process as `kill -9` would, before a given optimizer step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == self.step:
            _write(trainer, self.out)
            os.kill(os.getpid(), 9)

    out: Path


def _write(trainer: Any, out: Path) -> None:
    steps = {step: sorted(ids) for step, ids in trainer.lightning_module.steps.items()}
    weights = torch.cat([p.detach().flatten() for p in trainer.lightning_module.parameters()]).tolist()
    validated = [[step, list(ids)] for step, ids in trainer.lightning_module.validations]
    content = {"steps": steps, "weights": weights, "validations": validated, "global_step": trainer.global_step}
    out.mkdir(parents=True, exist_ok=True)
    (out / f"rank{trainer.global_rank}of{trainer.world_size}.json").write_text(json.dumps(content))


def main() -> None:
    """Run what the argument describes."""
    options = json.loads(sys.argv[1])
    shards, out = Path(options.pop("shards")), Path(options.pop("out"))
    ckpt, every = options.pop("ckpt", None), options.pop("every", 1)
    callbacks: list[Callback] = [keep_all(out, every_n_train_steps=every)]
    if (kill := options.pop("kill_at", None)) is not None:
        killer = KillAt(kill)
        killer.out = out
        callbacks.append(killer)
    run = Run(shards, out, ckpt, callbacks=callbacks, **options)
    _write(run.trainer, out)


if __name__ == "__main__":
    main()
