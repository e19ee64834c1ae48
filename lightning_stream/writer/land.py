"""One shard's way from memory to its place: pack, hash, compress, hash, put. Runs in a thread."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightning_stream.formats.compression import compress, extension
from lightning_stream.formats.hashing import digest
from lightning_stream.formats.pack import file_object, schema_object
from lightning_stream.formats.schema import FileEntry, Schema
from lightning_stream.writer.packers import Packer
from lightning_stream.writer.target import Target


def land_shard(name: str, packer: Packer, sizes: Sequence[int], parts: Sequence[Any], target: Target) -> dict[str, Any]:
    """Put one shard; give its index entry.

    Raises:
        StoreError: It could not be put.
    """
    entry = schema_object(packer.schema) | {"samples": len(sizes)}
    for part, data in packer.files(sizes, parts):
        raw, packed = _put_file(f"{name}.meta" if part == "meta" else name, data, packer.schema, target)
        entry[f"raw_{part}"], entry[f"zip_{part}"] = file_object(raw), file_object(packed)
    return entry


def _put_file(name: str, data: bytes, schema: Schema, target: Target) -> tuple[FileEntry, FileEntry | None]:
    raw = _file_entry(name, data, schema.hashes)
    if schema.compression is None:
        target.put(name, data, anew=True)
        return raw, None
    packed_data = compress(schema.compression, data)
    packed = _file_entry(f"{name}.{extension(schema.compression)}", packed_data, schema.hashes)
    target.put(packed.basename, packed_data, anew=True)
    return raw, packed


def _file_entry(name: str, data: bytes, hashes: tuple[str, ...]) -> FileEntry:
    return FileEntry(name, len(data), {hash_name: digest(hash_name, data) for hash_name in hashes})
