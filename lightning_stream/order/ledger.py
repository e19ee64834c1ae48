"""Proof of what a training run saw: a sum over (epoch, position, sample id) of all samples trained on, without padding.

Sums are modulo 2**64, so ranks and steps may be added in any order: the shares of all replicas add up to the global
batch, and the batches to the epoch. One sample swapped, lost or repeated changes the sum of its step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from .arrays import Ints, Words
from .batches import BatchPlan, EpochOrder
from .orders import chunks_of, positions_of
from .permutation import MIX_STEP, RngStream, mix64, random_u64
from .snapshot import Snapshot

MODULUS = 2**64
_ATTEMPTS = 16


def total(epoch: int, positions: Ints, ids: Ints) -> int:
    """The sum, modulo 2**64, of one well-mixed number per (epoch, position, sample id)."""
    start = mix64(np.full(1, epoch, np.uint64) + MIX_STEP)
    hashes = mix64(mix64(start + positions.astype(np.uint64) * MIX_STEP) + ids.astype(np.uint64) * MIX_STEP)
    return int(hashes.sum(dtype=np.uint64))


def expected(order: EpochOrder, begin: int, end: int) -> int:
    """The sum of positions [begin, end) of an epoch. O(end - begin), in chunks."""
    chunks = chunks_of(begin, end)
    return sum(total(order.epoch, at, order.ids(int(at[0]), int(at[-1]) + 1)) for at in chunks) % MODULUS


def of_steps(plan: BatchPlan, k_begin: int, k_end: int) -> Words:
    """uint64[steps]: the sum of all replicas in each of the global batches [k_begin, k_end)."""
    steps = range(k_begin, k_end)
    epoch = plan.order.epoch
    sums = [total(epoch, positions_of(*plan.bounds(k)), plan.ids(k)) for k in steps]
    return np.array(sums, np.uint64)


@dataclass(frozen=True)
class Substitution:
    """A planned exception: the sample drawn at this position could not be read, and another one was delivered."""

    position: int
    drawn: int
    delivered: int


def substituted(expected: int, epoch: int, substitutions: Sequence[Substitution]) -> int:
    """An expected sum, corrected for the substitutions among its positions."""
    rows = [(entry.position, entry.drawn, entry.delivered) for entry in substitutions]
    position, drawn, delivered = np.array(rows, np.int64).reshape(-1, 3).T
    return (expected - total(epoch, position, drawn) + total(epoch, position, delivered)) % MODULUS


def replacements(snapshot: Snapshot, seed: int, epoch: int, position: int, drawn: int) -> Iterator[int]:
    """16 sample ids of the same stream to try, in this order, where the drawn one cannot be read.

    They are the same in every world, never the drawn id, and may repeat.
    """
    stream = int(snapshot.streams_of(np.array([drawn]))[0])
    first = int(snapshot.shard_offsets[snapshot.stream_offsets[stream]])
    count = int(snapshot.stream_samples[stream])
    if count < 2:
        return
    for random_number in random_u64(RngStream.SUBSTITUTE, seed, epoch, position, size=_ATTEMPTS).tolist():
        yield first + (drawn - first + 1 + random_number % (count - 1)) % count


def to_bytes(sums: Words) -> bytes:
    """A rank's sums, one per step, for its file: 8 bytes each, little-endian."""
    return sums.astype("<u8").tobytes()


def from_bytes(data: bytes) -> Words:
    """Read :func:`to_bytes`, without a last sum that was written only in part."""
    return np.frombuffer(data[: len(data) // 8 * 8], dtype="<u8").astype(np.uint64)


@dataclass(frozen=True)
class Comparison:
    """The result for ``num_steps`` steps, and the first step (counted from the first compared) that differs, if any."""

    num_steps: int
    first_difference: int | None
    message: str


def verify(wanted: Words, ranks: Sequence[Words], *, replication: int = 1) -> Comparison:
    """Add up the sums of all ranks and compare each step that all have written with the plan (:func:`of_steps`).

    Ranks of one replica must agree among themselves.
    """
    if not ranks or len(ranks) % replication:
        raise ValueError(f"The ledgers of all ranks are needed, a multiple of {replication}; found {len(ranks)}.")
    steps = min(len(wanted), *map(len, ranks))
    table = np.stack([sums[:steps] for sums in ranks]).reshape(-1, replication, steps)
    unlike = (table != table[:, :1]).any(axis=(0, 1))
    wrong = unlike | (table[:, 0].sum(axis=0, dtype=np.uint64) != wanted[:steps])
    if not wrong.any():
        return Comparison(steps, None, f"All {steps} steps saw exactly the planned samples.")
    step = int(wrong.argmax())
    reason = "ranks of one replica saw different samples" if unlike[step] else "other samples than planned were seen"
    return Comparison(steps, step, f"{steps} steps were compared; step {step} is the first that differs: {reason}.")
