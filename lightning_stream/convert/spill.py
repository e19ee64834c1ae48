"""Rows on their way to another order: encoded, on this machine's disk, sorted into buckets that fit memory.

A part's spill is three files: runs of rows, each run sorted by bucket; where each bucket's rows lie in each run; and a
note that comes last and makes it whole. Of one bucket in one run, the rows' keys, sizes and bytes stand together.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from lightning_stream.convert.split import mixed
from lightning_stream.formats.mds.encode import MdsEncoder
from lightning_stream.formats.shard_encoder import EncodedBatch
from lightning_stream.shared_files import publish_bytes
from lightning_stream.writer.batch import batch_columns

if TYPE_CHECKING:
    from typing_extensions import Self

_RUN_BYTES = 1 << 26
_ROW_HEAD_BYTES = 16  # key and size


@dataclass(frozen=True)
class Buckets:
    """How rows fall into buckets: by a hash of their place, so that each bucket is a random sample of all rows.

    Attributes:
        folder: Where spills lie.
        count: How many buckets there are.
        seed: Of the hash.
    """

    folder: str
    count: int
    seed: int

    def keys(self, part: int, begin: int, end: int) -> NDArray[np.uint64]:
        """What the rows of a part are sorted by."""
        return mixed(self.seed, part, np.arange(begin, end, dtype=np.uint64))

    def of(self, keys: NDArray[np.uint64]) -> NDArray[np.int64]:
        """The bucket of each key: buckets are ranges of keys, so that all rows end up in the order of their keys."""
        found: NDArray[np.int64] = ((keys >> np.uint64(32)) * np.uint64(self.count) >> np.uint64(32)).astype(np.int64)
        return found

    def path(self, split: str, part: int, kind: str) -> Path:
        """A file of a part's spill."""
        return Path(self.folder) / f"{split or 'all'}-{part:05}.{kind}"

    def meta(self, split: str, part: int) -> dict[str, Any] | None:
        """What `SpillWriter.finish` noted, if this spill is whole."""
        try:
            held: dict[str, Any] = json.loads(self.path(split, part, "json").read_bytes())
        except FileNotFoundError:
            return None
        return held


class SpillWriter:
    """Takes rows as `MDSWriter` does, and spills them.

    Args:
        buckets: Where to, and how.
        split: The dataset they belong to.
        part: The part they come from.
        columns: Encoding by column name.
    """

    def __init__(self, buckets: Buckets, split: str, part: int, columns: Mapping[str, str]) -> None:
        self._buckets, self._split, self._part = buckets, split, part
        self._encoder = MdsEncoder(columns, None, (), None)
        self._blobs: list[bytes | memoryview] = []
        self._sizes: list[NDArray[np.int64]] = []
        self._held_bytes = self._held_rows = 0
        self._runs: list[NDArray[np.int64]] = []
        self._file: BinaryIO | None = None
        self._at = 0
        self.num_samples = 0
        self.shards: list[dict[str, Any]] = []

    def write(self, sample: Mapping[str, Any]) -> None:
        """Add one sample."""
        self._take(b"".join(self._encoder.encode(sample)), None)

    def write_batch(self, batch: Any) -> None:
        """Add the rows of a batch."""
        columns, num_rows = batch_columns(batch)
        if num_rows:
            encoded = self._encoder.encode_batch(columns, num_rows)
            self._take(encoded.joined(), encoded.sizes)

    def _take(self, blob: bytes | memoryview, sizes: NDArray[np.int64] | None) -> None:
        self._blobs.append(blob)
        self._sizes.append(np.array([len(blob)], np.int64) if sizes is None else sizes)
        self._held_bytes += len(blob)
        self._held_rows += len(self._sizes[-1])
        self.num_samples += len(self._sizes[-1])
        if self._held_bytes >= _RUN_BYTES:
            self._flush()

    def _flush(self) -> None:
        """Write a run, sorted by bucket."""
        if not self._held_rows or self._file is None:
            return
        data = memoryview(b"".join(self._blobs))
        sizes = np.concatenate(self._sizes)
        keys = self._buckets.keys(self._part, self.num_samples - self._held_rows, self.num_samples)
        buckets = self._buckets.of(keys)
        order = np.argsort(buckets, kind="stable")
        starts = np.searchsorted(buckets[order], np.arange(self._buckets.count + 1))
        rows, keys, sizes = _in_order(data, sizes, order), keys[order], sizes[order]
        ends = np.concatenate([[0], np.cumsum(sizes)])[starts]
        for k in np.flatnonzero(np.diff(starts)).tolist():
            begin, end = starts[k : k + 2].tolist()
            self._file.write(keys[begin:end].data)
            self._file.write(sizes[begin:end].data)
            self._file.write(rows[ends[k] : ends[k + 1]])
        self._runs.append(np.stack([starts, self._at + ends + _ROW_HEAD_BYTES * starts]))
        self._at += len(data) + _ROW_HEAD_BYTES * len(sizes)
        self._blobs, self._sizes, self._held_bytes, self._held_rows = [], [], 0, 0

    def finish(self, note: Mapping[str, Any]) -> None:
        """Make it whole, with a note."""
        runs = np.array(self._runs, np.int64).reshape(-1, 2, self._buckets.count + 1)
        np.save(self._buckets.path(self._split, self._part, "npy"), runs)
        publish_bytes(json.dumps(note).encode(), self._buckets.path(self._split, self._part, "json"))

    def __enter__(self) -> Self:
        self._file = self._draft().open("wb")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._file is not None
        if kind is None:
            self._flush()
        self._file.close()
        if kind is None:
            self._draft().replace(self._buckets.path(self._split, self._part, "rows"))
        else:
            self._draft().unlink(missing_ok=True)

    def _draft(self) -> Path:
        return self._buckets.path(self._split, self._part, f"{os.getpid()}.draft")


def bucket_rows(buckets: Buckets, split: str, num_parts: int, bucket: int) -> EncodedBatch | None:
    """The rows of one bucket in the order of their keys; None if it has none."""
    keys: list[NDArray[np.uint64]] = []
    sizes: list[NDArray[np.int64]] = []
    blobs: list[memoryview] = []
    for part in range(num_parts):
        runs = np.load(buckets.path(split, part, "npy"), mmap_mode="r")
        with buckets.path(split, part, "rows").open("rb", buffering=0) as file:
            for rows, at in np.array(runs[:, :, bucket : bucket + 2]):
                data = memoryview(os.pread(file.fileno(), int(at[1] - at[0]), int(at[0])))
                count = int(rows[1] - rows[0])
                keys.append(np.frombuffer(data[: 8 * count], np.uint64))
                sizes.append(np.frombuffer(data[8 * count : 16 * count], np.int64))
                blobs.append(data[16 * count :])
    if not sum(map(len, keys)):
        return None
    all_sizes = np.concatenate(sizes)
    order = np.argsort(np.concatenate(keys), kind="stable")
    return _sorted(memoryview(b"".join(blobs)), all_sizes, order)


def _sorted(data: memoryview, sizes: NDArray[np.int64], order: NDArray[np.int64]) -> EncodedBatch:
    if (sizes == sizes[0]).all():
        return EncodedBatch(sizes, [np.frombuffer(data, np.uint8).reshape(len(sizes), -1)[order]])
    return EncodedBatch(sizes[order], parts=_slices(data, sizes, order))


def _in_order(data: memoryview, sizes: NDArray[np.int64], order: NDArray[np.int64]) -> memoryview:
    if (sizes == sizes[0]).all():
        return np.frombuffer(data, np.uint8).reshape(len(sizes), -1)[order].reshape(-1).data
    return memoryview(b"".join(_slices(data, sizes, order)))


def _slices(data: memoryview, sizes: NDArray[np.int64], order: NDArray[np.int64]) -> list[memoryview]:
    ends = np.cumsum(sizes)
    begins = (ends - sizes)[order].tolist()
    return [data[begin:end] for begin, end in zip(begins, ends[order].tolist(), strict=True)]
