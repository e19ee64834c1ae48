"""Kinds of data that a chain of runs trains on: budgets of tokens, buckets, packed rows, and mixtures that end."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np

from lightning_stream import MDSWriter, Packing, Schedule, Stream

SIZES = {"a": 260, "b": 140}
KINDS = ("samples", "budget", "budget", "budget", "buckets", "rows", "rows", "mixture", "rows of a mixture")


def write_streams(folder: Path) -> Path:
    """Two streams of documents of 1 to 40 tokens, each with the numbers of its sample."""
    rng = np.random.default_rng(5)
    columns = {"id": "int", "x": "ndarray:float32:4", "tokens": "ndarray:int32"}
    for first, (name, count) in zip((0, 1000), SIZES.items(), strict=True):
        out = str(folder / name)
        with MDSWriter(out=out, columns=columns, size_limit=2000, lengths={"tokens": len}) as writer:
            for number in range(first, first + count):
                tokens = np.full(rng.integers(1, 41), number + 1, np.int32)
                writer.write({"id": number, "x": np.full(4, number % 97 / 97, np.float32), "tokens": tokens})
    return folder


def number_row(row: dict[str, Any]) -> dict[str, Any]:
    """A packed row as a sample whose number follows from all of its tokens."""
    number = crc32(np.asarray(row["input_ids"]).tobytes())
    return {"id": number, "x": np.full(4, number % 97 / 97, np.float32)}


def without_tokens(sample: dict[str, Any]) -> dict[str, Any]:
    return {"id": sample["id"], "x": sample["x"]}


def draw_data(rng: random.Random, folder: Path) -> tuple[dict[str, Any], dict[str, Any], bool]:
    """Arguments of the dataset and of its loader, and whether any world and accumulation will do."""
    kind = rng.choice(KINDS)
    dataset: dict[str, Any] = {"remote": folder / "a", "transform": without_tokens}
    loading: dict[str, Any] = {"tail": rng.choice(("pad", "drop"))}
    if "mixture" in kind:
        streams = [Stream(remote=folder / name, name=name) for name in SIZES]
        schedule = Schedule([(0, {"a": rng.choice((1, 2)), "b": 1})], exhausted="stop")
        size = rng.choice((120, 152, 184))
        dataset |= {"remote": None, "streams": streams, "schedule": schedule, "epoch_size": size}
    if "rows" in kind:
        dataset |= {"pack": Packing(row_length=rng.choice((48, 64)), window=rng.choice((20, 50)))}
        dataset |= {"transform": number_row}
    if kind == "buckets":
        dataset |= {"bucket_by": "tokens", "bucket_window": rng.choice((48, 64))}
    if kind == "budget":
        multiple = rng.choice((None, None, 1, 3, 4, 12))
        tokens = rng.choice((480, 520, 700))
        dataset |= {"batch_tokens": tokens, "bucket_window": rng.choice((None, 48)), "batch_multiple": multiple}
        loading |= {"global_batch_size": None}
    return dataset, loading, kind == "budget"
