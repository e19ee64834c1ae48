"""Parquet files: cut between row groups, read one Arrow batch at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from lightning_stream.convert.files import SourceFile
from lightning_stream.convert.sources.base import Batch, Found, Reader, Span, present
from lightning_stream.convert.sources.hugging_face import features_of, with_files
from lightning_stream.errors import FormatError

_BATCH_BYTES = 1 << 23
_MAX_ROWS = 8192


@dataclass(frozen=True)
class ParquetReader(Reader):
    """Rows of Parquet files."""

    kind = "parquet"

    def find_columns(self, files: Sequence[SourceFile], asked: Mapping[str, str] | None) -> Found:
        """From the first file's schema."""
        with _opened(files[0]) as file:
            first = next(file.iter_batches(1), None)
            return features_of(file.schema_arrow, first, asked)

    def spans(self, file: SourceFile, partition_bytes: int) -> list[Span]:
        """Between row groups, where a file is larger than a part."""
        if file.num_bytes <= partition_bytes:
            return [Span(file, 0, None, file.num_bytes)]
        with _opened(file) as opened:
            meta = opened.metadata
            sizes = [_packed_bytes(meta.row_group(k)) for k in range(meta.num_row_groups)]
        spans, begin = [], 0
        for k in range(len(sizes)):
            size = sum(sizes[begin : k + 1])
            if size >= partition_bytes or k == len(sizes) - 1:
                spans.append(Span(file, begin, k + 1, size))
                begin = k + 1
        return spans

    def read(self, span: Span, columns: Mapping[str, str]) -> Iterator[Batch]:
        """Batches of about 8 MiB."""
        with _opened(span.file) as file:
            wanted = present(file.schema_arrow.names, columns, span.file)
            meta = file.metadata
            groups = range(span.begin, meta.num_row_groups if span.end is None else span.end)
            num_rows = sum(meta.row_group(k).num_rows for k in groups)
            num_bytes = sum(meta.row_group(k).total_byte_size for k in groups)
            rows = max(1, min(_MAX_ROWS, num_rows * _BATCH_BYTES // max(1, num_bytes)))
            done = sum(meta.row_group(k).num_rows for k in range(span.begin))
            try:
                for batch in file.iter_batches(rows, row_groups=list(groups), columns=wanted, use_threads=False):
                    yield Batch(with_files(batch), f"{span.file.place}, rows {done:,} to {done + batch.num_rows:,}")
                    done += batch.num_rows
            except (pa.ArrowInvalid, OSError) as error:
                raise FormatError(f"{span.file.place} cannot be read as Parquet: {error}") from error


def _packed_bytes(group: Any) -> int:
    return sum(group.column(k).total_compressed_size for k in range(group.num_columns))


def _opened(file: SourceFile) -> pq.ParquetFile:
    """The file, mapped if it is on this machine.

    Raises:
        FormatError: It is no Parquet file.
    """
    try:
        if file.path is not None:
            return pq.ParquetFile(file.path, memory_map=True)
        return pq.ParquetFile(pa.PythonFile(file.open(), "r"), pre_buffer=True)
    except pa.ArrowInvalid as error:
        raise FormatError(f"{file.place} is no Parquet file: {error}") from error
