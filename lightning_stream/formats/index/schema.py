"""The description of a shard in an index, as frozen values."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

import msgspec

from lightning_stream.errors import FormatError

ROW_TYPES = ("str", "int", "float")  # the column types of row formats
SEPARATORS = {"csv": ",", "tsv": "\t"}
MAX_FILE_BYTES = (1 << 32) - 1  # offsets are uint32: a larger file cannot be described
Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]  # checked where an index is read


@dataclass(frozen=True, slots=True)
class Schema:
    """What the shards of one writer have in common: format, columns, and how their files are packed.

    Attributes:
        format: ``"mds"``, ``"json"``, ``"csv"``, ``"tsv"`` or ``"xsv"``.
        names, encodings: Column names in the order of the bytes; their encodings (of row formats: `ROW_TYPES`).
        sizes: Fixed size in bytes per column, or None. All None for row formats.
        compression, hashes: A name such as ``"zstd:7"``, or None; the names of the hashes in the index.
        size_limit: That of the writer; None for one shard.
        newline, separator: The end of a row, and the text between values, for row formats.
    """

    format: str
    names: tuple[str, ...]
    encodings: tuple[str, ...]
    sizes: tuple[int | None, ...]
    compression: str | None = None
    hashes: tuple[str, ...] = ()
    size_limit: int | None = None
    newline: str | None = None
    separator: str | None = None

    @property
    def columns(self) -> dict[str, str]:
        """Encoding by column name."""
        return dict(zip(self.names, self.encodings, strict=True))

    def choose(self, columns: Collection[str]) -> Schema:
        """The schema with only those of its columns that are in `columns`."""
        kept = [k for k, name in enumerate(self.names) if name in columns]
        names, encodings, sizes = (tuple(all_[k] for k in kept) for all_ in (self.names, self.encodings, self.sizes))
        return replace(self, names=names, encodings=encodings, sizes=sizes)  # type: ignore[arg-type]


class Origin(msgspec.Struct, frozen=True, gc=False):
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


@dataclass(frozen=True, slots=True)
class FileEntry:
    """One file of a shard: its name below the dataset's root, its size, and its hashes.

    With an ``origin`` the file is made from another one, and its size is an estimate; then ``mark`` tells versions of a
    local one apart, on the machine where the index was made.
    """

    basename: str
    num_bytes: int
    hashes: Mapping[str, str] = field(default_factory=dict)
    origin: Origin | None = None
    mark: str = ""


@dataclass(frozen=True, slots=True)
class ShardEntry:
    """One shard in an index. Row formats have a meta file beside the data file."""

    schema: Schema
    num_samples: int
    raw: FileEntry
    compressed: FileEntry | None = None
    raw_meta: FileEntry | None = None
    compressed_meta: FileEntry | None = None

    @property
    def format(self) -> str:
        """The name of the format."""
        return self.schema.format

    @property
    def files(self) -> tuple[tuple[FileEntry, FileEntry | None], ...]:
        """All files of the shard: (the raw file, the compressed file or None)."""
        data = (self.raw, self.compressed)
        return (data,) if self.raw_meta is None else (data, (self.raw_meta, self.compressed_meta))


def check_basename(name: object, where: str) -> str:
    """Return a file's name that stays below the dataset's root: relative, with ``/`` between folders.

    FormatError for empty parts, parts that begin with a dot (``..``, the cache's own), a backslash, a drive, a control
    character, or the name of the index.
    """
    if isinstance(name, str) and name.isprintable() and "\\" not in name and len(name) < 1024 and name[1:2] != ":":
        path = f"/{name}/"
        if "//" not in path and "/." not in path and name != "index.json":
            return name
    rule = "names of files must be relative and stay below the dataset's folder"
    raise FormatError(f"{where}: {rule}; found {name!r:.100}. Do not use an index that you do not trust.")


def schema_object(schema: Schema) -> dict[str, Any]:
    """Return the fields that all shards of a schema have in the index."""
    about: dict[str, Any] = {
        "compression": schema.compression,
        "format": schema.format,
        "hashes": list(schema.hashes),
        "size_limit": schema.size_limit,
        "version": 2,
    }
    if schema.format == "json":
        about["columns"] = schema.columns
    else:
        about |= {"column_names": list(schema.names), "column_encodings": list(schema.encodings)}
    if schema.format == "mds":
        about["column_sizes"] = list(schema.sizes)
    else:
        about["newline"] = schema.newline
    if schema.format == "xsv":
        about["separator"] = schema.separator
    return about


def file_object(file: FileEntry | None) -> dict[str, Any] | None:
    """Return the description of a file in the index."""
    if file is None:
        return None
    about: dict[str, Any] = {"basename": file.basename, "bytes": file.num_bytes, "hashes": dict(file.hashes)}
    if file.origin is None:
        return about
    return {**about, "origin": msgspec.structs.asdict(file.origin), **({"mark": file.mark} if file.mark else {})}
