"""The log of a plain loop: one JSON line a step, the samples each step was made of, and a progress bar."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from lightning_stream.order.micro_batches import MicroBatch
from lightning_stream.recipes.torch_processes import Processes

_LOSS_EVERY = 10  # steps; in between the loss stays on its device


class StepsLog:
    """Writes ``log.jsonl``; a run that resumes takes back the lines of steps that its checkpoint does not know.

    Args:
        folder: Of the log.
        ids_folder: Of the files ``rank-<n>.jsonl`` that list samples, as `TrainedIds` writes them; None for none.
        processes: The first of them logs; each lists its own samples.
    """

    def __init__(self, folder: Path, ids_folder: Path | None, processes: Processes) -> None:
        self._path = folder / "log.jsonl"
        self._ids_path = None if ids_folder is None else ids_folder / f"rank-{processes.world.rank}.jsonl"
        self._processes = processes
        self._ids: list[int] = []
        self._epoch = 0
        self._bar: Any = None

    def begin(self, step: int) -> None:
        """Drop what came after this step."""
        for path in (self._path if self._processes.is_first else None, self._ids_path):
            if path is not None:
                path.parent.mkdir(parents=True, exist_ok=True)
                lines = path.read_text().splitlines() if path.exists() else []
                kept = [line for line in lines if line.endswith("}") and json.loads(line)["step"] <= step]
                path.write_text("".join(f"{line}\n" for line in kept))

    def add(self, info: MicroBatch) -> None:
        """A micro-batch was trained on."""
        if self._ids_path is not None:
            self._ids += info.ids[~info.filler].tolist()

    def end_step(self, step: int, epoch: int, loss: Tensor, learning_rate: float) -> None:
        """An optimizer step is made. All processes call this with their part of its loss."""
        if self._ids_path is not None:
            _append(self._ids_path, {"step": step, "epoch": epoch, "ids": self._ids})
            self._ids = []
        if step % _LOSS_EVERY and step > 1:
            return
        value = float(self._processes.summed(loss).item())
        if self._bar is not None:
            self._bar.set_postfix(loss=f"{value:.3f}", refresh=False)
        if self._processes.is_first:
            _append(self._path, {"step": step, "epoch": epoch, "train/loss": value, "learning_rate": learning_rate})

    def measured(self, epoch: int, step: int, values: Mapping[str, float]) -> None:
        """An epoch is over and validated."""
        if self._processes.is_first:
            _append(self._path, {"step": step, "epoch": epoch, **{f"epoch/{k}": v for k, v in values.items()}})

    def bar(self, title: str, total: int, done: int) -> Any:
        """A progress bar over an epoch's micro-batches; None on all processes but the first."""
        if not self._processes.is_first:
            return None
        from tqdm import tqdm  # type: ignore[import-untyped]

        self._bar = tqdm(total=total, initial=done, desc=title, unit="batch", file=sys.stderr)
        return self._bar

    def close(self) -> None:
        """The run is over, or broke off."""
        if self._bar is not None:
            self._bar.close()


def _append(path: Path, line: Mapping[str, Any]) -> None:
    with path.open("a") as file:
        file.write(json.dumps(line) + "\n")
