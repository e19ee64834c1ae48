"""The simulator's predictions against real runs over a paced S3 server: first batch, throughput and bytes.

python benchmarks/simulate_runs.py [--only NAME ...] [--rounds 3]

Each run is a process of its own with an empty cache. Its training step and its transform sleep, so that only what is
simulated limits it. What a process, a client and a sample cost on this machine is measured before each run, in another
process and without the paced server's limits; nothing is fitted to the runs.
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
import urllib.request
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from paced_store import Pace, serve

WIDTH, BATCH = 1 << 16, 16  # bytes of a sample, samples of a batch
DATA = {"small": (192, 16), "large": (24, 128)}  # shards, and samples of each: of 1 MB and of 8 MB
VARIABLES = ("S3_ENDPOINT_URL", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3")


FEW = {"num_canonical_nodes": 1, "window": 4}  # shards at once, so that the look-ahead counts


@dataclass(frozen=True)
class Run:
    """A case: its store, its data, and its settings."""

    pace: Pace
    data: str = "small"
    num_workers: int = 2
    step_s: float = 0.0
    sample_s: float = 0.0
    resumes: bool = False
    dataset: dict[str, Any] = field(default_factory=lambda: FEW)


NORMAL = Pace(0.1, 10e6)
RUNS = {
    "compute bound": Run(NORMAL, step_s=0.06),
    "compute bound, large shards, no workers": Run(NORMAL, "large", num_workers=0, step_s=0.08),
    "slow connections, large shards": Run(Pace(0.025, 4e6), "large"),
    "slow connections, no workers": Run(Pace(0.025, 4e6), "large", num_workers=0, step_s=0.01),
    "all shards at once": Run(Pace(0.025, 4e6), "large", step_s=0.05, dataset={}),
    "latency": Run(Pace(0.3, 50e6)),
    "link of the node": Run(Pace(0.025, 20e6, 24e6), "large"),
    "transform": Run(NORMAL, sample_s=0.01),
    "transform, no workers": Run(NORMAL, num_workers=0, step_s=0.02, sample_s=0.003),
    "short look-ahead": Run(Pace(0.15, 10e6), step_s=0.005, dataset={**FEW, "predownload": 1}),
    "cache limit": Run(NORMAL, step_s=0.01, dataset={**FEW, "cache_limit": "40mb"}),
    "resume": Run(Pace(0.025, 5e6), "large", step_s=0.03, resumes=True),
    "ranges": Run(Pace(0.025, 4e6), "large", step_s=0.05, dataset={"start_by_range": True}),
}


class Slow:
    """A transform or a step that takes so long on average: after a sleep that ended late, the next one is shorter."""

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
    for name, (shards, samples) in DATA.items():
        size = WIDTH * samples + (1 << 14)
        with MDSWriter(out=folder / name, columns={"x": f"ndarray:uint8:{WIDTH}"}, size_limit=size) as writer:
            for _ in range(shards * samples):
                writer.write({"x": rng.integers(0, 256, WIDTH, np.uint8)})


def trained(remote: str, scratch: Path, run: Run) -> dict[str, float]:
    """Train an epoch, in a process of its own."""
    import boto3  # noqa: F401 - a training script has imported what it needs

    from lightning_stream import StreamingDataLoader, StreamingDataset

    begun = time.perf_counter()
    transform = Slow(run.sample_s) if run.sample_s else None
    dataset = StreamingDataset(remote=remote, local=scratch, shuffle=True, transform=transform, **run.dataset)
    loader = StreamingDataLoader(dataset, batch_size=BATCH, num_workers=run.num_workers)
    if run.resumes:
        loader.load_state_dict(json.loads((scratch / "state.json").read_text()))
    first_s, count, step = 0.0, 0, Slow(run.step_s)
    for batch in loader:
        first_s = first_s or time.perf_counter() - begun
        count += len(batch["x"])
        step()
    spent_s = time.perf_counter() - begun
    stats, names = loader.stats(), ("verify_s", "fetched_bytes")
    waits_s = (stats.wait_s - sum(stats.first_waits.values())) / max(1, stats.num_batches - 1)
    found = {"first_s": first_s, "spent_s": spent_s, "samples": count, "waits_s": waits_s}
    return {**found, **{name: stats.counters[name] for name in names}}


def measured_work(folder: Path, scratch: Path) -> dict[str, float]:
    """What things cost on this machine, in a process of its own, from a store without limits."""
    import boto3  # noqa: F401

    from lightning_stream.cache import ShardCache
    from lightning_stream.stores import open_store

    begun = time.perf_counter()
    open_store("s3://bucket/small").read("index.json")
    first_s = time.perf_counter() - begun
    each_s, sizes = {}, {}
    for name, (shards, _) in DATA.items():
        cache = ShardCache(open_store(f"s3://bucket/{name}"), scratch / name)
        index = cache.index()
        begun = time.perf_counter()
        for shard in range(shards):
            cache.ensure(index.entry(shard))
        each_s[name], sizes[name] = (time.perf_counter() - begun) / shards, int(index.raw_bytes.mean())
    per_byte = (each_s["large"] - each_s["small"]) / (sizes["large"] - sizes["small"])
    begun = time.perf_counter()
    open_store("s3://bucket/small").read("index.json")
    found = {"client_s": first_s - (time.perf_counter() - begun)}
    found["shard_s"] = each_s["small"] - per_byte * sizes["small"]
    fetched = trained("s3://bucket/large", scratch / "again", Run(NORMAL, num_workers=1))
    found["unpack_s_per_mb"] = fetched["verify_s"] / fetched["fetched_bytes"] * 1e6
    here = str(folder / "small")
    runs = {workers: trained(here, scratch, Run(NORMAL, num_workers=workers)) for workers in (0, 1, 3) * 2}
    found["sample_s"] = (runs[0]["spent_s"] - runs[0]["first_s"]) / (runs[0]["samples"] - BATCH)
    found["start_s"] = runs[0]["first_s"] - BATCH * found["sample_s"]
    found["worker_s"] = (runs[3]["first_s"] - runs[1]["first_s"]) / 2
    found["send_s"] = trained(here, scratch, Run(NORMAL, num_workers=1, step_s=0.01))["waits_s"]
    return found


def _child(what: str, endpoint: str, folder: Path, run: str) -> dict[str, float]:
    """Run something in a process of its own, with an empty cache."""
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        settings = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_DEFAULT_REGION": "us-east-1"}
        env = {**os.environ, **dict.fromkeys(VARIABLES, endpoint), **settings, "OMP_NUM_THREADS": "1"}
        env |= {"NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1", "LIGHTNING_STREAM_CACHE": f"{scratch}/cache"}
        if what == "trained" and RUNS[run].resumes:
            _write_state(folder / RUNS[run].data, Path(scratch))
        urllib.request.urlopen(f"{endpoint}/_counts").read()
        command = [
            sys.executable,
            __file__,
            "--child",
            what,
            "--folder",
            str(folder),
            "--scratch",
            scratch,
            "--run",
            run,
        ]
        done = subprocess.run(command, capture_output=True, text=True, env=env, check=False, timeout=300)
        if done.returncode:
            raise RuntimeError(f"{run} failed:\n{done.stderr[-3000:]}")
        counts = json.loads(urllib.request.urlopen(f"{endpoint}/_counts").read())
        return {**json.loads(done.stdout.splitlines()[-1]), **counts}


def _write_state(data: Path, scratch: Path) -> None:
    """The state of a training run in the middle of its epoch."""
    from lightning_stream import StreamingDataLoader, StreamingDataset

    loader = StreamingDataLoader(StreamingDataset(local=data, shuffle=True, **FEW), batch_size=BATCH)
    batches = iter(loader)
    for _ in range(len(loader) // 2):
        next(batches)
    (scratch / "state.json").write_text(json.dumps(loader.state_dict()))


def predicted(folder: Path, run: Run, costs: dict[str, float]) -> dict[str, Any]:
    """What the simulator expects of a run."""
    from lightning_stream import StreamingDataset
    from lightning_stream.dataset import source_of
    from lightning_stream.formats.sizes import parse_bytes
    from lightning_stream.order import OrderConfig, RunOrder, StreamWeights, World
    from lightning_stream.simulation import Link, Machine, Node, Part, Shards, Training, Work, simulate

    reader = source_of(StreamingDataset(local=folder / run.data)).reader
    (index,) = reader.indexes
    named = {"canonical_nodes": run.dataset.get("num_canonical_nodes"), "window": run.dataset.get("window")}
    config = OrderConfig.resolve(batch_size=BATCH, device_batch_size=BATCH, shuffle=True, world=World(), **named)
    training = Training(RunOrder(reader.snapshot, [StreamWeights()], config), BATCH, BATCH, World())
    settings = {name: value for name, value in run.dataset.items() if name in ("predownload", "start_by_range")}
    if limit := run.dataset.get("cache_limit"):
        settings["cache_limit"] = parse_bytes(limit)
    link = Link(run.pace.latency_s, run.pace.bytes_per_s or 1e10, run.pace.all_bytes_per_s)
    work = replace(Work(**costs), step_s=run.step_s, sample_s=costs["sample_s"] + run.sample_s)
    node = Node(num_workers=run.num_workers, **settings)
    shards = Shards.of([index], index_bytes=(folder / run.data / "index.json").stat().st_size)
    begun = time.perf_counter()
    found = simulate(Part(training, shards), Machine(link, work, node))
    seconds = time.perf_counter() - begun
    of_epoch = {"samples_per_s": found.samples_per_s, "MB": (found.download_bytes + shards.index_bytes) / 1e6}
    first_s = found.resume_s if run.resumes else found.first_batch_s
    numbers = {"first_s": first_s, **({} if run.resumes else of_epoch)}
    return {"numbers": numbers, "limited_by": found.limited_by, "simulated_in_s": seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=RUNS, default=list(RUNS))
    for flag in ("--child", "--folder", "--scratch", "--run"):
        parser.add_argument(flag, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        data, scratch = RUNS[args.run].data, Path(args.scratch)
        if args.child == "trained":
            found = trained(f"s3://bucket/{data}", scratch, RUNS[args.run])
        else:
            found = measured_work(Path(args.folder), scratch)
        sys.stdout.write("\n" + json.dumps(found) + "\n")
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(folder)
        sys.stdout.write(f"{'':42}{'first batch':>22}{'samples/s':>22}{'MB':>22}  limited by\n")
        for name in args.only:
            _compare(name, folder, args.rounds)


def _compare(name: str, folder: Path, rounds: int) -> None:
    """Print what was predicted of a run, what was measured, and the difference."""
    run, runs, costs = RUNS[name], list[dict[str, float]](), list[dict[str, float]]()
    with serve(folder, Pace()) as unpaced, serve(folder, run.pace) as paced:
        for _ in range(rounds):
            costs.append(_child("measured", unpaced, folder, name))
            runs.append(_child("trained", paced, folder, name))
    names = costs[0].keys() - {"gets", "bytes"}
    expected = predicted(folder, run, {one: max(0.0, statistics.median(cost[one] for cost in costs)) for one in names})
    measured = {
        "first_s": [one["first_s"] for one in runs],
        "samples_per_s": [one["samples"] / (one["spent_s"] - one["first_s"]) for one in runs],
        "MB": [one["bytes"] / 1e6 for one in runs],
    }
    pairs = [(value, statistics.median(measured[name])) for name, value in expected["numbers"].items()]
    cells = "".join(f"{a:>8.2f} {b:>7.2f} {100 * (a / b - 1):+5.0f}%" for a, b in pairs)
    about = f"{expected['limited_by']} ({expected['simulated_in_s']:.2f} s)"
    sys.stdout.write(f"{name:42}{cells:66}  {about}, load {os.getloadavg()[0]:.1f}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
