"""The first epoch from an S3 store into an empty cache: time to the first batch, throughput, CPU per GB.

python benchmarks/cold_start.py [--only "two workers"] [--row-bytes 2048] [--shard-mb 8] [--shards 50] [--batch 256]

All cases read the same rows, from a server of this machine (`paced_store.py`) with 25 ms to the first byte and 60 MB/s
on each connection; "link" has 100 MB/s for all connections together. The clock begins after the imports. "bare boto3"
is the floor: four threads that write what they get to files, and make no batches.

The last group has 10^9 samples in 100,000 shards, and measures the first batch alone, the import of the store's client
included: into an empty cache, with the index there, and in the middle of the epoch. One shard stands under all names.
"""

from __future__ import annotations

import json
import multiprocessing
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
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


def bare_boto3(job: Job) -> Result:
    import boto3
    from botocore.config import Config

    shards = json.loads((job.folder / "rows" / "index.json").read_bytes())["shards"]
    clock = Clock()
    client = boto3.client("s3", config=Config(max_pool_connections=THREADS))

    def get(shard: dict[str, Any]) -> int:
        name = shard["raw_data"]["basename"]
        body = client.get_object(Bucket="bucket", Key=f"rows/{name}")["Body"]
        with (job.scratch / name).open("wb", buffering=0) as file:
            while chunk := body.read(1 << 20):
                file.write(chunk)
        return int(shard["samples"])

    with ThreadPoolExecutor(THREADS) as pool:
        samples = sum(pool.map(get, shards))
    return per_gb(job, clock.stop(samples))


def per_gb(job: Job, result: Result) -> Result:
    """The result, with what is said of bytes."""
    gigabytes = result["samples"] * job.sizes.row_bytes / 1e9
    return {**result, "MB/s": 1e3 * gigabytes / result["wall_s"], "CPU-s/GB": result["cpu_s"] / gigabytes}


def prepare_many(job: Job) -> None:
    from lightning_stream import MDSWriter

    folder = job.folder / "rows"
    with MDSWriter(out=folder, columns={"x": "ndarray:uint8:8"}, size_limit=None) as writer:
        writer.write_batch({"x": np.zeros((10_000, 8), np.uint8)})
    index = json.loads((folder / "index.json").read_bytes())
    (shard,) = index["shards"]
    index["shards"] = []
    for number in range(job.sizes.many):
        name = f"{number:06}.mds"
        (folder / name).symlink_to(shard["raw_data"]["basename"])
        index["shards"].append({**shard, "raw_data": {**shard["raw_data"], "basename": name}})
    (folder / "index.json").write_text(json.dumps(index, sort_keys=True))


def start(job: Job, resumed: bool = False) -> Result:
    import torch  # noqa: F401

    state = job.scratch / "state.json"
    clock = Clock()
    loader = loaders.ours(job, "rows", job.sizes.batch, remote=True, num_canonical_nodes=16)
    if resumed:
        loader.load_state_dict(json.loads(state.read_bytes()))
    result = clock.stop(len(next(iter(loader))["x"]))
    middle = replace(loader.first_position(), position=len(loader) // 2 * job.sizes.batch)
    state.write_text(json.dumps(loader.state_of(middle)))
    return {**result, "first_s": result["wall_s"]}


def start_again(job: Job, **options: bool) -> Result:
    """After another process has filled the cache with the index, and with the first batch's shards."""
    other = multiprocessing.get_context("spawn").Process(target=start, args=(job,))
    other.start()
    other.join()
    return start(job, **options)


if __name__ == "__main__":
    ours, litdata = partial(read, loaders.ours), partial(read, loaders.litdata)
    here = {"ours": partial(ours, workers=0), "bare boto3": bare_boto3, "litdata": partial(litdata, workers=0)}
    two = {"ours": partial(ours, workers=2), "litdata": partial(litdata, workers=2)}
    first = {
        "ours, empty cache": start,
        "ours, index in the cache": start_again,
        "ours, resumed in the middle": partial(start_again, resumed=True),
    }
    groups = [
        Group("in process", here, prepare, USUAL),
        Group("two workers", two, prepare, USUAL),
        Group("TLS, in process", here, prepare, replace(USUAL, tls=True)),
        Group("a link of 100 MB/s, in process", here, prepare, LINK),
        Group("the first batch of many shards", first, prepare_many, USUAL),
    ]
    sizes = {"shards": (50, 2), "shard_mb": (8, 1), "row_bytes": (2048, 2048), "batch": (256, 256)}
    main(__doc__, groups, **sizes, many=(100_000, 300))
