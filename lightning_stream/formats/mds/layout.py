"""How the bytes of a sample fall into columns: worked out once per schema."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

from lightning_stream.errors import FormatError
from lightning_stream.formats.encodings import get_encoding
from lightning_stream.formats.encodings.base import Encoding
from lightning_stream.formats.index.schema import Schema

Decoder = Callable[[Any], Any]


class Column(NamedTuple):
    """One column of a plan. ``decode`` may be handed a view of mapped memory, and copies what it keeps."""

    name: str
    encoding: Encoding
    size: int | None
    decode: Decoder
    gathered: bool  # plain numbers, not decoded by the caller's own function
    ragged: bool  # arrays that need not have one shape, decoded as stored


class RowPlan:
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


def plan_rows(
    schema: Schema, allow_unsafe_types: bool = False, decoders: Mapping[str, Callable[[bytes], Any]] | None = None
) -> RowPlan:
    """The plan of a schema; the same object for the same arguments.

    Raises:
        ValueError: An encoding that is unknown, or unsafe and not allowed; a decoder for a column that is not there.
        FormatError: A fixed size that is not that of the encoding.
    """
    chosen = tuple(sorted((decoders or {}).items(), key=lambda pair: pair[0]))
    return _plan_rows(schema.names, schema.encodings, schema.sizes, allow_unsafe_types, chosen)


@lru_cache(maxsize=256)
def _plan_rows(
    names: tuple[str, ...],
    encodings: tuple[str, ...],
    sizes: tuple[int | None, ...],
    allow_unsafe_types: bool,
    chosen: tuple[tuple[str, Decoder], ...],
) -> RowPlan:
    decoders = dict(chosen)
    if absent := set(decoders) - set(names):
        raise ValueError(f"decoders: no column {min(absent)!r}; there are {', '.join(names)}.")
    columns = []
    for name, encoding_name, size in zip(names, encodings, sizes, strict=True):
        encoding = get_encoding(encoding_name)
        if encoding.size != size:
            raise FormatError(
                f"column {name!r}: the index says {size} bytes, but {encoding_name!r} takes {encoding.size} "
                "(None: it varies). Fetch the index again."
            )
        if not encoding.safe and not allow_unsafe_types and name not in decoders:
            raise ValueError(
                f"column {name!r} is stored as {encoding_name!r}: reading it can run code that the data brings along. "
                "If you trust where the data comes from, pass allow_unsafe_types=True."
            )
        gathered = getattr(encoding, "layout", None) is not None and name not in decoders
        ragged = getattr(encoding, "ragged", False) and name not in decoders
        columns.append(Column(name, encoding, size, _decoder(encoding, decoders.get(name)), gathered, ragged))
    return RowPlan(tuple(columns))


def _decoder(encoding: Encoding, chosen: Decoder | None) -> Decoder:
    decode = encoding.decode if chosen is None else chosen
    if chosen is None and getattr(encoding, "takes_view", False):
        return getattr(encoding, "quick_decode", None) or decode
    return lambda data: decode(bytes(data))
