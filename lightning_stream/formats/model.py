"""The entries of an index: frozen values that are read from its text and written to it."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Raw, Struct, field, structs, to_builtins

from lightning_stream.errors import FormatError

INDEX_NAME = "index.json"
ROW_TYPES = ("str", "int", "float")  # the column types of row formats
SEEKABLE = "zstd:seekable"
_SEEKABLE_SUFFIX = ".seekable.zstd"
SEPARATORS = {"csv": ",", "tsv": "\t"}
MAX_FILE_BYTES = (1 << 32) - 1  # offsets are uint32: a larger file cannot be described
Count = Annotated[int, Meta(ge=0, lt=1 << 62)]  # checked where an index is read
Text = Annotated[str, Meta(min_length=1)]
_SHARD = {"compression", "format", "hashes", "raw_data", "samples", "size_limit", "version", "zip_data"}
_ROWS = _SHARD | {"newline", "raw_meta", "zip_meta"}
_COLUMNS = {"column_encodings", "column_names"}
_KEYS = {  # of an entry, by its format
    "mds": _SHARD | _COLUMNS | {"column_sizes"},
    "json": _ROWS | {"columns"},
    "csv": _ROWS | _COLUMNS,
    "tsv": _ROWS | _COLUMNS,
    "xsv": _ROWS | _COLUMNS | {"separator"},
}


class Origin(Struct, frozen=True, gc=False):
    """The part of a file in another format that a shard is made from.

    Attributes:
        kind: The format, e.g. ``"parquet"``.
        name, num_bytes, stamp: The file; its stamp is another one after each change.
        begin, end: The part, in the units of the format, such as row groups.
        settings: What reading it takes besides, as JSON.
    """

    kind: str
    name: str
    num_bytes: Count
    stamp: str
    begin: Count
    end: Count
    settings: str = ""


class FileEntry(Struct, frozen=True, gc=False, omit_defaults=True):
    """One file that an index lists.

    Attributes:
        basename, num_bytes, hashes: Its name below the dataset's root, its size, and its hashes by their names.
        num_samples: Of a file of numbers (lengths, deleted samples): how many there are; None of other files.
        origin: What the file is made from; then its size is an estimate.
        mark: Tells versions of a local origin apart, on the machine where the index was made.
    """

    basename: str
    num_bytes: Count = field(name="bytes")
    hashes: dict[str, str]
    num_samples: Count | None = field(default=None, name="samples")
    origin: Origin | None = None
    mark: str = ""


class Schema(Struct, frozen=True, gc=False):
    """What the shards of one writer have in common: format, columns, and how their files are packed.

    Attributes:
        format: ``"mds"``, ``"json"``, ``"csv"``, ``"tsv"`` or ``"xsv"``.
        names, encodings: Column names in the order of the bytes; their encodings (of row formats: `ROW_TYPES`).
        sizes: Fixed size in bytes per column, or None. All None for row formats.
        compression, hashes: A name such as ``"zstd:7"``, or None; the names of the hashes in the index.
        size_limit: That of the writer; None for one shard.
        newline, separator: The end of a row, and the text between values, for row formats.
        version: That of the index.
    """

    format: str
    names: tuple[str, ...] = field(default=(), name="column_names")
    encodings: tuple[str, ...] = field(default=(), name="column_encodings")
    sizes: tuple[Count | None, ...] = field(default=(), name="column_sizes")
    compression: str | None = None
    hashes: tuple[str, ...] = ()
    size_limit: Count | None = None
    newline: Text | None = None
    separator: Text | None = None
    version: Literal[2] = 2

    @property
    def columns(self) -> dict[str, str]:
        """Encoding by column name."""
        return dict(zip(self.names, self.encodings, strict=True))

    @property
    def fixed_bytes(self) -> int:
        """The bytes of a sample's columns of fixed size."""
        return sum(size or 0 for size in self.sizes)

    def choose(self, columns: Collection[str]) -> Schema:
        """Return the schema with only those of its columns that are in `columns`."""
        rows = [row for row in zip(self.names, self.encodings, self.sizes, strict=True) if row[0] in columns]
        names, encodings, sizes = zip(*rows, strict=True) if rows else ((), (), ())
        return structs.replace(self, names=names, encodings=encodings, sizes=sizes)

    def shard(
        self,
        num_samples: int,
        raw: FileEntry,
        compressed: FileEntry | None = None,
        raw_meta: FileEntry | None = None,
        compressed_meta: FileEntry | None = None,
    ) -> ShardEntry:
        """Return the entry of a shard of this schema."""
        return ShardEntry(
            **structs.asdict(self),
            num_samples=num_samples,
            raw=raw,
            compressed=compressed,
            raw_meta=raw_meta,
            compressed_meta=compressed_meta,
        )

    def to_object(self) -> dict[str, Any]:
        """Return the keys and values in the index: those of a shard, or those that all shards of a schema have."""
        # All readers of MDS know zstd: the name of the file says that it is seekable.
        compression = self.compression and self.compression.replace(SEEKABLE, "zstd")
        values = to_builtins(self) | {"columns": self.columns, "compression": compression}
        return {key: value for key, value in values.items() if key in _KEYS[self.format]}


_schema_of = attrgetter(*Schema.__struct_fields__)


class ShardEntry(Schema, frozen=True, gc=False, kw_only=True):
    """One shard in an index: its schema, its samples and its files. Row formats have a meta file beside the data file.

    Attributes:
        raw, compressed: The file of the samples, and as it is stored if there is a compression.
        raw_meta, compressed_meta: The file of the offsets of row formats, likewise.
        column_types: The columns of JSON rows as the index has them.
    """

    format: Literal["mds", "json", "csv", "tsv", "xsv"]
    compression: str | None
    hashes: tuple[str, ...]
    version: Literal[2]
    num_samples: Count = field(name="samples")
    raw: FileEntry = field(name="raw_data")
    compressed: FileEntry | None = field(default=None, name="zip_data")
    raw_meta: FileEntry | None = None
    compressed_meta: FileEntry | None = field(default=None, name="zip_meta")
    column_types: dict[str, str] = field(default={}, name="columns")

    def __post_init__(self) -> None:
        if self.format == "mds":
            is_marked = self.compressed is not None and self.compressed.basename.endswith(_SEEKABLE_SUFFIX)
            if is_marked and self.compression is not None and SEEKABLE not in self.compression:
                structs.force_setattr(self, "compression", self.compression.replace("zstd", SEEKABLE))
            return
        separator = SEPARATORS.get(self.format, self.separator if self.format == "xsv" else None)
        values: dict[str, Any] = {"separator": separator}
        if self.format == "json" and self.column_types:
            values |= {"names": tuple(self.column_types), "encodings": tuple(self.column_types.values())}
        values["sizes"] = (None,) * len(values.get("names", self.names))
        for name, value in values.items():
            structs.force_setattr(self, name, value)

    @property
    def schema(self) -> Schema:
        """What it has in common with others."""
        return Schema(*_schema_of(self))

    @property
    def files(self) -> tuple[tuple[FileEntry, FileEntry | None], ...]:
        """All files of the shard: (the raw file, the compressed file or None)."""
        data = (self.raw, self.compressed)
        if self.format == "mds" or self.raw_meta is None:
            return (data,)
        return (data, (self.raw_meta, self.compressed_meta))


def check_basename(name: object, where: str) -> str:
    """Return a file's name that stays below the dataset's root: relative, with ``/`` between folders.

    FormatError for empty parts, parts that begin with a dot (``..``, the cache's own), a backslash, a drive, a control
    character, or the name of the index.
    """
    if isinstance(name, str) and name.isprintable() and "\\" not in name and len(name) < 1024 and name[1:2] != ":":
        path = f"/{name}/"
        if "//" not in path and "/." not in path and name != INDEX_NAME:
            return name
    rule = "names of files must be relative and stay below the dataset's folder"
    raise FormatError(f"{where}: {rule}; found {name!r:.100}. Do not use an index that you do not trust.")


def to_text(value: Any) -> bytes:
    """Return a model's value as the text that an index has of it: JSON in the order of the keys.

    ValueError for a name with half of a surrogate pair, which `json` would write and no index could be read with.
    """
    value = value.to_object() if isinstance(value, Schema) else to_builtins(value)
    try:
        msgspec.json.encode(value)
    except UnicodeEncodeError as error:
        raise ValueError(f"names must be valid Unicode; found {error.object!r}. Rename that column or file.") from error
    return json.dumps(value, sort_keys=True).encode()


def array_text(texts: Iterable[bytes | Raw]) -> bytes:
    """Return a JSON array of JSON texts."""
    return b"[" + b", ".join(map(bytes, texts)) + b"]"


def object_text(texts: Mapping[str, bytes | Raw]) -> bytes:
    """Return a JSON object of JSON texts by name."""
    pairs = (msgspec.json.encode(name) + b": " + bytes(text) for name, text in texts.items())
    return b"{" + b", ".join(pairs) + b"}"


def index_text(shards: Iterable[bytes | Raw]) -> bytes:
    """Return the text of an index of shards, given as the texts of their entries."""
    return object_text({"shards": array_text(shards), "version": b"2"})


def with_lengths(index: bytes, lengths: Mapping[str, Sequence[FileEntry]]) -> bytes:
    """Return the text of an index with these lengths instead of its own. All other keys keep their bytes and order."""
    return with_keys(index, {"lengths": to_text(lengths) if lengths else None})


def with_keys(index: bytes, changed: Mapping[str, bytes | None]) -> bytes:
    """Return the text of an index with some keys replaced; None removes a key. Others keep their bytes and order."""
    texts = msgspec.json.decode(index, type=dict[str, Raw])
    if not any(text is not None or name in texts for name, text in changed.items()):
        return index
    return object_text({name: text for name, text in {**texts, **changed}.items() if text is not None})


def length_file_stem(name: str) -> str:
    """Return how the names of the files of a length begin, e.g. ``lengths.tokens``; it differs for different names."""
    return "lengths." + re.sub(r"[^A-Za-z0-9_-]", lambda character: f"={ord(character[0]):x}=", name)


def version_name(digest: str) -> str:
    """Return the name under which an append keeps the index before it, from that index's digest."""
    return f"index.{digest[:16]}.json"
