"""LitData's chunks: files of items, which its index.json describes. Pickled values are refused.

A chunk has the number of its items and their offsets (uint32), then the items: the sizes of an item's values (uint32),
then the values. Items of its token loader are one value without a size. Dicts of texts, numbers, lists and dicts are
empty items, and an Arrow file of all rows behind them: its size (uint32), and a mark, end the chunk. See
``litdata/streaming/writer.py``, ``item_loader.py`` and ``serializers.py`` in github.com/Lightning-AI/litdata.
"""

from __future__ import annotations

import io
import json
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import zstandard
from numpy.typing import NDArray

from lightning_stream.errors import FormatError, NotFoundError, needs
from lightning_stream.formats.encodings.base import BinaryColumn
from lightning_stream.formats.index import INDEX_NAME
from lightning_stream.formats.memory import Int64s
from lightning_stream.sources.base import Asked, Batch, Batches, Columns, Piece, Pieces, Reader, SourceSchema, present
from lightning_stream.sources.files import Files, SourceFile, readable, rows_at
from lightning_stream.threads import DaemonPool

# The dtypes by the numbers that LitData stores.
_TORCH = ["float32", "float32", "float64", "float64", "complex64", "complex64", "complex128", "complex128",
          "float16", "float16", "bfloat16", "uint8", "int8", "int16", "int16", "int32", "int32", "int64", "int64",
          "bool", "uint16"]  # fmt: skip
_NUMPY = ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32", "float64",
          "complex64", "complex128", "bool", "object", "bytes", "str", "void"]  # fmt: skip
_SCALARS = {"int": "int64", "float": "float64", "bool": "uint8"}
_STORED = {name: name for name in ("str", "pil", "jpeg", "bytes", "json")} | {"text": "str"}
_STORED |= dict.fromkeys(("video", "audio", "tifffile", "tiff", "nifti", "mesh", "pdf"), "bytes")
_OF_ROWS = {"str", "int", "float", "bool", "bytes", "json"}  # formats of values that may be Arrow rows
_ROWS_MARK = b"LDARW01\0"
_OTHER_LOADERS = {
    "ParquetLoader": "They are Parquet files: pass format='parquet'.",
    "TemporalArrayLoader": "Write them with its PyTreeLoader.",
}
_FRAMED = b"LDFZ01"
_FRAMED_HEAD = struct.Struct("<8sHHIII")
_FRAME_BYTES = 24
_TAGGED = ("<i8", "<f8", "bool")  # in the order of their tags
_UNUSABLE = ("complex64", "complex128", "bfloat16", "object", "bytes", "str", "void")


@dataclass
class LitDataReader(Reader):
    """Items of LitData's chunks.

    Attributes:
        names, formats: The column and LitData's format of each value of an item, in their order.
        compression: What is compressed with zstd: ``"chunk"``, ``"batch"`` (frames of several items) or ``"sample"``.
        has_sizes: Whether items begin with the sizes of their values.
        is_table: Of a shard: whether it may hold Arrow rows, so that no item can be read by itself.
    """

    kind = "litdata"
    is_cut_by_piece = True
    names: Sequence[str] = ()
    formats: Sequence[str] = ()
    compression: str | None = None
    has_sizes: bool = True
    is_table: bool = field(default=False, compare=False)

    def begin(self, files: Files) -> None:
        where = f"{files[0].root}/{INDEX_NAME}"
        try:
            text = files[0].beside(INDEX_NAME)
        except NotFoundError as error:
            raise FormatError(f"{files[0].uri} must lie beside LitData's {INDEX_NAME}. Copy that, too.") from error
        with readable(where, has_arguments=False):
            index = json.loads(text)
            config = index["config"]
            self.formats = [str(form) for form in config["data_format"]]
            self.compression = (config.get("compression_level") or "chunk") if config.get("compression") else None
            spec = json.loads(config["data_spec"])[1] if config.get("data_spec") else {}
            self.names = _leaves(spec) if spec else []
            may_have_rows = str(spec.get("type")).endswith("dict") and set(self.formats) <= _OF_ROWS
            self._types = dict(_types(config.get("types") or {})) if may_have_rows else {}
            self._chunks = {str(chunk["filename"]): int(chunk["chunk_size"]) for chunk in index["chunks"]}
        self.has_sizes = config.get("item_loader") != "TokensLoader"
        self.names = self.names if len(self.names) == len(self.formats) else list(map(str, range(len(self.formats))))
        for name in [name for name in self._types if name not in self.names]:
            if any(leaf.startswith(f"{name}.") for leaf in self.names):  # a tuple: its parts are the columns
                del self._types[name]
        self.is_table = bool(self._types)
        if (loader := config.get("item_loader")) in _OTHER_LOADERS:
            raise FormatError(f"{where}: chunks of LitData's {loader} cannot be read. {_OTHER_LOADERS[loader]}")
        if config.get("encryption"):
            raise FormatError(f"{where}: encrypted chunks cannot be read. Write them without encryption.")

    def find_columns(self, files: Files, asked: Asked | None) -> SourceSchema:
        """Return the columns of the index; ValueError for values that cannot be read, such as pickled ones."""
        formats = dict(zip(self.names, self.formats, strict=True))
        formats |= {name: form for name, (form, _) in self._types.items()}  # of all rows, not of the first alone
        wanted = formats if asked is None else [name for name in asked if name in formats]
        where = f"{files[0].root}: column"
        return SourceSchema({name: _encoding(formats[name], f"{where} {name!r}") for name in wanted})

    def scan(self, files: Files, columns: Columns, pool: DaemonPool) -> Iterator[Piece]:
        by_name = {file.name: file for file in files}
        settings = self.settings
        del settings["kind"]
        nulls = tuple(name for name, (_, is_optional) in self._types.items() if is_optional)
        for name, num_items in self._chunks.items():
            if (file := by_name.get(name)) is None:
                raise FormatError(f"{files[0].root}/{name} is in LitData's index, but not there. Copy it again.")
            present([*self.names, *self._types], columns, file)
            yield Piece(file, 0, num_items, file.num_bytes, num_items, settings, nulls)

    def read(self, splits: Pieces, columns: Columns) -> Batches:
        for split in splits:
            file = split.file
            data = split.file.view() if split.rows is None else None
            if data is None or (table := _arrow_rows(file, data)) is None:
                items = self._some(split) if data is None else self._items(file, data)
                yield Batch(self._cut(*items, file, columns), file.uri)
            else:
                yield from _table_batches(table, columns, file)

    def has_rows(self, file: SourceFile) -> bool:
        return self.compression is None and not self.is_table

    def _some(self, split: Piece) -> tuple[memoryview, Int64s]:
        """Some items of a chunk, and where each begins, and the last one ends."""
        file = split.file
        head = file.view(0, min(file.num_bytes, 8 + 4 * split.end if split.end else 0))
        offsets = self._offsets(file, head, file.num_bytes)
        spans = [(int(offsets[row]), int(offsets[row + 1])) for row in split.rows or ()]
        items = file.views(spans)
        return memoryview(b"".join(items)), np.cumsum([0, *map(len, items)])

    def _cut(self, data: memoryview, offsets: Int64s, file: SourceFile, columns: Columns) -> dict[str, Any]:
        """Cut items into the values of each column."""
        sizes = np.diff(offsets)[:, None]
        if self.has_sizes:
            head = 4 * len(self.names)
            if (sizes < head).any():
                raise FormatError(f"{file.uri} must be a chunk of LitData; it has an item of {sizes.min()} bytes.")
            heads = np.ascontiguousarray(rows_at(data, offsets[:-1], head)).view("<u4").astype(np.int64)
            if (heads.sum(axis=1) + head != sizes[:, 0]).any():
                raise FormatError(f"{file.uri} must be a chunk of LitData; an item's values do not fit it.")
            sizes = heads
        begins = offsets[1:, None] - np.cumsum(sizes[:, ::-1], axis=1)[:, ::-1]
        values = {
            name: _values(form, data, begins[:, k], sizes[:, k], f"{file.uri}: column {name!r}", columns[name])
            for k, (name, form) in enumerate(zip(self.names, self.formats, strict=True))
            if name in columns
        }
        return {name: values.get(name, [None] * (len(offsets) - 1)) for name in columns}

    def _items(self, file: SourceFile, data: memoryview) -> tuple[memoryview, Int64s]:
        """The uncompressed items of a chunk, and where each begins, and the last one ends."""
        if self.compression == "chunk":
            data = memoryview(_inflated(data))
        if self.compression == "batch" and data[: len(_FRAMED)] == _FRAMED:
            *_, count, _, num_frames = _FRAMED_HEAD.unpack_from(data)
            at = _FRAMED_HEAD.size + 4 * (count + 1)
            offsets = np.frombuffer(data[_FRAMED_HEAD.size : at], "<u4").astype(np.int64)
            view = memoryview(_inflated(data[at + _FRAME_BYTES * num_frames :]))
            self._check(file, offsets, count, len(view))
        else:
            view = data
            offsets = self._offsets(file, data, len(data))
        if self.compression == "sample":
            items = [_inflated(view[begin:end]) for begin, end in pairwise(offsets.tolist())]
            view = memoryview(b"".join(items))
            offsets = np.cumsum([0, *map(len, items)])
        return view, offsets

    def _offsets(self, file: SourceFile, head: memoryview, num_bytes: int) -> Int64s:
        """Where the items of a chunk begin, and the last one ends, from its beginning."""
        count = int.from_bytes(head[:4], "little")
        offsets = np.frombuffer(head[4 : min(8 + 4 * count, len(head) // 4 * 4)], "<u4").astype(np.int64)
        self._check(file, offsets, count, num_bytes)
        return offsets

    def _check(self, file: SourceFile, offsets: Int64s, count: int, num_bytes: int) -> None:
        if len(offsets) != count + 1 or int(offsets[-1]) > num_bytes or (np.diff(offsets) < 0).any():
            raise FormatError(f"{file.uri} must be a chunk of LitData; its offsets do not fit its {num_bytes:,} bytes.")


def _leaves(spec: Any, above: str = "") -> list[str]:
    """The names of the values of an item: keys of dicts, numbers in lists; joined by dots where they are nested."""
    children = spec.get("children_spec") or []
    if not children and spec.get("type") is None:
        return [above or "value"]
    keys = json.loads(spec["context"]) if str(spec.get("type")).endswith("dict") else range(len(children))
    dot = f"{above}." if above else ""
    return [name for key, child in zip(keys, children, strict=True) for name in _leaves(child, f"{dot}{key}")]


def _types(
    fields: Mapping[str, Any], above: str = "", is_optional: bool = False
) -> Iterator[tuple[str, tuple[str, bool]]]:
    """The name of each value of all rows, as `_leaves` names it, with its format, and whether it may be absent."""
    for key, spec in fields.items():
        kind = spec if isinstance(spec, dict) else {"type": spec}
        is_absent = is_optional or bool(kind.get("optional"))
        if kind.get("type") == "struct" and kind.get("fields"):
            yield from _types(kind["fields"], f"{above}{key}.", is_absent)
        elif kind.get("type") == "list" and kind.get("value") in ("int", "float"):
            yield f"{above}{key}", (f"list:{kind['value']}", is_absent)
        else:
            yield f"{above}{key}", (kind["type"] if kind["type"] in _OF_ROWS else "json", is_absent)


def _arrow_rows(file: SourceFile, data: memoryview) -> Any:
    """The Arrow table of a chunk that holds one behind empty items; None for another chunk."""
    count = int.from_bytes(data[:4], "little")
    head = bytes(data[4 : 8 + 4 * count])
    tail = len(data) - 4 - len(_ROWS_MARK)
    if data[-len(_ROWS_MARK) :] != _ROWS_MARK or head != (8 + 4 * count).to_bytes(4, "little") * (count + 1):
        return None
    with needs("pyarrow", "convert", f"reading the rows of {file.uri}"):
        import pyarrow as pa
    rows = data[tail - int.from_bytes(data[tail : tail + 4], "little") : tail]
    opened = pa.ipc.open_file if bytes(rows[:6]) == b"ARROW1" else pa.ipc.open_stream
    with readable(file.uri):
        table = opened(pa.py_buffer(rows)).read_all()
    if table.num_rows != count:
        raise FormatError(f"{file.uri} must hold {count:,} rows; found {table.num_rows:,}. Copy the chunk again.")
    return table


def _table_batches(table: Any, columns: Columns, file: SourceFile) -> Batches:
    import pyarrow as pa

    from lightning_stream.sources.tables import pieces_of

    done = 0
    fields = _fields(table)
    values = {name: fields.get(name, pa.nulls(table.num_rows)) for name in columns}
    for batch in pa.table(values).to_batches():
        for rows in pieces_of(batch):
            yield Batch(rows, f"{file.uri}, rows {done:,} to {done + rows.num_rows:,}")
            done += rows.num_rows


def _fields(table: Any) -> dict[str, Any]:
    """The columns of a table, and the fields of its structs, which `_leaves` names as Arrow does."""
    columns = dict(zip(table.column_names, table.columns, strict=True))
    flat = table.flatten()
    return columns if flat.schema == table.schema else {**_fields(flat), **columns}


def _encoding(form: str, where: str) -> str:
    kind, _, code = form.partition(":")
    if kind in _SCALARS:
        return _SCALARS[kind]
    if kind in _STORED:
        return _STORED[kind]
    if kind == "list":
        return f"ndarray:{_SCALARS[code]}"
    if kind in ("file", "image"):
        return "jpeg" if code in ("jpg", "jpeg") else "png" if code == "png" else "bytes"
    if kind in ("numpy", "tensor"):
        return "ndarray"
    if kind in ("no_header_numpy", "no_header_tensor") and code.isdecimal():
        dtype = (_NUMPY if kind == "no_header_numpy" else _TORCH)[int(code)]
        if dtype not in _UNUSABLE:
            return f"ndarray:{'uint8' if dtype == 'bool' else dtype}"
        form = f"{form} ({dtype})"
    why = "Unpickling would run code" if kind == "pickle" else "There is no encoding for it"
    raise ValueError(f"{where} has LitData's format {form!r}. {why}; omit it by columns=.")


def _values(form: str, data: memoryview, begins: Int64s, sizes: Int64s, where: str, wanted: str) -> Any:
    """The values of one column, as its encoding takes them; views of the chunk where that is possible."""
    kind, _, _ = form.partition(":")
    encoding = _encoding(form, where)
    if kind in _SCALARS:
        dtype = np.dtype(encoding)
        if (sizes != dtype.itemsize).any():
            raise FormatError(f"{where}: {form} takes {dtype.itemsize} bytes; found others. Copy the chunk again.")
        return rows_at(data, begins, dtype.itemsize).view(dtype)[:, 0]
    if encoding.startswith("ndarray:") and len(sizes) and sizes[0] and (sizes == sizes[0]).all():
        return rows_at(data, begins, int(sizes[0])).view(encoding.split(":")[1])
    views = [data[begin : begin + size] for begin, size in zip(begins.tolist(), sizes.tolist(), strict=True)]
    if kind in ("numpy", "tensor"):
        return [_array(view, _NUMPY if kind == "numpy" else _TORCH, where) for view in views]
    if encoding.startswith("ndarray:"):
        return [np.frombuffer(view, encoding.split(":")[1]) for view in views]
    if encoding == "json":
        values = [_json(bytes(view), where) for view in views]
        return [np.array(value, wanted.split(":")[1]) for value in values] if ":" in wanted else values
    column = BinaryColumn(views)
    column.encoding = encoding if encoding in ("str", "pil") else "bytes"
    return column


def _json(data: bytes, where: str) -> Any:
    """A nested value: as JSON, or in LitData's own binary form, which begins with a tag."""
    try:
        return json.loads(data) if data[:1] > b" " else _Tagged(data).value()
    except (ValueError, IndexError, RecursionError) as error:
        raise FormatError(f"{where}: a nested value cannot be read: {error}. Omit the column by columns=.") from error


class _Tagged:
    """Values one after another, each behind a tag."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def value(self) -> Any:
        match self._bytes(1)[0]:
            case 0:
                return json.loads(self._bytes(self._count()))
            case 1:
                return [self._text() for _ in range(self._count())]
            case 2 | 3 | 4 as tag:
                return self._numbers(_TAGGED[tag - 2], self._count())
            case 5:
                return {self._text(): self.value() for _ in range(self._count())}
            case 6:  # dicts with the same keys
                count = self._count()
                keys = [self._text() for _ in range(self._count())]
                return [{key: self.value() for key in keys} for _ in range(count if keys else 0)]
            case 7 | 0x11:
                return self._text()
            case 8 | 9 | 10 | 0x12 | 0x13 | 0x14 as tag:
                return self._numbers(_TAGGED[(tag - 8) % 10])[0]
            case 11 | 0x10:
                return None
            case tag:
                raise ValueError(f"its tag is {tag}")

    def _numbers(self, dtype: str, count: int = 1) -> list[Any]:
        numbers: list[Any] = np.frombuffer(self._bytes(np.dtype(dtype).itemsize * count), dtype).tolist()
        return numbers

    def _count(self) -> int:
        return int.from_bytes(self._bytes(4), "little")

    def _text(self) -> str:
        return self._bytes(self._count()).decode()

    def _bytes(self, count: int) -> bytes:
        data = self._data[self._at : self._at + count]
        if len(data) < count:
            raise IndexError(f"it has {len(self._data):,} bytes, too few")
        self._at += count
        return data


def _array(data: memoryview, dtypes: Sequence[str], where: str) -> NDArray[Any]:
    # Tensors of newer versions have a big-endian head. No array has 2**24 dimensions, so only one order makes sense.
    order = "<" if len(data) < 8 or data[4] else ">"
    code, num_dims = (0, 1 << 24) if len(data) < 8 else struct.unpack_from(f"{order}II", data)
    begin = 8 + 4 * num_dims
    dtype = dtypes[code] if code < len(dtypes) and begin <= len(data) else "void"
    if dtype in _UNUSABLE:
        raise FormatError(f"{where}: an array of {dtype} cannot be read. Omit the column by columns=.")
    shape = struct.unpack_from(f"{order}{num_dims}I", data, 8)
    return np.frombuffer(data[begin:], "uint8" if dtype == "bool" else dtype).reshape(shape)


def _inflated(data: Any) -> bytes:
    return zstandard.ZstdDecompressor().stream_reader(io.BytesIO(data), read_across_frames=True).read()
