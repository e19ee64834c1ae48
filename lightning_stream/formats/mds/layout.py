"""Which bytes of a sample are which column, once per schema."""

from __future__ import annotations

import struct
from collections.abc import Callable, Collection, Mapping
from types import SimpleNamespace
from typing import Any, NamedTuple, TypedDict, Unpack
from weakref import WeakValueDictionary

from lightning_stream.errors import FormatError
from lightning_stream.formats.encodings import ROW_ENCODINGS, Encoding, get_encoding
from lightning_stream.formats.encodings.base import AdaptedEncoding
from lightning_stream.formats.encodings.text import RowFault
from lightning_stream.formats.model import Schema

Decoders = Mapping[str, Callable[[bytes], Any]]


class Reading(TypedDict, total=False):
    """How the samples of a shard are read; see `open_shard`."""

    allow_unsafe_types: bool
    decoders: Decoders | None
    columns: Collection[str] | None


class Column(NamedTuple):
    """One column. ``decode`` gets a view of mapped memory, and copies the bytes that it keeps."""

    name: str
    encoding: Encoding  # of a column with a decoder of the caller: that decoder alone
    decode: Callable[[memoryview], Any]
    is_read: bool = True


class RecordLayout:
    """The columns of MDS samples, in the order of their bytes.

    A sample begins with its `head`, the sizes of the `num_variable` columns without a fixed size. If there are none,
    all samples have `stride` bytes (else None). A sample has at least `min_bytes`. The columns `unread` are skipped.
    """

    def __init__(self, columns: tuple[Column, ...]) -> None:
        self.columns = columns
        self.steps = tuple((column.name, column.decode, column.encoding.size) for column in columns)
        sizes = [size for _, _, size in self.steps]
        self.num_variable = sizes.count(None)
        self.head = struct.Struct(f"<{self.num_variable}I")
        fixed = sum(size or 0 for size in sizes)
        self.stride = None if self.num_variable else fixed
        self.min_bytes = self.head.size + fixed
        self.unread = tuple(column.name for column in columns if not column.is_read)


def encodings_of(schema: Schema) -> list[Encoding]:
    """Return the encodings of a schema's columns; FormatError if the index gives one another size.

    Rows are stored as MDS once they are fetched, in encodings of their own.
    """
    if schema.format != "mds":
        return [ROW_ENCODINGS[kind] for kind in schema.encodings]
    encodings = list(map(get_encoding, schema.encodings))
    for name, kind, size, encoding in zip(schema.names, schema.encodings, schema.sizes, encodings, strict=True):
        if encoding.size != size:
            raise FormatError(f"column {name!r}: the index says {size} bytes, but {kind!r} takes {encoding.size}.")
    return encodings


# Shards of one layout can be gathered together. A layout, and its users' decoders, live as long as a shard that has it.
_LAYOUTS: WeakValueDictionary[Any, RecordLayout] = WeakValueDictionary()


def record_layout(schema: Schema, **settings: Unpack[Reading]) -> RecordLayout:
    """Return the layout of a schema: the same object for the same arguments, while it is in use. See `open_shard`."""
    allow_unsafe_types = settings.get("allow_unsafe_types", False)
    columns = settings.get("columns")
    chosen = dict(settings.get("decoders") or {})
    encodings = encodings_of(schema)  # a name may be registered again for another encoding
    unread = frozenset() if columns is None else frozenset(schema.names).difference(columns)
    key = (
        schema.names,
        schema.encodings,
        schema.sizes,
        tuple(map(id, encodings)),
        allow_unsafe_types,
        frozenset(chosen.items()),
        unread,
    )
    if (layout := _LAYOUTS.get(key)) is not None:
        return layout
    if absent := set(chosen) - set(schema.names):
        raise ValueError(f"decoders: no column {min(absent)!r}; there are {', '.join(schema.names)}.")
    columns_read = []
    for name, encoding_name, encoding in zip(schema.names, schema.encodings, encodings, strict=True):
        if name in chosen:
            encoding = AdaptedEncoding(SimpleNamespace(decode=chosen[name], size=encoding.size))
        is_read = name not in unread
        if is_read and not encoding.safe and not allow_unsafe_types:
            raise ValueError(
                f"column {name!r} is stored as {encoding_name!r}: reading it can run code that is in the data. If you "
                "trust it, pass allow_unsafe_types=True."
            )
        # That a row could not be read is never passed over.
        decode = encoding.decode_view if is_read or isinstance(encoding, RowFault) else skip
        columns_read.append(Column(name, encoding, decode, is_read))
    return _LAYOUTS.setdefault(key, RecordLayout(tuple(columns_read)))


def skip(_: memoryview) -> None:
    """Decode nothing."""
