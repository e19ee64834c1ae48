"""index.json, parsed into arrays. Entries are made on demand, so no shard has a Python object."""

from __future__ import annotations

import copy
import re
from collections.abc import Collection, Iterator, Sequence
from functools import cached_property
from hashlib import blake2b
from itertools import pairwise
from pathlib import Path

import msgspec
import numpy as np

from lightning_stream.errors import FormatError

from .model import (
    INDEX_NAME,
    FileEntry,
    Schema,
    ShardEntry,
    array_text,
    check_basename,
    index_text,
    version_name,
    with_keys,
)
from .scan import read_entry, read_shards, read_top, snapshot_of

__all__ = ["INDEX_NAME", "FileEntry", "Index", "Schema", "ShardEntry", "version_name"]

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_REPLACE_LENGTHS = "Replace them: lightning-stream convert PATH --lengths NAME --overwrite."
_decode_lengths = msgspec.json.Decoder(dict[str, tuple[FileEntry, ...]]).decode


class Index:
    """All shards of a dataset, in order.

    Attributes:
        data, where: The text of index.json in UTF-8; its path or URL, for messages.
        schemas: The distinct schemas of the shards.
        shard_sizes: int64[num_shards], number of samples.
        raw_bytes, stored_bytes: int64[num_shards], bytes of the shard's files and of those joined to it, uncompressed
            and as they are stored.
        num_samples: The number of samples in all shards, also of deleted ones.
        deleted: The file of the deleted samples, in which each has its number in 8 bytes; None if there are none.
        joined: The columns that were added: each an index of as many shards, or of fewer where shards were appended
            since. Sample i of its shard k has further columns of sample i of shard k.
        chosen: The names of the columns that are read; None for all.
        digest: Hex, of the raw files' names, sizes and hashes, the counts, and the columns. Another compression of the
            same samples gives the same digest. Of data in another format: of its files and their parts.
        source_digest: The digest of the data in another format that these shards were converted from, shard by shard,
            so that both have one order; empty if there is none.
    """

    def __init__(self, data: bytes, where: str, snapshot: bytes = b"") -> None:
        top = read_top(data, where)
        self._shards = read_shards(data, top, where, snapshot)
        self._begins, self._ends, self.shard_sizes, _, _, self._schema_ids = self._shards.numbers
        self.data = data
        self.where = where
        self.schemas = self._shards.schemas
        self.deleted = file = top.deleted
        self.digest = self._shards.digest
        # After another change, such as an append, the shards are not only those that were converted.
        former = top.converted_from
        self.source_digest = former.source if former is not None and former.digest == self.digest else ""
        self.versions = bytes(top.versions)
        self._lengths_text = bytes(top.lengths)
        self.num_samples = int(self.shard_sizes.sum())
        if file is not None:
            check_basename(file.basename, where)
            rows = file.num_bytes / 8
            if not file.hashes or rows != file.num_samples or rows > self.num_samples:
                raise FormatError(
                    f"{where}: deleted rows must be rows of the dataset, with 8 bytes each and a hash; found "
                    f"{file.num_bytes:,} bytes for {file.num_samples} of {self.num_samples} rows. Restore the index."
                )
        self.chosen: frozenset[str] | None = None
        joined = (b'{"shards": ' + bytes(shards) + b', "version": 2}' for shards in top.joined)
        self.joined = tuple(Index(text, f"{where}, joined columns") for text in joined)
        for other in self.joined:
            if len(other) > len(self) or (other.shard_sizes != self.shard_sizes[: len(other)]).any():
                raise self._does_not_fit(other)
            self.digest = blake2b(f"{self.digest} joined {other.digest}".encode(), digest_size=32).hexdigest()
        for schemas in self._kinds() if self.joined else ():
            names = [name for schema in schemas for name in schema.names]
            if len(names) > len({*names}):
                raise self._does_not_fit(self.joined[-1])
        self._count_bytes()

    def _count_bytes(self) -> None:
        """Add the bytes of the joined shards to those of its own."""
        self.raw_bytes, self.stored_bytes = self._shards.numbers[3:5].copy()
        for other in self.joined:
            self.raw_bytes[: len(other)] += other.raw_bytes
            self.stored_bytes[: len(other)] += other.stored_bytes

    @staticmethod
    def _does_not_fit(other: Index) -> FormatError:
        names = ", ".join(sorted({name for schema in other.schemas for name in schema.names}))
        return FormatError(
            f"{other.where} must have the samples of the index's own shards, and other columns; found {names} for "
            f"{other.num_samples:,} samples in {other.num_shards:,} shards. Restore the index."
        )

    @classmethod
    def from_bytes(cls, data: bytes, where: str, snapshot: bytes = b"") -> Index:
        """Parse the text of an index.json; FormatError if it is not one, or if a file name leaves the folder.

        It is faster with what `to_keep` of the same index returned.
        """
        return cls(data.removeprefix(_BYTE_ORDER_MARK), where, snapshot)

    def to_keep(self) -> bytes:
        """Return what a later `from_bytes` is faster with; nothing for an index with added columns."""
        return b"" if self.joined else snapshot_of(self._shards, self.data)

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
        match = re.match(rb'\{"listing": "[^"]*", "table_version": ([0-9]+)', self.data)
        return None if match is None else int(match[1])

    @cached_property
    def lengths(self) -> dict[str, tuple[FileEntry, ...]]:
        """The files of each length by its name, e.g. ``"tokens"``; their numbers add up to `num_samples`.

        FormatError, only when they are asked for, if they do not fit the samples.
        """
        try:
            lengths = _decode_lengths(self._lengths_text)
        except (ValueError, RecursionError) as error:
            raise self._wrong_lengths(f"the lengths must list files by name; {error}") from error
        for name, files in lengths.items():
            for file in files:
                check_basename(file.basename, self.where)
                if file.num_bytes / 4 != file.num_samples:
                    raise self._wrong_lengths(
                        f"lengths have 4 bytes per sample; {file.basename} of lengths {name!r} has "
                        f"{file.num_bytes:,} bytes for {file.num_samples or 0:,} samples"
                    )
            if (total := sum(file.num_bytes for file in files) // 4) != self.num_samples:
                names = ", ".join(file.basename for file in files[:3]) or "no file"
                raise self._wrong_lengths(
                    f"lengths have one number per sample; lengths {name!r} ({names}) have {total:,} numbers for "
                    f"{self.num_samples:,} samples"
                )
        return lengths

    def _wrong_lengths(self, rule: str) -> FormatError:
        return FormatError(f"{self.where}: {rule}. {_REPLACE_LENGTHS}")

    @property
    def columns(self) -> dict[str, str]:
        """Encoding by column name in the first shard, joined columns included."""
        return self.column_sets[0] if len(self) else {}

    @cached_property
    def column_sets(self) -> list[dict[str, str]]:
        """The different columns that shards have, joined columns included and only those that are chosen: encoding by
        name. The first one is that of the first shard."""
        sets: dict[tuple[tuple[str, str], ...], None] = {}
        for schemas in self._kinds():
            columns = {name: encoding for schema in schemas for name, encoding in schema.columns.items()}
            names = sorted(columns) if len(schemas) > 1 else columns  # as a writer stores them
            sets[tuple((name, columns[name]) for name in names if self.chosen is None or name in self.chosen)] = None
        return list(map(dict, sets))

    def _kinds(self) -> list[tuple[Schema, ...]]:
        """The different schemas that a shard and those joined to it have, the first shard's first."""
        parts = (self, *self.joined)
        kinds = np.zeros(len(self), np.int64)
        for part in parts:
            kinds *= 1 + len(part.schemas)
            kinds[: len(part)] += 1 + part._schema_ids  # noqa: SLF001 - of this class
        firsts = sorted(np.unique(kinds, return_index=True)[1].tolist())
        return [
            tuple(part.schemas[part._schema_ids[shard]] for part in parts if shard < len(part))  # noqa: SLF001
            for shard in firsts
        ]

    def entry(self, shard: int) -> ShardEntry:
        """Parse one shard's entry; IndexError unless 0 <= shard < num_shards."""
        return read_entry(self.text(shard), f"{self.where}, shard {shard}")

    def entries(self, shard: int) -> tuple[ShardEntry, ...]:
        """Parse the entries of one shard and of those joined to it."""
        return self.entry(shard), *(other.entry(shard) for other in self.joined if shard < len(other))

    def cut(self, num_bytes: int) -> list[tuple[int, int]]:
        """Return the bounds [begin, end) of groups of neighbouring shards, each of about so many raw bytes."""
        groups = (np.cumsum(self.raw_bytes) - self.raw_bytes) // num_bytes
        return list(pairwise([*np.flatnonzero(np.diff(groups, prepend=-1)).tolist(), self.num_shards]))

    def part(self, begin: int, end: int) -> Index:
        """Return an index of the shards [begin, end) and those joined to them; none of their samples is deleted."""
        joined = [array_text(map(other.text, range(begin, min(end, len(other))))) for other in self.joined]
        shards = index_text(map(self.text, range(begin, end)))
        return Index(with_keys(shards, {"joined": array_text(joined) if joined else None}), self.where)

    def choose(self, names: Collection[str]) -> Index:
        """Return this index with some columns alone; joined shards that have none of them are not read then.

        ValueError for names that no shard has.
        """
        known = dict.fromkeys(name for columns in self.column_sets for name in columns)
        if absent := [name for name in names if name not in known]:
            raise ValueError(f"columns: {self.where} has no column {', '.join(absent)}; it has {', '.join(known)}.")
        if len(set(names)) == len(known):
            return self
        index = copy.copy(self)
        del vars(index)["column_sets"]
        index.chosen = frozenset(names)
        index.joined = tuple(other for other in self.joined if any(name in other.columns for name in names))
        index._count_bytes()  # noqa: SLF001 - of this class
        return index

    def text(self, shard: int) -> bytes:
        """Return the JSON text of one shard's entry."""
        if not 0 <= shard < len(self):
            raise IndexError(f"shard {shard} of an index with {len(self)} shards")
        return self.data[self._begins[shard] : self._ends[shard]]

    def begins_with(self, other: Index) -> bool:
        """Whether its first shards are those of another index: then their samples have the same numbers in both."""
        return len(other) <= len(self) and all(self.text(shard) == other.text(shard) for shard in range(len(other)))

    def __len__(self) -> int:
        return self.num_shards

    def __iter__(self) -> Iterator[ShardEntry]:
        """Parse the entry of each shard."""
        return map(self.entry, range(self.num_shards))


def mixed_columns(indexes: Sequence[Index]) -> dict[str, bool] | None:
    """Return all columns, and whether all shards have them in one encoding; None if all shards have the same."""
    sets = [columns for index in indexes for columns in index.column_sets]
    formats = {schema.format for index in indexes for schema in index.schemas}
    if len(formats) <= 1 and len({tuple(columns.items()) for columns in sets}) <= 1:
        return None
    names = dict.fromkeys(name for columns in sets for name in columns)
    return {name: len({columns.get(name) for columns in sets}) == 1 for name in names}
