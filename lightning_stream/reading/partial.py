"""Some samples of shards that are not here whole: from files that are still arriving, or by ranges of bytes.

A raw MDS shard begins with the table of its samples' offsets, and a single connection brings it in order. So its first
samples can be read long before the last ones are here, without another request: an order with a quick start begins with
these. Where it costs less than the whole shard, one range reads the table, and one more each sample or group of
neighbours; at the same time, if all samples have one size. Of a seekable shard, one range reads the table of its
frames, and one more each frame or group of neighbours.

Either way, the samples become a small shard of their own. The hash of their file holds for all of it, and cannot be
compared. Instead, the table must fit the index, all ranges must come from one version of the object, and each sample's
columns must fill it; what does not is asked for again, and then the shard is fetched. The samples are compared later,
see `proofs`.
"""

from __future__ import annotations

import logging
import os
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import BinaryIO

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from lightning_stream.cache import ShardCache
from lightning_stream.errors import FormatError
from lightning_stream.formats.codecs import decompress
from lightning_stream.formats.memory import Int64s, sample_offsets
from lightning_stream.formats.model import SEEKABLE, FileEntry, ShardEntry
from lightning_stream.formats.seekable import Frames
from lightning_stream.formats.shard import Shard
from lightning_stream.reading.proofs import UnverifiedRead
from lightning_stream.reading.shard_table import ShardTable
from lightning_stream.reading.stream import DownloadHook
from lightning_stream.stores import RetryingStore
from lightning_stream.threads import DaemonPool, Lock

_Offsets = NDArray[np.uint32]  # of a shard's samples or frames, and the end: [their number + 1]
REQUEST_BYTES = 2 << 20  # the cost of a request, in bytes that could have come meanwhile: about 35 ms at 60 MB/s
_GAP_BYTES = REQUEST_BYTES // 8  # neighbours so near come in one range, with the bytes between them
_HELD_BYTES = 64 << 20  # of tables that are kept
_THREADS = 16
_ATTEMPTS = 3  # to read a table and samples that fit the index
# Between two looks at a file that arrives
_SHORTEST_PAUSE_S = 0.001
_LONGEST_PAUSE_S = 0.01
_STALL_S = 5.0  # without growth: its process may be dead, and a thread that waits for the whole shard takes over
_MOST_OF_SHARD = 0.5  # is read while the rest arrives
_log = logging.getLogger(__name__)


PartialShard = tuple[Shard, UnverifiedRead]  # whose sample k is that of index ``read.indices[k]`` in the whole one


class PartialShards:
    """Reads samples of shards that are not here whole. Thread-safe; of one process."""

    def __init__(self, shards: ShardTable) -> None:
        self._shards = shards
        self._tables: dict[int, _Offsets] = {}
        self._versions: dict[int, str | None] = {}  # of each shard's object, from its first range
        self._costs: Counter[int] = Counter()  # bytes, requests counted as such, by shard
        self._distrusted: set[int] = set()
        self.num_requests = 0
        self._guard = Lock()
        self._requests = DaemonPool(_THREADS, "range")
        self._readers = DaemonPool(_THREADS, "partial")  # which wait for requests

    def is_cheaper(self, shard_id: int, indices: Int64s) -> bool:
        """Whether ranges for these samples of a shard cost less than the shard, with what was spent on it before.

        Never if the user demands a hash or whole shards, nor for shards that are compressed in one piece, of a format
        without such ranges, or in the cache.
        """
        cache, entry = self._shards.entry(shard_id)
        if isinstance(cache.store, DownloadHook) or not self._may_be_partial(shard_id):
            return False
        num_bytes = _stored(entry).num_bytes
        begin, end = _frames(entry).table
        table = 0 if shard_id in self._tables else REQUEST_BYTES + end - begin
        num_ranges, range_bytes = ranges_of(entry, indices)
        cost = self._costs[shard_id] + table + num_ranges * REQUEST_BYTES + range_bytes
        if cost > REQUEST_BYTES + num_bytes:
            return False
        if entry.raw.origin is not None and (cache.other is None or not cache.other.has_samples(cache.store, entry)):
            return False
        return not cache.present(entry)

    def comes_soon(self, shard_id: int, last: int) -> bool:
        """Whether the samples up to an index surely arrive well before the end of the shard, and can be read then.

        Never if the user demands a hash or whole shards, nor for those that are compressed in one piece or of other
        formats.
        """
        cache, entry = self._shards.entry(shard_id)
        if entry.raw.origin is not None or not isinstance(cache.store, RetryingStore):
            return False
        part = (last + 1) / entry.num_samples
        is_worth_it = part <= _MOST_OF_SHARD and _stored(entry).num_bytes * (1 - part) >= REQUEST_BYTES
        return is_worth_it and self._may_be_partial(shard_id)

    def _may_be_partial(self, shard_id: int) -> bool:
        cache, entry = self._shards.entry(shard_id)
        has_frames = entry.format == "mds" and (entry.compressed is None or _is_seekable(entry))
        is_trusted = shard_id not in self._distrusted and cache.config.validate_hash is None
        return has_frames and is_trusted and not cache.in_place and self._shards.config.start_by_range is not False

    def arriving(self, shard_id: int, indices: Int64s, has_come: Callable[[], bool]) -> PartialShard | None:
        """Samples of a shard that is being fetched, by any process, as soon as they are here.

        None if the whole shard has come before, or does not arrive in order.
        """
        try:
            samples = _arriving(*self._shards.entry(shard_id), indices, has_come)
            return None if samples is None else self._as_shard(shard_id, indices, samples, is_awaited=True)
        except (OSError, FormatError):  # no space for a copy, or wrong bytes: the whole shard shows which are right
            return None

    def by_range(self, wanted: Mapping[int, Int64s], awaited: Collection[int]) -> dict[int, PartialShard]:
        """Samples of ascending, distinct indices by ranges, by shard id; some of the shards are `awaited`.

        Shards whose answers do not fit the index, also when asked again, are left out, and not read by ranges any more.
        Raises StoreError where the store does not send them.
        """
        reads = {
            shard_id: self._readers.submit(self._by_range, shard_id, indices, shard_id in awaited)
            for shard_id, indices in wanted.items()
        }
        return {shard_id: part for shard_id, read in reads.items() if (part := read.result()) is not None}

    def _by_range(self, shard_id: int, indices: Int64s, is_awaited: bool) -> PartialShard | None:
        for _ in range(_ATTEMPTS):
            with suppress(FormatError):
                return self._as_shard(shard_id, indices, self._samples(shard_id, indices), is_awaited=is_awaited)
            self._drop(shard_id)
        basename = self._shards.entry(shard_id)[1].raw.basename
        _log.warning("%s: its ranges do not fit its index; it is read as a whole.", basename)
        self.distrust(shard_id)
        return None

    def _samples(self, shard_id: int, indices: Int64s) -> dict[int, bytes]:
        """The bytes of samples of a shard by ranges, by their indices. FormatError if these do not fit its index."""
        cache, entry = self._shards.entry(shard_id)
        if entry.raw.origin is not None:
            assert cache.other is not None
            rows = cache.other.samples(cache.store, entry, indices.tolist())
            self._note(shard_id, len(indices), sum(map(len, rows)))
            return dict(zip(indices.tolist(), rows, strict=True))
        table = self._tables.get(shard_id)
        coming = None
        if table is None:
            coming = self._requests.submit(self._fetch_table, shard_id, entry)
            table = _equal_sizes_table(entry)
            table = coming.result() if table is None else table

        def request(begin: int, end: int) -> Callable[[], bytes]:
            return self._requests.submit(self._fetch, shard_id, begin, end).result

        samples = _read(entry, table, indices, request)
        if coming is not None and not np.array_equal(coming.result(), table):
            raise FormatError(f"{entry.raw.basename}: its samples differ in size.")
        return samples

    def _fetch_table(self, shard_id: int, entry: ShardEntry) -> _Offsets:
        frames = _frames(entry)
        table = frames.offsets(self._fetch(shard_id, *frames.table))
        with self._guard:
            self._tables[shard_id] = table
            while len(self._tables) > 1 and sum(known.nbytes for known in self._tables.values()) > _HELD_BYTES:
                del self._tables[next(iter(self._tables))]
        return table

    def _fetch(self, shard_id: int, begin: int, end: int) -> bytes:
        """Bytes of a shard, of the same version of its object as all before."""
        cache, entry = self._shards.entry(shard_id)
        content, version = read_range(cache, entry, begin, end)
        self._note(shard_id, 1, len(content))
        with self._guard:
            is_same = self._versions.setdefault(shard_id, version) == version
        if not is_same:
            raise FormatError(f"{entry.raw.basename}: it was replaced while it was read.")
        return content

    def _note(self, shard_id: int, num_requests: int, num_bytes: int) -> None:
        with self._guard:
            self.num_requests += num_requests
            self._costs[shard_id] += REQUEST_BYTES * num_requests + num_bytes

    def distrust(self, shard_id: int) -> None:
        """Read no more of a shard before all of it is here: what came does not fit."""
        self._drop(shard_id)
        self._distrusted.add(shard_id)

    def drop(self, shard_id: int) -> None:
        """Forget what is known of a shard: the whole one is here."""
        self._drop(shard_id)
        self._costs.pop(shard_id, None)
        self._distrusted.discard(shard_id)

    def _drop(self, shard_id: int) -> None:
        with self._guard:
            self._tables.pop(shard_id, None)
            self._versions.pop(shard_id, None)

    def _as_shard(
        self, shard_id: int, indices: Int64s, content: Mapping[int, bytes], *, is_awaited: bool
    ) -> PartialShard:
        entry = self._shards.entry(shard_id)[1]
        samples = [content[index] for index in indices.tolist()]
        small = replace(entry, num_samples=len(samples))
        offsets = np.cumsum([table_bytes(small), *map(len, samples)], dtype=np.int64).astype("<u4")
        head = len(samples).to_bytes(4, "little") + offsets.tobytes()
        with tempfile.NamedTemporaryFile(prefix="lightning-stream-", buffering=0) as file:
            file.write(b"".join([head, *samples]))
            path = Path(file.name)
            raw = replace(entry.raw, basename=path.name, num_bytes=int(offsets[-1]), hashes={})
            shard = self._shards.open(shard_id, replace(small, raw=raw), path.parent)
        return shard, UnverifiedRead.of(shard_id, indices.tolist(), samples, is_awaited)


def table_bytes(entry: ShardEntry) -> int:
    """Bytes of the number of samples and their offsets, with which a raw MDS shard begins."""
    return 4 * (entry.num_samples + 2)


class _Samples:
    """The samples of a raw shard, as `Frames` of one sample each."""

    def __init__(self, entry: ShardEntry) -> None:
        self._entry = entry
        self.num_frames = entry.num_samples
        self.table = (0, table_bytes(entry))

    def of(self, indices: Int64s) -> Int64s:
        """The frames that have these samples."""
        return indices

    def offsets(self, table: bytes) -> _Offsets:
        """Where the frames begin, and the end of the last, from the bytes of the table."""
        return offsets_of(table, self._entry, self._entry.raw.basename)

    def arrived(self, file: BinaryIO, num_bytes: int, last: int, edges: list[int]) -> int:
        """As that of `Frames`: have in `edges` where frames begin, and return how many bytes are needed."""
        if num_bytes < self.table[1]:
            return self.table[1]
        edges[:] = self.offsets(file.read(self.table[1])).tolist()
        return edges[last + 1]


def _is_seekable(entry: ShardEntry) -> bool:
    return (entry.compression or "").startswith(SEEKABLE)


def _frames(entry: ShardEntry) -> Frames | _Samples:
    """What can be read alone of a shard in its store."""
    return Frames(entry) if _is_seekable(entry) else _Samples(entry)


def _stored(entry: ShardEntry) -> FileEntry:
    """The file of a shard in its store."""
    return entry.compressed or entry.raw


def ranges_of(entry: ShardEntry, indices: Int64s) -> tuple[int, int]:
    """How many ranges have these samples, and their bytes, if all of a shard's are equally large."""
    frames = _frames(entry)
    parts = frames.of(indices)
    mean = _stored(entry).num_bytes / max(1, frames.num_frames)
    gaps = mean * (parts[1:] - parts[:-1] - 1)
    # Other formats ask for each sample by itself.
    near = gaps[gaps <= _GAP_BYTES] if entry.raw.origin is None else gaps[:0]
    return len(parts) - len(near), int(mean * len(parts) + near.sum())


def offsets_of(content: bytes, entry: ShardEntry, where: str) -> _Offsets:
    """The offsets with which a raw MDS shard begins; FormatError if they do not fit the index."""
    return sample_offsets(np.frombuffer(content, np.uint8), entry.num_samples, len(content), entry.raw.num_bytes, where)


def _equal_sizes_table(entry: ShardEntry) -> _Offsets | None:
    """The offsets of samples of one size, one after another up to the end; None where they differ in size."""
    stride = entry.fixed_bytes
    first = entry.raw.num_bytes - entry.num_samples * stride
    if entry.compressed is not None or None in entry.sizes or first < table_bytes(entry):
        return None
    return (first + stride * np.arange(entry.num_samples + 1)).astype(np.uint32)


def _read(
    entry: ShardEntry, table: _Offsets, indices: Int64s, request: Callable[[int, int], Callable[[], bytes]]
) -> dict[int, bytes]:
    """The samples of these indices; of raw shards, also those between them.

    ``request(begin, end)`` begins to read some bytes, and returns what waits for them: neighbours come together.
    """
    frames = _frames(entry)
    wanted = frames.of(indices)
    gaps = table[wanted[1:]].astype(np.int64) - table[wanted[:-1] + 1]
    firsts = np.flatnonzero(np.concatenate([[True], gaps > _GAP_BYTES]))
    lasts = np.append(firsts[1:], len(wanted)) - 1
    parts = list(zip(wanted[firsts].tolist(), wanted[lasts].tolist(), strict=True))
    requests = [request(int(table[first]), int(table[last + 1])) for first, last in parts]
    stored = dict[int, bytes]()
    for (first, last), result in zip(parts, requests, strict=True):
        content = result()
        edges = (table[first : last + 2] - table[first]).tolist()
        if len(content) != edges[-1]:
            raise FormatError(f"the samples {first} to {last} have {edges[-1]:,} bytes; found {len(content):,}")
        stored |= {first + k: content[begin:end] for k, (begin, end) in enumerate(pairwise(edges))}
    if isinstance(frames, _Samples):
        return stored
    samples = dict[int, bytes]()
    for frame in wanted.tolist():
        content = decompress(SEEKABLE, stored[frame], entry.raw.num_bytes, f"{entry.raw.basename}, frame {frame}")
        samples |= frames.samples(frame, content)
    return samples


def _arriving(
    cache: ShardCache, entry: ShardEntry, indices: Int64s, has_come: Callable[[], bool]
) -> dict[int, bytes] | None:
    """Samples of a file that grows, when they are here; None where it is whole before, comes in parts, or stalls."""
    path = cache.arriving(entry)
    pause_s = _SHORTEST_PAUSE_S
    needed = 0
    edges = [0]
    frames = _frames(entry)
    size = 0
    grew = time.monotonic()
    last = int(frames.of(indices)[-1])
    while not has_come() and time.monotonic() - grew < _STALL_S:
        with suppress(FileNotFoundError), path.open("rb") as file:
            num_bytes = os.fstat(file.fileno()).st_size
            if num_bytes >= _stored(entry).num_bytes:
                return None  # it is being verified, or comes in parts
            if num_bytes != size:
                size = num_bytes
                grew = time.monotonic()
            if num_bytes >= needed and num_bytes >= (needed := frames.arrived(file, num_bytes, last, edges)):
                return _read(entry, np.array(edges, np.uint32), indices, partial(_request_of_file, file.fileno()))
        time.sleep(pause_s)
        pause_s = min(_LONGEST_PAUSE_S, 1.2 * pause_s)
    return None


def _request_of_file(descriptor: int, begin: int, end: int) -> Callable[[], bytes]:
    return partial(os.pread, descriptor, end - begin, begin)


def read_range(cache: ShardCache, entry: ShardEntry, begin: int, end: int) -> tuple[bytes, str | None]:
    """Fetch the bytes ``[begin, end)`` of a shard, with the version of the object."""
    with cache.store.open(_stored(entry).basename, begin, end) as body:
        return b"".join(body), body.tag
