"""What every kind of source offers: where it can be cut, what its columns are, and the rows of a span."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, TypeAlias

from lightning_stream.convert.files import SourceFile

# An Arrow record batch, or values by column name.
Columns: TypeAlias = "Any | Mapping[str, Any]"


@dataclass(frozen=True)
class Span:
    """A piece of a file that can be read by itself.

    Attributes:
        file: The file.
        begin: Where it begins, in what the kind of source counts: bytes, row groups, batches, rows.
        end: Where it ends; None for the file's end.
        num_bytes: Its size, about.
    """

    file: SourceFile
    begin: int
    end: int | None
    num_bytes: int


class Batch(NamedTuple):
    """Some rows.

    Attributes:
        columns: Them: an Arrow record batch, values by column name, or a list of rows (for a transform only).
        where: Which they are, for messages.
    """

    columns: Columns
    where: str


@dataclass(frozen=True)
class Found:
    """What the beginning of a source tells about all of it.

    Attributes:
        columns: The encoding of each column.
        about: For the manifest, e.g. class names.
    """

    columns: dict[str, str]
    about: Mapping[str, Any]


class Reader(ABC):
    """Reads files of one kind. Picklable: each process has its own.

    Attributes:
        kind: Its name, as users choose it.
        is_listing: Whether each file is one sample, so that any order of them is as good to read.
    """

    kind: ClassVar[str]
    is_listing: ClassVar[bool] = False

    @abstractmethod
    def find_columns(self, files: Sequence[SourceFile], asked: Mapping[str, str] | None) -> Found:
        """The columns, from a schema or from some rows.

        Args:
            files: All files.
            asked: Encodings by column name: only these columns are then written. None for all, inferred.

        Raises:
            ValueError: No such column, or values that no encoding fits.
        """

    def spans(self, file: SourceFile, partition_bytes: int) -> list[Span]:  # noqa: ARG002 - for kinds that can be cut
        """Where a file can be cut into pieces of about ``partition_bytes``. The same for the same file."""
        return [Span(file, 0, None, file.num_bytes)]

    @abstractmethod
    def read(self, span: Span, columns: Mapping[str, str]) -> Iterator[Batch]:
        """The rows of a span, in order, some at a time.

        Args:
            span: As `spans` gave it.
            columns: Those that are wanted, with their encodings.

        Raises:
            FormatError: The file is not what it should be.
            ValueError: A value that its column's encoding does not take.
        """

    def read_all(self, spans: Sequence[Span], columns: Mapping[str, str]) -> Iterator[Batch]:
        """The rows of several spans."""
        for span in spans:
            yield from self.read(span, columns)

    def tuned(self, *, strict: bool, as_rows: bool) -> Reader:  # noqa: ARG002 - for kinds whose rows may differ
        """The reader for one conversion.

        Args:
            strict: Refuse rows with values beyond the columns: those were inferred, so nobody chose to leave them out.
            as_rows: Give rows as dicts, with all that they hold, where that is how they come: for a transform.
        """
        return self

    @property
    def settings(self) -> Mapping[str, Any]:
        """What decides which rows it reads: part of a conversion's fingerprint."""
        return {"kind": self.kind}


def refuse_others(rows: Sequence[Mapping[str, Any]], columns: Mapping[str, str], where: str) -> None:
    """Raise ValueError if a row has values beyond the columns."""
    known = columns.keys()
    for row in rows:
        if not row.keys() <= known:
            others = ", ".join(sorted(map(str, row.keys() - known)))
            raise ValueError(
                f"{where}: a row has {others}, which the rows that columns were inferred from have not. Pass columns= "
                "to choose what is written."
            )


def present(names: Sequence[str], columns: Mapping[str, str], file: SourceFile) -> list[str]:
    """The columns that are to be read of a file.

    Raises:
        ValueError: It lacks one.
    """
    missing = [name for name in columns if name not in names]
    if missing:
        raise ValueError(f"all files must have the columns of the first; {file.place} lacks {', '.join(missing)}.")
    return list(columns)
