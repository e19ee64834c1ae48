"""`SampleLog` lists the samples of each step."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from lightning_stream.order.micro_batches import MicroBatch
from lightning_stream.trainers.lightning.package import Callback
from lightning_stream.trainers.run import streaming_loader
from lightning_stream.trainers.tracker import PositionTracker


class SampleLog(Callback):
    """Writes the sample ids of each optimizer step into ``rank-<n>.jsonl``, one JSON line per step.

    A resumed run drops the lines of steps that its checkpoint does not contain, and appends to the others. So the file
    lists each sample as often as the weights have seen it; padding is not listed. A run from the start replaces it.

    Args:
        dirpath: Folder of the files, one per rank. Each run needs its own.

    Example::

        Trainer(callbacks=[SampleLog("runs/a/samples")])
        # runs/a/samples/rank-0.jsonl: {"step": 1, "epoch": 0, "ids": [17, 4, 92, 33]}
    """

    def __init__(self, dirpath: str | os.PathLike[str]) -> None:
        self._folder = Path(dirpath)
        self._path = self._folder / "rank-0.jsonl"
        self._ids: list[int] = []  # of the micro-batches since the last optimizer step
        self._epoch = 0
        self._begun = self._written = -1  # the step whose line is being written, and that of the last one

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Drop the lines of steps after the checkpoint that the run resumed from."""
        rank = trainer.global_rank
        self._path = self._folder / f"rank-{rank}.jsonl"
        self._folder.mkdir(parents=True, exist_ok=True)
        self._path.touch()
        for path in self._folder.glob("rank-*.jsonl"):
            logged_by = int(path.stem.removeprefix("rank-"))
            # A run that continues on fewer ranks has files without a rank; every rank that sees one shortens it.
            if logged_by == rank or logged_by >= trainer.world_size:
                _drop_after(path, trainer.global_step, path.with_suffix(f".draft-{rank}"))
        self._ids = []
        self._begun = self._written = -1
        run = streaming_loader(trainer.train_dataloader, "SampleLog").cursor.driver
        assert isinstance(run, PositionTracker)  # of the StreamingCallback, which comes first
        run.records.append(self)

    def take(self, batch: MicroBatch) -> None:
        """Add the ids of a micro-batch that is trained on."""
        self._epoch = batch.epoch
        if batch.num_samples:
            self._ids += batch.without_padding().sample_ids.tolist()

    def commit(self, step: int) -> None:
        """Write the line of a step, once."""
        if step == self._written and not self._ids:
            return
        if step == self._begun:  # Ctrl-C came behind that: it may be there
            _drop_after(self._path, step - 1, self._path.with_suffix(".draft"))
        self._begun = step
        line = {"step": step, "epoch": self._epoch, "ids": self._ids}
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")
        self._written = step
        self._begun = -1
        self._ids = []

    def drop(self) -> None:
        """Forget what no step will use up."""
        self._ids = []

    def close(self) -> None:
        """Each line is written whole."""


def _drop_after(path: Path, step: int, draft: Path) -> None:
    """Keep the lines of the steps up to this one."""
    lines = path.read_text().splitlines()
    trained = [line for line in lines if line.endswith("}") and json.loads(line)["step"] <= step]
    draft.write_text("".join(f"{line}\n" for line in trained))
    draft.replace(path)
