"""Row shards: JSON lines, and values with separators (CSV, TSV, XSV); a data file and a meta file of offsets.

They are read as the MDS shards that are made of them when they are fetched.
"""

from __future__ import annotations

import json
import operator
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from msgspec.structs import replace

from lightning_stream.errors import FormatError

from .encodings import plain_values
from .encodings.base import as_float, describe
from .mds.encode import MdsEncoder, ShardDraft
from .memory import MappedFile, sample_offsets
from .model import ROW_TYPES, SEPARATORS, FileEntry, Origin, Schema, ShardEntry, to_text
from .shard_encoder import EncodedBatch, column_error, offset_table

_decode_json = json.JSONDecoder().decode
ROWS = "rows"  # the kind of the origin of what is made of them
_BLOCK_BYTES = 1 << 20  # of rows that are encoded at once
_FAULT = "(the row)"
_ROW_ERRORS = (ArithmeticError, KeyError, RecursionError, TypeError, ValueError)  # not those of the machine
_ABSENT: dict[str, Any] = {"str": "", "int": 0, "float": 0.0}  # the values of a row that could not be read


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError("not a str")
    return value


def _int64(value: Any) -> int:
    integer = int(value) if isinstance(value, str) else operator.index(value)
    if not -1 << 63 <= integer < 1 << 63:
        raise ValueError(f"a number of {integer.bit_length()} bits is no int64")
    return integer


def _integer(value: Any) -> int:
    return _int64(operator.index(value))


_CASTS: dict[str, Callable[[Any], Any]] = {"str": _text, "int": _integer, "float": as_float}
_FROM_JSON = _CASTS | {"int": _int64}
_FROM_TEXT = _FROM_JSON | {"str": str, "float": float}


class RowEncoder:
    """Samples to the two files of a row shard; see `ShardEncoder`. The size limit is for the text."""

    per_sample_overhead = 0

    def __init__(self, schema: Schema) -> None:
        if wrong := {name: kind for name, kind in schema.columns.items() if kind not in ROW_TYPES}:
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
            if (
                isinstance(sample, Mapping)
                and name in sample
                and isinstance(error, (OverflowError, TypeError, ValueError))
            ):
                raise TypeError(f"column {name!r}: {kind} takes {kind}; got {describe(sample[name])}.") from error
            raise column_error(name, kind, sample, error) from error
        return [(self._row(values) + self._newline).encode()]

    def encode_batch(self, columns: dict[str, Any], num_rows: int) -> EncodedBatch:
        names = list(columns)
        values = [
            column.tolist() if isinstance(column, np.ndarray) else plain_values(column) for column in columns.values()
        ]
        rows = [self.encode(dict(zip(names, row, strict=True)))[0] for row in zip(*values, strict=True)]
        return EncodedBatch(np.fromiter(map(len, rows), np.int64, num_rows), [rows])

    def files(self, sizes: Sequence[int], parts: Sequence[Any]) -> tuple[tuple[str, list[Any]], ...]:
        return ("data", [self._header, *parts]), ("meta", [offset_table(sizes, len(self._header)), self._config])

    def _separated_row(self, values: dict[str, Any]) -> str:
        texts = {name: str(value) for name, value in values.items()}
        row = self._separator.join(texts.values())
        if row.split(self._separator) != [*texts.values()] or self._newline in row:
            for name, text in texts.items():
                self._check(name, text)
            raise ValueError(
                f"a joined row must not hold the newline, and the separator only between its values; got {row!r:.80}. "
                "Write JSON or MDS, or choose another separator."
            )
        return row

    def _check(self, name: str, text: str) -> None:
        for mark, value in (("separator", self._separator), ("newline", self._newline)):
            if value in text:
                raise ValueError(
                    f"column {name!r}: values of this format are not quoted, so none may hold the {mark} {value!r}; "
                    f"got {text!r:.80}. Write JSON or MDS, or choose another {mark}."
                )


def as_mds(entry: ShardEntry, mark: str = "") -> ShardEntry:
    """Return what a cache holds of a shard: of rows, an MDS shard that `write_as_mds` makes. ``mark`` is of the files.

    Other rows of the same name have another stamp. Its first column says why a row could not be read, so that the
    others can be: what to do about such a sample is left to who reads it.
    """
    if entry.format == "mds":
        return entry
    schema = entry.schema
    fault = _FAULT
    while fault in schema.names:
        fault += " "
    schema = replace(
        schema, names=(fault, *schema.names), encodings=("fault", *schema.encodings), sizes=(None, *schema.sizes)
    )
    origin = Origin(ROWS, entry.raw.basename, entry.raw.num_bytes, _stamp(entry, mark), 0, entry.num_samples)
    made = FileEntry(f"{entry.raw.basename}.mds", entry.raw.num_bytes, {}, origin=origin)
    return schema.shard(entry.num_samples, made)


def _stamp(entry: ShardEntry, mark: str) -> str:
    """Return what tells the rows of an entry, and how they are made MDS, from others."""
    return xxhash.xxh3_64_hexdigest(to_text(entry) + f"{_FAULT} {mark}".encode())


def write_as_mds(entry: ShardEntry, files: Sequence[Path], to: Path, mark: str = "") -> None:
    """Write the rows of a shard as an MDS shard; ``files`` are its raw ones, the rows and their offsets.

    FormatError for files that do not match the index.
    """
    made = as_mds(entry, mark)
    data, meta = (MappedFile(path, raw.num_bytes) for path, (raw, _) in zip(files, entry.files, strict=True))
    offsets = sample_offsets(meta.array, entry.num_samples, 0, data.num_bytes, meta.where).astype(np.int64)
    parse = _row_parser(entry.schema)
    absent = [_ABSENT[kind] for kind in entry.encodings]
    encoder = MdsEncoder.of_rows(made.schema, _stamp(entry, mark).encode())
    cuts = np.flatnonzero(np.diff(offsets[:-1] // _BLOCK_BYTES, prepend=-1)).tolist()
    with ShardDraft(encoder, entry.num_samples, to) as draft:
        for begin, end in pairwise([*cuts, entry.num_samples]):
            rows: list[Sequence[Any]] = []
            for first, last in pairwise(offsets[begin : end + 1].tolist()):
                try:
                    rows.append(["", *parse(bytes(data.view[first:last]))])
                except _ROW_ERRORS as error:
                    rows.append([f"{type(error).__name__}: {error!s:.300}", *absent])
            draft.add(dict(zip(made.names, zip(*rows, strict=True), strict=True)), len(rows))
        try:
            draft.finish()
        except ValueError as error:
            raise FormatError(f"{entry.raw.basename}: {error}") from error


def _row_parser(schema: Schema) -> Callable[[bytes], Sequence[Any]]:
    """Return a function from the bytes of a row to its values, in the order of the columns."""
    newline = (schema.newline or "\n").encode()
    separator = schema.separator or SEPARATORS.get(schema.format, ",")
    names = schema.names
    is_json = schema.format == "json"
    casts = [(_FROM_JSON if is_json else _FROM_TEXT)[kind] for kind in schema.encodings]

    def parse(stored: bytes) -> list[Any]:
        text = str(stored.removesuffix(newline), "utf-8")
        if is_json:
            row = _decode_json(text)
            if not isinstance(row, dict):
                raise TypeError("a row must be a JSON object")
            parts: Sequence[Any] = [row[name] for name in names]
        else:
            parts = text.split(separator)
            if len(parts) != len(names):
                raise ValueError(f"{len(names)} columns, but {len(parts)} values")
        return [cast(part) for cast, part in zip(casts, parts, strict=True)]

    return parse
