"""NumPy files: rows are along the first axis."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from lightning_stream.convert.files import SourceFile
from lightning_stream.convert.sources.base import Batch, Found, InputSplit, Reader, chosen_columns, present
from lightning_stream.errors import FormatError, NotFoundError

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
        """Look at the first file's arrays."""
        known = {name: _encoding(name, array) for name, array in self._arrays(files[0]).items()}
        return Found(chosen_columns(known, asked, files[0].uri))

    def input_splits(self, file: SourceFile, partition_bytes: int) -> list[InputSplit]:
        """Cut between rows, where a ``.npy`` file is larger than a partition."""
        if file.num_bytes <= partition_bytes or file.ending != ".npy":
            return super().input_splits(file, partition_bytes)
        num_rows = len(next(iter(self._arrays(file).values())))
        count = max(1, min(num_rows, round(file.num_bytes / partition_bytes)))
        cuts = [num_rows * k // count for k in range(count + 1)]
        return [InputSplit(file, begin, end, file.num_bytes // count) for begin, end in pairwise(cuts)]

    def read(self, split: InputSplit, columns: Mapping[str, str]) -> Iterator[Batch]:
        """Yield about 8 MiB of rows at a time."""
        arrays = self._arrays(split.file)
        present(list(arrays), columns, split.file)
        num_rows = len(next(iter(arrays.values())))
        row_bytes = sum(arrays[name].nbytes for name in columns) // max(1, num_rows)
        step = max(1, _BATCH_BYTES // max(1, row_bytes))
        end = num_rows if split.end is None else split.end
        for begin in range(split.begin, end, step):
            stop = min(end, begin + step)
            rows = {name: _rows(arrays[name][begin:stop]) for name in columns}
            yield Batch(rows, f"{split.file.uri}, rows {begin:,} to {stop:,}")

    def _arrays(self, file: SourceFile) -> dict[str, Any]:
        """The arrays by column, of one length; a plain local file is mapped.

        Raises:
            FormatError: Not a NumPy file, one of Python objects, or arrays that differ in length.
        """
        try:
            if file.ending == ".npy" and file.path is not None and not file.is_packed:
                found = np.load(file.path, mmap_mode="r", allow_pickle=False)
            else:
                with file.unpacked() as plain:
                    found = np.load(plain, allow_pickle=False)
                    found = found if isinstance(found, np.ndarray) else {name: found[name] for name in found.files}
        except FileNotFoundError as error:
            raise NotFoundError(f"{file.uri} is gone.") from error
        except (ValueError, OSError, EOFError) as error:
            raise FormatError(f"{file.uri} cannot be read as a NumPy file: {error}") from error
        if isinstance(found, np.ndarray):
            names = found.dtype.names
            found = {self.column: found} if names is None else {name: found[name] for name in names}
        lengths = {name: len(array) if array.ndim else None for name, array in found.items()}
        if len(set(lengths.values())) != 1 or None in lengths.values():
            raise FormatError(f"the arrays of {file.uri} must have one number of rows; found {lengths}.")
        return found


def _encoding(name: str, array: Any) -> str:
    if array.dtype.kind == "b":
        array = array[:0].view(np.uint8)
    if array.dtype.kind in "US":
        return "str" if array.dtype.kind == "U" else "bytes"
    if array.dtype.kind not in "iuf":
        raise ValueError(f"column {name!r}: no encoding fits dtype {array.dtype}. Omit it by columns=.")
    shape = ",".join(map(str, array.shape[1:]))
    return f"ndarray:{array.dtype.name}:{shape}" if shape else str(array.dtype.name)


def _rows(array: Any) -> Any:
    rows = np.ascontiguousarray(array)
    if rows.dtype.kind in "US":
        return rows.tolist()
    return rows.view(np.uint8) if rows.dtype.kind == "b" else rows
