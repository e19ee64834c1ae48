"""Writing one part of a dataset, so that it can be written again, twice at once, or in vain.

A process may be killed, tried again, or run twice. So a shard's name holds a digest of its bytes,
``part-00003/shard.00000.<digest>.mds``: attempts that write the same bytes write the same files, each put whole or not
at all, and an attempt that writes other bytes writes them elsewhere. Which attempt counts is said by its receipt.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from lightning_stream.convert.job import Job
from lightning_stream.convert.receipt import Receipt
from lightning_stream.formats.encodings.base import BinaryColumn
from lightning_stream.formats.shard_encoder import EncodedBatch
from lightning_stream.writer import MDSWriter
from lightning_stream.writer.place import DatasetPlace, digest_of

_JOINS: Mapping[str, Callable[[Any, Any], Any]] = {"min": min, "max": max, "bytes": operator.add}


class RefusedError(Exception):
    """A value that its encoding does not take: trying again would not help."""


class PartWriter(MDSWriter):
    """An `MDSWriter` whose shards are named by their bytes, and that keeps its index entries instead of putting them.

    `shards` has them once it is finished, with their files named relative to the dataset's root.

    Args:
        job: The dataset.
        number: The part's.
    """

    def __init__(self, job: Job, number: int) -> None:
        super().__init__(out=_PartPlace(job, number), columns=job.columns, **job.writer)

    def write_encoded(self, batch: EncodedBatch) -> None:
        """Add rows that are bytes of these columns already."""
        self._add_encoded(self._encoder or self._open(None, None), batch)


class _PartPlace(DatasetPlace):
    """A folder for the shards of a part. What is there, and the index, are matters of the conversion."""

    def __init__(self, job: Job, number: int) -> None:
        super().__init__(job.out, job.keep_local, job.store_options)
        self.mode = "overwrite"
        self._folder = f"part-{number:05}"

    def begin(self, *_: Any) -> None:
        pass

    def name_of(self, name: str, parts: Sequence[Any]) -> str:
        stem, number, rest = name.split(".", 2)
        return f"{self._folder}/{stem}.{number}.{digest_of(*parts)}.{rest}"

    def commit(self, entries: Sequence[bytes]) -> None:
        pass


class Statistics:
    """Lowest and highest number, and bytes of texts and binary values, of each column.

    Attributes:
        columns: What was found, by column.
    """

    def __init__(self) -> None:
        self.columns: dict[str, dict[str, Any]] = {}

    def add(self, values: Mapping[str, Any]) -> None:
        """Look at a batch, as `batch_columns` gives it."""
        for name, column in values.items():
            if isinstance(column, BinaryColumn):
                self.merge(name, {"bytes": sum(map(len, column))})
            elif isinstance(column, np.ndarray) and column.ndim == 1 and column.dtype.kind in "iuf" and len(column):
                self.merge(name, _extremes(column))

    def merge(self, name: str, found: Mapping[str, Any]) -> None:
        """Join in what was found elsewhere for a column."""
        held = self.columns.setdefault(name, {})
        for key, value in found.items():
            held[key] = _JOINS[key](held[key], value) if key in held else value


def merged_statistics(receipts: Iterable[Receipt]) -> dict[str, dict[str, Any]]:
    """Of several parts together."""
    total = Statistics()
    for receipt in receipts:
        for name, found in receipt.statistics.items():
            total.merge(name, found)
    return total.columns


def _extremes(column: Any) -> dict[str, Any]:
    if column.dtype.kind == "f":
        column = column[np.isfinite(column)]
    return {"min": column.min().item(), "max": column.max().item()} if len(column) else {}
