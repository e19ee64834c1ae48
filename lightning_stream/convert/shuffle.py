"""Rows in a random order over the whole source, in bounded memory.

First every partition is written as an MDS dataset into a temporary folder, in runs that are sorted by a random key of
each row. Then the range of keys is cut into buckets. A bucket is a slice of each run, so it is read in a few pieces,
sorted by key and written.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from lightning_stream.convert.partition import OutputSpec, PartitionWriter
from lightning_stream.convert.receipt import Receipt, index_of, receipt_name
from lightning_stream.convert.sources.base import Partition, Source
from lightning_stream.convert.task import PartitionTask
from lightning_stream.errors import NotFoundError
from lightning_stream.formats.index import Index
from lightning_stream.formats.mds.shard import MdsShard
from lightning_stream.formats.shard_encoder import EncodedBatch
from lightning_stream.shared_files import publish_bytes
from lightning_stream.writer.batch import batch_columns
from lightning_stream.writer.place import is_remote

_BUCKET_BYTES, _RUN_BYTES = 64 << 20, 64 << 20

Keys = NDArray[np.uint64]
Runner = Callable[[Any, Sequence[Any], str], "dict[int, dict[str, Receipt]]"]


class RunWriter(PartitionWriter):
    """Writes rows in runs of about 64 MiB, each sorted by the rows' keys, and keeps the keys beside the shards."""

    def __init__(self, spec: OutputSpec, number: int, seed: int) -> None:
        super().__init__(spec, number)
        self._number, self._seed = number, seed
        self._keys_file = _keys_path(spec, number)
        self._rows: list[Any] = []
        self._row_bytes = self._num_rows = 0
        self._runs: list[Keys] = []

    def write(self, sample: Mapping[str, Any]) -> None:
        """Add one sample."""
        encoder = self._encoder or self._open(None, None)
        self._hold([b"".join(encoder.encode(sample))])

    def write_batch(self, batch: Any) -> None:
        """Add the rows of a batch."""
        columns, num_rows = batch_columns(batch)
        if num_rows:
            encoder = self._encoder or self._open(None, columns)
            encoded = encoder.encode_batch(columns, num_rows)
            data, ends = memoryview(encoded.joined()), np.cumsum(encoded.sizes)
            self._hold(
                [data[end - size : end] for end, size in zip(ends.tolist(), encoded.sizes.tolist(), strict=True)]
            )

    def _hold(self, rows: Sequence[Any]) -> None:
        self._rows += rows
        self._row_bytes += sum(map(len, rows))
        if self._row_bytes >= _RUN_BYTES:
            self._write_run()

    def _write_run(self) -> None:
        if not self._rows:
            return
        keys = row_keys(self._seed, self._number, self._num_rows, self._num_rows + len(self._rows))
        order = np.argsort(keys, kind="stable")
        rows = [self._rows[k] for k in order.tolist()]
        self.write_encoded(EncodedBatch(np.fromiter(map(len, rows), np.int64, len(rows)), parts=rows))
        self._runs.append(keys[order])
        self._num_rows += len(rows)
        self._rows, self._row_bytes = [], 0

    def finish(self) -> None:
        """Write the last run, and then the keys."""
        self._write_run()
        super().finish()
        begins = np.cumsum([0, *map(len, self._runs)]).astype(np.uint64)
        keys = np.concatenate([np.array([len(self._runs)], np.uint64), begins, *self._runs])
        self._keys_file.parent.mkdir(parents=True, exist_ok=True)  # a split without rows has no folder yet
        publish_bytes(keys.tobytes(), self._keys_file)


@dataclass(frozen=True)
class ScatterTask(PartitionTask):
    """Writes partitions into the temporary folder."""

    seed: int = 0

    def writer(self, split: str, number: int) -> RunWriter:
        """Take the rows of a partition that belong to a split."""
        return RunWriter(self.specs[split], number, self.seed)


@dataclass(frozen=True)
class GatherTask:
    """Writes buckets."""

    specs: Mapping[str, OutputSpec]
    spills: Mapping[str, OutputSpec]
    num_partitions: int
    num_buckets: int

    def run(self, bucket: Partition) -> dict[str, Receipt]:
        """Write a bucket, and then its receipts."""
        receipts = {}
        for split, spec in self.specs.items():
            pieces = [self._piece(split, number, bucket.number) for number in range(self.num_partitions)]
            keys = np.concatenate([keys for keys, _ in pieces])
            rows = [row for _, found in pieces for row in found]
            with PartitionWriter(spec, bucket.number) as writer:
                if rows:
                    ordered = [rows[k] for k in np.argsort(keys, kind="stable").tolist()]
                    sizes = np.fromiter(map(len, ordered), np.int64, len(ordered))
                    writer.write_encoded(EncodedBatch(sizes, parts=ordered))
            receipts[split] = Receipt(bucket.number, "", writer.num_samples, tuple(writer.shards))
        for split, spec in self.specs.items():
            spec.store.put(receipt_name(spec.fingerprint, bucket.number), receipts[split].to_bytes())
        return receipts

    def _piece(self, split: str, number: int, bucket: int) -> tuple[Keys, list[bytes]]:
        """The keys and rows of a bucket in one partition. Buckets are equal ranges of the keys' upper halves."""
        spill = self.spills[split]
        held = np.fromfile(_keys_path(spill, number), np.uint64)
        begins, keys = held[1 : 2 + int(held[0])].astype(np.int64).tolist(), held[2 + int(held[0]) :]
        low, high = (np.uint64(-(-(k << 32) // self.num_buckets)) for k in (bucket, bucket + 1))
        chosen: list[int] = []
        for begin, end in pairwise(begins):
            first, last = np.searchsorted(keys[begin:end] >> np.uint64(32), [low, high])
            chosen += range(begin + int(first), begin + int(last))
        return keys[chosen], list(_rows(spill, number, chosen))


def _rows(spill: OutputSpec, number: int, chosen: Sequence[int]) -> Iterator[bytes]:
    """The bytes of these rows of a partition; their numbers ascend."""
    receipt = _receipt(spill, number)
    assert receipt is not None, "all partitions are scattered"
    index = Index.from_bytes(index_of(receipt.shards), spill.uri)
    shards = [index.entry(k) for k in range(len(index))]
    ends = np.cumsum([entry.num_samples for entry in shards])
    which = np.searchsorted(ends, chosen, side="right")
    for k in np.unique(which).tolist():
        begin = int(ends[k]) - shards[k].num_samples
        shard = MdsShard(shards[k], Path(spill.uri))
        yield from (bytes(shard.stored(row - begin)) for row in np.asarray(chosen)[which == k].tolist())
        shard.close()


def row_keys(seed: int, partition: int, begin: int, end: int) -> Keys:
    """A random-looking number for each of these rows of a partition (the finalizer of splitmix64)."""
    start = xxhash.xxh3_64_intdigest(f"{seed}:{partition}".encode())
    with np.errstate(over="ignore"):
        z: Keys = np.uint64(start) + np.arange(begin + 1, end + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z ^= z >> np.uint64(31)
    return z


def shuffled_listing(source: Source, seed: int) -> Source:
    """Return the source with its files, each of which is a sample, in a random order."""
    order = np.argsort(row_keys(seed, 0, 0, len(source.files)), kind="stable")
    return replace(source, files=tuple(source.files[k] for k in order.tolist()))


@dataclass(frozen=True)
class Shuffle:
    """A shuffled conversion."""

    folder: Path
    num_buckets: int
    seed: int

    @classmethod
    def plan(cls, source: Source, spec: OutputSpec, partition_bytes: int, seed: int, tmp_dir: str | None) -> Shuffle:
        """Choose a folder beside a local dataset, else among this machine's temporary files."""
        name, home = f"shuffle-{spec.fingerprint}", Path(spec.uri)
        if tmp_dir is not None:
            folder = Path(tmp_dir).expanduser().absolute() / name
        elif is_remote(spec.uri):
            folder = Path(tempfile.gettempdir()) / f"lightning_stream-{name}"
        else:
            folder = home.with_name(f".{home.name}.{name}")
        return cls(folder, max(1, -(-source.num_bytes // min(partition_bytes, _BUCKET_BYTES))), seed)

    def write(
        self, task: PartitionTask, partitions: Sequence[Any], done: frozenset[int], run: Runner
    ) -> dict[int, dict[str, Receipt]]:
        """Scatter the partitions that are not scattered yet, and write the buckets that are not written yet."""
        missing = [Partition(k, ()) for k in range(self.num_buckets) if k not in done]
        spills = {split: self._spill(split, spec) for split, spec in task.specs.items()}
        if missing:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            scatter = ScatterTask(**{**vars(task), "specs": spills}, seed=self.seed)
            unread = [
                each for each in partitions if None in (_receipt(spill, each.number) for spill in spills.values())
            ]
            spilled = run(scatter, unread, "reading")
            if not all(receipt.is_good for each in spilled.values() for receipt in each.values()):
                return spilled
        return run(GatherTask(task.specs, spills, len(partitions), self.num_buckets), missing, "writing")

    def _spill(self, split: str, spec: OutputSpec) -> OutputSpec:
        writer = {**spec.writer, "compression": None, "hashes": [], "size_limit": _RUN_BYTES}
        return replace(
            spec, out=str(self.folder / (split or "all")), keep_local=False, store_options=None, writer=writer
        )

    def clean(self) -> None:
        """Remove the temporary files."""
        shutil.rmtree(self.folder, ignore_errors=True)


def _keys_path(spill: OutputSpec, number: int) -> Path:
    return Path(spill.uri) / f"keys-{number:05}"


def _receipt(spec: OutputSpec, number: int) -> Receipt | None:
    try:
        return Receipt.from_bytes(spec.store.read(receipt_name(spec.fingerprint, number)))
    except NotFoundError:
        return None
