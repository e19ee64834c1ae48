"""Samples that come by ranges while their shards are being fetched, by the law of `SampleRanges`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

from lightning_stream.reading.range_reads import REQUEST_BYTES, THREADS, are_cheaper
from lightning_stream.simulation.needs import Shards


class Ranged(NamedTuple):
    """What was read by ranges for a batch: of these shards, in so many rounds of requests that go out together."""

    shards: set[int]
    num_requests: int
    num_bytes: int
    num_rounds: int
    largest_bytes: int


class RangeReads:
    """What one process has read by ranges so far."""

    def __init__(self) -> None:
        self._spent: Counter[int] = Counter()
        self._has_table: set[int] = set()

    def read(self, shards: Shards, wanted: Mapping[int, int]) -> Ranged:
        """Read so many samples of each shard by ranges, where that is cheaper than the shard."""
        found: set[int] = set()
        num_requests = num_bytes = largest = num_tables = 0
        for shard, count in wanted.items():
            size, samples = int(shards.raw_bytes[shard]), int(shards.num_samples[shard])
            table = 0 if shard in self._has_table else REQUEST_BYTES + 4 * samples
            each = size // max(1, samples)
            is_cheaper = are_cheaper(count, size, samples, table=table, spent=self._spent[shard])
            if not shards.has_ranges[shard] or not is_cheaper:
                continue
            found.add(shard)
            self._has_table.add(shard)
            self._spent[shard] += table + count * (REQUEST_BYTES + each)
            num_tables += table > 0
            num_requests += count + (table > 0)
            num_bytes += count * each + (4 * samples if table else 0)
            largest = max(largest, each)
        rounds = -(-num_requests // THREADS) + (num_tables > 0 and not shards.has_equal_sizes)
        return Ranged(found, num_requests, num_bytes, rounds, largest)
