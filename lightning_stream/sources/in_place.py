"""Datasets in other formats, read in place: an index is made of them, and each shard when it is fetched.

A piece of a file, such as a row group of Parquet, is a shard. The index is made from listings, footers and headers
alone. A shard is read, and written to the cache as MDS, when it is needed: all that reads MDS shards reads it then.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from lightning_stream.errors import FormatError, NotFoundError, redact
from lightning_stream.formats.index import INDEX_NAME, Index
from lightning_stream.formats.mds.encode import MdsEncoder, ShardDraft
from lightning_stream.formats.model import FileEntry, Origin, Schema, ShardEntry, to_text
from lightning_stream.sources.base import Columns, Piece, Pieces, Reader, Source, marks_of, stamps_of, warn_of_others
from lightning_stream.sources.choose import make_reader, reader_of, split_folders
from lightning_stream.sources.files import Files, Listing, SourceFile, files_of, readable
from lightning_stream.sources.nulls import OTHER_ENCODING, NullRule, nullable_columns, widened_columns
from lightning_stream.stores import Store
from lightning_stream.stores.local import is_other_mark

_log = logging.getLogger(__name__)
_REMEDY = "Name the columns by columns=."
_MARKS = re.compile(rb'(?:, "table_version": [0-9]+)?, "marks": "([0-9a-f.]+)"')


@dataclass(frozen=True)
class InPlace:
    """How a dataset in another format is read.

    A column that is known to have nulls gets the encoding ``json``, whose values may be None.

    Attributes:
        kind: Its format, e.g. ``"parquet"``; None to recognise it by the names of its files.
        columns: The columns that are read, and their encodings if it is a mapping; None for all.
        version: That of a Delta table; None for the newest.
        names: What names its files below the store's URL: a pattern, a file, or a folder that ends like a file.
        hidden: Whether files whose names begin with ``_`` or ``.`` are read, too.
        media: Where the files are that tables name by paths, without their bytes.
    """

    kind: str | None = None
    columns: Columns | Sequence[str] | None = None
    version: int | None = None
    names: str = ""
    hidden: bool = False
    media: Store | None = None

    def __post_init__(self) -> None:
        if isinstance(self.columns, str | set | frozenset) or (self.columns is not None and not self.columns):
            raise ValueError(
                f"columns must be a list of names, or a mapping of names to encodings; got {self.columns!r}."
            )

    def recognises(self, index: bytes) -> bool:
        """Return whether an index.json is that of another format: of LitData."""
        return b'"chunks"' in index and b'"shards"' not in index

    def index(self, store: Store, before: bytes | None = None) -> bytes:
        """Return the text of the index of what a store holds; ``before``, if that was made so of the same files.

        Raises:
            NotFoundError: There is no file of a format that can be read.
            FormatError: A file is damaged, or has not the columns of the first one.
        """
        listed = files_of(store, self.names, hidden=self.hidden)
        if not listed.files:
            raise NotFoundError(f"{store.url} holds no files{f' named {self.names}' if self.names else ''}.")
        made_of = stamps_of([*listed.files, *listed.log])
        if self.identity:  # the folder of a cache may hold the index of other settings
            made_of += xxhash.xxh3_64_hexdigest(self.identity.encode())
        listing = b'{"listing": "%s"' % made_of.encode()
        marks = marks_of(listed.files)
        if before is not None and before.startswith(listing):
            known = _MARKS.match(before, len(listing))  # none in older indexes
            if known is None or not is_other_mark(known[1].decode(), marks):
                return before
        with readable(store.url):
            files, reader = self._reader(listed)
            reader.media = self.media
            source = Source(files[0].uri, tuple(files), reader)
            columns = self._columns(source)
            shards = source.pieces(columns)
        if self.columns is None:
            warn_of_others(shards, columns)
        if not isinstance(self.columns, Mapping):
            columns = nullable_columns(reader, widened_columns(columns, shards), shards)
        _refuse_nulls(shards, columns)
        version = reader.settings.get("version")
        keys = b"" if version is None else b', "table_version": %d' % version
        if marks:
            keys += b', "marks": "%s"' % marks.encode()
        return listing + keys + b", " + shards_text(reader.kind, columns, shards) + b"}"

    def _reader(self, listing: Listing) -> tuple[Files, Reader]:
        """The files that are read, and what reads them."""
        data = [file for file in listing.files if file.name != INDEX_NAME]
        options = {} if self.version is None else {"version": self.version}
        files, reader = reader_of(listing._replace(files=data), self.kind, options)
        if reader.kind == "delta":
            return files, reader
        if "*" not in self.names and (splits := split_folders(files)):
            names = ", ".join(sorted(splits))
            raise ValueError(
                f"a stream must be one split; {listing.name} holds {names}. Pass split= if these are folders, or a "
                f"pattern as remote, e.g. {listing.name}/**/train*."
            )
        for file in files:
            if not file.name.isprintable() or "\\" in file.name or file.name[1:2] == ":":
                raise FormatError(
                    f"names of files must have no control character, backslash or drive; rename {file.uri!r}."
                )
        reader.begin(files)
        return files, reader

    def write(self, store: Store, entry: ShardEntry, to: Path) -> None:
        """Make a shard, as its index describes it, in the file `to`.

        Raises:
            NotFoundError: The file that it is made from is not there any more.
            FormatError: That file was changed since the index was made, or has values that cannot be read.
        """
        reader, split = self._origin_of(store, entry)
        encoder = MdsEncoder(entry.schema.columns)
        with readable(split.file.uri, has_arguments=False), ShardDraft(encoder, entry.num_samples, to) as draft:
            where = self._add_rows(entry, reader, split, draft.add)
            split.file.check()  # it may have changed while it was read
            if draft.num_samples != entry.num_samples:
                raise FormatError(
                    f"{where} must have {entry.num_samples:,} rows, as when its index was made; found "
                    f"{draft.num_samples:,}. Write the file again, or start a new training run."
                )
            try:
                draft.finish()
            except ValueError as error:
                raise FormatError(f"{where}: {error} Write the file in smaller parts.") from error

    def has_samples(self, store: Store, entry: ShardEntry) -> bool:
        """Return whether `samples` can read some samples of a shard for less than all of it."""
        reader, split = self._origin_of(store, entry)
        return reader.has_rows(split.file)

    def samples(self, store: Store, entry: ShardEntry, numbers: Sequence[int]) -> list[bytes]:
        """Return the bytes of some samples, as in the shard that `write` would make; errors as those of `write`."""
        reader, split = self._origin_of(store, entry)
        encoder = MdsEncoder(entry.schema.columns)
        samples = list[bytes]()

        def add(columns: dict[str, Any], num_rows: int) -> None:
            samples.extend(map(bytes, encoder.encode_batch(columns, num_rows).rows()))

        with readable(split.file.uri, has_arguments=False):
            where = self._add_rows(entry, reader, split._replace(rows=numbers), add)
        if len(samples) != len(numbers):
            raise FormatError(f"{where}: {len(numbers)} rows were asked for; found {len(samples)}. Start again.")
        return samples

    @property
    def identity(self) -> str:
        """What distinguishes the shards that are made from those of other settings; empty for the defaults."""
        names = f" {self.names}" if self.names else ""
        names += " hidden" if self.hidden else ""
        names += f" media {self.media.identity}" if self.media else ""
        return "" if self == InPlace() else f" as {self.kind} {json.dumps(self.columns)} {self.version}{names}"

    def _origin_of(self, store: Store, entry: ShardEntry) -> tuple[Reader, Piece]:
        """The piece of a file that a shard is made from, and its reader."""
        origin = entry.raw.origin
        assert origin is not None
        source = SourceFile(store.url, origin.name, origin.num_bytes, origin.stamp, mark=entry.raw.mark, store=store)
        with readable(f"the index of {store.url}", has_arguments=False):
            reader = make_reader(origin.kind, json.loads(origin.settings or "{}"))
        reader.is_strict = False  # columns that are not read were logged
        reader.media = self.media  # whatever an index says
        return reader, Piece(source, origin.begin, origin.end, entry.raw.num_bytes)

    def _add_rows(
        self, entry: ShardEntry, reader: Reader, split: Piece, add: Callable[[dict[str, Any], int], None]
    ) -> str:
        """Add a piece as columns of values; FormatError for nulls and wrong values. Return where the rows are."""
        columns = entry.schema.columns
        nulls = dict[str, int]()
        others = set[str]()
        truths = set[str]()
        at = ""
        try:
            for batch in reader.read([split], columns):
                at = f"{batch.where}: "
                if isinstance(batch.rows, list):
                    others.update(*batch.rows)
                values, num_rows = NullRule().settle(batch.rows, columns, nulls, truths)
                if num_rows:
                    add(values, num_rows)
                at = ""  # an error of a reader names the file
        except (TypeError, ValueError) as error:
            raise FormatError(f"{at}{error} {OTHER_ENCODING}" if at else str(error)) from error
        where = f"{split.file.uri} (part {split.begin} to {split.end})"
        if nulls:
            raise _nulls(where, ", ".join(f"{name}: {count:,}" for name, count in sorted(nulls.items())))
        if truths and not isinstance(self.columns, Mapping):
            names = ", ".join(map(repr, sorted(truths)))
            _log.warning(
                "%s has truth values among the numbers of %s: read as 1 and 0. %s", where, names, OTHER_ENCODING
            )
        if self.columns is None and (others := others - columns.keys()):
            names = ", ".join(map(repr, sorted(others)))
            _log.warning("%s has %s, which the rows that were looked at lack: not read. %s", where, names, _REMEDY)
        return where

    def _columns(self, source: Source) -> dict[str, str]:
        wanted = self.columns
        asked = wanted if isinstance(wanted, Mapping) else None if wanted is None else dict.fromkeys(wanted)
        try:
            return source.find_columns(asked).columns
        except ValueError as error:
            where = "" if redact(source.files[0].root) in str(error) else f"{source.name}: "
            raise ValueError(f"{where}{error}") from error


def shards_text(kind: str, columns: Columns, shards: Pieces) -> bytes:
    """Return the keys of an index whose shards are these pieces of files."""
    schema = MdsEncoder(columns).schema
    entries = (to_text(_entry(schema, kind, shard_index, piece)) for shard_index, piece in enumerate(shards))
    return b'"shards": [' + b", ".join(entries) + b'], "version": 2'


def _refuse_nulls(shards: Pieces, columns: Columns) -> None:
    """Raise FormatError if a column is known to have nulls, but cannot; those of deleted rows do not count."""
    for piece in shards:
        nulls = [name for name in piece.nulls if columns.get(name, "json") != "json"]
        if nulls and not piece.settings.get("deleted"):
            count = sum(nulls[0] in piece.nulls for piece in shards)
            raise _nulls(piece.file.uri, f"{', '.join(nulls)}: {count:,} of {len(shards):,} shards have some")


def changed_files(former: Index, now: Index) -> str:
    """Describe which files of a dataset in another format differ between two indexes; empty if they have none."""
    before, after = (
        {name: size_stamp for entry in index for name, *size_stamp in _files_of(entry)} for index in (former, now)
    )
    sentences = [f"{change}." for change in changes_of(before, after)]
    if former.table_version != now.table_version:
        sentences.append(f"The Delta table was at version {former.table_version} and is at {now.table_version} now.")
    return " ".join(sentences)


def _files_of(entry: ShardEntry) -> list[Any]:
    """The name, the size and the stamp of each file that a shard is made from."""
    origin = entry.raw.origin
    if origin is None:
        return []
    listed = json.loads(origin.settings or "{}").get("listed")
    return [file[:3] for file in listed] if listed else [(origin.name, origin.num_bytes, origin.stamp)]


def changes_of(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Describe how two listings of files differ, each a mapping from names to what a change shows in."""
    kinds = {
        "Changed files": [name for name in before if name in after and before[name] != after[name]],
        "New files": [name for name in after if name not in before],
        "Files that are gone": [name for name in before if name not in after],
    }
    return [f"{kind}: {_some(names)}" for kind, names in kinds.items() if names]


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3:,} more" if len(names) > 3 else "")


def is_made(index: Index) -> bool:
    """Return whether an index was made of files in another format."""
    return index.num_shards > 0 and index.entry(0).raw.origin is not None


def _nulls(where: str, problem: str) -> FormatError:
    return FormatError(
        f"{where}: only json columns may have nulls; found {problem}. Pass columns= without these columns, or with the "
        "encoding 'json' for them."
    )


def _entry(schema: Schema, kind: str, shard_index: int, piece: Piece) -> ShardEntry:
    file = piece.file
    settings = json.dumps(piece.settings) if piece.settings else ""
    end = piece.end or file.num_bytes
    origin = Origin(kind, file.name, file.num_bytes, file.stamp, piece.begin, end, settings)
    # Shards of another version have other names.
    mark = xxhash.xxh3_64_hexdigest(f"{(origin, schema.columns)!r}{piece.marks or file.mark}".encode())
    raw = FileEntry(f"shard.{shard_index:05}.{mark}.mds", piece.num_bytes, {}, origin=origin, mark=file.mark)
    return schema.shard(piece.num_rows, raw)
