"""Tables through pyarrow: Parquet, Arrow files and streams, `datasets.Dataset` objects, CSV. Types stay exact."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute
import pyarrow.parquet as pq

from lightning_stream.convert.arrow_schema import arrow_columns
from lightning_stream.convert.files import SourceFile
from lightning_stream.convert.sources.base import Batch, Found, InputSplit, Reader, present
from lightning_stream.convert.sources.images import image_encoding
from lightning_stream.convert.sources.inputs import InputItem
from lightning_stream.convert.sources.lines import DAMAGED
from lightning_stream.errors import FormatError

_BATCH_BYTES, _MAX_ROWS = 1 << 23, 8192
_CSV_BLOCK_BYTES = 1 << 22
_MAGIC = b"ARROW1"
_FILES = ("Image", "Audio", "Video")  # features that are a struct of a file's bytes and its path
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
                    for piece in pieces_of(with_files(batch).select(wanted)):
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

    def _table(self, plain: Any) -> _Table:
        raise NotImplementedError


def pieces_of(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """Cut a batch into pieces of about 8 MiB."""
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


class _NumpyArrays(_Table):
    """Arrays of one length, as batches of some rows. ``reader`` has them by name."""

    def batches(self, begin: int, end: int | None, columns: list[str] | None) -> Iterator[pa.RecordBatch]:
        num_rows, step = len(next(iter(self.reader.values()))), self._step()
        for start in range(begin * step, num_rows if end is None else min(end * step, num_rows), step):
            rows = {name: _arrow_array(self.reader[name][start : start + step]) for name in columns or self.reader}
            yield pa.RecordBatch.from_pydict(rows)

    def _step(self) -> int:
        arrays = self.reader.values()
        return max(1, _BATCH_BYTES // max(1, *(int(array.nbytes) // max(1, len(array)) for array in arrays)))

    def sizes(self) -> list[int]:
        num_rows = len(next(iter(self.reader.values())))
        return [_BATCH_BYTES] * -(-num_rows // self._step())


def _arrow_array(array: Any) -> pa.Array:
    flat = pa.array(np.ascontiguousarray(array).reshape(-1))
    for size in reversed(array.shape[1:]):
        flat = pa.FixedSizeListArray.from_arrays(flat, size)
    return flat


@dataclass(frozen=True)
class NumpyReader(_TableReader):
    """Rows of ``.npy`` and ``.npz`` files, along the first axis; an uncompressed local ``.npy`` file is mapped.

    Attributes:
        column: Name of the one column of a ``.npy`` file; of a structured array, its fields are the columns.
    """

    kind = "numpy"
    column: str = "array"

    @property
    def settings(self) -> Mapping[str, Any]:
        """The column's name."""
        return {"kind": self.kind, "column": self.column}

    @contextmanager
    def _opened(self, file: SourceFile) -> Iterator[_Table]:
        try:
            with file.unpacked() as plain:
                if file.ending == ".npy" and file.path is not None and not file.is_packed:
                    found: Any = np.load(file.path, "r", allow_pickle=False)
                else:
                    found = np.load(plain, allow_pickle=False)
                names = getattr(getattr(found, "dtype", None), "names", None) or getattr(found, "files", None)
                arrays = {self.column: found} if names is None else {name: found[name] for name in names}
            lengths = {name: len(array) if array.ndim else None for name, array in arrays.items()}
            if len(set(lengths.values())) != 1 or None in lengths.values():
                raise ValueError(f"its arrays must have one number of rows; found {lengths}")
            table = _NumpyArrays(
                pa.schema({name: _arrow_array(array[:0]).type for name, array in arrays.items()}), arrays
            )
        except (*DAMAGED, *_DAMAGED, ValueError, pa.ArrowNotImplementedError) as error:
            raise FormatError(f"{file.uri} cannot be read as a NumPy file: {error}.") from error
        yield table


@dataclass(frozen=True)
class DatasetReader(Reader):
    """Rows of a `datasets.Dataset` object, in its own order."""

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


def features_of(schema: pa.Schema, first: Any, asked: Mapping[str, str] | None) -> Found:
    """Return the columns of a schema, with images and class labels as ``datasets`` notes them."""
    features = _noted(schema)
    images = [name for name, kind in features.items() if kind.get("_type") in _FILES and name in schema.names]
    for name in images:
        schema = schema.set(schema.get_field_index(name), pa.field(name, pa.binary()))
    columns = arrow_columns(schema, asked)
    for name in images if asked is None else ():
        value = None if first is None or not first.num_rows else image_bytes(first.column(name))[0].as_py()
        columns[name] = image_encoding(value or b"")
    for name, shape in _shapes(features).items() if asked is None else ():
        if columns.get(name, "").count(":") == 1:
            columns[name] += f":{shape}"
    classes = {name: kind["names"] for name, kind in features.items() if kind.get("_type") == "ClassLabel"}
    about: dict[str, Any] = {"schema": {field.name: str(field.type) for field in schema}}
    if classes:
        about["classes"] = {name: names for name, names in classes.items() if name in columns}
    return Found(columns, about, media=tuple(images))


def _shapes(features: Mapping[str, Any]) -> dict[str, str]:
    """Return the shapes of array features that have one shape for all rows, as encodings write them."""
    arrays = {name: kind["shape"] for name, kind in features.items() if str(kind.get("_type")).startswith("Array")}
    return {name: ",".join(map(str, shape)) for name, shape in arrays.items() if all(shape)}


def image_bytes(column: pa.Array) -> pa.Array:
    """Return a column of structs of bytes and path, or of plain bytes, as bytes; null where there is neither."""
    if not pa.types.is_struct(column.type):
        return column
    data = pa.compute.struct_field(column, "bytes")
    if not data.null_count:
        return data
    paths = pa.compute.struct_field(column, "path").to_pylist()
    return pa.array(
        [
            Path(path).read_bytes() if held is None and path and Path(path).is_file() else held
            for held, path in zip(data.to_pylist(), paths, strict=True)
        ],
        pa.large_binary(),
    )


def with_files(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Return the batch with its images as their files' bytes."""
    noted = _noted(batch.schema)
    for k, field in enumerate(batch.schema):
        if noted.get(field.name, {}).get("_type") in _FILES and pa.types.is_struct(field.type):
            batch = batch.set_column(k, field.name, image_bytes(batch.column(k)))
    return batch


def _noted(schema: pa.Schema) -> dict[str, Any]:
    noted = (schema.metadata or {}).get(b"huggingface")
    if noted is None:
        return {}
    features = json.loads(noted).get("info", {}).get("features") or {}
    return {name: kind for name, kind in features.items() if isinstance(kind, dict)}
