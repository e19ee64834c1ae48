"""The rule of MLPerf Storage for ResNet-50: how many simulated H100 one core keeps at least 90 % busy.

python benchmarks/mlperf_rule.py [--rounds 3] [--workers 2] [--steps 40]

An accelerator takes 400 samples of 114,660 bytes a step, and computes for 0.224 s, in which this process sleeps: 205
MB/s. Its utilisation is the time of its computing over that of the epoch, from the first batch's request to the last
step; the rule wants 0.9. The first epoch is cold: from an S3 server of this machine with 25 ms to the first byte and 60
MB/s on each connection (`paced_store.py`). The second is warm. H100 per core is what one core could feed: the seconds
of computing over the CPU-seconds of the process and its workers. Peers run where the environment names their Pythons:

    LIGHTNING_STREAM_MOSAIC_PYTHON=/path/to/python  LIGHTNING_STREAM_LITDATA_PYTHON=/path/to/python
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
from pathlib import Path

from cold_start import PYTHONS, Clock, environment, litdata_loader, write_litdata
from paced_store import Pace, serve

SAMPLE_BYTES, BATCH, STEP_S, SHARD_BYTES = 114_660, 400, 0.224, 1 << 25


def prepare(folder: Path, steps: int) -> None:
    """The same samples as MDS shards; as LitData's chunks where its Python is at hand."""
    import numpy as np

    from lightning_stream import MDSWriter

    rng = np.random.default_rng(0)
    with MDSWriter(
        out=folder / "mds", columns={"x": f"ndarray:uint8:{SAMPLE_BYTES}"}, size_limit=SHARD_BYTES
    ) as writer:
        for _ in range(steps):
            writer.write_batch({"x": rng.integers(0, 256, (BATCH, SAMPLE_BYTES), np.uint8)})
    if python := os.environ.get(PYTHONS["litdata"]):
        command = [python, __file__, "--litdata", str(folder), "--steps", str(steps)]
        subprocess.run(command, check=True, capture_output=True)


def ours(scratch: Path, workers: int):
    from lightning_stream import StreamingDataLoader, StreamingDataset

    dataset = StreamingDataset(remote="s3://bucket/mds", local=scratch, shuffle=True)
    return StreamingDataLoader(dataset, batch_size=BATCH, num_workers=workers)


def mosaic(scratch: Path, workers: int):
    from streaming import StreamingDataLoader, StreamingDataset

    dataset = StreamingDataset(
        remote="s3://bucket/mds", local=str(scratch), shuffle=True, batch_size=BATCH, shuffle_algo="py1e"
    )
    return StreamingDataLoader(dataset, batch_size=BATCH, num_workers=workers)


def litdata(scratch: Path, workers: int):
    return litdata_loader(scratch, BATCH, workers)


CONTENDERS = {"ours": ours, "mosaic": mosaic, "litdata": litdata}


def accelerate(loader, steps: int) -> dict[str, float]:
    """Train on one epoch: utilisation, and H100 per core."""
    clock, count = Clock(), 0
    for batch in loader:
        count += len(batch["x"])
        time.sleep(STEP_S)
    assert count >= steps * BATCH, f"{count} of {steps * BATCH} samples"
    found = clock.stop(count)
    return {"busy": steps * STEP_S / found["wall"], "per_core": steps * STEP_S / found["cpu"]}


def _run(contender: str, endpoint: str, data: Path, workers: int, steps: int) -> dict[str, dict[str, float]]:
    with tempfile.TemporaryDirectory(dir=data) as scratch:
        python = os.environ[PYTHONS[contender]] if contender in PYTHONS else sys.executable
        command = [python, __file__, "--contender", contender, "--scratch", scratch]
        command += ["--workers", str(workers), "--steps", str(steps)]
        done = subprocess.run(
            command, capture_output=True, text=True, env=environment(endpoint, scratch), check=False, timeout=300
        )
        if done.returncode:
            sys.stderr.write(f"{contender} failed:\n{done.stderr[-2000:]}\n")
            return {}
        return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=40, help="of an epoch")
    parser.add_argument("--only", nargs="+", choices=CONTENDERS, default=list(CONTENDERS))
    parser.add_argument("--contender", choices=CONTENDERS, help=argparse.SUPPRESS)
    parser.add_argument("--scratch", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--litdata", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.litdata:
        write_litdata(args.litdata, args.steps * BATCH, SAMPLE_BYTES, SHARD_BYTES)
        return
    if args.contender:
        import torch  # noqa: F401 - and the client, which all contenders need

        loader = CONTENDERS[args.contender](args.scratch, args.workers)
        sys.stdout.write("\n" + json.dumps({name: accelerate(loader, args.steps) for name in ("cold", "warm")}) + "\n")
        return
    with tempfile.TemporaryDirectory() as folder, serve(Path(folder), Pace(0.025, 60e6)) as endpoint:
        prepare(Path(folder), args.steps)
        chosen = [name for name in args.only if name not in PYTHONS or os.environ.get(PYTHONS[name])]
        rounds = [
            {name: _run(name, endpoint, Path(folder), args.workers, args.steps) for name in chosen}
            for _ in range(args.rounds)
        ]
    sys.stdout.write(f"{args.workers} workers, medians of {args.rounds} rounds\n{'':10}")
    sys.stdout.write(f"{'cold: busy':>12}{'H100/core':>11}{'warm: busy':>12}{'H100/core':>11}\n")
    for name in chosen:
        runs = [one[name] for one in rounds if one[name]]
        values = [
            statistics.median(run[epoch][key] for run in runs) if runs else float("nan")
            for epoch in ("cold", "warm")
            for key in ("busy", "per_core")
        ]
        sys.stdout.write(f"{name:10}{values[0]:12.2f}{values[1]:11.1f}{values[2]:12.2f}{values[3]:11.1f}\n")


if __name__ == "__main__":
    main()
