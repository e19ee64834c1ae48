"""What a run says when it is over: where things lie, how fast it was, what it learnt, and a picture of it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from lightning_stream.recipes.callbacks import DataWait, RunClock
from lightning_stream.recipes.classifier import ImageClassifier
from lightning_stream.recipes.flowers import PhotoData
from lightning_stream.recipes.picture import Prediction, draw_predictions, save_picture
from lightning_stream.recipes.places import checkpoints, last_checkpoint

_SHOWN = 24


@dataclass(frozen=True)
class RunSummary:
    """The figures of one launch, and the accuracies of the whole run.

    Attributes:
        places: What lies where, by name.
        notes: Sentences to read first.
        num_samples, num_steps: Trained on since this launch, by this process and in all.
        samples_per_s: Over all processes, validation left out.
        training_s, validating_s: Of this launch.
        waiting_s: Of the training's seconds, those spent waiting for a batch; None where a profiler took the place.
        accuracies: By epoch, then by ``train`` and ``val``.
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
    accuracies: Mapping[int, Mapping[str, float]] = field(default_factory=dict)

    @property
    def waiting_share(self) -> float | None:
        """Share of the training's seconds spent waiting for data."""
        return None if self.waiting_s is None or not self.training_s else self.waiting_s / self.training_s

    def to_json(self) -> str:
        """All of it, for programs."""
        return json.dumps({**asdict(self), "waiting_share": self.waiting_share}, indent=1)

    def to_text(self) -> str:
        """All of it, for people."""
        return "\n".join(["", *self._accuracy_lines(), "", *self._speed_lines(), "", *self._place_lines(), ""])

    def _accuracy_lines(self) -> list[str]:
        lines = [*self.notes, "", "epoch   train accuracy   validation accuracy"]
        for epoch, values in sorted(self.accuracies.items()):
            shown = [f"{values[stage]:.3f}" if stage in values else "-" for stage in ("train", "val")]
            lines.append(f"{epoch + 1:5d}   {shown[0]:>14}   {shown[1]:>19}")
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


def summarise(trainer: Any, data: PhotoData, model: ImageClassifier, folder: Path) -> RunSummary:
    """Gather the figures of a run that is over, draw the picture, and keep both in the run's folder."""
    clock = next((c for c in trainer.callbacks if isinstance(c, RunClock)), RunClock())
    wait = trainer.profiler if isinstance(trainer.profiler, DataWait) else None
    picture = picture_of(data, model, folder / "predictions.png")
    seconds = clock.training_s
    summary = RunSummary(
        places=_places(trainer, data, folder, picture),
        notes=_notes(data, model),
        num_samples=clock.num_samples * trainer.world_size,
        num_steps=clock.num_steps,
        samples_per_s=clock.num_samples * trainer.world_size / seconds if seconds else 0.0,
        training_s=seconds,
        validating_s=clock.validating_s,
        waiting_s=None if wait is None else wait.waited_s,
        longest_wait_s=None if wait is None else wait.longest_s,
        accuracies=model.history,
    )
    (folder / "summary.json").write_text(summary.to_json())
    return summary


def _places(trainer: Any, data: PhotoData, folder: Path, picture: Path) -> dict[str, str]:
    best = checkpoints(folder) / "best.ckpt"
    log = Path(trainer.logger.log_dir) / "metrics.csv" if trainer.logger is not None else None
    return {
        "shards": data.conversion.place,
        "checkpoint": str(last_checkpoint(folder)),
        **({"best" : str(best)} if best.exists() else {}),
        **({"log": str(log)} if log is not None else {}),
        "picture": str(picture),
    }  # fmt: skip


def _notes(data: PhotoData, model: ImageClassifier) -> tuple[str, ...]:
    described = data.description
    pictures = "drawings made by this package, not photos" if described.drawn else described.title
    validated = [values["val"] for _, values in sorted(model.history.items()) if "val" in values]
    share = f": {validated[-1]:.1%} of the held-out ones are recognised" if validated else ""
    chance = f"by chance it would be {1 / len(described.classes):.0%}"
    return (
        f"Learnt from {described.num_train}, held out {described.num_val}{share} ({chance}).",
        f"The pictures are {pictures}.",
    )


@torch.inference_mode()
def picture_of(data: PhotoData, model: ImageClassifier, path: Path) -> Path:
    """Ask the model about some held-out samples, and draw them with what it says."""
    model.eval()
    dataset, classes = data.held_out, data.classes
    assert dataset.transform is not None
    some = range(min(_SHOWN, dataset.size))
    seen = torch.stack([dataset.transform(dataset[index])["image"] for index in some])
    likely = model(seen.to(model.device)).softmax(1).cpu()
    shown = [
        Prediction(sample["image"], classes[sample["label"]], classes[int(row.argmax())], float(row.max()))
        for sample, row in zip((dataset[index] for index in some), likely, strict=True)
    ]
    right = sum(prediction.label == prediction.predicted for prediction in shown)
    kind = "drawings (not photos)" if data.description.drawn else "photos"
    title = f"Held-out {kind}: of these {len(shown)}, {right} are recognised"
    save_picture(
        draw_predictions(shown, title, f"None of them was trained on. Source: {data.description.title}."), path
    )
    return path
