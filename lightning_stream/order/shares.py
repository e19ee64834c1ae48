"""Which replica gets which samples of a global batch: by canonical node, by block of one stream, or by cost."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from .arrays import Bools, Integers, Ints
from .balance import Balance, balanced_split
from .orders import Interleave, Order, ceil_div, places_by
from .placement import Placement
from .world import World

if TYPE_CHECKING:
    from .packing import RowSpans


@dataclass(eq=False)  # nothing changes one, but a frozen one takes 2 us more to make: some 4 us a batch
class Samples:
    """Some samples of an epoch, or rows of them, and padding between them."""

    ids: Ints  # int64[n], sample ids; of rows, their fingerprints
    positions: Ints  # int64[n], the position of each in the epoch
    filler: Bools  # bool[n], True for padding: a repeat that no count, metric or ledger includes
    rows: RowSpans | None = None  # what the rows hold, where samples are packed into rows

    def __len__(self) -> int:
        """Samples, padding included."""
        return len(self.ids)

    @property
    def sample_ids(self) -> Ints:
        """The samples that must be read."""
        return self.ids if self.rows is None else self.rows.ids

    @property
    def num_samples(self) -> int:
        """Samples that count: padding excluded."""
        return len(self.ids) - int(np.count_nonzero(self.filler))

    def take(self, at: Ints | slice) -> Self:
        """Those at some places."""
        rows = None if self.rows is None else self.rows.take(np.arange(len(self))[at])
        return self.changed(ids=self.ids[at], positions=self.positions[at], filler=self.filler[at], rows=rows)

    def changed(self, **values: Any) -> Self:
        """With some other values: as `dataclasses.replace`, in a tenth of its time."""
        return type(self)(**(vars(self) | values))


@dataclass(eq=False)
class ReplicaBatch(Samples):
    """One replica's part of one global batch, or of a micro-batch of it."""

    device_block: int = 1  # samples that must stay together in a micro-batch (1 unless ``device_per_stream``)
    ends: tuple[int, ...] | None = None  # where the micro-batches end, if the order itself fixes that

    def micro_batches(self, count: int) -> list[ReplicaBatch]:
        """Cut evenly into ``count`` parts, see `BatchPlan.num_micro_batches`; sizes differ by at most one block.

        Blocks are cut only where there are more parts than blocks. A share of fewer samples than parts gets padding.
        """
        if count == 1:
            return [self]
        if len(self) < count:
            at = np.arange(count)
            padded = self.take(np.minimum(at, len(self) - 1))
            return padded.changed(filler=padded.filler | (at >= len(self))).micro_batches(count)
        block = self.device_block if ceil_div(len(self), self.device_block) >= count else 1
        blocks = ceil_div(len(self), block)
        ends = [min(blocks * index // count * block, len(self)) for index in range(count + 1)]
        if self.ends is not None and len(self.ends) == count:
            ends = [0, *self.ends]
        return [self.take(slice(*bounds)) for bounds in pairwise(ends)]


def num_micro_batches(num_samples: int, batch_size: int, num_replicas: int) -> int:
    """How many micro-batches of at most ``batch_size`` every replica cuts its even share of ``num_samples`` into."""
    return max(1, ceil_div(ceil_div(num_samples, num_replicas), batch_size))


class Sharing(NamedTuple):
    """How a plan divides its batches over the replicas.

    Attributes:
        world: This process among all.
        is_equal: Whether all replicas get the same number; else only an empty one gets a sample of padding.
        balance: What gives every replica samples of nearly equal cost; None splits without regard to costs.
        placement: Which node reads which canonical node; None: they stand in their order.
    """

    world: World
    is_equal: bool
    balance: Balance | None
    placement: Placement | None


class ByNode:
    """Who gets what of a global batch k, which has the positions ``at``.

    It is stably grouped by canonical node, in the order of the placement, and cut evenly; or by cost, where there is a
    balance.

    All replicas get the same number: where one has a sample less, padding repeats a near one of the same batch. With
    ``tail="exact"``, only an empty replica gets one sample of padding. ``num_micro`` are the micro-batches of every
    batch, where they do not follow from the number of samples.
    """

    def __init__(self, order: Order, sharing: Sharing, num_micro: int | None = None) -> None:
        self.order = order
        self.sharing = sharing
        self._num_micro = num_micro
        self.world = self.world_of(sharing.world.replica)

    def world_of(self, replica: int) -> World:
        """The world of a replica, at the place where it reads."""
        world = self.sharing.world
        placement = self.sharing.placement
        world = replace(world, rank=replica * world.replication)
        return world if placement is None else placement.seated(world)

    def groups(self, at: Ints) -> NDArray[np.uint16]:
        """The place of each position's canonical node among all."""
        nodes = self.order.nodes(at)
        placement = self.sharing.placement
        places = nodes if placement is None else placement.places[nodes]
        return places.astype(np.uint16)  # which is sorted by its digits: 3 times as fast

    def places(self, k: int, at: Ints) -> ReplicaBatch:
        """This replica's part, with positions in the place of ids."""
        world = self.world
        balance = self.sharing.balance
        nodes = self.groups(at)
        if balance is None:
            grouped = np.argsort(nodes, kind="stable")[:, None]
            offsets, filler = dealt(grouped, np.zeros(grouped.shape, np.bool_), world, self.sharing.is_equal)
            positions = at[offsets]
            return ReplicaBatch(positions, positions, filler)
        costs = balance.costs_of(self.order, at)
        count = self.num_micro_batches(k, at, balance.device_batch_size)
        offsets, filler, ends = balanced_split(
            nodes, costs, world, equal=self.sharing.is_equal, num_micro_batches=count
        )
        return ReplicaBatch(at[offsets], at[offsets], filler, ends=ends)

    def share(self, k: int, at: Ints) -> ReplicaBatch:
        """This replica's part."""
        places = self.places(k, at)
        rows = self.order.spans(places.positions)
        ids = self.order.ids(at)[places.positions - at[0]] if rows is None else rows.fingerprints()
        return places.changed(ids=ids, rows=rows)

    def num_micro_batches(self, k: int, at: Ints, device_batch_size: int) -> int:
        """How many micro-batches every replica cuts its share into."""
        if self._num_micro is not None:
            return self._num_micro
        return num_micro_batches(len(at), device_batch_size, self.sharing.world.num_replicas)


class ByBlock(ByNode):
    """Replicas get whole device blocks of one stream each; with ``tail="exact"`` samples behind the whole batches.

    Within each stream a batch is stably grouped by canonical node and cut into blocks; a short last block is filled up.
    """

    def __init__(self, order: Interleave, sharing: Sharing, num_whole: int, num_batches: int) -> None:
        super().__init__(order, sharing)
        self._interleave = order
        self._num_full = num_whole
        self._num_of_blocks = num_batches if sharing.is_equal else num_whole

    def places(self, k: int, at: Ints) -> ReplicaBatch:
        if k >= self._num_of_blocks:
            return super().places(k, at)
        block = self._interleave.block
        blocks, filler = blocks_of(self.groups(at), self._interleave.locate(at)[0], block)
        offsets, filler = dealt(blocks, filler, self.world, is_equal=True)
        return ReplicaBatch(at[offsets], at[offsets], filler, device_block=block)

    def num_micro_batches(self, k: int, at: Ints, device_batch_size: int) -> int:
        if k >= self._num_of_blocks:
            return super().num_micro_batches(k, at, device_batch_size)
        block = self._interleave.block
        if device_batch_size % block and block % device_batch_size:
            raise ValueError(
                f"device_per_stream keeps blocks of {block} samples, the batch per device that the run began with; a "
                f"batch per device must hold whole blocks or divide one, but it is {device_batch_size}. Choose another."
            )
        # Blocks are filled up, so the share itself is counted.
        is_full = k < self._num_full
        length = len(at) // self.sharing.world.num_replicas if is_full else len(self.places(k, at))
        return ceil_div(length, device_batch_size)


def dealt(units: Ints, filler: Bools, world: World, is_equal: bool) -> tuple[Ints, Bools]:
    """One replica's part of units, int64[n, size] of offsets; and which of these are padding.

    With ``is_equal`` all replicas get as many units: padding repeats a near one. Without, at least one.
    """
    count = len(units)
    begin = count * world.replica // world.num_replicas
    end = count * (world.replica + 1) // world.num_replicas
    least = ceil_div(count, world.num_replicas) if is_equal else 1
    chosen = units[begin:end].reshape(-1)
    is_filler = filler[begin:end].reshape(-1)
    for _ in range(end - begin, least):
        chosen = np.append(chosen, units[min(begin, count - 1)])
        is_filler = np.append(is_filler, np.ones(units.shape[1], np.bool_))
    return chosen, is_filler


def blocks_of(nodes: Integers, streams: Ints, block: int) -> tuple[Ints, Bools]:
    """The blocks of one stream each, int64[n, block] of offsets, and which of these fill a short one up.

    They are ordered by the middle of the canonical nodes that they hold, so that neighbours share shards.
    """
    tables = []
    fillers = []
    middles = []
    for _, places in places_by(streams):
        places = places[np.argsort(nodes[places], kind="stable")]
        count = ceil_div(len(places), block)
        missing = count * block - len(places)
        tables.append(np.append(places, np.full(missing, places[-1])).reshape(count, block))
        fillers.append((np.arange(count * block) >= len(places)).reshape(count, block))
        middles.append((np.arange(count) + 0.5) / count)
    order = np.argsort(np.concatenate(middles), kind="stable")
    return np.concatenate(tables)[order], np.concatenate(fillers)[order]
