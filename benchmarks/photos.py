"""The photos of the benchmarks: JPEG files of flowers where they are at hand, and else drawn ones."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
from frame import Job

COLUMNS = {"image": "jpeg", "label": "int"}
USUAL = Path(__file__).resolve().parent.parent.parent / "shared"


def photos(job: Job, count: int) -> list[Path]:
    """JPEG files of ``$LIGHTNING_STREAM_SHARED/data/flower_photos``; the figures in the docs are of these."""
    folder = Path(os.environ.get("LIGHTNING_STREAM_SHARED", USUAL)) / "data" / "flower_photos"
    paths = sorted(folder.glob("*/*.jpg")) or _drawn(job.folder / "drawn")
    return [paths[number % len(paths)] for number in range(count)]


def _drawn(folder: Path) -> list[Path]:
    from PIL import Image

    folder.mkdir(exist_ok=True)
    paths = [folder / f"{number}.jpg" for number in range(16)]
    for number, path in enumerate(paths):
        coarse = np.random.default_rng(number).integers(0, 256, (30, 40, 3), np.uint8)
        Image.fromarray(coarse).resize((500, 375)).save(path, "JPEG", quality=90)
    return paths
