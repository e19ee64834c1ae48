"""Row shards: JSON lines, and values with separators (CSV, TSV, XSV); a data file and a meta file of offsets."""

from __future__ import annotations

import json
import operator
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_stream.errors import FormatError
from lightning_stream.formats.encodings.base import describe
from lightning_stream.formats.memory import MappedFile, sample_offsets
from lightning_stream.formats.model import ROW_TYPES, Schema, ShardEntry, to_text
from lightning_stream.formats.shard import DECODE_ERRORS, Batch, corrupt_error
from lightning_stream.formats.shard_encoder import EncodedBatch, column_error, offset_table

_TYPES: dict[str, Callable[[str], Any]] = {"str": str, "int": int, "float": float}
_decode_json = json.JSONDecoder().decode
_DTYPES = {"int": np.dtype("<i8"), "float": np.dtype("<f8")}


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError("not a str")
    return value


def _number(value: Any) -> float:
    if isinstance(value, (str, bytes)):
        raise TypeError("not a number")
    return float(value)


_CASTS: dict[str, Callable[[Any], Any]] = {"str": _text, "int": operator.index, "float": _number}


class RowEncoder:
    """Samples to the two files of a row shard; see `ShardEncoder`. The size limit is for the text."""

    per_sample_overhead = 0

    def __init__(self, schema: Schema) -> None:
        wrong = {name: kind for name, kind in schema.columns.items() if kind not in ROW_TYPES}
        if wrong:
            raise ValueError(f"row formats have columns of {', '.join(ROW_TYPES)}; got {wrong}. Write MDS for others.")
        self.schema = schema
        self._config = to_text(schema)
        self._casts = [(name, kind, _CASTS[kind]) for name, kind in schema.columns.items()]
        self._newline = schema.newline or "\n"
        self._separator = schema.separator or ","
        self._header = b""
        if schema.format != "json":
            for name in schema.names:
                self._check(name, name)
            self._header = (self._separator.join(schema.names) + self._newline).encode()
        self._row = partial(json.dumps, sort_keys=True) if schema.format == "json" else self._separated_row
        self.header_bytes = len(self._header)

    def encode(self, sample: Mapping[str, Any]) -> list[bytes]:
        values: dict[str, Any] = {}
        name = kind = ""
        try:
            for name, kind, cast in self._casts:  # noqa: B007 - for the error
                values[name] = cast(sample[name])
        except Exception as error:
            if isinstance(sample, Mapping) and name in sample and isinstance(error, (TypeError, ValueError)):
                raise TypeError(f"column {name!r}: {kind} takes {kind}; got {describe(sample[name])}.") from error
            raise column_error(name, kind, sample, error) from error
        return [(self._row(values) + self._newline).encode()]

    def encode_batch(self, columns: dict[str, Any], num_rows: int) -> EncodedBatch:
        names = list(columns)
        values = [column.tolist() if isinstance(column, np.ndarray) else column for column in columns.values()]
        rows = [self.encode(dict(zip(names, row, strict=True)))[0] for row in zip(*values, strict=True)]
        return EncodedBatch(np.fromiter(map(len, rows), np.int64, num_rows), [rows])

    def files(self, sizes: Sequence[int], parts: Sequence[Any]) -> tuple[tuple[str, list[Any]], ...]:
        return ("data", [self._header, *parts]), ("meta", [offset_table(sizes, len(self._header)), self._config])

    def _separated_row(self, values: dict[str, Any]) -> str:
        texts = {name: str(value) for name, value in values.items()}
        row = self._separator.join(texts.values())
        if row.count(self._separator) != len(texts) - 1 or self._newline in row:
            for name, text in texts.items():
                self._check(name, text)
            raise ValueError("a joined row must not hold the newline, or more separators than the columns need.")
        return row

    def _check(self, name: str, text: str) -> None:
        for mark, value in (("separator", self._separator), ("newline", self._newline)):
            if value in text:
                raise ValueError(
                    f"column {name!r}: values of this format are not quoted, so none may hold the {mark} {value!r}; "
                    f"got {text!r:.80}. Write JSON or MDS, or choose another {mark}."
                )


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
        file, offsets = self._files()
        if not 0 <= index < self.num_samples:
            raise IndexError(f"sample {index} is out of range: {self._path} has {self.num_samples}.")
        return self._row(index, file.view[offsets.item(index) : offsets.item(index + 1)])

    def columns(self, indices: NDArray[np.int64]) -> Batch:
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
        return batch

    def _files(self) -> tuple[MappedFile, NDArray[np.uint32]]:
        if self._open is None:
            raise ValueError(f"{self._path}: the shard is closed.")
        return self._open

    def _row(self, index: int, stored: memoryview) -> dict[str, Any]:
        names = self.schema.names
        try:
            text = str(bytes(stored).removesuffix(self._newline), "utf-8")
            if self.schema.format != "json":
                parts = text.split(self._separator)
                if len(parts) != len(names):
                    raise ValueError(f"{len(names)} columns, but {len(parts)} values")
                return {name: cast(part) for name, cast, part in zip(names, self._casts, parts, strict=True)}
            value: Any = _decode_json(text)
            if not isinstance(value, dict):
                raise TypeError("a row must be a JSON object")
            for name in names:
                value[name]  # KeyError if the column is missing
        except DECODE_ERRORS as error:
            raise corrupt_error(str(self._path), index, "(the row)", error) from error
        return value

    def close(self) -> None:
        self._open = None
