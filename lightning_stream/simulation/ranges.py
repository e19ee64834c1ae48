"""Samples that come by ranges while their shards are being fetched, by the law of `SampleReader`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from lightning_stream.reading.range_reads import REQUEST_BYTES, THREADS, are_cheaper
from lightning_stream.reading.shard_heads import come_early
from lightning_stream.simulation.needs import Shards


class RangeReads:
    """What one process has read by ranges so far: so many requests and bytes.

    Args:
        shards: The data.
        starts: Whether it may; None: where a whole batch may, with at most `spare_requests`.
    """

    def __init__(self, shards: Shards, starts: bool | None, spare_requests: int) -> None:
        self._shards, self._starts, self._spare_requests = shards, starts, spare_requests
        self._spent: Counter[int] = Counter()
        self._has_table: set[int] = set()
        self.num_requests = self.num_bytes = 0

    def come_early(self, shard: int, part: float) -> bool:
        """Whether the beginning of a shard is read while the rest of it arrives."""
        num_bytes = int(self._shards.raw_bytes[shard])
        return self._starts is not False and bool(self._shards.has_ranges[shard]) and come_early(part, num_bytes)

    def chosen(self, wanted: Mapping[int, int], beginnings: Mapping[int, float]) -> list[int]:
        """The shards of which so many samples are read by ranges, because that is cheaper than the shard."""
        if self._starts is None and all(self.come_early(shard, beginnings.get(shard, 1.0)) for shard in wanted):
            return []
        if self._starts is False or (self._starts is None and self.num_requests >= self._spare_requests):
            return []
        found = [shard for shard, count in wanted.items() if self._is_cheaper(shard, count)]
        num_requests = self.num_requests + sum(1 + wanted[shard] for shard in found)
        is_whole = len(found) == len(wanted) and num_requests <= self._spare_requests
        return found if self._starts or is_whole else []

    def _is_cheaper(self, shard: int, count: int) -> bool:
        size, samples = int(self._shards.raw_bytes[shard]), int(self._shards.num_samples[shard])
        table = 0 if shard in self._has_table else REQUEST_BYTES + 4 * samples
        is_cheaper = are_cheaper(count, size, samples, table=table, spent=self._spent[shard])
        return bool(self._shards.has_ranges[shard]) and is_cheaper

    def read(self, wanted: Mapping[int, int]) -> tuple[int, int, int]:
        """Read so many samples of each shard: the requests, in how many rounds, and the bytes of the largest."""
        num_requests = largest = num_tables = 0
        for shard, count in wanted.items():
            samples, is_first = int(self._shards.num_samples[shard]), shard not in self._has_table
            each = int(self._shards.raw_bytes[shard]) // max(1, samples)
            requests, size = count + is_first, count * each + 4 * samples * is_first
            self._spent[shard] += requests * REQUEST_BYTES + size
            self.num_bytes += size
            num_requests, largest, num_tables = num_requests + requests, max(largest, each), num_tables + is_first
        self._has_table.update(wanted)
        self.num_requests += num_requests
        # Samples of one size are requested together with the tables.
        rounds = -(-num_requests // THREADS) + (num_tables > 0 and not self._shards.has_equal_sizes)
        return num_requests, rounds, largest
