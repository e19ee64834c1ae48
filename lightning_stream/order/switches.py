"""A training run that switches to another version of its data, in the middle of an epoch or between two.

    version a has samples 0 to 8; version b has samples 0 to 11, but neither 4 nor 7
    epoch 0     4  9  2 |  0  5 ...      in the order of version a, up to the switch
                        |  10 0  11 ...  then the samples of version b that have not come yet, in a fresh order

Every sample of the new version comes once in that epoch, before the switch or behind it. Later epochs are those of the
new version. All of it is a function of the settings and the data, so a resume on other devices continues exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from msgspec import structs

from .arrays import Ints, segment_of
from .batches import Tail
from .bitmap import Bitmap
from .config import OrderConfig, Switch
from .draw import StreamWeights
from .orders import Composed, Order, ceil_div, chunks_of
from .permutation import RngStream, random_u64
from .run import RunOrder
from .snapshot import Snapshot


@dataclass(frozen=True, eq=False)
class DataVersion:
    """The data between two switches: as a run without switches has it, and which sample ids of all data it has."""

    snapshot: Snapshot
    members: Bitmap

    def ids(self, version_ids: Ints) -> Ints:
        """The ids among all data of the samples with these ids in this version."""
        count = self.snapshot.num_samples
        is_prefix = not count or self.members[count - 1] == count - 1  # as after appends
        return version_ids if is_prefix else self.members.select(version_ids)


class SwitchedRun(RunOrder):
    """The order of a run whose settings have switches.

    Args:
        snapshot: All samples that any of the versions has: the sample ids of the order count them.
        weights, config: As of a `RunOrder`.
        versions: The data from the start on, and from each switch on.
    """

    def __init__(
        self, snapshot: Snapshot, weights: Sequence[StreamWeights], config: OrderConfig, versions: Sequence[DataVersion]
    ) -> None:
        self._plain = structs.replace(config, switches=())
        super().__init__(snapshot, weights, self._plain)
        self.config = config
        self._versions = tuple(versions[: 1 + len(config.switches)])
        self._runs = [RunOrder(version.snapshot, weights, self._plain) for version in self._versions]

    def __reduce__(self) -> tuple[type[SwitchedRun], tuple[object, ...]]:
        return SwitchedRun, (self.snapshot, self.weights, self.config, self._versions)

    @property
    def origin(self) -> Snapshot:
        return self._versions[0].snapshot

    @property
    def num_samples(self) -> int:
        """Samples of an epoch behind the last switch."""
        return self._runs[-1].num_samples

    @property
    def num_drawn(self) -> tuple[int, ...]:
        """Samples per epoch from each stream, behind the last switch."""
        return self._runs[-1].num_drawn

    def place_of_step(self, step: int, batch_size: int, tail: Tail) -> tuple[int, int]:
        """The epoch and the position at which an optimizer step of the run begins, with batches of one size."""
        edges = sorted({edge for switch in self.config.switches for edge in (switch.epoch, switch.epoch + 1)})
        epoch = 0
        for edge in (*edges, None):  # the epochs up to an edge have one length
            if edge == epoch:
                continue
            size = self.epoch(epoch).num_samples
            steps = size // batch_size if tail == "drop" else ceil_div(size, batch_size)
            if not steps:
                raise ValueError(f"An epoch must have a batch, but epoch {epoch} has {size} samples: see drop_last.")
            count = step // steps if edge is None else min(step // steps, edge - epoch)
            epoch = epoch + count
            step = step - count * steps
            if edge is None or epoch < edge:
                break
        return epoch, step * batch_size

    def order_of_samples(self, epoch: int) -> Order:
        switches = self.config.switches
        index = sum((switch.epoch, switch.position) <= (epoch, 0) for switch in switches)
        order = self._runs[index].order_of_samples(epoch)
        parts = [_Part(0, index, order, (self._versions[index].ids,))]
        pieces = VersionedOrder(parts, order.size)
        for index, switch in enumerate(switches, 1):
            if switch.epoch == epoch and switch.position:
                pieces = self._switched(pieces, epoch, switch.position, index)
        return pieces

    def _switched(self, order: VersionedOrder, epoch: int, position: int, index: int) -> VersionedOrder:
        """An epoch's order up to a position, and behind it the samples of a version that have not come yet."""
        if position > order.size:
            raise ValueError(f"A switch must be in its epoch, which has {order.size} samples; found {position}.")
        version = self._versions[index]
        is_left = version.members.mask.copy()
        for at in chunks_of(0, position):
            is_left[order.ids(at)] = False
        left = Bitmap.of_mask(is_left[version.members.mask])
        parts = [part for part in order.parts if part.begin < position]
        if len(left):
            (seed,) = random_u64(RngStream.VERSIONS, self.config.seed, epoch, index, size=1).tolist()
            config = structs.replace(self._plain, seed=seed >> 1)
            rest = RunOrder(version.snapshot.subset(left), self.weights, config).order_of_samples(epoch)
            parts.append(_Part(position, index, rest, (left.select, version.ids)))
        return VersionedOrder(parts, position + len(left))


@dataclass(frozen=True, eq=False)
class _Part(Order):
    """The samples of an order in a version of the data, whose ids pass through functions."""

    begin: int
    version: int
    order: Order
    id_maps: tuple[Callable[[Ints], Ints], ...]

    def ids(self, at: Ints) -> Ints:
        ids = self.order.ids(at)
        for id_map in self.id_maps:
            ids = id_map(ids)
        return ids

    def nodes(self, at: Ints) -> Ints:
        return self.order.nodes(at)


class VersionedOrder(Composed):
    """An epoch made of the orders of several versions, each up to the begin of the next one.

    It finds a sample by a search: an id of all data need not be one of a version.
    """

    def __init__(self, parts: Sequence[_Part], size: int) -> None:
        self.parts = tuple(parts)
        self.size = size
        self._begins = np.array([part.begin for part in parts])

    def locate(self, at: Ints) -> tuple[Ints, Ints]:
        index = segment_of(self._begins, at)
        return index, at - self._begins[index]

    def member(self, index: int) -> Order:
        return self.parts[index]

    def version_at(self, position: int) -> int:
        return [part.version for part in self.parts if part.begin <= position][-1]


def switch_difference(
    data: tuple[str, tuple[str, ...]], made: Sequence[Switch], here: tuple[int, int], run: RunOrder
) -> str:
    """Why a run cannot continue from a state; empty if it can.

    ``data`` has the digest of the data that the state's run began with, and the versions of its streams; ``made`` are
    its switches, and ``here`` is its epoch and position. These switches stay, and others may come behind it.
    """
    wanted = run.config.switches
    origin = run.origin
    past = [switch for switch in made if (switch.epoch, switch.position) <= (here[0], 0)]
    if not wanted and len(past) == len(made) and past[-1].digest == origin.digest:
        return ""  # this epoch and all later ones are those of the last version alone
    if data[0] != origin.digest or tuple(made) != wanted[: len(made)]:
        declared = [(0, data[1]), *((switch.step, switch.versions) for switch in made)]
        lists = [
            "[" + ", ".join(f"({step}, {versions[stream]!r})" for step, versions in declared) + "]"
            for stream in range(min(len(versions) for _, versions in declared))
        ]
        return (
            "A run must continue over the data it began with, and keep its switches of versions. Pass to Stream or "
            f"StreamingDataset: {' and '.join(f'version={text}' for text in lists)}, perhaps with switches at later "
            "steps."
        )
    if late := [switch.step for switch in wanted[len(made) :] if (switch.epoch, switch.position) < here]:
        return (
            f"A switch of versions must not lie before the state, which is at epoch {here[0]}, sample {here[1]:,}, but "
            f"that at step {late[0]:,} does. Declare it at a later step."
        )
    return ""
