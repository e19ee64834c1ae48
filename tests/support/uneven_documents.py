"""Documents of different lengths, and the two kinds of batches that make epochs differ in length."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import default_collate

from lightning_stream import MDSWriter, Packing

PACK = {"pack": Packing(row_length=64, window=50, labels=True)}
BUDGET = {"batch_tokens": 1200, "bucket_window": 128}


def padded(samples: list[Any]) -> Any:
    """Collate packed rows, or pad whole documents."""
    if "input_ids" in samples[0]:  # a packed row
        return default_collate(samples)
    tokens = torch.nn.utils.rnn.pad_sequence([torch.as_tensor(one["tokens"]).long() for one in samples], True)
    return {"input_ids": tokens, "labels": tokens}


def write_documents(folder: Path) -> str:
    """Write 400 documents of 1 to 149 tokens; return the folder."""
    rng, columns = np.random.default_rng(0), {"tokens": "ndarray:int32"}
    with MDSWriter(out=str(folder), columns=columns, size_limit=1 << 13, lengths={"tokens": len}) as writer:
        for size in rng.integers(1, 150, 400):
            writer.write({"tokens": rng.integers(1, 100, size).astype(np.int32)})
    return str(folder)
