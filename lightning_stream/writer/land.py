"""One shard's way from memory to its place: pack, hash, compress, hash, put. Runs in a thread."""

from __future__ import annotations

from typing import Any

from lightning_stream.formats.codecs import compress, extension
from lightning_stream.formats.hashing import digest_parts
from lightning_stream.formats.index.schema import FileEntry, Schema, file_object, schema_object
from lightning_stream.formats.shard_encoder import ShardEncoder
from lightning_stream.writer.gathered import Gathered
from lightning_stream.writer.target import Target


def land_shard(name: str, packer: ShardEncoder, gathered: Gathered, target: Target) -> dict[str, Any]:
    """Put one shard, and give its memory back; give its index entry.

    Raises:
        StoreError: It could not be put.
    """
    entry = schema_object(packer.schema) | {"samples": len(gathered.sizes)}
    try:
        for part, data in packer.files(gathered.sizes, gathered.parts()):
            raw, packed = _put_file(f"{name}.meta" if part == "meta" else name, data, packer.schema, target)
            entry[f"raw_{part}"], entry[f"zip_{part}"] = file_object(raw), file_object(packed)
    finally:
        gathered.release()
    return entry


def _put_file(name: str, parts: list[Any], schema: Schema, target: Target) -> tuple[FileEntry, FileEntry | None]:
    raw = _file_entry(name, parts, schema.hashes)
    if schema.compression is None:
        target.put(name, parts, anew=True)
        return raw, None
    packed_parts = [compress(schema.compression, b"".join(parts))]
    packed = _file_entry(f"{name}.{extension(schema.compression)}", packed_parts, schema.hashes)
    target.put(packed.basename, packed_parts, anew=True)
    return raw, packed


def _file_entry(name: str, parts: list[Any], hashes: tuple[str, ...]) -> FileEntry:
    return FileEntry(name, sum(map(len, parts)), digest_parts(hashes, parts))
