"""A reader of some samples of another reader."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_stream.cache import ShardCache
from lightning_stream.formats.index import Index
from lightning_stream.formats.shard import Buffers
from lightning_stream.order import Snapshot
from lightning_stream.order.bitmap import Bitmap
from lightning_stream.reading.fetches import Announced, ReaderProcess, UseFlat
from lightning_stream.reading.next_use import NextUse
from lightning_stream.reading.reader import SampleReader, T
from lightning_stream.reading.stream_shards import StreamShards

Choice = tuple[Bitmap, Mapping[str, int]]


class SubsetReader(SampleReader):
    """Reads some samples of another reader, and only their shards; its sample ids count them.

    Args:
        whole: That reader.
        chosen: The sample ids that it has there; or what finds them on first use, with how many each rule left.
    """

    def __init__(self, whole: SampleReader, chosen: Bitmap | Callable[[SampleReader], Choice]) -> None:
        super().__init__(whole.streams, whole.defaults, whole.config)
        self.whole, self.counters, self.delivered = whole, whole.counters, whole.delivered
        self._choose = chosen if callable(chosen) else None
        if isinstance(chosen, Bitmap):
            self._choice, self.snapshot = (chosen, {}), whole.snapshot.subset(chosen)

    def __getstate__(self) -> dict[str, Any]:
        # The function that chose the samples, e.g. a lambda, is no longer needed and may not be picklable.
        return {**super().__getstate__(), "_choose": None if "_choice" in self.__dict__ else self._choose}

    @cached_property
    def _choice(self) -> Choice:
        assert self._choose is not None
        return self._choose(self.whole)

    @property
    def chosen(self) -> Bitmap:
        """The sample ids in `whole`."""
        return self._choice[0]

    @property
    def left(self) -> Mapping[str, int]:
        """How many samples were left after each rule, by the rule; none where the ids were given."""
        return self._choice[1]

    @property
    def caches(self) -> tuple[ShardCache, ...]:
        """One cache per stream."""
        return self.whole.caches

    @property
    def indexes(self) -> tuple[Index, ...]:
        """One parsed index per stream."""
        return self.whole.indexes

    @property
    def shards(self) -> StreamShards:
        """The shards of all streams, with those of added columns; they have the same numbers here."""
        return self.whole.shards

    def _mine(self) -> ReaderProcess:
        return self.whole._mine()  # noqa: SLF001 - of the same class

    @cached_property
    def snapshot(self) -> Snapshot:
        """The chosen samples alone, with a digest of their own."""
        return self.whole.snapshot.subset(self.chosen)

    def original_ids(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """The ids of these samples in the streams."""
        return self.whole.original_ids(self.chosen.select(ids))

    def _read_lengths(self, name: str) -> NDArray[np.uint32]:
        found = self.whole.lengths(name)[self.chosen.mask]
        found.setflags(write=False)
        return found

    def sample(self, sample_id: int) -> dict[str, Any]:
        """Read one sample of the subset."""
        return self.whole.sample(self.chosen[sample_id])

    def batch(self, ids: NDArray[np.int64], out: Buffers | None = None) -> dict[str, Any]:
        """Gather samples of the subset as columns."""
        return self.whole.batch(self.chosen.select(ids), out)

    def use_flat(self, ids: NDArray[np.int64], names: Sequence[str], use: UseFlat[T]) -> T:
        """Read the 1-d arrays of samples of the subset."""
        return self.whole.use_flat(self.chosen.select(ids), names, use)

    def read_ahead(self, ids: NDArray[np.int64]) -> Announced | None:
        """Begin to fetch the shards of these samples, except those whose few samples in the subset come by ranges."""
        shards = self.snapshot.shards_of(ids)
        few = [number for number in np.unique(shards).tolist() if self._is_few(number)]
        return self.whole.read_ahead(self.chosen.select(ids[~np.isin(shards, few)]))

    def _is_few(self, number: int) -> bool:
        """Whether all samples that the subset has of a shard cost less than the shard."""
        return self.ranges_are_cheaper(number, int(self.snapshot.sizes[number]))

    def forget(self, next_use: NextUse) -> None:
        """End a plan."""
        self.whole.forget(next_use)

    def close(self) -> None:
        """Close every mapped shard."""
        self.whole.close()
