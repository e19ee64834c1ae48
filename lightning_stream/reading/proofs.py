"""Samples that are read before their shard is verified, and the proof that they were right.

The hash of a shard holds for all of it. Samples that come before, by ranges or from the beginning of a file that still
arrives, are noted with a digest of their bytes. A process that opens the whole shard compares them. So does the process
that hands out batches: while it runs, where the shard has come, and for all before a state is taken, when an
iteration ends, and when the program ends.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_stream.errors import StoreError
from lightning_stream.formats.hashing import digest_parts
from lightning_stream.formats.shard import Shard
from lightning_stream.threads import Lock

_Bytes = bytes | memoryview
_HASH = "xxh3_64"
_SHOWN = 8  # samples and batches in a message


@dataclass(frozen=True)
class UnverifiedRead:
    """Samples of a shard that were read before it was verified."""

    shard_id: int
    indices: tuple[int, ...]  # ascending
    digest: str  # of their bytes
    is_awaited: bool  # whether the whole shard is being fetched, or was; else these samples came by ranges alone

    @classmethod
    def of(cls, shard_id: int, indices: Sequence[int], parts: Sequence[_Bytes], is_awaited: bool) -> UnverifiedRead:
        """Note the samples of these indices, which have these bytes."""
        return cls(shard_id, tuple(indices), digest_parts([_HASH], parts)[_HASH], is_awaited)

    def agrees(self, shard: Shard, row_of: Callable[[int], Any] = int) -> bool:
        """Whether a shard has the same bytes; `row_of` gives where in it a sample is."""
        parts = [shard.stored(row_of(index)) for index in self.indices]
        return digest_parts([_HASH], parts)[_HASH] == self.digest


class UnverifiedReads:
    """What one process has read unverified for nobody who compares it, until it opens the whole shard. Thread-safe."""

    def __init__(self) -> None:
        self._by_shard: dict[int, set[UnverifiedRead]] = {}
        self._guard = Lock()

    def add(self, reads: Sequence[UnverifiedRead]) -> None:
        """Note samples that are about to be delivered."""
        with self._guard:
            for read in reads:
                self._by_shard.setdefault(read.shard_id, set()).add(read)

    def unproven(self, reads: Sequence[UnverifiedRead]) -> list[UnverifiedRead]:
        """Those that are to be compared: for samples that come by ranges alone, two answers that agree suffice."""
        with self._guard:
            return [read for read in reads if read.is_awaited or read not in self._by_shard.get(read.shard_id, ())]

    def compare(self, shard: Shard, shard_id: int, url_of: Callable[[int], str]) -> None:
        """Raise StoreError where a verified shard differs from samples of it that were read; forget these."""
        with self._guard:
            reads = self._by_shard.pop(shard_id, set())
        if wrong := [read for read in reads if not read.agrees(shard)]:
            raise difference(url_of(shard_id), wrong)


def difference(where: str, reads: Sequence[UnverifiedRead], batches: Sequence[str] = ()) -> StoreError:
    """The error for samples of a shard that were delivered before it was verified, and differ from it."""
    indices = sorted({index for read in reads for index in read.indices})
    of_batches = f" in the batches at {_shown('; ', batches)}" if batches else ""
    return StoreError(
        f"{where}: samples that are delivered before their shard is verified must be the same in it, but the verified "
        f"file has other bytes, in one or more of the samples [{_shown(', ', indices)}]. They may have been trained "
        f"on{of_batches}. Resume from an earlier checkpoint, and check the proxy or server in between, or read over "
        "https. predownload={'by_range': False} waits for whole shards."
    )


def _shown(separator: str, items: Sequence[object]) -> str:
    text = separator.join(map(str, items[:_SHOWN]))
    return text if len(items) <= _SHOWN else f"{text} and {len(items) - _SHOWN} more"
