"""The global batches of an epoch, and each replica's share of them: where they end (`Cuts`), who gets what (`Owners`).

`divide_evenly`, `divide_by_stream`, `divide_blocks` and `divide_by_budget` are the ways to divide an order of this
package; an order of mosaicml-streaming has its own.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from lightning_stream.order.arrays import Ints
from lightning_stream.order.balance import Balance
from lightning_stream.order.cuts import CountedCuts, Cuts, EvenCuts
from lightning_stream.order.orders import Interleave, Order, positions_of
from lightning_stream.order.rows import ByLength, Landmark, PackedRows
from lightning_stream.order.shares import ByBlock, ByCost, ByNode, Owners, ReplicaBatch
from lightning_stream.order.snapshot import Snapshot
from lightning_stream.order.world import World

if TYPE_CHECKING:
    from lightning_stream.order.packing import RowSpans

Tail = Literal["pad", "drop", "exact"]
TAILS: tuple[Tail, ...] = ("pad", "drop", "exact")


@dataclass(frozen=True, eq=False)
class Request:
    """What a `BatchPlan` is asked to divide, and how; see there."""

    order: Order
    batch_size: int
    world: World
    tail: Tail
    start: int
    balance: Balance | None
    accumulate: int


class Division(NamedTuple):
    """The order whose positions batches have, where they end, and who gets what."""

    order: Order
    cuts: Cuts
    owners: Owners


class EpochOrder:
    """All sample ids of one epoch, in order, readable at any position.

    Attributes:
        epoch: Counts from 0.
        order: The sequence of its samples or rows.

    Example::

        order = run.epoch(3)
        order.ids(1000, 1008)  # eight sample ids of epoch 3, without computing those before
    """

    def __init__(self, epoch: int, order: Order, divide: Callable[[Request], Division]) -> None:
        self.epoch = epoch
        self.order = order
        self.divide = divide

    @property
    def num_samples(self) -> int:
        """N, all positions; of rows, this plans every window."""
        return self.order.size

    @property
    def samples_per_position(self) -> int:
        """About so many, where samples are packed into rows."""
        return self.order.documents_per_row if isinstance(self.order, PackedRows) else 1

    def samples_in(self, num_positions: int) -> int:
        """About how many samples global batches have that count as so many positions."""
        if isinstance(self.order, ByLength) and self.order.has_budget:
            return self.order.samples_in(num_positions)
        return num_positions * self.samples_per_position

    @property
    def documents(self) -> EpochOrder:
        """The order of samples: this one, unless they are packed into rows."""
        is_packed = isinstance(self.order, PackedRows)
        return EpochOrder(self.epoch, self.order.below, self.divide) if is_packed else self

    def reaches(self, position: int) -> bool:
        """Whether the positions before this one are cut into global batches of B one after another.

        Where samples are packed into rows, the number of all rows is not known before: then this is far cheaper.
        """
        return self.order.reaches(position)

    def exists(self, position: int) -> bool:
        """Whether the epoch has this position."""
        return self.reaches(position + 1) or position < self.num_samples

    def _range(self, begin: int, end: int) -> Ints:
        """The positions [begin, end). Raises ValueError for those outside the epoch."""
        if not 0 <= begin <= end or not self.order.reads_to(end):
            raise ValueError(f"Positions must be within the epoch, [0, {self.num_samples}); found [{begin}, {end}).")
        return positions_of(begin, end)

    def ids(self, begin: int, end: int) -> Ints:
        """Sample ids at positions [begin, end): int64[end - begin]. O(range + window)."""
        return self.order.ids(self._range(begin, end))

    def canonical(self, begin: int, end: int) -> Ints:
        """The canonical node of each position in [begin, end): what ranks are grouped by."""
        return self.order.nodes(self._range(begin, end))

    def rows(self, begin: int, end: int) -> RowSpans | None:
        """What the rows at positions [begin, end) hold; None where positions are samples."""
        return self.order.spans(self._range(begin, end))

    def samples(self, begin: int, end: int) -> tuple[Ints, Ints]:
        """The samples that positions [begin, end) need, and the position of each."""
        at = self._range(begin, end)
        rows = self.order.spans(at)
        return (self.order.ids(at), at) if rows is None else (rows.ids, np.repeat(at, np.diff(rows.edges)))

    def positions(self, sample_id: int) -> list[int]:
        """All positions of a sample, ascending: the inverse of :meth:`ids`."""
        return self.order.find(sample_id)

    def alternatives(self, position: int, seed: int) -> RowSpans:
        """Rows to try where the one at a position cannot be read: 16 of its window at random, or none."""
        if not isinstance(self.order, PackedRows):
            raise TypeError("Only packed rows have alternatives.")
        return self.order.alternatives(position, seed, self.epoch)

    def batches_before(self, position: int) -> int | None:
        """Global batches that end at or before a position; None where all have the size that the run gives them."""
        if isinstance(self.order, ByLength) and self.order.has_budget:
            return self.order.batches_before(position)
        return None

    def landmark(self, position: int) -> Landmark | None:
        """What a state holds so that a resume at this position is fast; None where every position is."""
        order = self.order
        if isinstance(order, PackedRows) or (isinstance(order, ByLength) and order.has_budget):
            return Landmark(self.epoch, order.cursor(position))
        return None


class BatchPlan:
    """The global batches of one epoch from a position on, and this world's share of each.

    Args:
        order: The epoch's order.
        batch_size: B, samples of a global batch (one optimizer step over all replicas, accumulation included).
        world: This process among all. Only :meth:`share` depends on it, and with ``tail="exact"`` the border between
            the last two batches; in the orders of mosaicml-streaming, the batches do too.
        tail: What happens to the last partial batch: ``"pad"`` fills it up with repeats, ``"drop"`` omits it,
            ``"exact"`` splits it unevenly; where it has fewer samples than there are replicas, it takes some of the
            batch before, which may then have fewer itself.
        start: The position that the plan starts from; any, since B may have changed.
        balance: Gives every replica samples of nearly equal cost; None splits without regard to costs.
        accumulate: Micro-batches of a step. Batches of a budget of tokens, which differ in size, are cut into so many;
            all others by the samples of a micro-batch.

    Raises:
        ValueError: B does not divide over the replicas, contradicts the order, or ``start`` is outside the epoch.

    Example::

        plan = BatchPlan(run.epoch(0), batch_size=8, world=World(rank=1, num_ranks=2))
        plan.bounds(3)     # (24, 32)
        plan.share(3).ids  # the four sample ids of rank 1 in the fourth step
    """

    def __init__(
        self,
        order: EpochOrder,
        *,
        batch_size: int,
        world: World | None = None,
        tail: Tail = "pad",
        start: int = 0,
        balance: Balance | None = None,
        accumulate: int = 1,
    ) -> None:
        self.order = order
        self.world = World() if world is None else world
        self._request = Request(order.order, batch_size, self.world, tail, start, balance, accumulate)
        self._batches, self._cuts, self._owners = order.divide(self._request)

    def __reduce__(self) -> tuple[partial[BatchPlan], tuple[EpochOrder]]:
        """Pickle what the plan was made of, not what was computed from it."""
        return partial(BatchPlan, **self._arguments), (self.order,)

    def of(self, world: World, balance: Balance | None) -> BatchPlan:
        """The same global batches, for another rank or another balance."""
        return BatchPlan(self.order, **{**self._arguments, "world": world, "balance": balance})

    @property
    def _arguments(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self._request).items() if name != "order"}

    @property
    def batch_size(self) -> int:
        """B."""
        return self._request.batch_size

    @property
    def start(self) -> int:
        """The first position."""
        return self._request.start

    @property
    def num_whole_batches(self) -> int:
        """How many batches, from the first on, have exactly B samples; those of the epoch's remainder follow."""
        return self._cuts.num_whole

    @property
    def num_batches(self) -> int:
        """Global batches from ``start`` on."""
        return self._cuts.num_batches

    @property
    def end(self) -> int:
        """The position behind the last batch: N, or less with ``tail="drop"``."""
        return self._cuts.end

    def is_whole(self, k: int) -> bool:
        """Whether global batch ``k`` has the regular size, and no tail changes it. Cheap far from the epoch's end."""
        return self._cuts.is_whole(k)

    def has(self, k: int) -> bool:
        """Whether there is a global batch ``k``. Cheap far from the epoch's end."""
        return self._cuts.has(k)

    def bounds(self, k: int) -> tuple[int, int]:
        """First position of global batch ``k`` (counted from ``start``), and the one behind its last."""
        return self._cuts.bounds(k)

    @property
    def follows_order(self) -> bool:
        """Whether the batches hold the order's samples in its places: only mosaicml-streaming's may hold others."""
        order = self.order.order
        if self._batches is order:
            return True
        at = positions_of(self.start, max(order.size, self._batches.size))
        return np.array_equal(self._batches.ids(at), order.ids(at))

    def ids(self, k: int) -> Ints:
        """Sample ids of global batch ``k`` in position order, padding excluded."""
        return self._batches.ids(positions_of(*self.bounds(k)))

    def share(self, k: int) -> ReplicaBatch:
        """This replica's part of global batch ``k``."""
        return self._owners.share(k, *self.bounds(k))

    def places(self, k: int) -> ReplicaBatch:
        """As :meth:`share`, with positions in the place of ids: far from those planned last, ids cost much more."""
        return self._owners.places(k, *self.bounds(k))

    @property
    def splits_samples(self) -> bool:
        """Whether whole batches are grouped by canonical node and split over the replicas one by one."""
        is_plain = type(self._owners) is ByNode and isinstance(self._cuts, EvenCuts)
        return is_plain and not isinstance(self._batches, PackedRows)

    def positions(self, k: int, count: int, replicas: Sequence[int]) -> Ints:
        """int64[count, replicas, B / replicas]: what replicas get of whole batches [k, k + count), many at a time."""
        size = self.batch_size
        first = self.start + k * size
        nodes = self._batches.nodes(positions_of(first, first + count * size)).reshape(count, size)
        is_alike = (nodes == nodes[0]).all()  # usually C divides B, and all batches are grouped alike
        grouped = np.argsort(nodes[:1] if is_alike else nodes, axis=1, kind="stable")
        offsets = grouped.reshape(len(grouped), self.world.num_replicas, -1)[:, replicas]
        return first + size * np.arange(count)[:, None, None] + offsets

    def shares(self, ks: Sequence[int]) -> list[ReplicaBatch]:
        """As :meth:`share` of each, ascending, but full ones are planned together: 16 of 1024 in 60 % of the time."""
        for k in (*ks[:1], *ks[-1:]):
            self.bounds(k)
        count = bisect_left(ks, self.num_whole_batches) if len(ks) > 1 and self.splits_samples else 0
        if count < 2:
            return [self.share(k) for k in ks]
        first, end = self.bounds(ks[0])[0], self.bounds(ks[count - 1])[1]
        chosen = np.array(ks[:count]) - ks[0]
        positions = self.positions(ks[0], int(chosen[-1]) + 1, [self.world.replica])[chosen, 0]
        ids = self._batches.ids(positions_of(first, end))[positions - first]
        full = map(ReplicaBatch, ids, positions, np.zeros(ids.shape, dtype=np.bool_))
        return [*full, *map(self.share, ks[count:])]

    def num_micro_batches(self, k: int, device_batch_size: int) -> int:
        """How many micro-batches of at most ``device_batch_size`` samples, padding included, every replica cuts its
        share of global batch ``k`` into. Raises ValueError where they would cut the blocks of ``device_per_stream``.
        """
        return self._owners.num_micro_batches(k, *self.bounds(k), device_batch_size)


def prefetch_shards(plan: BatchPlan, snapshot: Snapshot, k_begin: int, k_end: int) -> Ints:
    """The shards that this rank needs for global batches [k_begin, k_end), in the order of first use."""
    if k_begin >= k_end:
        return np.empty(0, dtype=np.int64)
    shards = np.concatenate([snapshot.shards_of(plan.share(k).sample_ids) for k in range(k_begin, k_end)])
    _, first = np.unique(shards, return_index=True)
    first.sort()
    return shards[first]


# The ways to divide an order.


def check_request(
    request: Request, problems: Sequence[str] = (), *, must_divide: bool = True, owns: bool = False
) -> None:
    """Raise ValueError, with all reasons, for an order that cannot be divided this way.

    ``must_divide``: every batch must give all replicas equally many samples. ``owns``: the order itself decides which
    replica gets which sample.
    """
    order, size, start, replicas = request.order, request.batch_size, request.start, request.world.num_replicas
    reasons = []
    if request.tail not in TAILS:
        reasons.append(f"tail must be one of {', '.join(TAILS)}, not {request.tail!r}.")
    if start < 0 or not (order.reaches(start) or start <= order.size):
        reasons.append(f"start must be within the epoch, [0, {order.size}], not {start}.")
    if request.balance is not None and owns:
        reasons.append(
            "This order assigns samples to replicas itself, so balance must be None. Omit it, or choose another "
            "batching_method or shuffle_algo."
        )
    if size < 1:
        reasons.append(f"batch_size (B) must be at least 1, not {size}.")
    elif size % replicas and must_divide:
        near = [near for near in (size // replicas * replicas, -(-size // replicas) * replicas) if near]
        reasons.append(
            f"A global batch must divide evenly over the data replicas, but {size} samples over {replicas} "
            f"replicas leave {size % replicas}: use {' or '.join(map(str, near))} samples, or a number of "
            f"replicas that divides {size}."
        )
    if reasons or problems:
        raise ValueError("The batches of an epoch cannot be planned. " + " ".join([*reasons, *problems]))


def divide_evenly(request: Request) -> Division:
    """Batches of B samples, cut anywhere; replicas get samples by canonical node or by cost."""
    check_request(request)
    return Division(request.order, _even_cuts(request, _ends_anywhere), _by_sample(request))


def divide_by_stream(request: Request) -> Division:
    """Each batch is a block of one stream; then each stream's remainder is a batch."""
    length = _interleave(request).block
    problems = _start_problems(request)
    if length != request.batch_size:
        problems.append(
            f"per_stream fixes the global batch at the run's start: {length} samples then, {request.batch_size} now. "
            "Keep it, or choose another batching_method."
        )
    check_request(request, problems)
    return Division(request.order, _even_cuts(request, _ends_of_streams), _by_sample(request))


def divide_blocks(request: Request) -> Division:
    """Replicas get whole blocks; single samples only where a block is one, or with ``"exact"`` in the remainder."""
    order = _interleave(request)
    problems = _start_problems(request)
    per_replica, left = divmod(request.batch_size, request.world.num_replicas)
    if not left and per_replica % order.block:
        problems.append(
            f"device_per_stream keeps blocks of {order.block} samples, so a replica's part of a global batch must be a "
            f"multiple of that, but {request.batch_size} samples over {request.world.num_replicas} replicas are "
            f"{per_replica} each."
        )
    check_request(request, problems, owns=True)
    if order.block == 1:
        return Division(order, _even_cuts(request, _ends_anywhere), _by_sample(request))
    is_exact = request.tail == "exact"
    cuts = _even_cuts(request, partial(_ends_anywhere, least=order.full_end) if is_exact else _ends_of_blocks)
    num_full = cuts.num_whole
    owners = ByBlock(
        order,
        request.world,
        is_equal=not is_exact,
        per_replica=per_replica,
        num_full=num_full,
        num_batches=num_full if is_exact else cuts.num_batches,
    )
    return Division(order, cuts, owners)


def divide_by_budget(request: Request) -> Division:
    """Batches that differ in size, each cut into as many micro-batches as the run accumulates."""
    order = request.order
    assert isinstance(order, ByLength)
    check_request(request, must_divide=False)
    left = order.size % request.batch_size if request.tail == "drop" else 0
    return Division(
        order, CountedCuts(order, request.start, order.size - left), _by_sample(request, request.accumulate)
    )


def _by_sample(request: Request, num_micro: int | None = None) -> Owners:
    is_equal = request.tail != "exact"
    if request.balance is None:
        return ByNode(request.order, request.world, is_equal=is_equal, num_micro=num_micro)
    return ByCost(request.order, request.world, request.balance, is_equal=is_equal, num_micro=num_micro)


def _interleave(request: Request) -> Interleave:
    """The order of blocks, which may be sorted by length in windows."""
    order = request.order.below
    assert isinstance(order, Interleave)
    return order


def _start_problems(request: Request) -> list[str]:
    """Why an epoch cannot start here: a start lies between two blocks, or anywhere in the remainders."""
    order, start = _interleave(request), request.start
    if start >= order.full_end or start % order.block == 0:
        return []
    return [f"This order takes {order.block} samples of one stream at a time, but start={start} lies inside them."]


_Ends = Callable[[Request, int, int], Sequence[int]]
"""The ends of the batches behind a position, where no full batch is left before ``full_end``; from the number of whole
ones before it. An end at the position or before it is that of the last whole one."""


def _even_cuts(request: Request, ends_behind: _Ends) -> EvenCuts:
    order, size, start = request.order, request.batch_size, request.start
    margin = request.world.num_replicas if request.tail == "exact" else 0

    def listed() -> tuple[int, Sequence[int]]:
        whole = max(0, order.full_end - start) // size
        at = start + whole * size
        ends = ends_behind(request, at, whole) if request.tail != "drop" and at < order.size else []
        return whole - (bool(ends) and ends[0] <= at), ends

    return EvenCuts(start, size, lambda position: order.reaches(position + margin), listed)


def _ends_anywhere(request: Request, at: int, whole: int, least: int = 0) -> Sequence[int]:
    """Every B; ``"exact"`` moves the last border back, to ``least`` at most, where fewer samples than replicas follow.

    It does so where the batch before keeps some.
    """
    total = request.order.size
    ends = [*range(at + request.batch_size, total, request.batch_size), total]
    border = total - request.world.num_replicas
    is_alone = len(ends) == 1 and not whole
    if request.tail != "exact" or is_alone or border < least or border >= [at, *ends][-2]:
        return ends
    return [*ends[:-2], border, ends[-1]]


def _ends_of_streams(request: Request, at: int, _whole: int) -> Sequence[int]:
    """Each stream's remainder is a batch; ``"exact"`` moves no border: the batch before is another stream's."""
    return [end for end in _interleave(request).remainder_ends if end > at]


def _ends_of_blocks(request: Request, at: int, _whole: int) -> Sequence[int]:
    """As many blocks as a batch has, the streams' remainders being short ones."""
    order = _interleave(request)
    edges = [*range(at + order.block, order.full_end + 1, order.block), *order.remainder_ends]
    edges = [end for end in edges if end > at]
    per_batch = request.batch_size // order.block
    return [*edges[per_batch - 1 :: per_batch], *edges[len(edges) // per_batch * per_batch :][-1:]]
