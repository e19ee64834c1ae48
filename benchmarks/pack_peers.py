"""Packers on the same log-normal documents: padding, tokens lost in an epoch and over a resume, CPU per document.

python benchmarks/pack_peers.py --packers-python PATH     with trl, grain and lancedb

Every token has its own number, so that each can be found again. A run of 2 ranks is stopped in the middle and resumed
from the packer's own state, on 2 ranks and on 4: tokens lost and repeated beyond those of an epoch without a stop.
Packers that write packed rows before training have no such state.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
from frame import Clock, Group, Job, Result, main

ROW_LENGTH = 2048
PAD, EOS, FIRST = 0, 1, 2  # no document has the first two tokens
BATCH, SPLITS, RANKS, OTHER_RANKS = 8, 8, 2, 4
Rank = tuple[Iterator[np.ndarray], Callable[[], Any]]  # the rows of one rank of some, and its state so far
Packer = Callable[..., Rank]
EPOCH, RESUME = "documents", "resumed"  # the data of an epoch, and of a run that is stopped


def lengths_of(job: Job, kind: str) -> np.ndarray:
    """Tokens of each document: log-normal, 700 in the mean."""
    drawn = np.random.default_rng(17).lognormal(np.log(700) - 0.5, 1.0, getattr(job.sizes, kind))
    return np.maximum(1, drawn).astype(np.int64)


def documents_of(job: Job, kind: str) -> list[np.ndarray]:
    """Documents, of which all tokens differ."""
    lengths = lengths_of(job, kind)
    return np.split(np.arange(FIRST, FIRST + lengths.sum(), dtype=np.int32), np.cumsum(lengths)[:-1])


def prepare(job: Job) -> None:
    from lightning_stream import MDSWriter

    for kind in (EPOCH, RESUME):
        options = {"columns": {"tokens": "ndarray:uint32"}, "lengths": {"tokens": len}}
        with MDSWriter(out=job.folder / kind, **options) as writer:
            for document in documents_of(job, kind):
                writer.write({"tokens": document.astype(np.uint32)})


def ours(job: Job, kind: str, rank: int, ranks: int, state: Any = None) -> Rank:
    from lightning_stream import Packing, StreamingDataLoader, StreamingDataset, World

    dataset = StreamingDataset(job.folder / kind, shuffle=True, pack=Packing(row_length=ROW_LENGTH, pad_token=PAD))
    world = World(rank, ranks, ranks)
    loader = StreamingDataLoader(dataset, global_batch_size=BATCH * RANKS, world=world, tail="exact")
    if state is not None:
        loader.load_state_dict(state)
    return (row for batch in loader for row in batch["input_ids"].numpy()), loader.state_dict


def grain(job: Job, kind: str, rank: int, ranks: int, state: Any = None) -> Rank:
    """Concatenates, and cuts every row anywhere."""
    import grain as peer
    from grain.experimental import ConcatThenSplitIterDataset

    documents = [{"tokens": document} for document in documents_of(job, kind)]
    source = peer.MapDataset.source(documents).shuffle(seed=17)[rank::ranks].to_iter_dataset()
    rows = iter(ConcatThenSplitIterDataset(source, length_struct={"tokens": ROW_LENGTH}))
    if state is not None:
        rows.set_state(state)
    return (row["tokens"] for row in rows), rows.get_state


def lance(job: Job, kind: str, rank: int, ranks: int, state: Any = None) -> Rank:
    """LanceDB's streaming dataset, with the budget of blocks that the mean of a split needs."""
    import lancedb
    import pyarrow as pa
    from lancedb.streaming import StreamingDataset

    base, lengths = lancedb.connect(str(job.folder / "lance")), lengths_of(job, kind)
    if kind not in base.table_names():
        base.create_table(kind, pa.table({"tokens": pa.array(documents_of(job, kind))}))
    blocks = -(-int(lengths.sum() + len(lengths)) // (ROW_LENGTH * SPLITS)) * SPLITS
    rows = {"columns": ["tokens"], "pack_sequences": ROW_LENGTH, "eos_id": EOS, "pad_id": PAD}
    place = {"num_splits": SPLITS, "blocks_per_epoch": blocks, "rank": rank, "world_size": ranks}
    dataset = StreamingDataset(base.open_table(kind), **rows, **place)
    if state is not None:
        dataset.load_state_dict(state)
    return (row["input_ids"].numpy().astype(np.int32) for row in dataset), dataset.state_dict


def merged(saved: list[Any]) -> Any:
    """LanceDB's state of all ranks."""
    from lancedb.streaming import StreamingDataset

    return StreamingDataset.merge_state_dicts(saved)


def streamed(packer: Packer, shared: Callable[[list[Any]], Any] | None, job: Job) -> Result:
    """A packer that works while it trains; `shared` makes one state for any number of ranks of those of all."""
    rows, _ = packer(job, EPOCH, 0, 1)
    clock = Clock()
    listed = list(rows)
    result = clock.stop(job.sizes.documents)
    return {**result, **_epoch(job, listed), **_resumes(packer, shared, job)}


def _epoch(job: Job, rows: list[np.ndarray]) -> dict[str, Any]:
    counts = _counts(rows, int(lengths_of(job, EPOCH).sum()))
    padding = 1 - sum(int(np.count_nonzero(row)) for row in rows) / (len(rows) * ROW_LENGTH)
    return {"padding %": 100 * padding, "lost %": 100 * float(np.mean(counts == 0))}


def _counts(rows: list[np.ndarray], total: int) -> np.ndarray:
    """How often each token came."""
    counts = np.zeros(FIRST + total, np.int64)
    for begin in range(0, len(rows), 4096):
        counts += np.bincount(np.concatenate(rows[begin : begin + 4096]), minlength=len(counts))
    return counts[FIRST:]


def _resumes(packer: Packer, shared: Callable[[list[Any]], Any] | None, job: Job) -> dict[str, str]:
    total = int(lengths_of(job, RESUME).sum())
    whole = [list(packer(job, RESUME, rank, RANKS)[0]) for rank in range(RANKS)]
    expected = _counts([row for rows in whole for row in rows], total)
    stop = min(map(len, whole)) // 2 // BATCH * BATCH
    begun, saved, notes = [], [], {}
    for rank in range(RANKS):
        rows, state_of = packer(job, RESUME, rank, RANKS)
        begun += itertools.islice(rows, stop)
        saved.append(state_of())
    for ranks in (RANKS, OTHER_RANKS):
        states = [shared(saved)] * ranks if shared else saved
        rest = [row for rank, state in enumerate(states) for row in packer(job, RESUME, rank, ranks, state)[0]]
        change = _counts(begun + rest, total) - expected
        counted = f"{-change[change < 0].sum()} lost, {change[change > 0].sum()} repeated"
        notes[f"resumed on {ranks}"] = counted if len(states) == ranks else "refused"
    return notes


def trl(strategy: str, job: Job) -> Result:
    """Hugging Face's `pack_dataset`, before training."""
    import pyarrow as pa
    from datasets import Dataset
    from trl import pack_dataset

    dataset = Dataset(pa.table({"input_ids": pa.array(documents_of(job, EPOCH))}))
    clock = Clock()
    packed = pack_dataset(dataset, ROW_LENGTH, strategy)
    result = clock.stop(job.sizes.documents)
    rows = [np.asarray(row["input_ids"], np.int32) for row in packed.with_format("numpy")]
    return {**result, **_epoch(job, rows)}


if __name__ == "__main__":
    cases = {
        "ours": partial(streamed, ours, lambda saved: saved[0]),
        "lancedb": partial(streamed, lance, merged),
        "grain, concat": partial(streamed, grain, None),
        "trl, bfd": partial(trl, "bfd"),
        "trl, wrapped": partial(trl, "wrapped"),
    }
    main(__doc__, [Group("rows of 2,048 tokens", cases, prepare)], documents=(40_000, 500), resumed=(20_000, 500))
