"""The first epoch from an S3 store into an empty cache: time to the first batch, throughput, CPU per GB.

python benchmarks/cold_start.py [--group "two workers"] [--row-bytes 2048] [--shard-mb 8] [--shards 50] [--batch 256]

All cases read the same rows, from a server of this machine (`paced_store.py`) with 25 ms to the first byte and 60 MB/s
on each connection; "link" has 100 MB/s for all connections together. The clock begins after the imports. "bare boto3"
is the floor: four threads in each process that write what they get to files, and make no batches.
"""

from __future__ import annotations

import json
import multiprocessing
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import loaders
import numpy as np
from frame import Clock, Group, Job, Result, main
from paced_store import Pace

USUAL, LINK, THREADS = Pace(0.025, 60e6), Pace(0.025, 60e6, 100e6), 4


def prepare(job: Job) -> None:
    from lightning_stream import MDSWriter

    rng = np.random.default_rng(0)
    sizes = job.sizes
    columns = {"x": f"ndarray:uint8:{sizes.row_bytes}"}
    rows = (sizes.shard_mb << 20) // (sizes.row_bytes + 8)  # each row has an offset too
    with MDSWriter(out=job.folder / "rows", columns=columns, size_limit=sizes.shard_mb << 20) as writer:
        for _ in range(sizes.shards):
            writer.write_batch({"x": rng.integers(0, 256, (rows, sizes.row_bytes), np.uint8)})


def read(loader: loaders.Loader, job: Job, workers: int) -> Result:
    import boto3  # noqa: F401 - the peers have it loaded too
    import torch  # noqa: F401

    if loader is loaders.litdata:
        loaders.write_litdata(job, "rows")
    clock = Clock()
    batches = loader(job, "rows", job.sizes.batch, workers, remote=True)
    return per_gb(job, loaders.read(batches, clock=clock))


def bare_boto3(job: Job, workers: int) -> Result:
    import boto3  # noqa: F401 - imported before the clock begins

    shards = json.loads((job.folder / "rows" / "index.json").read_bytes())["shards"]
    names = [shard["raw_data"]["basename"] for shard in shards]
    processes = max(1, workers)
    fork = multiprocessing.get_context("fork")
    clock = Clock()
    started = [fork.Process(target=_get_all, args=(job, names[k::processes])) for k in range(processes)]
    for process in started:
        process.start()
    for process in started:
        process.join()
    return per_gb(job, clock.stop(sum(shard["samples"] for shard in shards)))


def _get_all(job: Job, names: list[str]) -> None:
    import boto3
    from botocore.config import Config

    client = boto3.client("s3", config=Config(max_pool_connections=THREADS))

    def get(name: str) -> None:
        body = client.get_object(Bucket="bucket", Key=f"rows/{name}")["Body"]
        with (job.scratch / name).open("wb", buffering=0) as file:
            while chunk := body.read(1 << 20):
                file.write(chunk)

    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(get, names))


def per_gb(job: Job, result: Result) -> Result:
    """The result, with what is said of bytes."""
    gigabytes = result["samples"] * job.sizes.row_bytes / 1e9
    return {**result, "MB/s": 1e3 * gigabytes / result["wall_s"], "CPU-s/GB": result["cpu_s"] / gigabytes}


def cases(workers: int) -> dict[str, Any]:
    contenders = {
        "ours": partial(read, loaders.ours),
        "bare boto3": bare_boto3,
        "mosaic": partial(read, loaders.mosaic),
        "litdata": partial(read, loaders.litdata),
    }
    return {name: partial(case, workers=workers) for name, case in contenders.items()}


if __name__ == "__main__":
    groups = [
        Group("in process", cases(0), prepare, USUAL),
        Group("two workers", cases(2), prepare, USUAL),
        Group("TLS, in process", cases(0), prepare, USUAL, tls=True),
        Group("a link of 100 MB/s, in process", cases(0), prepare, LINK),
    ]
    main(__doc__, groups, shards=(50, 2), shard_mb=(8, 1), row_bytes=(2048, 2048), batch=(256, 256))
