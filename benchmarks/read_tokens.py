"""Shuffled rows from local shards: tokens (int32 x 1,024), and text of 2 KB with an id and a JSON value.

python benchmarks/read_tokens.py [--rounds 3] [--against CHECKOUT]

"trainer_ms" is the processor time of the training process for a batch, also where workers make it.
"""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import loaders
import numpy as np
from frame import Clock, Group, Job, Result, main

# A start of 70 ms would count in fewer epochs
WIDTH = 1024
BATCH = 256
LIMIT = 1 << 23
EPOCHS = 16


def tokens_of(job: Job) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 50_000, (job.sizes.rows, WIDTH), np.int32)


def write_tokens(job: Job) -> None:
    from lightning_stream import MDSWriter

    columns = {"tokens": f"ndarray:int32:{WIDTH}"}
    with MDSWriter(out=job.folder / "tokens", columns=columns, size_limit=LIMIT) as writer:
        writer.write_batch({"tokens": tokens_of(job)})


def write_text(job: Job) -> None:
    from lightning_stream import MDSWriter

    rng = np.random.default_rng(0)
    words = ["".join(map(chr, rng.integers(97, 123, rng.integers(2, 9)))) for _ in range(5000)]
    columns = {"id": "int", "meta": "json", "text": "str"}
    with MDSWriter(out=job.folder / "text", columns=columns, size_limit=LIMIT) as writer:
        for k in range(job.sizes.rows // 2):
            text = " ".join(words[word] for word in rng.integers(0, 5000, 300))
            writer.write({"id": k, "meta": {"source": f"web-{k % 7}", "score": k / 7}, "text": text})


def read(
    loader: loaders.Loader, job: Job, name: str = "tokens", batch: int = BATCH, epochs: int = EPOCHS, **options: Any
) -> Result:
    batches = loader(job, name, batch, **options)
    began = time.process_time()
    result = loaders.read(batches, epochs)
    return {**result, "trainer_ms": 1000 * (time.process_time() - began) * batch / result["samples"]}


def read_batch(job: Job) -> Result:
    """Random access: `read_batch` with the ids in hand, no loader."""
    from lightning_stream import StreamingDataset

    dataset = StreamingDataset(local=job.folder / "tokens")
    return _gathered(job, dataset.read_batch)


def bare_numpy(job: Job) -> Result:
    """The floor: the same rows gathered by numpy, from memory."""
    return _gathered(job, tokens_of(job).__getitem__)


def _gathered(job: Job, gather: Any) -> Result:
    order = np.random.default_rng(1).permutation(job.sizes.rows)
    clock = Clock()
    for _ in range(EPOCHS):
        for first in range(0, len(order), BATCH):
            batch = gather(order[first : first + BATCH])  # lives until the next one is there, as in any loop
    del batch
    return clock.stop(EPOCHS * len(order))


if __name__ == "__main__":
    ours = partial(read, loaders.ours)
    workers = partial(ours, workers=2, loading={"persistent_workers": True})
    threads = partial(ours, workers=2, loading={"persistent_workers": True, "workers": "threads"})
    mosaic = partial(read, loaders.mosaic, epochs=1)
    tokens = {
        "ours": ours,
        "ours, read_batch": read_batch,
        "ours, two workers": workers,
        "ours, two threads": threads,
        "ours, two workers, 64 MB": partial(workers, batch=64 * BATCH),
        "ours, two threads, 64 MB": partial(threads, batch=64 * BATCH),
        "bare numpy": bare_numpy,
        "mosaic": mosaic,
        "mosaic, two workers": partial(mosaic, workers=2),
        "litdata": partial(read, loaders.litdata),
    }
    read_text = partial(read, name="text", epochs=1)
    text = {
        "ours": partial(read_text, loaders.ours),
        "mosaic": partial(read_text, loaders.mosaic, collate_fn=list),
        "litdata": partial(read_text, loaders.litdata, collate_fn=list),
    }
    groups = [Group("token rows, batches of 256 (1 MB)", tokens, write_tokens), Group("text rows", text, write_text)]
    main(__doc__, groups, rows=(65_536, 512))
