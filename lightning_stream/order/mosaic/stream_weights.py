"""How many samples mosaicml-streaming 0.13 draws from each stream in an epoch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.random import default_rng
from numpy.typing import NDArray

Ids = NDArray[np.int64]

_SUFFIXES = {"k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}
_KINDS = ("proportion", "repeat", "choose")


class Weighted(Protocol):
    """A stream's wish; at most one of the three is not None, and one kind (relative or absolute) over all streams."""

    @property
    def proportion(self) -> float | None:
        """Share of the epoch, relative to the proportions of the other streams."""

    @property
    def repeat(self) -> float | None:
        """How often each sample comes, on average."""

    @property
    def choose(self) -> int | None:
        """How many samples come."""


Weight = Weighted | Mapping[str, float | int | None] | None


@dataclass(frozen=True)
class StreamDraws:
    """What all streams give to each epoch, said in all three ways; `epoch_size` samples in all."""

    proportion: tuple[float, ...]
    repeat: tuple[float, ...]
    choose: tuple[int, ...]
    epoch_size: int


def stream_draws(
    shard_sizes: Sequence[Sequence[int] | Ids],
    weights: Sequence[Weight] | None = None,
    epoch_size: int | str | None = None,
    seed: int = 9176,
) -> StreamDraws:
    """Resolve the weights of streams.

    Args:
        shard_sizes: Samples of each shard, per stream.
        weights: One per stream: an object or a mapping with `proportion`, `repeat` or `choose`; None where it has none.
        epoch_size: Samples of an epoch, where weights are relative or absent; may be written "10k" (or m, b, t).
        seed: The run's seed; deals what is lost by rounding.

    Raises:
        ValueError: Weights that contradict each other, or a number out of range.
    """
    sizes = np.array([int(np.sum(stream, dtype=np.int64)) for stream in shard_sizes], dtype=np.int64)
    wishes = [_wish(stream, weight) for stream, weight in enumerate(weights or [None] * len(sizes))]
    if len(wishes) != len(sizes) or not len(sizes):
        raise ValueError(f"give one weight for each stream; found {len(wishes)} weights and {len(sizes)} streams")
    per_epoch = _samples(epoch_size)
    relative = {kind == "proportion" for kind, _ in wishes}
    if len(relative) > 1:
        raise ValueError("a mix is weighted by proportions alone, or has none of them; give every stream a proportion")
    if per_epoch and any(kind in ("repeat", "choose") for kind, _ in wishes):
        raise ValueError("epoch_size belongs to proportions; with repeat or choose leave it out, their sum is the size")
    if relative == {True} or per_epoch:
        parts = np.array([value for _, value in wishes]) if relative == {True} else sizes.astype(np.float64)
        return _relative(sizes, parts, per_epoch or int(sizes.sum()), seed)
    return _absolute(sizes, wishes)


def _wish(stream: int, weight: Weight) -> tuple[str, float]:
    given = {}
    for kind in _KINDS:
        value = weight.get(kind) if isinstance(weight, Mapping) else getattr(weight, kind, None)
        if value is not None:
            given[kind] = value
    if len(given) > 1:
        raise ValueError(f"a stream has at most one of {', '.join(_KINDS)}; stream {stream} has {', '.join(given)}")
    for kind, value in given.items():
        if not 0 <= value < float("inf"):
            raise ValueError(f"{kind} must be at least 0 and finite; stream {stream} has {value}")
        return kind, value
    return "none", 1


def _samples(epoch_size: int | str | None) -> int:
    """Read an epoch size; 0 for none."""
    if isinstance(epoch_size, str):
        digits = epoch_size.strip().lower()
        scale = _SUFFIXES.get(digits[-1:], 1)
        try:
            epoch_size = int(float(digits.rstrip("kmbt") if scale > 1 else digits) * scale)
        except ValueError as error:
            raise ValueError(
                f"epoch_size is a number, or one with k, m, b or t after it; found {epoch_size!r}"
            ) from error
    if epoch_size is not None and epoch_size < 0:
        raise ValueError(f"epoch_size must be at least 0; found {epoch_size}")
    return int(epoch_size or 0)


def _relative(sizes: Ids, parts: NDArray[np.float64], per_epoch: int, seed: int) -> StreamDraws:
    if not parts.sum() > 0:
        raise ValueError("at least one stream must have samples and a proportion above 0; found none")
    proportion = parts / parts.sum()
    choose = (per_epoch * proportion).astype(np.int64)
    short = per_epoch - int(choose.sum())
    choose[default_rng(seed).choice(len(sizes), short, replace=False)] += 1
    return StreamDraws(tuple(proportion.tolist()), tuple(_ratio(choose, sizes)), tuple(choose.tolist()), per_epoch)


def _absolute(sizes: Ids, wishes: Sequence[tuple[str, float]]) -> StreamDraws:
    choose = np.array(
        [
            int(value) if kind == "choose" else int(value * size)
            for (kind, value), size in zip(wishes, sizes.tolist(), strict=True)
        ],
        dtype=np.int64,
    )
    repeat = _ratio(choose, sizes)
    total = int(choose.sum())
    if not total:
        raise ValueError("an epoch needs at least one sample; the weights of all streams come to none")
    return StreamDraws(tuple((choose / total).tolist()), tuple(repeat), tuple(choose.tolist()), total)


def _ratio(choose: Ids, sizes: Ids) -> list[float]:
    for stream in np.flatnonzero((sizes == 0) & (choose > 0)).tolist():
        raise ValueError(f"stream {stream} is asked for {choose[stream]} samples and has none; weigh it 0 or drop it")
    ratio: list[float] = (choose / np.maximum(sizes, 1)).tolist()
    return ratio
