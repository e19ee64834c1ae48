"""Packers on the same log-normal documents: padding, tokens lost in an epoch and over a resume, CPU per document.

    LIGHTNING_STREAM_PACKERS_PYTHON=/path/to/python  an environment with trl, grain, torchtitan, lancedb, ai2-olmo-core

Every token has its own number, so that each can be found again. A run of 2 ranks is stopped in the middle and resumed
from the packer's own state, on 2 ranks and on 4: `lost` and `repeated` are tokens beyond those of an epoch without a
stop. Packers that write packed rows before training have no such state. DOCUMENTS and RESUME_DOCUMENTS set the numbers
of documents, ROW_LENGTH the length of a row.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from side_by_side import PYTHONS, Clock, main

ROW_LENGTH = int(os.environ.get("ROW_LENGTH", "2048"))
SIZES = {
    "epoch": int(os.environ.get("DOCUMENTS", "100000")),
    "resume": int(os.environ.get("RESUME_DOCUMENTS", "20000")),
}
PAD, EOS, FIRST = 0, 1, 2  # no document has the first two tokens
BATCH, SPLITS = 8, 8
RANKS, OTHER_RANKS = 2, 4


def lengths_of(kind: str) -> np.ndarray:
    """Tokens of each document: log-normal, 700 in the mean."""
    sigma = 1.0
    drawn = np.random.default_rng(17).lognormal(np.log(700) - sigma**2 / 2, sigma, SIZES[kind])
    return np.maximum(1, drawn).astype(np.int64)


def documents_of(kind: str) -> list[np.ndarray]:
    """Documents, of which all tokens differ."""
    lengths = lengths_of(kind)
    return np.split(np.arange(FIRST, FIRST + lengths.sum(), dtype=np.int32), np.cumsum(lengths)[:-1])


def prepare(folder: Path) -> None:
    """Write the documents as MDS shards; the peers make their own data of the same documents, outside of the clock."""
    from lightning_stream import MDSWriter

    for kind in SIZES:
        with MDSWriter(out=str(folder / kind), columns={"tokens": "ndarray:uint32"}, lengths={"tokens": len}) as writer:
            for document in documents_of(kind):
                writer.write({"tokens": document.astype(np.uint32)})


class Ours:
    """`StreamingDataset(pack=...)`."""

    package = "lightning-stream"

    def __init__(self, folder: Path, kind: str, rank: int, ranks: int, state: Any = None) -> None:
        from lightning_stream import Packing, StreamingDataLoader, StreamingDataset, World

        dataset = StreamingDataset(folder / kind, shuffle=True, pack=Packing(row_length=ROW_LENGTH, pad_token=PAD))
        size = BATCH * RANKS  # rows of an optimizer step, on any number of ranks
        self._loader = StreamingDataLoader(
            dataset, global_batch_size=size, world=World(rank, ranks, ranks), tail="exact"
        )
        if state is not None:
            self._loader.load_state_dict(state)

    def __iter__(self) -> Iterator[np.ndarray]:
        for batch in self._loader:
            yield from batch["input_ids"].numpy()

    def state(self) -> Any:
        return self._loader.state_dict()

    @staticmethod
    def states(saved: list[Any], ranks: int) -> list[Any] | None:
        return [saved[0]] * ranks


class Grain:
    """An online packer over this rank's slice of the documents."""

    package, kind = "grain", "FirstFitPackIterDataset"

    def __init__(self, _: Path, kind: str, rank: int, ranks: int, state: Any = None) -> None:
        import grain
        from grain import experimental

        documents = [{"tokens": document} for document in documents_of(kind)]
        source = grain.MapDataset.source(documents).shuffle(seed=17)[rank::ranks].to_iter_dataset()
        packer, bins = getattr(experimental, self.kind), {}
        if "Fit" in self.kind:  # they refuse longer documents
            source, bins = source.map(lambda one: {"tokens": one["tokens"][:ROW_LENGTH]}), {"num_packing_bins": 64}
        self._rows = iter(packer(source, length_struct={"tokens": ROW_LENGTH}, **bins))
        if state is not None:
            self._rows.set_state(state)

    def __iter__(self) -> Iterator[np.ndarray]:
        return (row["tokens"] for row in self._rows)

    def state(self) -> Any:
        return self._rows.get_state()

    @staticmethod
    def states(saved: list[Any], ranks: int) -> list[Any] | None:
        return saved if ranks == len(saved) else None  # each is the position in a rank's own slice


class GrainBestFit(Grain):
    """The same with another rule."""

    kind = "BestFitPackIterDataset"


class GrainConcat(Grain):
    """Concatenates, and cuts every row anywhere."""

    kind = "ConcatThenSplitIterDataset"


class Titan:
    """torchtitan's text dataset: concatenates, and cuts every row anywhere."""

    package = "torchtitan"

    def __init__(self, _: Path, kind: str, rank: int, ranks: int, state: Any = None) -> None:
        import pyarrow as pa
        from datasets import Dataset
        from torchtitan.hf_datasets import DatasetConfig, text_datasets

        class Tokens:
            def encode(self, text: list[int], **_: bool) -> list[int]:
                return [EOS, *text, EOS]

        table = pa.table({"text": pa.array(documents_of(kind))})
        loader = lambda _: Dataset(table).with_format("numpy")  # noqa: E731
        text_datasets.DATASETS["documents"] = DatasetConfig("", loader, lambda sample: sample["text"].tolist())
        self._rows = text_datasets.HuggingFaceTextDataset("documents", None, Tokens(), ROW_LENGTH, rank, ranks)
        if state is not None:
            self._rows.load_state_dict(state)

    def __iter__(self) -> Iterator[np.ndarray]:
        return (row["input"].numpy() for row, _ in self._rows)

    def state(self) -> Any:
        return self._rows.state_dict()

    @staticmethod
    def states(saved: list[Any], ranks: int) -> list[Any] | None:
        return saved if ranks == len(saved) else None  # its loader refuses another number


class Lance:
    """LanceDB's streaming dataset, with the budget of blocks that the mean of a split needs."""

    package = "lancedb"

    def __init__(self, folder: Path, kind: str, rank: int, ranks: int, state: Any = None) -> None:
        import lancedb
        import pyarrow as pa
        from lancedb.streaming import StreamingDataset

        base, lengths = lancedb.connect(str(folder / "lance")), lengths_of(kind)
        if kind not in base.table_names():
            base.create_table(kind, pa.table({"tokens": pa.array(documents_of(kind))}))
        blocks = -(-int(lengths.sum() + len(lengths)) // (ROW_LENGTH * SPLITS)) * SPLITS
        self._rows = StreamingDataset(
            base.open_table(kind),
            num_splits=SPLITS,
            columns=["tokens"],
            pack_sequences=ROW_LENGTH,
            eos_id=EOS,
            pad_id=PAD,
            blocks_per_epoch=blocks,
            rank=rank,
            world_size=ranks,
        )
        if state is not None:
            self._rows.load_state_dict(state)

    def __iter__(self) -> Iterator[np.ndarray]:
        return (row["input_ids"].numpy().astype(np.int32) for row in self._rows)

    def state(self) -> Any:
        return self._rows.state_dict()

    @staticmethod
    def states(saved: list[Any], ranks: int) -> list[Any] | None:
        from lancedb.streaming import StreamingDataset

        return [StreamingDataset.merge_state_dicts(saved)] * ranks


def streamed(kind: type[Any]) -> Any:
    """The contender of a packer that works while it trains."""

    def run(folder: Path) -> dict:
        packer = kind(folder, "epoch", 0, 1)
        clock = Clock()
        rows = list(packer)
        measured = clock.stop(SIZES["epoch"])
        notes = {"version": version(kind.package), **_epoch(rows, int(lengths_of("epoch").sum()))}
        return {**measured, **notes, **_resumes(kind, folder)}

    return run


def _epoch(rows: list[np.ndarray], total: int) -> dict[str, Any]:
    counts = _counts(rows, total)
    padding = 1 - sum(int(np.count_nonzero(row)) for row in rows) / (len(rows) * ROW_LENGTH)
    return {"padding_%": round(100 * padding, 3), "lost_%": round(100 * float(np.mean(counts == 0)), 3)}


def _counts(rows: list[np.ndarray], total: int) -> np.ndarray:
    """How often each token came."""
    counts = np.zeros(FIRST + total, np.int64)
    for begin in range(0, len(rows), 4096):
        counts += np.bincount(np.concatenate(rows[begin : begin + 4096]), minlength=len(counts))
    return counts[FIRST:]


def _resumes(kind: type[Any], folder: Path) -> dict[str, Any]:
    total = int(lengths_of("resume").sum())
    whole = [list(kind(folder, "resume", rank, RANKS)) for rank in range(RANKS)]
    expected = _counts([row for rows in whole for row in rows], total)
    stop = min(map(len, whole)) // 2 // BATCH * BATCH
    begun, saved = [], []
    for rank in range(RANKS):
        packer = kind(folder, "resume", rank, RANKS)
        rows = iter(packer)
        begun += [next(rows) for _ in range(stop)]
        saved.append(packer.state())
    found = {}
    for ranks in (RANKS, OTHER_RANKS):
        states = kind.states(saved, ranks)
        if states is None:
            found[f"resume_{RANKS}_to_{ranks}"] = "no state for it"
            continue
        rest = [row for rank in range(ranks) for row in kind(folder, "resume", rank, ranks, states[rank])]
        change = _counts(begun + rest, total) - expected
        found[f"resume_{RANKS}_to_{ranks}"] = f"{-change[change < 0].sum()} lost, {change[change > 0].sum()} repeated"
    return found


def trl(strategy: str) -> Any:
    """Hugging Face's `pack_dataset`, before training."""

    def run(_: Path) -> dict:
        import pyarrow as pa
        from datasets import Dataset
        from trl import pack_dataset

        dataset = Dataset(pa.table({"input_ids": pa.array(documents_of("epoch"))}))
        clock = Clock()
        packed = pack_dataset(dataset, ROW_LENGTH, strategy)
        measured = clock.stop(SIZES["epoch"])
        rows = [np.asarray(row["input_ids"], np.int32) for row in packed.with_format("numpy")]
        return {**measured, "version": version("trl"), **_epoch(rows, int(lengths_of("epoch").sum())), **_OFFLINE}

    return run


def olmo(strategy: str) -> Any:
    """OLMo-core's packer of a file, before training; the clock has no gathering of rows."""

    def run(folder: Path) -> dict:
        from olmo_core.data.types import LongDocStrategy
        from olmo_core.data.utils import pack_documents_into_instances

        path, documents = folder / f"olmo-{strategy}.npy", documents_of("epoch")
        tokens = np.concatenate([part for document in documents for part in (document, [EOS])]).astype(np.uint32)
        tokens.tofile(path)
        clock = Clock()
        instances, bounds, _ = pack_documents_into_instances(
            path,
            max_sequence_length=ROW_LENGTH,
            eos_token_id=EOS,
            dtype=np.uint32,
            long_doc_strategy=LongDocStrategy[strategy],
        )
        measured = clock.stop(SIZES["epoch"])
        rows = [
            np.concatenate([tokens[slice(*bounds[number])] for number in row]).astype(np.int32) for row in instances
        ]
        total = int(lengths_of("epoch").sum())
        return {**measured, "version": version("ai2-olmo-core"), **_epoch(rows, total), **_OFFLINE}

    return run


_OFFLINE = {f"resume_{RANKS}_to_{ranks}": "packed before training" for ranks in (RANKS, OTHER_RANKS)}
CONTENDERS = {
    "ours": streamed(Ours),
    "trl_bfd": trl("bfd"),
    "trl_bfd_split": trl("bfd_split"),
    "trl_wrapped": trl("wrapped"),
    "grain_first_fit": streamed(Grain),
    "grain_best_fit": streamed(GrainBestFit),
    "grain_concat": streamed(GrainConcat),
    "titan": streamed(Titan),
    "lance": streamed(Lance),
    "olmo_truncate": olmo("truncate"),
    "olmo_fragment": olmo("fragment"),
}

if __name__ == "__main__":
    packers = "LIGHTNING_STREAM_PACKERS_PYTHON"
    PYTHONS.update(dict.fromkeys(("trl", "grain", "titan", "lance", "olmo"), packers))
    main(__file__, CONTENDERS, prepare)
