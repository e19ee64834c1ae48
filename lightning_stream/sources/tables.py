"""Tables through pyarrow: Parquet and Arrow files. Types stay exact."""

from __future__ import annotations

import json
import logging
import os
import re
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import repeat
from typing import Any, NamedTuple

import pyarrow as pa

from lightning_stream.errors import FormatError
from lightning_stream.lazy import cached
from lightning_stream.sources.arrow import (
    arrow_columns,
    check_unit,
    common_type,
    nested_types,
    plain_type,
    plain_values,
)
from lightning_stream.sources.arrow_messages import Message, messages
from lightning_stream.sources.base import Asked, Batch, Batches, Columns, Piece, Pieces, Reader, SourceSchema, present
from lightning_stream.sources.files import Files, RangedFile, SourceFile, read_below, readable
from lightning_stream.sources.images import image_encoding
from lightning_stream.stores import Store
from lightning_stream.threads import DaemonPool

_LOG = logging.getLogger(__name__)
_BATCH_BYTES = 1 << 22  # less memory of a thread is touched than with 8 MiB
_MAX_ROWS = 8192
_CONNECTIONS = 16
_FOOTER_BYTES = 1 << 16
_MIN_FOOTER_BYTES = 1 << 12
_WINDOW_BYTES = 1 << 11  # for headers, from one to the next
_FOOTERS: dict[Any, Any] = {}  # of Parquet files
_SCHEMAS: dict[Any, Any] = {}
_SIGNATURE_BYTES = 28  # behind the footer of a Parquet file with encrypted columns
_SPARK = b"org.apache.spark.version"  # noted in files that it wrote
_FILES = ("Image", "Audio", "Video")  # features that are a struct of a file's bytes and its path


class Table(NamedTuple):
    """An open file: its schema, its pieces with their stored bytes, and the record batches of one, in some columns."""

    schema: pa.Schema
    pieces: Callable[[], Pieces]
    batches: Callable[[Piece, list[str] | None], Iterator[pa.RecordBatch]]


@dataclass
class TableReader(Reader):
    """Rows of files that hold Arrow record batches, or what becomes some.

    Attributes:
        media_root: The folder or URL of the files that images, sounds and videos without bytes name by a path.
    """

    is_cut_by_piece = True
    media_root: str | os.PathLike[str] | None = field(default=None, compare=False, kw_only=True)
    media: Store | None = field(default=None, repr=False, kw_only=True)
    # The types of the first file, and what compares others with them: of columns that are not asked for as texts.
    types: Mapping[str, tuple[pa.DataType, Any]] = field(default_factory=dict, init=False, compare=False, repr=False)

    def find_columns(self, files: Files, asked: Asked | None) -> SourceSchema:
        """Read the first file's schema; columns in the names of folders come behind its own."""
        with self._opened(files[0], headers=True) as table:
            schema = table.schema
            wanted = dict.fromkeys(schema.names) if asked is None else asked
            media = [name for name in _media_of(schema) if name in wanted]
        firsts = dict[str, bytes]()
        if media:
            with self._opened(files[0]) as table:
                batches = (batch for piece in table.pieces() for batch in table.batches(piece, media))
                if batch := next((batch for batch in batches if batch.num_rows), None):
                    firsts = {name: _first_value(batch.column(name), files[0], self.media) for name in media}
        folders = [file.partition for file in files]
        for name in [name for name in folders[0] if name not in schema.names]:
            texts = {folder.get(name) for folder in folders}
            is_number = all(text is not None and re.fullmatch(r"-?[0-9]{1,18}", text) for text in texts)
            is_number &= not str(wanted.get(name)).startswith("str")
            schema = schema.append(pa.field(name, pa.int64() if is_number else pa.string()))
        source_schema = _source_schema(schema, firsts, asked)
        types = {
            name: plain_type(schema.field(name).type)
            for name in source_schema.columns
            if not (name in folders[0] or name in media or wanted[name] in ("str", "json"))
        }
        self.types = {name: (kind, check_unit if wanted[name] else common_type) for name, kind in types.items()}
        if empty := [name for name, kind in types.items() if pa.types.is_null(kind) and not wanted[name]]:
            _LOG.warning("%s: %s can only be null, and becomes json.", files[0].uri, ", ".join(empty))
        nulls = {name for folder in folders for name, text in folder.items() if text is None}
        columns = {name: "json" if name in nulls else encoding for name, encoding in source_schema.columns.items()}
        return replace(source_schema, columns=columns)

    def read(self, splits: Pieces, columns: Columns) -> Batches:
        for split in _joined(splits):
            done = 0
            after = f" after number {split.begin:,} of its pieces" if split.begin else ""
            with self._opened(split.file) as table:
                constants = self._constants(table.schema.names, columns, split.file)
                stored = [name for name in columns if name not in constants]
                media = [name for name in _media_of(table.schema) if name in stored]
                for batch in table.batches(split, stored or table.schema.names[:1]):
                    for name in media:
                        values = _file_bytes(batch.column(name), split.file, self.media)
                        batch = batch.set_column(batch.schema.names.index(name), name, values)
                    for piece in pieces_of(batch.select(stored) if stored else batch, where=f"{split.file.uri}: "):
                        rows = with_constants(piece, constants).select(list(columns))
                        yield Batch(rows, f"{split.file.uri}, rows {done:,} to {done + piece.num_rows:,}{after}")
                        done += piece.num_rows

    def pieces_of(self, file: SourceFile, columns: Columns) -> list[Piece]:
        with self._opened(file, headers=True) as table:
            try:
                constants = self._constants(table.schema.names, columns, file)
                stored = [name for name in columns if name not in constants]
                if stored:
                    _source_schema(table.schema, {}, {name: columns[name] for name in stored})
            except ValueError as error:
                raise FormatError(f"{file.uri}: {error}") from error
            others = tuple(name for name in (*table.schema.names, *file.partition) if name not in columns)
            media = _media_of(table.schema)
            types = self._other_types(table.schema, stored, file)
            return [
                piece._replace(
                    nulls=tuple(name for name in piece.nulls if name not in media),
                    others=others,
                    types=types,
                    marks=f"{file.mark} {self.media.identity}" if self.media else "",
                )
                for piece in table.pieces()
                if piece.num_rows
            ]

    def _other_types(self, schema: pa.Schema, stored: Sequence[str], file: SourceFile) -> dict[str, pa.DataType]:
        """The types of columns for which those of the first file are too narrow."""
        types = {}
        for name in self.types.keys() & set(stored):
            former, common = self.types[name]
            try:
                types[name] = common(former, plain_type(schema.field(name).type))
            except ValueError as error:
                raise FormatError(
                    f"all files must have types that fit those of the first; column {name!r} of {file.uri} does not: "
                    f"{error}. Cast it, or name the encodings: columns={{{name!r}: ...}}."
                ) from error
        return {name: kind for name, kind in types.items() if kind != self.types[name][0]}

    def _constants(self, names: Sequence[str], columns: Columns, file: SourceFile) -> dict[str, tuple[Any, str]]:
        """The values of the columns that are in the names of a file's folders, with their Arrow types."""
        folders = {name: text for name, text in file.partition.items() if name not in names and name in columns}
        present([*names, *folders], columns, file)
        numbers = {"int": "int64", "uint": "int64", "float": "float64"}
        kinds = {name: numbers.get(columns[name].rstrip("0123456789"), "string") for name in folders}
        return {name: (text, kinds[name]) for name, text in folders.items()}

    @contextmanager
    def _opened(self, file: SourceFile, headers: bool = False) -> Iterator[Table]:
        """A file, or only what its headers hold."""
        with readable(file.uri), self._plain(file, headers and file.path is None) as plain:
            yield self._table(plain, file)

    def _plain(self, file: SourceFile, tail: bool) -> Any:
        """The file, or what its end alone gives."""
        return nullcontext()

    @abstractmethod
    def _table(self, plain: Any, file: SourceFile) -> Table: ...


def _joined(splits: Pieces) -> list[Piece]:
    """Join pieces that follow each other in a file, so that it is opened once."""
    joined: list[Piece] = []
    for split in splits:
        if joined and (joined[-1].file, joined[-1].end) == (split.file, split.begin):
            joined[-1] = joined[-1]._replace(end=split.end)
        else:
            joined.append(split)
    return joined


def pieces_of(
    batch: pa.RecordBatch, most_rows: int = _MAX_ROWS, most_bytes: int = _BATCH_BYTES, where: str = ""
) -> Iterator[pa.RecordBatch]:
    """Cut a batch into pieces of about so many bytes, with columns of plain types. ValueError for what these lose."""
    rows = fitting_rows(batch.num_rows, batch.nbytes, most_rows, most_bytes)
    names = batch.schema.names
    for begin in range(0, batch.num_rows, rows):
        columns = []
        for name, column in zip(names, batch.slice(begin, rows).columns, strict=True):
            try:
                columns.append(plain_values(column))
            except pa.ArrowInvalid as error:
                raise ValueError(f"{where}column {name!r}: {error}. Write it in days or microseconds.") from error
        yield pa.RecordBatch.from_arrays(columns, names=names)


def with_constants(batch: pa.RecordBatch, constants: Mapping[str, tuple[Any, str]]) -> pa.RecordBatch:
    """Return the batch with columns that have one value in all rows, given with its Arrow type."""
    for name, (value, kind) in constants.items():
        batch = batch.append_column(name, pa.repeat(value, batch.num_rows).cast(_type_of(kind)))
    return batch


def _type_of(name: str) -> pa.DataType:
    """The type of a name: Arrow knows those that have no zone, precision or scale."""
    if match := re.fullmatch(r"timestamp\[(\w+), tz=(.+)\]", name):
        return pa.timestamp(*match.groups())
    if match := re.fullmatch(r"decimal128\((\d+), (-?\d+)\)", name):
        return pa.decimal128(*map(int, match.groups()))
    return pa.type_for_alias(name)


def fitting_rows(num_rows: int, num_bytes: int, most_rows: int = _MAX_ROWS, most_bytes: int = _BATCH_BYTES) -> int:
    """Return how many rows of a table have about so many bytes."""
    return max(1, min(most_rows, num_rows * most_bytes // max(1, num_bytes)))


@dataclass
class ParquetReader(TableReader):
    """Rows of Parquet files, cut between row groups."""

    kind = "parquet"

    def _plain(self, file: SourceFile, tail: bool) -> Any:
        """The file, or its footer as one, in one request, or two if it is long."""
        if not tail:
            return RangedFile(file, 0) if file.path is None else pa.BufferReader(file.view(is_read=False))
        size = min(file.num_bytes, max(_MIN_FOOTER_BYTES, min(_FOOTER_BYTES, file.num_bytes >> 8)))
        data = file.read(file.num_bytes - size, file.num_bytes)
        needed = int.from_bytes(data[-8:-4], "little") + 8
        if len(data) < needed <= file.num_bytes and data.endswith(b"PAR1"):
            data = file.read(file.num_bytes - needed, file.num_bytes - size) + data
        return pa.BufferReader(data)

    def _table(self, plain: Any, file: SourceFile) -> Table:
        import pyarrow.parquet as pq  # slow to import

        footer = cached(_FOOTERS, file.content, lambda _: _unsigned(pq.read_metadata(plain), plain), 32)
        in_us, in_ns = (
            pq.ParquetFile(
                plain,
                metadata=footer,
                pre_buffer=file.path is None,  # neighbours in one range
                coerce_int96_timestamp_unit=unit,
                page_checksum_verification=True,
            )
            for unit in ("us", "ns")
        )
        # Spark writes whole microseconds, also of years that no 64-bit number of nanoseconds has.
        opened = in_us if _SPARK in (footer.metadata or ()) else in_ns
        schema = opened.schema_arrow
        names = set(schema.names)
        doubtful = [kind for kind, other in zip(schema, in_us.schema_arrow, strict=True) if kind != other]

        def pieces() -> list[Piece]:
            groups = map(footer.row_group, range(footer.num_row_groups))
            return [
                Piece(file, k, k + 1, group.total_byte_size, group.num_rows, nulls=_nulls(group, names))
                for k, group in enumerate(groups)
            ]

        def batches(place: Piece, columns: list[str] | None) -> Iterator[pa.RecordBatch]:
            checked = pa.schema([kind for kind in doubtful if columns is None or kind.name in columns])
            for k in range(footer.num_row_groups)[place.begin : place.end]:
                group = footer.row_group(k)
                rows = fitting_rows(group.num_rows, group.total_byte_size)
                for batch in in_us.iter_batches(rows, [k], checked.names, use_threads=False) if checked else ():
                    batch.cast(checked)  # pyarrow reads what does not fit as another time
                yield from opened.iter_batches(rows, [k], columns, use_threads=False)

        return Table(schema, pieces, batches)


def _unsigned(footer: Any, plain: Any) -> Any:
    """The footer of a Parquet file; TypeError for one of encrypted columns, whose metadata make pyarrow abort."""
    plain.seek(-8, os.SEEK_END)
    if int.from_bytes(plain.read(4), "little") == footer.serialized_size + _SIGNATURE_BYTES:
        raise TypeError("its columns are encrypted")
    return footer


def _nulls(group: Any, names: Collection[str]) -> tuple[str, ...]:
    """The columns of a row group that have nulls, by its statistics, which know nothing of nested columns."""
    return tuple(
        column.path_in_schema
        for column in map(group.column, range(group.num_columns))
        if column.path_in_schema in names
        and (known := column.statistics) is not None
        and known.has_null_count
        and known.null_count
    )


def _known(schema: pa.Schema, nulls: Sequence[int]) -> tuple[str, ...]:
    """The columns of a record batch that have nulls, or whose nested values have some."""
    names = []
    at = 0
    for column in schema:
        end = at + len(list(nested_types(column.type)))
        if any(nulls[at:end]):
            names.append(column.name)
        at = end
    return tuple(names) if at == len(nulls) else ()


@dataclass
class ArrowReader(TableReader):
    """Rows of Arrow IPC files and streams (Feather too), cut between record batches, by bytes of the file."""

    kind = "arrow"

    def _plain(self, file: SourceFile, tail: bool) -> Any:
        return file.open(_WINDOW_BYTES)

    def _table(self, plain: Any, file: SourceFile) -> Table:
        head, schema = cached(_SCHEMAS, file.content, lambda _: _read_schema(plain, file), 256)

        def pieces() -> list[Piece]:
            return [
                Piece(file, begin, end, end - begin, rows, nulls=_known(schema, nulls))
                for begin, end, rows, _, nulls in messages(plain, file.uri, file.num_bytes)
                if rows is not None
            ]

        def batches(place: Piece, _: list[str] | None) -> Iterator[pa.RecordBatch]:
            stored = file.view(place.begin, place.end)
            inner = (kind for column_type in schema.types for kind in nested_types(column_type))
            if any(map(pa.types.is_dictionary, inner)):  # each batch needs all dictionaries before it
                before = (message for message in messages(plain, file.uri, file.num_bytes) if message.is_dictionary)
                spans = [(head.begin, head.end)]
                spans += [(message.begin, message.end) for message in before if message.begin < place.begin]
                parts = [file.view(*span) for span in spans]
                yield from pa.ipc.open_stream(pa.BufferReader(b"".join([*parts, stored])))
                return
            data = pa.BufferReader(stored)
            while data.tell() < len(stored):
                yield pa.ipc.read_record_batch(pa.ipc.read_message(data), schema)

        return Table(schema, pieces, batches)


def _read_schema(plain: Any, file: SourceFile) -> tuple[Message, pa.Schema]:
    head = next(messages(plain, file.uri, file.num_bytes))
    return head, pa.ipc.read_schema(pa.BufferReader(file.view(head.begin, head.end)))


def _source_schema(schema: pa.Schema, first: Mapping[str, bytes], asked: Asked | None) -> SourceSchema:
    """The columns of a schema: with what Hugging Face's ``datasets`` notes in it about images, classes and shapes.

    ``first``: the first values of the columns of images and the like, as far as they are known.
    """
    features = _noted(schema)
    media = _media_of(schema)
    for name in media:
        schema = schema.set(schema.get_field_index(name), pa.field(name, pa.binary()))
    columns = arrow_columns(schema, asked)
    for name, kind in features.items():
        if name not in columns or (asked is not None and asked[name] is not None):
            continue
        shape = kind.get("shape") if str(kind.get("_type")).startswith("Array") else None
        if name in media:
            columns[name] = image_encoding(first.get(name, b""))
        elif shape and all(shape) and columns.get(name, "").count(":") == 1:
            columns[name] += f":{','.join(map(str, shape))}"
    classes = {name: kind["names"] for name, kind in features.items() if kind.get("_type") == "ClassLabel"}
    notes: dict[str, Any] = {"schema": {column.name: str(column.type) for column in schema}}
    if classes:
        notes["classes"] = {name: names for name, names in classes.items() if name in columns}
    return SourceSchema(columns, notes, media=tuple(media))


def _first_value(column: pa.Array, file: SourceFile, media: Store | None) -> bytes:
    """The first value of a column of images and the like; empty where all are null."""
    rows = map(column.slice, range(len(column)), repeat(1))  # one by one: each may be a file of its own
    values = (_file_bytes(row, file, media)[0].as_py() for row in rows)
    return next(filter(None, values), b"")


def _file_bytes(column: pa.Array, file: SourceFile, media: Store | None) -> pa.Array:
    """A column of structs of bytes and path, or of plain bytes, as bytes; null where there is neither.

    FormatError where there is only a path, unless the store ``media`` holds the files.
    """
    if not pa.types.is_struct(column.type):
        return column
    import pyarrow.compute as pc  # slow to import

    data = pc.struct_field(column, "bytes")
    if not data.null_count:
        return data
    values = data.to_pylist()
    paths = pc.struct_field(column, "path").to_pylist()
    wanted = [k for k, (value, path) in enumerate(zip(values, paths, strict=True)) if value is None and path]
    if wanted:
        if media is None:
            raise FormatError(
                f"{file.uri} holds no bytes of some images or sounds, but only paths, e.g. {paths[wanted[0]]!r:.100}. "
                "Pass media_root=, the folder or URL of these files (of convert: source_options={'media_root': ...})."
            )
        with DaemonPool(_CONNECTIONS, "media") as pool:
            reads = pool.map(lambda k: read_below(media, paths[k]), wanted)
            for k, value in zip(wanted, reads, strict=True):
                values[k] = value
    return pa.array(values, pa.large_binary())


def _media_of(schema: pa.Schema) -> list[str]:
    """The columns of images, sounds and videos, as far as the schema notes them."""
    return [name for name, kind in _noted(schema).items() if kind.get("_type") in _FILES]


def _noted(schema: pa.Schema) -> dict[str, Any]:
    noted = (schema.metadata or {}).get(b"huggingface")
    features = (json.loads(noted).get("info", {}).get("features") or {}) if noted else {}
    return {name: kind for name, kind in features.items() if isinstance(kind, dict) and name in schema.names}
