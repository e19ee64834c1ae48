"""A dataset of 100,000 shards: seconds until its first batch's sample ids are known, and the memory that takes.

python benchmarks/fetch_index.py [--shards 100000] [--rounds 3]

From an S3 server of this machine with 25 ms to the first byte and 60 MB/s on a connection, into an empty cache; and
again with the index there. The peer runs where LIGHTNING_STREAM_MOSAIC_PYTHON names its Python, over a local folder,
which spares it the download.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from paced_store import Pace, serve

SAMPLES, SHARD_BYTES = 1000, 1 << 26


def write_index(folder: Path, num_shards: int) -> None:
    """An index alone: nothing reads the shards."""
    about = {"column_encodings": ["int", "bytes"], "column_names": ["id", "x"], "column_sizes": [8, None]}
    rest = {"compression": None, "format": "mds", "hashes": ["xxh3_64"], "samples": SAMPLES, "size_limit": SHARD_BYTES}
    shards = []
    for number in range(num_shards):
        hashes = {"xxh3_64": f"{number * 0x9E3779B97F4A7C15 % (1 << 64):016x}"}
        raw = {"basename": f"shard.{number:05}.mds", "bytes": SHARD_BYTES - number % 1000, "hashes": hashes}
        shards.append({**about, **rest, "raw_data": raw, "version": 2, "zip_data": None})
    folder.mkdir()
    (folder / "index.json").write_text(json.dumps({"shards": shards, "version": 2}, sort_keys=True))


class Clock:
    """Seconds, CPU-seconds and memory since it was made."""

    def __init__(self) -> None:
        self._begun = self._now()

    @staticmethod
    def _now() -> tuple[float, float, float]:
        resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        return time.perf_counter(), time.process_time(), resident

    def say(self) -> None:
        taken = [now - begun for now, begun in zip(self._now(), self._begun, strict=True)]
        sys.stdout.write("\n" + json.dumps(dict(zip(("ready", "cpu", "MiB"), taken, strict=True))) + "\n")


def ours(remote: str, local: str) -> None:
    import boto3  # noqa: F401
    import torch  # noqa: F401

    from lightning_stream import StreamingDataLoader, StreamingDataset

    clock = Clock()
    loader = StreamingDataLoader(StreamingDataset(remote=remote, local=local, shuffle=True), 256)
    assert len(loader.trace(0).ids) == 256
    clock.say()


def mosaic(remote: str, local: str) -> None:  # noqa: ARG001
    import streaming

    clock = Clock()
    assert streaming.StreamingDataset(local=remote, shuffle=True, batch_size=256).size  # its order comes later
    clock.say()


def _run(python: str, contender: str, remote: str, local: Path, endpoint: str) -> dict:
    settings = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_DEFAULT_REGION": "us-east-1"}
    env = {**os.environ, **settings, "S3_ENDPOINT_URL": endpoint, "PYTHONWARNINGS": "ignore"}
    command = [python, __file__, "--contender", contender, "--remote", remote, "--local", str(local)]
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=True, timeout=600)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shards", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--contender", choices=("ours", "mosaic"), help=argparse.SUPPRESS)
    parser.add_argument("--remote", help=argparse.SUPPRESS)
    parser.add_argument("--local", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.contender:
        {"ours": ours, "mosaic": mosaic}[args.contender](args.remote, args.local)
        return
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        write_index(folder / "data", args.shards)
        found: dict[str, list[dict]] = {}
        with serve(folder, Pace(0.025, 60e6)) as endpoint:
            for number in range(args.rounds):
                for name in ("ours, from S3", "ours, index in the cache"):
                    run = _run(sys.executable, "ours", "s3://bucket/data", folder / f"cache{number}", endpoint)
                    found.setdefault(name, []).append(run)
        if python := os.environ.get("LIGHTNING_STREAM_MOSAIC_PYTHON"):
            found["mosaic, local"] = [_run(python, "mosaic", str(folder / "data"), folder, "")]
        megabytes = (folder / "data" / "index.json").stat().st_size / 1e6
        sys.stdout.write(
            f"{args.shards:,} shards, an index of {megabytes:.0f} MB\n{'':28}{'ready s':>9}{'CPU-s':>8}{'MiB':>8}\n"
        )
        for name, runs in found.items():
            ready, cpu, size = (statistics.median(run[key] for run in runs) for key in ("ready", "cpu", "MiB"))
            sys.stdout.write(f"{name:28}{ready:9.2f}{cpu:8.2f}{size:8.0f}\n")


if __name__ == "__main__":
    main()
