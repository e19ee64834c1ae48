"""A batch as columns: numpy locates it over any number of shards, without a loop over samples."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from lightning_stream.errors import FormatError
from lightning_stream.formats.encodings.base import FlatArrays
from lightning_stream.formats.memory import AddressWindow, Int64s, MappedFile
from lightning_stream.formats.samples import DECODE_ERRORS, Batch, Buffers, Ragged, corrupt_error
from lightning_stream.threads import Lock

from .layout import Column, RecordLayout, skip

_Sizes: TypeAlias = "int | Int64s"
Group: TypeAlias = "tuple[Int64s, Batch]"
_Places: TypeAlias = list[tuple[Int64s, _Sizes]]  # of each column: positions in the window, and size or sizes


class Mapped(NamedTuple):
    """The samples of a mapped file, to be gathered."""

    layout: RecordLayout
    file: MappedFile
    span: tuple[int, int, int, int]  # addresses of the file, its end and its first sample; number of samples


class MappedRows(NamedTuple):
    """Samples that are in mapped shards of one layout, in one window: row k is ``indices[k]`` of ``files[which[k]]``.

    ``spans``, int64[4, n], has the `Mapped.span` of each sample's shard. The files stay mapped as long as this value.
    """

    layout: RecordLayout
    window: AddressWindow
    spans: Int64s
    which: Int64s
    indices: Int64s
    files: Mapping[int, Mapped]

    def where(self, row: int) -> str:
        """Return the name of a row's file."""
        return self.files[int(self.which[row])].file.where


class SpanTable:
    """The mapped shards of one layout among all shards of the data, by their numbers. Thread-safe."""

    def __init__(self, num_shards: int) -> None:
        self._spans: Int64s = np.zeros((num_shards, 4), np.int64)  # a shard that is not here has no samples
        self._files: dict[int, Mapped] = {}  # another dict after each removal: rows that were found keep the former
        self._layout: RecordLayout | None = None
        self._window: AddressWindow | None = None
        self._lock = Lock()

    def add(self, shard: int, mapped: Mapped) -> None:
        """Add a mapped shard. One of another layout is ignored."""
        with self._lock:
            if self._files and mapped.layout is not self._layout:
                return
            self._layout = mapped.layout
            begin, end, _, _ = mapped.span
            if self._window is not None:  # it only grows: nothing is read but the samples of shards that are here
                begin = min(begin, self._window.begin)
                end = max(end, self._window.end)
            self._window = AddressWindow(begin, end)
            self._files[shard] = mapped
            self._spans[shard] = mapped.span

    def remove(self, shard: int) -> None:
        """Remove a shard; it is unmapped when the rows that were found in it are gone."""
        with self._lock:
            self._spans[shard] = 0
            self._files = {other: mapped for other, mapped in self._files.items() if other != shard}

    def find(self, which: Int64s, indices: Int64s) -> MappedRows | None:
        """Return samples ``indices[k]`` of shards ``which[k]``; None if not all of them are here."""
        with self._lock:
            files = self._files
            layout = self._layout
            window = self._window
            spans = self._spans.take(which, 0).T
        here = np.count_nonzero(indices.view(np.uint64) < spans[3].view(np.uint64))  # negative indices are huge then
        if window is None or layout is None or here < len(indices):
            return None
        return MappedRows(layout, window, spans, which, indices, files)


def merge_groups(groups: Sequence[Group], common: Mapping[str, bool], num_rows: int, out: Buffers | None) -> Batch:
    """Put the columns of groups of rows, in ascending order each, in the order of all rows.

    `common` has all columns of the data, also those that this batch lacks: True for a column that all of the data has
    in one encoding. The others become `Ragged` lists, with None for a sample without the column.
    """
    batch: Batch = {}
    memory = {} if out is None or callable(out) else out
    for name, in_all in common.items():
        parts = [(rows, columns[name]) for rows, columns in groups if name in columns]
        first = parts[0][1] if in_all else Ragged()
        if in_all and len(parts) == 1 and name not in memory:
            batch[name] = first
        elif isinstance(first, np.ndarray):
            shape = (num_rows, *first.shape[1:])
            target = buffer_array(memory[name], first.dtype, shape, name) if name in memory else None
            batch[name] = merged = np.empty(shape, first.dtype) if target is None else target
            for rows, values in parts:
                merged[rows] = values
        else:
            batch[name] = listed = type(first)([None] * num_rows)
            for rows, values in parts:
                for row, value in zip(rows.tolist(), values, strict=True):
                    listed[row] = value
    if wrong := [name for name in memory if not isinstance(batch.get(name), np.ndarray)]:
        raise ValueError(f"out: no column {wrong[0]!r} of fixed size in all of the data.")
    return batch


def gather_rows(rows: MappedRows, out: Buffers | None, names: Collection[str] | None = None) -> Batch:
    """As `gather`, for samples that were found."""
    batch: Batch = {}
    memory = {} if out is None or callable(out) else out
    for column, (at, size) in zip(rows.layout.columns, _locate(rows), strict=True):
        name = column.name
        layout = column.encoding.layout
        if column.decode is skip or not (names is None or name in names):
            continue
        if layout is not None and isinstance(size, int):
            target = out(len(at) * size) if callable(out) else memory.get(name)
            batch[name] = _numbers(rows.window, column, at, size, target)
            continue
        if name in memory:
            raise ValueError(f"out: column {name!r} has no fixed size, so it cannot be written to given memory.")
        values = _decoded(rows, column, at, size)
        if column.is_read:
            batch[name] = Ragged(values) if column.encoding.ragged else values
    if unknown := set(memory) - set(batch):
        raise ValueError(f"out: no column {min(unknown)!r}; there are {', '.join(batch)}.")
    return batch


def flat_arrays(rows: MappedRows, names: Sequence[str]) -> dict[str, FlatArrays] | None:
    """Where the numbers of some columns lie in the window; None if a column is not of 1-d arrays of one dtype."""
    flat: dict[str, FlatArrays] = {}
    try:
        for column, (at, size) in zip(rows.layout.columns, _locate(rows), strict=True):
            if column.name in names and (arrays := column.encoding.flat_arrays(rows.window, at, size)) is not None:
                flat[column.name] = arrays
    except FormatError:  # reading the samples says which of them it is
        return None
    return flat if flat.keys() == {*names} else None


def flat_copies(columns: Batch, names: Sequence[str]) -> tuple[dict[str, FlatArrays], memoryview]:
    """Some decoded columns as 1-d arrays in one memory.

    ValueError for a column that is absent; FormatError for values that are no 1-d arrays of one dtype.
    """
    flat = {}
    parts = []
    at = 0
    for name in dict.fromkeys(names):
        if name not in columns:
            raise ValueError(f"There is no column {name!r}; the dataset has {', '.join(columns)}.")
        arrays = [np.asarray(value) for value in columns[name]]
        kinds = {f"{array.dtype} of {array.ndim} dimensions" for array in arrays}
        if len(kinds) > 1 or arrays[0].ndim != 1:
            raise FormatError(f"Column {name!r} must have 1-d arrays of one dtype; found {', '.join(sorted(kinds))}.")
        numbers = np.concatenate(arrays)
        counts = np.array(list(map(len, arrays)), np.int64)
        begins = at + (np.cumsum(counts) - counts) * numbers.itemsize
        flat[name] = FlatArrays(numbers.dtype, begins, counts)
        parts.append(numbers.view(np.uint8))
        at += numbers.nbytes
    return flat, np.concatenate(parts).data


def _locate(rows: MappedRows) -> _Places:
    """Locate each sample, by the table of offsets if their sizes differ, and each of its columns.

    The table was checked when the file was opened. It is checked again, since a file that is changed meanwhile must not
    lead out of its memory.
    """
    layout, window, spans, _, indices, _ = rows
    sizes: Iterator[Int64s] = iter(())
    stop: Int64s | None = None
    if layout.stride is not None:
        at = spans[2] + (indices * layout.stride - window.begin)
    else:
        begins = spans[0] - window.begin
        ends = spans[1] - window.begin
        offsets = _uint32s(window, begins + 4 + 4 * indices, 2)
        at = begins + offsets[:, 0]
        stop = begins + offsets[:, 1]
        _check_filled(rows, (stop - at < layout.min_bytes) | (stop > ends))
        sizes = iter(_uint32s(window, at, layout.num_variable).T)
        at = at + layout.head.size
    places: _Places = []
    for _, _, fixed in layout.steps:
        size = next(sizes) if fixed is None else fixed
        places.append((at, size))
        at = at + size
    if stop is not None:
        _check_filled(rows, at != stop)
    return places


def _check_filled(rows: MappedRows, is_wrong: NDArray[np.bool_]) -> None:
    if is_wrong.any():
        row = int(is_wrong.argmax())
        sample = f"{rows.where(row)}, sample {rows.indices[row]}"
        raise FormatError(f"{sample}: its columns do not fill it. Fetch the shard again.")


def _uint32s(window: AddressWindow, at: Int64s, count: int) -> Int64s:
    return window.take(at, 4 * count).view("<u4").astype(np.int64)


def _numbers(window: AddressWindow, column: Column, at: Int64s, size: int, out: Any) -> NDArray[Any]:
    layout = column.encoding.layout
    assert layout is not None
    shape = (len(at), *layout.shape)
    if out is None:
        return window.take(at, size).view(layout.dtype).reshape(shape)
    target = buffer_array(out, layout.dtype, shape, column.name)
    window.take(at, size, target.reshape(-1).view(np.uint8).reshape(len(at), size))
    return target


def buffer_array(out: Any, dtype: np.dtype[Any], shape: tuple[int, ...], name: str) -> NDArray[Any]:
    """Return a caller's memory as an array to be filled; ValueError if it does not fit."""
    if isinstance(out, np.ndarray):
        array = out
    else:
        raw = np.frombuffer(out, np.uint8)
        needed = math.prod(shape) * dtype.itemsize
        array = raw[:needed].view(dtype).reshape(shape) if len(raw) >= needed else raw
    if array.dtype != dtype or array.shape != shape or not array.flags.c_contiguous or not array.flags.writeable:
        actual = f"{array.dtype} and shape {array.shape}"
        raise ValueError(f"out: column {name!r} takes writable C-contiguous {dtype} of shape {shape}; got {actual}.")
    return array


def _decoded(rows: MappedRows, column: Column, at: Int64s, size: _Sizes) -> Any:
    """Return the values of a column; FormatError for the first that cannot be decoded."""
    cause: Exception | None = None
    values: Any = None
    try:
        values = column.encoding.decode_many(rows.window, at, size) if len(at) else []
    except DECODE_ERRORS as error:
        cause = error  # decoding the values one by one shows which of them it was
    row = 0
    if values is None:
        view = rows.window.view
        decode = column.decode
        values = []
        try:
            for begin, end in zip(at.tolist(), (at + size).tolist(), strict=True):
                values.append(decode(view[begin:end]))
        except DECODE_ERRORS as error:
            row = len(values)
            cause = error
    else:
        is_countable = isinstance(values, list) or (isinstance(values, np.ndarray) and values.ndim)
        if not is_countable or len(values) != len(at):
            what = f"{len(values)} values" if is_countable else type(values).__name__
            cause = TypeError(f"decode_many gave {what}; it must give a list or an array of {len(at)}")
    if cause is not None:
        raise corrupt_error(rows.where(row), int(rows.indices[row]), column.name, cause) from cause
    return values
