"""What a run reports: its summary, a grid of images with predictions, and loss curves."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw, ImageFont, ImageOps

_TILE = 150  # pixels


@dataclass
class RunFigures:
    """What one launch of a run did: samples over all devices without padding, optimizer steps, and seconds."""

    num_samples: int = 0
    num_steps: int = 0
    training_s: float = 0.0
    validation_s: float = 0.0
    waited_s: float | None = None  # for data, on the first device; None where unknown
    longest_wait_s: float | None = None


@dataclass(frozen=True)
class RunSummary:
    """The result of a run, written to ``summary.json`` and printed.

    Attributes:
        notes: Sentences to read first.
        figures: Of this launch.
        history: By epoch, the metrics of the whole run, under names such as ``val/accuracy``.
        shown: Those in the table.
        paths: What was written, by a word for it.
    """

    notes: Sequence[str]
    figures: RunFigures
    history: Mapping[int, Mapping[str, float]]
    shown: Sequence[str]
    paths: Mapping[str, str] = field(default_factory=dict)

    def save(self, path: Path) -> None:
        """Write it as JSON."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self), indent=1))

    def __str__(self) -> str:
        heads = [name.replace("val/", "validation ").replace("/", " ") for name in self.shown]
        lines = ["", *self.notes, "", "   ".join(["epoch", *heads])]
        for epoch, values in sorted(self.history.items()):
            cells = [f"{values[name]:.3f}" if name in values else "-" for name in self.shown]
            widths = [f"{cell:>{len(head)}}" for cell, head in zip(cells, heads, strict=True)]
            lines.append("   ".join([f"{epoch + 1:5d}", *widths]))
        now = self.figures
        speed = f" ({now.num_samples / now.training_s:,.0f} samples/s)" if now.training_s else ""
        lines += [
            "",
            f"trained      {now.num_samples:,} samples in {now.num_steps:,} steps, {now.training_s:.1f} s{speed}",
        ]
        if now.waited_s is not None and now.training_s:
            longest = "" if now.longest_wait_s is None else f", longest {now.longest_wait_s:.2f} s"
            lines.append(f"waiting      {now.waited_s:.2f} s for data ({now.waited_s / now.training_s:.1%}){longest}")
        lines.append(f"validation   {now.validation_s:.1f} s")
        return "\n".join([*lines, *(f"{name:<12} {path}" for name, path in self.paths.items()), ""])


def image_grid(
    images: Sequence[Any], texts: Sequence[str], path: Path, title: str, correct: Sequence[bool] = (), columns: int = 8
) -> None:
    """Draw images, uint8[h, w, 3] each, in a PNG file, with a text of at most two lines below each.

    The texts of correct predictions are green and the others red; without `correct`, all are black.
    """
    columns = min(columns, len(images))
    rows = -(-len(images) // columns)
    sheet = Image.new("RGB", (max(columns, 4) * _TILE, 50 + rows * (_TILE + 40)), "white")
    draw = ImageDraw.Draw(sheet)
    draw.text((10, 12), title, "black", ImageFont.load_default(20))
    for place, (image, text) in enumerate(zip(images, texts, strict=True)):
        left, top = place % columns * _TILE, 50 + place // columns * (_TILE + 40)
        sheet.paste(ImageOps.fit(Image.fromarray(image), (_TILE - 10, _TILE - 10)), (left + 5, top))
        colour = "black" if not correct else "#18804a" if correct[place] else "#c42c2c"
        draw.multiline_text((left + 5, top + _TILE - 8), text, colour, ImageFont.load_default(13))
    path.parent.mkdir(parents=True, exist_ok=True)
    sheet.save(path)


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


def plot_curves(
    curves: Mapping[str, Mapping[int, float]], path: Path, title: str, ylabel: str = "training loss"
) -> None:
    """Draw curves by optimizer step, one per name."""
    from matplotlib.figure import Figure  # not in every environment that trains

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot(title=title, xlabel="optimizer step", ylabel=ylabel)
    axes.grid(alpha=0.3)
    for label, curve in curves.items():
        axes.plot(list(curve), list(curve.values()), label=label, linewidth=1.5, alpha=0.8)
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
