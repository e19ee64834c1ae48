"""Shuffled token rows (int32 x 1,024) in batches of 256, in one process, threads or workers, from local shards.

Where others make the batches, `trainer_ms` is the processor time of the training process per batch. "torch's way" sends
the batches of our workers as torch sends those of a dataset of its own.

python benchmarks/read_tokens.py [--rounds 3]
"""

from __future__ import annotations

import ctypes
import time
from functools import partial
from pathlib import Path

import numpy as np
from side_by_side import Clock, main

ROWS, WIDTH, BATCH, LIMIT, EPOCHS = 65_536, 1024, 256, 1 << 23, 16  # a start of some 70 ms would tell in fewer


def prepare(folder: Path) -> None:
    from lightning_stream import MDSWriter

    if not (folder / "mds" / "index.json").exists():
        tokens = np.random.default_rng(0).integers(0, 50_000, (ROWS, WIDTH), np.int32)
        with MDSWriter(out=folder / "mds", columns={"tokens": f"ndarray:int32:{WIDTH}"}, size_limit=LIMIT) as writer:
            writer.write_batch({"tokens": tokens})
        np.save(folder / "tokens.npy", tokens)


def ours(folder: Path) -> dict:
    from lightning_stream import StreamingDataLoader, StreamingDataset

    loader = StreamingDataLoader(StreamingDataset(local=str(folder / "mds"), shuffle=True), batch_size=BATCH)
    clock = Clock()
    return clock.stop(sum(len(batch["tokens"]) for _ in range(EPOCHS) for batch in loader), **touched(folder))


def touched(folder: Path) -> dict:
    """The shuffle score: shards in a batch of the first epoch, over those in a random batch."""
    from lightning_stream import StreamingDataset
    from lightning_stream.order import OrderConfig, RunOrder, StreamWeights

    snapshot = StreamingDataset(local=str(folder / "mds")).snapshot
    config = OrderConfig.resolve(batch_size=BATCH, shuffle=True)
    epoch = RunOrder(snapshot, (StreamWeights(),), config).epoch(0)
    counts = [len(set(snapshot.shards_of(epoch.ids(k, k + BATCH)).tolist())) for k in range(0, ROWS, BATCH)]
    num_shards = len(snapshot.shard_offsets) - 1
    return {"score": round(sum(counts) / len(counts) / (num_shards * (1 - (1 - 1 / num_shards) ** BATCH)), 2)}


def handed_over(folder: Path, workers: str = "processes", rows: int = BATCH, by_torch: bool = False) -> dict:
    import lightning_stream.loading.workers
    from lightning_stream import StreamingDataLoader, StreamingDataset

    if by_torch:
        lightning_stream.loading.workers.shared_slots = lambda *_: None
    dataset = StreamingDataset(local=str(folder / "mds"), shuffle=True)
    given = {"num_workers": 2, "workers": workers, "persistent_workers": True}
    loader = StreamingDataLoader(dataset, batch_size=rows, **given)
    clock, began = Clock(), time.process_time()
    count = sum(len(batch["tokens"]) for _ in range(EPOCHS) for batch in loader)
    trainer_ms = 1000 * (time.process_time() - began) * rows / count
    loader.close()  # its workers are counted once they have ended
    return clock.stop(count, trainer_ms=round(trainer_ms, 2))


def read_batch(folder: Path) -> dict:
    """Random access: `read_batch` with the ids in hand, no loader."""
    from lightning_stream import StreamingDataset

    dataset = StreamingDataset(local=str(folder / "mds"))
    order = np.random.default_rng(1).permutation(ROWS)
    clock = Clock()
    for k in range(0, ROWS * EPOCHS, BATCH):
        batch = dataset.read_batch(order[k % ROWS : k % ROWS + BATCH])
    del batch
    return clock.stop(ROWS * EPOCHS)


def bare_numpy(folder: Path) -> dict:
    """The floor: all shards mapped, every row's address in hand, gathered by numpy from the same memory.

    The same memory, since other pages with the same bytes (one .npy file, say) may lie a third nearer or farther: on a
    virtual machine the host backs them as it likes.
    """
    files = [np.memmap(path, np.uint8, mode="r") for path in sorted((folder / "mds").glob("*.mds"))]
    first = [int(shard[4:8].view("<u4")[0]) for shard in files]
    rows = [
        shard.ctypes.data + np.arange(head, len(shard), 4 * WIDTH) for head, shard in zip(first, files, strict=True)
    ]
    at = np.concatenate(rows)
    begin, end = at.min(), at.max() + 4 * WIDTH
    memory = (ctypes.c_ubyte * int(end - begin)).from_address(int(begin))
    row = np.dtype((np.void, 4 * WIDTH))
    anywhere = np.ndarray((len(memory) - row.itemsize + 1,), row, memory, 0, (1,))
    at = (at - begin)[np.random.default_rng(1).permutation(ROWS)]
    clock = Clock()
    for k in range(0, ROWS * EPOCHS, BATCH):
        batch = anywhere[at[k % ROWS : k % ROWS + BATCH]]  # held until the next one is there, as by any loop
    del batch
    return clock.stop(ROWS * EPOCHS)


def one_npy_file(folder: Path) -> dict:
    """As the floor, from one .npy file, by `np.take`."""
    tokens = np.load(folder / "tokens.npy", mmap_mode="r")
    order = np.random.default_rng(1).permutation(ROWS)
    clock = Clock()
    for k in range(0, ROWS * EPOCHS, BATCH):
        batch = np.take(tokens, order[k % ROWS : k % ROWS + BATCH], axis=0)
    del batch
    return clock.stop(ROWS * EPOCHS)


def mosaic(folder: Path, num_workers: int = 0) -> dict:
    from streaming import StreamingDataLoader, StreamingDataset

    dataset = StreamingDataset(local=str(folder / "mds"), shuffle=True, batch_size=BATCH, shuffle_algo="py1e")
    loader = StreamingDataLoader(dataset, batch_size=BATCH, num_workers=num_workers)
    clock, count = Clock(), 0
    for batch in loader:
        count += len(batch["tokens"])
        if count >= ROWS // 4 and not num_workers:  # workers are counted once they have ended
            break
    return clock.stop(count)


def mosaic_two_workers(folder: Path) -> dict:
    return mosaic(folder, num_workers=2)


def litdata(folder: Path) -> dict:
    import litdata

    if not (folder / "litdata" / "index.json").exists():
        tokens = np.load(folder / "tokens.npy")
        writer = litdata.streaming.Cache(str(folder / "litdata"), chunk_bytes=LIMIT)
        for k, row in enumerate(tokens):
            writer[k] = row
        writer.done()
        writer.merge()
    dataset = litdata.StreamingDataset(str(folder / "litdata"), shuffle=True, drop_last=False)
    loader = litdata.StreamingDataLoader(dataset, batch_size=BATCH)
    clock = Clock()
    return clock.stop(sum(len(batch) for _ in range(EPOCHS) for batch in loader))


if __name__ == "__main__":
    main(
        __file__,
        {
            "ours": ours,
            "ours, read_batch": read_batch,
            "ours, two workers": handed_over,
            "ours, two threads": partial(handed_over, workers="threads"),
            "torch's way": partial(handed_over, by_torch=True),
            "64 MB, two workers": partial(handed_over, rows=64 * BATCH),
            "64 MB, two threads": partial(handed_over, rows=64 * BATCH, workers="threads"),
            "64 MB, torch's way": partial(handed_over, rows=64 * BATCH, by_torch=True),
            "bare numpy": bare_numpy,
            "numpy, one .npy file": one_npy_file,
            "mosaic": mosaic,
            "mosaic, two workers": mosaic_two_workers,
            "litdata": litdata,
        },
        prepare,
    )
