"""index.json, parsed into arrays: no Python object per shard is held, entries are made on demand."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lightning_stream.formats.index.scan import parse_entry, scan_index
from lightning_stream.formats.index.schema import FileEntry, Schema, ShardEntry

__all__ = ["INDEX_NAME", "FileEntry", "Index", "Schema", "ShardEntry"]

INDEX_NAME = "index.json"
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


def version_name(digest: str) -> str:
    """What an older version of the index is kept as, once shards were appended: found by its digest."""
    return f"index.{digest[:16]}.json"


class Index:
    """All shards of a dataset, in order.

    Attributes:
        data: The text of index.json, UTF-8.
        where: What to call this index in messages: its path or URL.
        schemas: The distinct schemas of the shards.
        shard_sizes: int64[num_shards], number of samples.
        raw_bytes: int64[num_shards], bytes of the shard's files when uncompressed.
        stored_bytes: int64[num_shards], bytes of the shard's files as they are stored.
        num_samples: Over all shards.
        digest: Hex; over the raw files' names, sizes and hashes, the counts, and the columns. The same samples
            stored under another compression have the same digest.
    """

    def __init__(self, data: bytes, where: str) -> None:
        scan = scan_index(data, where)
        self.data = data
        self.where = where
        self.schemas = scan.schemas
        self._spans = scan.numbers[:, :2].copy()
        self.shard_sizes: NDArray[np.int64] = scan.numbers[:, 2].copy()
        self.raw_bytes: NDArray[np.int64] = scan.numbers[:, 3].copy()
        self.stored_bytes: NDArray[np.int64] = scan.numbers[:, 4].copy()
        self._schema_ids = scan.numbers[:, 5].astype(np.int32)
        self.num_samples = int(self.shard_sizes.sum())
        self.digest = scan.digest

    @classmethod
    def from_bytes(cls, data: bytes, where: str) -> Index:
        """Parse the text of an index.json.

        Raises:
            FormatError: Not version 2, a field missing or of the wrong kind, or a file name that leaves the folder.
        """
        return cls(data.removeprefix(_BYTE_ORDER_MARK), where)

    @classmethod
    def from_file(cls, path: Path) -> Index:
        """Parse the index.json at ``path``."""
        return cls.from_bytes(path.read_bytes(), str(path))

    @property
    def num_shards(self) -> int:
        """Number of shards."""
        return len(self.shard_sizes)

    @property
    def columns(self) -> dict[str, str]:
        """Encoding by column name, of the first shard."""
        return self.schemas[0].columns if self.schemas else {}

    def schema(self, shard: int) -> Schema:
        """The schema of one shard, without parsing its entry."""
        return self.schemas[int(self._schema_ids[self._checked(shard)])]

    def entry(self, shard: int) -> ShardEntry:
        """One shard's entry, parsed at each call.

        Raises:
            IndexError: Not 0 <= shard < num_shards.
        """
        return parse_entry(self.text(shard), f"{self.where}, shard {shard}", self.schema(shard))

    def text(self, shard: int) -> bytes:
        """The JSON text of one shard's entry, as it stands in the index."""
        begin, end = self._spans[self._checked(shard)]
        return self.data[begin:end]

    def _checked(self, shard: int) -> int:
        if not 0 <= shard < self.num_shards:
            raise IndexError(f"shard {shard} of an index with {self.num_shards} shards")
        return shard

    def __len__(self) -> int:
        return self.num_shards

    def __repr__(self) -> str:
        return f"Index({self.where!r}: {self.num_samples} samples in {self.num_shards} shards)"
