"""Read some samples of shards that are not here by ranges of bytes, where that costs less than the shards.

A raw MDS shard begins with the table of where its samples lie. One range reads the table, and one more each
sample or group of neighbours; where all samples have one size, at the same time. The samples then become a small shard
of their own, which is read like any other.
A range cannot be compared with the hash of its file. Instead, the table must fit the index, all ranges must come from
one version of the object, and each sample's columns must fill it. If the shard is fetched later, the samples are
compared with it.
"""

from __future__ import annotations

import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_stream.cache import ShardCache
from lightning_stream.errors import FormatError, StoreError
from lightning_stream.formats.hashing import digest
from lightning_stream.formats.index.schema import ShardEntry
from lightning_stream.formats.mds.shard import MdsShard
from lightning_stream.formats.shard import Shard
from lightning_stream.threads import DaemonPool

_Ints = NDArray[np.int64]
# What a request costs, in bytes that could have come meanwhile: about 35 ms at 60 MB/s.
REQUEST_BYTES = 2 << 20
_GAP_BYTES = REQUEST_BYTES // 8  # neighbours so near come in one range, with what lies between
_HELD_BYTES = 64 << 20  # of tables that are kept
_THREADS = 16


@dataclass(frozen=True)
class _Table:
    """Where a shard's samples lie: uint32[num_samples + 1]."""

    offsets: NDArray[np.uint32]


@dataclass(frozen=True)
class _Part:
    """Samples that lie near each other: ``first`` to ``last`` of the shard, the last included."""

    first: int
    last: int


class SampleRanges:
    """Reads samples by ranges, as long as that is cheaper than their shards. Thread-safe; of one process.

    Args:
        allow_unsafe_types, decoders: See `open_shard`.
    """

    def __init__(self, allow_unsafe_types: bool, decoders: Mapping[str, Callable[[bytes], Any]] | None) -> None:
        self._options: dict[str, Any] = {"allow_unsafe_types": allow_unsafe_types, "decoders": decoders}
        self._tables: dict[int, _Table] = {}
        self._held_bytes = 0
        self._versions: dict[int, str | None] = {}  # of each shard's object, as its first range said
        self._spent: Counter[int] = Counter()  # bytes, requests counted as such, by shard
        self._came: dict[int, dict[int, str]] = {}  # digests of samples, by shard and index
        self._guard = threading.Lock()
        self._pool = DaemonPool(_THREADS, "range")

    def cheaper(self, number: int, cache: ShardCache, entry: ShardEntry, num_samples: int) -> bool:
        """Whether so many samples of a shard cost less than the shard, with what was spent on it before.

        Never where the user named a hash that all that is read must have, nor for shards that are compressed, of
        another format, or here.
        """
        raw = entry.raw
        demanded = cache.config.validate_hash is not None
        raw_mds = entry.format == "mds" and entry.compressed is None
        if demanded or cache.in_place or not raw_mds:
            return False
        table = 0 if number in self._tables else REQUEST_BYTES + 4 * entry.num_samples
        wanted = num_samples * (REQUEST_BYTES + raw.num_bytes // max(1, entry.num_samples))
        if self._spent[number] + table + wanted > REQUEST_BYTES + raw.num_bytes:
            return False
        return not cache.present(entry)

    def shards(self, wanted: Mapping[int, tuple[ShardCache, ShardEntry, _Ints]]) -> dict[int, MdsShard]:
        """By shard number, the samples of ascending, distinct indices as a shard of their own, numbered from 0.

        Raises:
            StoreError: The store could not give them.
            FormatError: What it gave is not what the index says.
        """
        found = {
            number: self._tables.get(number) or self._pool.submit(self._fetch_table, number, cache, entry)
            for number, (cache, entry, _) in wanted.items()
        }
        tables = {
            number: table if isinstance(table, _Table) else _equal_sizes_table(wanted[number][1]) or table.result()
            for number, table in found.items()
        }
        parts = [
            (number, part, self._pool.submit(self._fetch_part, number, *wanted[number][:2], tables[number], part))
            for number in wanted
            for part in _parts(tables[number], wanted[number][2])
        ]
        content: dict[int, dict[int, bytes]] = {number: {} for number in wanted}
        for number, part, fetch in parts:
            content[number] |= _cut(tables[number], part, fetch.result())
        for number, table in found.items():
            if isinstance(table, Future) and not np.array_equal(table.result().offsets, tables[number].offsets):
                raise _no_such_shard(*wanted[number][:2])
        with self._guard:
            for number, samples in content.items():
                digests = {index: digest("xxh3_64", sample) for index, sample in samples.items()}
                self._came.setdefault(number, {}).update(digests)
        with tempfile.TemporaryDirectory(prefix="lightning_stream-") as folder:
            return {
                number: self._as_shard(entry, [content[number][index] for index in indices.tolist()], Path(folder))
                for number, (_, entry, indices) in wanted.items()
            }

    def compare(self, number: int, shard: Shard, where: str) -> None:
        """See that the samples that came by ranges are those of their shard, which is here and was verified; once.

        What is known of the shard for further ranges is forgotten.

        Raises:
            StoreError: They are not.
        """
        with self._guard:
            came = self._came.pop(number, None)
            self._versions.pop(number, None)
            self._spent.pop(number, None)
            self._forget_table(number)
        if came is None or not isinstance(shard, MdsShard):
            return
        wrong = [index for index, digest_ in came.items() if digest("xxh3_64", shard.stored(index)) != digest_]
        if wrong:
            raise StoreError(
                f"{where}: what was read by ranges must be what the whole file has; samples {sorted(wrong)} of it came "
                "with other bytes, and have been delivered. Go back to a checkpoint from before, and look at the "
                "proxy or server in between, or read over https."
            )

    def _fetch_table(self, number: int, cache: ShardCache, entry: ShardEntry) -> _Table:
        end = 4 * (entry.num_samples + 2)
        content, version = _range(cache, entry, 0, end)
        offsets = np.frombuffer(content[4:], "<u4")
        fits = len(content) == end and int.from_bytes(content[:4], "little") == entry.num_samples
        fits = fits and int(offsets[0]) >= end and int(offsets[-1]) == entry.raw.num_bytes
        if not fits or (offsets[1:] < offsets[:-1]).any():
            raise _no_such_shard(cache, entry)
        table = _Table(offsets)
        with self._guard:
            self._expect_version(number, version, cache, entry)
            self._held_bytes += 0 if number in self._tables else end  # another thread's, fetched at the same time
            self._tables[number] = table
            self._spent[number] += REQUEST_BYTES + end
            while self._held_bytes > _HELD_BYTES and len(self._tables) > 1:
                self._forget_table(next(iter(self._tables)))
        return table

    def _fetch_part(self, number: int, cache: ShardCache, entry: ShardEntry, table: _Table, part: _Part) -> bytes:
        begin, end = int(table.offsets[part.first]), int(table.offsets[part.last + 1])
        content, version = _range(cache, entry, begin, end)
        where = f"{cache.store.url}/{entry.raw.basename}"
        if len(content) != end - begin:
            raise FormatError(f"{where}: it ends within the bytes {begin:,} to {end:,}, which its index promises.")
        with self._guard:
            self._expect_version(number, version, cache, entry)
            self._spent[number] += REQUEST_BYTES + len(content)
        return content

    def _expect_version(self, number: int, version: str | None, cache: ShardCache, entry: ShardEntry) -> None:
        """All ranges are of one version of the object; under the guard."""
        if version == self._versions.setdefault(number, version):
            return
        del self._versions[number]
        self._forget_table(number)
        raise FormatError(
            f"{cache.store.url}/{entry.raw.basename}: it was replaced while it was read. Read again; write datasets to "
            "new names."
        )

    def _forget_table(self, number: int) -> None:
        if (table := self._tables.pop(number, None)) is not None:
            self._held_bytes -= 4 + table.offsets.nbytes

    def _as_shard(self, entry: ShardEntry, samples: list[bytes], folder: Path) -> MdsShard:
        sizes = np.array([4 * (len(samples) + 2), *map(len, samples)], np.int64)
        head = len(samples).to_bytes(4, "little") + np.cumsum(sizes).astype("<u4").tobytes()
        content = b"".join([head, *samples])
        path = folder / entry.raw.basename
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        raw = replace(entry.raw, num_bytes=len(content), hashes={})
        return MdsShard(replace(entry, num_samples=len(samples), raw=raw), folder, **self._options)


def _equal_sizes_table(entry: ShardEntry) -> _Table | None:
    """Where samples of one size must lie, one after another up to the end; None where they differ in size."""
    stride = sum(size or 0 for size in entry.schema.sizes)
    first = entry.raw.num_bytes - entry.num_samples * stride
    if None in entry.schema.sizes or first < 4 * (entry.num_samples + 2):
        return None
    return _Table((first + stride * np.arange(entry.num_samples + 1)).astype(np.uint32))


def _no_such_shard(cache: ShardCache, entry: ShardEntry) -> FormatError:
    return FormatError(
        f"{cache.store.url}/{entry.raw.basename}: it does not begin as a shard of {entry.num_samples} samples in "
        f"{entry.raw.num_bytes:,} bytes, which its index says it is. Compare it with the dataset's source."
    )


def _parts(table: _Table, indices: _Ints) -> list[_Part]:
    gaps = table.offsets[indices[1:]].astype(np.int64) - table.offsets[indices[:-1] + 1]
    firsts = np.flatnonzero(np.concatenate([[True], gaps > _GAP_BYTES]))
    lasts = np.append(firsts[1:], len(indices)) - 1
    return [_Part(int(indices[a]), int(indices[b])) for a, b in zip(firsts, lasts, strict=True)]


def _cut(table: _Table, part: _Part, content: bytes) -> dict[int, bytes]:
    offsets = table.offsets[part.first : part.last + 2].astype(np.int64)
    edges = (offsets - offsets[0]).tolist()
    return {part.first + k: content[edges[k] : edges[k + 1]] for k in range(len(edges) - 1)}


def _range(cache: ShardCache, entry: ShardEntry, begin: int, end: int) -> tuple[bytes, str | None]:
    with cache.store.open(entry.raw.basename, begin, end) as body:
        return b"".join(body), body.tag
