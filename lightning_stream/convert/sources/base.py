"""What every kind of source offers: where it can be cut, what its columns are, and the rows of a piece."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, TypeAlias

from lightning_stream.convert.files import SourceFile
from lightning_stream.formats.encodings import get_encoding

# An Arrow record batch, or values by column name.
Columns: TypeAlias = "Any | Mapping[str, Any]"
_MIN_BYTES, _MAX_BYTES, _PARTITIONS = 32 << 20, 512 << 20, 32


@dataclass(frozen=True)
class InputSplit:
    """A piece of a file that can be read by itself.

    Attributes:
        file: The file.
        begin: Where it begins, in units of the kind of source: bytes, row groups, batches, rows.
        end: Where it ends; None for the file's end.
        num_bytes: Its size, about.
    """

    file: SourceFile
    begin: int
    end: int | None
    num_bytes: int


@dataclass(frozen=True)
class Partition:
    """What one process writes at a time."""

    number: int
    splits: tuple[InputSplit, ...]

    def __str__(self) -> str:
        files = f" ({self.splits[0].file.uri}{' and others' if len(self.splits) > 1 else ''})" if self.splits else ""
        return f"partition {self.number}{files}"


class Batch(NamedTuple):
    """Some rows."""

    columns: Columns
    where: str


@dataclass(frozen=True)
class Found:
    """What the beginning of a source shows about all of it.

    Attributes:
        columns: The encoding of each column.
        about: For the manifest, e.g. class names.
        identity: The columns that tell rows apart for the validation split; empty for all.
        media: Columns of bytes that are compressed already, e.g. sound.
    """

    columns: dict[str, str]
    about: Mapping[str, Any] = field(default_factory=dict)
    identity: tuple[str, ...] = ()
    media: tuple[str, ...] = ()


class Reader(ABC):
    """Reads files of one kind. Picklable: each process has its own.

    Attributes:
        kind: Its name, as users choose it.
        is_listing: Whether each file is one sample, so that the files may be read in any order.
        min_bytes: The least bytes of a partition where the user names none.
    """

    kind: ClassVar[str]
    is_listing: ClassVar[bool] = False
    min_bytes: ClassVar[int] = _MIN_BYTES

    @abstractmethod
    def find_columns(self, files: Sequence[SourceFile], asked: Mapping[str, str] | None) -> Found:
        """Return the columns, from a schema or from some rows."""

    def input_splits(self, file: SourceFile, partition_bytes: int) -> list[InputSplit]:  # noqa: ARG002
        """Cut a file into pieces of about ``partition_bytes``; always in the same way."""
        return [InputSplit(file, 0, None, file.num_bytes)]

    @abstractmethod
    def read(self, split: InputSplit, columns: Mapping[str, str]) -> Iterator[Batch]:
        """Yield the rows of a piece, in order, some at a time."""

    def read_all(self, splits: Sequence[InputSplit], columns: Mapping[str, str]) -> Iterator[Batch]:
        """Yield the rows of several pieces."""
        for split in splits:
            yield from self.read(split, columns)

    def reading(self, asked: Mapping[str, str] | None) -> Reader:  # noqa: ARG002 - for kinds whose values are texts
        """Return the reader for one conversion, whose columns are chosen by the user (`asked`) or inferred (None)."""
        return self

    @property
    def settings(self) -> Mapping[str, Any]:
        """The settings that decide which rows it reads: part of a conversion's fingerprint."""
        return {"kind": self.kind}


@dataclass(frozen=True)
class Source:
    """What is converted."""

    name: str
    files: tuple[SourceFile, ...]
    reader: Reader
    splits: Mapping[str, tuple[SourceFile, ...]] = field(default_factory=dict)  # where names of files show splits

    @property
    def num_bytes(self) -> int:
        """Bytes of all files."""
        return sum(file.num_bytes for file in self.files)

    @property
    def partition_bytes(self) -> int:
        """Bytes of a partition where the user names none: a 32nd of the source, but 32 to 512 MiB."""
        return max(self.reader.min_bytes, min(_MAX_BYTES, self.num_bytes // _PARTITIONS))

    def partitions(self, partition_bytes: int) -> list[Partition]:
        """Cut the source, in the order of its files. The number of processes does not matter."""
        partitions: list[Partition] = []
        gathered: list[InputSplit] = []
        num_bytes = 0
        for file in self.files:
            for split in self.reader.input_splits(file, partition_bytes):
                gathered.append(split)
                num_bytes += split.num_bytes
                if num_bytes >= partition_bytes:
                    partitions.append(Partition(len(partitions), tuple(gathered)))
                    gathered, num_bytes = [], 0
        if gathered:
            partitions.append(Partition(len(partitions), tuple(gathered)))
        return partitions


def chosen_columns(known: Mapping[str, str], asked: Mapping[str, str] | None, what: str) -> dict[str, str]:
    """Return the columns that are written: those asked for, or all."""
    missing = [name for name in asked or () if name not in known]
    if missing:
        raise ValueError(f"{what} has no column {', '.join(missing)}; it has {', '.join(known)}.")
    for encoding in (asked or {}).values():
        get_encoding(encoding)
    return dict(asked or known)


def present(names: Sequence[str], columns: Mapping[str, str], file: SourceFile) -> list[str]:
    """Return the columns that are to be read from a file; ValueError if it lacks one."""
    missing = [name for name in columns if name not in names]
    if missing:
        raise ValueError(f"all files must have the columns of the first; {file.uri} lacks {', '.join(missing)}.")
    return list(columns)
