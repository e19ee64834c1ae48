"""Writing to a local folder: token rows (int32 x 1,024) and JPEG photos.

python benchmarks/write.py [--only photos]      photos from $LIGHTNING_STREAM_SHARED/data or ../shared/data
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

import numpy as np
from frame import Clock, Group, Job, Result, main
from loaders import PHOTO, photos

WIDTH = 1024
LIMIT = 1 << 26
SHA1 = ("sha1",)


def prepare(job: Job) -> None:
    np.save(job.folder / "rows.npy", np.random.default_rng(0).integers(0, 50_000, (job.sizes.rows, WIDTH), np.int32))


def tokens(library: str, job: Job, batch: int = 1) -> Result:
    rows = np.load(job.folder / "rows.npy")
    options = {"columns": {"tokens": f"ndarray:int32:{WIDTH}"}, "size_limit": LIMIT}
    kind = import_module(library).MDSWriter
    clock = Clock()
    with kind(out=str(job.scratch / "out"), **options) as writer:
        if batch > 1:
            for first in range(0, len(rows), batch):
                writer.write_batch({"tokens": rows[first : first + batch]})
        else:
            for row in rows:
                writer.write({"tokens": row})
    return clock.stop(len(rows))


def tokens_litdata(job: Job) -> Result:
    import litdata

    rows = np.load(job.folder / "rows.npy")
    clock = Clock()
    writer = litdata.streaming.Cache(str(job.scratch / "out"), chunk_bytes=LIMIT)
    for k, row in enumerate(rows):
        writer[k] = row
    writer.done()
    writer.merge()
    return clock.stop(len(rows))


def bare_file(job: Job) -> Result:
    """The floor: the same bytes written to one file, and synced."""
    rows = np.load(job.folder / "rows.npy")
    return _one_file(job, [lambda: rows.data], len(rows))


def bare_photos(job: Job) -> Result:
    paths = photos(job, job.sizes.photos)
    return _one_file(job, [path.read_bytes for path in paths], len(paths))


def _one_file(job: Job, parts: list[Callable[[], Any]], samples: int) -> Result:
    clock = Clock()
    with (job.scratch / "bare").open("wb", buffering=0) as file:
        for part in parts:
            file.write(part())
        os.fsync(file.fileno())
    return clock.stop(samples)


def write_photos(library: str, job: Job, opened: bool = False, hashes: tuple[str, ...] = SHA1) -> Result:
    from PIL import Image

    paths = photos(job, job.sizes.photos)
    kind = import_module(library).MDSWriter
    clock = Clock()
    with kind(out=str(job.scratch / "out"), columns=PHOTO, hashes=list(hashes)) as writer:
        for label, path in enumerate(paths):
            image = Image.open(path) if opened else path.read_bytes()
            writer.write({"image": image, "label": label})
    return clock.stop(len(paths))


if __name__ == "__main__":
    ours = "lightning_stream"
    mosaic = "streaming"
    rows = {
        "ours": partial(tokens, ours),
        "ours, in batches": partial(tokens, ours, batch=1024),
        "bare file": bare_file,
        "mosaic": partial(tokens, mosaic),
        "litdata": tokens_litdata,
    }
    groups = [Group("token rows", rows, prepare)]
    kinds: dict[str, dict[str, Any]] = {
        "photos, bytes with sha1": {},
        "photos, bytes without a digest": {"hashes": ()},
        "photos, opened images with sha1": {"opened": True},
    }
    for title, options in kinds.items():
        cases = {
            "ours": partial(write_photos, ours, **options),
            "bare file": bare_photos,
            "mosaic": partial(write_photos, mosaic, **options),
        }
        groups.append(Group(title, cases))
    main(__doc__, groups, rows=(131_072, 2048), photos=(3000, 20))
