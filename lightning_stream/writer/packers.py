"""How each format turns samples into the bytes of shards: all that a writer needs to know of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from lightning_stream.formats.index.schema import Schema
from lightning_stream.formats.mds.pack import config_bytes, mds_file, mds_schema, row_files
from lightning_stream.formats.rows.encode import JsonEncoder, MdsEncoder, SeparatedEncoder
from lightning_stream.writer.batch_encode import EncodedBatch, encode_batch


class Packer(Protocol):
    """One format, with its columns known.

    Attributes:
        schema: What every shard entry says.
        empty_bytes: Bytes of the sized file without samples.
        extra_bytes: What a sample adds to that file beyond its own bytes.
    """

    schema: Schema
    empty_bytes: int
    extra_bytes: int

    def encode(self, sample: Mapping[str, Any]) -> list[bytes]:
        """A sample's bytes, in parts."""

    def encode_batch(self, columns: dict[str, Any], num_rows: int) -> EncodedBatch:
        """The bytes of a batch's rows."""

    def files(self, sizes: Sequence[int], parts: Sequence[Any]) -> tuple[tuple[str, list[Any]], ...]:
        """A shard's files: (``"data"`` or ``"meta"``, the file's bytes in parts)."""


class MdsPacker:
    """MDS: one file, offsets and columns' description in front."""

    extra_bytes = 4

    def __init__(
        self, columns: Mapping[str, str], compression: str | None, hashes: tuple[str, ...], size_limit: int | None
    ) -> None:
        self.schema = mds_schema(columns, compression, hashes, size_limit)
        self._config = config_bytes(self.schema)
        self.empty_bytes = 8 + len(self._config)
        self.encode = MdsEncoder(self.schema).encode

    def encode_batch(self, columns: dict[str, Any], num_rows: int) -> EncodedBatch:
        """The bytes of a batch's rows, column by column."""
        return encode_batch(self.schema, columns, num_rows)

    def files(self, sizes: Sequence[int], parts: Sequence[Any]) -> tuple[tuple[str, list[Any]], ...]:
        """The shard's file."""
        return (("data", mds_file(self._config, sizes, parts)),)


class RowPacker:
    """Row formats: a text file, and a meta file of offsets. The limit is for the text."""

    extra_bytes = 0

    def __init__(self, schema: Schema) -> None:
        self.schema = schema
        self._config = config_bytes(schema)
        if schema.format == "json":
            self.encode, self._header = JsonEncoder(schema).encode, b""
        else:
            encoder = SeparatedEncoder(schema)
            self.encode, self._header = encoder.encode, encoder.header
        self.empty_bytes = len(self._header)

    def encode_batch(self, columns: dict[str, Any], num_rows: int) -> EncodedBatch:
        """The bytes of a batch's rows, row by row."""
        names = list(columns)
        values = [column.tolist() if isinstance(column, np.ndarray) else column for column in columns.values()]
        rows = [self.encode(dict(zip(names, row, strict=True)))[0] for row in zip(*values, strict=True)]
        return EncodedBatch(np.fromiter(map(len, rows), np.int64, num_rows), parts=rows)

    def files(self, sizes: Sequence[int], parts: Sequence[Any]) -> tuple[tuple[str, list[Any]], ...]:
        """The shard's data and meta files."""
        data, meta = row_files(self._config, self._header, sizes, parts)
        return (("data", data), ("meta", meta))
