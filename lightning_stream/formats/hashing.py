"""The 17 hashes an index may hold for its files, and one pass over a file for several of them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

import xxhash

_CHUNK_BYTES = 1 << 18  # stays in a core's cache between the read and the hash


class _Hash(Protocol):
    def update(self, data: Any, /) -> None: ...
    def hexdigest(self) -> str: ...


_MAKERS: Mapping[str, Callable[[], _Hash]] = {
    "blake2b": hashlib.blake2b,
    "blake2s": hashlib.blake2s,
    "md5": lambda: hashlib.md5(usedforsecurity=False),
    "sha1": lambda: hashlib.sha1(usedforsecurity=False),
    "sha224": hashlib.sha224,
    "sha256": hashlib.sha256,
    "sha384": hashlib.sha384,
    "sha512": hashlib.sha512,
    "sha3_224": hashlib.sha3_224,
    "sha3_256": hashlib.sha3_256,
    "sha3_384": hashlib.sha3_384,
    "sha3_512": hashlib.sha3_512,
    "xxh32": xxhash.xxh32,
    "xxh64": xxhash.xxh64,
    "xxh128": xxhash.xxh128,
    "xxh3_64": xxhash.xxh3_64,
    "xxh3_128": xxhash.xxh3_128,
}

HASHES: tuple[str, ...] = tuple(sorted(_MAKERS))
"""Names of all hashes, sorted."""

FASTEST_FIRST: tuple[str, ...] = (
    "xxh3_64", "xxh3_128", "xxh128", "xxh64", "xxh32", "sha1", "sha256", "sha224", "blake2b", "md5",
    "sha512", "sha384", "blake2s", "sha3_224", "sha3_256", "sha3_384", "sha3_512",
)  # fmt: skip
"""All hashes by speed: a file is checked by the first of these that its index has."""


DEFAULT_HASHES: tuple[str, ...] = ("xxh3_64",)
"""What a writer puts into the index by default: 0.03 s of CPU per GB, 0.05 where a file is read for it."""


def hashes_to_write(names: Iterable[str] | None) -> tuple[str, ...]:
    """The hashes that a writer's ``hashes`` names, sorted and unique; None stands for the default.

    Raises:
        ValueError: A name that is not a hash; the message lists all.
    """
    return DEFAULT_HASHES if names is None else check_hashes(names)


def check_hashes(names: Iterable[str] | None) -> tuple[str, ...]:
    """The names, sorted and unique.

    Raises:
        ValueError: A name that is not a hash; the message lists all.
    """
    wanted = [names] if isinstance(names, str) else list(names or ())
    unknown = [name for name in wanted if name not in _MAKERS]
    if unknown:
        raise ValueError(f"hashes must be among {', '.join(HASHES)}: got {unknown[0]!r}.")
    return tuple(sorted(set(wanted)))


def digest(name: str, data: bytes | bytearray | memoryview) -> str:
    """Hex digest of ``data`` under the hash ``name``."""
    return digest_parts([name], [data])[name]


def digest_parts(names: Iterable[str], parts: Iterable[Any]) -> dict[str, str]:
    """Hex digests, under each of ``names``, of the bytes that the parts make together."""
    states = {name: _MAKERS[name]() for name in check_hashes(names)}
    for part in parts if states else ():
        for state in states.values():
            state.update(part)
    return {name: state.hexdigest() for name, state in states.items()}


def digest_file(names: Iterable[str], path: Path) -> dict[str, str]:
    """Hex digests of a file's bytes under each of ``names``, in one pass of bounded memory."""
    view = memoryview(bytearray(_CHUNK_BYTES))
    with path.open("rb", buffering=0) as file:
        return digest_parts(names, (view[:num_bytes] for num_bytes in iter(lambda: file.readinto(view), 0)))
