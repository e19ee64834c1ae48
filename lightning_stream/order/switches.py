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
from numpy.typing import NDArray

from lightning_stream.order.batching.base import EpochOrder
from lightning_stream.order.bitmap import Bitmap
from lightning_stream.order.config import OrderConfig, Switch
from lightning_stream.order.draw import StreamWeights
from lightning_stream.order.permutation import RngStream, random_u64
from lightning_stream.order.plan import RunOrder
from lightning_stream.order.rank_split import Tail, ceil_div
from lightning_stream.order.snapshot import Snapshot

_CHUNK = 1 << 20


@dataclass(frozen=True, eq=False)
class DataVersion:
    """The data between two switches: as a run without switches has it, and which sample ids of all data it has."""

    snapshot: Snapshot
    members: Bitmap

    def ids(self, own: NDArray[np.int64]) -> NDArray[np.int64]:
        """The ids among all data of the samples with these ids in this version."""
        count = self.snapshot.num_samples
        is_prefix = not count or self.members[count - 1] == count - 1  # as after appends
        return own if is_prefix else self.members.select(own)


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
        self._runs = [RunOrder(one.snapshot, weights, self._plain) for one in self._versions]

    def __reduce__(self) -> tuple[type[SwitchedRun], tuple[object, ...]]:  # type: ignore[override]
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
        edges = sorted({edge for one in self.config.switches for edge in (one.epoch, one.epoch + 1)})
        epoch = 0
        for edge in (*edges, None):  # the epochs up to an edge have one length
            if edge == epoch:
                continue
            size = self.epoch(epoch).num_samples
            steps = size // batch_size if tail == "drop" else ceil_div(size, batch_size)
            if not steps:
                raise ValueError(f"An epoch must have a batch, but epoch {epoch} has {size} samples: see drop_last.")
            count = step // steps if edge is None else min(step // steps, edge - epoch)
            epoch, step = epoch + count, step - count * steps
            if edge is None or epoch < edge:
                break
        return epoch, step * batch_size

    def _epoch(self, epoch: int) -> EpochOrder:
        switches = self.config.switches
        number = sum((one.epoch, one.position) <= (epoch, 0) for one in switches)
        order = PiecedOrder(epoch, [Piece(0, number, self._runs[number].epoch(epoch), (self._versions[number].ids,))])
        for number, switch in enumerate(switches, 1):
            if switch.epoch == epoch and switch.position:
                order = self._switched(order, switch.position, number)
        return order

    def _switched(self, order: PiecedOrder, position: int, number: int) -> PiecedOrder:
        """An epoch's order up to a position, and behind it the samples of a version that have not come yet."""
        if position > order.num_samples:
            raise ValueError(f"A switch must be in its epoch, which has {order.num_samples} samples; found {position}.")
        version = self._versions[number]
        is_left = version.members.mask.copy()
        for begin in range(0, position, _CHUNK):
            is_left[order.ids(begin, min(begin + _CHUNK, position))] = False
        left = Bitmap.of_mask(is_left[version.members.mask])
        pieces = [piece for piece in order.pieces if piece.begin < position]
        if len(left):
            (seed,) = random_u64(RngStream.VERSIONS, self.config.seed, order.epoch, number, size=1).tolist()
            config = structs.replace(self._plain, seed=seed >> 1)
            rest = RunOrder(version.snapshot.subset(left), self.weights, config).epoch(order.epoch)
            pieces.append(Piece(position, number, rest, (left.select, version.ids)))
        return PiecedOrder(order.epoch, pieces, position + len(left))


@dataclass(frozen=True, eq=False)
class Piece:
    """The positions of an epoch from ``begin`` on, which are those of an order from 0 on, in a version of the data.

    The ids of that order pass through functions.
    """

    begin: int
    version: int
    order: EpochOrder
    ids: tuple[Callable[[NDArray[np.int64]], NDArray[np.int64]], ...]


class PiecedOrder(EpochOrder):
    """An epoch made of pieces of other orders, each up to the begin of the next one."""

    def __init__(self, epoch: int, pieces: Sequence[Piece], num_samples: int | None = None) -> None:
        self.epoch, self.pieces = epoch, tuple(pieces)
        self.num_samples = self.full_end = pieces[0].order.num_samples if num_samples is None else num_samples

    def ids(self, begin: int, end: int) -> NDArray[np.int64]:
        parts = []
        for piece, first, last in self._within(begin, end):
            found = piece.order.ids(first, last)
            for passed in piece.ids:
                found = passed(found)
            parts.append(found)
        return np.concatenate([np.zeros(0, np.int64), *parts])

    def version_at(self, position: int) -> int:
        return [piece.version for piece in self.pieces if piece.begin <= position][-1]

    def canonical(self, begin: int, end: int) -> NDArray[np.int64]:
        parts = [piece.order.canonical(first, last) for piece, first, last in self._within(begin, end)]
        return np.concatenate([np.zeros(0, np.int64), *parts])

    def _within(self, begin: int, end: int) -> list[tuple[Piece, int, int]]:
        """The pieces in a range of positions, with the first and the last position that each gives of its own."""
        self.check_range(begin, end)
        ends = [*(piece.begin for piece in self.pieces[1:]), self.num_samples]
        pairs = [(one, max(begin, one.begin), min(end, stop)) for one, stop in zip(self.pieces, ends, strict=True)]
        return [(one, first - one.begin, last - one.begin) for one, first, last in pairs if first < last]


def switch_difference(
    data: tuple[str, tuple[str, ...]], made: Sequence[Switch], here: tuple[int, int], run: RunOrder
) -> str:
    """Why a run cannot continue from a state; empty if it can.

    ``data`` has the digest of the data that the state's run began with, and the versions of its streams; ``made`` are
    its switches, and ``here`` is its epoch and position. These switches stay, and others may come behind it.
    """
    wanted, origin = run.config.switches, run.origin
    past = [one for one in made if (one.epoch, one.position) <= (here[0], 0)]
    if not wanted and len(past) == len(made) and past[-1].digest == origin.digest:
        return ""  # this epoch and all later ones are those of the last version alone
    if data[0] != origin.digest or tuple(made) != wanted[: len(made)]:
        declared = [(0, data[1]), *((one.step, one.versions) for one in made)]
        lists = [
            "[" + ", ".join(f"({step}, {versions[stream]!r})" for step, versions in declared) + "]"
            for stream in range(min(len(versions) for _, versions in declared))
        ]
        return (
            "A run must continue over the data it began with, and keep its switches of versions. Pass to Stream or "
            f"StreamingDataset: {' and '.join(f'version={one}' for one in lists)}, perhaps with switches at later "
            "steps; or accept another order from here on with on_mismatch='warn'."
        )
    if late := [one.step for one in wanted[len(made) :] if (one.epoch, one.position) < here]:
        return (
            f"A switch of versions must not lie before the state, which is at epoch {here[0]}, sample {here[1]:,}, but "
            f"that at step {late[0]:,} does. Declare it at a later step."
        )
    return ""
