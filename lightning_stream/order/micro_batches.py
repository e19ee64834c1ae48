"""The micro-batches that one worker of one rank must deliver: a pure walk over a `BatchPlan`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from lightning_stream.order import BatchPlan, Share
from lightning_stream.order.ledger import Substitution

_PLANNED_SAMPLES = 1 << 14  # about so many at a time: fewer cost more each, more would keep the first batch waiting


@dataclass(frozen=True)
class BatchInfo:
    """What a micro-batch is made of, and where it stands in the epoch.

    Attributes:
        epoch: The epoch it belongs to.
        begin: First position of its global batch, i.e. of its optimizer step.
        end: One past the last position of its global batch.
        completes_step: Whether it is the last micro-batch of its global batch on this rank.
        ends_epoch: Whether it is the last micro-batch of the epoch on this rank.
        ids: Sample ids, int64[n].
        positions: Their positions in the epoch, int64[n].
        filler: bool[n]; True where a sample only fills the batch up and must not count.
        substitutions: Where another sample was delivered than `ids` says, which could not be read.
    """

    epoch: int
    begin: int
    end: int
    completes_step: bool
    ends_epoch: bool
    ids: NDArray[np.int64]
    positions: NDArray[np.int64]
    filler: NDArray[np.bool_]
    substitutions: tuple[Substitution, ...] = ()

    @property
    def delivered(self) -> NDArray[np.int64]:
        """int64[n]: the sample ids that are delivered, substitutions made."""
        if not self.substitutions:
            return self.ids
        instead = {(one.position, one.drawn): one.delivered for one in self.substitutions}
        pairs = zip(self.positions.tolist(), self.ids.tolist(), strict=True)
        return np.array([instead.get(pair, pair[1]) for pair in pairs], np.int64)

    @property
    def num_samples(self) -> int:
        """Samples that count: filler excluded."""
        return int(self.filler.size - np.count_nonzero(self.filler))

    @property
    def num_substituted(self) -> int:
        """Samples that another one was delivered for: filler excluded."""
        return int(np.count_nonzero((self.delivered != self.ids) & ~self.filler)) if self.substitutions else 0


def micro_batches(
    plan: BatchPlan, device_batch_size: int, worker: int = 0, num_workers: int = 1
) -> Iterator[BatchInfo]:
    """Yield the micro-batches of one worker: the rank's j-th goes to worker j mod num_workers, as torch asks."""
    together = max(1, _PLANNED_SAMPLES // (plan.batch_size * num_workers))
    own = _own_batches(plan, device_batch_size, worker, num_workers)
    while some := list(islice(own, together)):
        shares = plan.shares([k for k, _, _ in some])
        pieces = [
            _info(plan, k, part, is_last_piece=first + j * num_workers == count - 1)
            for (k, first, count), share in zip(some, shares, strict=True)
            for j, part in enumerate(share.micro_batches(count)[first::num_workers])
        ]
        yield from pieces


def _info(plan: BatchPlan, k: int, share: Share, is_last_piece: bool) -> BatchInfo:
    begin, end = plan.bounds(k)
    return BatchInfo(
        epoch=plan.order.epoch,
        begin=begin,
        end=end,
        completes_step=is_last_piece,
        ends_epoch=is_last_piece and k == plan.num_batches - 1,
        ids=share.ids,
        positions=share.positions,
        filler=share.filler,
    )


def _own_batches(
    plan: BatchPlan, device_batch_size: int, worker: int, num_workers: int
) -> Iterator[tuple[int, int, int]]:
    """The global batches that a worker has a part in: which, its first micro-batch in it, and how many it is cut to."""
    upcoming = 0
    num_whole = plan.num_whole_batches
    whole = pieces_of(plan, 0, device_batch_size) if num_whole else 0
    for k in range(plan.num_batches):
        count = whole if k < num_whole else pieces_of(plan, k, device_batch_size)
        first = (worker - upcoming) % num_workers
        upcoming += count
        if first < count:
            yield k, first, count


def pieces_of(plan: BatchPlan, k: int, device_batch_size: int) -> int:
    """Into how many micro-batches each rank's share of global batch k is cut."""
    return plan.num_micro_batches(k, device_batch_size)


def count_micro_batches(plan: BatchPlan, device_batch_size: int) -> int:
    """Micro-batches of each rank over the whole plan."""
    whole = plan.num_whole_batches
    full = pieces_of(plan, 0, device_batch_size) if whole else 0
    return whole * full + sum(pieces_of(plan, k, device_batch_size) for k in range(whole, plan.num_batches))
