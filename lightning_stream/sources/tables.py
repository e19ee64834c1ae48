"""Tables through pyarrow: Parquet, Arrow, NumPy arrays, `datasets.Dataset` objects. Types stay exact."""

from __future__ import annotations

import io
import json
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from lightning_stream.errors import FormatError, LightningStreamError
from lightning_stream.sources.arrow import arrow_columns
from lightning_stream.sources.arrow_messages import Message, messages
from lightning_stream.sources.base import Asked, Batch, Found, InputSplit, Piece, Reader, present
from lightning_stream.sources.files import SourceFile
from lightning_stream.sources.images import image_encoding
from lightning_stream.sources.stretches import FetchedFile, Kept, of_listing, stretch, stretches

_BATCH_BYTES, _MAX_ROWS, _BLOCK_ROWS = 1 << 23, 8192, 1024
_HEADER_BYTES = 1 << 12
_FOOTERS: Kept[Any] = Kept(32)  # of Parquet files
_SCHEMAS: Kept[tuple[Message, pa.Schema]] = Kept(256)
_HEADS: Kept[bytes] = Kept(256)  # of NumPy files
_FILES = ("Image", "Audio", "Video")  # features that are a struct of a file's bytes and its path


class _Table(NamedTuple):
    """An open file: its schema, its pieces with their stored bytes, and the record batches of some, in some columns."""

    schema: pa.Schema
    pieces: Callable[[], Sequence[Piece]]
    batches: Callable[[int, int | None, list[str] | None], Iterator[pa.RecordBatch]]


class _TableReader(Reader):
    """Rows of files that hold Arrow record batches, or what becomes some."""

    def find_columns(self, files: Sequence[SourceFile], asked: Asked | None) -> Found:
        """Read the first file's schema."""
        with self._opened(files[0]) as table:
            needs_values = any(asked is None or name in asked for name in _files(_noted(table.schema)))
            batches = table.batches(0, None, None) if needs_values else iter(())
            return _found(table.schema, next((batch for batch in batches if batch.num_rows), None), asked)

    def input_splits(self, file: SourceFile, partition_bytes: int) -> list[InputSplit]:
        """Cut between row groups, record batches or blocks of rows, where a file is larger than a partition."""
        if file.num_bytes <= partition_bytes:
            return super().input_splits(file, partition_bytes)
        with self._opened(file) as table:
            pieces = table.pieces()
        splits, first, num_bytes = [], 0, 0
        for number, piece in enumerate(pieces, 1):
            num_bytes += piece.num_bytes
            if num_bytes >= partition_bytes or number == len(pieces):
                splits.append(InputSplit(file, pieces[first].begin, piece.end, num_bytes))
                first, num_bytes = number, 0
        return splits

    def read(self, splits: Sequence[InputSplit], columns: Mapping[str, str]) -> Iterator[Batch]:
        """Yield batches of about 8 MiB."""
        for split in splits:
            done, after = 0, f" after number {split.begin:,} of its pieces" if split.begin else ""
            with self._opened(split.file) as table:
                wanted = present(table.schema.names, columns, split.file)
                files = [name for name in _files(_noted(table.schema)) if name in columns]
                for batch in table.batches(split.begin, split.end, wanted):
                    for name in files:
                        batch = batch.set_column(batch.schema.names.index(name), name, _file_bytes(batch.column(name)))
                    for piece in pieces_of(batch.select(wanted)):
                        yield Batch(piece, f"{split.file.uri}, rows {done:,} to {done + piece.num_rows:,}{after}")
                        done += piece.num_rows

    def pieces(self, file: SourceFile, columns: Mapping[str, str]) -> list[Piece]:
        """Return a piece for each row group or record batch that has rows."""
        with self._opened(file) as table:
            try:
                _found(table.schema, None, {name: columns[name] for name in present(table.schema.names, columns, file)})
            except ValueError as error:
                raise FormatError(f"{file.uri}: {error}") from error
            return [piece for piece in table.pieces() if piece.num_rows]

    @contextmanager
    def _opened(self, file: SourceFile) -> Iterator[_Table]:
        try:
            with self._plain(file) as plain:
                yield self._table(plain, file)
        except LightningStreamError:
            raise
        except (pa.ArrowInvalid, OSError) as error:
            raise FormatError(f"{file.uri} cannot be read as {self.kind}: {error}") from error

    @abstractmethod
    def _plain(self, file: SourceFile) -> Any: ...

    @abstractmethod
    def _table(self, plain: Any, file: SourceFile) -> _Table: ...


def pieces_of(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """Cut a batch into pieces of about 8 MiB."""
    rows = _fitting_rows(batch.num_rows, batch.nbytes)
    return (batch.slice(begin, rows) for begin in range(0, batch.num_rows, rows))


def _fitting_rows(num_rows: int, num_bytes: int) -> int:
    return max(1, min(_MAX_ROWS, num_rows * _BATCH_BYTES // max(1, num_bytes)))


@dataclass
class ParquetReader(_TableReader):
    """Rows of Parquet files, cut between row groups."""

    kind = "parquet"

    def _plain(self, file: SourceFile) -> Any:
        listed = of_listing(file, self.kind)
        return FetchedFile(listed) if file.path is None else pa.BufferReader(stretch(listed, is_read=False))

    def _table(self, plain: Any, file: SourceFile) -> _Table:
        import pyarrow.parquet as pq  # slow to import

        footer = _FOOTERS.get(file, lambda: pq.read_metadata(plain))
        opened = pq.ParquetFile(plain, metadata=footer)

        def pieces(begin: int = 0, end: int | None = None) -> list[Piece]:
            numbers = range(footer.num_row_groups)[begin:end]
            groups = zip(numbers, map(footer.row_group, numbers), strict=True)
            return [Piece(k, k + 1, group.num_rows, group.total_byte_size, nulls=_nulls(group)) for k, group in groups]

        def batches(begin: int, end: int | None, columns: list[str] | None) -> Iterator[pa.RecordBatch]:
            for piece in pieces(begin, end):
                if isinstance(plain, FetchedFile):
                    plain.fetch(_column_spans(footer.row_group(piece.begin), columns))
                rows = _fitting_rows(piece.num_rows, piece.num_bytes)
                yield from opened.iter_batches(rows, [piece.begin], columns, use_threads=False)

        return _Table(opened.schema_arrow, pieces, batches)


def _column_spans(group: Any, columns: Sequence[str] | None) -> list[tuple[int, int]]:
    """Where the stored columns of a row group lie."""
    spans = []
    for each in map(group.column, range(group.num_columns)):
        name = each.path_in_schema
        if columns is None or any(name == wanted or name.startswith(f"{wanted}.") for wanted in columns):
            begin = min(each.data_page_offset, each.dictionary_page_offset or each.data_page_offset)
            spans.append((begin, begin + each.total_compressed_size))
    return spans


def _nulls(group: Any) -> tuple[str, ...]:
    """The columns of a row group that have nulls, by its statistics, which know nothing of nested columns."""
    columns = map(group.column, range(group.num_columns))
    flat = [each for each in columns if "." not in each.path_in_schema and each.statistics is not None]
    return tuple(each.path_in_schema for each in flat if each.statistics.has_null_count and each.statistics.null_count)


@dataclass
class ArrowReader(_TableReader):
    """Rows of Arrow IPC files and streams (Feather too), cut between record batches, by bytes of the file."""

    kind = "arrow"

    def _plain(self, file: SourceFile) -> Any:
        return file.open(_HEADER_BYTES)  # of headers alone

    def _table(self, plain: Any, file: SourceFile) -> _Table:
        head, schema = _SCHEMAS.get(file, lambda: _read_schema(plain, file))

        def pieces() -> list[Piece]:
            records = (each for each in messages(plain, file.uri, file.num_bytes) if each.num_rows is not None)
            return [Piece(each.begin, each.end, each.num_rows or 0, each.end - each.begin) for each in records]

        def batches(begin: int, end: int | None, _: list[str] | None) -> Iterator[pa.RecordBatch]:
            if any("dictionary<" in str(kind) for kind in schema.types):  # each batch needs all those before it
                at, stop = max(begin, head.end), end or file.num_bytes
                before = (each for each in messages(plain, file.uri, file.num_bytes) if each.is_dictionary)
                spans = [(head.begin, head.end), *((each.begin, each.end) for each in before if each.begin < at)]
                parts = [stretch(file, *span) for span in (*spans, (at, stop))]
                yield from pa.ipc.open_stream(pa.BufferReader(b"".join(parts)))
                return
            spans = [(begin, end)] if end is not None else [(one.begin, one.end) for one in pieces()]
            for first, last in spans:
                data = pa.BufferReader(stretch(file, first, last))
                while data.tell() < last - first:
                    yield pa.ipc.read_record_batch(pa.ipc.read_message(data), schema)

        return _Table(schema, pieces, batches)


def _read_schema(plain: Any, file: SourceFile) -> tuple[Message, pa.Schema]:
    head = next(messages(plain, file.uri, file.num_bytes))
    return head, pa.ipc.read_schema(pa.BufferReader(stretch(file, head.begin, head.end)))


def _blocks(schema: pa.Schema, num_rows: int, num_bytes: int, read: Callable[[int, int, Any], Any]) -> _Table:
    """A table in blocks of rows, which ``read(begin, end, columns)`` gives as record batches."""
    rows = _rows_of_block(num_rows, num_bytes)
    begins = range(0, num_rows, rows)

    def batches(begin: int, end: int | None, columns: list[str] | None) -> Iterator[pa.RecordBatch]:
        for first in begins[begin:end]:
            yield from read(first, min(num_rows, first + rows), columns)

    def pieces() -> list[Piece]:
        each = num_bytes // max(1, len(begins))
        return [Piece(k, k + 1, min(rows, num_rows - first), each) for k, first in enumerate(begins)]

    return _Table(schema, pieces, batches)


class _Arrays(NamedTuple):
    """The arrays of a file: those of some rows by name, the number of rows, and the bytes of all."""

    read: Callable[[Sequence[int]], Mapping[str, Any]]
    num_rows: int
    num_bytes: int


@dataclass
class NumpyReader(_TableReader):
    """Rows of ``.npy`` and ``.npz`` files, along the first axis; of an uncompressed ``.npy`` file, only their bytes.

    Attributes:
        column: Name of the one column of a ``.npy`` file; of a structured array, its fields are the columns.
    """

    kind = "numpy"
    column: str = "array"

    def _plain(self, file: SourceFile) -> Any:  # noqa: ARG002
        return nullcontext()

    def _table(self, plain: Any, file: SourceFile) -> _Table:  # noqa: ARG002
        try:
            arrays = self._rows_of(file) or self._loaded(file)
            schema = pa.schema({name: _arrow_array(array).type for name, array in arrays.read(range(0)).items()})
        except (ValueError, pa.ArrowNotImplementedError) as error:
            raise FormatError(f"{file.uri} cannot be read as a NumPy file: {error}.") from error

        def read(begin: int, end: int, columns: Any) -> list[pa.RecordBatch]:
            return [_record_batch(arrays.read(range(begin, end)), columns)]

        return _blocks(schema, arrays.num_rows, arrays.num_bytes, read)

    def has_rows(self, file: SourceFile) -> bool:
        """Return whether the file may have its rows one after another."""
        return file.ending == ".npy" and not file.is_packed

    def read_rows(self, split: InputSplit, columns: Mapping[str, str], rows: Sequence[int]) -> Iterator[Batch]:
        """Yield some rows of a block."""
        arrays = self._rows_of(split.file) or self._loaded(split.file)
        first = split.begin * _rows_of_block(arrays.num_rows, arrays.num_bytes)
        yield Batch(_record_batch(arrays.read([first + row for row in rows]), columns), split.file.uri)

    def _rows_of(self, file: SourceFile) -> _Arrays | None:
        """The rows of a file whose bytes are those of its rows, one after another; None for another one."""
        if not self.has_rows(file):
            return None
        head = io.BytesIO(_HEADS.get(file, lambda: bytes(stretch(file, 0, min(_HEADER_BYTES, file.num_bytes)))))
        version = np.lib.format.read_magic(head)
        reads = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
        if version not in reads or file.num_bytes < _HEADER_BYTES:
            return None
        shape, is_fortran, dtype = reads[version](head)
        first, width = head.tell(), dtype.itemsize * int(np.prod(shape[1:]))
        if dtype.hasobject or not shape or (is_fortran and len(shape) > 1) or not width:
            return None
        if first + shape[0] * width != file.num_bytes:
            raise ValueError(f"its head promises {shape[0]:,} rows of {width:,} bytes; it has {file.num_bytes:,} bytes")

        def read(rows: Sequence[int]) -> Mapping[str, Any]:
            parts = [rows] if isinstance(rows, range) else [range(row, row + 1) for row in rows]
            spans = [(first + part.start * width, first + part.stop * width) for part in parts]
            found = stretches(file, spans)
            data = found[spans[0]] if len(spans) == 1 else b"".join(found[span] for span in spans)
            return self._named(np.frombuffer(data, dtype).reshape(len(rows), *shape[1:]))

        return _Arrays(read, shape[0], shape[0] * width)

    def _loaded(self, file: SourceFile) -> _Arrays:
        """The rows of a file that must be read as a whole."""
        with file.unpacked("a NumPy file") as plain:
            found = np.load(plain, allow_pickle=False)
            arrays = {name: found[name] for name in found.files} if hasattr(found, "files") else self._named(found)
        lengths = {name: len(array) if array.ndim else -1 for name, array in arrays.items()}
        num_rows = min(lengths.values(), default=-1)
        if num_rows < 0 or num_rows != max(lengths.values()):
            raise ValueError(f"its arrays must have one number of rows; found {lengths}")
        num_bytes = sum(array.nbytes for array in arrays.values())
        return _Arrays(
            lambda rows: {name: one[np.array(rows, int)] for name, one in arrays.items()}, num_rows, num_bytes
        )

    def _named(self, array: Any) -> dict[str, Any]:
        names = array.dtype.names
        return {self.column: array} if names is None else {name: array[name] for name in names}


def _rows_of_block(num_rows: int, num_bytes: int) -> int:
    return min(_BLOCK_ROWS, _fitting_rows(num_rows, num_bytes))


def _record_batch(arrays: Mapping[str, Any], columns: Iterable[str] | None) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict({name: _arrow_array(arrays[name]) for name in columns or arrays})


def _arrow_array(array: Any) -> pa.Array:
    flat: Any = np.ascontiguousarray(array).reshape(-1)
    if flat.dtype.kind in "iuf" and flat.dtype.isnative:  # `pa.array` imports pandas, which takes a second
        flat = pa.Array.from_buffers(pa.from_numpy_dtype(flat.dtype), len(flat), [None, pa.py_buffer(flat)])
    else:
        flat = pa.array(flat)
    for size in reversed(array.shape[1:]):
        flat = pa.FixedSizeListArray.from_arrays(flat, size)
    return flat


@dataclass
class DatasetReader(_TableReader):
    """Rows of a `datasets.Dataset` object, in its own order."""

    kind = "dataset"
    dataset: Any = field(compare=False)

    @property
    def files(self) -> tuple[SourceFile, ...]:
        """The dataset as one file, whose stamp is the fingerprint that the object has."""
        size = max(1, int(self.dataset.dataset_size or self.dataset.data.nbytes))
        return (SourceFile("", str(len(self.dataset)), size, str(vars(self.dataset)["_fingerprint"])),)

    def _plain(self, file: SourceFile) -> Any:  # noqa: ARG002
        return nullcontext()

    def _table(self, plain: Any, file: SourceFile) -> _Table:  # noqa: ARG002
        rows, schema = self.dataset.with_format("arrow"), self.dataset.features.arrow_schema

        def read(begin: int, end: int, _: Any) -> list[pa.RecordBatch]:
            return rows[begin:end].combine_chunks().to_batches()  # type: ignore[no-any-return]

        return _blocks(schema, len(self.dataset), file.num_bytes, read)


def _found(schema: pa.Schema, first: Any, asked: Asked | None) -> Found:
    """The columns of a schema: with what Hugging Face's ``datasets`` notes in it about images, classes and shapes."""
    features = _noted(schema)
    files = [name for name in _files(features) if name in schema.names]
    for name in files:
        schema = schema.set(schema.get_field_index(name), pa.field(name, pa.binary()))
    columns = arrow_columns(schema, asked)
    for name, kind in features.items():
        if name not in columns or (asked is not None and asked[name] is not None):
            continue
        shape = kind.get("shape") if str(kind.get("_type")).startswith("Array") else None
        if name in files:
            value = None if first is None else _file_bytes(first.column(name))[0].as_py()
            columns[name] = image_encoding(value or b"")
        elif shape and all(shape) and columns.get(name, "").count(":") == 1:
            columns[name] += f":{','.join(map(str, shape))}"
    classes = {name: kind["names"] for name, kind in features.items() if kind.get("_type") == "ClassLabel"}
    about: dict[str, Any] = {"schema": {each.name: str(each.type) for each in schema}}
    if classes:
        about["classes"] = {name: names for name, names in classes.items() if name in columns}
    return Found(columns, about, media=tuple(files))


def _file_bytes(column: pa.Array) -> pa.Array:
    """A column of structs of bytes and path, or of plain bytes, as bytes; null where there is neither."""
    if not pa.types.is_struct(column.type):
        return column
    import pyarrow.compute as pc  # slow to import

    data = pc.struct_field(column, "bytes")
    if not data.null_count:
        return data
    paths = pc.struct_field(column, "path").to_pylist()
    return pa.array(
        [
            Path(path).read_bytes() if held is None and path and Path(path).is_file() else held
            for held, path in zip(data.to_pylist(), paths, strict=True)
        ],
        pa.large_binary(),
    )


def _files(features: Mapping[str, Any]) -> list[str]:
    return [name for name, kind in features.items() if kind.get("_type") in _FILES]


def _noted(schema: pa.Schema) -> dict[str, Any]:
    noted = (schema.metadata or {}).get(b"huggingface")
    features = (json.loads(noted).get("info", {}).get("features") or {}) if noted else {}
    return {name: kind for name, kind in features.items() if isinstance(kind, dict)}
