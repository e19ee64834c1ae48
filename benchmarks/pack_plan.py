"""Rows planned from log-normal documents, batches sorted by length, and shares balanced by cost.

python benchmarks/pack_plan.py [--documents 400000] [--many 100000000]

Documents have 700 tokens in the mean. Speeds are documents per CPU-second of planning alone, in windows of 16,384.
"resume ms" is until the first global batch of one machine is planned, of 1 and of 16 machines, the median of 12 places
in the epoch.

Batches hold 64 whole documents, or up to 64 times the longest one, padded to their longest. Shares: the most expensive
replica over the mean one, with 8 replicas a machine and 8 packed rows of 8,192 tokens each, where a row costs the sum
of its documents' squared lengths; "downloads" is copies of the data, of all machines together.

Samples of images and text have 0 to 8 images of 144 to 2,880 tokens; those of more than a row of 8,192 are left out.
They are packed whole by ``text + images``, and balanced by ``(text + images) ** 2 + 4096 * images`` over 64 replicas;
rows are even by it, as in every run that begins with such a balance. "bound" is the most expensive machine over the
mean one: no balance inside machines is below it.

TRL's packer gets all of these samples, in batches of 1,000 as it is called; "cut" are samples that it divided or
truncated, "lost" the tokens that are in no row. Axolotl's packer gets the lengths of those that fit into a row, as it
drops the others before, in groups of 100,000 and at most 200 of them a row. ``--trl-python`` and ``--axolotl-python``
are those of an environment with this package: ``pip install trl`` and ``pip install --no-deps axolotl numba llvmlite``.

First batches are those of a loader with two workers, over one million and over ``--many`` documents of 1 to 32 tokens:
from the dataset's constructor until the batch has come. All shards are links to one file, beside one file of lengths.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from frame import Clock, Group, Job, Result, main

from lightning_stream import MDSWriter, Packing, StreamingDataLoader, StreamingDataset
from lightning_stream.order import Balance, BatchPlan, OrderConfig, RunOrder, Snapshot, StreamWeights, World
from lightning_stream.order.buckets import LengthBuckets
from lightning_stream.order.packing import RowPacking
from lightning_stream.questions.downloads import estimate_factor
from lightning_stream.reading.length_expression import LengthExpression

WINDOW = 16_384
REPLICAS = 8
MICRO_BATCH = 2
ROWS_PER_SHARD = 1 << 16
FEW = 1_000_000
ARRANGED: dict[str, dict[str, Any]] = {
    "packed": {"pack": Packing(row_length=2048)},
    "batch_tokens": {"bucket_by": "tokens", "batch_tokens": 32 * 2048},
}


def lengths_of(count: int, seed: int = 0) -> np.ndarray:
    drawn = np.random.default_rng(seed).lognormal(np.log(700) - 0.72, 1.2, count)
    return np.clip(drawn, 1, 200_000).astype("<u4")


def run_of(lengths: np.ndarray, num_shards: int = 20, amounts: Any = None, **options: object) -> RunOrder:
    """The order of the documents, or rows."""
    sizes = [len(shard) for shard in np.array_split(lengths, num_shards)]
    config = OrderConfig.resolve(**{"batch_size": 256, "shuffle": True, **options})
    known = lengths if config.needs_lengths else None
    return RunOrder(Snapshot.of([np.array(sizes)]), [StreamWeights()], config, known, amounts=amounts)


def packed(row_length: int, job: Job) -> Result:
    lengths = lengths_of(job.sizes.documents)
    packing = RowPacking(row_length, RowPacking(row_length).usual_window(lengths))
    order = run_of(lengths, packing=RowPacking(row_length, WINDOW)).epoch(0)
    clock = Clock()
    num_rows = order.num_samples
    result = clock.stop(len(lengths))
    notes = {f"resume ms, {n}": _resume_ms(lengths, packing, World(0, n)) for n in (1, 16)}
    return {**result, "padding %": _padding(lengths, num_rows * row_length), **notes}


def _resume_ms(lengths: np.ndarray, packing: RowPacking, world: World) -> float:
    known = run_of(lengths, packing=packing).epoch(0)
    times = []
    for place in range(12):
        start = known.num_samples * place // 12
        windows = known.counted_windows(start)
        run = run_of(lengths, packing=packing)
        run.epoch(0)  # so that only counting is timed
        began = time.process_time()
        BatchPlan(run.epoch(0, windows), batch_size=256, world=world, start=start).share(0)
        times.append(1e3 * (time.process_time() - began))
    return statistics.median(times)


def _padding(lengths: np.ndarray, tokens: int) -> float:
    return 100 * (1 - float(lengths.sum(dtype=np.int64)) / tokens)


def batches(size: dict[str, int | None], job: Job) -> Result:
    lengths = np.minimum(lengths_of(job.sizes.documents), 8192)
    buckets = LengthBuckets.resolved(lengths, **size) if size else None
    batch_size = buckets.batch_size if buckets else 64
    clock = Clock()
    order = run_of(lengths, batch_size=batch_size, buckets=buckets).epoch(0)
    plan = BatchPlan(order, batch_size=batch_size)
    ids = order.ids(0, order.num_samples)
    edges = np.array([plan.bounds(k)[0] for k in range(plan.num_batches)])
    longest = np.maximum.reduceat(lengths[ids], edges)
    tokens = int((longest.astype(np.int64) * np.diff(edges, append=len(ids))).sum())
    return {**clock.stop(len(lengths)), "padding %": _padding(lengths, tokens)}


def row_costs(job: Job) -> np.ndarray:
    """The costs of packed rows, in random order."""
    lengths = np.minimum(lengths_of(13 * job.sizes.rows, seed=1), 8192)
    order = run_of(lengths, packing=RowPacking(8192, WINDOW)).epoch(0)
    spans = order.rows(0, order.num_samples)
    costs = np.add.reduceat(spans.num_tokens**2, spans.edges[:-1])
    return np.random.default_rng(0).permutation(costs)[: job.sizes.rows]


def shares(num_machines: int, nodes: int, job: Job) -> Result:
    costs = row_costs(job)
    world = World(0, num_machines * REPLICAS, REPLICAS)
    batch_size = 8 * world.num_replicas
    run = run_of(costs, num_shards=256, batch_size=batch_size, canonical_nodes=nodes)
    worlds = [replace(world, rank=rank) for rank in range(world.num_ranks)]
    worst = {}
    clock = Clock()
    for name, balance in (("plain", None), ("balanced", Balance(lambda ids: costs[ids], MICRO_BATCH))):
        options = {"batch_size": batch_size, "balance": balance}
        plans = [BatchPlan(run.epoch(0), world=rank_world, **options) for rank_world in worlds]
        table = np.array([[costs[plan.share(k).ids].sum() for plan in plans] for k in range(2)])  # [steps, replicas]
        worst[name] = float((table.max(axis=1) / table.mean(axis=1)).max())
    return {**clock.stop(), **worst, "downloads": estimate_factor(run, epoch=0, batch_size=batch_size, world=world)}


def images_and_text(count: int) -> dict[str, np.ndarray]:
    """The tokens of each sample's text, and of all its images."""
    rng = np.random.default_rng(2)
    num_images = rng.choice(9, count, p=[0.2, 0.5, 0.1, 0.06, 0.05, 0.03, 0.02, 0.02, 0.02])
    of_image = rng.choice(
        [144, 256, 576, 1152, 1728, 2304, 2880], num_images.sum(), p=[0.1, 0.1, 0.4, 0.1, 0.1, 0.1, 0.1]
    )
    sums = np.append(0, np.cumsum(of_image))
    ends = np.cumsum(num_images)
    return {
        "text": np.clip(rng.lognormal(5.3, 1.0, count), 8, 8192).astype(int),
        "images": sums[ends] - sums[ends - num_images],
    }


def whole_samples(nodes: int, window: int | None, job: Job) -> Result:
    parts = images_and_text(job.sizes.documents)
    fits = LengthExpression("text + images")(parts) <= 8192
    parts = {name: numbers[fits] for name, numbers in parts.items()}
    lengths = LengthExpression("text + images")(parts).astype("<u4")
    costs = LengthExpression("(text + images) ** 2 + 4096 * images")(parts)
    packing = RowPacking(8192, window or RowPacking(8192).usual_window(lengths), "drop")
    even = {"amounts": costs.__getitem__, "even_rows": "(text + images) ** 2 + 4096 * images"}
    run = run_of(lengths, 256, packing=packing, batch_size=8 * 64, canonical_nodes=nodes, **even)
    clock = Clock()
    num_rows = run.epoch(0).num_samples
    result = clock.stop(len(lengths))
    worst = {}
    for name, balance in (("plain", None), ("balanced", Balance(lambda ids: costs[ids], MICRO_BATCH))):
        plans = [
            BatchPlan(run.epoch(0), world=World(rank, 64, REPLICAS), batch_size=8 * 64, balance=balance)
            for rank in range(64)
        ]
        table = np.array([[costs[plan.share(k).rows.ids].sum() for plan in plans] for k in range(8)])
        worst[name] = float((table.max(axis=1) / table.mean(axis=1)).max())
    machines = table.reshape(8, -1, REPLICAS).sum(axis=2)
    worst["bound"] = float((machines.max(axis=1) / machines.mean(axis=1)).max()) if nodes > 1 else 1.0
    return {
        **result,
        "fill %": 100 - _padding(lengths, num_rows * 8192),
        "left out %": 100 * float(1 - fits.mean()),
        **worst,
    }


def fewer_samples(rule: Any, job: Job) -> Result:
    """All samples of a smaller number packed, where the longest ones are dropped or split."""
    lengths = sums_of(job)
    clock = Clock()
    packable = lengths[lengths <= 8192] if rule == "drop" else lengths
    packing = RowPacking(8192, RowPacking(8192).usual_window(packable), rule)
    num_rows = run_of(packable, packing=packing, canonical_nodes=1).epoch(0).num_samples
    cut = (lengths > 8192) & (rule != "drop")
    lost = lengths.sum() - packable.sum()
    notes = {"fill %": 100 - _padding(packable, num_rows * 8192), "cut": int(cut.sum()), "lost tokens": int(lost)}
    return {**clock.stop(len(lengths)), **notes}


def sums_of(job: Job) -> np.ndarray:
    parts = images_and_text(job.sizes.documents // 20)
    return (parts["text"] + parts["images"]).astype("<u4")


def trl_samples(strategy: str, job: Job) -> Result:
    """The tokens of a sample are its number, so that the rows tell what became of each one."""
    import pyarrow as pa
    from datasets import Dataset
    from trl.data_utils import pack_dataset

    lengths = sums_of(job)
    numbers = pa.array(np.repeat(np.arange(len(lengths), dtype=np.int32), lengths))
    begins = np.append(0, np.cumsum(lengths, dtype=np.int64))
    dataset = Dataset(pa.table({"input_ids": pa.LargeListArray.from_arrays(begins, numbers)}))
    clock = Clock()
    rows = pack_dataset(dataset, 8192, strategy).data.table.column("input_ids").combine_chunks()
    result = clock.stop(len(lengths))
    tokens = np.asarray(rows.flatten())
    row = np.repeat(np.arange(len(rows)), np.asarray(rows.value_lengths()))
    begins_here = np.append(True, (np.diff(tokens) != 0) | (np.diff(row) != 0))
    pieces = np.bincount(tokens[begins_here], minlength=len(lengths))
    counts = np.bincount(tokens, minlength=len(lengths))
    cut = (pieces > 1) | (counts < lengths)
    lost = lengths.sum() - counts.sum()
    fill = 100 * len(tokens) / (len(rows) * 8192)
    return {**result, "fill %": fill, "cut": int(cut.sum()), "lost tokens": int(lost)}


def axolotl_samples(job: Job) -> Result:
    from axolotl.utils.samplers.multipack import pack_parallel

    lengths = sums_of(job)
    packable = lengths[lengths <= 8192].astype(np.int64)
    options = {"bin_capacity": 8192, "group_size": 100_000, "bin_size": 200, "num_processes": 1}
    pack_parallel(packable[:100], **options)  # it is compiled at the first call
    clock = Clock()
    rows = pack_parallel(packable, **options)
    result = clock.stop(len(lengths))
    assert sorted(sample_id for row in rows for sample_id in row) == list(range(len(packable)))
    notes = {"cut": 0, "lost tokens": int(lengths.sum() - packable.sum())}
    return {**result, "fill %": 100 - _padding(packable, len(rows) * 8192), **notes}


def write_documents(folder: Path, count: int) -> None:
    """At least so many documents, in shards that are links to one file."""
    lengths = np.random.default_rng(0).integers(1, 33, ROWS_PER_SHARD).astype("<u4")
    tokens = np.arange(32, dtype=np.int32)
    columns = {"tokens": "ndarray:int32"}
    with MDSWriter(out=str(folder), columns=columns, size_limit=1 << 30, hashes=(), lengths={"tokens": len}) as writer:
        writer.write_batch({"tokens": [tokens[:length] for length in lengths]})
    index = json.loads((folder / "index.json").read_text())
    (shard,), (file,) = index["shards"], index["lengths"]["tokens"]
    basenames = [f"shard.{k:05}.mds" for k in range(-(-count // ROWS_PER_SHARD))]
    for basename in basenames[1:]:
        os.link(folder / basenames[0], folder / basename)
    index["shards"] = [{**shard, "raw_data": {**shard["raw_data"], "basename": name}} for name in basenames]
    repeated = np.tile(lengths, len(basenames))
    repeated.tofile(folder / file["basename"])
    digest = xxhash.xxh3_64(repeated.view(np.uint8).data).hexdigest()  # readers verify it
    file.update(bytes=repeated.nbytes, samples=len(repeated), hashes={"xxh3_64": digest})
    (folder / "index.json").write_text(json.dumps(index))


def prepare_documents(job: Job) -> None:
    for count in (FEW, job.sizes.many):
        write_documents(job.folder / str(count), count)


def first_batch(count: int | None, kind: str, job: Job) -> Result:
    """Of ``--many`` documents where ``count`` is None."""
    folder = job.folder / str(count or job.sizes.many)
    batch_size = 32 if kind == "packed" else None
    clock = Clock()
    dataset = StreamingDataset(local=str(folder), shuffle=True, **ARRANGED[kind])
    loader = StreamingDataLoader(dataset, batch_size, num_workers=2)
    next(iter(loader))
    result = clock.stop(1)
    loader.close()
    return result


if __name__ == "__main__":
    rows = {f"ours, rows of {length:,}": partial(packed, length) for length in (2048, 8192, 32_768)}
    groups = [Group("packed rows", rows)]
    kinds = {
        "ours, as they come": partial(batches, {}),
        "ours, bucket_by": partial(batches, {"batch_size": 64}),
        "ours, batch_tokens": partial(batches, {"batch_size": None, "batch_tokens": 64 * 8192}),
    }
    groups.append(Group("batches of whole documents", kinds))
    for nodes in (16, 1):
        cases = {f"ours, {count} machines": partial(shares, count, nodes) for count in (1, 2, 4, 16, 64)}
        groups.append(Group(f"shares of {nodes} canonical nodes", cases))
    sample_cases = {f"ours, {nodes} canonical nodes": partial(whole_samples, nodes, None) for nodes in (8, 1)}
    sample_cases["ours, 8 canonical nodes, window 16,384"] = partial(whole_samples, 8, WINDOW)
    groups.append(Group("samples of images and text", sample_cases))
    fewer = {f"ours, {rule}": partial(fewer_samples, rule) for rule in ("drop", "split")}
    fewer |= {f"trl, {strategy}": partial(trl_samples, strategy) for strategy in ("bfd", "bfd_split", "wrapped")}
    fewer["axolotl"] = axolotl_samples
    groups.append(Group("samples beside TRL and Axolotl", fewer))
    for kind in ARRANGED:
        cases = {"ours, 1,000,000": partial(first_batch, FEW, kind), "ours, many": partial(first_batch, None, kind)}
        groups.append(Group(f"first batch, {kind}", cases, prepare_documents))
    main(__doc__, groups, documents=(400_000, 20_000), rows=(32_768, 8192), many=(100_000_000, 2_000_000))
