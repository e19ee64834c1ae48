"""Data behind a web server, and loaders over it, for the tests of what a loader measures."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
from servers.web import WebServer

from lightning_stream import MDSWriter, StreamingDataLoader, StreamingDataset

BATCH = 16


def write_metered(folder: Path, num_samples: int = 1024) -> Path:
    """Samples of 1 KiB, 63 in a shard."""
    with MDSWriter(out=folder, columns={"x": "ndarray:int32:256"}, size_limit=1 << 16) as writer:
        for number in range(num_samples):
            writer.write({"x": np.full(256, number, np.int32)})
    return folder


@contextmanager
def served(data: Path) -> Iterator[WebServer]:
    """A web server that has the data under /data."""
    with WebServer() as web:
        web.objects.update({f"/data/{path.name}": path.read_bytes() for path in data.iterdir()})
        yield web


def loader_over(url: str | Path, tmp_path: Path, num_workers: int = 0, **options: Any) -> StreamingDataLoader:
    names = ("collate_fn", "persistent_workers", "multiprocessing_context")
    of_loader = {name: options.pop(name) for name in names if name in options}
    dataset = StreamingDataset(remote=str(url), local=tmp_path / "cache", **{"shuffle": True, **options})
    return StreamingDataLoader(dataset, BATCH, num_workers=num_workers, **of_loader)


def spend(seconds: float) -> None:
    """Compute for so long."""
    end = perf_counter() + seconds
    while perf_counter() < end:
        pass


def check_parts(measure: Callable[[], tuple[float, float]]) -> None:
    """Check that the measured parts of a loop are its whole time, within 2 %.

    `measure` runs the loop, and gives both. Other programs may interrupt a run between two readings of the clock, so
    the best of three counts; none may have parts that are longer than the loop.
    """
    shares = []
    for _ in range(3):
        parts_s, whole_s = measure()
        assert parts_s <= whole_s * 1.0001
        shares.append(parts_s / whole_s)
        if shares[-1] >= 0.98:
            return
    raise AssertionError(f"the parts are {shares} of the loop")
