"""Tables through pyarrow: Parquet, Arrow files and streams, `datasets.Dataset` objects, CSV. Types stay exact."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet as pq

from lightning_stream.convert.files import SourceFile
from lightning_stream.convert.sources.base import Batch, Found, InputSplit, Reader, chosen_columns, present
from lightning_stream.convert.sources.hugging_face import features_of, with_files
from lightning_stream.convert.sources.inputs import InputItem
from lightning_stream.convert.sources.lines import DAMAGED, line_blocks, line_splits, spread
from lightning_stream.convert.sources.rows import SAMPLED_ROWS
from lightning_stream.errors import FormatError

_BATCH_BYTES, _MAX_ROWS = 1 << 23, 8192
_CSV_BLOCK_BYTES = 1 << 22
_MAGIC = b"ARROW1"
_DAMAGED = (pa.ArrowInvalid, OSError)


class _TableReader(Reader):
    """Rows of files that hold Arrow record batches, or what becomes some."""

    def find_columns(self, files: Sequence[SourceFile], asked: Mapping[str, str] | None) -> Found:
        """Read the first file's schema."""
        with self._opened(files[0]) as opened:
            first = next((batch for batch in opened.batches(0, None, None) if batch.num_rows), None)
            return features_of(opened.schema, first, asked)

    def input_splits(self, file: SourceFile, partition_bytes: int) -> list[InputSplit]:
        """Cut between row groups or record batches, where a file is larger than a partition."""
        if file.num_bytes <= partition_bytes:
            return super().input_splits(file, partition_bytes)
        with self._opened(file) as opened:
            sizes = opened.sizes()
        splits, begin, num_bytes = [], 0, 0
        for k, size in enumerate(sizes):
            num_bytes += size
            if num_bytes >= partition_bytes or k == len(sizes) - 1:
                splits.append(InputSplit(file, begin, k + 1, num_bytes))
                begin, num_bytes = k + 1, 0
        return splits

    def read(self, split: InputSplit, columns: Mapping[str, str]) -> Iterator[Batch]:
        """Yield batches of about 8 MiB."""
        uri, done = split.file.uri, 0
        after = f" after number {split.begin:,} of its pieces" if split.begin else ""
        with self._opened(split.file) as opened:
            wanted = present(opened.schema.names, columns, split.file)
            try:
                for batch in opened.batches(split.begin, split.end, wanted):
                    for piece in _pieces(with_files(batch).select(wanted)):
                        yield Batch(piece, f"{uri}, rows {done:,} to {done + piece.num_rows:,}{after}")
                        done += piece.num_rows
            except _DAMAGED as error:
                raise FormatError(f"{uri} cannot be read as {self.kind}: {error}") from error

    @contextmanager
    def _opened(self, file: SourceFile) -> Iterator[_Table]:
        with pa.PythonFile(file.open(), "r") if file.path is None else pa.memory_map(str(file.path)) as plain:
            try:
                table = self._table(plain)
            except _DAMAGED as error:
                raise FormatError(f"{file.uri} is not a file of kind {self.kind}: {error}") from error
            yield table

    @abstractmethod
    def _table(self, plain: Any) -> _Table: ...


def _pieces(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    rows = max(1, min(_MAX_ROWS, batch.num_rows * _BATCH_BYTES // max(1, batch.nbytes)))
    for begin in range(0, batch.num_rows, rows):
        yield batch.slice(begin, rows)


@dataclass(frozen=True)
class _Table:
    """An open file: its schema, its record batches by number, and their sizes."""

    schema: pa.Schema
    reader: Any

    def batches(self, begin: int, end: int | None, columns: list[str] | None) -> Iterator[pa.RecordBatch]:  # noqa: ARG002
        return islice(self.reader, begin, end)  # a stream

    def sizes(self) -> list[int]:
        return [batch.nbytes for batch in self.batches(0, None, None)]


class _ArrowFile(_Table):
    def batches(self, begin: int, end: int | None, columns: list[str] | None) -> Iterator[pa.RecordBatch]:  # noqa: ARG002
        return map(self.reader.get_batch, range(begin, self.reader.num_record_batches if end is None else end))


class _ParquetFile(_Table):
    def batches(self, begin: int, end: int | None, columns: list[str] | None) -> Iterator[pa.RecordBatch]:
        meta = self.reader.metadata
        groups = range(begin, meta.num_row_groups if end is None else end)
        num_rows = sum(meta.row_group(k).num_rows for k in groups)
        num_bytes = sum(meta.row_group(k).total_byte_size for k in groups)
        rows = max(1, min(_MAX_ROWS, num_rows * _BATCH_BYTES // max(1, num_bytes)))
        found: Iterator[pa.RecordBatch] = self.reader.iter_batches(rows, list(groups), columns, use_threads=False)
        return found

    def sizes(self) -> list[int]:
        groups = map(self.reader.metadata.row_group, range(self.reader.num_row_groups))
        return [sum(group.column(k).total_compressed_size for k in range(group.num_columns)) for group in groups]


@dataclass(frozen=True)
class ParquetReader(_TableReader):
    """Rows of Parquet files, cut between row groups."""

    kind = "parquet"

    def _table(self, plain: Any) -> _Table:
        file = pq.ParquetFile(plain, pre_buffer=not isinstance(plain, pa.MemoryMappedFile))
        return _ParquetFile(file.schema_arrow, file)


@dataclass(frozen=True)
class ArrowReader(_TableReader):
    """Rows of Arrow IPC files and streams (Feather too), cut between record batches."""

    kind = "arrow"

    def _table(self, plain: Any) -> _Table:
        is_file = plain.read(len(_MAGIC)) == _MAGIC
        plain.seek(0)
        reader = pa.ipc.open_file(plain) if is_file else pa.ipc.open_stream(plain)
        return _ArrowFile(reader.schema, reader) if is_file else _Table(reader.schema, reader)


_WHOLE, _NUMBER = r"[+-]?(0|[1-9]\d{0,17})", r"[+-]?((0|[1-9]\d{0,14})(\.\d*)?|\.\d+)([eE][+-]?\d+)?"
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

    def tuned(self, *, strict: bool, as_rows: bool) -> CsvReader:  # noqa: ARG002 - rows are dicts of columns
        """Return the reader for one conversion."""
        return CsvReader(self.kind, self.delimiter, self.names, strict)

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
            present(batch.schema.names, columns, split.file)
            arrays = [self._parsed(name, batch.column(name), kind, where) for name, kind in columns.items()]
            for piece in _pieces(pa.RecordBatch.from_arrays(arrays, names=list(columns))):
                yield Batch(piece, where)

    def _batches(self, split: InputSplit) -> Iterator[tuple[pa.RecordBatch, str]]:
        """All rows as texts."""
        file = split.file
        try:
            names = list(self.names) if self.names is not None else self._header(file)
            if len(set(names)) < len(names):
                raise FormatError(
                    f"{file.uri}: columns must differ in name; its first line is {', '.join(names):.200}."
                )
            if not names:
                return
            skipped = int(self.names is None and split.begin == 0)
            if split.begin or split.end is not None:
                for at, block in line_blocks(split):
                    lines = block.partition(b"\n")[2] if skipped and at == 0 else block
                    for batch in self._parser(pa.BufferReader(lines), names, 0) if lines.strip() else ():
                        yield batch, f"{file.uri}, rows from byte {at:,}"
                return
            with file.unpacked() as plain:
                done = 0
                for batch in self._parser(pa.PythonFile(plain, "r"), names, skipped):
                    yield batch, f"{file.uri}, rows {done:,} to {done + batch.num_rows:,}"
                    done += batch.num_rows
        except (*DAMAGED, *_DAMAGED, UnicodeDecodeError) as error:
            raise FormatError(f"{file.uri} cannot be read as {self.kind}: {error}.") from error

    def _header(self, file: SourceFile) -> list[str]:
        with file.unpacked() as plain:
            first = next((line for line in chain([plain.readline()], plain) if line.strip(b"\r\n\xef\xbb\xbf")), b"")
            options = pa.csv.ParseOptions(delimiter=self.delimiter)
            return pa.csv.read_csv(pa.BufferReader(first), parse_options=options).column_names if first else []

    def _parser(self, plain: Any, names: list[str], skipped: int) -> Any:
        texts = pa.csv.ConvertOptions(column_types=dict.fromkeys(names, pa.string()), strings_can_be_null=False)
        reading = pa.csv.ReadOptions(
            use_threads=False, block_size=_CSV_BLOCK_BYTES, column_names=names, skip_rows_after_names=skipped
        )
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


@dataclass(frozen=True)
class DatasetReader(Reader):
    """Rows of a `datasets.Dataset` object, in its own order.

    Attributes:
        dataset: The object, which gives Arrow tables.
    """

    kind = "dataset"
    dataset: Any

    @property
    def files(self) -> tuple[SourceFile, ...]:
        """The dataset as one file, whose stamp is the fingerprint that the object has."""
        size = max(1, int(self.dataset.dataset_size or self.dataset.data.nbytes))
        return (InputItem("dataset", str(len(self.dataset)), size, str(vars(self.dataset)["_fingerprint"])),)

    def find_columns(self, files: Sequence[SourceFile], asked: Mapping[str, str] | None) -> Found:  # noqa: ARG002
        """Read the features."""
        table = self.dataset.with_format("arrow")[:1]
        schema = self.dataset.features.arrow_schema
        return features_of(schema, next(iter(table.to_batches()), None), asked)

    def input_splits(self, file: SourceFile, partition_bytes: int) -> list[InputSplit]:
        """Cut between rows."""
        count = max(1, round(file.num_bytes / partition_bytes))
        cuts = [len(self.dataset) * k // count for k in range(count + 1)]
        return [InputSplit(file, cuts[k], cuts[k + 1], file.num_bytes // count) for k in range(count)]

    def read(self, split: InputSplit, columns: Mapping[str, str]) -> Iterator[Batch]:
        """Yield some thousand rows at a time."""
        rows, end = self.dataset.with_format("arrow"), split.end or len(self.dataset)
        schema = self.dataset.features.arrow_schema
        for begin in range(split.begin, end, _MAX_ROWS // 8):
            table = rows[begin : min(end, begin + _MAX_ROWS // 8)].replace_schema_metadata(schema.metadata)
            for batch in table.combine_chunks().to_batches():
                yield Batch(with_files(batch).select(list(columns)), f"the dataset, from row {begin:,}")
