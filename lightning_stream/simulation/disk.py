"""The cache of a simulated node: which shards it has, and which it evicts under a limit."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Sequence

from lightning_stream.simulation.needs import Need, Shards
from lightning_stream.simulation.shared import Call


class Disk:
    """The shards in the cache of a node. As the loader's, it evicts first what is needed last.

    Attributes:
        fetching: What happens when a shard is here, by the shards that are being fetched.
        peak_bytes: The most bytes that it had at once.
        num_fetched_again: Shards that had been here before.
        were_here: All that were fetched.
    """

    def __init__(self, shards: Shards, limit_bytes: int | None, needs: Sequence[Sequence[Need]]) -> None:
        self.limit_bytes = limit_bytes
        self.fetching: dict[int, list[Call]] = {}
        self.peak_bytes = self.num_fetched_again = 0
        self._raw, self._stored = shards.raw_bytes, shards.stored_bytes
        self._here: set[int] = set()
        self.were_here: set[int] = set()
        self._held: Counter[int] = Counter()
        self._bytes = 0
        self._waiting: list[Call] = []
        self._uses: defaultdict[int, list[int]] = defaultdict(list)  # the steps that need a shard
        if limit_bytes is not None:
            for step, shard in sorted({(need.step, shard) for own in needs for need in own for shard in need.shards}):
                self._uses[shard].append(step)

    def has(self, shard: int) -> bool:
        """Whether a shard is here."""
        return shard in self._here

    def make_space(self, shard: int, step: int) -> bool:
        """Reserve space for a shard, with its compressed file; False if all other shards are in use."""
        need = self._reserved(shard)
        excess = 0 if self.limit_bytes is None else self._bytes + need - self.limit_bytes
        if excess > 0:
            free = sorted((one for one in self._here if not self._held[one]), key=lambda one: self._next_use(one, step))
            while excess > 0 and free:
                gone = free.pop()
                self._here.discard(gone)
                self._bytes -= int(self._raw[gone])
                excess -= int(self._raw[gone])
        if excess > 0:
            return False
        self._bytes += need
        self.peak_bytes = max(self.peak_bytes, self._bytes)
        self.num_fetched_again += shard in self.were_here
        self.were_here.add(shard)
        return True

    def _reserved(self, shard: int) -> int:
        raw, stored = int(self._raw[shard]), int(self._stored[shard])
        return raw if raw == stored else raw + stored

    def _next_use(self, shard: int, step: int) -> float:
        uses = self._uses[shard]
        at = bisect_left(uses, step)
        return uses[at] if at < len(uses) else math.inf

    def publish(self, shard: int) -> None:
        """Note that a shard is here, and its compressed file is not any more."""
        self._here.add(shard)
        self._bytes -= self._reserved(shard) - int(self._raw[shard])

    def hold(self, shard: int) -> None:
        """Keep a shard that a process has opened."""
        self._held[shard] += 1

    def release(self, shard: int) -> None:
        """Undo one `hold`."""
        self._held[shard] -= 1

    def wait(self, call: Call) -> None:
        """Let a fetch wait for space."""
        self._waiting.append(call)

    def waiting(self) -> list[Call]:
        """Take out what waits for space."""
        found, self._waiting = self._waiting, []
        return found
