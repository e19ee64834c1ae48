"""Writing one partition of a dataset: idempotent, so it may be written again, twice at once, or be abandoned.

A process may be killed, retried, or run twice. So a shard's name holds a digest of its bytes,
``part-00003/shard.00000.<digest>.mds``: attempts that write the same bytes write the same files, each put whole or not
at all, and an attempt that writes other bytes writes other files. The receipt decides which attempt counts: only what
receipts list can enter an index.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeAlias

import msgspec
import numpy as np
import zstandard

from lightning_stream.formats.index import FileEntry
from lightning_stream.formats.model import array_text, to_text, with_lengths
from lightning_stream.formats.shard_encoder import EncodedBatch
from lightning_stream.sources.nulls import OTHER_ENCODING
from lightning_stream.stores import Options, Store
from lightning_stream.writer import MDSWriter
from lightning_stream.writer.lengths import Lengths
from lightning_stream.writer.place import CONTROL, Transaction, digest_of

RECEIPT = ".json.zst"
Receipts: TypeAlias = "dict[int, dict[str, Receipt]]"  # by the number of the partition, and by split


@dataclass(frozen=True)
class Receipt:
    """What was written of one part; nothing counts if there are nulls or a refused value."""

    partition: int  # its number
    content: str = ""  # the digest of its rows, by which a later run of Spark recognises them; else ""
    num_samples: int = 0
    shards: tuple[dict[str, Any], ...] = ()  # index entries, their files named relative to the dataset's root
    nulls: Mapping[str, int] = field(default_factory=dict)  # null values by column
    lengths: Mapping[str, Sequence[FileEntry]] = field(default_factory=dict)  # their files, named like the shards'
    refused: str = ""  # why a value could not be written
    rows: Sequence[int] = ()  # the rows of each piece, where each is a shard

    @property
    def is_good(self) -> bool:
        """Whether what it lists may enter an index."""
        return not self.nulls and not self.refused

    def to_bytes(self) -> bytes:
        """As compressed json."""
        return zstandard.compress(to_text(self))

    @classmethod
    def from_bytes(cls, data: bytes) -> Receipt:
        """Read it back."""
        values = msgspec.json.decode(zstandard.decompress(data))
        for files in values["lengths"].values():
            for file in files:
                if size := file.get("num_bytes"):  # of a former release
                    file |= {"bytes": size, "samples": size // 4}
        return msgspec.convert(values, cls)

    def files(self) -> dict[str, int]:
        """Bytes by name of every file that is stored."""
        stored = [entry["zip_data"] or entry["raw_data"] for entry in self.shards]
        lengths = {file.basename: file.num_bytes for files in self.lengths.values() for file in files}
        return {file["basename"]: file["bytes"] for file in stored} | lengths


def partition_of(name: str) -> int:
    """The number of the partition that a file is of: the inverse of `OutputSpec.folder_of`."""
    return int(name.partition("/")[0].removeprefix("part-"))


def receipt_name(fingerprint: str, partition: int) -> str:
    """Where a receipt lies while the conversion is under way."""
    return f"{CONTROL}/{fingerprint}/{partition:05}{RECEIPT}"


@dataclass(frozen=True)
class OutputSpec:
    """One dataset that is being written: what every process gets."""

    out: Any
    keep_local: bool
    store_options: Options | None = field(repr=False)  # may hold credentials
    columns: Mapping[str, str]
    writer: Mapping[str, Any]
    fingerprint: str

    @cached_property
    def place(self) -> Transaction:
        """The folders or stores of the files."""
        return Transaction(self.out, self.keep_local, self.store_options)

    @property
    def store(self) -> Store:
        """The store where the dataset stays."""
        return self.place.stores[0]

    def folder_of(self, partition_id: int) -> str:
        """The folder of a partition's files, below the dataset's root."""
        return f"part-{partition_id:05}"

    def receipt(self, partition_id: int) -> Receipt:
        """Read the receipt of a partition; NotFoundError if it is not written."""
        return Receipt.from_bytes(self.store.read(receipt_name(self.fingerprint, partition_id)))

    def has(self, partition_id: int) -> bool:
        """Whether a partition is written."""
        return self.store.exists(receipt_name(self.fingerprint, partition_id))

    def put(self, receipt: Receipt) -> Receipt:
        """Put a receipt, if what it lists may enter an index; return it."""
        if receipt.is_good:
            self.store.put(receipt_name(self.fingerprint, receipt.partition), receipt.to_bytes())
        return receipt


class RefusedError(Exception):
    """A value that its encoding does not take: another attempt would not help."""


@contextmanager
def refusing(where: str = "") -> Iterator[None]:
    """Raise errors about a value as `RefusedError`, with where the value is."""
    try:
        yield
    except (TypeError, ValueError, OverflowError) as error:
        raise RefusedError(f"{where}{error}") from error


class PartitionWriter(MDSWriter):
    """An `MDSWriter` that names its shards by their bytes, and keeps its index entries instead of putting an index.

    `shards` has the entries once it is finished, with file names relative to the dataset's root.
    """

    def __init__(self, spec: OutputSpec, partition_id: int) -> None:
        super().__init__(out=_PartitionPlace(spec, partition_id), columns=spec.columns, **spec.writer)
        self.partition_id = partition_id

    def _log_error(self, kind: type[BaseException]) -> None:
        """Nothing: what a partition has left is the conversion's to say."""

    def write_encoded(self, batch: EncodedBatch, lengths: Lengths) -> None:
        """Add rows that are bytes of these columns already, with their lengths."""
        self._add_encoded(self._encoder or self._open(), batch, lengths)

    def receipt(self, nulls: Mapping[str, int], rows: Sequence[int] = ()) -> Receipt:
        """Return the receipt of the finished partition."""
        return Receipt(self.partition_id, "", self.num_samples, tuple(self.shards), nulls, self.length_files, rows=rows)


class _PartitionPlace(Transaction):
    """A folder for the shards of a partition. The conversion itself puts the index."""

    def __init__(self, spec: OutputSpec, partition_id: int) -> None:
        super().__init__(spec.out, spec.keep_local, spec.store_options)
        self.mode = "overwrite"
        self._folder = spec.folder_of(partition_id)

    def begin(self, *_: Any) -> None:
        pass

    def name_of(self, name: str, parts: Sequence[Any]) -> str:
        stem, digits, rest = name.split(".", 2)
        return f"{self._folder}/{stem}.{digits}.{digest_of(*parts)}.{rest}"

    def commit(self, *_: Any) -> bool:
        return True


def encoded_rows(rows: Sequence[Any]) -> EncodedBatch:
    """Return rows that are bytes as a batch."""
    return EncodedBatch(np.fromiter(map(len, rows), np.int64, len(rows)), [rows])


def check(receipts: Sequence[Receipt], source: str) -> None:
    """Raise ValueError if a partition of `source` could not be written."""
    if nulls := sum((Counter(receipt.nulls) for receipt in receipts), Counter[str]()):
        counts = ", ".join(f"{name}: {count:,}" for name, count in sorted(nulls.items()))
        raise ValueError(
            f"MDS has no null but in json columns; null values found, by column: {counts}. Nothing was published. Fill "
            "them (fill_nulls={column: value}, of a DataFrame: fillna), drop the rows (drop_nulls=True, dropna), or "
            "ask for 'json' in columns=."
        )
    if refused := [receipt for receipt in receipts if receipt.refused]:
        raise ValueError(
            f"{len(refused)} of {len(receipts)} partitions hold a value that cannot be written; in partition "
            f"{refused[0].partition}, {refused[0].refused} Nothing was published. {OTHER_ENCODING}"
        )
    if not any(receipt.num_samples for receipt in receipts):
        raise ValueError(f"{source} is empty: there is nothing to write.")


def joined_lengths(parts: Iterable[Mapping[str, Sequence[FileEntry]]]) -> dict[str, list[FileEntry]]:
    """The files of the lengths of all parts, one part after another."""
    joined: dict[str, list[FileEntry]] = {}
    for lengths in parts:
        for name, files in lengths.items():
            joined.setdefault(name, []).extend(files)
    return joined


def index_bytes(receipts: Sequence[Receipt], folder: str = "") -> bytes:
    """The index over all shards of these partitions, in their order; with file names relative to ``folder``."""
    shards = array_text(to_text(entry) for receipt in receipts for entry in receipt.shards)
    lengths = joined_lengths(receipt.lengths for receipt in receipts)
    index = with_lengths(b'{"version": 2, "shards": %b}' % shards, lengths)
    return index.replace(f'"basename": "{folder}/'.encode(), b'"basename": "') if folder else index
