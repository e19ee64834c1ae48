"""Read some samples of remote shards by ranges of bytes, where that costs less than the whole shards.

A raw MDS shard begins with the table of its samples' offsets. One range reads the table, and one more each sample or
group of neighbours; at the same time, if all samples have one size. The samples then become a small shard of their own.
A range cannot be compared with the hash of its file. Instead, the table must fit the index, all ranges must come from
one version of the object, and each sample's columns must fill it; what does not is asked for again, and then the shard
is fetched. The samples are compared later, see `proofs`.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from itertools import pairwise
from pathlib import Path
from typing import TypeVar

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from lightning_stream.cache import ShardCache
from lightning_stream.errors import FormatError
from lightning_stream.formats.model import ShardEntry
from lightning_stream.formats.shard import Shard
from lightning_stream.shared_files import scratch_folder
from lightning_stream.threads import DaemonPool

_Ints = NDArray[np.int64]
_Offsets = NDArray[np.uint32]  # of a shard's samples, and the end: [num_samples + 1]
OpenShard = Callable[[int, ShardEntry, Path], Shard]  # from its number, its entry and the folder of its files
_Part = tuple[int, int]  # the first and the last of some samples that lie near each other
REQUEST_BYTES = 2 << 20  # the cost of a request, in bytes that could have come meanwhile: about 35 ms at 60 MB/s
_GAP_BYTES = REQUEST_BYTES // 8  # neighbours so near come in one range, with the bytes between them
_HELD_BYTES = 64 << 20  # of tables that are kept
THREADS = 16
_ATTEMPTS = 3  # to read a table and samples that fit the index
T = TypeVar("T")
_log = logging.getLogger(__name__)


class SampleRanges:
    """Reads samples by ranges, as long as that is cheaper than their shards. Thread-safe; of one process."""

    def __init__(self, open_shard: OpenShard) -> None:
        self._open_shard = open_shard
        self._tables: dict[int, _Offsets] = {}
        self._held_bytes = 0
        self._versions: dict[int, str | None] = {}  # of each shard's object, from its first range
        self._spent: Counter[int] = Counter()  # bytes, requests counted as such, by shard
        self.num_requests = 0
        self._guard = threading.Lock()
        self._pool = DaemonPool(THREADS, "range")

    def cheaper(self, number: int, cache: ShardCache, entry: ShardEntry, num_samples: int) -> bool:
        """Whether so many samples of a shard cost less than the shard, including what was spent on it before.

        Never if the user demands a hash, nor for shards that are compressed, of a format without such ranges, or in the
        cache.
        """
        raw = entry.raw
        raw_mds = entry.format == "mds" and entry.compressed is None
        if cache.config.validate_hash is not None or cache.in_place or not raw_mds:
            return False
        table = 0 if number in self._tables else REQUEST_BYTES + 4 * entry.num_samples
        if not are_cheaper(num_samples, raw.num_bytes, entry.num_samples, table=table, spent=self._spent[number]):
            return False
        if raw.origin is not None and (cache.other is None or not cache.other.has_samples(cache.store, entry)):
            return False
        return not cache.present(entry)

    def shards(self, wanted: Mapping[int, tuple[ShardCache, ShardEntry, _Ints]]) -> dict[int, Shard]:
        """By shard number, the samples of ascending, distinct indices as a shard of their own, numbered from 0.

        Shards whose answers do not fit the index, also when asked again, are left out, and not read by ranges any more.
        Raises StoreError where the store does not send them.
        """
        content = self.content(wanted)
        with scratch_folder() as folder:
            return {
                number: self._as_shard(
                    number, entry, [content[number][index] for index in indices.tolist()], Path(folder)
                )
                for number, (_, entry, indices) in wanted.items()
                if number in content
            }

    def content(self, wanted: Mapping[int, tuple[ShardCache, ShardEntry, _Ints]]) -> dict[int, dict[int, bytes]]:
        """The bytes of samples, by shard number and index; see `shards`."""
        made = {
            number: self._pool.submit(self._make, number, cache, entry, indices.tolist())
            for number, (cache, entry, indices) in wanted.items()
            if entry.raw.origin is not None
        }
        missing = {number: one for number, one in wanted.items() if number not in made}
        content: dict[int, dict[int, bytes]] = {}
        for _ in range(_ATTEMPTS):
            content |= self._cut_from_shards({number: one for number, one in missing.items() if number not in content})
            if not missing.keys() - content.keys():
                break
        for number in missing.keys() - content.keys():
            _log.warning("%s: its ranges do not fit its index; it is read as a whole.", missing[number][1].raw.basename)
            self.distrust(number, missing[number][1])
        return content | {
            number: dict(zip(wanted[number][2].tolist(), make.result(), strict=True)) for number, make in made.items()
        }

    def distrust(self, number: int, entry: ShardEntry) -> None:
        """Read no more of a shard by ranges: what came so does not fit."""
        with self._guard:
            self._forget(number)
            self._spent[number] += REQUEST_BYTES + entry.raw.num_bytes

    def _make(self, number: int, cache: ShardCache, entry: ShardEntry, indices: list[int]) -> list[bytes]:
        """Make samples of a shard of another format."""
        assert cache.other is not None
        samples = cache.other.samples(cache.store, entry, indices)
        with self._guard:
            self.num_requests += len(indices)
            self._spent[number] += REQUEST_BYTES * len(indices) + sum(map(len, samples))
        return samples

    def _cut_from_shards(
        self, wanted: Mapping[int, tuple[ShardCache, ShardEntry, _Ints]]
    ) -> dict[int, dict[int, bytes]]:
        """The bytes of samples, by shard number and index; without shards that have sent what does not fit."""
        known = {number: table for number in wanted if (table := self._tables.get(number)) is not None}
        fetched = {
            number: self._pool.submit(self._fetch_table, number, cache, entry)
            for number, (cache, entry, _) in wanted.items()
            if number not in known
        }
        for number, fetch in fetched.items():
            table = _equal_sizes_table(wanted[number][1])
            if table is None:
                table = _if_it_fits(fetch)
            if table is not None:
                known[number] = table
        parts = [
            (number, part, self._pool.submit(self._fetch_part, number, cache, entry, known[number], part))
            for number, (cache, entry, indices) in wanted.items()
            if number in known
            for part in _parts(known[number], indices)
        ]
        content: dict[int, dict[int, bytes]] = {number: {} for number in known}
        misfits = {number for number, fetch in fetched.items() if not _is_table(_if_it_fits(fetch), known.get(number))}
        for number, part, part_fetch in parts:
            came = _if_it_fits(part_fetch)
            if came is None:
                misfits.add(number)
            else:
                content[number] |= _cut(known[number], part, came)
        with self._guard:
            for number in misfits:
                self._forget(number)
                content.pop(number, None)
        return content

    def forget(self, number: int) -> None:
        """Forget what is known of a shard: the whole one is here."""
        with self._guard:
            self._spent.pop(number, None)
            self._forget(number)

    def _forget(self, number: int) -> None:
        self._versions.pop(number, None)
        self._forget_table(number)

    def _fetch_table(self, number: int, cache: ShardCache, entry: ShardEntry) -> _Offsets:
        end = table_bytes(entry.num_samples)
        offsets, version = fetch_offsets(cache, entry)
        with self._guard:
            self._expect_version(number, version, cache, entry)
            self._held_bytes += 0 if number in self._tables else end  # another thread may have fetched it meanwhile
            self._tables[number] = offsets
            self.num_requests += 1
            self._spent[number] += REQUEST_BYTES + end
            while self._held_bytes > _HELD_BYTES and len(self._tables) > 1:
                self._forget_table(next(iter(self._tables)))
        return offsets

    def _fetch_part(self, number: int, cache: ShardCache, entry: ShardEntry, table: _Offsets, part: _Part) -> bytes:
        begin, end = int(table[part[0]]), int(table[part[1] + 1])
        content, version = read_range(cache, entry, begin, end)
        where = f"{cache.store.url}/{entry.raw.basename}"
        if len(content) != end - begin:
            raise FormatError(f"{where}: it ends within the bytes {begin:,} to {end:,}, which its index has.")
        with self._guard:
            self._expect_version(number, version, cache, entry)
            self.num_requests += 1
            self._spent[number] += REQUEST_BYTES + len(content)
        return content

    def _expect_version(self, number: int, version: str | None, cache: ShardCache, entry: ShardEntry) -> None:
        """Refuse a range of another version of the object; the caller holds the guard."""
        if version == self._versions.setdefault(number, version):
            return
        self._forget(number)
        raise FormatError(
            f"{cache.store.url}/{entry.raw.basename}: it was replaced while it was read. Read again; write datasets to "
            "new folders."
        )

    def _forget_table(self, number: int) -> None:
        if (table := self._tables.pop(number, None)) is not None:
            self._held_bytes -= 4 + table.nbytes

    def _as_shard(self, number: int, entry: ShardEntry, samples: list[bytes], folder: Path) -> Shard:
        sizes = np.array([table_bytes(len(samples)), *map(len, samples)], np.int64)
        head = len(samples).to_bytes(4, "little") + np.cumsum(sizes).astype("<u4").tobytes()
        content = b"".join([head, *samples])
        path = folder / entry.raw.basename
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        raw = replace(entry.raw, num_bytes=len(content), hashes={})
        return self._open_shard(number, replace(entry, num_samples=len(samples), raw=raw), folder)


def are_cheaper(num_samples: int, shard_bytes: int, shard_samples: int, *, table: int, spent: int) -> bool:
    """Whether ranges for so many samples of a shard cost less than the shard, with its table and what was spent."""
    wanted = num_samples * (REQUEST_BYTES + shard_bytes // max(1, shard_samples))
    return spent + table + wanted <= REQUEST_BYTES + shard_bytes


def table_bytes(num_samples: int) -> int:
    """Bytes of the number of samples and their offsets, with which a raw MDS shard begins."""
    return 4 * (num_samples + 2)


def fetch_offsets(cache: ShardCache, entry: ShardEntry) -> tuple[_Offsets, str | None]:
    """Fetch the offsets of a raw MDS shard's samples, and their end, with the version of the object.

    FormatError if they do not fit the index.
    """
    content, version = read_range(cache, entry, 0, table_bytes(entry.num_samples))
    return offsets_of(content, cache, entry), version


def offsets_of(content: bytes, cache: ShardCache, entry: ShardEntry) -> _Offsets:
    """The offsets with which a raw MDS shard begins; FormatError if they do not fit the index."""
    end = table_bytes(entry.num_samples)
    if len(content) != end:
        raise _no_such_shard(cache, entry)
    offsets = np.frombuffer(content[4:], "<u4")
    fits = int.from_bytes(content[:4], "little") == entry.num_samples and int(offsets[0]) >= end
    fits = fits and (entry.raw.origin is not None or int(offsets[-1]) == entry.raw.num_bytes)
    if not fits or (offsets[1:] < offsets[:-1]).any():
        raise _no_such_shard(cache, entry)
    return offsets


def _equal_sizes_table(entry: ShardEntry) -> _Offsets | None:
    """The offsets of samples of one size, one after another up to the end; None where they differ in size."""
    stride = sum(size or 0 for size in entry.schema.sizes)
    first = entry.raw.num_bytes - entry.num_samples * stride
    if None in entry.schema.sizes or first < table_bytes(entry.num_samples):
        return None
    return (first + stride * np.arange(entry.num_samples + 1)).astype(np.uint32)


def _no_such_shard(cache: ShardCache, entry: ShardEntry) -> FormatError:
    return FormatError(
        f"{cache.store.url}/{entry.raw.basename}: it does not begin as a shard of {entry.num_samples} samples in "
        f"{entry.raw.num_bytes:,} bytes, as in its index. Compare it with the dataset's source."
    )


def _if_it_fits(answer: Future[T]) -> T | None:
    """What came; None if it does not fit the index."""
    try:
        return answer.result()
    except FormatError:
        return None


def _is_table(came: _Offsets | None, expected: _Offsets | None) -> bool:
    return came is not None and expected is not None and np.array_equal(came, expected)


def _parts(table: _Offsets, indices: _Ints) -> list[_Part]:
    gaps = table[indices[1:]].astype(np.int64) - table[indices[:-1] + 1]
    firsts = np.flatnonzero(np.concatenate([[True], gaps > _GAP_BYTES]))
    lasts = np.append(firsts[1:], len(indices)) - 1
    return [(int(indices[a]), int(indices[b])) for a, b in zip(firsts, lasts, strict=True)]


def _cut(table: _Offsets, part: _Part, content: bytes) -> dict[int, bytes]:
    offsets = table[part[0] : part[1] + 2].astype(np.int64)
    edges = pairwise((offsets - offsets[0]).tolist())
    return {part[0] + k: content[begin:end] for k, (begin, end) in enumerate(edges)}


def read_range(cache: ShardCache, entry: ShardEntry, begin: int, end: int) -> tuple[bytes, str | None]:
    """Fetch the bytes ``[begin, end)`` of a shard, with the version of the object; one of another format is made."""
    if entry.raw.origin is not None:
        with cache.lease(entry) as lease, (lease.folder / entry.raw.basename).open("rb") as file:
            file.seek(begin)
            return file.read(end - begin), None
    with cache.store.open(entry.raw.basename, begin, end) as body:
        return b"".join(body), body.tag
