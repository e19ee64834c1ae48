"""Arrow's own files, also those that Hugging Face's datasets save: cut between record batches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from lightning_stream.convert.files import SourceFile
from lightning_stream.convert.sources.base import Batch, Found, Reader, Span, present
from lightning_stream.convert.sources.hugging_face import features_of, with_files
from lightning_stream.errors import FormatError

_BATCH_BYTES, _MAX_ROWS = 1 << 23, 8192
_MAGIC = b"ARROW1"


@dataclass(frozen=True)
class IpcReader(Reader):
    """Rows of Arrow IPC files and streams (Feather too)."""

    kind = "arrow"

    def find_columns(self, files: Sequence[SourceFile], asked: Mapping[str, str] | None) -> Found:
        """From the first file's schema."""
        with _opened(files[0]) as file:
            first = next((batch for batch in file.batches(0, None) if batch.num_rows), None)
            return features_of(file.schema, first, asked)

    def spans(self, file: SourceFile, partition_bytes: int) -> list[Span]:
        """Between record batches, where a file of this machine is larger than a part."""
        if file.num_bytes <= partition_bytes or file.path is None:
            return [Span(file, 0, None, file.num_bytes)]
        with _opened(file) as opened:
            sizes = [batch.nbytes for batch in opened.batches(0, None)]
        spans, begin, size = [], 0, 0
        for k, num_bytes in enumerate(sizes):
            size += num_bytes
            if size >= partition_bytes or k == len(sizes) - 1:
                spans.append(Span(file, begin, k + 1, size))
                begin, size = k + 1, 0
        return spans

    def read(self, span: Span, columns: Mapping[str, str]) -> Iterator[Batch]:
        """Pieces of about 8 MiB."""
        with _opened(span.file) as file:
            wanted = present(file.schema.names, columns, span.file)
            done = 0
            for batch in file.batches(span.begin, span.end):
                chosen = with_files(batch).select(wanted)
                rows = max(1, min(_MAX_ROWS, batch.num_rows * _BATCH_BYTES // max(1, chosen.nbytes)))
                for begin in range(0, batch.num_rows, rows):
                    piece = chosen.slice(begin, rows)
                    at = done + begin
                    where = f"{span.file.place}, rows {at:,} to {at + piece.num_rows:,} after batch {span.begin:,}"
                    yield Batch(piece, where)
                done += batch.num_rows


@dataclass(frozen=True)
class _Opened:
    file: SourceFile
    schema: Any
    reader: Any
    is_random: bool

    def batches(self, begin: int, end: int | None) -> Iterator[Any]:
        """Record batches by number."""
        try:
            if self.is_random:
                for k in range(begin, self.reader.num_record_batches if end is None else end):
                    yield self.reader.get_batch(k)
                return
            for k, batch in enumerate(self.reader):
                if end is not None and k >= end:
                    return
                if k >= begin:
                    yield batch
        except (pa.ArrowInvalid, OSError) as error:
            raise FormatError(f"{self.file.place} cannot be read as Arrow: {error}") from error


@contextmanager
def _opened(file: SourceFile) -> Iterator[_Opened]:
    """The file, mapped if it is on this machine.

    Raises:
        FormatError: It is no Arrow file.
    """
    with pa.PythonFile(file.open(), "r") if file.path is None else pa.memory_map(str(file.path)) as plain:
        try:
            is_random = plain.read(len(_MAGIC)) == _MAGIC
            plain.seek(0)
            reader = pa.ipc.open_file(plain) if is_random else pa.ipc.open_stream(plain)
        except (pa.ArrowInvalid, OSError) as error:
            raise FormatError(f"{file.place} is no Arrow file: {error}") from error
        with reader:
            yield _Opened(file, reader.schema, reader, is_random)
