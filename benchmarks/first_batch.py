"""A dataset of 100,000 shards and 10^9 samples: the first batch of a start and of a resume.

python benchmarks/first_batch.py [--shards 100000] [--nodes 16]
python benchmarks/first_batch.py --shards 10000 --shard-mb 64 --nodes 128     # from 128 large shards

From an S3 server of this machine with 25 ms to the first byte and 60 MB/s on a connection: into an empty cache; with
the index there; and in the middle of the epoch. One shard stands under all names; without --shard-mb it has 120 KB. The
clock begins after the imports; "ready_s" is when the sample ids of the first batch are known. The peer is only measured
until it has the index, from a local folder.
"""

from __future__ import annotations

import json
import multiprocessing
import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import loaders
import numpy as np
from frame import Clock, Group, Job, Result, main
from paced_store import Pace

BATCH, ROW_BYTES, LINKS = 256, 2048, 30_000  # a file may have 65,000 names


def prepare(job: Job) -> None:
    from lightning_stream import MDSWriter

    folder, row_bytes = job.folder / "rows", ROW_BYTES if job.sizes.shard_mb else 8
    samples = (job.sizes.shard_mb << 20) // (row_bytes + 8) or 10_000
    with MDSWriter(out=folder, columns={"x": f"ndarray:uint8:{row_bytes}"}, size_limit=None) as writer:
        writer.write_batch({"x": np.zeros((samples, row_bytes), np.uint8)})
    index = json.loads((folder / "index.json").read_bytes())
    (shard,) = index["shards"]
    content = (folder / shard["raw_data"]["basename"]).read_bytes()
    index["shards"] = []
    for number in range(job.sizes.shards):
        path = folder / f"shard.{number:06}.mds"
        if number % LINKS:
            os.link(folder / f"shard.{number // LINKS * LINKS:06}.mds", path)
        else:
            path.write_bytes(content)
        index["shards"].append({**shard, "raw_data": {**shard["raw_data"], "basename": path.name}})
    (folder / "index.json").write_text(json.dumps(index, sort_keys=True))


def start(job: Job, resumed: bool = False) -> Result:
    import boto3  # noqa: F401
    import torch  # noqa: F401

    state = job.scratch / "state.json"
    clock = Clock()
    loader = loaders.ours(job, "rows", BATCH, remote=True, num_canonical_nodes=job.sizes.nodes)
    if resumed:
        loader.load_state_dict(json.loads(state.read_bytes()))
    assert len(loader.trace(0).ids) == BATCH
    ready_s = clock.wall_s
    batch = next(iter(loader))
    result = clock.stop(len(batch["x"]), ready_s=ready_s, first_s=clock.wall_s)
    middle = replace(loader.first_position(), position=len(loader) // 2 * BATCH)
    state.write_text(json.dumps(loader.state_of(middle)))
    return result


def again(job: Job, **options: bool) -> Result:
    """After another process has filled the cache with the index, and with the first batch's shards."""
    other = multiprocessing.get_context("spawn").Process(target=start, args=(job,))
    other.start()
    other.join()
    return start(job, **options)


def mosaic(job: Job) -> Result:
    import streaming

    clock = Clock()
    assert streaming.StreamingDataset(local=str(job.folder / "rows"), shuffle=True, batch_size=BATCH).size
    return clock.stop(BATCH, ready_s=clock.wall_s)


if __name__ == "__main__":
    cases: dict[str, Callable[[Job], Result]] = {
        "ours, empty cache": start,
        "ours, index in the cache": again,
        "ours, resumed in the middle": partial(again, resumed=True),
        "mosaic": mosaic,
    }
    groups = [Group("the first batch of 256", cases, prepare, Pace(0.025, 60e6))]
    main(__doc__, groups, shards=(100_000, 300), shard_mb=(0, 0), nodes=(16, 16))
