"""Shuffled text rows (about 2 KB of text, an id, a JSON value) in batches of 256, in one process, from local shards.

python benchmarks/read_text.py [--rounds 3]
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from side_by_side import Clock, main

ROWS, BATCH, LIMIT = 32_768, 256, 1 << 23
COLUMNS = {"id": "int", "meta": "json", "text": "str"}


def rows() -> list[dict]:
    rng = np.random.default_rng(0)
    words = ["".join(map(chr, rng.integers(97, 123, rng.integers(2, 9)))) for _ in range(5000)]
    picks = rng.integers(0, 5000, (ROWS, 300))
    return [
        {"id": k, "meta": {"source": f"web-{k % 7}", "score": k / ROWS}, "text": " ".join(words[i] for i in picks[k])}
        for k in range(ROWS)
    ]


def prepare(folder: Path) -> None:
    from lightning_stream import MDSWriter

    if not (folder / "mds" / "index.json").exists():
        with MDSWriter(out=folder / "mds", columns=COLUMNS, size_limit=LIMIT) as writer:
            for row in rows():
                writer.write(row)


def ours(folder: Path) -> dict:
    from lightning_stream import StreamingDataLoader, StreamingDataset

    loader = StreamingDataLoader(StreamingDataset(local=str(folder / "mds"), shuffle=True), batch_size=BATCH)
    clock = Clock()
    return clock.stop(sum(len(batch["text"]) for batch in loader))


def read_batch(folder: Path) -> dict:
    from lightning_stream import StreamingDataset

    dataset = StreamingDataset(local=str(folder / "mds"))
    order = np.random.default_rng(1).permutation(ROWS)
    clock = Clock()
    for k in range(0, ROWS, BATCH):
        dataset.read_batch(order[k : k + BATCH])
    return clock.stop(ROWS)


def by_sample(folder: Path) -> dict:
    from lightning_stream import StreamingDataset

    dataset = StreamingDataset(local=str(folder / "mds"))
    order = np.random.default_rng(1).permutation(ROWS)
    clock = Clock()
    for k in order.tolist():
        dataset[k]
    return clock.stop(ROWS)


def mosaic(folder: Path) -> dict:
    from streaming import StreamingDataLoader, StreamingDataset

    dataset = StreamingDataset(local=str(folder / "mds"), shuffle=True, batch_size=BATCH, shuffle_algo="py1e")
    loader = StreamingDataLoader(dataset, batch_size=BATCH, collate_fn=list)
    clock, count = Clock(), 0
    for batch in loader:
        count += len(batch)
        if count >= ROWS // 2:
            break
    return clock.stop(count)


def litdata(folder: Path) -> dict:
    import litdata

    if not (folder / "litdata" / "index.json").exists():
        writer = litdata.streaming.Cache(str(folder / "litdata"), chunk_bytes=LIMIT)
        for k, row in enumerate(rows()):
            writer[k] = row
        writer.done()
        writer.merge()
    dataset = litdata.StreamingDataset(str(folder / "litdata"), shuffle=True, drop_last=False)
    loader = litdata.StreamingDataLoader(dataset, batch_size=BATCH, collate_fn=list)
    clock = Clock()
    return clock.stop(sum(len(batch) for batch in loader))


if __name__ == "__main__":
    main(
        __file__,
        {
            "ours": ours,
            "ours, read_batch": read_batch,
            "ours, by sample": by_sample,
            "mosaic": mosaic,
            "litdata": litdata,
        },
        prepare,
    )
