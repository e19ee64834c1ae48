"""Files of lines: cut anywhere, since a line belongs to the piece that it begins in."""

from __future__ import annotations

import gzip
import json
import lzma
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import Any, BinaryIO

import zstandard

from lightning_stream.convert.files import SourceFile
from lightning_stream.convert.sources.base import Batch, Found, Reader, Span, refuse_others
from lightning_stream.convert.sources.rows import SAMPLED_ROWS, columns_of, infer_rows
from lightning_stream.errors import FormatError

_BLOCK_BYTES = 1 << 22
_SAMPLED_PLACES = 8
DAMAGED = (EOFError, gzip.BadGzipFile, zlib.error, lzma.LZMAError, zstandard.ZstdError, OSError)


def line_spans(file: SourceFile, partition_bytes: int) -> list[Span]:
    """A file of lines in pieces; one that is compressed stays whole."""
    if file.is_packed or file.num_bytes <= partition_bytes:
        return [Span(file, 0, None, file.num_bytes)]
    count = round(file.num_bytes / partition_bytes)
    cuts = [file.num_bytes * k // count for k in range(count + 1)]
    return [Span(file, begin, end, end - begin) for begin, end in pairwise(cuts)]


def line_blocks(span: Span) -> Iterator[tuple[int, list[bytes]]]:
    """The lines that begin within a span, without their ends, in blocks of a few MiB; each with its place in bytes.

    Raises:
        FormatError: The file ends too early for its compression.
    """
    try:
        with span.file.unpacked() as file:
            yield from _blocks(file, span)
    except DAMAGED as error:
        raise FormatError(f"{span.file.place} cannot be read ({error}). Fetch it again.") from error


def _blocks(file: BinaryIO, span: Span) -> Iterator[tuple[int, list[bytes]]]:
    at = span.begin
    if at:
        file.seek(at - 1)
        at += len(file.readline()) - 1  # a line that began before is not ours
    while span.end is None or at < span.end:
        room = _BLOCK_BYTES if span.end is None else min(_BLOCK_BYTES, span.end - at)
        block = file.read(room)
        if not block:
            return
        if not block.endswith(b"\n"):
            block += file.readline()
        yield at, block.split(b"\n")[: -1 if block.endswith(b"\n") else None]
        at += len(block)


@dataclass(frozen=True)
class JsonlReader(Reader):
    """One JSON object in each line.

    Attributes:
        strict: See `Reader.tuned`.
        as_rows: See there.
    """

    kind = "jsonl"
    strict: bool = False
    as_rows: bool = False

    def tuned(self, *, strict: bool, as_rows: bool) -> JsonlReader:
        """The reader for one conversion."""
        return JsonlReader(strict, as_rows)

    def find_columns(self, files: Sequence[SourceFile], asked: Mapping[str, str] | None) -> Found:
        """From some rows of some files: where they can be cut, from all over."""
        rows: list[Mapping[str, Any]] = []
        for file in spread(files):
            spans = self.spans(file, max(_BLOCK_BYTES, file.num_bytes // _SAMPLED_PLACES))
            for span in spans:
                for found, _ in islice(self._rows(span, SAMPLED_ROWS // len(spans)), 1):
                    rows += found
        return Found(infer_rows(rows, asked, files[0].root), {})

    def spans(self, file: SourceFile, partition_bytes: int) -> list[Span]:
        """Anywhere, unless it is compressed, or one array of objects."""
        return super().spans(file, partition_bytes) if _is_array(file) else line_spans(file, partition_bytes)

    def read(self, span: Span, columns: Mapping[str, str]) -> Iterator[Batch]:
        """A few MiB of lines at a time."""
        for rows, where in self._rows(span):
            if self.strict and not self.as_rows:
                refuse_others(rows, columns, where)
            yield Batch(rows if self.as_rows else columns_of(rows, columns), where)

    def _rows(self, span: Span, limit: int | None = None) -> Iterator[tuple[list[Mapping[str, Any]], str]]:
        """Rows a few MiB at a time, no more than ``limit`` of each."""
        if _is_array(span.file):
            yield _array(span.file)[:limit], span.file.place
            return
        for at, lines in line_blocks(span):
            where = f"{span.file.place}, lines from byte {at:,}"
            filled = [line for line in lines if line and not line.isspace()]
            if filled:
                yield _parsed(filled[:limit], where), where


def _is_array(file: SourceFile) -> bool:
    """Whether it is no file of lines but one JSON array, as ``.json`` may be."""
    if file.ending != ".json":
        return False
    try:
        with file.unpacked() as plain:
            return plain.read(64).lstrip()[:1] == b"["
    except DAMAGED as error:
        raise FormatError(f"{file.place} cannot be read ({error}). Fetch it again.") from error


def _array(file: SourceFile) -> list[Mapping[str, Any]]:
    with file.unpacked() as plain:
        try:
            rows = json.load(plain)
        except ValueError as error:
            raise FormatError(f"{file.place} is no JSON ({error}).") from error
    wrong = next((row for row in rows if not isinstance(row, dict)), None)
    if wrong is not None:
        raise FormatError(f"{file.place} must be an array of JSON objects; it holds {wrong!s:.60}.")
    return list(rows)


def _parsed(lines: Sequence[bytes], where: str) -> list[Mapping[str, Any]]:
    scan = json.JSONDecoder().raw_decode  # json.loads spends more on finding out what it was given than on parsing it
    rows: list[Mapping[str, Any]] = []
    for number, line in enumerate(lines):
        try:
            text = line.decode().strip()
            row, end = scan(text, 0)
        except ValueError as error:
            raise FormatError(f"{where}: line {number + 1} of them is no JSON ({error}): {line[:60]!r}.") from error
        if end != len(text) or type(row) is not dict:
            raise FormatError(
                f"{where}: each line must be one JSON object; line {number + 1} of them is {line[:60]!r}."
            )
        rows.append(row)
    return rows


def spread(files: Sequence[SourceFile], count: int = 8) -> list[SourceFile]:
    """Some of the files: the first, and others from all over."""
    filled = [file for file in files if file.num_bytes] or list(files)
    step = max(1, len(filled) // count)
    return filled[::step][:count]
