"""Files of lines, cut anywhere since a line belongs to the piece that it begins in: JSON lines and texts."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice, pairwise
from math import isinf
from typing import Any

import msgspec

from lightning_stream.errors import FormatError
from lightning_stream.threads import DaemonPool
from lightning_stream.writer.infer import infer_encoding

from .base import (
    SAMPLED_ROWS,
    Asked,
    Batch,
    Batches,
    Columns,
    Piece,
    Pieces,
    Reader,
    Row,
    SourceSchema,
    batched,
    spread,
)
from .files import Files, SourceFile, readable
from .nulls import LARGEST_FLOAT

_BLOCK_BYTES = 1 << 22
_SAMPLED_PIECES = 8
_PIECE_BYTES = 64 << 20
BOM = b"\xef\xbb\xbf"


def finite(text: str) -> float:
    """The number; OverflowError where only an infinite one would be left of it."""
    parsed = float(text)
    if isinf(parsed):
        raise OverflowError(f"{text:.40} is beyond the largest float64")
    return parsed


# json.loads spends more on finding out what it was given than on parsing it
_scan = json.JSONDecoder(parse_float=finite).raw_decode
_SKIP = "source_options={'on_bad': 'skip'} of convert leaves out such lines."
_log = logging.getLogger(__name__)
_decode_object = msgspec.json.Decoder(dict[str, Any]).decode


def line_splits(file: SourceFile, partition_bytes: int) -> list[Piece]:
    """Cut a file of lines into pieces; a compressed one stays whole, since it can only be read from its beginning."""
    count = 1 if file.is_packed else max(1, round(file.num_bytes / partition_bytes))
    cuts = [file.num_bytes * k // count for k in range(count + 1)]
    return [Piece(file, begin, end, end - begin) for begin, end in pairwise(cuts)]


def line_blocks(split: Piece) -> Iterator[tuple[int, bytes]]:
    """Yield the lines that begin within a piece, in blocks of a few MiB; each with its position in bytes."""
    # A compressed file is one piece; the end that an index has of it is that of the compressed bytes.
    end = None if split.file.is_packed else split.end
    with split.file.unpacked() as file:
        at = split.begin
        if at:
            file.seek(at - 1)
            at += len(file.readline()) - 1  # a line that began before belongs to the piece before
        while end is None or at < end:
            room = _BLOCK_BYTES if end is None else min(_BLOCK_BYTES, end - at)
            block = file.read(room)
            if not block:
                return
            if not block.endswith(b"\n"):
                block += file.readline()
            start = len(BOM) if at == 0 and block.startswith(BOM) else 0
            yield at + start, block[start:]
            at += len(block)


def _filled_lines(split: Piece) -> Iterator[tuple[list[bytes], str]]:
    """Yield the lines that are not blank, in blocks, with where they are."""
    for at, block in line_blocks(split):
        lines = [line for line in block.split(b"\n") if line and not line.isspace()]
        if lines:
            yield lines, f"{split.file.uri}, lines from byte {at:,}"


@dataclass
class LineReader(Reader):
    """Rows of lines.

    Attributes:
        on_bad: ``"raise"``, or ``"skip"`` bad lines, which the log names.
    """

    on_bad: str = field(default="raise", compare=False)

    def __post_init__(self) -> None:
        if self.on_bad not in ("raise", "skip"):
            raise ValueError(f"on_bad must be 'raise' or 'skip'; got {self.on_bad!r}.")


@dataclass
class JsonlReader(LineReader):
    """One JSON object in each line; or a ``.json`` file that is one array of objects."""

    kind = "jsonl"
    piece_bytes = _PIECE_BYTES

    def find_columns(self, files: Files, asked: Asked | None) -> SourceSchema:
        """Look at some rows of some files: where they can be cut, from all over."""
        rows: list[Row] = []
        for file in (sampled := spread(files)):
            # From a store, as many blocks in all as there are from each local file.
            num_pieces = _SAMPLED_PIECES if file.path is not None else -(-_SAMPLED_PIECES // len(sampled))
            splits = self.input_splits(file, max(_BLOCK_BYTES, file.num_bytes // num_pieces))
            for split in splits:
                for batch in islice(self._rows(split, SAMPLED_ROWS // len(splits)), 1):
                    rows += batch.rows
        return SourceSchema(_inferred(rows, files[0].root))

    def input_splits(self, file: SourceFile, partition_bytes: int) -> list[Piece]:
        """Cut anywhere, unless the file is compressed, or one array of objects."""
        return super().input_splits(file, partition_bytes) if _is_array(file) else line_splits(file, partition_bytes)

    def scan(self, files: Files, columns: Columns, pool: DaemonPool) -> Iterator[Piece]:
        """Yield pieces of about 64 MiB. Their rows are counted, so the files are read once."""

        def num_rows(split: Piece) -> int:
            if _is_array(split.file):
                return sum(len(batch.rows) for batch in self._rows(split))
            return sum(len(lines) for lines, _ in _filled_lines(split))

        splits = [split for file in files for split in self.input_splits(file, _PIECE_BYTES)]
        for piece, rows in zip(splits, pool.map(num_rows, splits), strict=True):
            if rows:
                yield piece._replace(num_rows=rows)

    def read(self, splits: Pieces, columns: Columns) -> Batches:
        for split in splits:
            yield from self._rows(split)

    def _rows(self, split: Piece, limit: int | None = None) -> Batches:
        """Yield rows a few MiB at a time, no more than ``limit`` of each."""
        if not _is_array(split.file):
            for lines, where in _filled_lines(split):
                yield Batch(self._parsed(lines[:limit], where), where)
            return
        with split.file.unpacked() as plain:
            rows = json.load(plain, parse_float=finite)
        wrong = next((row for row in rows if not isinstance(row, dict)), None)
        if wrong is not None:
            raise FormatError(f"{split.file.uri} must be an array of JSON objects; it holds {wrong!s:.60}.")
        yield Batch(rows[:limit], split.file.uri)

    def _parsed(self, lines: Sequence[bytes], where: str) -> list[Row]:
        with suppress(ValueError):  # NaN, infinite numbers, lone surrogates; or a line is wrong
            return list(map(_decode_object, lines))  # all that it decodes, it decodes as Python's json
        rows = []
        for line_number, line in enumerate(lines, 1):
            try:
                rows.append(_parsed_line(line, line_number, where))
            except FormatError as error:
                if self.on_bad != "skip":
                    raise
                _log.warning("a line is skipped: %s", error)
        return rows


def _is_array(file: SourceFile) -> bool:
    if file.ending != ".json":
        return False
    with file.unpacked() as plain:
        return plain.read(64).removeprefix(BOM).lstrip()[:1] == b"["


def _parsed_line(line: bytes, line_number: int, where: str) -> Row:
    try:
        text = line.decode().strip()
        row, end = _scan(text, 0)
    except (ValueError, OverflowError) as error:
        raise FormatError(
            f"{where}: line {line_number} of them is not JSON ({error}): {line[:60]!r}. {_SKIP}"
        ) from error
    if end != len(text) or type(row) is not dict:
        raise FormatError(
            f"{where}: each line must be one JSON object; line {line_number} of them is {line[:60]!r}. {_SKIP}"
        )
    return row


def _inferred(rows: Sequence[Row], where: str) -> dict[str, str]:
    """Return encodings that fit all of these rows.

    Whole numbers become ``int64``, numbers ``float64``, truth values ``uint8``, text ``str``, lists of numbers
    ``ndarray``, everything else, and values of several types, ``json``. Nulls do not matter.
    """
    names = dict.fromkeys(name for row in rows for name in row)
    if not names:
        raise ValueError(f"{where} is empty: there is nothing to write.")
    values = {name: [row[name] for row in rows if row.get(name) is not None] for name in names}
    return {name: _fitting({_encoding(name, value) for value in of_name}) for name, of_name in values.items()}


def _fitting(kinds: set[str]) -> str:
    if "large" in kinds:  # a whole number that no float may be equal to
        return "int64" if kinds <= {"large", "int64"} else "json"
    for numbers in ({"int64", "float64"}, {"ndarray:int64", "ndarray:float64"}):
        if kinds == numbers:
            return min(numbers)
    return kinds.pop() if len(kinds) == 1 else "json"


def _encoding(name: str, value: Any) -> str:
    if type(value) is int:
        if -LARGEST_FLOAT <= value <= LARGEST_FLOAT:
            return "int64"
        return "large" if -(1 << 63) <= value < 1 << 63 else "json"
    if type(value) is list:
        kinds = {type(element) for element in value}
        if kinds == {int, float} and any(type(element) is int and abs(element) > LARGEST_FLOAT for element in value):
            return "json"
        if kinds == {int} and not -(1 << 63) <= min(value) <= max(value) < 1 << 63:
            return "json"
        if kinds and kinds <= {int, float}:
            return "ndarray:float64" if float in kinds else "ndarray:int64"
        return "json"
    return infer_encoding(name, value)


@dataclass
class TextReader(Reader):
    """Samples of text.

    Attributes:
        lines: True: each line that is not blank is a sample with the column ``text``. False: each file is a sample with
            the columns ``text`` and ``name``.
    """

    kind = "text"
    lines: bool = False

    def find_columns(self, files: Files, asked: Asked | None) -> SourceSchema:
        return SourceSchema({"text": "str"} if self.lines else {"text": "str", "name": "str"})

    def input_splits(self, file: SourceFile, partition_bytes: int) -> list[Piece]:
        return line_splits(file, partition_bytes) if self.lines else super().input_splits(file, partition_bytes)

    def read(self, splits: Pieces, columns: Columns) -> Batches:
        if not self.lines:
            return batched((self._text_row(split.file, columns), split.file.uri) for split in splits)
        return (batch for split in splits for batch in self._by_line(split))

    def _text_row(self, file: SourceFile, columns: Columns) -> Row:
        with file.unpacked() as plain:
            row = {"text": plain.read().removeprefix(BOM).decode(), "name": file.name}
            return {name: row[name] for name in columns}

    def _by_line(self, split: Piece) -> Batches:
        with readable(split.file.uri):
            for lines, where in _filled_lines(split):
                yield Batch([{"text": line.decode().rstrip("\r")} for line in lines], where)
