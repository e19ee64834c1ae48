"""The training script of docs/multi_node.md: each rank notes the samples of its steps, and waits for another world.

It is imported, or started by torchrun, where the page's `train_ddp.py` can be imported.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
import train_ddp

from .elastic_notes import STEPS, WAITS


class Notes:
    """The file of one rank in one start of the workers."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.step, self.path = 0, folder

    def begin(self, step: int) -> int:
        """Choose a file after the step of the checkpoint is known."""
        names: list[str] = [path.name for path in self.folder.glob("*.jsonl")]
        starts = [1 + max((int(name.split("-")[0]) for name in names), default=0)]
        dist.broadcast_object_list(starts)
        name = f"{starts[0]}-from-{step}-of-{dist.get_world_size()}-rank-{dist.get_rank()}.jsonl"
        self.step, self.path = step, self.folder / name
        self.path.touch()
        return step

    def add(self, samples: list[int]) -> None:
        """Note what a step trained on; then wait, if this world does here."""
        with self.path.open("a") as lines:
            lines.write(f"{json.dumps([self.step, samples])}\n")
        self.step += 1
        while self.step >= WAITS.get(dist.get_world_size(), STEPS + 1):
            dist.barrier()  # fails where another worker was killed
            time.sleep(0.05)


def train(num_steps: int) -> None:
    """Train to the end."""
    notes = Notes(train_ddp.FOLDER / "notes")
    restore, train_step = train_ddp.restore, train_ddp.train_step

    def noted_step(model: Any, optimizer: Any, batch: Mapping[str, Any]) -> None:
        train_step(model, optimizer, batch)
        notes.add(batch["x"][:, 0].int().tolist())

    train_ddp.restore = lambda *parts: notes.begin(restore(*parts))
    train_ddp.train_step = noted_step
    train_ddp.train(num_steps)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    train(STEPS)
    dist.destroy_process_group()
