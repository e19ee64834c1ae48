"""`RunMonitor` measures a training run's throughput and waiting time; `SampleLog` lists the samples of each step."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from lightning_stream.loader import StreamingDataLoader
from lightning_stream.trainers.lightning.package import Callback


def streaming_loader(trainer: Any, needed_by: str) -> StreamingDataLoader:
    """The loader that a trainer trains on.

    Raises:
        TypeError: It is not a `StreamingDataLoader`.
    """
    loader = trainer.train_dataloader
    if not isinstance(loader, StreamingDataLoader):
        raise TypeError(f"{needed_by} reads the batches of a StreamingDataLoader; found {type(loader).__name__}.")
    return loader


class RunMonitor(Callback):
    """Counts samples, steps and seconds of a `fit`, and logs throughput and waiting time.

    Every attribute is about this process and the latest `fit`; padding is not counted.

    Args:
        log: Whether to log ``data/samples_per_s`` and ``data/waited_ms`` (per batch) every
            ``Trainer(log_every_n_steps=...)`` steps, and ``data/tokens_per_s`` where documents are packed into rows;
            all are means since they were logged last.

    Attributes:
        num_samples: Samples trained on; rows, where documents are packed into these.
        num_tokens: Tokens of these rows; 0 without packing.
        num_steps: Optimizer steps.
        training_s: Seconds from the start of training to the end of the last batch, without validation.
        validation_s: Seconds of validation; Lightning's check before training is not counted.
        waited_s: Seconds that training waited for its next batch.
        longest_wait_s: The longest of these waits, usually that for the first batch.

    Example::

        monitor = RunMonitor()
        Trainer(callbacks=[monitor]).fit(model, StreamingDataModule(train="s3://bucket/train", batch_size=32))
        print(f"{monitor.samples_per_s:.0f} samples/s, waited {monitor.waited_s:.1f} s for data")
    """

    def __init__(self, *, log: bool = True) -> None:
        self.log = log
        self.num_samples = self.num_tokens = self.num_steps = 0
        self.training_s = self.validation_s = self.waited_s = self.longest_wait_s = 0.0
        self._began = self._validation_began = self._seen_wait_s = 0.0
        self._first_step = 0
        self._loader: StreamingDataLoader | None = None
        self._logged = (0, 0, 0, 0.0, 0.0)  # samples, tokens, batches, training_s and waited_s when logged last
        self._num_batches = 0

    @property
    def samples_per_s(self) -> float:
        """Samples trained on in a second of training, waiting included; 0 before the first batch."""
        return self.num_samples / self.training_s if self.training_s else 0.0

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Start all counts at zero."""
        RunMonitor.__init__(self, log=self.log)
        self._loader = streaming_loader(trainer, "RunMonitor")
        self._seen_wait_s = self._loader.waited_s
        self._first_step = trainer.global_step
        self._began = time.perf_counter()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Count a batch and the wait before it."""
        loader = streaming_loader(trainer, "RunMonitor")
        if loader is not self._loader:  # Lightning made another one for this epoch
            self._loader, self._seen_wait_s = loader, 0.0
        waited_s = loader.waited_s - self._seen_wait_s
        self._seen_wait_s = loader.waited_s
        self.waited_s += waited_s
        self.longest_wait_s = max(self.longest_wait_s, waited_s)
        if loader.last_batch is not None:
            self.num_samples += loader.last_batch.num_samples
            self.num_tokens += loader.last_batch.num_tokens
        self._num_batches += 1
        has_stepped = trainer.global_step > self._first_step + self.num_steps
        self.num_steps = trainer.global_step - self._first_step
        self.training_s = time.perf_counter() - self._began - self.validation_s
        if self.log and has_stepped and trainer.log_every_n_steps and not self.num_steps % trainer.log_every_n_steps:
            self._log(pl_module)

    def _log(self, pl_module: Any) -> None:
        now = (self.num_samples, self.num_tokens, self._num_batches, self.training_s, self.waited_s)
        samples, tokens, batches, training_s, waited_s = (new - old for new, old in zip(now, self._logged, strict=True))
        self._logged = now
        values = {"data/samples_per_s": samples / training_s, "data/waited_ms": 1000 * waited_s / batches}
        if self.num_tokens:
            values["data/tokens_per_s"] = tokens / training_s
        pl_module.log_dict(values, on_step=True, on_epoch=False, batch_size=1)

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """Note when a validation starts."""
        self._validation_began = time.perf_counter()

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Count the seconds of a validation."""
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            self.validation_s += time.perf_counter() - self._validation_began


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
        self._step_before, self._is_batch_open = 0, False

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Drop the lines of steps after the checkpoint that the run resumed from."""
        self._path = self._folder / f"rank-{trainer.global_rank}.jsonl"
        self._folder.mkdir(parents=True, exist_ok=True)
        lines = self._path.read_text().splitlines() if self._path.exists() else []
        kept = [line for line in lines if line.endswith("}") and json.loads(line)["step"] <= trainer.global_step]
        draft = self._path.with_suffix(".draft")
        draft.write_text("".join(f"{line}\n" for line in kept))
        draft.replace(self._path)
        self._ids, self._is_batch_open = [], False

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Remember the step that this batch is part of."""
        self._step_before, self._is_batch_open = trainer.global_step, True

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Add the batch's ids, and write the line if its optimizer step is complete."""
        self._note(trainer)

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Write the line of a step whose batch has not ended: an exception may save a checkpoint in between."""
        if trainer.global_step > self._step_before:
            self._note(trainer)

    def _note(self, trainer: Any) -> None:
        if not self._is_batch_open:
            return
        self._is_batch_open = False
        batch = streaming_loader(trainer, "SampleLog").last_batch
        assert batch is not None  # the trainer trains on it
        if batch.num_samples:
            counted = batch.without_padding()
            self._ids += (counted.ids if counted.rows is None else counted.rows.ids).tolist()
        if trainer.global_step > self._step_before:
            line = {"step": trainer.global_step, "epoch": batch.epoch, "ids": self._ids}
            with self._path.open("a") as file:
                file.write(json.dumps(line) + "\n")
            self._ids = []
