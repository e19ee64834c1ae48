"""The settings of a cache."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_stream.formats.hashing import check_hashes


@dataclass(frozen=True)
class CacheConfig:
    """The settings of a cache.

    Attributes:
        limit_bytes: Limit of a folder, over all processes and jobs that use it; None: no limit.
        validate_hash: None: a fetched file is checked by the fastest hash that the index has of it, and a file that
            somebody else put here is checked once. A hash, which the index must have: it checks these, and every file
            that is here once per process.
        keep_zip: Keep compressed files after decompression.
        shared: Files get the folder's own permissions; else they are private to the user.
        wait_s: Longest wait for another process's fetch of a shard.
        room_wait_s: Longest wait for others to release shards, if the limit leaves no room.
        refetches: How often a file with wrong bytes is fetched again before it is an error.
    """

    limit_bytes: int | None = None
    validate_hash: str | None = None
    keep_zip: bool = False
    shared: bool = False
    wait_s: float = 660.0
    room_wait_s: float = 60.0
    refetches: int = 1

    def __post_init__(self) -> None:
        problems = []
        if self.limit_bytes is not None and self.limit_bytes <= 0:
            problems.append(f"limit_bytes is a positive number of bytes, or None for no limit; got {self.limit_bytes}")
        if min(self.wait_s, self.room_wait_s) <= 0:
            problems.append(f"waits are positive seconds; got {self.wait_s} and {self.room_wait_s}")
        if self.refetches < 0:
            problems.append(f"refetches is 0 or more; got {self.refetches}")
        if problems:
            raise ValueError("; ".join(problems))
        if self.validate_hash is not None:
            check_hashes([self.validate_hash])
