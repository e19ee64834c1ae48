"""A reader of some samples of another reader."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_stream.order import Snapshot
from lightning_stream.reading.fetches import Announced, NextUse, UseFlat
from lightning_stream.reading.reader import SampleReader, T


class SubsetReader(SampleReader):
    """Reads some samples (``ids``, each once) of another reader, and only their shards; its sample ids count them."""

    def __init__(self, whole: SampleReader, ids: NDArray[np.int64]) -> None:
        super().__init__(whole.streams, whole.defaults, whole.config)
        self.whole = whole
        self._snapshot, self._ids = whole.snapshot.subset(ids)  # which are ascending

    @property
    def snapshot(self) -> Snapshot:
        """The chosen samples alone, with a digest of their own."""
        return self._snapshot

    def _read_lengths(self, name: str) -> NDArray[np.uint32]:
        found = self.whole.lengths(name)[self._ids]
        found.setflags(write=False)
        return found

    def sample(self, sample_id: int) -> dict[str, Any]:
        """Read one sample of the subset."""
        return self.whole.sample(int(self._ids[sample_id]))

    def open_for(self, sample_id: int) -> None:
        """Open the sample's shard."""
        self.whole.open_for(int(self._ids[sample_id]))

    def batch(self, ids: NDArray[np.int64], out: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Gather samples of the subset as columns."""
        return self.whole.batch(self._ids[ids], out)

    def use_flat(self, ids: NDArray[np.int64], names: Sequence[str], use: UseFlat[T]) -> T:
        """Read the 1-d arrays of samples of the subset."""
        return self.whole.use_flat(self._ids[ids], names, use)

    def read_ahead(self, ids: NDArray[np.int64]) -> Announced | None:
        """Begin to fetch the shards of these samples, except those whose few samples in the subset come by ranges."""
        wanted = self._ids[ids]
        shards = self.whole.snapshot.shards_of(wanted)
        whole = [number for number in np.unique(shards).tolist() if not self._is_few(number)]
        return self.whole.read_ahead(wanted[np.isin(shards, whole)])

    def _is_few(self, number: int) -> bool:
        """Whether all samples that the subset has of a shard cost less than the shard."""
        begin, end = np.searchsorted(self._ids, self.whole.snapshot.shard_offsets[number : number + 2])
        return self.whole.ranges_are_cheaper(number, int(end - begin))

    @property
    def has_all_open(self) -> bool:
        """Whether every shard of the whole is mapped, and stays so."""
        return self.whole.has_all_open

    def could_fetch_more(self) -> bool:
        """Whether shards are waited for while connections are idle."""
        return self.whole.could_fetch_more()

    def plan(self, next_use: NextUse) -> None:
        """Evict first what is needed last; shards have the same numbers here."""
        self.whole.plan(next_use)

    def forget(self, next_use: NextUse) -> None:
        """End a plan."""
        self.whole.forget(next_use)

    def close(self) -> None:
        """Close every mapped shard."""
        self.whole.close()
