"""Samples to bytes: one MDS sample, whole shard files, and what an index says of them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_stream.formats.encodings import get_encoding
from lightning_stream.formats.index.schema import FileEntry, Schema

MAX_FILE_BYTES = (1 << 32) - 1
"""Offsets are uint32: a larger file cannot be described."""


def mds_schema(
    columns: Mapping[str, str], compression: str | None, hashes: tuple[str, ...], size_limit: int | None
) -> Schema:
    """The schema of MDS shards with these columns, sorted by name.

    Raises:
        ValueError: No columns, or an unknown encoding.
    """
    if not columns:
        raise ValueError("columns must name at least one column and its encoding, e.g. {'text': 'str'}.")
    require_names(columns)
    names = tuple(sorted(columns))
    encodings = tuple(columns[name] for name in names)
    sizes = tuple(get_encoding(encoding).size for encoding in encodings)
    return Schema("mds", names, encodings, sizes, compression, hashes, size_limit)


def require_names(columns: Iterable[object]) -> None:
    """Raise TypeError unless all names of columns are text."""
    wrong = next((name for name in columns if not isinstance(name, str)), None)
    if wrong is not None:
        raise TypeError(f"names of columns must be text; got {wrong!r}.")


def schema_object(schema: Schema) -> dict[str, Any]:
    """What every shard entry of the schema says in the index."""
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
        about["column_names"] = list(schema.names)
        about["column_encodings"] = list(schema.encodings)
    if schema.format == "mds":
        about["column_sizes"] = list(schema.sizes)
    else:
        about["newline"] = schema.newline
    if schema.format == "xsv":
        about["separator"] = schema.separator
    return about


def config_bytes(schema: Schema) -> bytes:
    """The text inside every shard file that describes its columns."""
    return json.dumps(schema_object(schema), sort_keys=True).encode()


def file_object(file: FileEntry | None) -> dict[str, Any] | None:
    """A file as the index describes it."""
    if file is None:
        return None
    return {"basename": file.basename, "bytes": file.num_bytes, "hashes": dict(file.hashes)}


def offset_table(sizes: Sequence[int] | NDArray[Any], first: int) -> bytes:
    """Count and offsets of samples of these sizes, the first at ``first``."""
    offsets = np.empty(len(sizes) + 1, np.int64)
    offsets[0] = first
    np.cumsum(sizes, out=offsets[1:])
    offsets[1:] += first
    return len(sizes).to_bytes(4, "little") + offsets.astype("<u4").tobytes()


def mds_file(config: bytes, sizes: Sequence[int] | NDArray[Any], parts: Sequence[Any]) -> list[Any]:
    """A whole MDS file, in parts. ``parts`` are the samples' bytes in order, cut anywhere; ``sizes`` the samples'."""
    return [offset_table(sizes, 8 + 4 * len(sizes) + len(config)), config, *parts]


def row_files(
    config: bytes, header: bytes, sizes: Sequence[int] | NDArray[Any], parts: Sequence[Any]
) -> tuple[list[Any], list[Any]]:
    """A row format's data file and its meta file, in parts. ``header`` is the line of names, if the format has one."""
    return [header, *parts], [offset_table(sizes, len(header)), config]
