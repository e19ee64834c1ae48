"""What a run reports: its summary, grids of images, and its loss curve."""

import csv
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw, ImageFont, ImageOps

from lightning_stream.loading.stats import percent

_TILE = 150  # pixels


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
            share = percent(now.waited_s / max(now.training_s, 1e-9))
            lines.append(f"waiting      {now.waited_s:.2f} s for data ({share})")
        lines.append(f"validation   {now.validation_s:.1f} s")
        return "\n".join([*lines, *(f"{name:<12} {path}" for name, path in self.paths.items()), ""])


def image_grid(
    images: Sequence[Any], texts: Sequence[str], path: Path, title: str, colors: Sequence[str] = (), columns: int = 8
) -> None:
    """Draw images, uint8[h, w, 3] each, in a PNG file, with a text of at most two lines below each."""
    rows = -(-len(images) // columns)
    sheet = Image.new("RGB", (columns * _TILE, 50 + rows * (_TILE + 40)), "white")
    draw = ImageDraw.Draw(sheet)
    draw.text((10, 12), title, "black", ImageFont.load_default(20))
    for number, (image, text) in enumerate(zip(images, texts, strict=True)):
        left, top = number % columns * _TILE, 50 + number // columns * (_TILE + 40)
        sheet.paste(ImageOps.fit(Image.fromarray(image), (_TILE - 10, _TILE - 10)), (left + 5, top))
        color = colors[number] if colors else "black"
        draw.multiline_text((left + 5, top + _TILE - 8), text, color, ImageFont.load_default(13))
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
