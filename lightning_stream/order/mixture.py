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
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from functools import cached_property, lru_cache
from heapq import heapify, heappop, heappush
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from msgspec import structs

from .arrays import Ints, segment_of
from .schedule import Numbers, Schedule

_BITS = 10  # anchors are multiples of 1 / 1024 sample
_MOST_IN_PIECE = 2**20  # samples, so that products of two numbers of 1/1024 samples fit in 64 bits
_MOST_PIECES = 2**20  # of a section: a linear one is then within 1/32 sample of its integral up to 10**11 samples
_MOST_COUNTS = 2**20  # at once
_SEARCHED_AT_ONCE = 65  # blocks: each round leaves one 64th of the range
_AHEAD = 3  # samples, more than the deviation of any node
_SEARCHED = 12  # streams: for up to so many the best tree is searched for, which takes up to half a second
Shares = tuple[Fraction, ...]
Tree = int | tuple["Tree", "Tree"]


class Section(NamedTuple):
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
        block_length: Consecutive samples of a stream that stay together; all numbers here count such blocks.
        step_length: Samples of an optimizer step, for a schedule in steps; its tokens, if there are mean lengths.

    Example::

        schedule = Schedule([(0, {"web": 0.7, "code": 0.3})])
        Mixture(schedule, [1000, 1000]).counts(np.array([10, 1000]))  # [[7, 3], [700, 300]]
    """

    def __init__(
        self, schedule: Schedule, sizes: Sequence[int], *, block_length: int = 1, step_length: int = 1
    ) -> None:
        self._schedule = schedule
        self._block_length = block_length
        era = _first_era(structs.replace(schedule, changes=()), tuple(sizes), block_length, step_length)
        self._eras = [era]
        for change in schedule.changes:
            if change.weights is not None:
                at = change.at // block_length
                start = at if era.end is None else min(at, era.end)
                era = era.followed_by(start, change.weights, schedule.shares)
                while self._eras and self._eras[-1].start >= start:
                    self._eras.pop()
                self._eras.append(era)
        self._starts = np.array([era.start for era in self._eras])

    def counts(self, at: Ints) -> Ints:
        """int64[n, streams]: how many of the first ``at`` blocks of the run are of each stream; ``at`` rises."""
        first, last = segment_of(self._starts, at[[0, -1]])
        eras = self._eras[first : last + 1]
        parts = np.split(at, np.searchsorted(at, self._starts[first + 1 : last + 1]))
        return np.concatenate([era.counts(part) for era, part in zip(eras, parts, strict=True)])

    def read(self, begin: int, end: int) -> tuple[Ints, Ints]:
        """For blocks [begin, end) of the run: the stream of each, and its index in that stream's own sequence."""
        step = max(1, _MOST_COUNTS // self._eras[0].num_streams)  # memory does not grow with the number of streams
        parts = []
        for first in range(begin, max(end, begin + 1), step):
            counts = self.counts(np.arange(first, min(first + step, end) + 1))
            stream = np.diff(counts, axis=0).argmax(axis=1)
            parts.append((stream, counts[np.arange(len(stream)), stream]))
        streams, numbers = map(np.concatenate, zip(*parts, strict=True))
        return streams, self._numbers(streams, numbers)

    def ends(self, at: int) -> Ints:
        """int64[streams]: the index that follows the last one of each stream in the first ``at`` blocks."""
        counts = self._counts(at)
        return self._numbers(np.arange(len(counts)), counts)

    def find(self, stream: int, index: int, begin: int, end: int) -> int | None:
        """The block of the run that has this index of a stream: one of [begin, end), or None if it is skipped."""
        for which, first, skipped in self._skips:
            if which == stream and first <= index < first + skipped:
                return None
            index -= skipped * (which == stream and index >= first)
        while end - begin > 1:
            at = np.unique(np.linspace(begin, end, _SEARCHED_AT_ONCE).astype(np.int64))
            after = int(np.searchsorted(self.counts(at)[:, stream], index, side="right"))
            begin, end = at[after - 1 : after + 1].tolist()
        return begin

    @property
    def end(self) -> int | None:
        """Blocks of the run until every stream has ended; None if it never ends."""
        return self._eras[-1].end

    def _counts(self, at: int) -> Ints:
        """int64[streams]: as :meth:`counts`, for one number."""
        counts: Ints = self.counts(np.array([at]))[0]
        return counts

    def _numbers(self, stream: Ints, count: Ints) -> Ints:
        """The numbers in the streams' own sequences, from counts that do not include what is skipped."""
        numbers: Ints = count.copy()
        for which, first, skipped in self._skips:
            numbers[(stream == which) & (count >= first)] += skipped
        return numbers

    @cached_property
    def _skips(self) -> list[tuple[int, int, int]]:
        """For each skip: the stream, the index it begins at (skips excluded), and how many blocks it omits."""
        skips = []
        for change in self._schedule.changes:
            before = self._counts(change.at // self._block_length) if change.skip else ()
            for name, skipped in change.skip.items():
                stream = self._schedule.streams.index(name)
                skips.append((stream, int(before[stream]), -(-int(skipped) // self._block_length)))
        return skips


@lru_cache(maxsize=8)
def _first_era(schedule: Schedule, sizes: tuple[int, ...], block_length: int, step_length: int) -> _Era:
    """What a mixture is until its weights change."""
    unit = Fraction(step_length if schedule.unit == "steps" else 1, block_length)
    rates = tuple(unit / length for length in schedule.lengths)  # of a stream that has the whole weight
    limits = [size // block_length if stop else None for size, stop in zip(sizes, schedule.stops, strict=True)]
    shares = [schedule.shares(weights) for _, weights in schedule.points]
    tree = plan_tree(tuple(_normal(_products(weights, rates)) for weights in shares))
    starts = [at for at, _ in schedule.points]
    lengths = [Fraction(end - begin) for begin, end in pairwise(starts)]
    ends = shares[1:] if schedule.interpolation == "linear" else shares[:-1]
    sections = [*map(Section, lengths, shares, ends), Section(None, shares[-1], shares[-1])]
    return _Era(tree, rates, limits, 0, np.zeros(len(sizes), np.int64), sections)


class _Era:
    """The time between two changes of the weights: the tree's numbers count from its start.

    It holds each stream's integral at the ends of pieces in which it is linear, in 1/1024 samples (its anchors). Those
    of the last section, which has no end, are made as far as they are asked for.
    """

    def __init__(
        self,
        tree: Tree,
        rates: Shares,
        limits: Sequence[int | None],
        start: int,
        before: Ints,
        sections: Sequence[Section],
    ) -> None:
        self.start = start
        self.num_streams = len(rates)
        self.end: int | None = None
        self._before = before  # what each stream gave before the start
        self._tree = tree
        self._rates = rates
        self._limits = limits
        self._follower: tuple[tuple[int, Numbers], _Era] | None = None
        self._left = [limit and limit - count for limit, count in zip(limits, before.tolist(), strict=True)]
        self._alive = [left is None or left > 0 for left in self._left]
        self._base = [Fraction(0)] * len(rates)
        self._rows = [np.zeros((1, len(rates)), np.int64)]
        self._last: Section | None = None
        for section in sections:
            rest: Section | None = section
            while rest is not None:
                rest = self._add(rest)
        if self._last is None:  # whole samples, so that each stream that ends gives all of its own
            totals = [math.ceil(base) for base in self._base]
            self._rows.append(np.array([totals], np.int64) << _BITS)
            self.end = start + sum(totals)
        self._head = np.concatenate(self._rows)
        self._table = _Table(self._head)

    def counts(self, at: Ints) -> Ints:
        """As :meth:`Mixture.counts`, within the era."""
        counts = np.empty((len(at), self.num_streams), np.int64)
        if len(at):
            self._table_up_to(int(at[-1]) - self.start + 1).walk(self._tree, at - self.start, counts)
        return counts + self._before

    def followed_by(self, start: int, weights: Numbers, shares_of: Callable[[Numbers], Shares]) -> _Era:
        """The era with other weights from block ``start`` on.

        The last one is kept: a run that changes its weights 1,000 times does not count from the first.
        """
        follower = self._follower  # a local: another thread may replace it
        if follower is None or follower[0] != (start, weights):
            shares = shares_of(weights)
            before = self.counts(np.array([start]))[0]
            era = _Era(self._tree, self._rates, self._limits, start, before, [Section(None, shares, shares)])
            follower = self._follower = (start, weights), era
        return follower[1]

    def _table_up_to(self, samples: int) -> _Table:
        """The anchors, at least up to so many samples."""
        table = self._table  # a local: another thread may replace it
        if self._last is None:
            return table
        rates = _products(self._last.begin, self._rates)
        # A node may be ahead of its integral: every stream's next samples need anchors, however light it is.
        samples += math.ceil(_AHEAD * sum(rates) / min(filter(None, rates)))
        if table.anchors[-1].sum() <= samples << _BITS:
            lacks = samples - (int(self._head[-1].sum()) >> _BITS)
            count = max(2 * (len(table.anchors) - len(self._head)), lacks // _MOST_IN_PIECE + 2)
            section = self._last._replace(length=Fraction(_MOST_IN_PIECE) / sum(rates) * count)
            table = self._table = _Table(np.concatenate([self._head, self._pieces(section, count)]))
        return table

    def _add(self, section: Section) -> Section | None:
        """Add the anchors of a section up to where a stream ends, whose weight then goes to the others; the rest."""
        begin = self._living(section.begin)
        end = self._living(section.end)
        if not any((*begin, *end)):
            return None  # no stream of this section is left: the next one begins at once
        section = Section(section.length, begin or end, end or begin)
        living = [stream for stream, alive in enumerate(self._alive) if alive]
        ends = {stream: place for stream in living if (place := self._place_of_end(section, stream)) is not None}
        length = min(ends.values(), default=section.length)
        if length is None:
            self._last = section
            return None
        part = length / section.length if section.length else 0
        middle = tuple(a + (b - a) * part for a, b in zip(section.begin, section.end, strict=True))
        self._advance(Section(length, section.begin, middle), length)
        for stream, place in ends.items():
            self._alive[stream] = place > length
        if section.length == length:
            return None
        return Section(section.length and section.length - length, middle, section.end)

    def _living(self, shares: Shares) -> Shares:
        """The shares of the streams that have not ended; () if these have none."""
        living = [share if alive else Fraction(0) for share, alive in zip(shares, self._alive, strict=True)]
        return _normal(living) if any(living) else ()

    def _place_of_end(self, section: Section, stream: int) -> Fraction | None:
        """Where in a section a stream has given all of its samples; None if not in it."""
        left = self._left[stream]
        length = section.length
        rate = self._rates[stream]
        if left is None:
            return None
        needed = left - self._base[stream]
        begin = section.begin[stream] * rate
        slope = section.end[stream] * rate - begin
        if length is not None and (begin + slope / 2) * length < needed:
            return None
        if length is None or not slope:
            return needed / begin if begin else None

        def samples_to(step: int) -> Fraction:
            place = length * Fraction(step, 2**48)
            return begin * place + slope * place * place / (2 * length)

        return length * Fraction(bisect_left(range(2**48), needed, key=samples_to), 2**48)

    def _advance(self, section: Section, length: Fraction) -> None:
        """Add the anchors of a section, and move the base to its end; it keeps 40 bits behind the point."""
        rows = self._pieces(section, _num_pieces(section, length, self._rates))
        for stream, left in enumerate(self._left):
            grown = self._rates[stream] * (section.begin[stream] + section.end[stream]) * length / 2
            total = Fraction(int((self._base[stream] + grown) * 2**40), 2**40)
            is_over = left is not None and grown > 0 and total >= left - Fraction(1, 2**20)
            self._base[stream] = Fraction(left or 0) if is_over else total
        rows[-1] = [int(base * 2**_BITS) for base in self._base]
        self._rows.append(rows)

    def _pieces(self, section: Section, count: int) -> Ints:
        """The anchors at the ends of ``count`` equal pieces of a section."""
        assert section.length is not None
        anchors = np.empty((count, self.num_streams), np.int64)
        piece = np.arange(1, count + 1, dtype=object)
        scale = section.length / count * 2**_BITS
        for stream, (rate, begin, end) in enumerate(zip(self._rates, section.begin, section.end, strict=True)):
            terms = (self._base[stream] * 2**_BITS, rate * begin * scale, rate * (end - begin) * scale / (2 * count))
            common = math.lcm(*(term.denominator for term in terms))
            constant, linear, square = (int(term * common) for term in terms)
            slope = piece * square + linear if square else linear
            anchors[:, stream] = (piece * slope + constant) // common
        return anchors


class _Table:
    """The anchors of an era, int64[pieces + 1, streams], and the sums of those under each node of the tree."""

    def __init__(self, anchors: Ints) -> None:
        self.anchors = anchors
        self._sums: dict[Tree, Ints] = {}

    def walk(self, node: Tree, samples: Ints, counts: Ints) -> None:
        """Fill in the counts of the streams under a node that has given so many samples."""
        if not isinstance(node, tuple):
            counts[:, node] = samples
            return
        left = _left_part(samples, self._sum(node), self._sum(node[0]))
        self.walk(node[0], left, counts)
        self.walk(node[1], samples - left, counts)

    def _sum(self, node: Tree) -> Ints:
        if node not in self._sums:
            self._sums[node] = self.anchors[:, leaves(node)].sum(axis=1)
        return self._sums[node]


def _left_part(samples: Ints, anchors: Ints, left_anchors: Ints) -> Ints:
    """How many of the samples of a node are of its left child, by both nodes' anchors."""
    units = samples << _BITS
    row = np.clip(segment_of(anchors, units), 0, len(anchors) - 2)
    base = anchors[row]
    first = left_anchors[row]
    length = np.maximum(anchors[row + 1] - base, 1)
    inside = np.minimum(units - base, length)
    part = ((first & (2**_BITS - 1)) + 2 ** (_BITS - 1)) * length + (left_anchors[row + 1] - first) * inside
    left: Ints = (first >> _BITS) + part // (length << _BITS)
    return left


def _products(shares: Shares, rates: Shares) -> list[Fraction]:
    return [share * rate for share, rate in zip(shares, rates, strict=True)]


def _normal(weights: Sequence[Fraction]) -> Shares:
    total = sum(weights)
    return tuple(weight / total for weight in weights)


def _num_pieces(section: Section, length: Fraction, rates: Shares) -> int:
    """Pieces of a section: short enough for 64 bits, and for a linear one within 1/32 sample of its integral."""
    begin = _products(section.begin, rates)
    end = _products(section.end, rates)
    samples = max(sum(begin), sum(end)) * length
    bend = max(abs(after - before) for before, after in zip(begin, end, strict=True)) * length
    exact = math.isqrt(math.ceil(4 * bend)) + 1 if bend else 1
    least = max(1, math.ceil(samples / _MOST_IN_PIECE))
    if least > _MOST_PIECES:
        raise ValueError(
            f"The points of a schedule must be at most {_MOST_PIECES * _MOST_IN_PIECE:,} samples apart, but two of "
            f"them are {int(samples):,} apart. Omit the far one."
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
        members = [stream for stream in range(count) if chosen >> stream & 1]
        totals = [sum(point[stream] for stream in members) for point in shares]
        inverse = [float(1 / total) if total else 0.0 for total in totals]
        if len(members) == 1:
            trees[chosen] = members[0]
            slacks[chosen] = [value or math.inf for value in inverse]
            continue
        best = -math.inf
        for part in _halves(chosen, even=count == len(members) == 4):
            pairs = zip(slacks[part], slacks[chosen ^ part], inverse, strict=True)
            slack = [min(left, right) - above for left, right, above in pairs]
            if min(slack) > best or chosen not in trees:
                best = min(slack)
                trees[chosen] = trees[part], trees[chosen ^ part]
                slacks[chosen] = slack
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
    nodes: list[tuple[Fraction, int, Tree]] = [
        (sum(over_time, Fraction(0)), stream, stream) for stream, over_time in enumerate(zip(*shares, strict=True))
    ]
    heapify(nodes)
    for created in range(len(nodes), 2 * len(nodes) - 1):
        light, _, left = heappop(nodes)
        heavy, _, right = heappop(nodes)
        heappush(nodes, (light + heavy, created, (left, right)))
    return nodes[0][2]
