"""A batch as columns: numpy locates it over any number of shards, without a loop over samples."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from lightning_stream.errors import FormatError
from lightning_stream.formats.encodings.base import FlatArrays
from lightning_stream.formats.mds.layout import Column, RecordLayout
from lightning_stream.formats.memory import AddressWindow, Int64s
from lightning_stream.formats.shard import DECODE_ERRORS, Batch, Buffers, Mapped, Ragged, Shard, corrupt_error

T = TypeVar("T")
_Sizes: TypeAlias = "int | Int64s"
_Out: TypeAlias = "Buffers | None"
_Where = Callable[[int], str]
Group: TypeAlias = "tuple[Int64s, Batch]"
_Places: TypeAlias = list[tuple[Int64s, _Sizes]]  # of each column: positions in the window, and size or sizes


def gather(shards: Sequence[Shard], which: Int64s, indices: Int64s, out: Buffers | None = None) -> Batch:
    """Return one batch over many shards: row k is sample ``indices[k]`` of ``shards[which[k]]``.

    All shards have the same column names and encodings; `which` and `indices` are int64[n]. `out` has, by name of a
    fixed-size column, writable C-contiguous memory of n values, to be filled and returned; or it is a function that
    returns new memory of a number of bytes.

    ValueError for no shards, different columns, or an ``out`` that does not fit; IndexError for an index out of range;
    FormatError for damaged bytes.
    """
    if not shards:
        raise ValueError("gather needs at least one shard.")
    which, indices = np.asarray(which, np.int64), np.asarray(indices, np.int64)
    if len(which) != len(indices) or which.ndim != 1 or indices.ndim != 1:
        raise ValueError(f"which and indices must be of one length; got {which.shape} and {indices.shape}.")
    mapped = [shard.mapped for shard in shards]
    files = [one for one in mapped if one is not None and mapped[0] is not None and one.layout is mapped[0].layout]
    if len(files) != len(shards):
        columns = shards[0].schema.columns
        if any(shard.schema.columns != columns for shard in shards):
            raise ValueError("gather needs shards of the same columns; group the samples by their schema first.")
        return gather_mixed(shards, which, indices, dict.fromkeys(columns, True), out)
    spans = np.array([one.span for one in files], np.int64).T
    window = AddressWindow(int(spans[0].min()), int(spans[1].max()))
    _check_range(which, len(files), "shard")
    _check_range(indices, spans[3].take(which).view(np.uint64), "sample")
    where = lambda shard: files[shard].file.where  # noqa: E731
    return gather_rows(files[0].layout, window, spans.take(which, 1), which, indices, where, out)


def gather_mixed(
    shards: Sequence[Shard], which: Int64s, indices: Int64s, common: Mapping[str, bool], out: Buffers | None = None
) -> Batch:
    """As `gather`, over shards of different columns.

    `common` has all columns of the data, also those that this batch lacks: True for a column that all of the data has
    in one encoding. The others become `Ragged` lists, with None for a sample without the column.
    """
    return merge_groups(gather_groups(shards, which, indices), common, len(which), out)


def gather_groups(shards: Sequence[Shard], which: Int64s, indices: Int64s) -> list[Group]:
    """As `gather`, over shards of different columns: the rows of each group of shards, and their columns."""
    groups: dict[Any, list[int]] = {}
    for k, shard in enumerate(shards):
        mapped = shard.mapped
        groups.setdefault(k if mapped is None else mapped.layout, []).append(k)
    parts: list[Group] = []
    for layout, members in groups.items():
        rows = np.flatnonzero(np.isin(which, members))
        if isinstance(layout, int):  # a format that is not mapped is read shard by shard
            parts.append((rows, shards[layout].columns(indices[rows])))
            continue
        member = np.searchsorted(members, which[rows])
        parts.append((rows, gather([shards[k] for k in members], member, indices[rows])))
    return parts


def merge_groups(groups: Sequence[Group], common: Mapping[str, bool], num_rows: int, out: Buffers | None) -> Batch:
    """Put the columns of groups of rows, in ascending order each, in the order of all rows; see `gather_mixed`."""
    batch: Batch = {}
    out = {} if out is None or callable(out) else out
    for name, in_all in common.items():
        found = [(rows, part[name]) for rows, part in groups if name in part]
        if not in_all:
            batch[name] = _listed(found, num_rows)
        elif len(found) == 1 and name not in out:
            batch[name] = found[0][1]
        else:
            batch[name] = _in_order(name, found, num_rows, out)
    if wrong := [name for name in out if not isinstance(batch.get(name), np.ndarray)]:
        raise ValueError(f"out: no column {wrong[0]!r} of fixed size in all of the data.")
    return batch


def gather_rows(
    layout: RecordLayout, window: AddressWindow, spans: Int64s, which: Int64s, indices: Int64s, where: _Where, out: _Out
) -> Batch:
    """As `gather`, over mapped shards of one layout in one window, for samples that are known to be there.

    `spans`, int64[4, n], has the `Mapped.span` of each sample's shard; `where` names the shard of a number in `which`.
    """
    places, bad_row = _locate(layout, window, spans, indices)
    if bad_row is not None:
        name = where(int(which[bad_row]))
        raise FormatError(f"{name}, sample {indices[bad_row]}: its columns do not fill it. Fetch the shard again.")
    values: Batch = {}
    allocate, out = (out, {}) if callable(out) else (None, out or {})
    for column, (at, size) in zip(layout.columns, places, strict=True):
        if not column.is_read:
            continue
        if column.gathered and isinstance(size, int):
            memory = out.get(column.name) if allocate is None else allocate(len(at) * size)
            values[column.name] = _numbers(window, column, at, size, memory)
            continue
        if column.name in out:
            raise ValueError(f"out: column {column.name!r} has no fixed size, so it cannot be written to given memory.")
        decoded, row, error = _decoded(window, column, at, size)
        if error is not None:
            raise corrupt_error(where(int(which[row])), int(indices[row]), column.name, error) from error
        values[column.name] = Ragged(decoded) if column.ragged else decoded
    if unknown := set(out) - set(values):
        raise ValueError(f"out: no column {min(unknown)!r}; there are {', '.join(values)}.")
    return values


def flat_arrays(
    layout: RecordLayout, window: AddressWindow, spans: Int64s, indices: Int64s, names: Sequence[str]
) -> dict[str, FlatArrays] | None:
    """Where the numbers of some columns lie in the window; None if a column is not of 1-d arrays of one dtype."""
    places, bad_row = _locate(layout, window, spans, indices)
    if bad_row is not None:
        return None
    found: dict[str, FlatArrays] = {}
    for column, (at, size) in zip(layout.columns, places, strict=True):
        make = getattr(column.encoding, "flat_arrays", None) if column.decodes_as_stored else None
        if column.name in names and make is not None and (flat := make(window, at, size)) is not None:
            found[column.name] = flat
    return found if found.keys() == {*names} else None


def flat_copies(columns: Batch, names: Sequence[str]) -> tuple[dict[str, FlatArrays], memoryview]:
    """Some decoded columns as 1-d arrays in one memory.

    ValueError for a column that is absent; FormatError for values that are no 1-d arrays of one dtype.
    """
    flat, parts, at = {}, [], 0
    for name in dict.fromkeys(names):
        if name not in columns:
            raise ValueError(f"There is no column {name!r}; the dataset has {', '.join(columns)}.")
        arrays = [np.asarray(value) for value in columns[name]]
        dtype = arrays[0].dtype
        if any(array.ndim != 1 or array.dtype != dtype for array in arrays):
            found = sorted({f"{array.dtype}{list(array.shape)}" for array in arrays})[:3]
            raise FormatError(f"Column {name!r} must have 1-d arrays of one dtype; found {', '.join(found)}.")
        counts = np.array([len(array) for array in arrays], np.int64)
        ends = at + np.cumsum(counts) * dtype.itemsize
        flat[name] = FlatArrays(dtype, ends - counts * dtype.itemsize, counts)
        parts.append(np.concatenate(arrays).view(np.uint8))
        at = int(ends[-1])
    return flat, np.concatenate(parts).data


def _check_range(values: Int64s, limit: int | Int64s, what: str) -> None:
    wrong = values.view(np.uint64) >= limit  # as unsigned numbers, negative ones are too large
    if wrong.any():
        k = int(np.flatnonzero(wrong)[0])
        limit = np.asarray(limit)
        raise IndexError(f"{what} {values[k]} is out of range: there are {np.broadcast_to(limit, values.shape)[k]}.")


def _locate(layout: RecordLayout, window: AddressWindow, spans: Int64s, indices: Int64s) -> tuple[_Places, int | None]:
    """Locate each sample, by the table of offsets if their sizes differ, and each of its columns; or return a bad row.

    The table was checked when the file was opened. It is checked again, since a file that is changed meanwhile must not
    lead out of its memory.
    """
    sizes: Iterator[Int64s] = iter(())
    stop: Int64s | None = None
    if layout.stride is not None:
        at = spans[2] + (indices * layout.stride - window.begin)
    elif not len(indices):
        return [(indices, indices) for _ in layout.columns], None
    else:
        begins, ends = spans[0] - window.begin, spans[1] - window.begin
        offsets = _uint32s(window, begins + 4 + 4 * indices, 2)
        at, stop = begins + offsets[:, 0], begins + offsets[:, 1]
        out_of_bounds = (stop - at < layout.min_bytes) | (stop > ends)
        if out_of_bounds.any():
            return [], int(np.flatnonzero(out_of_bounds)[0])
        sizes = iter(_uint32s(window, at, layout.num_variable).T)
        at = at + layout.head.size
    places: _Places = []
    for column in layout.columns:
        size = next(sizes) if column.size is None else column.size
        places.append((at, size))
        at = at + size
    return places, None if stop is None or np.array_equal(at, stop) else int(np.flatnonzero(at != stop)[0])


def _uint32s(window: AddressWindow, at: Int64s, count: int) -> Int64s:
    return window.take(at, 4 * count).view("<u4").astype(np.int64)


def _numbers(window: AddressWindow, column: Column, at: Int64s, size: int, out: Any) -> NDArray[Any]:
    layout = column.encoding.layout
    assert layout is not None
    shape = (len(at), *layout.shape)
    if out is None:
        return window.take_as(layout.dtype, at, size).reshape(shape) if len(at) else np.empty(shape, layout.dtype)
    target = buffer_array(out, layout.dtype, shape, column.name)
    if len(at):
        window.take(at, size, target.reshape(-1).view(np.uint8).reshape(len(at), size))
    return target


def buffer_array(out: Any, dtype: np.dtype[Any], shape: tuple[int, ...], name: str) -> NDArray[Any]:
    """Return a caller's memory as an array to be filled; ValueError if it does not fit."""
    if isinstance(out, np.ndarray):
        array = out
    else:
        raw = np.frombuffer(out, np.uint8)
        needed = int(np.prod(shape)) * dtype.itemsize
        array = raw[:needed].view(dtype).reshape(shape) if len(raw) >= needed else raw
    if array.dtype != dtype or array.shape != shape or not array.flags.c_contiguous or not array.flags.writeable:
        found = f"{array.dtype} and shape {array.shape}"
        raise ValueError(f"out: column {name!r} takes writable C-contiguous {dtype} of shape {shape}; got {found}.")
    return array


def _decoded(window: AddressWindow, column: Column, at: Int64s, size: _Sizes) -> tuple[Any, int, Exception | None]:
    """Return the values; or the row that could not be decoded, and the error."""
    error: Exception | None = None
    if column.decode_many is not None and len(at):
        try:
            many = column.decode_many(window, at, size)
        except DECODE_ERRORS as raised:
            many, error = None, raised  # decoding the values one by one shows which of them it was
        if many is not None:
            found = len(many) if isinstance(many, list) or (isinstance(many, np.ndarray) and many.ndim) else None
            if found == len(at):
                return many, 0, None
            what = f"{found} values" if found is not None else type(many).__name__
            return many, 0, TypeError(f"decode_many gave {what}; it must give a list or an array of {len(at)}")
    view, decode = window.view, column.decode
    values: list[Any] = []
    try:
        for begin, end in zip(at.tolist(), (at + size).tolist(), strict=True):
            values.append(decode(view[begin:end]))
    except DECODE_ERRORS as raised:
        return None, len(values), raised
    return values, 0, error


def _in_order(
    name: str, parts: list[tuple[Int64s, Any]], num_rows: int, out: Mapping[str, Any]
) -> NDArray[Any] | list[Any]:
    first = parts[0][1]
    if isinstance(first, np.ndarray):
        shape = (num_rows, *first.shape[1:])
        target = buffer_array(out[name], first.dtype, shape, name) if name in out else np.empty(shape, first.dtype)
        for rows, values in parts:
            target[rows] = values
        return target
    merged = _listed(parts, num_rows)
    return merged if isinstance(first, Ragged) else list(merged)


def _listed(parts: list[tuple[Int64s, Any]], num_rows: int) -> Ragged:
    merged = Ragged([None] * num_rows)
    for rows, values in parts:
        for row, value in zip(rows.tolist(), values, strict=True):
            merged[row] = value
    return merged


class SpanTable:
    """The mapped shards of one layout among all shards of the data. Gathering is thread-safe, changing it is not.

    A gather first refers to `_outlived`, then looks the samples up. A shard is first marked as not here and then put
    into that list, so it stays mapped for every gather that has found it. numpy looks up many rows without holding
    Python's lock, so it could read a row that is half written: then `_changes` is odd, or another number afterwards.
    """

    def __init__(self, num_shards: int) -> None:
        self._spans: NDArray[np.int64] = np.zeros((num_shards, 4), np.int64)  # a shard that is not here has no samples
        self._held: dict[int, Mapped] = {}
        # Shards taken out since a gather began; the last element is the list of those taken out later.
        self._outlived: list[Any] = []
        self._layout: RecordLayout | None = None
        self._window: AddressWindow | None = None
        self._changes = 0

    def add(self, number: int, mapped: Mapped | None) -> None:
        """Add a mapped shard. One of another layout, or of a format that is not gathered, is ignored."""
        if mapped is None or (self._held and mapped.layout is not self._layout):
            return
        self._layout = mapped.layout
        self._held[number] = mapped
        begin, end, _, _ = mapped.span
        if self._window is not None:  # it only grows: nothing is read but the samples of shards that are here
            begin, end = min(begin, self._window.begin), max(end, self._window.end)
        if self._window is None or (begin, end) != (self._window.begin, self._window.end):
            self._window = AddressWindow(begin, end)
        self._set(number, mapped.span)  # last, so that the window holds every shard that is found

    def remove(self, number: int) -> None:
        """Remove a shard; it is unmapped when the gathers that have found it are done."""
        if (mapped := self._held.pop(number, None)) is not None:
            self._set(number, (0, 0, 0, 0))
            following: list[Any] = []
            self._outlived += (mapped, following)
            self._outlived = following

    def _set(self, number: int, span: tuple[int, int, int, int]) -> None:
        self._changes += 1
        self._spans[number] = span
        self._changes += 1

    def gather(self, numbers: Int64s, indices: Int64s, out: Buffers | None) -> Batch | None:
        """As `gather`, for samples ``indices[k]`` of shards ``numbers[k]``; None as `read`."""

        def gathered(layout: RecordLayout, window: AddressWindow, spans: Int64s) -> Batch:
            return gather_rows(layout, window, spans, numbers, indices, self._where, out)

        return self.read(numbers, indices, gathered)

    def read(
        self, numbers: Int64s, indices: Int64s, use: Callable[[RecordLayout, AddressWindow, Int64s], T]
    ) -> T | None:
        """The result of ``use`` with the layout, the window and the spans of samples, which stay mapped meanwhile.

        None if not all of these samples are here, or if the table was changed meanwhile.
        """
        keeps_mapped, layout, changes = self._outlived, self._layout, self._changes
        spans = self._spans.take(numbers, 0).T
        if changes % 2 or changes != self._changes:
            return None
        here = np.count_nonzero(indices.view(np.uint64) < spans[3].view(np.uint64))  # negative indices are huge then
        if layout is None or layout is not self._layout or self._window is None or here < len(indices):
            return None
        found = use(layout, self._window, spans)
        del keeps_mapped
        return found

    def _where(self, number: int) -> str:
        held = self._held.get(number)
        return f"shard {number}" if held is None else held.file.where
