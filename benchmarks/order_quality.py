"""How well orders shuffle at equal active shards: disk segments (of 100) that a batch of 256 touches.

    python benchmarks/order_quality.py [--shards 400] [--samples-per-shard 600] [--batch-size 256] [--active 128]

Rows lie sorted on disk. `active` is the most shards that must be at hand at once; `first batch needs` how many shards
must be there before training can begin. First and last are means over the first and last sixteenth of the epoch.
py1e and py1br are mosaicml-streaming's (bit-exact), with its default block and with the block that gives about the same
active shards; `chunk by chunk` is what LitData does by default: shards in random order, each shuffled within, one at a
time for each of 4 workers.
"""

from __future__ import annotations

import argparse

import numpy as np

from lightning_stream.order import OrderConfig, RunOrder, Snapshot, StreamWeights
from lightning_stream.order.mosaic.partitions import partition
from lightning_stream.order.mosaic.shuffles import shuffle
from lightning_stream.order.quality import NUM_SEGMENTS, random_score
from lightning_stream.order.snapshot import max_active

SEED = 9176


def native(sizes, batch_size, nodes, window):
    config = OrderConfig.resolve(batch_size=batch_size, shuffle=True, canonical_nodes=nodes, window=window)
    run = RunOrder(Snapshot.of([sizes]), [StreamWeights()], config)
    return run.epoch(0).ids(0, run.num_samples)


def mosaic(algorithm, sizes, nodes, block):
    ids = shuffle(algorithm, sizes, nodes, SEED, 0, block)
    dealt = partition("orig", len(ids), nodes, 1, 1, 1)
    return ids[dealt.reshape(-1)]


def mosaic_at(algorithm, sizes, nodes, active):
    """That library's order with the largest block that keeps the active shards within the wanted number."""
    low, high = 1, int(sizes.sum())
    while low < high:
        middle = (low + high + 1) // 2
        fits = max_active(shards_of(mosaic(algorithm, sizes, nodes, middle), sizes)) <= active
        low, high = (middle, high) if fits else (low, middle - 1)
    return low, mosaic(algorithm, sizes, nodes, low)


def chunk_by_chunk(sizes, workers, batch_size):
    """Each worker takes whole shards in random order, shuffled within; batches come from the workers in turn."""
    rng = np.random.default_rng(SEED)
    starts = np.cumsum(sizes) - sizes
    order = rng.permutation(len(sizes))
    lanes = [
        np.concatenate([starts[shard] + rng.permutation(sizes[shard]) for shard in order[worker::workers]])
        for worker in range(workers)
    ]
    batches = [[lane[at : at + batch_size] for at in range(0, len(lane), batch_size)] for lane in lanes]
    turns = [lane[turn] for turn in range(max(map(len, batches))) for lane in batches if turn < len(lane)]
    return np.concatenate(turns)


def shards_of(ids, sizes):
    return np.searchsorted(np.cumsum(sizes), ids, side="right")


def row(name, ids, sizes, batch_size):
    blocks = (ids * NUM_SEGMENTS // sizes.sum())[: len(ids) // batch_size * batch_size].reshape(-1, batch_size)
    scores = np.array([len(np.unique(one)) for one in blocks])
    edge = max(1, len(scores) // 16)
    shards = shards_of(ids, sizes)
    numbers = [scores.mean(), scores.min(), scores[:edge].mean(), scores[-edge:].mean()]
    needs = len(np.unique(shards[:batch_size]))
    print(f"{name:<42}" + "".join(f"{number:>8.1f}" for number in numbers) + f"{max_active(shards):>8}{needs:>8}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shards", type=int, default=400)
    parser.add_argument("--samples-per-shard", type=int, default=600)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--active", type=int, default=128)
    arguments = parser.parse_args()
    sizes = np.full(arguments.shards, arguments.samples_per_shard, dtype=np.int64)
    size, active, nodes = arguments.batch_size, arguments.active, 16
    print(f"{sizes.sum():,} samples in {len(sizes)} shards, batches of {size}; random has {random_score(size):.1f}")
    print(f"{'order':<42}{'mean':>8}{'min':>8}{'first':>8}{'last':>8}{'active':>8}{'needs':>8}")
    random = np.random.default_rng(SEED).permutation(sizes.sum())
    row("true random", random, sizes, size)
    row(f"native, C={nodes} w={active // nodes}", native(sizes, size, nodes, active // nodes), sizes, size)
    row(f"native, C={nodes} w=2", native(sizes, size, nodes, 2), sizes, size)
    for algorithm in ("py1e", "py1br"):
        block, ids = mosaic_at(algorithm, sizes, nodes, active)
        row(f"{algorithm}, {nodes} nodes, block {block}", ids, sizes, size)
        default = max(4_000_000 // nodes, 1 << 18)
        row(f"{algorithm}, {nodes} nodes, its default block", mosaic(algorithm, sizes, nodes, default), sizes, size)
    row("chunk by chunk (LitData's default), 4 workers", chunk_by_chunk(sizes, 4, size), sizes, size)


if __name__ == "__main__":
    main()
