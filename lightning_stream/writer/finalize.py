"""One shard from memory to the store: pack, hash, compress, hash, put. This runs in a thread."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

from lightning_stream.formats.codecs import compress, extension
from lightning_stream.formats.hashing import digest_parts
from lightning_stream.formats.index.schema import FileEntry, Schema, file_object, schema_object
from lightning_stream.formats.shard_encoder import ShardEncoder
from lightning_stream.writer.place import DatasetPlace
from lightning_stream.writer.shard_buffer import ShardBuffer


def finalize_shard(
    name: str, encoder: ShardEncoder, buffer: ShardBuffer, place: DatasetPlace, after: Future[Any] | None = None
) -> dict[str, Any]:
    """Put one shard, give its memory back, and return its index entry.

    `name` is that of the data file, e.g. ``shard.00007.mds``; the place may add digits to it. `after` is the dataset's
    first shard. It is put before all others, so that a second writer is refused before it has put anything.
    """
    entry = schema_object(encoder.schema) | {"samples": len(buffer.sizes)}
    try:
        for part, data in encoder.files(buffer.sizes, buffer.parts()):
            raw, packed = _put_file(f"{name}.meta" if part == "meta" else name, data, encoder.schema, place, after)
            entry[f"raw_{part}"], entry[f"zip_{part}"] = file_object(raw), file_object(packed)
    finally:
        buffer.release()
    return entry


def _put_file(
    name: str, parts: list[Any], schema: Schema, place: DatasetPlace, after: Future[Any] | None
) -> tuple[FileEntry, FileEntry | None]:
    codec = schema.compression
    stored = parts if codec is None else [compress(codec, b"".join(parts))]
    name = place.name_of(name, stored)
    raw = _file_entry(name, parts, schema.hashes)
    packed = None if codec is None else _file_entry(f"{name}.{extension(codec)}", stored, schema.hashes)
    if after is not None:
        after.result()
    place.put_shard((packed or raw).basename, stored)
    return raw, packed


def _file_entry(name: str, parts: list[Any], hashes: tuple[str, ...]) -> FileEntry:
    return FileEntry(name, sum(map(len, parts)), digest_parts(hashes, parts))
