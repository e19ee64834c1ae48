"""How the bytes of a sample fall into columns: worked out once per schema."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

from lightning_stream.formats.encodings import Encoding, encoding_of_column, family_of
from lightning_stream.formats.index.schema import Schema

Decoder = Callable[[Any], Any]


class Column(NamedTuple):
    """One column. ``decode`` may get a view of mapped memory, and copies what it keeps."""

    name: str
    encoding: Encoding
    size: int | None
    decode: Decoder
    decode_many: Callable[..., Any] | None
    gathered: bool  # plain numbers, not decoded by the caller's own function
    ragged: bool  # arrays that need not have one shape, decoded as stored


class RecordLayout:
    """The columns of MDS samples, ready to be read.

    Attributes:
        columns: In the order of the bytes.
        num_variable: How many have no fixed size: as many uint32 stand at a sample's head.
        head: Those sizes.
        stride: Bytes of every sample, if all columns are fixed.
        min_bytes: Bytes of the smallest possible sample.
    """

    def __init__(self, columns: tuple[Column, ...]) -> None:
        self.columns = columns
        self.num_variable = sum(column.size is None for column in columns)
        self.head = struct.Struct(f"<{self.num_variable}I")
        fixed = sum(column.size or 0 for column in columns)
        self.stride = None if self.num_variable else fixed
        self.min_bytes = self.head.size + fixed
        self.steps = tuple((column.name, column.decode, column.size) for column in columns)


# Shards of one layout can be gathered together. It lives as long as a shard that has it, and so do the users' decoders.
_LAYOUTS: WeakValueDictionary[Any, RecordLayout] = WeakValueDictionary()


def record_layout(
    schema: Schema, allow_unsafe_types: bool = False, decoders: Mapping[str, Callable[[bytes], Any]] | None = None
) -> RecordLayout:
    """The layout of a schema; the same object for the same arguments, while it is in use.

    Raises:
        ValueError: An encoding that is unknown, or unsafe and not allowed; a decoder for a column that is not there.
        FormatError: A fixed size that is not that of the encoding.
    """
    chosen = dict(decoders or {})
    families = tuple(map(family_of, schema.encodings))  # a name that is registered again is another encoding
    key = (schema.names, schema.encodings, schema.sizes, families, allow_unsafe_types, frozenset(chosen.items()))
    found = _LAYOUTS.get(key)
    if found is None:
        found = _LAYOUTS.setdefault(key, _make_layout(schema, allow_unsafe_types, chosen))
    return found


def _make_layout(schema: Schema, allow_unsafe_types: bool, decoders: Mapping[str, Decoder]) -> RecordLayout:
    if absent := set(decoders) - set(schema.names):
        raise ValueError(f"decoders: no column {min(absent)!r}; there are {', '.join(schema.names)}.")
    columns = []
    for name, encoding_name, size in zip(schema.names, schema.encodings, schema.sizes, strict=True):
        encoding = encoding_of_column(name, encoding_name, size)
        if not encoding.safe and not allow_unsafe_types and name not in decoders:
            raise ValueError(
                f"column {name!r} is stored as {encoding_name!r}: reading it can run code that the data brings along. "
                "If you trust where the data comes from, pass allow_unsafe_types=True."
            )
        columns.append(_column(name, encoding, size, decoders.get(name)))
    return RecordLayout(tuple(columns))


def _column(name: str, encoding: Encoding, size: int | None, chosen: Decoder | None) -> Column:
    decode = encoding.decode if chosen is None else chosen
    if chosen is not None or not getattr(encoding, "accepts_memoryview", False):
        decode = _of_bytes(decode)
    elif getattr(encoding, "fast_decode", None) is not None:
        decode = encoding.fast_decode or decode
    if chosen is not None:
        return Column(name, encoding, size, decode, None, gathered=False, ragged=False)
    many, ragged = getattr(encoding, "decode_many", None), getattr(encoding, "ragged", False)
    return Column(name, encoding, size, decode, many, getattr(encoding, "layout", None) is not None, ragged)


def _of_bytes(decode: Decoder) -> Decoder:
    return lambda data: decode(bytes(data))
