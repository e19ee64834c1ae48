"""Open shards: mapped, with offsets that are checked once."""

from __future__ import annotations

import struct
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Unpack

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from lightning_stream.errors import FormatError

from .mds.gather import Mapped, gather
from .mds.layout import Reading, record_layout
from .memory import MappedFile, offsets_error, sample_offsets
from .model import ShardEntry
from .rows import as_mds, write_as_mds
from .samples import DECODE_ERRORS, Batch, Buffers, Ragged, corrupt_error

__all__ = ["DECODE_ERRORS", "Batch", "Buffers", "Ragged", "Shard", "open_shard"]

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
