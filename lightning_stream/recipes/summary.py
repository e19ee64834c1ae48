"""What a run says when it is over: where things lie, how fast it was, what it learnt, and a picture of it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from lightning_stream.recipes.callbacks import DataWait, RunClock
from lightning_stream.recipes.places import checkpoints, last_checkpoint
from lightning_stream.recipes.task import TaskData, TaskModel

_STAGES = {"train": "train", "val": "validation"}


@dataclass(frozen=True)
class RunSummary:
    """The figures of one launch, and the measures of the whole run.

    Attributes:
        places: What lies where, by name.
        notes: Sentences to read first.
        num_samples, num_steps: Trained on since this launch, by this process and in all.
        samples_per_s: Over all processes, validation left out.
        training_s, validating_s: Of this launch.
        waiting_s: Of the training's seconds, those spent waiting for a batch; None where a profiler took the place.
        history: The measures by epoch, under names such as ``val/accuracy``.
        shown: Which of them a table lists.
    """

    places: Mapping[str, str]
    notes: tuple[str, ...]
    num_samples: int
    num_steps: int
    samples_per_s: float
    training_s: float
    validating_s: float
    waiting_s: float | None
    longest_wait_s: float | None = None
    history: Mapping[int, Mapping[str, float]] = field(default_factory=dict)
    shown: tuple[str, ...] = ("train/accuracy", "val/accuracy")

    @property
    def waiting_share(self) -> float | None:
        """Share of the training's seconds spent waiting for data."""
        return None if self.waiting_s is None or not self.training_s else self.waiting_s / self.training_s

    @property
    def accuracies(self) -> dict[int, dict[str, float]]:
        """The accuracies alone: by epoch, then by ``train`` and ``val``."""
        return {epoch: accuracies_of(values) for epoch, values in self.history.items()}

    def to_json(self) -> str:
        """All of it, for programs."""
        more = {"waiting_share": self.waiting_share, "accuracies": self.accuracies}
        return json.dumps({**asdict(self), **more}, indent=1)

    def to_text(self) -> str:
        """All of it, for people."""
        return "\n".join(["", *self._measure_lines(), "", *self._speed_lines(), "", *self._place_lines(), ""])

    def _measure_lines(self) -> list[str]:
        heads = [_head(name) for name in self.shown]
        lines = [*self.notes, "", "   ".join(["epoch", *heads])]
        for epoch, values in sorted(self.history.items()):
            shown = [f"{values[name]:.3f}" if name in values else "-" for name in self.shown]
            cells = [f"{value:>{len(head)}}" for value, head in zip(shown, heads, strict=True)]
            lines.append("   ".join([f"{epoch + 1:5d}", *cells]))
        return lines

    def _speed_lines(self) -> list[str]:
        trained = f"{self.num_samples} samples in {self.num_steps} steps and {self.training_s:.1f} s"
        lines = [
            f"trained      {trained}: {self.samples_per_s:.0f} samples/s; validation took {self.validating_s:.1f} s"
        ]
        if self.waiting_s is not None:
            longest = f", the longest wait {self.longest_wait_s:.2f} s" if self.longest_wait_s is not None else ""
            lines.append(
                f"waiting      {self.waiting_s:.2f} s for data ({self.waiting_share or 0:.1%} of the training){longest}"
            )
        return lines

    def _place_lines(self) -> list[str]:
        return [f"{name:<12} {place}" for name, place in self.places.items()]


def accuracies_of(values: Mapping[str, float]) -> dict[str, float]:
    """The accuracies among some measures, by stage."""
    return {stage: values[f"{stage}/accuracy"] for stage in _STAGES if f"{stage}/accuracy" in values}


def _head(name: str) -> str:
    stage, _, measure = name.partition("/")
    return f"{_STAGES[stage]} {measure}"


def summarise(trainer: Any, data: TaskData, model: TaskModel, folder: Path) -> RunSummary:
    """Gather the figures of a run that is over, let the model draw, and keep both in the run's folder."""
    clock = next((c for c in trainer.callbacks if isinstance(c, RunClock)), RunClock())
    wait = trainer.profiler if isinstance(trainer.profiler, DataWait) else None
    shown = model.show(data, folder)
    seconds = clock.training_s
    summary = RunSummary(
        places=_places(trainer, data, folder, shown.files),
        notes=(*data.notes(model.history), *shown.notes),
        num_samples=clock.num_samples * trainer.world_size,
        num_steps=clock.num_steps,
        samples_per_s=clock.num_samples * trainer.world_size / seconds if seconds else 0.0,
        training_s=seconds,
        validating_s=clock.validating_s,
        waiting_s=None if wait is None else wait.waited_s,
        longest_wait_s=None if wait is None else wait.longest_s,
        history=model.history,
        shown=model.shown,
    )
    (folder / "summary.json").write_text(summary.to_json())
    return summary


def _places(trainer: Any, data: TaskData, folder: Path, drawn: Mapping[str, str]) -> dict[str, str]:
    best = checkpoints(folder) / "best.ckpt"
    log = Path(trainer.logger.log_dir) / "metrics.csv" if trainer.logger is not None else None
    return {
        "shards": data.place,
        "checkpoint": str(last_checkpoint(folder)),
        **({"best" : str(best)} if best.exists() else {}),
        **({"log": str(log)} if log is not None else {}),
        **drawn,
    }  # fmt: skip
