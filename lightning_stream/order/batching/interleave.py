"""The order of one epoch over all streams: the four batching methods."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from lightning_stream.order.permutation import RngStream, mix64, random_u64
from lightning_stream.order.window import SampleOrder


@dataclass(frozen=True)
class Layout:
    """How the positions of an epoch may be cut into global batches.

    Args:
        num_samples: N, all positions.
        whole: Positions [0, whole) are cut into batches of B one after another.
        rests: Ends of the runs that follow: one batch each for ``per_stream``, one block each for
            ``device_per_stream``; empty otherwise.
        block: m, where every m consecutive positions are one stream's and go to one device; else 1.
        batch_size: B, where the order itself depends on it; else None.
    """

    num_samples: int
    whole: int
    rests: tuple[int, ...] = ()
    block: int = 1
    batch_size: int | None = None


class EpochOrder(Protocol):
    """All sample ids of one epoch, in order, readable at any position."""

    epoch: int
    num_samples: int
    layout: Layout

    def ids(self, begin: int, end: int) -> NDArray[np.int64]:
        """Sample ids at positions [begin, end): int64[end - begin]. O(range + window)."""
        ...

    def canonical(self, begin: int, end: int) -> NDArray[np.int64]:
        """The canonical node of each position in [begin, end): what ranks are grouped by."""
        ...

    def streams(self, begin: int, end: int) -> NDArray[np.int64] | None:
        """The stream of each position where blocks must not mix streams (``device_per_stream``); else None."""
        ...


class RandomOrder:
    """``random``: all parts of all streams in one order."""

    def __init__(self, epoch: int, source: SampleOrder) -> None:
        self.epoch, self._source = epoch, source
        self.num_samples = source.num_samples
        self.layout = Layout(self.num_samples, self.num_samples)

    def ids(self, begin: int, end: int) -> NDArray[np.int64]:
        """Sample ids at positions [begin, end)."""
        return self._source.ids(*_checked(begin, end, self.num_samples))

    def canonical(self, begin: int, end: int) -> NDArray[np.int64]:
        """The canonical node of each position in [begin, end)."""
        return self._source.canonical(*_checked(begin, end, self.num_samples))

    def streams(self, begin: int, end: int) -> None:  # noqa: ARG002 (the protocol's)
        """Blocks do not matter here."""
        return


class MixedOrder:
    """``stratified``, ``per_stream`` and ``device_per_stream``: streams, each in its own order, merged in runs.

    Every stream's whole runs of ``unit`` samples are merged evenly (:class:`Interleave`); then come the rests, stream by
    stream. With ``unit`` 1 (``stratified``) there are none.
    """

    def __init__(
        self, epoch: int, sources: Sequence[SampleOrder], *, unit: int, seed: int | None, per_batch: bool = False
    ) -> None:
        self.epoch, self._sources, self._unit = epoch, tuple(sources), unit
        sizes = [source.num_samples for source in sources]
        self.num_samples = sum(sizes)
        self._runs = np.array([size // unit for size in sizes], dtype=np.int64)
        self._merge = Interleave(self._runs, epoch, seed)
        whole = int(self._runs.sum()) * unit
        rest = np.array([size % unit for size in sizes], dtype=np.int64)
        self._rest_streams = np.flatnonzero(rest)
        self._rest_ends = whole + np.cumsum(rest[self._rest_streams])
        block = unit if not per_batch else 1
        ends = tuple(self._rest_ends.tolist())
        self.layout = Layout(self.num_samples, whole, ends, block, unit if per_batch else None)
        self._last: tuple[int, int, NDArray[np.int64], NDArray[np.int64]] | None = None

    def ids(self, begin: int, end: int) -> NDArray[np.int64]:
        """Sample ids at positions [begin, end)."""
        return self._gather(*_checked(begin, end, self.num_samples), "ids")

    def canonical(self, begin: int, end: int) -> NDArray[np.int64]:
        """The canonical node of each position, by its stream's own index."""
        return self._gather(*_checked(begin, end, self.num_samples), "canonical")

    def streams(self, begin: int, end: int) -> NDArray[np.int64] | None:
        """The stream of each position where blocks must not mix streams; else None."""
        if self.layout.block == 1:
            return None
        return self.locate(*_checked(begin, end, self.num_samples))[0]

    def locate(self, begin: int, end: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The stream of each position in [begin, end), and its index within that stream."""
        last = self._last
        if last is not None and last[0] == begin and last[1] == end:
            return last[2], last[3]
        whole, unit = self.layout.whole, self._unit
        if begin >= end:
            return np.empty(0, np.int64), np.empty(0, np.int64)
        found = []
        if begin < whole:
            stop = min(end, whole)
            stream, run = self._merge.read(begin // unit, -(-stop // unit))
            if unit > 1:
                inside = np.arange(begin, stop) % unit
                which = np.arange(begin, stop) // unit - begin // unit
                stream, run = stream[which], run[which] * unit + inside
            found.append((stream, run))
        if end > whole:
            found.append(self._locate_remainder(max(begin, whole), end))
        stream, index = found[0] if len(found) == 1 else map(np.concatenate, zip(*found, strict=True))
        self._last = (begin, end, stream, index)
        return stream, index

    def _locate_remainder(self, begin: int, end: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """As :meth:`locate`, behind the whole runs."""
        at = np.arange(begin, end, dtype=np.int64)
        rest = np.searchsorted(self._rest_ends, at, side="right")
        stream = self._rest_streams[rest]
        starts = np.concatenate([[self.layout.whole], self._rest_ends])
        return stream, self._runs[stream] * self._unit + at - starts[rest]

    def _gather(self, begin: int, end: int, what: str) -> NDArray[np.int64]:
        stream, index = self.locate(begin, end)
        out = np.empty(len(stream), dtype=np.int64)
        order = np.argsort(stream, kind="stable")
        for mine in np.split(order, np.flatnonzero(np.diff(stream[order])) + 1):
            if not len(mine):
                continue
            source = self._sources[int(stream[mine[0]])]
            read = source.ids if what == "ids" else source.canonical
            # a stream's indices rise, without a gap but over the border of whole runs and rests
            for stretch in np.split(mine, np.flatnonzero(np.diff(index[mine]) > 1) + 1):
                first = int(index[stretch[0]])
                out[stretch] = read(first, first + len(stretch))
        return out


class Interleave:
    """Several sequences merged evenly: entry j of a sequence of n has the key (j + u) / n, ties by sequence.

    u is 1/2, or with a seed a number in [0, 1) of (seed, epoch, sequence, j). Keys are IEEE doubles, whose division is
    correctly rounded everywhere, so equal fractions tie and every machine merges alike. O(sequences + range).
    """

    def __init__(self, lengths: NDArray[np.int64], epoch: int, seed: int | None) -> None:
        self._lengths = lengths
        self._total = int(lengths.sum())
        count = len(lengths)
        self._salt = None if seed is None else random_u64(RngStream.JITTER, seed, epoch, size=count)

    def read(self, begin: int, end: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """For entries [begin, end) of the merge: the sequence of each, and its index there."""
        low, high = self._bounds(begin, end)
        counts = high - low
        sequence = np.repeat(np.arange(len(counts)), counts)
        first = np.cumsum(counts) - counts
        index = np.arange(len(sequence)) - (first - low)[sequence]
        order = np.argsort(self._keys(sequence, index), kind="stable")
        skipped = begin - int(low.sum())
        order = order[skipped : skipped + end - begin]
        return sequence[order], index[order]

    def _bounds(self, begin: int, end: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Per sequence, a stretch that holds all its entries in [begin, end), all before it being earlier.

        At key t, a sequence of n has between t * n - 1 and t * n + 1 entries below; so all together are within their
        number of t * total.
        """
        margin = len(self._lengths) + 1
        below = (begin - margin) / self._total * self._lengths
        above = (end + margin) / self._total * self._lengths
        low = np.clip(np.floor(below).astype(np.int64) - 1, 0, self._lengths)
        high = np.clip(np.ceil(above).astype(np.int64) + 1, 0, self._lengths)
        return low, high

    def _keys(self, sequence: NDArray[np.int64], index: NDArray[np.int64]) -> NDArray[np.float64]:
        if self._salt is None:
            jitter: NDArray[np.float64] | float = 0.5
        else:
            scattered = mix64(self._salt[sequence] + index.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15))
            jitter = (scattered >> np.uint64(12)).astype(np.float64) * 2.0**-52
        keys: NDArray[np.float64] = (index + jitter) / self._lengths[sequence]
        return keys


def _checked(begin: int, end: int, num_samples: int) -> tuple[int, int]:
    if not 0 <= begin <= end <= num_samples:
        raise ValueError(f"Positions must be within the epoch, [0, {num_samples}); [{begin}, {end}) was asked.")
    return begin, end
