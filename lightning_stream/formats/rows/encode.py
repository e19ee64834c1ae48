"""Samples to rows of text: JSON lines, or values with separators; a data file and a meta file of offsets."""

from __future__ import annotations

import json
import operator
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from lightning_stream.formats.encodings.base import describe
from lightning_stream.formats.index.schema import ROW_TYPES, Schema
from lightning_stream.formats.shard_encoder import EncodedBatch, column_error, config_bytes, offset_table


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
        self._config = config_bytes(schema)
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
        """Return the sample's row; see `ShardEncoder.encode`."""
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
        """Encode row by row; see `ShardEncoder.encode_batch`."""
        names = list(columns)
        values = [column.tolist() if isinstance(column, np.ndarray) else column for column in columns.values()]
        rows = [self.encode(dict(zip(names, row, strict=True)))[0] for row in zip(*values, strict=True)]
        return EncodedBatch(np.fromiter(map(len, rows), np.int64, num_rows), parts=rows)

    def files(self, sizes: Sequence[int], parts: Sequence[Any]) -> tuple[tuple[str, list[Any]], ...]:
        """Return the shard's data and meta files; see `ShardEncoder.files`."""
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
