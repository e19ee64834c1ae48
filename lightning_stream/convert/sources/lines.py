"""Files of lines, cut anywhere since a line belongs to the piece that it begins in: JSON lines and texts."""

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
from lightning_stream.convert.sources.base import Batch, Found, InputSplit, Reader, chosen_columns
from lightning_stream.convert.sources.rows import SAMPLED_ROWS, infer_rows
from lightning_stream.errors import FormatError

_BLOCK_BYTES = 1 << 22
_SAMPLED_PIECES = 8
_BOM = b"\xef\xbb\xbf"
DAMAGED = (EOFError, gzip.BadGzipFile, zlib.error, lzma.LZMAError, zstandard.ZstdError, OSError)


def line_splits(file: SourceFile, partition_bytes: int) -> list[InputSplit]:
    """Cut a file of lines into pieces; a compressed one stays whole, since it can only be read from its beginning."""
    if file.is_packed or file.num_bytes <= partition_bytes:
        return [InputSplit(file, 0, None, file.num_bytes)]
    count = round(file.num_bytes / partition_bytes)
    cuts = [file.num_bytes * k // count for k in range(count + 1)]
    return [InputSplit(file, begin, end, end - begin) for begin, end in pairwise(cuts)]


def line_blocks(split: InputSplit) -> Iterator[tuple[int, bytes]]:
    """Yield the lines that begin within a piece, in blocks of a few MiB; each with its position in bytes."""
    try:
        with split.file.unpacked() as file:
            yield from _blocks(file, split)
    except DAMAGED as error:
        raise FormatError(f"{split.file.uri} cannot be read ({error}). Fetch it again.") from error


def _blocks(file: BinaryIO, split: InputSplit) -> Iterator[tuple[int, bytes]]:
    at = split.begin
    if at:
        file.seek(at - 1)
        at += len(file.readline()) - 1  # a line that began before belongs to the piece before
    while split.end is None or at < split.end:
        room = _BLOCK_BYTES if split.end is None else min(_BLOCK_BYTES, split.end - at)
        block = file.read(room)
        if not block:
            return
        if not block.endswith(b"\n"):
            block += file.readline()
        start = len(_BOM) if at == 0 and block.startswith(_BOM) else 0
        yield at + start, block[start:]
        at += len(block)


def filled_lines(split: InputSplit) -> Iterator[tuple[list[bytes], str]]:
    """Yield the lines that are not blank, in blocks, with where they are."""
    for at, block in line_blocks(split):
        lines = [line for line in block.split(b"\n") if line and not line.isspace()]
        if lines:
            yield lines, f"{split.file.uri}, lines from byte {at:,}"


@dataclass(frozen=True)
class JsonlReader(Reader):
    """One JSON object in each line."""

    kind = "jsonl"

    def find_columns(self, files: Sequence[SourceFile], asked: Mapping[str, str] | None) -> Found:
        """Look at some rows of some files: where they can be cut, from all over."""
        rows: list[Mapping[str, Any]] = []
        for file in spread(files):
            splits = self.input_splits(file, max(_BLOCK_BYTES, file.num_bytes // _SAMPLED_PIECES))
            for split in splits:
                for found, _ in islice(self._rows(split, SAMPLED_ROWS // len(splits)), 1):
                    rows += found
        return Found(infer_rows(rows, asked, files[0].root))

    def input_splits(self, file: SourceFile, partition_bytes: int) -> list[InputSplit]:
        """Cut anywhere, unless the file is compressed, or one array of objects."""
        return super().input_splits(file, partition_bytes) if _is_array(file) else line_splits(file, partition_bytes)

    def read(self, split: InputSplit, columns: Mapping[str, str]) -> Iterator[Batch]:  # noqa: ARG002
        """Yield a few MiB of lines at a time."""
        yield from map(Batch._make, self._rows(split))

    def _rows(self, split: InputSplit, limit: int | None = None) -> Iterator[tuple[list[Mapping[str, Any]], str]]:
        """Yield rows a few MiB at a time, no more than ``limit`` of each."""
        if _is_array(split.file):
            yield _array(split.file)[:limit], split.file.uri
            return
        for lines, where in filled_lines(split):
            yield _parsed(lines[:limit], where), where


def _is_array(file: SourceFile) -> bool:
    """Whether the file has no lines but is one JSON array, as ``.json`` may be."""
    if file.ending != ".json":
        return False
    try:
        with file.unpacked() as plain:
            return plain.read(64).removeprefix(_BOM).lstrip()[:1] == b"["
    except DAMAGED as error:
        raise FormatError(f"{file.uri} cannot be read ({error}). Fetch it again.") from error


def _array(file: SourceFile) -> list[Mapping[str, Any]]:
    with file.unpacked() as plain:
        try:
            rows = json.load(plain)
        except ValueError as error:
            raise FormatError(f"{file.uri} is not valid JSON ({error}).") from error
    wrong = next((row for row in rows if not isinstance(row, dict)), None)
    if wrong is not None:
        raise FormatError(f"{file.uri} must be an array of JSON objects; it holds {wrong!s:.60}.")
    return list(rows)


def _parsed(lines: Sequence[bytes], where: str) -> list[Mapping[str, Any]]:
    scan = json.JSONDecoder().raw_decode  # json.loads spends more on finding out what it was given than on parsing it
    rows: list[Mapping[str, Any]] = []
    for number, line in enumerate(lines):
        try:
            text = line.decode().strip()
            row, end = scan(text, 0)
        except ValueError as error:
            raise FormatError(f"{where}: line {number + 1} of them is not JSON ({error}): {line[:60]!r}.") from error
        if end != len(text) or type(row) is not dict:
            raise FormatError(
                f"{where}: each line must be one JSON object; line {number + 1} of them is {line[:60]!r}."
            )
        rows.append(row)
    return rows


def spread(files: Sequence[SourceFile], count: int = 8) -> list[SourceFile]:
    """Return some of the files: the first, and others from all over."""
    filled = [file for file in files if file.num_bytes] or list(files)
    step = max(1, len(filled) // count)
    return filled[::step][:count]


@dataclass(frozen=True)
class TextReader(Reader):
    """Samples of text.

    Attributes:
        lines: True: each line that is not blank is a sample with the column ``text``. False: each file is a sample with
            the columns ``text`` and ``name``.
    """

    kind = "text"
    lines: bool = False

    @property
    def settings(self) -> Mapping[str, Any]:
        """What a sample is."""
        return {"kind": self.kind, "lines": self.lines}

    def find_columns(self, files: Sequence[SourceFile], asked: Mapping[str, str] | None) -> Found:  # noqa: ARG002
        """Return ``text``, and ``name`` for whole files."""
        known = {"text": "str"} if self.lines else {"text": "str", "name": "str"}
        return Found(chosen_columns(known, asked, "a source of texts"))

    def input_splits(self, file: SourceFile, partition_bytes: int) -> list[InputSplit]:
        """Cut between lines, if those are the samples."""
        return line_splits(file, partition_bytes) if self.lines else super().input_splits(file, partition_bytes)

    def read(self, split: InputSplit, columns: Mapping[str, str]) -> Iterator[Batch]:
        """Yield a few MiB of lines at a time, or the file."""
        try:
            for texts, where in self._texts(split):
                values = {"text": texts, "name": [split.file.name] * len(texts)}
                yield Batch({name: values[name] for name in columns}, where)
        except (*DAMAGED, UnicodeDecodeError) as error:
            raise FormatError(f"{split.file.uri} cannot be read as text (UTF-8): {error}.") from error

    def _texts(self, split: InputSplit) -> Iterator[tuple[list[str], str]]:
        if self.lines:
            for lines, where in filled_lines(split):
                yield [line.decode().rstrip("\r") for line in lines], where
            return
        with split.file.unpacked() as file:
            yield [file.read().removeprefix(_BOM).decode()], split.file.uri
