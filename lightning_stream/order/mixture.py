"""How many samples each stream has given up to any sample of a run: exact integers, readable at any position.

The streams are the leaves of a binary tree. A node that has given m samples took ``round(share of its left child)`` of
them from the left one: the share is a piecewise linear function of m, which is what the schedule's integral is between
its points. Both children's numbers only rise, and their sum is m, so no history is needed: the numbers at sample g are
those of one walk down the tree. A stream is within ``(1 + sum of w / W) / 2`` samples of the integral, where w is its
weight and W that of each node above it but the root: at most 1 for up to four streams, and for nearly all mixtures of
up to twelve (see `plan_tree`).
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property, lru_cache
from heapq import heapify, heappop, heappush
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from lightning_stream.order.schedule import Schedule

_BITS = 10  # anchors are multiples of 1 / 1024 sample
_MOST_IN_PIECE = 2**20  # samples, so that products of two numbers of 1/1024 samples fit in 64 bits
_MOST_PIECES = 2**20  # of a section: a linear one is then within 1/32 sample of its integral up to 10**11 samples
_MOST_COUNTS = 2**20  # at once
_SEARCHED_AT_ONCE = 65  # stretches: each round leaves one 64th of the range
_AHEAD = 3  # samples, more than the deviation of any node
_SEARCHED = 12  # streams: for up to so many the best tree is searched for, which takes up to half a second
Shares = tuple[Fraction, ...]
Tree = int | tuple["Tree", "Tree"]


@dataclass(frozen=True)
class Section:
    """A part of a schedule in which each stream's share moves evenly from ``begin`` to ``end``.

    ``length`` is in the schedule's unit; None for the last one, which has no end.
    """

    length: Fraction | None
    begin: Shares
    end: Shares


class Mixture:
    """The streams of all samples of a run.

    Args:
        schedule: With the names of the streams.
        sizes: Samples of each stream.
        stretch_length: Consecutive samples of a stream that stay together; all numbers here count such stretches.
        step_length: Samples of an optimizer step, for a schedule in steps; its tokens, if there are mean lengths.

    Example::

        schedule = Schedule([(0, {"web": 0.7, "code": 0.3})])
        Mixture(schedule, [1000, 1000]).counts(np.array([10, 1000]))  # [[7, 3], [700, 300]]
    """

    def __init__(
        self, schedule: Schedule, sizes: Sequence[int], *, stretch_length: int = 1, step_length: int = 1
    ) -> None:
        self._schedule, self._sizes, self._stretch = schedule, tuple(sizes), stretch_length
        unit = Fraction(step_length if schedule.unit == "steps" else 1, stretch_length)
        self._rates = tuple(unit / length for length in schedule.lengths)  # of a stream that has the whole weight
        shares = [schedule.shares(weights) for _, weights in schedule.points]
        self._tree = plan_tree(tuple(_normal([a * b for a, b in zip(one, self._rates, strict=True)]) for one in shares))
        lengths = [Fraction(b - a) for (a, _), (b, _) in pairwise(schedule.points)]
        later = shares[1:] if schedule.interpolation == "linear" else shares
        sections = [Section(*one) for one in zip(lengths, shares, later, strict=False)]
        sections.append(Section(None, shares[-1], shares[-1]))
        self._eras = [self._era(0, np.zeros(len(sizes), dtype=np.int64), sections)]
        for change in schedule.changes:
            if change.weights is not None:
                at, now = change.at // stretch_length, schedule.shares(change.weights)
                start = at if self.end is None else min(at, self.end)
                era = self._era(start, self.counts(np.array([start]))[0], [Section(None, now, now)])
                self._eras = [*(one for one in self._eras if one.start < start), era]

    def counts(self, at: NDArray[np.int64]) -> NDArray[np.int64]:
        """int64[n, streams]: how many of the first ``at`` stretches of the run are of each stream; ``at`` rises."""
        out = np.empty((len(at), len(self._sizes)), dtype=np.int64)
        edges = [*(np.searchsorted(at, [era.start for era in self._eras[1:]]).tolist()), len(at)]
        begin = 0
        for era, end in zip(self._eras, edges, strict=True):
            out[begin:end] = era.counts(at[begin:end])
            begin = end
        return out

    def read(self, begin: int, end: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """For stretches [begin, end) of the run: the stream of each, and its number in that stream's own sequence."""
        stream, count = np.empty((2, end - begin), dtype=np.int64)
        step = max(1, _MOST_COUNTS // len(self._sizes))  # what is in memory does not grow with the number of streams
        for first in range(begin, end, step):
            counts = self.counts(np.arange(first, min(first + step, end) + 1, dtype=np.int64))
            here = slice(first - begin, first - begin + len(counts) - 1)
            stream[here] = np.diff(counts, axis=0).argmax(axis=1)
            count[here] = np.take_along_axis(counts[:-1], stream[here, None], axis=1)[:, 0]
        return stream, self._numbers(stream, count)

    def ends(self, at: int) -> NDArray[np.int64]:
        """int64[streams]: the number that follows the last one of each stream in the first ``at`` stretches."""
        return self._numbers(np.arange(len(self._sizes)), self.counts(np.array([at]))[0])

    def find(self, stream: int, number: int, begin: int, end: int) -> int | None:
        """The stretch of the run that has this number of a stream: one of [begin, end), or None if it is skipped."""
        for which, first, skipped in self._skips:
            if which == stream and number >= first:
                number -= skipped
                if number < first:
                    return None
        while end - begin > 1:
            at = np.unique(np.linspace(begin, end, _SEARCHED_AT_ONCE).astype(np.int64))
            after = int(np.searchsorted(self.counts(at)[:, stream], number, side="right"))
            begin, end = int(at[after - 1]), int(at[after])
        return begin

    def _numbers(self, stream: NDArray[np.int64], count: NDArray[np.int64]) -> NDArray[np.int64]:
        """The numbers in the streams' own sequences, from counts that do not include what is skipped."""
        numbers: NDArray[np.int64] = count.copy()
        for which, first, skipped in self._skips:
            numbers[(stream == which) & (count >= first)] += skipped
        return numbers

    @property
    def end(self) -> int | None:
        """Stretches of the run until every stream has ended; None if it never ends."""
        era = self._eras[-1]
        return None if era.length is None else era.start + era.length

    @cached_property
    def _skips(self) -> list[tuple[int, int, int]]:
        """For each skip: the stream, the number it begins at (skips excluded), and how many samples it omits."""
        found = []
        for change in self._schedule.changes:
            before = self.counts(np.array([change.at // self._stretch]))[0]
            for name, skipped in change.skip:
                stream = self._schedule.streams.index(name)
                found.append((stream, int(before[stream]), -(-int(skipped) // self._stretch)))
        return found

    def _era(self, start: int, given: NDArray[np.int64], sections: Sequence[Section]) -> _Era:
        stops = self._schedule.stops
        sizes = zip(self._sizes, stops, given.tolist(), strict=True)
        left = [size // self._stretch - before if stop else None for size, stop, before in sizes]
        return _Era(start, given, _Quotas(sections, self._rates, left), self._tree)


class _Era:
    """The time between two changes of the weights: the tree's numbers count from its start."""

    def __init__(self, start: int, given: NDArray[np.int64], quotas: _Quotas, tree: Tree) -> None:
        self.start, self._given, self._quotas, self._tree = start, given, quotas, tree
        self.length = quotas.end  # stretches until every stream has ended
        self._table = _Table(np.empty((0, len(given)), dtype=np.int64))

    def counts(self, at: NDArray[np.int64]) -> NDArray[np.int64]:
        """As :meth:`Mixture.counts`, within the era."""
        out = np.empty((len(at), len(self._given)), dtype=np.int64)
        if len(at):
            anchors = self._quotas.anchors(int(at[-1]) - self.start + 1)
            table = self._table  # a local: another thread may replace it
            if table.anchors is not anchors:
                table = self._table = _Table(anchors)
            table.walk(self._tree, at - self.start, out)
        return out + self._given


class _Table:
    """The anchors of an era, and the sums of those under each node of the tree."""

    def __init__(self, anchors: NDArray[np.int64]) -> None:
        self.anchors = anchors
        self._sums: dict[Tree, NDArray[np.int64]] = {}

    def walk(self, node: Tree, given: NDArray[np.int64], out: NDArray[np.int64]) -> None:
        """Fill in the numbers of the streams under a node that has given so many samples."""
        if not isinstance(node, tuple):
            out[:, node] = given
            return
        left = _left_part(given, self._sum(node), self._sum(node[0]))
        self.walk(node[0], left, out)
        self.walk(node[1], given - left, out)

    def _sum(self, node: Tree) -> NDArray[np.int64]:
        if node not in self._sums:
            self._sums[node] = self.anchors[:, leaves(node)].sum(axis=1)
        return self._sums[node]


def _left_part(given: NDArray[np.int64], whole: NDArray[np.int64], left: NDArray[np.int64]) -> NDArray[np.int64]:
    """How many of the ``given`` samples of a node are of its left child, by both nodes' anchors."""
    units = given << _BITS
    row = np.searchsorted(whole, units, side="right") - 1
    np.clip(row, 0, len(whole) - 2, out=row)
    base, first = whole[row], left[row]
    length = np.maximum(whole[row + 1] - base, 1)
    inside = np.minimum(units - base, length)
    part = ((first & (2**_BITS - 1)) + 2 ** (_BITS - 1)) * length + (left[row + 1] - first) * inside
    found: NDArray[np.int64] = (first >> _BITS) + part // (length << _BITS)
    return found


class _Quotas:
    """Each stream's integral at the ends of pieces in which it is linear, in 1/1024 samples (its anchors)."""

    def __init__(self, sections: Sequence[Section], rates: Shares, left: Sequence[int | None]) -> None:
        self._rates = rates
        self.end: int | None = None
        rows = [np.zeros((1, len(rates)), dtype=np.int64)]
        self._base = [Fraction(0)] * len(rates)
        self._last: Section | None = None
        for section in _until_exhausted(sections, rates, left, self._base):
            if section.length is None:
                self._last = section
            else:
                rows.append(self._pieces(section, _num_pieces(section, rates)))
                self._advance(section, left)
                rows[-1][-1] = [int(one * 2**_BITS) for one in self._base]
        if self._last is None:  # whole samples, so that each stream that ends gives all of its own
            whole = [math.ceil(one) for one in self._base]
            rows.append(np.array([whole], dtype=np.int64) << _BITS)
            self.end = sum(whole)
        self._head = self._anchors = np.concatenate(rows)

    def anchors(self, samples: int) -> NDArray[np.int64]:
        """int64[pieces + 1, streams]: the anchors, at least up to so many samples."""
        anchors = self._anchors  # a local: another thread may replace it
        if self._last is None:
            return anchors
        rates = [a * b for a, b in zip(self._last.begin, self._rates, strict=True)]
        whole = sum(rates)
        # A node may be ahead of its integral: every stream's next samples need anchors, however light it is.
        samples += math.ceil(_AHEAD * whole / min(filter(None, rates)))
        if anchors[-1].sum() <= samples << _BITS:
            lacks = samples - (int(self._head[-1].sum()) >> _BITS)
            count = max(2 * (len(anchors) - len(self._head)), lacks // _MOST_IN_PIECE + 2)
            section = replace(self._last, length=Fraction(_MOST_IN_PIECE) / whole * count)
            anchors = self._anchors = np.concatenate([self._head, self._pieces(section, count)])
        return anchors

    def _pieces(self, section: Section, count: int) -> NDArray[np.int64]:
        """The anchors at the ends of ``count`` equal pieces of a section."""
        assert section.length is not None
        out = np.empty((count, len(self._rates)), dtype=np.int64)
        number = np.arange(1, count + 1, dtype=object)
        per = section.length / count * 2**_BITS
        for stream, (rate, begin, end) in enumerate(zip(self._rates, section.begin, section.end, strict=True)):
            terms = (self._base[stream] * 2**_BITS, rate * begin * per, rate * (end - begin) * per / (2 * count))
            whole = math.lcm(*(one.denominator for one in terms))
            constant, linear, square = (int(one * whole) for one in terms)
            values = (number * linear + constant) if not square else (number * square + linear) * number + constant
            out[:, stream] = values // whole
        return out

    def _advance(self, section: Section, left: Sequence[int | None]) -> None:
        """Move the base to the end of a section; it keeps 40 bits behind the point."""
        assert section.length is not None
        for stream, most in enumerate(left):
            grown = self._rates[stream] * (section.begin[stream] + section.end[stream]) * section.length / 2
            total = Fraction(int((self._base[stream] + grown) * 2**40), 2**40)
            is_over = most is not None and grown > 0 and total >= most - Fraction(1, 2**20)
            self._base[stream] = Fraction(most or 0) if is_over else total


def _until_exhausted(
    sections: Sequence[Section], rates: Shares, left: Sequence[int | None], base: Sequence[Fraction]
) -> Iterator[Section]:
    """Cut the sections where a stream ends, whose weight then goes to the others. ``base`` moves with the caller."""
    alive = [most is None or most > 0 for most in left]
    for given in sections:
        section: Section | None = given
        while section is not None:
            begin, end = _alive(section.begin, alive), _alive(section.end, alive)
            if begin is None and end is None:
                break  # no stream of this section is left: the next one begins at once
            section = Section(section.length, begin or end or (), end or begin or ())
            ends = {i: at for i, most in enumerate(left) if most is not None and alive[i]
                    if (at := _reaches(section, i, rates[i], most - base[i])) is not None}  # fmt: skip
            cut = min(ends.values(), default=None)
            if cut is None:
                yield section
                break
            part = 0 if section.length is None else cut / section.length
            middle = tuple(a + (b - a) * part for a, b in zip(section.begin, section.end, strict=True))
            yield Section(cut, section.begin, middle)
            for stream in (i for i, at in ends.items() if at == cut):
                alive[stream] = False
            rest = None if section.length is None else section.length - cut
            section = None if rest == 0 else Section(rest, middle, section.end)


def _reaches(section: Section, stream: int, rate: Fraction, needed: Fraction) -> Fraction | None:
    """Where in a section a stream has given so many samples; None if not in it."""
    begin, end, length = section.begin[stream] * rate, section.end[stream] * rate, section.length
    if begin == end:
        at = needed / begin if begin else None
        return at if at is not None and (length is None or at <= length) else None
    assert length is not None
    if (begin + end) / 2 * length < needed:
        return None

    def given(step: int) -> Fraction:
        at = length * Fraction(step, 2**48)
        return begin * at + (end - begin) * at * at / (2 * length)

    return length * Fraction(bisect_left(range(2**48), needed, key=given), 2**48)


def _alive(shares: Shares, alive: Sequence[bool]) -> Shares | None:
    kept = [share if living else Fraction(0) for share, living in zip(shares, alive, strict=True)]
    return _normal(kept) if any(kept) else None


def _normal(weights: Sequence[Fraction]) -> Shares:
    whole = sum(weights)
    return tuple(one / whole for one in weights)


def _num_pieces(section: Section, rates: Shares) -> int:
    """Pieces of a section: short enough for 64 bits, and for a linear one within 1/32 sample of its integral."""
    assert section.length is not None
    most = max(sum(a * b for a, b in zip(one, rates, strict=True)) for one in (section.begin, section.end))
    moves = zip(section.begin, section.end, rates, strict=True)
    bend = max(abs(b - a) * rate for a, b, rate in moves) * section.length
    exact = math.isqrt(math.ceil(4 * bend)) + 1 if bend else 1
    least = max(1, math.ceil(most * section.length / _MOST_IN_PIECE))
    if least > _MOST_PIECES:
        raise ValueError(
            f"The points of a schedule must be at most {_MOST_PIECES * _MOST_IN_PIECE:,} samples apart, but two of "
            f"them are {int(most * section.length):,} apart. Omit the far one."
        )
    return max(least, min(exact, _MOST_PIECES))


# The tree


def leaves(node: Tree) -> list[int]:
    """The streams under a node."""
    return [*leaves(node[0]), *leaves(node[1])] if isinstance(node, tuple) else [node]


@lru_cache(maxsize=64)
def plan_tree(shares: tuple[Shares, ...]) -> Tree:
    """A tree in which streams differ little from their integrals at all points of a schedule.

    With constant shares of up to twelve streams, none differs by more than one sample wherever a tree exists that keeps
    to that: the best tree of a set of streams is made of the best of two parts of it. Of four streams each has one
    node above it but the root, so no weights make it differ by more. For more than twelve it is a Huffman tree.
    """
    count = len(shares[0])
    if count > _SEARCHED:
        return _huffman_tree(shares)
    trees: dict[int, Tree] = {}
    slacks: dict[int, list[float]] = {}  # at each point, how much 1/W the nodes above a set of streams may sum up to
    for chosen in range(1, 2**count):
        own = [sum(share for i, share in enumerate(one) if chosen >> i & 1) for one in shares]
        inverse = [float(1 / one) if one else 0.0 for one in own]
        if chosen & (chosen - 1) == 0:
            trees[chosen], slacks[chosen] = chosen.bit_length() - 1, [one or math.inf for one in inverse]
            continue
        best = -math.inf
        for part in _halves(chosen, even=count == 4 and chosen == 15):
            left, right = slacks[part], slacks[chosen ^ part]
            slack = [min(a, b) - above for a, b, above in zip(left, right, inverse, strict=True)]
            if min(slack) > best or chosen not in trees:
                best = min(slack)
                trees[chosen], slacks[chosen] = (trees[part], trees[chosen ^ part]), slack
    return trees[2**count - 1]


def _halves(chosen: int, *, even: bool) -> Iterator[int]:
    """The parts of a set of bits that have its lowest one, but not all; if ``even``, half of them."""
    part = (chosen - 1) & chosen
    while part:
        if part & chosen & -chosen and (not even or 2 * part.bit_count() == chosen.bit_count()):
            yield part
        part = (part - 1) & chosen


def _huffman_tree(shares: tuple[Shares, ...]) -> Tree:
    """The two lightest nodes get a parent until one is left. Equal ones queue, so that weights of 0 make no chain."""
    nodes: list[tuple[Fraction, int, Tree]] = []
    for stream, over_time in enumerate(zip(*shares, strict=True)):
        nodes.append((sum(over_time, Fraction(0)), stream, stream))
    heapify(nodes)
    for number in range(len(nodes), 2 * len(nodes) - 1):
        (light, _, left), (heavy, _, right) = heappop(nodes), heappop(nodes)
        heappush(nodes, (light + heavy, number, (left, right)))
    return nodes[0][2]
