"""A dataset of 100,000 shards and 10^9 samples: seconds until the first batch of a start and of a resume, and memory.

python benchmarks/fetch_index.py [--shards 100000] [--rounds 3]
python benchmarks/fetch_index.py --shards 10000 --shard-mb 64 --nodes 128    # first batches from 128 large shards

From an S3 server of this machine with 25 ms to the first byte and 60 MB/s on a connection: into an empty cache; again
with the index there; and resumed in the middle of the epoch. "ready" is when the first batch's sample ids are known.
The shards are small, and the clock begins after the imports: what is left is the index, the order and requests. The
peer runs where LIGHTNING_STREAM_MOSAIC_PYTHON names its Python, until it is ready, over a local folder, which spares it
the download.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from paced_store import Pace, serve

SAMPLES, ROW_BYTES, LINKS = 10_000, 2048, 30_000


def write(folder: Path, num_shards: int, shard_mb: int) -> int:
    """One shard under many names: a file may have 65,000 of them. Returns its samples."""
    import numpy as np

    from lightning_stream import MDSWriter

    samples = (shard_mb << 20) // (ROW_BYTES + 8) or SAMPLES
    with MDSWriter(
        out=folder, columns={"id": f"ndarray:uint8:{ROW_BYTES if shard_mb else 8}"}, size_limit=None
    ) as writer:
        writer.write_batch({"id": np.zeros((samples, ROW_BYTES if shard_mb else 8), np.uint8)})
    index = json.loads((folder / "index.json").read_bytes())
    (shard,), content = index["shards"], (folder / "shard.00000.mds").read_bytes()
    raws = [{**shard["raw_data"], "basename": f"shard.{number:06}.mds"} for number in range(num_shards)]
    for number, raw in enumerate(raws):
        path = folder / raw["basename"]
        if number % LINKS:
            os.link(folder / raws[number // LINKS * LINKS]["basename"], path)
        else:
            path.write_bytes(content)
    shards = [{**shard, "raw_data": raw} for raw in raws]
    (folder / "index.json").write_text(json.dumps({**index, "shards": shards}, sort_keys=True))
    return samples


class Clock:
    """Seconds, CPU-seconds and memory since it was made."""

    def __init__(self) -> None:
        self._begun = self._now()

    @staticmethod
    def _now() -> tuple[float, float, float]:
        resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        return time.perf_counter(), time.process_time(), resident

    def read(self) -> dict[str, float]:
        taken = [now - begun for now, begun in zip(self._now(), self._begun, strict=True)]
        return dict(zip(("ready", "cpu", "MiB"), taken, strict=True))


def ours(remote: str, local: str, state: Path, nodes: int) -> dict:
    import boto3  # noqa: F401
    import torch  # noqa: F401

    from lightning_stream import StreamingDataLoader, StreamingDataset

    clock = Clock()
    dataset = StreamingDataset(remote=remote, local=local, shuffle=True, num_canonical_nodes=nodes)
    loader = StreamingDataLoader(dataset, 256)
    if state.exists():
        loader.load_state_dict(json.loads(state.read_bytes()))
    assert len(loader.trace(0).ids) == 256
    ready = clock.read()["ready"]
    batches = iter(loader)
    assert len(next(batches)["id"]) == 256
    found = {**clock.read(), "ready": ready, "first": clock.read()["ready"]}
    middle = replace(loader.first_position(), position=len(loader) // 2 * 256)
    state.with_suffix(".middle").write_text(json.dumps(middle.to_state()))
    return found


def mosaic(remote: str, local: str, state: Path, nodes: int) -> dict:  # noqa: ARG001
    import streaming

    clock = Clock()
    assert streaming.StreamingDataset(local=remote, shuffle=True, batch_size=256).size  # its order comes later
    return {**clock.read(), "first": float("nan")}


def _run(python: str, contender: str, remote: str, local: Path, endpoint: str, state: Path, nodes: int = 16) -> dict:
    settings = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_DEFAULT_REGION": "us-east-1"}
    env = {**os.environ, **settings, "S3_ENDPOINT_URL": endpoint, "PYTHONWARNINGS": "ignore"}
    command = [python, __file__, "--contender", contender, "--remote", remote, "--local", str(local), "--state", state]
    command += ["--nodes", str(nodes)]
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=True, timeout=600)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shards", type=int, default=100_000)
    parser.add_argument("--shard-mb", type=int, default=0, help="0: 120 KB")
    parser.add_argument("--nodes", type=int, default=16, help="canonical nodes: shards that the first batch needs")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--contender", choices=("ours", "mosaic"), help=argparse.SUPPRESS)
    parser.add_argument("--remote", help=argparse.SUPPRESS)
    parser.add_argument("--local", help=argparse.SUPPRESS)
    parser.add_argument("--state", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.contender:
        found = {"ours": ours, "mosaic": mosaic}[args.contender](args.remote, args.local, args.state, args.nodes)
        sys.stdout.write("\n" + json.dumps(found) + "\n")
        return
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        samples = write(folder / "data", args.shards, args.shard_mb)
        none, middle = folder / "none", folder / "none.middle"
        cases = {"from S3": none, "index in the cache": none, "resumed in the middle": middle}
        found: dict[str, list[dict]] = {}
        with serve(folder, Pace(0.025, 60e6)) as endpoint:
            for number, (name, state) in itertools.product(range(args.rounds), cases.items()):
                cache = folder / f"cache{number}"
                found.setdefault(name, []).append(
                    _run(sys.executable, "ours", "s3://bucket/data", cache, endpoint, state, args.nodes)
                )
        if python := os.environ.get("LIGHTNING_STREAM_MOSAIC_PYTHON"):
            found["mosaic, local"] = [_run(python, "mosaic", str(folder / "data"), folder, "", none)]
        megabytes = (folder / "data" / "index.json").stat().st_size / 1e6
        sys.stdout.write(
            f"{args.shards:,} shards, {args.shards * samples:,} samples, an index of {megabytes:.0f} MB\n"
            f"{'':28}{'ready s':>9}{'first batch s':>15}{'CPU-s':>8}{'MiB':>8}\n"
        )
        for name, runs in found.items():
            ready, first, cpu, size = (
                statistics.median(run[key] for run in runs) for key in ("ready", "first", "cpu", "MiB")
            )
            sys.stdout.write(f"{name:28}{ready:9.2f}{first:15.2f}{cpu:8.2f}{size:8.0f}\n")


if __name__ == "__main__":
    main()
