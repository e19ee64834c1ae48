"""The bounds of `plan` against real runs over a paced S3 server: is a bound ever too low, is its resource the cause?

python benchmarks/plan_runs.py [--only "zstd"] [--rounds 3] [--json FILE]

A run has an empty cache, and its throughput ("per s") is that of a whole epoch, its start included. Steps and
transforms sleep. What a sample and an MB cost without that is measured before each run, on local data. "of bound" is
never above 1, and "limit" is the resource that was made scarce, as "expected" says.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from frame import Clock, Group, Job, Result, main
from loaders import BUCKET
from paced_store import Pace

# Bytes of a sample, samples of a batch
WIDTH = 1 << 16
BATCH = 16
FEW = {"num_canonical_nodes": 1, "window": 4}  # shards at once
DATA = {"small": (96, 8, None), "large": (24, 32, None), "zstd": (48, 64, "zstd")}  # shards, samples of each


@dataclass(frozen=True)
class Run:
    """A store, its data and settings, and the resource that is made scarce."""

    expected: str
    pace: Pace
    data: str = "large"
    num_workers: int = 2
    step_s: float = 0.0
    sample_s: float = 0.0
    dataset: dict[str, Any] = field(default_factory=lambda: FEW)
    rates: dict[str, float] = field(default_factory=dict)
    epoch: int = 0  # the one that is measured


QUICK = Pace(0.01, 40e6)
SLOW_LINK = Pace(0.01, 40e6, 6e6)
SMALL_CACHE = {**FEW, "cache_limit": "16mb", "predownload": 32}
RUNS = {
    "slow link of the node": Run("link of a node", SLOW_LINK),
    "slow connections, no workers": Run("connections", Pace(0.025, 1.5e6), num_workers=0),
    "high latency, small shards": Run("connections", Pace(0.6, 40e6), "small"),
    "slow samples, no workers": Run("training process", QUICK, num_workers=0, step_s=0.005, sample_s=0.008),
    "slow samples, two workers": Run("workers", QUICK, sample_s=0.02),
    "slow training step": Run("training process", QUICK, step_s=0.15),
    "zstd on two cores": Run("cores", Pace(), "zstd", rates={"num_cores": 2}),
    "small cache, second epoch": Run("link of a node", SLOW_LINK, "small", dataset=SMALL_CACHE, epoch=1),
    "short look-ahead": Run("look-ahead", Pace(0.7, 40e6), dataset={**FEW, "predownload": 1}),
}


def slow(seconds: float, sample: Any) -> Any:
    time.sleep(seconds)
    return sample


def prepare(job: Job, data: str) -> None:
    from lightning_stream import MDSWriter

    shards, samples, compression = DATA[data]
    rng = np.random.default_rng(0)
    options = {"size_limit": WIDTH * samples + (1 << 14), "compression": compression}
    with MDSWriter(out=job.folder / "rows", columns={"x": f"ndarray:uint8:{WIDTH}"}, **options) as writer:
        for _ in range(max(2, shards * job.sizes.percent // 100) * samples):
            writer.write({"x": rng.integers(0, 8 if compression else 256, WIDTH, np.uint8)})


def loader_of(run: Run, remote: str, local: Path) -> Any:
    from lightning_stream import StreamingDataLoader, StreamingDataset

    transform = partial(slow, run.sample_s) if run.sample_s else None
    dataset = StreamingDataset(remote, local=local, shuffle=True, transform=transform, **run.dataset)
    return StreamingDataLoader(dataset, batch_size=BATCH, num_workers=run.num_workers)


def epoch(loader: Any, step_s: float = 0.0) -> Result:
    clock = Clock()
    count = 0
    for batch in loader:
        count += len(batch["x"])
        time.sleep(step_s)
    return clock.stop(count)


def bound_of(run: Run, job: Job) -> Any:
    """The plan's bound of the epoch that is measured, by the pace of the store and the run's own sleeps."""
    from lightning_stream.plan import Rates, plan

    rows = str(job.folder / "rows")
    pace = run.pace
    bare = loader_of(replace(run, num_workers=0, sample_s=0.0, dataset=FEW), rows, job.scratch / "bare")
    epoch(bare)
    unpacked = epoch(bare)
    counted = bare.stats().counters
    unpack_s = counted["verify_s"] + counted["decompress_s"]
    rates = Rates(
        latency_s=pace.latency_s,
        connection_bytes_per_s=pace.bytes_per_s or np.inf,
        node_bytes_per_s=pace.all_bytes_per_s or np.inf,
        step_s=run.step_s,
        sample_s=unpacked["wall_s"] / unpacked["samples"] + run.sample_s,
        unpack_s_per_mb=unpack_s / (unpacked["samples"] * WIDTH / 1e6),
        **run.rates,
    )
    planned = plan(loader_of(run, rows, job.scratch / "planned"), rates)
    return planned.later_bound if run.epoch else planned.limit


def compare(run: Run, job: Job) -> Result:
    bound = bound_of(run, job)
    loader = loader_of(run, f"{BUCKET}/rows", job.scratch / "cache")
    for _ in range(run.epoch + 1):
        result = epoch(loader, run.step_s)
    share = result["per_s"] / bound.samples_per_s
    names = {"limit": bound.resource, "expected": run.expected}
    return {**result, "bound per s": bound.samples_per_s, "of bound": share, **names}


if __name__ == "__main__":
    groups = [
        Group(title, {"ours": partial(compare, run)}, partial(prepare, data=run.data), run.pace)
        for title, run in RUNS.items()
    ]
    main(__doc__, groups, percent=(100, 40))
