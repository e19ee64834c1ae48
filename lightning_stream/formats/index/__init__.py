"""index.json, parsed into arrays. Entries are made on demand, so no shard has a Python object."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lightning_stream.formats.index.lengths import parse_lengths
from lightning_stream.formats.index.scan import parse_entry, scan_index
from lightning_stream.formats.index.schema import FileEntry, Schema, ShardEntry

__all__ = ["INDEX_NAME", "FileEntry", "Index", "Schema", "ShardEntry"]

INDEX_NAME = "index.json"
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


def version_name(digest: str) -> str:
    """Return the name under which an append keeps the index before it, from that index's digest."""
    return f"index.{digest[:16]}.json"


class Index:
    """All shards of a dataset, in order.

    Attributes:
        data, where: The text of index.json in UTF-8; its path or URL, for messages.
        schemas: The distinct schemas of the shards.
        shard_sizes: int64[num_shards], number of samples.
        raw_bytes, stored_bytes: int64[num_shards], bytes of the shard's files uncompressed, and as they are stored.
        num_samples: The number of samples in all shards, also of deleted ones.
        deleted: The file of the deleted samples, in which each has its number in 8 bytes; None if there are none.
        digest: Hex, of the raw files' names, sizes and hashes, the counts, and the columns. Another compression of the
            same samples gives the same digest. Of data in another format: of its files and their parts.
        source_digest: The digest of the data in another format that these shards were converted from, shard by shard,
            so that both have one order; empty if there is none.
    """

    def __init__(self, data: bytes, where: str) -> None:
        numbers, self.schemas, self.deleted, self.digest, self.source_digest = scan_index(data, where)
        self.data, self.where = data, where
        self._spans = numbers[:, :2].copy()
        self.shard_sizes: NDArray[np.int64] = numbers[:, 2].copy()
        self.raw_bytes: NDArray[np.int64] = numbers[:, 3].copy()
        self.stored_bytes: NDArray[np.int64] = numbers[:, 4].copy()
        self._schema_ids = numbers[:, 5].astype(np.int32)
        self.num_samples = int(self.shard_sizes.sum())

    @classmethod
    def from_bytes(cls, data: bytes, where: str) -> Index:
        """Parse the text of an index.json; FormatError if it is not one, or if a file name leaves the folder."""
        return cls(data.removeprefix(_BYTE_ORDER_MARK), where)

    @classmethod
    def from_file(cls, path: Path) -> Index:
        """Parse the index.json at ``path``."""
        return cls.from_bytes(path.read_bytes(), str(path))

    @property
    def num_deleted(self) -> int:
        """The number of deleted samples."""
        return 0 if self.deleted is None else self.deleted.num_bytes // 8

    @property
    def num_shards(self) -> int:
        """The number of shards."""
        return len(self.shard_sizes)

    @property
    def table_version(self) -> int | None:
        """The version of the Delta table whose files are read in place; None of any other dataset."""
        found = re.match(rb'\{"listing": "[^"]*", "table_version": ([0-9]+)', self.data)
        return None if found is None else int(found[1])

    @cached_property
    def lengths(self) -> dict[str, tuple[FileEntry, ...]]:
        """The files of each length by its name, e.g. ``"tokens"``; their numbers add up to `num_samples`.

        FormatError, only when they are asked for, if they do not fit the samples.
        """
        return parse_lengths(self.data, self.num_samples, self.where)

    @property
    def columns(self) -> dict[str, str]:
        """Encoding by column name in the first shard."""
        return self.schemas[0].columns if self.schemas else {}

    def schema(self, shard: int) -> Schema:
        """Return the schema of one shard, without parsing its entry."""
        return self.schemas[int(self._schema_ids[self._checked(shard)])]

    def entry(self, shard: int) -> ShardEntry:
        """Parse one shard's entry; IndexError unless 0 <= shard < num_shards."""
        return parse_entry(self.text(shard), f"{self.where}, shard {shard}", self.schema(shard))

    def text(self, shard: int) -> bytes:
        """Return the JSON text of one shard's entry."""
        begin, end = self._spans[self._checked(shard)]
        return self.data[begin:end]

    def _checked(self, shard: int) -> int:
        if not 0 <= shard < self.num_shards:
            raise IndexError(f"shard {shard} of an index with {self.num_shards} shards")
        return shard

    def __len__(self) -> int:
        return self.num_shards


def mixed_columns(indexes: Iterable[Index]) -> dict[str, bool] | None:
    """Return all columns, and whether all shards have them in one encoding; None if all shards have the same."""
    schemas = [schema for index in indexes for schema in index.schemas]
    if len({(schema.format, schema.names, schema.encodings) for schema in schemas}) <= 1:
        return None
    encodings = [schema.columns for schema in schemas]
    names = dict.fromkeys(name for columns in encodings for name in columns)
    return {name: len({columns.get(name) for columns in encodings}) == 1 for name in names}
