"""CSV and TSV files through pyarrow. All values are read as texts, so that identifiers stay what they are."""

from __future__ import annotations

import csv
import io
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, pairwise
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv

from lightning_stream.errors import FormatError
from lightning_stream.sources.base import (
    SAMPLED_ROWS,
    Asked,
    Batch,
    Batches,
    Columns,
    Piece,
    Pieces,
    SourceSchema,
    present,
    spread,
    warn_of_others,
)
from lightning_stream.sources.files import Files, SourceFile, readable
from lightning_stream.sources.lines import BOM, LineReader, line_blocks, line_splits
from lightning_stream.sources.tables import pieces_of
from lightning_stream.sources.unpackers import Blocks

_log = logging.getLogger(__name__)
_BLOCK_BYTES = 1 << 22
_END = "\x1a"  # the values of a row behind all others, which only an open quote hides
# A leading "+" is one of a telephone number; a larger exponent would become inf or 0.
_WHOLE = r"-?(0|[1-9]\d{0,17})"
_NUMBER = r"-?((0|[1-9]\d{0,14})(\.\d*)?|\.\d+)([eE]([+-]?\d{1,2}|-[12]\d\d))?"
_PATTERNS = {"int64": f"^({_WHOLE})$", "float64": rf"^({_NUMBER})$", "uint8": "^((?i)true|false)$"}


@dataclass
class CsvReader(LineReader):
    """Rows of CSV or TSV files, with quotes as spreadsheets write them.

    A column is numbers only if every value that is looked at is one: identifiers such as ``01234`` or ``2021_03``, and
    words such as ``nan``, stay text.

    Attributes:
        delimiter: Between values.
        names: The columns, where files have no line of names; None to read them from the first line.
        on_bad: Bad rows are those with another number of values than there are columns.
    """

    kind = "csv"
    delimiter: str = ","
    names: Sequence[str] | None = None

    def find_columns(self, files: Files, asked: Asked | None) -> SourceSchema:
        """Look at the first rows of some files: whole numbers, else numbers, else true and false, else text."""
        columns: dict[str, list[Any]] = {}
        for file in spread(files):
            left = SAMPLED_ROWS
            for batch in self._texts(Piece(file, num_bytes=file.num_bytes)):
                for name, column in zip(batch.schema.names, batch.columns, strict=True):
                    columns.setdefault(name, []).append(column.slice(0, left))
                left -= batch.num_rows
                if left <= 0:
                    break
        arrays = {name: pa.chunked_array(chunks) for name, chunks in columns.items()}
        if not any(map(len, arrays.values())):
            raise ValueError(f"{files[0].root} is empty: there is nothing to write.")
        return SourceSchema({name: _inferred(texts) for name, texts in arrays.items()})

    def input_splits(self, file: SourceFile, partition_bytes: int) -> list[Piece]:
        """Cut between lines, unless values are quoted: these may hold line ends."""
        is_cut = file.num_bytes > partition_bytes and file.path is not None
        if is_cut:
            with file.open() as plain:
                is_cut = not any(b'"' in block for block in iter(lambda: plain.read(_BLOCK_BYTES), b""))
        return line_splits(file, partition_bytes) if is_cut else super().input_splits(file, partition_bytes)

    def read(self, splits: Pieces, columns: Columns) -> Batches:
        """Yield some MiB of rows at a time; an empty value is null wherever the column is not text."""
        for split in splits:
            done = 0
            after = f" after byte {split.begin:,}" if split.begin else ""
            for batch in self._texts(split):
                where = f"{split.file.uri}, rows {done:,} to {done + batch.num_rows:,}{after}"
                present(batch.schema.names, columns, split.file)
                if self.is_strict and not split.begin and not done:
                    warn_of_others([split._replace(others=tuple(batch.schema.names))], columns)
                arrays = [self._parsed(name, batch.column(name), kind, where) for name, kind in columns.items()]
                for piece in pieces_of(pa.RecordBatch.from_arrays(arrays, names=list(columns))):
                    yield Batch(piece, where)
                done += batch.num_rows

    def _texts(self, split: Piece) -> Iterator[pa.RecordBatch]:
        """All rows as texts."""
        file = split.file
        skip = partial(_skipped, file.uri) if self.on_bad == "skip" else None
        parsing = pa.csv.ParseOptions(delimiter=self.delimiter, newlines_in_values=True, invalid_row_handler=skip)
        with readable(file.uri):
            names, above = _head(file, self.delimiter) if self.names is None else (self.names, 0)
            if not names:
                return  # an empty file
            blocks = (block[max(0, above - at) :] for at, block in line_blocks(split))
            if len(set(names)) < len(names):
                raise FormatError(f"{file.uri}: columns must differ in name; found {', '.join(names):.200}.")
            # Arrow drops one mark of UTF-8 at the beginning, also if it belongs to a value.
            marked = chain([BOM], blocks, [f"\n{self.delimiter.join([_END] * len(names))}\n".encode()])
            data = io.BufferedReader(Blocks(marked), _BLOCK_BYTES)  # a short read makes Arrow lose rows
            texts = pa.csv.ConvertOptions(column_types=dict.fromkeys(names, pa.string()), strings_can_be_null=False)
            reading = pa.csv.ReadOptions(use_threads=False, block_size=_BLOCK_BYTES, column_names=names)
            is_end = False
            batches = pa.csv.open_csv(pa.PythonFile(data, "r"), reading, parsing, texts)
            filled = filter(len, batches)  # a block may have blank lines only
            for batch, later in pairwise(chain(filled, [None])):
                is_end = later is None and batch.column(0)[-1].as_py() == _END
                if rows := len(batch) - is_end:
                    yield batch.slice(0, rows)
            if not is_end:
                raise FormatError(f"{file.uri} ends within a quoted value. Close the quote, or fetch the file again.")

    def _parsed(self, name: str, texts: pa.Array, encoding: str, where: str) -> pa.Array:
        """Texts as what the encoding stores."""
        if encoding.startswith(("str", "bytes", "json")):
            return texts
        filled = pc.if_else(pc.not_equal(texts, ""), texts, None)
        try:
            return _numbers(filled, encoding, is_strict=self.is_strict)
        except (ValueError, pa.ArrowInvalid) as error:
            raise ValueError(f"{where}, column {name!r}: {error}. It was taken for {encoding}.") from error


@dataclass
class TsvReader(CsvReader):
    """The same, with tabs between values."""

    kind = "tsv"
    delimiter: str = "\t"


def _skipped(where: str, row: Any) -> str:
    _log.warning("a row of %s is skipped: it has %d values, not %d", where, row.actual_columns, row.expected_columns)
    return "skip"


def _head(file: SourceFile, delimiter: str) -> tuple[list[str], int]:
    """The names of the columns, in the first row that is not blank, and the number of bytes up to its end."""
    at, block = next(line_blocks(Piece(file)), (0, b""))
    text = io.StringIO(block.decode(errors="surrogateescape"), newline="")
    names = next(filter(None, csv.reader(text, delimiter=delimiter)), [])
    return names, at + len(text.getvalue()[: text.tell()].encode(errors="surrogateescape"))


def _inferred(texts: pa.ChunkedArray) -> str:
    filled = texts.filter(pc.not_equal(texts, ""))
    fitting = (kind for kind, rule in _PATTERNS.items() if pc.all(pc.match_substring_regex(filled, rule)).as_py())
    return next(fitting, "str") if len(filled) else "str"


def _numbers(texts: pa.Array, encoding: str, *, is_strict: bool) -> pa.Array:
    if encoding == "uint8" and pc.all(pc.match_substring_regex(texts, _PATTERNS["uint8"])).as_py():
        return pc.equal(pc.utf8_lower(texts), "true").cast(pa.uint8())
    if is_strict:
        fits = pc.fill_null(pc.match_substring_regex(texts, _PATTERNS[encoding]), True)
        if not pc.all(fits).as_py():
            raise ValueError(f"{texts.filter(pc.invert(fits))[0].as_py()!r:.60} is not of that kind")
    if encoding.startswith(("int", "uint")):
        return texts.cast(pa.uint64() if encoding == "uint64" else pa.int64())
    if encoding.startswith("float"):
        numbers = texts.cast(pa.float64())
        lost = texts.filter(pc.and_(pc.is_inf(numbers), pc.match_substring_regex(texts, r"\d")))
        if len(lost):
            raise ValueError(f"{lost[0].as_py():.40} is beyond the largest float64")
        return numbers
    raise ValueError(f"text cannot be written as {encoding}")
