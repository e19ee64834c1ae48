"""CSV and TSV files through pyarrow. All values are read as texts, so that identifiers stay what they are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv

from lightning_stream.convert.files import SourceFile
from lightning_stream.convert.sources.base import Batch, Found, InputSplit, Reader, chosen_columns, present
from lightning_stream.convert.sources.lines import DAMAGED, line_blocks, line_splits, spread
from lightning_stream.convert.sources.rows import SAMPLED_ROWS
from lightning_stream.convert.sources.tables import pieces_of
from lightning_stream.errors import FormatError

_CSV_BLOCK_BYTES = 1 << 22
_DAMAGED = (pa.ArrowInvalid, OSError)
# A leading "+" is one of a telephone number; a larger exponent would become inf or 0.
_WHOLE, _NUMBER = r"-?(0|[1-9]\d{0,17})", r"-?((0|[1-9]\d{0,14})(\.\d*)?|\.\d+)([eE]([+-]?\d{1,2}|-[12]\d\d))?"
_TRUTH = r"(?i)true|false"
_PATTERNS = {"int64": f"^({_WHOLE})$", "float64": rf"^({_NUMBER})$", "uint8": f"^({_TRUTH})$"}


@dataclass(frozen=True)
class CsvReader(Reader):
    """Rows of CSV or TSV files, with quotes as spreadsheets write them.

    A column is numbers only if every value that is looked at is one: identifiers such as ``01234`` or ``2021_03``, and
    words such as ``nan``, stay text.

    Attributes:
        kind: ``csv`` or ``tsv``.
        delimiter: Between values.
        names: The columns, where files have no line of names; None to read them from the first line.
        is_inferred: Whether encodings were inferred, so that all values must match as strictly.
    """

    kind: str = "csv"  # type: ignore[misc]
    delimiter: str = ","
    names: tuple[str, ...] | None = None
    is_inferred: bool = field(default=False, compare=False)

    @property
    def settings(self) -> Mapping[str, Any]:
        """Delimiter and names decide what is read."""
        return {"kind": self.kind, "delimiter": self.delimiter, "names": self.names}

    def reading(self, asked: Mapping[str, str] | None) -> CsvReader:
        """Return the reader for one conversion: what the user asked for need not look like numbers."""
        return CsvReader(self.kind, self.delimiter, self.names, asked is None)

    def find_columns(self, files: Sequence[SourceFile], asked: Mapping[str, str] | None) -> Found:
        """Look at the first rows of some files: whole numbers, else numbers, else true and false, else text."""
        tables: list[pa.RecordBatch] = []
        for file in spread(files):
            num_rows = 0
            for batch, _ in self._batches(InputSplit(file, 0, None, file.num_bytes)):
                tables.append(batch.slice(0, SAMPLED_ROWS))
                num_rows += batch.num_rows
                if num_rows >= SAMPLED_ROWS:
                    break
        if not any(table.num_rows for table in tables):
            raise ValueError(f"{files[0].root} is empty: there is nothing to write.")
        columns: dict[str, list[Any]] = {}
        for table in tables:
            for name, column in zip(table.schema.names, table.columns, strict=True):
                columns.setdefault(name, []).append(column)
        known = {name: _inferred(pa.chunked_array(chunks)) for name, chunks in columns.items()}
        return Found(chosen_columns(known, asked, files[0].root))

    def input_splits(self, file: SourceFile, partition_bytes: int) -> list[InputSplit]:
        """Cut between lines, unless values are quoted: these may hold line ends."""
        if file.num_bytes <= partition_bytes or file.is_packed or file.path is None:
            return super().input_splits(file, partition_bytes)
        with file.open() as plain:
            has_quotes = any(b'"' in block for block in iter(lambda: plain.read(_CSV_BLOCK_BYTES), b""))
        return super().input_splits(file, partition_bytes) if has_quotes else line_splits(file, partition_bytes)

    def read(self, split: InputSplit, columns: Mapping[str, str]) -> Iterator[Batch]:
        """Yield some MiB of rows at a time; an empty value is null wherever the column is not text."""
        for batch, where in self._batches(split):
            if not batch.num_rows:  # a block of blank lines
                continue
            present(batch.schema.names, columns, split.file)
            arrays = [self._parsed(name, batch.column(name), kind, where) for name, kind in columns.items()]
            for piece in pieces_of(pa.RecordBatch.from_arrays(arrays, names=list(columns))):
                yield Batch(piece, where)

    def _batches(self, split: InputSplit) -> Iterator[tuple[pa.RecordBatch, str]]:
        """All rows as texts."""
        file = split.file
        try:
            names, above = (list(self.names), 0) if self.names is not None else self._header(file)
            if len(set(names)) < len(names):
                raise FormatError(
                    f"{file.uri}: columns must differ in name; its first line is {', '.join(names):.200}."
                )
            if not names:
                return
            if split.begin or split.end is not None:
                for at, block in line_blocks(split):
                    lines = block[max(0, above - at) :]
                    for batch in self._parser(pa.BufferReader(lines), names) if lines.strip() else ():
                        yield batch, f"{file.uri}, rows from byte {at:,}"
                return
            with file.unpacked() as plain:
                plain.read(above)
                done = 0
                for batch in self._parser(pa.PythonFile(plain, "r"), names):
                    yield batch, f"{file.uri}, rows {done:,} to {done + batch.num_rows:,}"
                    done += batch.num_rows
        except (*DAMAGED, *_DAMAGED, UnicodeDecodeError) as error:
            raise FormatError(f"{file.uri} cannot be read as {self.kind}: {error}.") from error

    def _header(self, file: SourceFile) -> tuple[list[str], int]:
        """Return the names in the first line that is not blank, and the number of bytes up to its end."""
        num_bytes = 0
        with file.unpacked() as plain:
            for line in chain([plain.readline()], plain):
                num_bytes += len(line)
                if line.strip(b"\r\n\xef\xbb\xbf"):
                    options = pa.csv.ParseOptions(delimiter=self.delimiter)
                    return pa.csv.read_csv(pa.BufferReader(line), parse_options=options).column_names, num_bytes
        return [], 0

    def _parser(self, plain: Any, names: list[str]) -> Any:
        texts = pa.csv.ConvertOptions(column_types=dict.fromkeys(names, pa.string()), strings_can_be_null=False)
        reading = pa.csv.ReadOptions(use_threads=False, block_size=_CSV_BLOCK_BYTES, column_names=names)
        parsing = pa.csv.ParseOptions(delimiter=self.delimiter, newlines_in_values=True)
        return pa.csv.open_csv(plain, read_options=reading, parse_options=parsing, convert_options=texts)

    def _parsed(self, name: str, texts: pa.Array, encoding: str, where: str) -> pa.Array:
        """Texts as what the encoding stores."""
        if encoding.startswith(("str", "bytes", "json")):
            return texts
        filled = pc.if_else(pc.equal(texts, ""), pa.scalar(None, pa.string()), texts)
        try:
            return _numbers(filled, encoding, is_strict=self.is_inferred)
        except (ValueError, pa.ArrowInvalid) as error:
            raise ValueError(
                f"{where}, column {name!r}: {error}. It was taken for {encoding}; pass another encoding for it in "
                "columns=, e.g. 'str'."
            ) from error


def _inferred(texts: pa.ChunkedArray) -> str:
    filled = texts.filter(pc.not_equal(texts, ""))
    if not len(filled):
        return "str"
    return next(
        (kind for kind, rule in _PATTERNS.items() if pc.all(pc.match_substring_regex(filled, rule)).as_py()), "str"
    )


def _numbers(texts: pa.Array, encoding: str, *, is_strict: bool) -> pa.Array:
    is_truth = encoding == "uint8" and pc.all(pc.match_substring_regex(texts, _PATTERNS["uint8"])).as_py()
    if is_truth:
        return pc.equal(pc.utf8_lower(texts), "true").cast(pa.uint8())
    if is_strict:
        fits = pc.fill_null(pc.match_substring_regex(texts, _PATTERNS[encoding]), True)
        if not pc.all(fits).as_py():
            raise ValueError(f"{texts.filter(pc.invert(fits))[0].as_py()!r:.60} is not of that kind")
    if encoding.startswith(("int", "uint")):
        return texts.cast(pa.uint64() if encoding == "uint64" else pa.int64())
    if encoding.startswith("float"):
        return texts.cast(pa.float64())
    raise ValueError(f"text cannot be written as {encoding}")
