"""Where mapped shards lie, by shard number: a batch over any of them is gathered without a loop over shards."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_stream.formats.mds.gather import gather_rows
from lightning_stream.formats.mds.layout import RecordLayout
from lightning_stream.formats.memory import AddressWindow
from lightning_stream.formats.shard_base import Batch, Buffers, Mapped


class SpanTable:
    """The mapped shards of one layout among all shards of the data. Gathering is thread-safe, changing it is not.

    A gather first refers to `_outlived`, then looks the samples up. A shard is first marked as not here and then put
    into that list, so it stays mapped for every gather that has found it.

    Args:
        num_shards: All that there are. Memory that is never touched costs nothing, and most shards are never mapped.
    """

    def __init__(self, num_shards: int) -> None:
        self._spans: NDArray[np.int64] = np.zeros((num_shards, 4), np.int64)  # a shard not here has no samples
        self._held: dict[int, Mapped] = {}
        # Shards taken out since a gather began; the last element is the list of those taken out later.
        self._outlived: list[Any] = []
        self._layout: RecordLayout | None = None
        self._window: AddressWindow | None = None

    def add(self, number: int, mapped: Mapped | None) -> None:
        """A shard was mapped; one of another layout, or none that can be gathered in one go, is left alone."""
        if mapped is None or (self._held and mapped.layout is not self._layout):
            return
        self._layout = mapped.layout
        self._held[number] = mapped
        begin, end, _, _ = mapped.span
        if self._window is None or begin < self._window.begin or end > self._window.end:
            # It only grows: nothing is read but the samples of shards that are here.
            self._window = AddressWindow(*((begin, end) if self._window is None else self._window.union(begin, end)))
        self._spans[number] = mapped.span  # last: what is found lies in the window

    def remove(self, number: int) -> None:
        """Forget a shard; it is unmapped once nobody reads what was located before."""
        if (mapped := self._held.pop(number, None)) is not None:
            self._spans[number] = 0
            following: list[Any] = []
            self._outlived += (mapped, following)
            self._outlived = following

    def gather(self, numbers: NDArray[np.int64], indices: NDArray[np.int64], out: Buffers | None) -> Batch | None:
        """One batch: row k is sample ``indices[k]`` of shard ``numbers[k]``; see `columns.gather`.

        Returns:
            None where not all of these samples are here.
        """
        keeps_mapped, layout = self._outlived, self._layout
        spans = self._spans.take(numbers, 0).T
        here = np.count_nonzero(indices.view(np.uint64) < spans[3].view(np.uint64))  # negative indices are huge then
        if layout is None or layout is not self._layout or self._window is None or here < len(indices):
            return None
        batch = gather_rows(layout, self._window, spans, numbers, indices, self._where, out)
        del keeps_mapped
        return batch

    def _where(self, number: int) -> str:
        held = self._held.get(number)
        return f"shard {number}" if held is None else held.file.where
