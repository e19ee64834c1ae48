"""Arrays and datasets as tables: NumPy files, and `datasets.Dataset` objects."""

from __future__ import annotations

import math
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from lightning_stream.errors import FormatError
from lightning_stream.sources.base import Piece
from lightning_stream.sources.files import SourceFile
from lightning_stream.sources.tables import Table, TableReader, fitting_rows

_BLOCK_ROWS = 1024


def _blocks(
    schema: pa.Schema, num_rows: int, num_bytes: int, read: Callable[[int, int, Any], Any], most: int = _BLOCK_ROWS
) -> Table:
    """A table in blocks of rows, which ``read(begin, end, columns)`` gives as record batches."""
    rows = max(1, most if most > _BLOCK_ROWS else min(most, fitting_rows(num_rows, num_bytes)))
    begins = range(0, num_rows, rows)

    def batches(begin: int, end: int | None, columns: list[str] | None) -> Iterator[pa.RecordBatch]:
        for first in begins[begin:end]:
            yield from read(first, min(num_rows, first + rows), columns)

    def pieces() -> list[Piece]:
        each = num_bytes // max(1, len(begins))
        return [Piece(k, k + 1, min(rows, num_rows - first), each) for k, first in enumerate(begins)]

    return Table(schema, pieces, batches)


@dataclass
class NumpyReader(TableReader):
    """Rows of ``.npy`` and ``.npz`` files, along the first axis; an uncompressed local ``.npy`` file is mapped.

    Attributes:
        column: Name of the one column of a ``.npy`` file; of a structured array, its fields are the columns.
    """

    kind = "numpy"
    column: str = "array"

    def _plain(self, file: SourceFile) -> Any:
        return file.unpacked("a NumPy file")

    def _plain_headers(self, file: SourceFile) -> Any:
        return self._plain(file) if file.is_packed else file.open_headers()

    def _table(self, plain: Any, file: SourceFile) -> Table:
        try:
            arrays = self._arrays(plain, file)
            lengths = {name: array.shape[0] if array.shape else -1 for name, array in arrays.items()}
            num_rows = min(lengths.values(), default=-1)
            if num_rows < 0 or num_rows != max(lengths.values()):
                raise ValueError(f"its arrays must have one number of rows; found {lengths}")
            if any(array.dtype.hasobject for array in arrays.values()):
                raise ValueError("it holds objects, which only unpickling could read, and that would run code")
            schema = pa.schema({name: _arrow_array(array[:0]).type for name, array in arrays.items()})
        except (ValueError, EOFError, zipfile.BadZipFile, pa.ArrowNotImplementedError) as error:
            raise FormatError(f"{file.uri} cannot be read as a NumPy file: {error}. Write it again.") from error

        def read(begin: int, end: int, columns: Any) -> list[pa.RecordBatch]:
            rows = {name: _arrow_array(arrays[name][begin:end]) for name in columns or arrays}
            return [pa.RecordBatch.from_pydict(rows)]

        num_bytes = sum(array.nbytes for array in arrays.values())
        # What is compressed is read from its beginning: once, not for each block.
        return _blocks(schema, num_rows, num_bytes, read, num_rows if file.ending == ".npz" else _BLOCK_ROWS)

    def _arrays(self, plain: Any, file: SourceFile) -> Mapping[str, Any]:
        """Arrays by column, whose rows are read when they are sliced."""
        if file.ending == ".npz":
            archive = zipfile.ZipFile(plain)
            return {name.removesuffix(".npy"): _Stored(archive.open(name)) for name in archive.namelist()}
        found: Any = _Stored(plain)
        if file.path is not None and not file.is_packed and not found.dtype.hasobject:
            found = np.load(file.path, "r", allow_pickle=False)
        if found.dtype.names is None:
            return {self.column: found}
        return {name: _Field(found, name) for name in found.dtype.names}


class _Stored:
    """An array in a file: its shape and dtype are read from the header, its rows when they are sliced."""

    def __init__(self, file: Any) -> None:
        version = np.lib.format.read_magic(file)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        self.shape, self._by_column, self.dtype = read(file)
        self._file, self._begin = file, file.tell()
        self.nbytes = self.dtype.itemsize * math.prod(self.shape)

    def __getitem__(self, rows: slice) -> Any:
        begin, end, _ = rows.indices(self.shape[0])
        if self._by_column and self.shape[0] > 1:
            whole = self._read(0, self.nbytes)
            return whole.reshape(self.shape, order="F")[begin:end]
        row = self.nbytes // max(1, self.shape[0])
        return self._read(begin * row, end * row).reshape(end - begin, *self.shape[1:])

    def _read(self, begin: int, end: int) -> Any:
        if begin == end:
            return np.empty(0, self.dtype)
        self._file.seek(self._begin + begin)
        data = self._file.read(end - begin)
        if len(data) != end - begin:
            raise EOFError(f"it ends after {self._begin + begin + len(data):,} of {self._begin + self.nbytes:,} bytes")
        return np.frombuffer(data, self.dtype)


class _Field:
    """A field of a structured array."""

    def __init__(self, array: Any, name: str) -> None:
        self._array, self._name = array, name
        self.dtype, shape = array.dtype[name].subdtype or (array.dtype[name], ())
        self.shape = (*array.shape, *shape)
        self.nbytes = self.dtype.itemsize * math.prod(self.shape)

    def __getitem__(self, rows: slice) -> Any:
        return self._array[rows][self._name]


def _arrow_array(array: Any) -> pa.Array:
    flat = pa.array(np.ascontiguousarray(array).reshape(-1))
    for size in reversed(array.shape[1:]):
        flat = pa.FixedSizeListArray.from_arrays(flat, size)
    return flat


@dataclass
class DatasetReader(TableReader):
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

    def _table(self, plain: Any, file: SourceFile) -> Table:  # noqa: ARG002
        rows, schema = self.dataset.with_format("arrow"), self.dataset.features.arrow_schema

        def read(begin: int, end: int, _: Any) -> list[pa.RecordBatch]:
            return rows[begin:end].combine_chunks().to_batches()  # type: ignore[no-any-return]

        return _blocks(schema, len(self.dataset), file.num_bytes, read)
