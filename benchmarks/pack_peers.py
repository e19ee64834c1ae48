"""Packers on the same log-normal documents: padding, tokens lost in an epoch and over a resume, CPU per document.

python benchmarks/pack_peers.py --packers-python PATH     with trl, grain and lancedb

Every token has its own number, so that each can be found again. A run of 2 ranks is stopped in the middle and resumed
from the packer's own state, on 2 ranks and on 4: tokens lost and repeated beyond those of an epoch without a stop.
Packers that write packed rows before training have no such state.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
from frame import Clock, Group, Job, Result, main

ROW_LENGTH = 2048
PAD, EOS, FIRST = 0, 1, 2  # no document has the first two tokens
BATCH, SPLITS, RANKS, OTHER_RANKS = 8, 8, 2, 4
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


class Packer:
    """The rows of one rank of some: iterable, with a state."""

    def __init__(self, rows: Any, state: Any = None) -> None:
        self.rows = rows
        if state is not None:
            rows.load_state_dict(state)

    def state(self) -> Any:
        return self.rows.state_dict()


class Ours(Packer):
    def __init__(self, job: Job, kind: str, rank: int, ranks: int, state: Any = None) -> None:
        from lightning_stream import Packing, StreamingDataLoader, StreamingDataset, World

        dataset = StreamingDataset(job.folder / kind, shuffle=True, pack=Packing(row_length=ROW_LENGTH, pad_token=PAD))
        world = World(rank, ranks, ranks)
        loader = StreamingDataLoader(dataset, global_batch_size=BATCH * RANKS, world=world, tail="exact")
        super().__init__(loader, state)

    def __iter__(self) -> Iterator[np.ndarray]:
        for batch in self.rows:
            yield from batch["input_ids"].numpy()

    @staticmethod
    def states(saved: list[Any], ranks: int) -> list[Any] | None:
        return [saved[0]] * ranks


class Grain(Packer):
    """Concatenates, and cuts every row anywhere; a state is the position in a rank's own slice."""

    def __init__(self, job: Job, kind: str, rank: int, ranks: int, state: Any = None) -> None:
        import grain
        from grain.experimental import ConcatThenSplitIterDataset

        documents = [{"tokens": document} for document in documents_of(job, kind)]
        source = grain.MapDataset.source(documents).shuffle(seed=17)[rank::ranks].to_iter_dataset()
        super().__init__(iter(ConcatThenSplitIterDataset(source, length_struct={"tokens": ROW_LENGTH})))
        if state is not None:
            self.rows.set_state(state)

    def __iter__(self) -> Iterator[np.ndarray]:
        return (row["tokens"] for row in self.rows)

    def state(self) -> Any:
        return self.rows.get_state()

    @staticmethod
    def states(saved: list[Any], ranks: int) -> list[Any] | None:
        return saved if ranks == len(saved) else None


class Lance(Packer):
    """LanceDB's streaming dataset, with the budget of blocks that the mean of a split needs."""

    def __init__(self, job: Job, kind: str, rank: int, ranks: int, state: Any = None) -> None:
        import lancedb
        import pyarrow as pa
        from lancedb.streaming import StreamingDataset

        base, lengths = lancedb.connect(str(job.folder / "lance")), lengths_of(job, kind)
        if kind not in base.table_names():
            base.create_table(kind, pa.table({"tokens": pa.array(documents_of(job, kind))}))
        blocks = -(-int(lengths.sum() + len(lengths)) // (ROW_LENGTH * SPLITS)) * SPLITS
        rows = {"columns": ["tokens"], "pack_sequences": ROW_LENGTH, "eos_id": EOS, "pad_id": PAD}
        place = {"num_splits": SPLITS, "blocks_per_epoch": blocks, "rank": rank, "world_size": ranks}
        super().__init__(StreamingDataset(base.open_table(kind), **rows, **place), state)

    def __iter__(self) -> Iterator[np.ndarray]:
        return (row["input_ids"].numpy().astype(np.int32) for row in self.rows)

    @staticmethod
    def states(saved: list[Any], ranks: int) -> list[Any] | None:
        from lancedb.streaming import StreamingDataset

        return [StreamingDataset.merge_state_dicts(saved)] * ranks


def streamed(packer: Any, job: Job) -> Result:
    """A packer that works while it trains."""
    rows = packer(job, EPOCH, 0, 1)
    clock = Clock()
    listed = list(rows)
    result = clock.stop(job.sizes.documents)
    return {**result, **_epoch(job, listed), **_resumes(job, packer)}


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


def _resumes(job: Job, packer: Any) -> dict[str, str]:
    total = int(lengths_of(job, RESUME).sum())
    whole = [list(packer(job, RESUME, rank, RANKS)) for rank in range(RANKS)]
    expected = _counts([row for rows in whole for row in rows], total)
    stop = min(map(len, whole)) // 2 // BATCH * BATCH
    begun, saved, notes = [], [], {}
    for rank in range(RANKS):
        stopped = packer(job, RESUME, rank, RANKS)
        rows = iter(stopped)
        begun += [next(rows) for _ in range(stop)]
        saved.append(stopped.state())
    for ranks in (RANKS, OTHER_RANKS):
        states = packer.states(saved, ranks) or []
        rest = [row for rank, state in enumerate(states) for row in packer(job, RESUME, rank, ranks, state)]
        change = _counts(begun + rest, total) - expected
        counted = f"{-change[change < 0].sum()} lost, {change[change > 0].sum()} repeated"
        notes[f"resumed on {ranks}"] = counted if states else "refused"
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
        "ours": partial(streamed, Ours),
        "lancedb": partial(streamed, Lance),
        "grain, concat": partial(streamed, Grain),
        "trl, bfd": partial(trl, "bfd"),
        "trl, wrapped": partial(trl, "wrapped"),
    }
    main(__doc__, [Group("rows of 2,048 tokens", cases, prepare)], documents=(40_000, 500), resumed=(20_000, 500))
