"""Small datasets for tests of moving bytes: files of random bytes, and an index that describes them truly."""

from __future__ import annotations

import json
import random
from pathlib import Path

from lightning_stream.cache.space import Space
from lightning_stream.formats.codecs import compress
from lightning_stream.formats.hashing import digest
from lightning_stream.formats.index import Index


def make_dataset(
    folder: Path,
    num_shards: int = 4,
    shard_bytes: int = 10_000,
    compression: str | None = None,
    hashes: tuple[str, ...] = ("xxh3_64",),
    keep_raw: bool = False,
    seed: int = 0,
) -> Index:
    """Write shards and their index into `folder`. Bytes are random, the same for the same seed."""
    folder.mkdir(parents=True, exist_ok=True)
    entries = [
        _write_shard(folder, number, shard_bytes, compression, hashes, keep_raw, seed) for number in range(num_shards)
    ]
    (folder / "index.json").write_text(json.dumps({"shards": entries, "version": 2}, sort_keys=True))
    return Index.from_bytes((folder / "index.json").read_bytes(), str(folder))


def bytes_in(space: Space) -> int:
    """The bytes of all shards that a cache's folder holds, by the markers of all processes."""
    return sum(entry.num_bytes for entry in space.entries())


def shard_content(number: int, shard_bytes: int, seed: int = 0) -> bytes:
    """The bytes of one shard: half random, half repeating, so that compressing does something."""
    rng = random.Random(f"{seed}-{number}")
    return rng.randbytes(shard_bytes // 2) + bytes([number % 256]) * (shard_bytes - shard_bytes // 2)


def _write_shard(
    folder: Path,
    number: int,
    shard_bytes: int,
    compression: str | None,
    hashes: tuple[str, ...],
    keep_raw: bool,
    seed: int,
) -> dict[str, object]:
    raw = shard_content(number, shard_bytes, seed)
    name = f"shard.{number:05}.mds"
    zip_data = None
    if compression is not None:
        packed = compress(compression, raw)
        zip_data = _file(folder, f"{name}.{compression.partition(':')[0]}", packed, hashes)
    if compression is None or keep_raw:
        (folder / name).write_bytes(raw)
    return {
        "column_encodings": ["int"],
        "column_names": ["id"],
        "column_sizes": [8],
        "compression": compression,
        "format": "mds",
        "hashes": list(hashes),
        "raw_data": {"basename": name, "bytes": len(raw), "hashes": {h: digest(h, raw) for h in hashes}},
        "samples": 10,
        "size_limit": 1 << 26,
        "version": 2,
        "zip_data": zip_data,
    }


def _file(folder: Path, name: str, content: bytes, hashes: tuple[str, ...]) -> dict[str, object]:
    (folder / name).write_bytes(content)
    return {"basename": name, "bytes": len(content), "hashes": {h: digest(h, content) for h in hashes}}
