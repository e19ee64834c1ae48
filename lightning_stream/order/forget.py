"""Samples that a training run must forget: what they affected, and the order in which others take their place.

    positions   0  1  2  3  4  5  6  7 ...       7 is forgotten; checkpoints at 0, 4 and 8
    run         4  9  2  0  5  7  8  1 ...       it was trained on at position 5
    replay                  5  3  8  1 ...       continues from the checkpoint at 4, with 3 in the place of 7

Nothing changes before the first affected position, so a replay from a checkpoint before it is exactly what a run does
that has never had the forgotten samples.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from .arrays import Bools, Ints
from .bitmap import as_ids
from .orders import Order, chunks_of
from .permutation import MIX_STEP, RngStream, mix64, random_u64
from .snapshot import Snapshot

_CHUNK = 1 << 18
_WORTH_A_SCAN = 1000  # reading the order costs 0.1 us a position, and finding one sample about 100 us


@dataclass(frozen=True, eq=False)
class Forgotten:
    """Samples that are forgotten, and those that take their places: others of the same stream, drawn by the seed.

    Args:
        snapshot: The data.
        ids: The forgotten sample ids: int64[n], ascending and unique.

    Raises:
        TypeError: Something other than ids, e.g. a mask.
        ValueError: Ids that do not exist; or a whole stream is forgotten, so that nothing can take its place.
    """

    snapshot: Snapshot
    ids: Ints

    @classmethod
    def of(cls, snapshot: Snapshot, ids: Iterable[int] | Ints) -> Forgotten:
        """These samples, in any order."""
        return cls(snapshot, np.unique(as_ids(ids, "forgotten samples")).astype(np.int64))

    def __post_init__(self) -> None:
        ids = self.ids
        snapshot = self.snapshot
        if not len(ids) or ids[0] < 0 or ids[-1] >= snapshot.num_samples:
            raise ValueError(
                f"Forgotten samples must be at least one of the {snapshot.num_samples} of the data; found "
                f"{len(ids)} ids{f' from {ids[0]} to {ids[-1]}' if len(ids) else ''}."
            )
        forgotten = np.bincount(snapshot.streams_of(ids), minlength=snapshot.num_streams)
        emptied = np.flatnonzero((forgotten == snapshot.stream_samples) & (forgotten > 0)).tolist()
        if emptied:
            names = ", ".join(snapshot.stream_names[stream] for stream in emptied)
            raise ValueError(
                f"Other samples of a stream take the places of the forgotten ones, but all of {names} are forgotten. "
                "Keep one, or remove the stream."
            )

    @cached_property
    def _remaining_before(self) -> Ints:
        """int64[n]: how many samples with smaller ids than each forgotten one are not forgotten."""
        return self.ids - np.arange(len(self.ids))

    @property
    def digest(self) -> str:
        """16 hexadecimal digits that differ for any other samples."""
        return hashlib.sha256(self.ids.astype("<i8").tobytes()).hexdigest()[:16]

    def among(self, ids: Ints) -> Bools:
        """bool[n]: which of these ids are forgotten. O(n log forgotten)."""
        at = np.minimum(np.searchsorted(self.ids, ids), len(self.ids) - 1)
        are_forgotten: Bools = self.ids[at] == ids
        return are_forgotten

    def replaced(self, ids: Ints, seed: int, epoch: int) -> Ints:
        """These ids, with others in the place of the forgotten ones: the same ones in all of an epoch."""
        forgotten = self.among(ids)
        if not forgotten.any():
            return ids
        ids = ids.copy()
        ids[forgotten] = self.substitutes(ids[forgotten], seed, epoch)
        return ids

    def substitutes(self, ids: Ints, seed: int, epoch: int) -> Ints:
        """For each forgotten id, a sample of its stream that is not forgotten."""
        snapshot = self.snapshot
        stream = snapshot.streams_of(ids)
        first = snapshot.shard_offsets[snapshot.stream_offsets[stream]]
        count = snapshot.stream_samples[stream]
        before = np.searchsorted(self.ids, first)
        behind = np.searchsorted(self.ids, first + count)
        remaining = (count - (behind - before)).astype(np.uint64)
        salt = random_u64(RngStream.FORGOTTEN, seed, epoch, size=1)
        rank = (mix64(salt + ids.astype(np.uint64) * MIX_STEP) % remaining).astype(np.int64) + first - before
        return rank + np.searchsorted(self._remaining_before, rank, side="right")

    def delivered_as(self, sample_id: int, seed: int, epoch: int) -> list[int]:
        """The drawn ids for which this sample is delivered: its own, and those whose place it takes."""
        if self.among(np.array([sample_id]))[0]:
            return []
        taken = self.ids[self.substitutes(self.ids, seed, epoch) == sample_id]
        return [sample_id, *taken.tolist()]

    def first_in(self, order: Order, end: int) -> int | None:
        """The first position of an order before ``end`` that has one of these samples.

        Few samples are searched for one by one; with many of them, the order is read, since the first one comes soon.
        """
        if len(self.ids) * _WORTH_A_SCAN < end:
            firsts = [at for sample_id in self.ids.tolist() for at in order.find(sample_id)[:1] if at < end]
            return min(firsts, default=None)
        for at in chunks_of(0, end, _CHUNK):
            hits = at[self.among(order.ids(at))]
            if len(hits):
                return int(hits[0])
        return None
