"""What a run reports: its summary, grids of images, and its loss curve."""

import csv
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass
class RunFigures:
    """What one launch of a run did: samples over all devices without padding, optimizer steps, and seconds."""

    num_samples: int = 0
    num_steps: int = 0
    training_s: float = 0.0
    validation_s: float = 0.0
    waited_s: float | None = None  # for data, on the first device; None where unknown


@dataclass(frozen=True)
class RunSummary:
    """The result of a run, written to ``summary.json`` and printed."""

    notes: Sequence[str]  # sentences to read first
    figures: RunFigures  # of this launch
    history: Mapping[int, Mapping[str, float]]  # by epoch, the metrics of the whole run, e.g. val/accuracy
    shown: Sequence[str]  # those in the table
    paths: Mapping[str, str]  # what was written, by a word for it

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=1))

    def __str__(self) -> str:
        heads = [name.replace("val/", "validation ").replace("/", " ") for name in self.shown]
        lines = ["", *self.notes, "", "   ".join(["epoch", *heads])]
        for epoch, values in sorted(self.history.items()):
            cells = [f"{values[name]:.3f}" if name in values else "-" for name in self.shown]
            lines.append("   ".join([f"{epoch + 1:5d}", *map(str.rjust, cells, map(len, heads))]))
        now = self.figures
        speed = f"{now.training_s:.1f} s ({now.num_samples / max(now.training_s, 1e-9):,.0f} samples/s)"
        lines += ["", f"trained      {now.num_samples:,} samples in {now.num_steps:,} steps, {speed}"]
        if now.waited_s is not None:
            share = now.waited_s / max(now.training_s, 1e-9)
            lines.append(f"waiting      {now.waited_s:.2f} s for data ({share:.1%})")
        lines.append(f"validation   {now.validation_s:.1f} s")
        return "\n".join([*lines, *(f"{name:<12} {path}" for name, path in self.paths.items()), ""])


def image_grid(
    images: Sequence[Any], texts: Sequence[str], path: Path, title: str, colors: Sequence[str] = (), columns: int = 8
) -> None:
    """Draw images, uint8[h, w, 3] each, in a PNG file, with a text above each."""
    from matplotlib.figure import Figure  # not in every environment that trains

    rows = -(-len(images) // columns)
    figure = Figure(figsize=(1.5 * columns, 0.5 + 1.9 * rows), dpi=100, layout="constrained")
    figure.suptitle(title)
    places = figure.subplots(rows, columns, squeeze=False).flat
    for number, axes in enumerate(places):
        axes.set_axis_off()
        if number < len(images):
            axes.imshow(images[number])
            axes.set_title(texts[number], fontsize=9, color=colors[number] if colors else "black")
    figure.savefig(path)


def loss_curve(folder: Path, name: str = "train/loss") -> dict[int, float]:
    """A metric by optimizer step, from the CSV logs of a run's folder; what a resumed run logged again counts."""
    found: dict[int, float] = {}
    logs = sorted(folder.glob("log/version_*/metrics.csv"), key=lambda path: int(path.parent.name.partition("_")[2]))
    for log in logs:
        with log.open(newline="") as file:
            rows = [(int(row["step"]), float(row[name])) for row in csv.DictReader(file) if row.get(name)]
        begin = min((step for step, _ in rows), default=0)
        found = {step: value for step, value in found.items() if step < begin} | dict(rows)
    return found
