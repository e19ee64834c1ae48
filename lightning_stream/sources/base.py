"""What every kind of source offers: where it can be cut, what its columns are, and the rows of a piece."""

from __future__ import annotations

import logging
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, NamedTuple, TypeAlias, TypeVar

import numpy as np
import xxhash
from numpy.typing import NDArray

from lightning_stream.formats.encodings import get_encoding
from lightning_stream.sources.files import Files, SourceFile, readable
from lightning_stream.stores import Store
from lightning_stream.threads import DaemonPool

_log = logging.getLogger(__name__)
Item = TypeVar("Item")
Row: TypeAlias = "Mapping[str, Any]"
Columns: TypeAlias = "Mapping[str, str]"  # their encodings by name
Asked: TypeAlias = "Mapping[str, str | None]"  # columns that are wanted, with their encodings or None to infer them
Pieces: TypeAlias = "Sequence[Piece]"
Batches: TypeAlias = "Iterator[Batch]"
SAMPLED_ROWS = 10_000
_MIN_BYTES = 32 << 20
_MAX_BYTES = 512 << 20
_PARTITIONS = 32
_BATCH_BYTES = 8 << 20
_BATCH_ROWS = 256
_UNKNOWN_BYTES = 1 << 20  # of a value such as an opened image
_LISTED_FILES = 10_000
_FOOTERS_AT_ONCE = 32  # a footer costs two requests, and little else


class Piece(NamedTuple):
    """A piece of a file that can be read by itself, and become a shard.

    Attributes:
        file: The file.
        begin, end: In units of the kind of source: bytes, row groups, batches; an end of None is the file's.
        num_bytes: About.
        num_rows: Of a piece that becomes a shard.
        settings: Those of the reader, if they differ between pieces.
        nulls: The columns that are known to have some.
        others: The columns that are not read.
        types: The Arrow types of columns for which those of the first file are too narrow.
        rows: The numbers of those that are read; None for all.
        marks: Of the local files that a piece of several is read from, see `marks_of`.
    """

    file: SourceFile
    begin: int = 0
    end: int | None = None
    num_bytes: int = 0
    num_rows: int = 0
    settings: Mapping[str, Any] = {}
    nulls: tuple[str, ...] = ()
    others: tuple[str, ...] = ()
    types: Mapping[str, Any] = {}
    rows: Sequence[int] | None = None
    marks: str = ""


@dataclass(frozen=True)
class Partition:
    """What one process writes at a time."""

    partition_id: int
    splits: tuple[Piece, ...]

    def __str__(self) -> str:
        files = f" ({self.splits[0].file.uri}{' and others' if len(self.splits) > 1 else ''})" if self.splits else ""
        return f"partition {self.partition_id}{files}"


class Batch(NamedTuple):
    """Some rows, and where they are, for messages: an Arrow record batch, a list of dicts, or a dict of columns."""

    rows: Any
    where: str
    lengths: Mapping[str, NDArray[np.uint32]] = {}  # that the source has of them, by name


@dataclass(frozen=True)
class SourceSchema:
    """What the beginning of a source shows about all of it."""

    columns: dict[str, str]  # with their encodings
    notes: Mapping[str, Any] = field(default_factory=dict)  # for the manifest, e.g. class names
    identity: tuple[str, ...] = ()  # the columns that tell rows apart for the validation split; empty for all
    media: tuple[str, ...] = ()  # columns of bytes that are compressed already, e.g. sound


class Reader(ABC):
    """Reads files of one kind. Picklable: each process has its own. A dataclass whose fields are the user's options.

    Attributes:
        kind: Its name, as users choose it.
        is_listing: Whether each file is one sample, so that the files may be read in any order.
        min_bytes: The least bytes of a partition where the user names none.
        piece_bytes: The bytes of a piece, where files can be cut anywhere; None where they cannot.
        is_cut_by_piece: Whether a file is always cut into its pieces.
        is_strict: Whether all values must look like those that the encodings were inferred from.
        takes_nulls: Whether columns, but for bytes, can be read as json, which has nulls.
        lengths: The lengths of all rows that the source has, by name.
        source_digest: The digest of a dataset that has one, "" if its pieces have other rows; None to compute it.
        media: Where the files are that its rows name by paths; None if they name none.
    """

    kind: ClassVar[str]
    is_listing: ClassVar[bool] = False
    min_bytes: ClassVar[int] = _MIN_BYTES
    piece_bytes: ClassVar[int | None] = None
    is_cut_by_piece: ClassVar[bool] = False
    is_strict = True
    takes_nulls: ClassVar[bool] = True
    lengths: Mapping[str, NDArray[np.uint32]] = {}
    source_digest: str | None = None
    media: Store | None = None

    def readable(self, where: str) -> AbstractContextManager[None]:
        """Return a context in which what is met in damaged files is raised as FormatError."""
        return readable(where)

    def begin(self, files: Files) -> None:  # noqa: B027 - most kinds need no list of all files
        """Look at the list of all files, those of all splits, before anything else."""

    @abstractmethod
    def find_columns(self, files: Files, asked: Asked | None) -> SourceSchema:
        """Return the columns, from a schema or from some rows; of those that are not asked for, less may be known."""

    def input_splits(self, file: SourceFile, partition_bytes: int) -> list[Piece]:
        """Cut a file into parts of about ``partition_bytes``; always in the same way."""
        return [Piece(file, num_bytes=file.num_bytes)]

    def has_pieces(self, files: Files) -> bool:
        """Whether `scan` finds pieces of these files."""
        return (type(self).scan, type(self).pieces_of) != (Reader.scan, Reader.pieces_of)

    @abstractmethod
    def read(self, splits: Pieces, columns: Columns) -> Batches:
        """Yield the rows of some pieces, in order, some at a time: as values of each column where that is faster.

        A piece of some rows is read by ranges of bytes; only one whose file `has_rows` may be asked for.
        """

    def scan(self, files: Files, columns: Columns, pool: DaemonPool) -> Iterator[Piece]:
        """Yield the pieces of all files that become shards where they are read in place, in order.

        Only headers, footers and indexes are read, of several files at once in the pool. FormatError for a file that
        has not these columns.
        """
        for pieces in pool.map(lambda file: self.pieces_of(file, columns), files):
            yield from pieces

    def pieces_of(self, file: SourceFile, columns: Columns) -> Iterable[Piece]:
        """Return the pieces of one file."""
        raise ValueError(
            f"{file.uri}: files of the format {self.kind} cannot be read in place. Convert them: "
            "`lightning-stream convert SOURCE OUT`."
        )

    def has_rows(self, file: SourceFile) -> bool:
        """Return whether some rows of a piece can be read for less than all of it."""
        return False

    @property
    def settings(self) -> dict[str, Any]:
        """What decides which rows it reads: part of a conversion's fingerprint.

        An option that does not compare is younger than fingerprints that must stay: it counts once it is set. A field
        that is not shown is no option.
        """
        counted = {"kind": self.kind}
        for option in fields(self):  # type: ignore[arg-type]
            value = getattr(self, option.name)
            if option.repr and (option.compare or value != option.default):
                counted[option.name] = value
        return counted


@dataclass(frozen=True)
class Source:
    """What is converted."""

    name: str
    files: tuple[SourceFile, ...]
    reader: Reader
    splits: Mapping[str, tuple[SourceFile, ...]] = field(default_factory=dict)  # where names of files show splits
    num_left_out: int = 0  # files that are not read since their names begin with ``_`` or ``.``

    @property
    def num_bytes(self) -> int:
        """Bytes of all files."""
        return sum(file.num_bytes for file in self.files)

    @property
    def partition_bytes(self) -> int:
        """Bytes of a partition where the user names none: a 32nd of the source, but 32 to 512 MiB."""
        return max(self.reader.min_bytes, min(_MAX_BYTES, self.num_bytes // _PARTITIONS))

    @property
    def identity(self) -> dict[str, Any]:
        """What distinguishes this source from others: part of a conversion's fingerprint."""
        sizes = {"num_files": len(self.files), "num_bytes": self.num_bytes, "stamps": stamps_of(self.files)}
        return {"reader": self.reader.settings, **sizes}

    @property
    def record(self) -> dict[str, Any]:
        """What a manifest holds about the source; its files are listed if there are at most 10,000."""
        listed = self.files if len(self.files) <= _LISTED_FILES else ()
        files = [{"name": file.name, "bytes": file.num_bytes, "stamp": file.stamp} for file in listed]
        return {**self.identity, "name": self.name, "files": files}

    def find_columns(self, asked: Asked | None) -> SourceSchema:
        """Return the columns that are read: those asked for, or all; ValueError for one that there is not."""
        with self.reader.readable(self.name):
            schema = self.reader.find_columns(self.files, asked)
        missing = [name for name in asked or () if name not in schema.columns]
        if missing:
            raise ValueError(f"{self.name} has no column {', '.join(missing)}; it has {', '.join(schema.columns)}.")
        for encoding in filter(None, (asked or {}).values()):
            get_encoding(encoding)
        wanted = asked or dict.fromkeys(schema.columns)
        return replace(schema, columns={name: encoding or schema.columns[name] for name, encoding in wanted.items()})

    def pieces(self, columns: Columns) -> list[Piece]:
        """Return the pieces of all files that become shards where it is read in place, in order."""
        with readable(self.name), DaemonPool(_FOOTERS_AT_ONCE, "pieces") as pool:
            return list(self.reader.scan(self.files, columns, pool))

    def cut(self, columns: Columns, partition_bytes: int, *, by_piece: bool = False) -> list[Piece]:
        """Cut the source, in order: into pieces that become shards where it is read in place, or into larger parts."""
        reader = self.reader
        if reader.piece_bytes is None and (by_piece or reader.is_cut_by_piece):
            return self.pieces(columns)
        limit = reader.piece_bytes if by_piece and reader.piece_bytes else partition_bytes
        with readable(self.name):
            return [split for file in self.files for split in reader.input_splits(file, limit)]


def stamps_of(files: Iterable[SourceFile]) -> str:
    """A digest of the names, sizes and times of change of files."""
    digest = xxhash.xxh3_128()
    for file in files:
        digest.update(f"{file.name}\0{file.num_bytes}\0{file.stamp}\n".encode())
    return digest.hexdigest()


def marks_of(files: Files) -> str:
    """A mark of the last change of any kind of local files, as `change_mark` makes it of one; empty for others."""
    marks = [file.mark for file in files if file.mark]
    return f"{marks[0].partition('.')[0]}.{xxhash.xxh3_64_hexdigest(','.join(marks).encode())}" if marks else ""


def partitions_of(splits: Pieces, partition_bytes: int) -> list[Partition]:
    """Group pieces into partitions of at least so many bytes. The number of processes does not matter."""
    groups = grouped(splits, lambda split: split.num_bytes, partition_bytes)
    return [Partition(partition_id, tuple(group)) for partition_id, group in enumerate(groups)]


def grouped(
    items: Iterable[Item], size_of: Callable[[Item], int], most_bytes: int, most_items: int = sys.maxsize
) -> Iterator[list[Item]]:
    """Yield the items in lists: each has the fewest that have so many bytes, or so many items."""
    group: list[Item] = []
    num_bytes = 0
    for item in items:
        group.append(item)
        num_bytes += size_of(item)
        if num_bytes >= most_bytes or len(group) == most_items:
            yield group
            group = []
            num_bytes = 0
    if group:
        yield group


def read_splits(reader: Reader, splits: Pieces, columns: Columns) -> Batches:
    """Yield the rows of some pieces, each as its settings need."""
    if not splits:
        return
    for part in [[split] for split in splits] if any(split.settings for split in splits) else [splits]:
        first = part[0]
        chosen = replace(reader, **first.settings) if first.settings else reader  # type: ignore[type-var]
        with reader.readable(first.file.uri):
            yield from chosen.read(part, columns)


def batched(rows: Iterable[tuple[Row, str]], max_bytes: int = _BATCH_BYTES) -> Batches:
    """Yield rows, each given with where it is, in batches of at most 256 rows and about ``max_bytes``."""
    for group in grouped(rows, lambda pair: sum(map(_num_bytes, pair[0].values())), max_bytes, _BATCH_ROWS):
        first = group[0][1]
        last = group[-1][1]
        yield Batch([row for row, _ in group], first if first == last else f"{first} to {last}")


def _num_bytes(value: Any) -> int:
    if isinstance(value, (str, bytes)):
        return len(value)
    if isinstance(value, (int, float, type(None))):
        return 8
    return 8 * len(value) if isinstance(value, (list, tuple, dict)) else getattr(value, "nbytes", _UNKNOWN_BYTES)


def spread(files: Files, count: int = 8) -> list[SourceFile]:
    """Return some of the files: the first, and others from all over."""
    filled = [file for file in files if file.num_bytes] or list(files)
    return filled[:: max(1, len(filled) // count)][:count]


def present(names: Sequence[str], columns: Columns, file: SourceFile) -> None:
    """Raise ValueError if a file lacks one of these columns."""
    missing = [name for name in columns if name not in names]
    if missing:
        raise ValueError(f"all files must have the columns of the first; {file.uri} lacks {', '.join(missing)}.")


def warn_of_others(pieces: Pieces, columns: Columns) -> None:
    """Log the columns that only later files have."""
    others = {name: piece.file for piece in reversed(pieces) for name in piece.others if name not in columns}
    for name, file in others.items():
        _log.warning(
            "%s has a column %r, which the first file lacks: it is not read. Name the columns by columns=.",
            file.uri,
            name,
        )
