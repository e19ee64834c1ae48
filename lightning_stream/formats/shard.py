"""Open shards: mapped, with offsets that are checked once; and columns gathered from several."""

from __future__ import annotations

import struct
from collections.abc import Collection, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Unpack

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from lightning_stream.errors import FormatError

from .mds.gather import Group, Mapped, SpanTable, gather_rows, merge_groups
from .mds.layout import Reading, record_layout
from .memory import Int64s, MappedFile, offsets_error, sample_offsets
from .model import ShardEntry
from .rows import as_mds, write_as_mds
from .samples import DECODE_ERRORS, Batch, Buffers, Ragged, corrupt_error

__all__ = ["DECODE_ERRORS", "Batch", "Buffers", "Ragged", "Shard", "gather", "gather_groups", "open_shard"]

_OFFSETS = struct.Struct("<II")


class Shard:
    """An open MDS shard; the arguments are those of `open_shard`. Reading is thread-safe.

    Its results never refer to the file. Until it is closed, it holds a mapping of its file (and, before Python 3.13, a
    file descriptor).
    """

    def __init__(self, entry: ShardEntry, folder: Path, **settings: Unpack[Reading]) -> None:
        columns = settings.get("columns")
        schema = entry.schema
        self.schema = schema if columns is None else schema.choose(columns)
        self.num_samples = entry.num_samples
        self._layout = record_layout(schema, **settings)
        self._path = folder / entry.raw.basename
        file = MappedFile(self._path, None if entry.raw.origin else entry.raw.num_bytes)
        offsets = sample_offsets(file.array, self.num_samples, 8 + 4 * self.num_samples, file.num_bytes, file.where)
        steps = offsets[1:] - offsets[:-1]
        right = steps >= self._layout.min_bytes if self._layout.stride is None else steps == self._layout.stride
        if not right.all():
            raise offsets_error(file.where, self.num_samples)
        span = (file.address, file.address + file.num_bytes, file.address + int(offsets[0]), self.num_samples)
        self._mapped: Mapped | None = Mapped(self._layout, file, span)

    @property
    def mapped(self) -> Mapped:
        """The mapped samples."""
        if self._mapped is None:
            raise ValueError(f"{self._path}: the shard is closed.")
        return self._mapped

    def sample(self, index: int) -> dict[str, Any]:
        """Return one sample; IndexError unless 0 <= index < num_samples, FormatError if it is damaged."""
        if not 0 <= index < self.num_samples:
            raise IndexError(f"sample {index} is out of range: {self._path} has {self.num_samples}.")
        view = self.mapped.file.view
        values: dict[str, Any] = {}
        name = "(its head)"
        try:
            begin, end = _OFFSETS.unpack_from(view, 4 + 4 * index)
            sizes = iter(self._layout.head.unpack_from(view, begin))
            at = begin + self._layout.head.size
            for name, decode, size in self._layout.steps:
                stop = at + (next(sizes) if size is None else size)
                values[name] = decode(view[at:stop])
                at = stop
        except DECODE_ERRORS as error:
            raise corrupt_error(str(self._path), index, name, error) from error
        if at != end or end > len(view):
            raise FormatError(f"{self._path}, sample {index}: its columns do not fill it. Fetch the shard again.")
        for name in self._layout.unread:
            del values[name]
        return values

    def stored(self, index: int) -> memoryview:
        """Return the bytes of the sample at ``index`` as they are in the file."""
        view = self.mapped.file.view
        begin, end = _OFFSETS.unpack_from(view, 4 + 4 * index)
        return view[begin:end]

    def columns(self, indices: NDArray[np.int64]) -> Batch:
        """Return samples as columns: an array (n, *shape) for fixed-size columns, a list of n values for others.

        `indices` is int64[n], each 0 <= index < num_samples, in any order, repeats allowed.
        """
        return gather([self], np.zeros(len(indices), np.int64), indices)

    def close(self) -> None:
        """Release the file. Later reads raise ValueError."""
        self._mapped = None


def open_shard(entry: ShardEntry, folder: Path, **settings: Unpack[Reading]) -> Shard:
    """Open a shard whose raw files are present below ``folder``, the dataset's local root.

    With ``allow_unsafe_types``, columns are read whose decoding can run code (``pkl``). ``decoders`` has functions from
    bytes, by column name, that replace the column's own decoding (MDS only). ``columns`` are those that are read; None
    for all.

    Rows are read from what a cache made of them, or else that is made now, in a temporary file.

    FormatError if the files do not match the index; ValueError for an encoding that is unknown, or not allowed.
    """
    made = as_mds(entry)
    if made is entry:
        return Shard(entry, folder, **settings)
    columns = settings.get("columns")
    settings["columns"] = entry.schema.names if columns is None else columns  # not why a row could not be read
    settings["decoders"] = None  # rows have no stored bytes
    if (folder / made.raw.basename).exists():
        return Shard(made, folder, **settings)
    with TemporaryDirectory(prefix="lightning-stream-") as scratch:
        path = Path(scratch) / Path(made.raw.basename).name
        write_as_mds(entry, [folder / raw.basename for raw, _ in entry.files], path)
        return Shard(replace(made, raw=replace(made.raw, basename=path.name)), path.parent, **settings)


def gather(
    shards: Sequence[Shard],
    which: Int64s,
    indices: Int64s,
    out: Buffers | None = None,
    names: Collection[str] | None = None,
) -> Batch:
    """Return one batch over many shards: row k is sample ``indices[k]`` of ``shards[which[k]]``.

    All shards have the same column names and encodings; `which` and `indices` are int64[n]. `out` has, by name of a
    fixed-size column, writable C-contiguous memory of n values, to be filled and returned; or it is a function that
    returns new memory of a number of bytes. Of ``names``, only these columns are read.

    ValueError for no shards, different columns, or an ``out`` that does not fit; IndexError for an index out of range;
    FormatError for damaged bytes.
    """
    if not shards:
        raise ValueError("gather needs at least one shard.")
    which = np.asarray(which, np.int64)
    indices = np.asarray(indices, np.int64)
    if which.shape != indices.shape or which.ndim != 1:
        raise ValueError(f"which and indices must be of one length; got {which.shape} and {indices.shape}.")
    columns = shards[0].schema.columns
    if any(shard.schema.columns != columns for shard in shards):
        raise ValueError("gather needs shards of the same columns; group the samples by their schema first.")
    _check_range(which, np.full_like(which, len(shards)), "shard")
    _check_range(indices, np.array([shard.num_samples for shard in shards])[which], "sample")
    groups = gather_groups(shards, which, indices, out, names)
    if len(groups) == 1:
        return groups[0][1]
    return merge_groups(groups, dict.fromkeys(groups[0][1], True), len(which), out)


def gather_groups(
    shards: Sequence[Shard],
    which: Int64s,
    indices: Int64s,
    out: Buffers | None = None,
    names: Collection[str] | None = None,
) -> list[Group]:
    """As `gather`, over shards of different columns: the rows of each group of shards, and their columns.

    ``out`` is for one group; `merge_groups` fills it for several.
    """
    layouts = [shard.mapped.layout for shard in shards]
    groups: list[Group] = []
    for layout in dict.fromkeys(layouts):
        table = SpanTable(len(shards))
        for index, shard in enumerate(shards):
            if layouts[index] is layout:
                table.add(index, shard.mapped)
        rows = np.flatnonzero(np.array([other is layout for other in layouts])[which])
        mapped_rows = table.find(which[rows], indices[rows])
        assert mapped_rows is not None
        groups.append((rows, gather_rows(mapped_rows, out if len(rows) == len(which) else None, names)))
    return groups


def _check_range(values: Int64s, limits: Int64s, what: str) -> None:
    wrong = np.flatnonzero(values.view(np.uint64) >= limits.view(np.uint64))  # negative ones are too large then
    if len(wrong):
        raise IndexError(f"{what} {values[wrong[0]]} is out of range: there are {limits[wrong[0]]}.")
