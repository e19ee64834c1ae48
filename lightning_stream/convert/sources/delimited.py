"""CSV and TSV files, with quotes as spreadsheets write them."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np

from lightning_stream.convert.files import SourceFile
from lightning_stream.convert.sources.base import Batch, Found, Reader, Span, present
from lightning_stream.convert.sources.lines import DAMAGED, spread
from lightning_stream.convert.sources.rows import SAMPLED_ROWS, infer_rows
from lightning_stream.errors import FormatError

_ROWS = 8192
_LONGEST_VALUE = (1 << 31) - 1  # the csv module stops at 128 KiB otherwise
_TRUTH = {"true": 1, "false": 0}


@dataclass(frozen=True)
class DelimitedReader(Reader):
    """Rows of CSV or TSV files.

    Attributes:
        kind: ``csv`` or ``tsv``.
        delimiter: Between values.
        names: The columns, where files have no line of names; None to read them from the first line.
    """

    kind: str = "csv"  # type: ignore[misc]
    delimiter: str = ","
    names: tuple[str, ...] | None = None

    @property
    def settings(self) -> Mapping[str, Any]:
        """Delimiter and names decide what is read."""
        return {"kind": self.kind, "delimiter": self.delimiter, "names": self.names}

    def find_columns(self, files: Sequence[SourceFile], asked: Mapping[str, str] | None) -> Found:
        """From the first rows of some files: whole numbers, else numbers, else true and false, else text."""
        rows: list[dict[str, Any]] = []
        for file in spread(files):
            for names, values, _ in islice(self._rows(file), max(1, SAMPLED_ROWS // _ROWS)):
                rows += [dict(zip(names, row, strict=True)) for row in values]
        columns = infer_rows(rows, asked, files[0].root)
        if asked is None:
            columns = {name: _kind([row[name] for row in rows if row.get(name)]) for name in columns}
        return Found(columns, {})

    def read(self, span: Span, columns: Mapping[str, str]) -> Iterator[Batch]:
        """Some thousand rows at a time; an empty value is null wherever it is not text."""
        for names, rows, where in self._rows(span.file):
            present(names, columns, span.file)
            values = dict(zip(names, zip(*rows, strict=True), strict=True))
            yield Batch({name: _parsed(name, values[name], kind, where) for name, kind in columns.items()}, where)

    def _rows(self, file: SourceFile) -> Iterator[tuple[list[str], list[list[str]], str]]:
        try:
            with file.unpacked() as plain, io.TextIOWrapper(plain, "utf-8-sig", newline="") as text:
                yield from self._split(text, file)
        except (*DAMAGED, UnicodeDecodeError, csv.Error) as error:
            raise FormatError(f"{file.place} cannot be read as {self.kind}: {error}.") from error

    def _split(self, text: Any, file: SourceFile) -> Iterator[tuple[list[str], list[list[str]], str]]:
        csv.field_size_limit(_LONGEST_VALUE)
        reader = csv.reader(text, delimiter=self.delimiter)
        names = list(self.names) if self.names is not None else next(reader, [])
        if len(set(names)) < len(names):
            raise FormatError(f"{file.place}: columns must differ in name; its first line is {', '.join(names):.200}.")
        done = 0
        while rows := [row for row in islice(reader, _ROWS) if row]:
            where = f"{file.place}, rows {done:,} to {done + len(rows):,}"
            wrong = next((k for k, row in enumerate(rows) if len(row) != len(names)), None)
            if wrong is not None:
                raise FormatError(
                    f"{file.place}: every row must have {len(names)} values; row {done + wrong:,} has "
                    f"{len(rows[wrong])}: {rows[wrong]!s:.80}."
                )
            yield names, rows, where
            done += len(rows)


def _kind(values: Sequence[str]) -> str:
    for encoding in ("int64", "float64", "uint8"):
        try:
            parse_texts(values, encoding)
        except ValueError:
            continue
        return encoding if values else "str"
    return "str"


def _parsed(name: str, texts: Sequence[str], encoding: str, where: str) -> Any:
    if encoding.startswith(("str", "bytes", "json")):
        return list(texts)
    filled = [text for text in texts if text]
    try:
        numbers = parse_texts(filled, encoding)
    except (ValueError, OverflowError) as error:
        raise ValueError(
            f"{where}, column {name!r}: {error}. It was taken for {encoding}; pass another encoding for it in columns=."
        ) from error
    if len(filled) == len(texts):
        return numbers
    left = iter(numbers.tolist())
    return [next(left) if text else None for text in texts]


def parse_texts(texts: Sequence[str], encoding: str) -> Any:
    """Texts as numbers, for an encoding of numbers.

    Raises:
        ValueError: A text that is none.
    """
    if encoding == "uint8" and (flags := _truths(texts)) is not None:
        return flags
    if encoding.startswith(("int", "uint")):
        return np.array(list(map(int, texts)), np.uint64 if encoding == "uint64" else np.int64)
    if encoding.startswith("float"):
        return np.array(list(map(float, texts)), np.float64)
    raise ValueError(f"text cannot be written as {encoding}")


def _truths(texts: Sequence[str]) -> Any:
    flags = [_TRUTH.get(text.lower()) for text in texts]
    return None if None in flags else np.array(flags, np.uint8)
