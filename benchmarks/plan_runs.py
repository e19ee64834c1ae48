"""The bounds of `plan` against real runs over a paced S3 server: is a bound ever too low, is its resource the cause?

python benchmarks/plan_runs.py [--only NAME ...] [--rounds 3]

Each run is a process of its own with an empty cache, and the throughput is that of a whole epoch, its start included.
Steps and transforms sleep. What a sample and an MB cost without that is measured before each run on local data.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paced_store import Pace, serve

WIDTH, BATCH = 1 << 16, 16  # bytes of a sample, samples of a batch
FEW = {"num_canonical_nodes": 1, "window": 4}  # shards at once
DATA = {"small": (96, 8, None), "large": (24, 32, None), "zstd": (48, 64, "zstd")}  # shards, samples of each
SETTINGS = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_DEFAULT_REGION": "us-east-1"}


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
    num_cores: int | None = None
    epoch: int = 0  # the one that is measured


QUICK, SLOW_LINK = Pace(0.01, 40e6), Pace(0.01, 40e6, 6e6)
RUNS = {
    "slow link of the node": Run("link of a node", SLOW_LINK),
    "slow connections, no workers": Run("connections", Pace(0.025, 1.5e6), num_workers=0),
    "high latency, small shards": Run("connections", Pace(0.6, 40e6), "small"),
    "slow samples, no workers": Run("training process", QUICK, num_workers=0, step_s=0.005, sample_s=0.008),
    "slow samples, two workers": Run("workers", QUICK, sample_s=0.02),
    "slow training step": Run("training process", QUICK, step_s=0.15),
    "zstd on two cores": Run("cores", Pace(), "zstd", num_cores=2),
    "small cache, second epoch": Run(
        "link of a node", SLOW_LINK, "small", dataset={**FEW, "cache_limit": "16mb", "predownload": 32}, epoch=1
    ),
    "short look-ahead": Run("look-ahead", Pace(0.7, 40e6), dataset={**FEW, "predownload": 1}),
}


class Slow:
    """Takes so long on average: after a sleep that ended late, the next one is shorter."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.late_s = seconds, 0.0

    def __call__(self, sample: Any = None) -> Any:
        begun = time.perf_counter()
        time.sleep(max(0.0, self.seconds - self.late_s))
        self.late_s += time.perf_counter() - begun - self.seconds
        return sample


def prepare(folder: Path) -> None:
    """Write the datasets."""
    import numpy as np

    from lightning_stream import MDSWriter

    rng = np.random.default_rng(0)
    for name, (shards, samples, compression) in DATA.items():
        size, most = WIDTH * samples + (1 << 14), 8 if compression else 256
        columns = {"x": f"ndarray:uint8:{WIDTH}"}
        with MDSWriter(out=folder / name, columns=columns, size_limit=size, compression=compression) as writer:
            for _ in range(shards * samples):
                writer.write({"x": rng.integers(0, most, WIDTH, np.uint8)})


def loader_of(remote: str | None, local: str, run: Run) -> Any:
    """The loader of a run; without a remote, it reads a cache that has all shards."""
    from lightning_stream import StreamingDataLoader, StreamingDataset

    transform = Slow(run.sample_s) if run.sample_s else None
    dataset = StreamingDataset(remote, local=local, shuffle=True, transform=transform, **run.dataset)
    return StreamingDataLoader(dataset, batch_size=BATCH, num_workers=run.num_workers)


def trained(scratch: str, run: Run) -> float:
    """Train, and return the samples per second of the epoch that is measured."""
    loader = loader_of(f"s3://bucket/{run.data}", f"{scratch}/local", run)
    for _ in range(run.epoch + 1):
        begun, count, step = time.perf_counter(), 0, Slow(run.step_s)
        for batch in loader:
            count += len(batch["x"])
            step()
    return count / (time.perf_counter() - begun)


def costs_of(folder: Path, scratch: str, run: Run) -> dict[str, float]:
    """What a sample and an MB cost on one core of this machine, without the run's own sleep."""
    from lightning_stream.cache import ShardCache
    from lightning_stream.counters import NAMES
    from lightning_stream.stores import open_store

    cache = ShardCache(open_store(str(folder / run.data)), f"{scratch}/unpacked")
    index = cache.index()
    for shard in range(index.num_shards):
        cache.ensure(index.entry(shard))
    spent = dict(zip(NAMES, cache.counters.values.tolist(), strict=True))
    loader, count = loader_of(None, f"{scratch}/unpacked", Run("", QUICK, num_workers=0)), 0
    begun = time.perf_counter()
    for batch in loader:
        count += len(batch["x"])
    unpack_s = spent["verify_s"] + spent["decompress_s"]
    return {
        "sample_s": (time.perf_counter() - begun) / count,
        "unpack_s_per_mb": unpack_s / int(index.raw_bytes.sum()) * 1e6,
    }


def planned(folder: Path, scratch: str, run: Run, costs: dict[str, float]) -> Any:
    """The plan's bound of the epoch that is measured, by the pace of the store and the run's own sleeps."""
    from lightning_stream.plan import Rates, plan

    pace = run.pace
    known = {
        "latency_s": pace.latency_s,
        "connection_bytes_per_s": pace.bytes_per_s,
        "node_bytes_per_s": pace.all_bytes_per_s,
        "num_cores": run.num_cores,
    }
    rates = Rates(
        step_s=run.step_s,
        sample_s=costs["sample_s"] + run.sample_s,
        unpack_s_per_mb=costs["unpack_s_per_mb"],
        **{name: value for name, value in known.items() if value},
    )
    found = plan(loader_of(str(folder / run.data), f"{scratch}/local", run), rates)
    return found.later_bound if run.epoch else found.limit


def _child(what: str, endpoint: str, folder: Path, name: str) -> Any:
    """Run something in a process of its own, with an empty cache."""
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        env = {**os.environ, **SETTINGS, "AWS_ENDPOINT_URL": endpoint, "OMP_NUM_THREADS": "1", "NO_PROXY": "127.0.0.1"}
        env |= {"S3_ENDPOINT_URL": endpoint, "LIGHTNING_STREAM_CACHE": f"{scratch}/cache"}
        command = [sys.executable, __file__, "--child", what, str(folder), scratch, name]
        done = subprocess.run(command, capture_output=True, text=True, env=env, check=False, timeout=300)
    if done.returncode:
        raise RuntimeError(f"{name} failed:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def _in_child(what: str, folder: str, scratch: str, name: str) -> Any:
    run = RUNS[name]
    return costs_of(Path(folder), scratch, run) if what == "costs" else trained(scratch, run)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=RUNS, default=list(RUNS))
    parser.add_argument("--child", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print("\n" + json.dumps(_in_child(*args.child)))
        return
    with tempfile.TemporaryDirectory() as name:
        prepare(Path(name))
        print(f"{'run':30}  {'samples/s: bound':>16}  {'measured':>20}  {'of bound':>8}  limit (expected)", flush=True)
        for one in args.only:
            _compare(one, Path(name), args.rounds)


def _compare(name: str, folder: Path, rounds: int) -> None:
    """Print the bound of a run, and what was measured."""
    run = RUNS[name]
    with serve(folder, run.pace) as endpoint:
        costs = [_child("costs", endpoint, folder, name) for _ in range(2)]
        found = [_child("trained", endpoint, folder, name) for _ in range(rounds)]
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        bound = planned(folder, scratch, run, {key: min(one[key] for one in costs) for key in costs[0]})
    rows = f"{statistics.median(found):,.0f} ({min(found):,.0f} to {max(found):,.0f})"
    share = f"{max(found) / bound.samples_per_s:.0%}"
    says = f"{bound.resource} ({run.expected})"
    load = f"load {os.getloadavg()[0]:.1f}"
    print(f"{name:30}  {bound.samples_per_s:16,.0f}  {rows:>20}  {share:>8}  {says}, {load}", flush=True)


if __name__ == "__main__":
    main()
