"""Three streams of documents of all lengths, and datasets of them that have several stages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from lightning_stream import MDSWriter, Packing, Stream, StreamingDataset

SIZES = {"web": 260, "code": 150, "math": 90}
BATCH = 12
PACK = Packing(row_length=48, window=40, columns=("mask",), labels=True)
WHOLE = Packing(lengths="tokens + 9 * images", row_length=96, window=40, long_documents="drop")
POINTS = [(0, {"web": 0.6, "code": 0.3, "math": 0.1}), (300, {"web": 0.2, "code": 0.3, "math": 0.5})]
MIXED = {"schedule": POINTS, "epoch_size": 420}
LENGTHS = np.random.default_rng(4).integers(1, 70, sum(SIZES.values()))
LENGTHS[[3, 77, 400]] = 300  # of many rows


def write(root: Path) -> Path:
    """A folder for each stream. The tokens of document n are 1000 n, 1000 n + 1, ..., and their mask follows.

    It counts as one with n % 3 images.
    """
    first, columns = 0, {"tokens": "ndarray:int32", "mask": "ndarray:int8"}
    for name, size in SIZES.items():
        options: dict[str, Any] = {
            "columns": columns,
            "size_limit": 1 << 12,
            "lengths": {"tokens": len, "images": num_images},
        }
        with MDSWriter(out=str(root / name), **options) as writer:
            for number in range(first, first + size):
                tokens = (number * 1000 + np.arange(LENGTHS[number])).astype(np.int32)
                writer.write({"tokens": tokens, "mask": (tokens % 3).astype(np.int8)})
        first += size
    return root


def num_images(sample: dict[str, Any]) -> int:
    """A length that is no column's."""
    return int(sample["tokens"][0]) // 1000 % 3


def is_kept(sample: dict[str, Any]) -> bool:
    """A filter of whole samples."""
    return int(sample["tokens"][0]) // 1000 % 5 != 1


def square(lengths: Any) -> Any:
    """What attention costs."""
    return lengths * lengths


def dataset_of(folder: Path, **given: Any) -> StreamingDataset:
    """A dataset of the streams in a folder; packed, unless other arguments are given."""
    streams = [Stream(local=folder / name) for name in SIZES]
    return StreamingDataset(streams=streams, **{"shuffle": True, "pack": PACK, **given})


def composed(folder: Path, **given: Any) -> StreamingDataset:
    """A dataset with a schedule, a filter, packing and a balance."""
    return dataset_of(folder, **MIXED, filter=is_kept, balance=square, **given)
