"""Where the record batches of an Arrow file lie, and how many rows each has, from the headers of its messages alone.

Arrow's own reader gives neither without reading the batches. Both layouts, files (Feather) and streams (Hugging Face's
cache and ``save_to_disk``), are messages one after another: a length, a FlatBuffers header, and a body. See
https://arrow.apache.org/docs/format/Columnar.html#serialization-and-interprocess-communication-ipc.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import BinaryIO, NamedTuple

from lightning_stream.errors import FormatError

MAGIC = b"ARROW1\0\0"
_END = b"ARROW1"
_CONTINUED = b"\xff\xff\xff\xff"
# Types of headers
_SCHEMA = 1
_DICTIONARY = 2
_RECORDS = 3
_MOST_HEADER = 1 << 28


class Message(NamedTuple):
    """One message: its bytes [begin, end) in the file; the rows of a record batch, None for any other message, and the
    nulls of its columns and of what is nested in them, in the order of the schema."""

    begin: int
    end: int
    num_rows: int | None
    is_dictionary: bool
    nulls: Sequence[int] = ()


def messages(file: BinaryIO, where: str, num_bytes: int) -> Iterator[Message]:
    """Yield the messages of a file or stream, the schema first. FormatError if it is none, or is cut off."""
    file.seek(0)
    start = file.read(len(MAGIC))
    is_first = True
    if start[:4] == b"FEA1":
        raise FormatError(f"{where} is a file of Feather version 1. Write it again as version 2.")
    is_file = start == MAGIC
    at = len(MAGIC) if is_file else 0
    if is_file:
        file.seek(max(at, num_bytes - len(_END)))
        if file.read(len(_END)) != _END:
            raise _damaged(where, "no mark at its end")
    while at < num_bytes:
        file.seek(at)
        start = file.read(8)
        head = 8 if start[:4] == _CONTINUED else 4  # without the mark before Arrow 0.15
        if len(start) < 8 and start[:4] != bytes(4):
            raise _damaged(where, f"{len(start)} bytes of a header at byte {at:,}")
        size = int.from_bytes(start[head - 4 : head], "little")
        if size == 0:
            if not is_file and at + head < num_bytes:
                raise _damaged(where, f"bytes behind the end of its stream, at byte {at:,}")
            return
        if size > _MOST_HEADER or at + head + size > num_bytes:
            raise _damaged(where, f"a header of {size:,} bytes at byte {at:,} of {num_bytes:,}")
        try:
            kind, body, rows, nulls = _parsed(start[head:] + file.read(size - 8 + head))
        except (struct.error, IndexError) as error:
            raise _damaged(where, f"a header at byte {at:,} that is no Arrow header ({error})") from error
        end = at + head + size + body
        if end > num_bytes or is_first != (kind == _SCHEMA):
            raise _damaged(where, f"a message of type {kind} from byte {at:,} to {end:,} of {num_bytes:,}")
        yield Message(at, end, rows if kind == _RECORDS else None, kind == _DICTIONARY, nulls)
        at = end
        is_first = False
    raise _damaged(where, f"no mark of the end in {num_bytes:,} bytes")


def _damaged(where: str, problem: str) -> FormatError:
    return FormatError(f"{where} must be an Arrow file or stream; found {problem}. It may be cut off: copy it again.")


def _parsed(header: bytes) -> tuple[int, int, int, Sequence[int]]:
    """The type of a message, the bytes of its body, and the rows and nulls of the record batch that it holds."""
    message = _Table(header, struct.unpack_from("<I", header)[0])
    kind = message.value(1, "<B")
    body = message.value(3, "<q")
    inner = message.offset(2)
    records = _Table(header, inner + struct.unpack_from("<I", header, inner)[0]) if inner else message
    rows = records.value(0, "<q") if inner else 0
    nulls = ()
    if kind == _RECORDS and (nodes := records.offset(1)):  # pairs of rows and nulls
        nodes += struct.unpack_from("<I", header, nodes)[0]
        nulls = struct.unpack_from(f"<{2 * struct.unpack_from('<I', header, nodes)[0]}q", header, nodes + 4)[1::2]
    if body < 0 or (kind == _RECORDS and rows < 0):
        raise IndexError(f"{body} bytes and {rows} rows")
    return kind, body, rows, nulls


class _Table:
    """A table of FlatBuffers, at a place in a header."""

    def __init__(self, data: bytes, at: int) -> None:
        self._data = data
        self._at = at
        self._fields = at - struct.unpack_from("<i", data, at)[0]

    def offset(self, field: int) -> int:
        """Where a field is; 0 if the table lacks it."""
        if 4 + 2 * field >= struct.unpack_from("<H", self._data, self._fields)[0]:
            return 0
        inside: int = struct.unpack_from("<H", self._data, self._fields + 4 + 2 * field)[0]
        return self._at + inside if inside else 0

    def value(self, field: int, form: str) -> int:
        """A field's value; 0 if the table lacks it."""
        at = self.offset(field)
        return int(struct.unpack_from(form, self._data, at)[0]) if at else 0
