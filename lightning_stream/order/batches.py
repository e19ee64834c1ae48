"""The global batches of an epoch, and each replica's share of them: where they end (`Cuts`), who gets what (`ByNode`).

`divide_evenly`, `divide_by_stream`, `divide_blocks` and `divide_by_budget` are the ways to divide an order of this
package; an order of mosaicml-streaming is `SelfDivided`.
"""

from __future__ import annotations

from abc import abstractmethod
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field, fields, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from .arrays import Ints
from .orders import Interleave, Order, ceil_div, positions_of
from .placement import num_readers, placement_of
from .rows import ByLength, CountedWindows, PackedRows
from .shares import ByBlock, ByNode, ReplicaBatch, Sharing
from .world import World

if TYPE_CHECKING:
    from .balance import Balance
    from .packing import RowSpans

Tail = Literal["pad", "drop", "exact"]
TAILS: tuple[Tail, ...] = ("pad", "drop", "exact")
_ALONE = World()


class Cuts:
    """Where global batches end, counted from a start: batches of B samples, and explicit ends behind them.

    Args:
        start, batch_size: The first position, and B.
        reaches: Whether positions are cut into batches of B up to this one, known without `listed`.
        listed: The number of batches of B, and the ends of those behind them; asked for when it is needed.
    """

    _num_known = 0  # whole batches, at least: asking costs as much as the rest of planning a batch

    def __init__(
        self,
        start: int,
        batch_size: int,
        reaches: Callable[[int], bool],
        listed: Callable[[], tuple[int, Sequence[int]]],
    ) -> None:
        self.start = start
        self._batch_size = batch_size
        self._reaches = reaches
        self._listed = listed

    @cached_property
    def _ends(self) -> tuple[int, Sequence[int]]:
        return self._listed()

    @property
    def num_whole(self) -> int:
        """How many batches, from the first on, have the regular size."""
        return self._ends[0]

    @property
    def num_batches(self) -> int:
        """All batches."""
        return self._ends[0] + len(self._ends[1])

    def is_whole(self, k: int) -> bool:
        """Whether batch ``k`` has the regular size, and no tail changes it. Cheap far from the epoch's end."""
        if k < self._num_known:
            return True
        if self._reaches(self.start + (k + 1) * self._batch_size):
            self._num_known = k + 1
            return True
        return k < self.num_whole

    def end_of(self, k: int) -> int | None:
        """The position behind batch ``k``; None if there is no such batch. Cheap far from the epoch's end."""
        if self.is_whole(k):
            return self.start + (k + 1) * self._batch_size
        num_whole, ends = self._ends
        return ends[k - num_whole] if k < num_whole + len(ends) else None

    def bounds(self, k: int) -> tuple[int, int]:
        """The first position of batch ``k``, and the one behind its last; ValueError if there is no such batch."""
        if 0 <= k < self._num_known:
            return self.start + k * self._batch_size, self.start + (k + 1) * self._batch_size
        begin = self.end_of(k - 1) if k > 0 else self.start
        end = None if k < 0 else self.end_of(k)
        if begin is None or end is None:
            raise ValueError(f"Global batches count from 0 to {self.num_batches - 1} here; found {k}.")
        return begin, end


class CountedCuts(Cuts):
    """The batches of a budget of tokens: counted window by window, as far as they are asked for.

    ``last`` is the position behind the last batch.
    """

    def __init__(self, order: ByLength, start: int, last: int) -> None:
        self.start = start
        self._order = order
        self._last = last

    @cached_property
    def _done(self) -> int:
        """The batches that end at or before the start."""
        return self._order.batches_before(self.start) or 0

    @property
    def num_whole(self) -> int:
        """All batches, but for a last one that the tail drops."""
        order = self._order
        count = order.num_batches - self._done
        return count - (count > 0 and self._last < order.size)

    @property
    def num_batches(self) -> int:
        """All batches."""
        return self.num_whole

    def is_whole(self, k: int) -> bool:
        """Whether there is a batch ``k``."""
        return self.end_of(k) is not None

    def end_of(self, k: int) -> int | None:
        """The position behind batch ``k``; None if there is no such batch."""
        end = self._order.end_of_batch(self._done + k)
        return end if end is not None and end <= self._last else None


class Division(NamedTuple):
    """Where batches end, and who gets what of the order whose positions they have."""

    cuts: Cuts
    owners: ByNode


@dataclass(frozen=True, eq=False)
class EpochOrder:
    """All sample ids of one epoch, in order, readable at any position.

    Attributes:
        epoch: Counts from 0.
        order: The sequence of its samples or rows.
        divide: How a `BatchPlan` divides such a sequence.
        placed_nodes: The canonical nodes, where a `Placement` says who reads which; None: they stand in their order.
        following: Makes the order of the next epoch; None where that is unknown.

    Example::

        order = run.epoch(3)
        order.ids(1000, 1008)  # eight sample ids of epoch 3, without computing those before
    """

    epoch: int
    order: Order
    divide: Callable[[BatchPlan, Order], Division]
    placed_nodes: int | None = None
    following: Callable[[], EpochOrder] | None = None

    @property
    def num_samples(self) -> int:
        """N, all positions; of rows, this plans every window."""
        return self.order.size

    @property
    def documents(self) -> EpochOrder:
        """The order of samples: this one, unless they are packed into rows."""
        is_packed = isinstance(self.order, PackedRows)
        return replace(self, order=self.order.below) if is_packed else self

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

    def counted_windows(self, position: int) -> CountedWindows | None:
        """What a state holds so that a resume at this position is fast; None where every position is."""
        windows = self.order.cursor(position)
        return None if windows is None else CountedWindows(self.epoch, windows)


@dataclass(frozen=True, eq=False)
class BatchPlan:
    """The global batches of one epoch from a position on, and this world's share of each.

    Args:
        order: The epoch's order.
        batch_size: B, samples of a global batch (one optimizer step over all replicas, accumulation included).
        world: This process among all. Only :meth:`share` depends on it, and with ``tail="exact"`` the border between
            the last two batches; in the orders of mosaicml-streaming, the batches do too.
        tail: What happens to the last partial batch: ``"pad"`` fills it up with repeats, ``"drop"`` omits it,
            ``"exact"`` splits it unevenly; where it has fewer samples than there are replicas, it takes some of the
            batch before, which may then have fewer itself. So with ``"exact"`` the last two global batches of an epoch
            depend on the number of replicas.
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

    order: EpochOrder
    _: KW_ONLY
    batch_size: int
    world: World = _ALONE
    tail: Tail = "pad"
    start: int = 0
    balance: Balance | None = None
    accumulate: int = 1

    _division: Division = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_division", self.order.divide(self, self.order.order))

    def __reduce__(self) -> tuple[partial[BatchPlan], tuple[()]]:
        """Pickle what the plan was made of, not what was computed from it."""
        return partial(
            BatchPlan, **{attribute.name: getattr(self, attribute.name) for attribute in fields(self) if attribute.init}
        ), ()

    @property
    def sharing(self) -> Sharing:
        """How it divides its batches over the replicas."""
        count = self.order.placed_nodes
        world = self.world
        placement = None if count is None else placement_of(count, num_readers(world), world.disks)
        return Sharing(world, self.tail != "exact", self.balance, placement)

    def of_replicas(self, balance: Balance | None = None) -> list[BatchPlan]:
        """The same global batches for the first rank of every replica, perhaps balanced."""
        ranks = range(0, self.world.num_ranks, self.world.replication)
        return [replace(self, world=replace(self.world, rank=rank), balance=balance) for rank in ranks]

    @property
    def num_whole_batches(self) -> int:
        """How many batches, from the first on, have exactly B samples; those of the epoch's remainder follow."""
        return self._division.cuts.num_whole

    @property
    def num_batches(self) -> int:
        """Global batches from ``start`` on."""
        return self._division.cuts.num_batches

    @property
    def end(self) -> int:
        """The position behind the last batch: N, or less with ``tail="drop"``."""
        return self.bounds(self.num_batches - 1)[1] if self.num_batches else self.start

    def is_whole(self, k: int) -> bool:
        """Whether global batch ``k`` has the regular size, and no tail changes it. Cheap far from the epoch's end."""
        return self._division.cuts.is_whole(k)

    def has(self, k: int) -> bool:
        """Whether there is a global batch ``k``. Cheap far from the epoch's end."""
        return self._division.cuts.end_of(k) is not None

    def bounds(self, k: int) -> tuple[int, int]:
        """First position of global batch ``k`` (counted from ``start``), and the one behind its last."""
        return self._division.cuts.bounds(k)

    @property
    def follows_order(self) -> bool:
        """Whether the batches hold the order's samples in its places: only mosaicml-streaming's may hold others."""
        batches = self._division.owners.order
        order = self.order.order
        if batches is order:
            return True
        at = positions_of(self.start, max(order.size, batches.size))
        return np.array_equal(batches.ids(at), order.ids(at))

    def ids(self, k: int) -> Ints:
        """Sample ids of global batch ``k`` in position order, padding excluded."""
        return self._division.owners.order.ids(self._positions(k))

    def _positions(self, k: int) -> Ints:
        return positions_of(*self.bounds(k))

    def share(self, k: int) -> ReplicaBatch:
        """This replica's part of global batch ``k``."""
        return self._division.owners.share(k, self._positions(k))

    def places(self, k: int) -> ReplicaBatch:
        """As :meth:`share`, with positions in the place of ids: far from those planned last, ids cost much more."""
        return self._division.owners.places(k, self._positions(k))

    @property
    def splits_samples(self) -> bool:
        """Whether whole batches are grouped by canonical node and split over the replicas one by one."""
        cuts, owners = self._division
        is_plain = type(owners) is ByNode and type(cuts) is Cuts and self.balance is None
        return is_plain and not isinstance(owners.order, PackedRows)

    def offsets_in(self, at: Ints, replicas: Sequence[int]) -> Ints:
        """int64[batches, replicas, B / replicas]: what replicas get of whole batches, as offsets in their positions."""
        owners = self._division.owners
        nodes = owners.groups(at).reshape(-1, self.batch_size)
        is_alike = (nodes == nodes[0]).all()  # usually C divides B, and all batches are grouped alike
        grouped = np.argsort(nodes[:1] if is_alike else nodes, axis=1, kind="stable")
        shares = [owners.world_of(replica).replica for replica in replicas]
        offsets = grouped.reshape(len(grouped), self.world.num_replicas, -1)[:, shares]
        return self.batch_size * np.arange(len(nodes))[:, None, None] + offsets

    def shares(self, ks: Sequence[int]) -> list[ReplicaBatch]:
        """As :meth:`share` of each, ascending, but full ones are planned together: 16 of 1024 in 60 % of the time."""
        for k in (*ks[:1], *ks[-1:]):
            self.bounds(k)
        count = bisect_left(ks, self.num_whole_batches) if len(ks) > 1 and self.splits_samples else 0
        if count < 2:
            return [self.share(k) for k in ks]
        at = positions_of(self.bounds(ks[0])[0], self.bounds(ks[count - 1])[1])
        offsets = self.offsets_in(at, [self.world.replica])[np.array(ks[:count]) - ks[0], 0]
        ids = self._division.owners.order.ids(at)[offsets]
        full = map(ReplicaBatch, ids, at[offsets], np.zeros(ids.shape, np.bool_))
        return [*full, *map(self.share, ks[count:])]

    def num_micro_batches(self, k: int, device_batch_size: int) -> int:
        """How many micro-batches of at most ``device_batch_size`` samples, padding included, every replica cuts its
        share of global batch ``k`` into. Raises ValueError where they would cut the blocks of ``device_per_stream``.
        """
        return self._division.owners.num_micro_batches(k, self._positions(k), device_batch_size)


# The ways to divide an order.


def refuse(problems: Iterable[str]) -> None:
    """Raise ValueError where there are any."""
    if sentences := " ".join(problems):
        raise ValueError(f"The batches of an epoch cannot be planned. {sentences}")


def problems_of(plan: BatchPlan, order: Order, *, must_divide: bool = True, owns: bool = False) -> Iterator[str]:
    """Why an order cannot be divided this way.

    ``must_divide``: every batch must give all replicas equally many samples. ``owns``: the order itself decides which
    replica gets which sample.
    """
    size = plan.batch_size
    start = plan.start
    replicas = plan.world.num_replicas
    if plan.tail not in TAILS:
        yield f"tail must be one of {', '.join(TAILS)}, not {plan.tail!r}."
    if start < 0 or not order.reads_to(start):
        yield f"start must be within the epoch, [0, {order.size}], not {start}."
    if plan.balance is not None and owns:
        yield (
            "This order assigns samples to replicas itself, so balance must be None. Omit it, or choose another "
            "batching_method or shuffle_algo."
        )
    if size < 1:
        yield f"batch_size (B) must be at least 1, not {size}."
    elif size % replicas and must_divide:
        below = size // replicas * replicas
        above = ceil_div(size, replicas) * replicas
        yield (
            f"A global batch must divide evenly over the data replicas, but {size} samples over {replicas} "
            f"replicas leave {size % replicas}: use {f'{below} or ' if below else ''}{above} samples, or a number of "
            f"replicas that divides {size}."
        )


def divide_evenly(plan: BatchPlan, order: Order) -> Division:
    """Batches of B samples, cut anywhere; replicas get samples by canonical node or by cost."""
    refuse(problems_of(plan, order))
    return Division(_even_cuts(plan, order), ByNode(order, plan.sharing))


def divide_by_stream(plan: BatchPlan, order: Order) -> Division:
    """Each batch is a block of one stream; then each stream's remainder is a batch, with any tail that keeps it."""
    length = _interleave(order).block
    problems = [*problems_of(plan, order), *_start_problems(plan, order)]
    if length != plan.batch_size:
        problems.append(
            f"per_stream fixes the global batch at the run's start: {length} samples then, {plan.batch_size} now. "
            "Keep it, or choose another batching_method."
        )
    refuse(problems)
    return Division(_even_cuts(plan, order, length), ByNode(order, plan.sharing))


def divide_blocks(plan: BatchPlan, order: Order) -> Division:
    """Replicas get whole blocks; single samples only where a block is one, or with ``"exact"`` in the remainder."""
    block = _interleave(order).block
    problems = [*problems_of(plan, order, owns=True), *_start_problems(plan, order)]
    per_replica, left = divmod(plan.batch_size, plan.world.num_replicas)
    if not left and per_replica % block:
        problems.append(
            f"device_per_stream keeps blocks of {block} samples, so a replica's part of a global batch must be a "
            f"multiple of that, but {plan.batch_size} samples over {plan.world.num_replicas} replicas are "
            f"{per_replica} each."
        )
    refuse(problems)
    cuts = _even_cuts(plan, order, 1 if plan.tail == "exact" else block)
    if block == 1:
        return Division(cuts, ByNode(order, plan.sharing))
    return Division(cuts, ByBlock(_interleave(order), plan.sharing, cuts.num_whole, cuts.num_batches))


def divide_by_budget(plan: BatchPlan, order: Order) -> Division:
    """Batches that differ in size, each cut into as many micro-batches as the run accumulates."""
    assert isinstance(order, ByLength)
    refuse(problems_of(plan, order, must_divide=False))
    left = order.size % plan.batch_size if plan.tail == "drop" else 0
    return Division(CountedCuts(order, plan.start, order.size - left), ByNode(order, plan.sharing, plan.accumulate))


class SelfDivided(Order):
    """An order that says itself how it is divided."""

    @abstractmethod
    def division(self, plan: BatchPlan) -> Division:
        """Where the batches of a plan end, and who gets what. Raises ValueError where it cannot be divided so."""


def divide_itself(plan: BatchPlan, order: Order) -> Division:
    """As the order says."""
    assert isinstance(order, SelfDivided)
    return order.division(plan)


def _interleave(order: Order) -> Interleave:
    """The order of blocks, which may be sorted by length in windows."""
    assert isinstance(order.below, Interleave)
    return order.below


def _start_problems(plan: BatchPlan, order: Order) -> Iterator[str]:
    """Why an epoch cannot start here: a start lies between two blocks, or anywhere in the remainders."""
    block = _interleave(order).block
    if plan.start < order.full_end and plan.start % block:
        yield f"This order takes {block} samples of one stream at a time, but start={plan.start} lies inside them."


def _even_cuts(plan: BatchPlan, order: Order, block: int = 1) -> Cuts:
    """Batches of B up to ``full_end``, and behind it batches of as many blocks, the streams' remainders being short."""
    size = plan.batch_size
    start = plan.start
    margin = plan.world.num_replicas if plan.tail == "exact" else 0

    def listed() -> tuple[int, Sequence[int]]:
        num_whole = max(0, order.full_end - start) // size
        at = start + num_whole * size
        if plan.tail == "drop" or at >= order.size:
            return num_whole, []
        # An end at the position or before it is that of the last whole batch.
        ends = _ends_anywhere(plan, order, at) if block == 1 else _ends_of_blocks(order, at, block, size // block)
        return num_whole - (bool(ends) and ends[0] <= at), ends

    return Cuts(start, size, lambda position: order.reaches(position + margin), listed)


def _ends_anywhere(plan: BatchPlan, order: Order, at: int) -> Sequence[int]:
    """Every B; ``"exact"`` moves the last border back where fewer samples than replicas follow, but into no block.

    It does so where the batch before keeps some.
    """
    total = order.size
    ends = [*range(at + plan.batch_size, total, plan.batch_size), total]
    border = total - plan.world.num_replicas
    is_alone = len(ends) == 1 and at == plan.start
    least = order.full_end if isinstance(order, Interleave) and order.block > 1 else 0
    if plan.tail != "exact" or is_alone or border < least or border >= [at, *ends][-2]:
        return ends
    return [*ends[:-2], border, ends[-1]]


def _ends_of_blocks(order: Order, at: int, block: int, per_batch: int) -> Sequence[int]:
    edges = [*range(at + block, order.full_end + 1, block), *_interleave(order).remainder_ends]
    edges = [end for end in edges if end > at]
    return [*edges[per_batch - 1 :: per_batch], *edges[len(edges) // per_batch * per_batch :][-1:]]
