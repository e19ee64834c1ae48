"""Writing token rows (int32 x 1,024) to a local folder: row by row, and in batches.

python benchmarks/write_tokens.py [--rounds 3]
"""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
from side_by_side import Clock, main

ROWS, WIDTH, LIMIT = 131_072, 1024, 1 << 26
COLUMNS = {"tokens": f"ndarray:int32:{WIDTH}"}


def prepare(folder: Path) -> None:
    if not (folder / "tokens.npy").exists():
        np.save(folder / "tokens.npy", np.random.default_rng(0).integers(0, 50_000, (ROWS, WIDTH), np.int32))


def setup(folder: Path) -> tuple[Path, np.ndarray]:
    out = folder / "out"
    shutil.rmtree(out, ignore_errors=True)
    return out, np.load(folder / "tokens.npy")


def ours(folder: Path) -> dict:
    from lightning_stream import MDSWriter

    out, tokens = setup(folder)
    clock = Clock()
    with MDSWriter(out=out, columns=COLUMNS, size_limit=LIMIT) as writer:
        for row in tokens:
            writer.write({"tokens": row})
    return clock.stop(ROWS)


def in_batches(folder: Path) -> dict:
    from lightning_stream import MDSWriter

    out, tokens = setup(folder)
    clock = Clock()
    with MDSWriter(out=out, columns=COLUMNS, size_limit=LIMIT) as writer:
        for k in range(0, ROWS, 1024):
            writer.write_batch({"tokens": tokens[k : k + 1024]})
    return clock.stop(ROWS)


def bare_file(folder: Path) -> dict:
    """The floor: the same bytes written to one file, and synced."""
    import os

    out, tokens = setup(folder)
    clock = Clock()
    with out.open("wb") as file:
        file.write(tokens.data)
        file.flush()
        os.fsync(file.fileno())
    result = clock.stop(ROWS)
    out.unlink()
    return result


def mosaic(folder: Path) -> dict:
    from streaming import MDSWriter

    out, tokens = setup(folder)
    clock = Clock()
    with MDSWriter(out=str(out), columns=COLUMNS, size_limit=LIMIT) as writer:
        for row in tokens:
            writer.write({"tokens": row})
    return clock.stop(ROWS)


def litdata(folder: Path) -> dict:
    import litdata

    out, tokens = setup(folder)
    clock = Clock()
    writer = litdata.streaming.Cache(str(out), chunk_bytes=LIMIT)
    for k, row in enumerate(tokens):
        writer[k] = row
    writer.done()
    writer.merge()
    return clock.stop(ROWS)


if __name__ == "__main__":
    main(
        __file__,
        {"ours": ours, "ours, in batches": in_batches, "bare file": bare_file, "mosaic": mosaic, "litdata": litdata},
        prepare,
    )
