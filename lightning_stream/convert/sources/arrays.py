"""NumPy files: rows are along the first axis."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from lightning_stream.convert.files import SourceFile
from lightning_stream.convert.sources.base import Batch, Found, Reader, Span, present
from lightning_stream.errors import FormatError
from lightning_stream.formats.encodings import get_encoding

_BATCH_BYTES = 1 << 23


@dataclass(frozen=True)
class NumpyReader(Reader):
    """Rows of ``.npy`` and ``.npz`` files.

    Attributes:
        column: Name of the one column of a ``.npy`` file; of a structured array, its fields are the columns.
    """

    kind = "numpy"
    column: str = "array"

    @property
    def settings(self) -> Mapping[str, Any]:
        """The column's name."""
        return {"kind": self.kind, "column": self.column}

    def find_columns(self, files: Sequence[SourceFile], asked: Mapping[str, str] | None) -> Found:
        """From the first file's arrays."""
        with self._opened(files[0]) as arrays:
            known = {name: _encoding(name, array) for name, array in arrays.items()}
        missing = [name for name in asked or () if name not in known]
        if missing:
            raise ValueError(f"{files[0].place} has {', '.join(known)}; not {', '.join(missing)}.")
        for encoding in (asked or {}).values():
            get_encoding(encoding)
        return Found(dict(asked or known), {})

    def spans(self, file: SourceFile, partition_bytes: int) -> list[Span]:
        """Between rows, where a ``.npy`` file is larger than a part."""
        if file.num_bytes <= partition_bytes or file.ending != ".npy":
            return [Span(file, 0, None, file.num_bytes)]
        with self._opened(file) as arrays:
            num_rows = len(next(iter(arrays.values())))
        count = min(num_rows, round(file.num_bytes / partition_bytes))
        cuts = [num_rows * k // count for k in range(count + 1)]
        return [Span(file, cuts[k], cuts[k + 1], file.num_bytes // count) for k in range(count)]

    def read(self, span: Span, columns: Mapping[str, str]) -> Iterator[Batch]:
        """About 8 MiB of rows at a time."""
        with self._opened(span.file) as arrays:
            present(list(arrays), columns, span.file)
            num_rows = len(next(iter(arrays.values())))
            row_bytes = sum(arrays[name].nbytes for name in columns) // max(1, num_rows)
            step = max(1, _BATCH_BYTES // max(1, row_bytes))
            end = num_rows if span.end is None else span.end
            for begin in range(span.begin, end, step):
                stop = min(end, begin + step)
                rows = {name: _rows(arrays[name][begin:stop]) for name in columns}
                yield Batch(rows, f"{span.file.place}, rows {begin:,} to {stop:,}")

    @contextmanager
    def _opened(self, file: SourceFile) -> Iterator[dict[str, Any]]:
        """The arrays by column, of one length.

        Raises:
            FormatError: Not a NumPy file, one of Python objects, or arrays that differ in length.
        """
        try:
            if file.ending == ".npy" and file.path is not None and not file.is_packed:
                yield self._checked({self.column: np.load(file.path, mmap_mode="r", allow_pickle=False)}, file)
                return
            with file.unpacked() as plain:
                found = np.load(plain, allow_pickle=False)
                held = {self.column: found} if isinstance(found, np.ndarray) else {k: found[k] for k in found.files}
            yield self._checked(held, file)
        except (ValueError, OSError, EOFError) as error:
            if isinstance(error, (FormatError, FileNotFoundError)):
                raise
            raise FormatError(f"{file.place} cannot be read as a NumPy file: {error}") from error

    def _checked(self, arrays: dict[str, Any], file: SourceFile) -> dict[str, Any]:
        lengths = {name: len(array) if array.ndim else None for name, array in arrays.items()}
        if len(set(lengths.values())) != 1 or None in lengths.values():
            raise FormatError(f"the arrays of {file.place} must have one number of rows; found {lengths}.")
        fields = arrays[self.column].dtype.names if list(arrays) == [self.column] else None
        return arrays if fields is None else {name: arrays[self.column][name] for name in fields}


def _encoding(name: str, array: Any) -> str:
    if array.dtype.kind == "b":
        array = array[:0].view(np.uint8)
    if array.dtype.kind in "US":
        return "str" if array.dtype.kind == "U" else "bytes"
    if array.dtype.kind not in "iuf":
        raise ValueError(f"column {name!r}: there is no encoding for dtype {array.dtype}. Leave it out by columns=.")
    shape = ",".join(map(str, array.shape[1:]))
    return f"ndarray:{array.dtype.name}:{shape}" if shape else str(array.dtype.name)


def _rows(array: Any) -> Any:
    rows = np.ascontiguousarray(array)
    if rows.dtype.kind in "US":
        return rows.tolist()
    return rows.view(np.uint8) if rows.dtype.kind == "b" else rows
