"""Which bytes of a sample are which column, once per schema."""

from __future__ import annotations

import struct
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

from lightning_stream.formats.encodings import ROW_ENCODINGS, Encoding, NumericLayout, encoding_of_column, maker_of
from lightning_stream.formats.encodings.base import FlatArrays, ViewEncoding
from lightning_stream.formats.encodings.text import RowFault
from lightning_stream.formats.model import Schema

Decoder = Callable[[Any], Any]
Decoders = Mapping[str, Callable[[bytes], Any]]


class Column(NamedTuple):
    """One column. ``decode`` may get a view of mapped memory, and copies the bytes that it keeps.

    The other ways to read it are those of its encoding; with a decoder of the caller, there are none.
    """

    name: str
    size: int | None
    decode: Decoder
    is_read: bool = True
    numbers: NumericLayout | None = None
    decode_many: Callable[..., Any] | None = None
    flat_arrays: Callable[..., FlatArrays | None] | None = None
    ragged: bool = False


class RecordLayout:
    """The columns of MDS samples, in the order of their bytes.

    A sample begins with its `head`, the sizes of the `num_variable` columns without a fixed size. If there are none,
    all samples have `stride` bytes (else None). A sample has at least `min_bytes`. The columns `unread` are skipped.
    """

    def __init__(self, columns: tuple[Column, ...]) -> None:
        self.columns = columns
        self.num_variable = sum(column.size is None for column in columns)
        self.head = struct.Struct(f"<{self.num_variable}I")
        fixed = sum(column.size or 0 for column in columns)
        self.stride = None if self.num_variable else fixed
        self.min_bytes = self.head.size + fixed
        self.steps = tuple((column.name, column.decode, column.size) for column in columns)
        self.unread = tuple(column.name for column in columns if not column.is_read)


def encodings_of(schema: Schema) -> list[Encoding]:
    """Return the encodings of a schema's columns; FormatError if the index gives one another size.

    Rows are stored as MDS once they are fetched, in encodings of their own.
    """
    if schema.format != "mds":
        return [ROW_ENCODINGS[kind] for kind in schema.encodings]
    return list(map(encoding_of_column, schema.names, schema.encodings, schema.sizes))


# Shards of one layout can be gathered together. A layout, and its users' decoders, live as long as a shard that has it.
_LAYOUTS: WeakValueDictionary[Any, RecordLayout] = WeakValueDictionary()


def record_layout(
    schema: Schema,
    allow_unsafe_types: bool = False,
    decoders: Decoders | None = None,
    columns: Collection[str] | None = None,
) -> RecordLayout:
    """Return the layout of a schema: the same object for the same arguments, while it is in use. See `open_shard`."""
    chosen = dict(decoders or {})
    # a name may be registered again for another encoding; rows have encodings of their own
    makers = tuple(map(maker_of, schema.encodings)) if schema.format == "mds" else ()
    unread = frozenset() if columns is None else frozenset(schema.names).difference(columns)
    key = (schema.names, schema.encodings, schema.sizes, makers, allow_unsafe_types, frozenset(chosen.items()), unread)
    if (found := _LAYOUTS.get(key)) is not None:
        return found
    if absent := set(chosen) - set(schema.names):
        raise ValueError(f"decoders: no column {min(absent)!r}; there are {', '.join(schema.names)}.")
    found_columns = []
    for name, encoding_name, encoding in zip(schema.names, schema.encodings, encodings_of(schema), strict=True):
        if name in unread:
            found_columns.append(_unread(name, encoding))
            continue
        if not encoding.safe and not allow_unsafe_types and name not in chosen:
            raise ValueError(
                f"column {name!r} is stored as {encoding_name!r}: reading it can run code that is in the data. If you "
                "trust it, pass allow_unsafe_types=True."
            )
        found_columns.append(_column(name, encoding, chosen.get(name)))
    return _LAYOUTS.setdefault(key, RecordLayout(tuple(found_columns)))


def skip(_: Any) -> None:
    """Decode nothing."""


def _unread(name: str, encoding: Encoding) -> Column:
    """Return a column that is not delivered; that a row could not be read is never passed over."""
    if isinstance(encoding, RowFault):
        return _column(name, encoding, None)._replace(is_read=False)
    return Column(name, encoding.size, skip, is_read=False)


def _column(name: str, encoding: Encoding, chosen: Decoder | None) -> Column:
    if chosen is None and isinstance(encoding, ViewEncoding):
        decode: Decoder = encoding.decode
    else:
        takes_bytes = encoding.decode if chosen is None else chosen
        decode = lambda data: takes_bytes(bytes(data))  # noqa: E731
    if chosen is not None:
        return Column(name, encoding.size, decode)
    return Column(
        name,
        encoding.size,
        decode,
        numbers=getattr(encoding, "layout", None),  # an object that is no `Encoding` may lack these
        decode_many=getattr(encoding, "decode_many", None),
        flat_arrays=getattr(encoding, "flat_arrays", None),
        ragged=getattr(encoding, "ragged", False),
    )
