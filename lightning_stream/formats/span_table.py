"""Where mapped shards lie, by shard number: a batch over any of them is gathered without a loop over shards."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from lightning_stream.formats.columns import gather_rows
from lightning_stream.formats.memory import Stretch
from lightning_stream.formats.row_plan import RowPlan
from lightning_stream.formats.shard_base import Batch, Buffers, Mapped


class SpanTable:
    """The mapped shards of one plan among all shards of the data. Not thread-safe.

    Whoever takes a shard in keeps it mapped until it is taken out.

    Args:
        num_shards: All that there are. Memory that is never touched costs nothing, and most shards are never mapped.
    """

    def __init__(self, num_shards: int) -> None:
        self._spans: NDArray[np.int64] = np.zeros((4, num_shards), np.int64)  # a shard not here has no samples
        self._held: dict[int, Mapped] = {}
        self._plan: RowPlan | None = None
        self._stretch: Stretch | None = None

    def take_in(self, number: int, mapped: Mapped | None) -> None:
        """A shard was mapped; one of another plan, or none that can be gathered in one go, is left alone."""
        if mapped is None or (self._held and mapped.plan is not self._plan):
            return
        self._plan = mapped.plan
        self._held[number] = mapped
        self._spans[:, number] = mapped.span
        begin, end, _, _ = mapped.span
        if self._stretch is None or begin < self._stretch.begin or end > self._stretch.end:
            # It only grows: nothing is read but the samples of shards that are here.
            self._stretch = Stretch(*((begin, end) if self._stretch is None else self._stretch.reaching(begin, end)))

    def take_out(self, number: int) -> None:
        """The shard is about to be unmapped."""
        if self._held.pop(number, None) is not None:
            self._spans[:, number] = 0

    def gather(self, numbers: NDArray[np.int64], indices: NDArray[np.int64], out: Buffers | None) -> Batch | None:
        """One batch: row k is sample ``indices[k]`` of shard ``numbers[k]``; see `columns.gather`.

        Returns:
            None where not all of these samples are here.
        """
        counts = self._spans[3].take(numbers).view(np.uint64)
        here = np.count_nonzero(indices.view(np.uint64) < counts)  # negative indices are huge then
        if self._plan is None or self._stretch is None or here < len(indices):
            return None
        return gather_rows(self._plan, self._stretch, self._spans, numbers, indices, self._where, out)

    def _where(self, number: int) -> str:
        return self._held[number].file.where
