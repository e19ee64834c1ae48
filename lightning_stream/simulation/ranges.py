"""Samples that come by ranges while their shards are being fetched, by the law of `SampleReader`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

from lightning_stream.reading.range_reads import REQUEST_BYTES, THREADS, are_cheaper
from lightning_stream.simulation.needs import Shards


class Ranged(NamedTuple):
    """What was read by ranges for a batch: of these shards, in so many rounds of requests that go out together."""

    shards: list[int]
    num_requests: int = 0
    num_bytes: int = 0
    num_rounds: int = 0
    largest_bytes: int = 0


class RangeReads:
    """What one process has read by ranges so far.

    Args:
        shards: The data.
        starts: Whether it may; None: where a whole batch may, with at most `spare_requests`.
    """

    def __init__(self, shards: Shards, starts: bool | None, spare_requests: int) -> None:
        self._shards, self._starts, self._spare_requests = shards, starts, spare_requests
        self._spent: Counter[int] = Counter()
        self._has_table: set[int] = set()
        self.num_requests = self.num_bytes = 0

    def read(self, wanted: Mapping[int, int]) -> Ranged:
        """Read so many samples of each shard by ranges, where that is cheaper than the shard."""
        if self._starts is False or (self._starts is None and self.num_requests >= self._spare_requests):
            return Ranged([])
        found = [shard for shard, count in wanted.items() if self._is_cheaper(shard, count)]
        num_requests = sum(1 + wanted[shard] for shard in found)
        is_too_much = len(found) < len(wanted) or self.num_requests + num_requests > self._spare_requests
        if self._starts is None and is_too_much:
            return Ranged([])
        return self._read({shard: wanted[shard] for shard in found})

    def _is_cheaper(self, shard: int, count: int) -> bool:
        size, samples = int(self._shards.raw_bytes[shard]), int(self._shards.num_samples[shard])
        table, spent = self._table_bytes(shard), self._spent[shard]
        cost = table + REQUEST_BYTES * (table > 0)
        return bool(self._shards.has_ranges[shard]) and are_cheaper(count, size, samples, table=cost, spent=spent)

    def _table_bytes(self, shard: int) -> int:
        return 0 if shard in self._has_table else 4 * int(self._shards.num_samples[shard])

    def _read(self, wanted: Mapping[int, int]) -> Ranged:
        num_requests = num_bytes = largest = num_tables = 0
        for shard, count in wanted.items():
            each = int(self._shards.raw_bytes[shard]) // max(1, int(self._shards.num_samples[shard]))
            table = self._table_bytes(shard)
            requests, size = count + (table > 0), count * each + table
            self._spent[shard] += requests * REQUEST_BYTES + size
            num_tables += table > 0
            num_requests, num_bytes, largest = num_requests + requests, num_bytes + size, max(largest, each)
        self._has_table.update(wanted)
        self.num_requests += num_requests
        self.num_bytes += num_bytes
        # Samples of one size are requested together with the tables.
        rounds = -(-num_requests // THREADS) + (num_tables > 0 and not self._shards.has_equal_sizes)
        return Ranged(list(wanted), num_requests, num_bytes, rounds, largest)
