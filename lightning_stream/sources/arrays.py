"""Arrays and datasets as tables: NumPy files, and `datasets.Dataset` objects."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from lightning_stream.errors import FormatError
from lightning_stream.sources.base import Piece
from lightning_stream.sources.files import SourceFile
from lightning_stream.sources.stretches import stretch
from lightning_stream.sources.tables import Table, TableReader, fitting_rows

_BLOCK_ROWS = 1024
_HEADER_BYTES, _WHOLE_BYTES = 1 << 12, 1 << 28


def _blocks(
    schema: pa.Schema, num_rows: int, num_bytes: int, read: Callable[[int, int, Any], Any], rows: int = 0
) -> Table:
    """A table in blocks of rows, which ``read(begin, end, columns)`` gives as record batches."""
    rows = rows or min(_BLOCK_ROWS, fitting_rows(num_rows, num_bytes))
    begins = range(0, num_rows, rows)

    def batches(begin: int, end: int | None, columns: list[str] | None) -> Iterator[pa.RecordBatch]:
        for first in begins[begin:end]:
            yield from read(first, min(num_rows, first + rows), columns)

    def pieces() -> list[Piece]:
        each = num_bytes // max(1, len(begins))
        return [Piece(k, k + 1, min(rows, num_rows - first), each) for k, first in enumerate(begins)]

    return Table(schema, pieces, batches)


class _Arrays(NamedTuple):
    """The arrays of a file: those of rows [begin, end) by name, the number of rows, the bytes of all, and whether all
    are read at once."""

    read: Callable[[int, int], Mapping[str, Any]]
    num_rows: int
    num_bytes: int
    is_whole: bool = False


@dataclass
class NumpyReader(TableReader):
    """Rows of ``.npy`` and ``.npz`` files, along the first axis; of an uncompressed ``.npy`` file, only their bytes.

    Attributes:
        column: Name of the one column of a ``.npy`` file; of a structured array, its fields are the columns.
    """

    kind = "numpy"
    column: str = "array"

    def _plain(self, file: SourceFile) -> Any:  # noqa: ARG002
        return nullcontext()

    def _table(self, plain: Any, file: SourceFile) -> Table:  # noqa: ARG002
        try:
            arrays = self._rows_of(file) or self._loaded(file)
            schema = pa.schema({name: _arrow_array(array).type for name, array in arrays.read(0, 0).items()})
        except (ValueError, EOFError, zipfile.BadZipFile, pa.ArrowNotImplementedError) as error:
            is_pickled = "pickle" in str(error)
            reason = "it holds objects, or is none: only unpickling could read it, which would run code"
            reason = reason if is_pickled else str(error).rstrip(".")
            raise FormatError(f"{file.uri} cannot be read as a NumPy file: {reason}. Write it again.") from error

        def read(begin: int, end: int, columns: Any) -> list[pa.RecordBatch]:
            found = arrays.read(begin, end)
            return [pa.RecordBatch.from_pydict({name: _arrow_array(found[name]) for name in columns or found})]

        share = min(1.0, _WHOLE_BYTES / max(1, arrays.num_bytes))  # what is read as a whole is cut into few blocks
        rows = max(1, int(share * arrays.num_rows)) if arrays.is_whole else 0
        return _blocks(schema, arrays.num_rows, arrays.num_bytes, read, rows)

    def _rows_of(self, file: SourceFile) -> _Arrays | None:
        """The rows of a file whose bytes are those of its rows, one after another; None for another one."""
        if file.ending != ".npy" or file.is_packed:
            return None
        head = io.BytesIO(stretch(file, 0, min(_HEADER_BYTES, file.num_bytes)))
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

        def read(begin: int, end: int) -> Mapping[str, Any]:
            data = stretch(file, first + begin * width, first + end * width)
            return self._named(np.frombuffer(data, dtype).reshape(end - begin, *shape[1:]))

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
            lambda begin, end: {name: one[begin:end] for name, one in arrays.items()}, num_rows, num_bytes, True
        )

    def _named(self, array: Any) -> dict[str, Any]:
        names = array.dtype.names
        return {self.column: array} if names is None else {name: array[name] for name in names}


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
