"""Rows in a random order over the whole source, in bounded memory.

First every partition is written into a temporary folder, as an MDS dataset of rows with a random key each. Its shards
are runs of about 64 MiB, each sorted by the keys. Then the range of keys is cut into buckets. A bucket is a slice of
each run, so it is read in a few pieces, sorted by key and written.
"""

from __future__ import annotations

import logging
import os
import shutil
import stat
import tempfile
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from glob import escape
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from lightning_stream.errors import CacheError, LockTimeoutError, UnavailableError
from lightning_stream.formats.encodings.base import BinaryColumn
from lightning_stream.formats.index import Index
from lightning_stream.formats.shard import Shard
from lightning_stream.formats.shard_encoder import EncodedBatch
from lightning_stream.order.permutation import MIX_STEP, mix64
from lightning_stream.processes import WorkersDiedError
from lightning_stream.sources.base import Partition, Source
from lightning_stream.stores import is_remote
from lightning_stream.writer.lengths import Lengths

from .partition import OutputSpec, PartitionWriter, Receipt, Receipts, encoded_rows, index_bytes
from .publish import folder_lock
from .task import PartitionTask

_LOG = logging.getLogger(__name__)
_BUCKET_BYTES = 64 << 20
_RUN_BYTES = 64 << 20
_COLUMNS = {"key": "uint64", "row": "bytes"}

Runner = Callable[[Any, Sequence[Any], str], "Receipts"]


class RunWriter(PartitionWriter):
    """Writes rows with random keys, in runs that are sorted by the keys."""

    def __init__(self, spec: OutputSpec, partition_id: int, seed: int) -> None:
        super().__init__(spec, partition_id)
        self._seed = seed
        self._rows: list[Any] = []
        self._row_bytes = 0

    def write_encoded(self, batch: EncodedBatch, lengths: Lengths) -> None:
        """Add rows that are bytes of the final dataset's columns. Their lengths go before the bytes of each row."""
        rows: Iterable[Any] = batch.rows()
        if lengths:
            heads = np.stack(list(lengths.values()), axis=1).astype("<u4")
            rows = (head.tobytes() + row for head, row in zip(heads, rows, strict=True))
        for row in rows:
            if self._rows and self._row_bytes + len(row) > _RUN_BYTES:
                self._write_run()
            self._rows.append(row)
            self._row_bytes += len(row)

    def _write_run(self) -> None:
        keys = row_keys(self._seed, self.partition_id, self.num_samples, self.num_samples + len(self._rows))
        order = np.argsort(keys, kind="stable")
        self.write_batch({"key": keys[order], "row": BinaryColumn(self._rows[k] for k in order.tolist())})
        self.flush_shard()
        self._rows = []
        self._row_bytes = 0

    def finish(self) -> None:
        if self._rows:
            self._write_run()
        super().finish()


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
            keyed = [
                keyed_row
                for partition_id in range(self.num_partitions)
                for keyed_row in self._slices(self.spills[split], partition_id, bucket.partition_id)
            ]
            rows = [row for _, row in sorted(keyed, key=itemgetter(0))]
            names = list(spec.writer.get("lengths") or ())
            width = 4 * len(names)
            heads = np.frombuffer(b"".join(row[:width] for row in rows), "<u4").reshape(len(rows), len(names))
            lengths = dict(zip(names, heads.T.astype(np.uint32), strict=True))
            with PartitionWriter(spec, bucket.partition_id) as writer:
                writer.write_encoded(encoded_rows([row[width:] for row in rows] if width else rows), lengths)
            receipts[split] = spec.put(writer.receipt({}))
        return receipts

    def _slices(self, spill: OutputSpec, partition_id: int, bucket: int) -> Iterator[tuple[int, bytes]]:
        """The keys and rows of a bucket in one partition. Buckets are equal ranges of keys."""
        index = Index.from_bytes(index_bytes([spill.receipt(partition_id)]), spill.out)
        edges = [-(-(k << 64) // self.num_buckets) for k in (bucket, bucket + 1)]
        for entry in index:
            run = Shard(entry, Path(spill.out))
            samples = map(run.sample, range(*(_first(run, edge) for edge in edges)))
            yield from ((int(sample["key"]), sample["row"]) for sample in samples)
            run.close()


def _first(run: Shard, edge: int) -> int:
    """The first row of a run whose key is not below ``edge``."""
    return bisect_left(range(run.num_samples), edge, key=lambda k: int(run.sample(k)["key"]))


def row_keys(seed: int, partition: int, begin: int, end: int) -> NDArray[np.uint64]:
    """A random-looking number for each of these rows of a partition."""
    start = np.uint64(xxhash.xxh3_64_intdigest(f"{seed}:{partition}".encode()))
    return mix64(start + np.arange(begin + 1, end + 1, dtype=np.uint64) * MIX_STEP)


def shuffled_listing(source: Source, seed: int) -> Source:
    """Return the source with its files, each of which is a sample, in a random order."""
    order = np.argsort(row_keys(seed, 0, 0, len(source.files)), kind="stable")
    return replace(source, files=tuple(source.files[k] for k in order.tolist()))


@dataclass(frozen=True)
class Shuffle:
    """A shuffled conversion.

    Attributes:
        folder: Where its temporary files are; only this conversion to this place has one of this name.
        former: A pattern of the names of those of all conversions to this place.
        num_buckets: Parts of the range of keys.
        seed: Chooses the keys.
    """

    folder: Path
    former: str
    num_buckets: int
    seed: int

    @classmethod
    def plan(
        cls, source: Source, uri: str, fingerprint: str, partition_bytes: int, seed: int, tmp_dir: str | None
    ) -> Shuffle:
        """Choose a folder beside a local dataset, else among this machine's temporary files."""
        place = xxhash.xxh3_64_hexdigest(uri.encode())
        if tmp_dir is not None:
            parent = Path(tmp_dir).expanduser().absolute()
            begin = ""
        elif is_remote(uri):
            parent = Path(tempfile.gettempdir())
            begin = "lightning_stream-"
        else:
            parent = Path(uri).parent
            begin = f".{Path(uri).name}."
        folder = parent / f"{begin}shuffle-{fingerprint}-{place}"
        former = f"{escape(begin)}shuffle-*-{place}"
        return cls(folder, former, max(1, -(-source.num_bytes // min(partition_bytes, _BUCKET_BYTES))), seed)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Keep the same conversion out of this one's temporary files, and remove them at the end.

        They stay where the same call continues with them: after a kill, Ctrl-C, a store's failure, or workers' deaths.
        """
        with ExitStack() as locks:
            try:
                locks.enter_context(folder_lock(self.folder))
            except LockTimeoutError:
                raise
            except CacheError:
                _LOG.info("%s is in a file system without locks.", self.folder)
            try:
                yield
            except (KeyboardInterrupt, UnavailableError, WorkersDiedError):
                if self.folder.exists():
                    _LOG.warning("the same call of convert continues with the rows in %s.", self.folder)
                raise
            except BaseException:
                self.clean()
                raise
            self.clean()

    def sweep(self) -> None:
        """Remove what other conversions to this place left, with which none continues."""
        for folder in set(self.folder.parent.glob(self.former)) - {self.folder}:
            lock = folder_lock(folder)
            with suppress(CacheError):  # a file system without locks: it may be in use
                if lock.try_acquire():
                    shutil.rmtree(folder, ignore_errors=True)
                    lock.release()

    def write(
        self, task: PartitionTask, partitions: Sequence[Partition], done: frozenset[int], run: Runner
    ) -> Receipts:
        """Scatter the partitions that are not scattered yet, and write the buckets that are not written yet."""
        missing = [Partition(k, ()) for k in range(self.num_buckets) if k not in done]
        spills = {split: self._spill(split, spec) for split, spec in task.specs.items()}
        if missing:
            self._make_folder()
            scatter = replace(task, specs=spills, make_writer=partial(RunWriter, seed=self.seed))
            unread = [part for part in partitions if not all(spill.has(part.partition_id) for spill in spills.values())]
            spilled = run(scatter, unread, "reading")
            if not all(receipt.is_good for receipts in spilled.values() for receipt in receipts.values()):
                return spilled
        return run(GatherTask(task.specs, spills, len(partitions), self.num_buckets), missing, "writing")

    def _make_folder(self) -> None:
        """Make the folder; all users may write into a folder for temporary files, and its name can be foreseen.

        Raises:
            PermissionError: Somebody else made it.
        """
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        status = self.folder.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
            raise PermissionError(
                f"{self.folder} holds rows while they are shuffled, so it must be a folder of this user; user "
                f"{status.st_uid} made it. Remove it, or pass tmp_dir=."
            )

    def _spill(self, split: str, spec: OutputSpec) -> OutputSpec:
        writer = {**spec.writer, "compression": None, "hashes": [], "size_limit": None, "lengths": None}
        return OutputSpec(str(self.folder / (split or "all")), False, None, _COLUMNS, writer, spec.fingerprint)

    def clean(self) -> None:
        """Remove the temporary files."""
        shutil.rmtree(self.folder, ignore_errors=True)
