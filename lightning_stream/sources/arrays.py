"""Arrays and datasets as tables: NumPy files, and `datasets.Dataset` objects."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa

from lightning_stream.lazy import cached
from lightning_stream.sources import npy
from lightning_stream.sources.base import Piece
from lightning_stream.sources.files import SourceFile, readable
from lightning_stream.sources.tables import Table, TableReader, fitting_rows

_BLOCK_ROWS = 1024
_HEADER_BYTES = 1 << 12
_WHOLE_BYTES = 1 << 28
_HEADS: dict[Any, bytes] = {}
# What returns the arrays of some rows by name, the number of rows, the bytes of all, and the rows of a block.
_Arrays: TypeAlias = "tuple[Callable[[Sequence[int]], Mapping[str, Any]], int, int, int]"


def _blocks(
    file: SourceFile, schema: pa.Schema, num_rows: int, num_bytes: int, rows: int, read: Callable[[Any, Any], Any]
) -> Table:
    """A table in blocks of ``rows``, which ``read(numbers of rows, columns)`` gives as record batches."""
    begins = range(0, num_rows, rows)

    def batches(place: Piece, columns: list[str] | None) -> Iterator[pa.RecordBatch]:
        for first in begins[place.begin : place.end]:
            block = range(first, min(num_rows, first + rows))
            yield from read(block if place.rows is None else [block[row] for row in place.rows], columns)

    def pieces() -> list[Piece]:
        block_bytes = num_bytes // max(1, len(begins))
        return [Piece(file, k, k + 1, block_bytes, min(rows, num_rows - first)) for k, first in enumerate(begins)]

    return Table(schema, pieces, batches)


@dataclass
class NumpyReader(TableReader):
    """Rows of ``.npy`` and ``.npz`` files, along the first axis; of an uncompressed ``.npy`` file, only their bytes.

    Attributes:
        column: Name of the one column of a ``.npy`` file; of a structured array, its fields are the columns.
    """

    kind = "numpy"
    column: str = "array"

    def _table(self, plain: Any, file: SourceFile) -> Table:
        with readable(file.uri, has_arguments=False):
            rows_of, num_rows, num_bytes, block_rows = self._rows_of(file) or self._loaded(file)
            schema = pa.schema({name: _arrow_array(array).type for name, array in rows_of(range(0)).items()})

        def read(rows: Sequence[int], columns: Iterable[str] | None) -> list[pa.RecordBatch]:
            arrays = rows_of(rows)
            return [pa.RecordBatch.from_pydict({name: _arrow_array(arrays[name]) for name in columns or arrays})]

        return _blocks(file, schema, num_rows, num_bytes, block_rows, read)

    def has_rows(self, file: SourceFile) -> bool:
        """Return whether the file may have its rows one after another."""
        return file.ending == ".npy" and not file.is_packed

    def _rows_of(self, file: SourceFile) -> _Arrays | None:
        """The rows of a file whose bytes are those of its rows, one after another; None for another one."""
        if not self.has_rows(file) or file.num_bytes < _HEADER_BYTES:
            return None
        layout = npy.read_head(cached(_HEADS, file.content, lambda _: bytes(file.view(0, _HEADER_BYTES)), 256))
        if layout is None:
            return None
        first, shape, dtype = layout
        width = dtype.itemsize * int(np.prod(shape[1:]))
        if not shape or not width:
            return None
        num_bytes = shape[0] * width
        if first + num_bytes != file.num_bytes:
            raise ValueError(f"its head promises {shape[0]:,} rows of {width:,} bytes; it has {file.num_bytes:,} bytes")

        def read(rows: Sequence[int]) -> Mapping[str, Any]:
            spans = [(first + row * width, first + (row + 1) * width) for row in rows]
            if isinstance(rows, range) and spans:
                spans = [(spans[0][0], spans[-1][1])]
            views = file.views(spans)
            data = views[0] if len(views) == 1 else b"".join(views)
            return self._named(np.frombuffer(data, dtype).reshape(len(rows), *shape[1:]))

        return read, shape[0], num_bytes, fitting_rows(shape[0], num_bytes, _BLOCK_ROWS)

    def _loaded(self, file: SourceFile) -> _Arrays:
        """The rows of a file that must be read as a whole."""
        with file.unpacked() as plain:
            loaded = npy.load(plain)
        arrays = loaded if isinstance(loaded, dict) else self._named(loaded)
        lengths = {name: len(array) if array.ndim else -1 for name, array in arrays.items()}
        num_rows = min(lengths.values(), default=-1)
        if num_rows < 0 or num_rows != max(lengths.values()):
            raise ValueError(f"its arrays must have one number of rows; found {lengths}")
        num_bytes = sum(array.nbytes for array in arrays.values())
        rows = max(1, int(num_rows * min(1.0, _WHOLE_BYTES / max(1, num_bytes))))  # few blocks: each reads all
        return (
            lambda some: {name: array[np.array(some, int)] for name, array in arrays.items()},
            num_rows,
            num_bytes,
            rows,
        )

    def _named(self, array: Any) -> dict[str, Any]:
        return {name: array[name] for name in array.dtype.names or ()} or {self.column: array}


def _arrow_array(array: Any) -> pa.Array:
    flat: Any = np.ascontiguousarray(array).reshape(-1)
    flat = flat.astype(flat.dtype.newbyteorder("="), copy=False)
    if flat.dtype.kind in "iuf":  # `pa.array` imports pandas, which takes a second
        flat = pa.Array.from_buffers(pa.from_numpy_dtype(flat.dtype), len(flat), [None, pa.py_buffer(flat)])
    else:
        flat = pa.array(flat)
    for size in reversed(array.shape[1:]):
        flat = pa.FixedSizeListArray.from_arrays(flat, size)
    return flat


@dataclass
class DatasetReader(TableReader):
    """Rows of a `datasets.Dataset` object, in its own order."""

    kind = "dataset"
    dataset: Any = field(repr=False)

    @property
    def files(self) -> tuple[SourceFile, ...]:
        """The dataset as one file, whose stamp is the fingerprint that the object has."""
        size = max(1, int(self.dataset.dataset_size or self.dataset.data.nbytes))
        return (SourceFile("", str(len(self.dataset)), size, str(vars(self.dataset)["_fingerprint"])),)

    def _table(self, plain: Any, file: SourceFile) -> Table:
        rows = self.dataset.with_format("arrow")
        schema = self.dataset.features.arrow_schema

        def read(block: range, _: Any) -> list[pa.RecordBatch]:
            return rows[block.start : block.stop].combine_chunks().to_batches()  # type: ignore[no-any-return]

        num_rows = len(self.dataset)
        block_rows = fitting_rows(num_rows, file.num_bytes, _BLOCK_ROWS)
        return _blocks(file, schema, num_rows, file.num_bytes, block_rows, read)
