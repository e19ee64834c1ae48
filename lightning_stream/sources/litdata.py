"""LitData's chunks: files of items, which its index.json describes. Pickled values are refused.

A chunk has the number of its items and their offsets (uint32), then the items: the sizes of an item's values (uint32),
then the values. Items of its token loader are one value without a size. See ``litdata/streaming/writer.py`` and
``serializers.py`` in github.com/Lightning-AI/litdata.
"""

from __future__ import annotations

import io
import json
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import zstandard
from numpy.typing import NDArray

from lightning_stream.errors import FormatError, NotFoundError
from lightning_stream.formats.encodings.base import BinaryColumn
from lightning_stream.formats.index import INDEX_NAME
from lightning_stream.sources.base import Asked, Batch, Found, InputSplit, Piece, Reader, batched, present
from lightning_stream.sources.files import SourceFile
from lightning_stream.sources.stretches import rows_at, stretch, stretches
from lightning_stream.threads import DaemonPool

# The dtypes by the numbers that LitData stores.
_TORCH = ["float32", "float32", "float64", "float64", "complex64", "complex64", "complex128", "complex128",
          "float16", "float16", "bfloat16", "uint8", "int8", "int16", "int16", "int32", "int32", "int64", "int64",
          "bool"]  # fmt: skip
_NUMPY = ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32", "float64",
          "complex64", "complex128", "bool", "object", "bytes", "str", "void"]  # fmt: skip
_SCALARS = {"int": "int64", "float": "float64", "bool": "uint8"}
_STORED = {name: name for name in ("str", "pil", "jpeg", "bytes", "json")} | {"video": "bytes", "tifffile": "bytes"}
_FRAMED, _FRAMED_HEAD, _FRAME_BYTES = b"LDFZ01", struct.Struct("<8sHHIII"), 24
_UNUSABLE = ("complex64", "complex128", "bfloat16", "object", "bytes", "str", "void")


@dataclass
class LitDataReader(Reader):
    """Items of LitData's chunks.

    Attributes:
        names, formats: The column and LitData's format of each value of an item, in their order.
        compression: What is compressed with zstd: ``"chunk"``, ``"batch"`` (frames of several items) or ``"sample"``.
        has_sizes: Whether items begin with the sizes of their values.
    """

    kind = "litdata"
    is_cut_by_piece = True
    names: Sequence[str] = ()
    formats: Sequence[str] = ()
    compression: str | None = None
    has_sizes: bool = True

    def begin(self, files: Sequence[SourceFile]) -> None:
        index = replace(files[0], name=INDEX_NAME, stamp="")
        try:
            about = json.loads(index.read())
            config = about["config"]
            self.formats = [str(one) for one in config["data_format"]]
            self.compression = (config.get("compression_level") or "chunk") if config.get("compression") else None
            self.names = _leaves(json.loads(config["data_spec"])[1]) if config.get("data_spec") else []
            self._chunks = {str(one["filename"]): int(one["chunk_size"]) for one in about["chunks"]}
        except NotFoundError as error:
            raise FormatError(f"{files[0].uri} must lie beside LitData's {INDEX_NAME}. Copy that, too.") from error
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise FormatError(f"{index.uri} is not an index of LitData ({error!r}). Write it again.") from error
        self.has_sizes = config.get("item_loader") != "TokensLoader"
        self.names = self.names if len(self.names) == len(self.formats) else list(map(str, range(len(self.formats))))
        if config.get("encryption"):
            raise FormatError(f"{index.uri}: encrypted chunks cannot be read. Write them without encryption.")

    def find_columns(self, files: Sequence[SourceFile], asked: Asked | None) -> Found:
        """Return the columns of the index; ValueError for values that cannot be read, such as pickled ones."""
        wanted = self.names if asked is None else [name for name in asked if name in self.names]
        formats = dict(zip(self.names, self.formats, strict=True))
        return Found({name: _encoding(name, formats[name], files[0].root) for name in wanted})

    def all_pieces(
        self, files: Sequence[SourceFile], columns: Mapping[str, str], pool: DaemonPool
    ) -> Iterator[tuple[SourceFile, Piece]]:
        by_name, settings = {file.name: file for file in files}, self.settings
        del settings["kind"]
        for name, num_items in self._chunks.items():
            if name not in by_name:
                raise FormatError(f"{files[0].root}/{name} is in LitData's index, but not there. Copy it again.")
            present(self.names, columns, by_name[name])
            yield by_name[name], Piece(0, num_items, num_items, by_name[name].num_bytes, settings)

    def read(self, splits: Sequence[InputSplit], columns: Mapping[str, str]) -> Iterator[Batch]:
        for split in splits:
            values = self._columns(split.file, columns)
            rows = (
                {name: _own(value) for name, value in zip(values, row, strict=True)}
                for row in zip(*values.values(), strict=True)
            )
            yield from batched((row, f"{split.file.uri}, item {number:,}") for number, row in enumerate(rows))

    def read_columns(self, split: InputSplit, columns: Mapping[str, str]) -> Iterator[Batch]:
        yield Batch(self._columns(split.file, columns), split.file.uri)

    def has_rows(self, file: SourceFile) -> bool:
        return self.compression is None

    def read_rows(self, split: InputSplit, columns: Mapping[str, str], rows: Sequence[int]) -> Iterator[Batch]:
        file = split.file
        head = stretch(file, 0, min(file.num_bytes, 8 + 4 * split.end if split.end else 0))
        offsets = self._offsets(file, head, file.num_bytes)
        spans = [(int(offsets[row]), int(offsets[row + 1])) for row in rows]
        found = stretches(file, spans)
        items = [found[span] for span in spans]
        yield Batch(self._cut(memoryview(b"".join(items)), np.cumsum([0, *map(len, items)]), file, columns), file.uri)

    def _columns(self, file: SourceFile, columns: Mapping[str, str]) -> dict[str, Any]:
        try:
            data, offsets = self._items(file)
        except (zstandard.ZstdError, struct.error) as error:
            raise FormatError(f"{file.uri} must be a chunk of LitData in zstd: {error}. Copy it again.") from error
        return self._cut(data, offsets, file, columns)

    def _cut(
        self, data: memoryview, offsets: NDArray[np.int64], file: SourceFile, columns: Mapping[str, str]
    ) -> dict[str, Any]:
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
        return {
            name: _values(name, form, data, begins[:, k], sizes[:, k], file)
            for k, (name, form) in enumerate(zip(self.names, self.formats, strict=True))
            if name in columns
        }

    def _items(self, file: SourceFile) -> tuple[memoryview, NDArray[np.int64]]:
        """The uncompressed items of a chunk, and where each begins, and the last one ends."""
        data = stretch(file)
        if self.compression == "chunk":
            data = memoryview(_inflated(data))
        if self.compression == "batch" and data[: len(_FRAMED)] == _FRAMED:
            *_, count, _, num_frames = _FRAMED_HEAD.unpack_from(data)
            at = _FRAMED_HEAD.size + 4 * (count + 1)
            offsets = np.frombuffer(data[_FRAMED_HEAD.size : at], "<u4").astype(np.int64)
            view = memoryview(_inflated(data[at + _FRAME_BYTES * num_frames :]))
        else:
            view, offsets = data, self._offsets(file, data, len(data))
            count = len(offsets) - 1
        if self.compression == "sample":
            items = [_inflated(view[begin:end]) for begin, end in pairwise(offsets.tolist())]
            view, offsets = memoryview(b"".join(items)), np.cumsum([0, *map(len, items)])
        self._check(file, offsets, count, len(view))
        return view, offsets

    def _offsets(self, file: SourceFile, head: memoryview, num_bytes: int) -> NDArray[np.int64]:
        """Where the items of a chunk begin, and the last one ends, from its beginning."""
        count = int.from_bytes(head[:4], "little")
        offsets = np.frombuffer(head[4 : min(8 + 4 * count, len(head) // 4 * 4)], "<u4").astype(np.int64)
        self._check(file, offsets, count, num_bytes)
        return offsets

    def _check(self, file: SourceFile, offsets: NDArray[np.int64], count: int, num_bytes: int) -> None:
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


def _encoding(name: str, form: str, where: str) -> str:
    kind, _, code = form.partition(":")
    if kind in _SCALARS:
        return _SCALARS[kind]
    if kind in _STORED:
        return _STORED[kind]
    if kind == "file":
        return "jpeg" if code in ("jpg", "jpeg") else "png" if code == "png" else "bytes"
    if kind in ("numpy", "tensor"):
        return "ndarray"
    if kind in ("no_header_numpy", "no_header_tensor") and code.isdecimal():
        dtype = (_NUMPY if kind == "no_header_numpy" else _TORCH)[int(code)]
        if dtype not in _UNUSABLE:
            return f"ndarray:{'uint8' if dtype == 'bool' else dtype}"
        form = f"{form} ({dtype})"
    why = "Unpickling would run code" if kind == "pickle" else "There is no encoding for it"
    raise ValueError(f"{where}: column {name!r} has LitData's format {form!r}. {why}; omit it by columns=.")


def _values(
    name: str, form: str, data: memoryview, begins: NDArray[np.int64], sizes: NDArray[np.int64], file: SourceFile
) -> Any:
    """The values of one column, as its encoding takes them; views of the chunk where that is possible."""
    kind, _, _ = form.partition(":")
    encoding, where = _encoding(name, form, file.uri), f"{file.uri}: column {name!r}"
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
        return [_json(bytes(view), where) for view in views]
    found = BinaryColumn(views)
    found.encoding = encoding
    return found


def _own(value: Any) -> Any:
    return bytes(value) if isinstance(value, memoryview) else value


def _json(data: bytes, where: str) -> Any:
    if data[:1] <= b" ":
        raise FormatError(f"{where}: a nested value is in LitData's own binary form. Omit the column by columns=.")
    return json.loads(data)


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
