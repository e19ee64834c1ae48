"""Datasets in other formats, read in place: an index is made of them, and each shard when it is fetched.

A piece of a file, such as a row group of Parquet, is a shard. The index is made from listings, footers and headers
alone. A shard is read, and written to the cache as MDS, when it is needed: all that reads MDS shards reads it then.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from lightning_stream.errors import FormatError, NotFoundError
from lightning_stream.formats.index.schema import FileEntry, Origin, Schema, ShardEntry, file_object, schema_object
from lightning_stream.formats.mds.encode import MdsEncoder, ShardDraft
from lightning_stream.sources.base import Batch, InputSplit, Piece, Reader
from lightning_stream.sources.choose import reader_class, reader_of
from lightning_stream.sources.files import DELTA_LOG, SourceFile, files_of
from lightning_stream.sources.nulls import NullRule
from lightning_stream.sources.stretches import of_listing
from lightning_stream.stores import Store
from lightning_stream.threads import DaemonPool

_THREADS = 32  # a footer costs two requests, and little else


@dataclass(frozen=True)
class InPlace:
    """How a dataset in another format is read.

    A column that is known to have nulls gets the encoding ``json``, whose values may be None.

    Attributes:
        kind: Its format, e.g. ``"parquet"``; None to recognise it by the names of its files.
        columns: The columns that are read, and their encodings if it is a mapping; None for all.
        version: That of a Delta table; None for the newest.
    """

    kind: str | None = None
    columns: Mapping[str, str] | Sequence[str] | None = None
    version: int | None = None

    def recognises(self, index: bytes) -> bool:
        """Return whether an index.json is that of another format: of LitData."""
        return b'"chunks"' in index and b'"shards"' not in index

    def index(self, store: Store, before: bytes | None = None) -> bytes:
        """Return the text of the index of what a store holds; ``before``, if that was made of the same files.

        Raises:
            NotFoundError: There is no file of a format that can be read.
            FormatError: A file is damaged, or has not the columns of the first one.
        """
        found, log = files_of(store)
        if not found:
            raise NotFoundError(f"{store.url} holds no files.")
        listing = json.dumps({"listing": _listing([*found, *log])})[:-1].encode()
        if before is not None and before.startswith(listing):
            return before
        if log and self.kind in (None, "delta"):
            reader: Any = reader_class("delta")(**({} if self.version is None else {"version": self.version}))
            files = reader.open_log(store)
        else:
            try:
                files, reader = reader_of(found, store.url, self.kind)
            except FormatError as error:
                raise NotFoundError(str(error)) from error
            reader.begin(files)
        columns = self._columns(reader, files)
        with DaemonPool(_THREADS, "index") as pool:
            shards = list(reader.all_pieces(files, columns, pool))
        if not isinstance(self.columns, Mapping):  # MDS has no null but in json
            nulls = {name for _, piece in shards for name in piece.nulls if columns.get(name) != "bytes"}
            columns = {name: "json" if name in nulls else encoding for name, encoding in columns.items()}
        schema = MdsEncoder(columns, None, (), None).schema
        entries = [json.dumps(_entry(schema, reader.kind, number, *one)) for number, one in enumerate(shards)]
        return listing + f', "shards": [{", ".join(entries)}], "version": 2}}'.encode()

    def write(self, store: Store, entry: ShardEntry, to: Path) -> None:
        """Make a shard, as its index describes it, in the file `to`.

        Raises:
            NotFoundError: The file that it is made from is not there any more.
            FormatError: That file was changed since the index was made, or has values that cannot be read.
        """
        reader, split = _origin_of(store, entry)
        with ShardDraft(MdsEncoder(entry.schema.columns, None, (), None), entry.num_samples, to) as draft:
            where = _settled(entry, reader.read_columns(split, entry.schema.columns), split, draft.add)
            if draft.num_samples != entry.num_samples:
                raise FormatError(
                    f"{where} must have {entry.num_samples:,} rows, as when its index was made; found "
                    f"{draft.num_samples:,}. The file was changed: start again."
                )
            try:
                draft.finish()
            except ValueError as error:
                raise FormatError(f"{where}: {error} Write the file in smaller parts.") from error

    def has_samples(self, store: Store, entry: ShardEntry) -> bool:
        """Return whether `samples` can read some samples of a shard for less than all of it."""
        reader, split = _origin_of(store, entry)
        return reader.has_rows(split.file)

    def samples(self, store: Store, entry: ShardEntry, numbers: Sequence[int]) -> list[bytes]:
        """Return the bytes of some samples, as in the shard that `write` would make; errors as those of `write`."""
        reader, split = _origin_of(store, entry)
        encoder, found = MdsEncoder(entry.schema.columns, None, (), None), list[bytes]()

        def add(columns: dict[str, Any], num_rows: int) -> None:
            batch = encoder.encode_batch(columns, num_rows)
            data, ends = bytes(batch.joined()), np.cumsum(batch.sizes).tolist()
            found.extend(data[begin:end] for begin, end in pairwise([0, *ends]))

        where = _settled(entry, reader.read_rows(split, entry.schema.columns, numbers), split, add)
        if len(found) != len(numbers):
            raise FormatError(f"{where}: {len(numbers)} rows were asked for; found {len(found)}. Start again.")
        return found

    @property
    def identity(self) -> str:
        """What distinguishes the shards that are made from those of other settings; empty for the defaults."""
        return "" if self == InPlace() else f" as {self.kind} {json.dumps(self.columns)} {self.version}"

    def _columns(self, reader: Reader, files: Sequence[SourceFile]) -> dict[str, str]:
        wanted = self.columns
        asked = wanted if isinstance(wanted, Mapping) else None if wanted is None else dict.fromkeys(wanted)
        found = reader.find_columns(files, asked).columns
        if asked is None:
            return found
        if missing := [name for name in asked if name not in found]:
            raise ValueError(f"{files[0].uri} has no column {', '.join(missing)}; it has {', '.join(found)}.")
        return {name: encoding or found[name] for name, encoding in asked.items()}


def _origin_of(store: Store, entry: ShardEntry) -> tuple[Reader, InputSplit]:
    """The piece of a file that a shard is made from, and its reader."""
    origin = entry.raw.origin
    assert origin is not None
    source = SourceFile(store.url, origin.name, origin.num_bytes, origin.stamp, store=store)
    reader = reader_class(origin.kind)(**(json.loads(origin.settings) if origin.settings else {}))
    return reader, InputSplit(of_listing(source, origin.kind), origin.begin, origin.end, entry.raw.num_bytes)


def _settled(
    entry: ShardEntry, batches: Iterable[Batch], split: InputSplit, add: Callable[[dict[str, Any], int], None]
) -> str:
    """Add all batches as columns of values; FormatError for nulls and wrong values. Return what they are of."""
    columns, nulls, at = entry.schema.columns, dict[str, int](), ""
    try:
        for batch in batches:
            at = f"{batch.where}: "
            values, num_rows = NullRule().settle(batch.rows, columns, nulls)
            if num_rows:
                add(values, num_rows)
            at = ""  # an error of a reader names the file
    except (TypeError, ValueError) as error:
        raise FormatError(f"{at}{error}") from error
    where = f"{split.file.uri} (part {split.begin} to {split.end})"
    if nulls:
        counts = ", ".join(f"{name}: {count:,}" for name, count in sorted(nulls.items()))
        raise FormatError(
            f"{where}: only json columns may have nulls; found {counts}. Pass columns= without these columns, or with "
            "the encoding 'json' for them."
        )
    return where


def is_table(store: Store) -> bool:
    """Return whether a store holds a Delta table."""
    return any(True for _ in store.list(DELTA_LOG))


def _listing(files: Sequence[SourceFile]) -> str:
    """A digest of the names, sizes and stamps of all files."""
    digest = xxhash.xxh3_128()
    for file in files:
        digest.update(f"{file.name}\0{file.num_bytes}\0{file.stamp}\n".encode())
    return digest.hexdigest()


def _entry(schema: Schema, kind: str, number: int, file: SourceFile, piece: Piece) -> dict[str, Any]:
    settings = json.dumps(piece.settings) if piece.settings else ""
    origin = Origin(kind, file.name, file.num_bytes, file.stamp, piece.begin, piece.end, settings)
    # Shards of another version have other names.
    mark = xxhash.xxh3_64_hexdigest(repr((origin, schema.columns)).encode())
    raw = FileEntry(f"shard.{number:05}.{mark}.mds", piece.num_bytes, {}, origin)
    return {**schema_object(schema), "samples": piece.num_rows, "raw_data": file_object(raw), "zip_data": None}
