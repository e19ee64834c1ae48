"""The rule of MLPerf Storage for ResNet-50: how many simulated H100 one core keeps at least 90 % busy.

python benchmarks/mlperf_rule.py [--steps 40]

An accelerator takes 400 samples of 114,660 bytes a step and computes for 0.224 s, in which this process sleeps: 205
MB/s. "busy" is the time of its computing over that of the epoch, from the request for the first batch to the last step;
the rule wants 0.9. The first epoch is cold, from an S3 server of this machine with 25 ms to the first byte and 60 MB/s
on each connection. The second is warm. "per core" is how many H100 one core could feed: the seconds of computing over
the CPU-seconds of the process and its workers.
"""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import loaders
import numpy as np
from frame import Clock, Group, Job, Result, main
from paced_store import Pace

SAMPLE_BYTES = 114_660
BATCH = 400
STEP_S = 0.224
SHARD_BYTES = 1 << 25


def prepare(job: Job) -> None:
    from lightning_stream import MDSWriter

    rng = np.random.default_rng(0)
    columns = {"x": f"ndarray:uint8:{SAMPLE_BYTES}"}
    with MDSWriter(out=job.folder / "photos", columns=columns, size_limit=SHARD_BYTES) as writer:
        for _ in range(job.sizes.steps):
            writer.write_batch({"x": rng.integers(0, 256, (BATCH, SAMPLE_BYTES), np.uint8)})


def train(loader: loaders.Loader, job: Job, workers: int) -> Result:
    import torch  # noqa: F401

    if loader is loaders.litdata:
        loaders.write_litdata(job, "photos", chunk_bytes=SHARD_BYTES)
    batches = loader(job, "photos", BATCH, workers, remote=True)
    notes = {}
    for epoch in ("cold", "warm"):
        clock = Clock()
        count = 0
        for batch in batches:
            count += len(batch["x"])
            time.sleep(STEP_S)
        assert count == job.sizes.steps * BATCH
        result = clock.stop(count)
        computing_s = job.sizes.steps * STEP_S
        notes[f"{epoch} busy"] = computing_s / result["wall_s"]
        notes[f"{epoch} per core"] = computing_s / result["cpu_s"]
    return {**result, **notes}


def cases(workers: int) -> dict[str, Any]:
    names = ("ours", "mosaic", "litdata")
    return {name: partial(train, getattr(loaders, name), workers=workers) for name in names}


if __name__ == "__main__":
    pace = Pace(0.025, 60e6)
    groups = [Group("in process", cases(0), prepare, pace), Group("two workers", cases(2), prepare, pace)]
    main(__doc__, groups, steps=(40, 2))
