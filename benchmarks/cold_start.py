"""The first epoch from an S3 store into an empty cache: time to the first batch, throughput, CPU per GB.

python benchmarks/cold_start.py [--only "two workers"] [--row-bytes 2048] [--shard-mb 8] [--shards 50] [--batch 256]

All cases read the same rows, from a server of this machine (`paced_store.py`) with 25 ms to the first byte and 60 MB/s
on each connection; "link" has 100 MB/s for all connections together. The clock begins after the imports. "bare boto3"
is the floor: four threads that write what they get to files, and make no batches.

"the first batch of many shards" has 10^9 samples in 100,000 shards, and measures the first batch alone, the import of
the store's client included: into an empty cache, with the index there, and in the middle of the epoch. One shard stands
under all names.

"the first batch of many streams" has 50 prefixes of the bucket, each a stream with one shard.

"compressed text" has shards of 64 MB under 1,000 names. "MB of 64" is what came for a batch of 64 samples from 16
shards, "MB of one" for one sample, and "MB of shard" is the size of a shard. "first_s" is the time to the first batch
of 64 in a shuffled order of 4 canonical nodes.
"""

from __future__ import annotations

import json
import multiprocessing
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import loaders
import numpy as np
from frame import Clock, Group, Job, Result, main
from paced_store import Pace

USUAL = Pace(0.025, 60e6)
LINK = Pace(0.025, 60e6, 100e6)
THREADS = 4


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
    repeat(folder, index, job.sizes.many, "raw_data")


def repeat(folder: Path, index: dict[str, Any], times: int, file: str) -> None:
    """Let the one shard of a dataset stand under many names."""
    (shard,) = index["shards"]
    index["shards"] = []
    for k in range(times):
        name = shard[file]["basename"].replace("00000", f"{k:06}")
        (folder / name).symlink_to(shard[file]["basename"])
        raw = {**shard["raw_data"], "basename": shard["raw_data"]["basename"].replace("00000", f"{k:06}")}
        index["shards"].append({**shard, "raw_data": raw, file: {**shard[file], "basename": name}})
    (folder / "index.json").write_text(json.dumps(index, sort_keys=True))


def prepare_text(job: Job) -> None:
    from lightning_stream import MDSWriter

    rng = np.random.default_rng(0)
    words = ["".join(map(chr, rng.integers(97, 123, rng.integers(2, 9)))) for _ in range(50_000)]
    for compression in ("zstd", "zstd:seekable"):
        rng = np.random.default_rng(1)
        folder = job.folder / compression.replace(":", "-")
        left = job.sizes.text_mb << 20
        with MDSWriter(out=folder, columns={"text": "str"}, compression=compression, size_limit=None) as writer:
            while left > 0:
                numbers = rng.zipf(1.2, int(rng.lognormal(5, 0.8))) % len(words)
                text = " ".join([words[k] for k in numbers.tolist()])
                writer.write({"text": text})
                left -= len(text)
        repeat(folder, json.loads((folder / "index.json").read_bytes()), job.sizes.texts, "zip_data")


def bytes_of_text(job: Job, compression: str) -> Result:
    from lightning_stream import StreamingDataLoader, StreamingDataset
    from lightning_stream.counters import NAMES

    rng = np.random.default_rng(0)
    name = compression.replace(":", "-")

    def fetched_mb(num_shards: int, per_shard: int) -> float:
        cache = job.scratch / f"{num_shards}"
        dataset = StreamingDataset(remote=f"{loaders.BUCKET}/{name}", local=cache)
        shards = rng.choice(job.sizes.texts, num_shards, replace=False)
        samples = dataset.size // job.sizes.texts
        ids = (shards[:, None] * samples + rng.integers(0, samples, (num_shards, per_shard))).ravel()
        counted = dataset.reader.counters.values
        fetched = NAMES.index("fetched_bytes")
        before = counted[fetched]
        dataset.read_batch(ids.tolist())
        return float(counted[fetched] - before) / 1e6

    order = {"shuffle": True, "num_canonical_nodes": 4}
    dataset = StreamingDataset(remote=f"{loaders.BUCKET}/{name}", local=job.scratch / "first", **order)
    assert dataset.size  # its index is here
    clock = Clock()
    next(iter(StreamingDataLoader(dataset, 64)))
    first_s = clock.stop(64)["wall_s"]
    clock = Clock()
    of_batch = fetched_mb(16, 4)
    result = {**clock.stop(64), "first_s": first_s}
    index = json.loads((job.folder / name / "index.json").read_bytes())
    of_shard = index["shards"][0]["zip_data"]["bytes"] / 1e6
    return {**result, "MB of 64": of_batch, "MB of one": fetched_mb(1, 1), "MB of shard": of_shard}


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


def prepare_streams(job: Job) -> None:
    from lightning_stream import MDSWriter

    with MDSWriter(out=job.folder / "rows", columns={"x": "ndarray:uint8:8"}) as writer:
        writer.write_batch({"x": np.zeros((100, 8), np.uint8)})
    for k in range(job.sizes.streams):
        (job.folder / f"stream-{k}").symlink_to("rows")


def start_streams(job: Job, library: str = "lightning_stream") -> Result:
    import boto3  # noqa: F401 - the peer has it loaded too
    import torch  # noqa: F401

    names = import_module(library)
    clock = Clock()
    streams = [
        names.Stream(remote=f"{loaders.BUCKET}/stream-{k}", local=str(job.scratch / f"{k}"))
        for k in range(job.sizes.streams)
    ]
    dataset = names.StreamingDataset(streams=streams, shuffle=True, batch_size=64)
    return clock.stop(len(next(iter(names.StreamingDataLoader(dataset, batch_size=64)))["x"]))


def start_again(job: Job, **options: bool) -> Result:
    """After another process has filled the cache with the index, and with the first batch's shards."""
    other = multiprocessing.get_context("spawn").Process(target=start, args=(job,))
    other.start()
    other.join()
    return start(job, **options)


if __name__ == "__main__":
    ours = partial(read, loaders.ours)
    litdata = partial(read, loaders.litdata)
    here = {"ours": partial(ours, workers=0), "bare boto3": bare_boto3, "litdata": partial(litdata, workers=0)}
    two = {"ours": partial(ours, workers=2), "litdata": partial(litdata, workers=2)}
    first = {
        "ours, empty cache": start,
        "ours, index in the cache": start_again,
        "ours, resumed in the middle": partial(start_again, resumed=True),
    }
    text = {f"ours, {name}": partial(bytes_of_text, compression=name) for name in ("zstd", "zstd:seekable")}
    streams = {"ours": start_streams, "mosaic": partial(start_streams, library="streaming")}
    groups = [
        Group("in process", here, prepare, USUAL),
        Group("two workers", two, prepare, USUAL),
        Group("TLS, in process", here, prepare, replace(USUAL, tls=True)),
        Group("a link of 100 MB/s, in process", here, prepare, LINK),
        Group("the first batch of many shards", first, prepare_many, USUAL),
        Group("the first batch of many streams", streams, prepare_streams, USUAL),
        Group("compressed text", text, prepare_text, USUAL),
    ]
    sizes = {"shards": (50, 2), "shard_mb": (8, 1), "row_bytes": (2048, 2048), "batch": (256, 256)}
    main(__doc__, groups, **sizes, many=(100_000, 300), streams=(50, 3), texts=(1000, 20), text_mb=(64, 1))
