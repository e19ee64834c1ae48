"""Open row shards: JSON lines, and values with separators (CSV, TSV, XSV), each with a meta file of offsets."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_stream.errors import FormatError
from lightning_stream.formats.index.schema import ShardEntry
from lightning_stream.formats.mds.gather import buffer_array
from lightning_stream.formats.memory import MappedFile, sample_offsets
from lightning_stream.formats.shard import DECODE_ERRORS, Batch, Buffers, closed_error, corrupt_error

_TYPES: dict[str, Callable[[str], Any]] = {"str": str, "int": int, "float": float}
_decode_json = json.JSONDecoder().decode
_DTYPES = {"int": np.dtype("<i8"), "float": np.dtype("<f8")}


class RowShard:
    """An open shard of a row format; both its files are mapped."""

    mapped = None

    def __init__(self, entry: ShardEntry, folder: Path) -> None:
        if entry.raw_meta is None:
            raise FormatError(f"{entry.raw.basename}: an entry of format {entry.format} must have 'raw_meta'.")
        self.schema = entry.schema
        self.num_samples = entry.num_samples
        self._path = folder / entry.raw.basename
        self._casts = [_TYPES[kind] for kind in self.schema.encodings]  # the index was refused if there are others
        self._separator = self.schema.separator or ","
        self._newline = (self.schema.newline or "\n").encode()
        file = MappedFile(self._path, entry.raw.num_bytes)
        meta = MappedFile(folder / entry.raw_meta.basename, entry.raw_meta.num_bytes)
        # The offsets stay in the mapped file: 4 bytes a row, not 36 as in a list.
        offsets = sample_offsets(meta, self.num_samples, file.num_bytes)
        self._open: tuple[MappedFile, NDArray[np.uint32]] | None = (file, offsets)

    def sample(self, index: int) -> dict[str, Any]:
        """Return a sample as values by column name; see `Shard.sample`."""
        file, offsets = self._files()
        if not 0 <= index < self.num_samples:
            raise IndexError(f"sample {index} is out of range: {self._path} has {self.num_samples}.")
        return self._row(index, file.view[offsets.item(index) : offsets.item(index + 1)])

    def columns(self, indices: NDArray[np.int64], out: Buffers | None = None) -> Batch:
        """Return samples as columns: int64 and float64 arrays, and lists of str; see `Shard.columns`."""
        file, offsets = self._files()
        indices = np.asarray(indices, np.int64)
        wrong = indices[(indices < 0) | (indices >= self.num_samples)]
        if len(wrong):
            raise IndexError(f"sample {wrong[0]} is out of range: {self._path} has {self.num_samples}.")
        places = zip(indices.tolist(), offsets[indices].tolist(), offsets[indices + 1].tolist(), strict=True)
        samples = [self._row(index, file.view[begin:end]) for index, begin, end in places]
        batch: Batch = {}
        name = kind = ""
        try:
            for name, kind in self.schema.columns.items():
                values, dtype = [sample[name] for sample in samples], _DTYPES.get(kind)
                batch[name] = values if dtype is None else np.array(values, dtype)
        except (KeyError, OverflowError, ValueError, TypeError) as error:
            why = f"{type(error).__name__}: {error}"
            raise FormatError(f"{self._path}: column {name!r} must be {kind} in every sample ({why}).") from error
        for name, memory in (out or {}).items():
            column = batch.get(name)
            if not isinstance(column, np.ndarray):
                raise ValueError(f"out: no column {name!r} of numbers; there are {', '.join(self.schema.names)}.")
            batch[name] = buffer_array(memory, column.dtype, column.shape, name)
            batch[name][:] = column
        return batch

    def _files(self) -> tuple[MappedFile, NDArray[np.uint32]]:
        if self._open is None:
            raise closed_error(str(self._path))
        return self._open

    def _row(self, index: int, stored: memoryview) -> dict[str, Any]:
        parse = self._parse_json if self.schema.format == "json" else self._parse_values
        try:
            return parse(str(bytes(stored).removesuffix(self._newline), "utf-8"))
        except DECODE_ERRORS as error:
            raise corrupt_error(str(self._path), index, "(the row)", error) from error

    def _parse_json(self, text: str) -> dict[str, Any]:
        value = _decode_json(text)
        if not isinstance(value, dict):
            raise TypeError("a row must be a JSON object")
        for name in self.schema.names:
            value[name]  # KeyError if the column is missing
        return value

    def _parse_values(self, text: str) -> dict[str, Any]:
        names, parts = self.schema.names, text.split(self._separator)
        if len(parts) != len(names):
            raise ValueError(f"{len(names)} columns, but {len(parts)} values")
        return {name: cast(part) for name, cast, part in zip(names, self._casts, parts, strict=True)}

    def close(self) -> None:
        """Release the files; see `Shard.close`."""
        self._open = None
