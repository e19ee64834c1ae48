"""Samples to bytes: one MDS sample, one whole MDS file, and what an index says of it."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_stream.formats.encodings import get_encoding
from lightning_stream.formats.schema import FileEntry, Schema

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
    names = tuple(sorted(columns))
    encodings = tuple(columns[name] for name in names)
    sizes = tuple(get_encoding(encoding).size for encoding in encodings)
    return Schema("mds", names, encodings, sizes, compression, hashes, size_limit)


def schema_object(schema: Schema) -> dict[str, Any]:
    """What every shard entry of the schema says in the index, and every shard file of itself."""
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
    offsets[0] = 0
    np.cumsum(sizes, out=offsets[1:])
    return len(sizes).to_bytes(4, "little") + (offsets + first).astype("<u4").tobytes()


def mds_file(config: bytes, sizes: Sequence[int] | NDArray[Any], parts: Sequence[Any]) -> bytes:
    """A whole MDS file. ``parts`` are the samples' bytes in order, cut anywhere; ``sizes`` are those of the samples."""
    table = offset_table(sizes, 8 + 4 * len(sizes) + len(config))
    return b"".join((table, config, *parts))


class RowEncoder:
    """Samples to bytes, for one schema."""

    def __init__(self, schema: Schema) -> None:
        self._steps: list[tuple[str, str, Callable[[Any], bytes], int | None]] = [
            (name, encoding, get_encoding(encoding).encode, size)
            for name, encoding, size in zip(schema.names, schema.encodings, schema.sizes, strict=True)
        ]
        self._pack_head = struct.Struct(f"<{sum(size is None for size in schema.sizes)}I").pack

    def encode(self, sample: Mapping[str, Any]) -> list[bytes]:
        """The sample's parts: its head, and a value per column. Keys that are no columns are left out.

        Raises:
            TypeError: A value of a type its column does not take; names the column.
            ValueError: A column is missing, or a value is out of range, or of a wrong shape, dtype or length.
        """
        parts: list[bytes] = [b""]
        sizes: list[int] = []
        for name, encoding, encode, size in self._steps:
            try:
                value = sample[name]
                data = value if type(value) is bytes else encode(value)
            except Exception as error:
                raise _column_error(name, encoding, sample, error) from error
            if size is None:
                sizes.append(len(data))
            elif len(data) != size:
                raise ValueError(f"column {name!r}: {encoding} takes {size} bytes; got {len(data)} bytes.")
            parts.append(data)
        try:
            parts[0] = self._pack_head(*sizes)
        except struct.error as error:
            raise ValueError(f"a value must stay under 4 GiB; the sample's sizes are {sizes}.") from error
        return parts


def _column_error(name: str, encoding: str, sample: Any, error: Exception) -> Exception:
    if not isinstance(sample, Mapping):
        return TypeError(f"a sample must be a mapping of column names to values; got {type(sample).__name__}.")
    if name not in sample:
        return ValueError(
            f"column {name!r} ({encoding}) is missing in a sample that has {', '.join(map(str, sample))}."
        )
    if isinstance(error, (TypeError, ValueError)):
        kind = TypeError if isinstance(error, TypeError) else ValueError
        return kind(f"column {name!r}: {error}")
    return error
