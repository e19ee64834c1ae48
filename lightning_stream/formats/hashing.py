"""The 17 hashes an index may hold for its files, and one pass over a file for several of them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import xxhash

_CHUNK_BYTES = 1 << 18  # it stays in a core's cache between the read and the hash
FASTEST_FIRST: tuple[str, ...] = (
    "xxh3_64", "xxh3_128", "xxh128", "xxh64", "xxh32", "sha1", "sha256", "sha224", "blake2b", "md5",
    "sha512", "sha384", "blake2s", "sha3_224", "sha3_256", "sha3_384", "sha3_512",
)  # fmt: skip
"""All hashes by speed: a file is checked by the first of these that its index has."""


def hashes_to_write(names: Iterable[str] | None) -> tuple[str, ...]:
    """Check the ``hashes`` of a writer as `check_hashes` does; None stands for xxh3_64, 0.03 s of CPU per GB."""
    return ("xxh3_64",) if names is None else check_hashes(names)


def check_hashes(names: Iterable[str] | None) -> tuple[str, ...]:
    """Return the names, sorted and unique; ValueError for a name that is not a hash, with a list of all hashes."""
    wanted = [names] if isinstance(names, str) else list(names or ())
    unknown = [name for name in wanted if name not in FASTEST_FIRST]
    if unknown:
        raise ValueError(f"hashes must be among {', '.join(sorted(FASTEST_FIRST))}: got {unknown[0]!r}.")
    return tuple(sorted(set(wanted)))


def digest(name: str, data: bytes | bytearray | memoryview) -> str:
    """Return the hex digest of ``data`` under the hash ``name``."""
    return digest_parts([name], [data])[name]


def digest_parts(names: Iterable[str], parts: Iterable[Any]) -> dict[str, str]:
    """Return the hex digest, under each of ``names``, of the joined parts."""
    states: dict[str, Any] = {
        name: getattr(xxhash, name)() if name.startswith("xxh") else hashlib.new(name, usedforsecurity=False)
        for name in check_hashes(names)
    }
    for part in parts if states else ():
        for state in states.values():
            state.update(part)
    return {name: state.hexdigest() for name, state in states.items()}


def digest_file(names: Iterable[str], path: Path) -> dict[str, str]:
    """Return the hex digest of a file under each of ``names``, from one pass in bounded memory."""
    view = memoryview(bytearray(_CHUNK_BYTES))
    with path.open("rb", buffering=0) as file:
        return digest_parts(names, (view[:num_bytes] for num_bytes in iter(lambda: file.readinto(view), 0)))
