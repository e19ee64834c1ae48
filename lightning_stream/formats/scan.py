"""The text of an index to arrays of numbers, in one pass.

msgspec cuts the shards' entries out of the text without copying them, and checks types while it decodes.
"""

from __future__ import annotations

from array import array
from hashlib import blake2b
from typing import Literal, NamedTuple

import msgspec
import numpy as np
from msgspec import Raw, Struct, structs
from numpy.typing import NDArray

from lightning_stream.errors import FormatError

from .codecs import check_compression
from .hashing import digest
from .mds.layout import encodings_of
from .model import ROW_TYPES, FileEntry, Schema, ShardEntry, check_basename

_FIELDS = 6  # begin, end, samples, raw bytes, stored bytes, schema
_MAX_SHARD_BYTES = 1 << 32  # offsets have 32 bits
_MARK_BYTES = 32
_DIGEST_BYTES = 32


class ConvertedFrom(Struct, gc=False):
    """The digest of shards that were converted, and that of the data that they were converted from."""

    digest: str
    source: str


class Top(Struct, gc=False):
    """An index, with the parts as texts that are read later, or by others."""

    shards: list[Raw]
    version: Literal[2]
    deleted: FileEntry | None = None
    converted_from: ConvertedFrom | None = None
    joined: list[Raw] = []
    lengths: Raw = Raw(b"{}")
    versions: Raw = Raw(b"null")


class Shards(NamedTuple):
    """What the entries of an index have: int64[6, num_shards] (see `_FIELDS`), the schemas, and the digest in hex."""

    numbers: NDArray[np.int64]
    schemas: tuple[Schema, ...]
    digest: str


_decode_top = msgspec.json.Decoder(Top).decode
_decode_entry = msgspec.json.Decoder(ShardEntry).decode
_OF_PAGE = "It looks like a web page, which servers send for a file that is absent, or for a login: check the address."


def read_top(data: bytes, where: str) -> Top:
    """Read the text of an index without its entries; FormatError with ``where`` if it is not an index."""
    try:
        top = _decode_top(data)
    except (ValueError, RecursionError) as error:  # msgspec's own are ValueErrors
        start = data[:40].lstrip()
        remedy = _OF_PAGE if start[:1] == b"<" else "Fetch it again."
        raise FormatError(
            f"{where}: an index must be a JSON object with the keys 'shards' and 'version', of version 2; found "
            f"{start[:20]!r}... of {len(data)} bytes ({error}). {remedy}"
        ) from error
    return top


def snapshot_of(shards: Shards, data: bytes) -> bytes:
    """Return what spares `read_shards` the entries of a text: their numbers, the digest, and a mark of all three."""
    content = shards.numbers.tobytes() + bytes.fromhex(shards.digest)
    return content + _mark(content, data)


def _mark(content: bytes, data: bytes) -> bytes:
    # The number grows whenever a scan of the same text gives others.
    return digest("xxh3_128", content + f"scan 2 {digest('xxh3_128', data)}".encode()).encode()


def read_shards(data: bytes, top: Top, where: str, snapshot: bytes = b"") -> Shards:
    """Read and check every entry; FormatError with ``where`` and the shard if something is wrong.

    The entries are not read again where ``snapshot`` is that of the same text: they take 0.8 s for 100,000 shards.
    """
    content = snapshot[:-_MARK_BYTES]
    if not content or snapshot[-_MARK_BYTES:] != _mark(content, data):
        return _scan_shards(data, top, where)
    numbers: NDArray[np.int64] = np.frombuffer(content[:-_DIGEST_BYTES], np.int64).reshape(_FIELDS, -1)
    firsts = np.unique(numbers[-1], return_index=True)[1].tolist()
    schemas = tuple(_decode_entry(top.shards[first]).schema for first in firsts)
    return Shards(numbers, schemas, content[-_DIGEST_BYTES:].hex())


def _scan_shards(data: bytes, top: Top, where: str) -> Shards:
    index_digest = blake2b(b"lightning-stream index 1", digest_size=32)
    numbers = array("q")
    ids: dict[Schema, int] = {}
    marks: dict[str, int] = {}  # the hash of a file's description, by its name
    begin = end = 0
    for shard, text in enumerate(top.shards):
        try:
            entry = _decode_entry(text)
            schema = entry.schema
            if (schema_id := ids.get(schema)) is None:
                _check_schema(entry)
                schema_id = ids[schema] = len(ids)
                if entry.raw.origin is None:  # data in another format stays the same, whatever is read of it
                    sizes = entry.sizes if entry.format == "mds" else ()
                    index_digest.update(repr((entry.format, entry.names, entry.encodings, sizes)).encode())
            raw, stored, files = _sizes(entry)
            description = f"{entry.num_samples} {files}"
            name = entry.raw.basename
            mark = hash(description)
            if marks.setdefault(name, mark) != mark:
                raise ValueError(f"{name} is also the file of a shard with other samples or bytes")
        except (FormatError, ValueError, RecursionError) as error:
            raise _bad_entry(f"{where}, shard {shard}", error) from error
        index_digest.update(f"{schema_id} {description}\n".encode())
        # Only white space and a comma lie between two entries.
        begin = data.index(b"{", end) if shard else _place(data, text)
        end = begin + len(memoryview(text))
        numbers.extend((begin, end, entry.num_samples, raw, stored, schema_id))
    if (file := top.deleted) is not None:
        index_digest.update(f"deleted {file.num_samples} {sorted(file.hashes.items())}\n".encode())
    table = np.frombuffer(numbers, np.int64).reshape(-1, _FIELDS).T
    return Shards(table.copy(), tuple(ids), index_digest.hexdigest())


def read_entry(text: bytes, where: str) -> ShardEntry:
    """Read one shard's entry from its text in an index that was scanned."""
    try:
        return _decode_entry(text)
    except (ValueError, RecursionError) as error:
        raise _bad_entry(where, error) from error


def _place(data: bytes, text: Raw) -> int:
    """Return where an entry begins in the text of the index, from its address: it is a view of that text."""
    address = np.frombuffer(text, np.uint8).__array_interface__["data"][0]
    return int(address - np.frombuffer(data, np.uint8).__array_interface__["data"][0])


def _bad_entry(where: str, error: Exception) -> FormatError:
    if str(error).endswith("basename`"):  # a name that is not text
        return FormatError(f"{where}: names of files must stay below the dataset's folder; {error}. Fetch it again.")
    text = str(error)
    text = text if text.endswith(".") else f"{text}. Fetch the index again."
    return FormatError(f"{where}: not a shard entry of an index of version 2: {text}")


def _check_schema(entry: ShardEntry) -> None:
    """Raise ValueError for unknown names, or columns that do not fit together."""
    names = entry.names
    sizes = entry.sizes
    if not len(names) == len(entry.encodings) == len(sizes):
        raise ValueError(f"columns must have a name, an encoding and a size (or null) each; found {sizes!r}")
    if not names or len(set(names)) != len(names):
        raise ValueError(f"there must be columns, and their names must differ; found {names!r}")
    check_compression(entry.compression)
    if entry.format == "mds":
        encodings_of(entry)
        return
    if not {*entry.encodings} <= {*ROW_TYPES}:
        raise ValueError(f"columns of a row format must be {', '.join(ROW_TYPES)}; found {entry.columns}")
    if not entry.newline:
        raise ValueError(f"row formats must have a newline; found {entry.newline!r}")
    if entry.format == "xsv" and not entry.separator:
        raise ValueError(f"xsv must have a separator; found {entry.separator!r}")


def _sizes(entry: ShardEntry) -> tuple[int, int, str]:
    """Check a shard's files; return their bytes raw and as stored, and a description of the raw files."""
    pairs = ((entry.raw, entry.compressed), (entry.raw_meta, entry.compressed_meta))
    raw_total = stored_total = 0
    description = ""
    for raw, compressed in pairs[:1] if entry.format == "mds" else pairs:
        if raw is None or (compressed is None) != (entry.compression is None):
            raise ValueError("every file must have a 'raw' entry, and a 'zip' entry exactly if there is a compression")
        for file in (raw,) if compressed is None else (raw, compressed):
            check_basename(file.basename, "its files")
        raw_total += raw.num_bytes
        stored_total += (compressed or raw).num_bytes
        if (origin := raw.origin) is None:
            description += f"{raw.basename} {raw.num_bytes} {sorted(raw.hashes.items())} "
        else:
            check_basename(origin.name, "its files")
            description += f"{structs.astuple(origin)} "
    # A wrong count must not become memory for an order. The file with the offsets is the last, or the only one.
    count = entry.num_samples
    table_bytes = min((entry.raw_meta or entry.raw).num_bytes, _MAX_SHARD_BYTES)
    if count and 8 + 4 * count > table_bytes and entry.raw.origin is None:
        raise ValueError(f"'samples' must fit the offsets in its file; found {count!r:.40} in {table_bytes:,} bytes")
    return raw_total, stored_total, description
