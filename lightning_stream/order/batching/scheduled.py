"""A mixture with a schedule, as an epoch reads it: the stream of each stretch, and every stream's own epochs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from lightning_stream.order.mixture import Mixture
from lightning_stream.order.window import SampleOrder

if TYPE_CHECKING:
    from lightning_stream.order.plan import RunOrder

_EDGES = 1000  # so three steps find one of 10**9 stretches


class OwnEpochs:
    """A stream's own endless sequence: sample n is at position n mod size of its own epoch n // size."""

    def __init__(self, run: RunOrder, stream: int) -> None:
        self._run, self._stream = run, stream
        self._size = int(run.snapshot.stream_samples[stream])

    def ids(self, begin: int, end: int) -> NDArray[np.int64]:
        """Sample ids at numbers [begin, end)."""
        return np.concatenate([order.ids(first, stop) for order, first, stop in self._parts(begin, end)])

    def canonical(self, begin: int, end: int) -> NDArray[np.int64]:
        """The canonical node of each number in [begin, end)."""
        return np.concatenate([order.canonical(first, stop) for order, first, stop in self._parts(begin, end)])

    def numbers_of(self, sample_id: int, begin: int, end: int) -> list[int]:
        """The numbers of a sample in all own epochs that [begin, end) touches, ascending."""
        epochs = range(begin // self._size, (end - 1) // self._size + 1) if begin < end else ()
        each = ((epoch, self._run.own_epoch(epoch, self._stream).positions(sample_id)) for epoch in epochs)
        return [epoch * self._size + at for epoch, found in each for at in found]

    def _parts(self, begin: int, end: int) -> Iterator[tuple[SampleOrder, int, int]]:
        for epoch in range(begin // self._size, (end - 1) // self._size + 1):
            first = epoch * self._size
            order = self._run.own_epoch(epoch, self._stream)
            yield order, max(begin - first, 0), min(end - first, self._size)


class ScheduledStretches:
    """The stretches of one epoch of a scheduled mixture, which began ``first`` stretches before."""

    def __init__(self, mixture: Mixture, first: int) -> None:
        self._mixture, self._first = mixture, first

    def left(self, most: int) -> int:
        """How many stretches, of ``most``, the mixture has from here on."""
        end = self._mixture.end
        return most if end is None else max(0, min(most, end - self._first))

    def read(self, begin: int, end: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """For stretches [begin, end) of the epoch: the stream of each, and its number in that stream's sequence."""
        return self._mixture.read(self._first + begin, self._first + end)

    def numbers(self, stream: int, count: int) -> tuple[int, int]:
        """The first number of a stream's own sequence in the first ``count`` stretches, and the one behind its last."""
        low, high = self._mixture.counts(np.array([self._first, self._first + count]))[:, stream].tolist()
        skips = [(first, skipped) for which, first, skipped in self._mixture.skips if which == stream]
        begin, last = (at + sum(skipped for first, skipped in skips if at >= first) for at in (low, high - 1))
        return (begin, last + 1) if low < high else (0, 0)

    def find(self, stream: int, number: int, count: int) -> int | None:
        """The stretch of the epoch that has this number of a stream's own sequence: the inverse of :meth:`read`.

        None if it is not among the first ``count``.
        """
        for which, first, skipped in self._mixture.skips:
            if which == stream and number >= first:
                if number < first + skipped:
                    return None
                number -= skipped
        edges = np.array([self._first, self._first + count])
        while True:  # the stretch is between two edges: at the first there were at most ``number`` before, then more
            counts = self._mixture.counts(edges)[:, stream]
            at = int(np.searchsorted(counts, number, side="right"))
            if not 0 < at < len(edges):
                return None
            low, high = int(edges[at - 1]), int(edges[at])
            if high - low == 1:
                return low - self._first
            edges = low + (high - low) * np.arange(_EDGES + 1) // _EDGES
