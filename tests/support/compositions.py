"""Runs composed of several stages: packing, filters, mixtures, schedules, balance, forgotten samples."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_stream.order import Balance, OrderConfig, RunOrder, Schedule, Snapshot, StreamWeights
from lightning_stream.order.bitmap import Bitmap
from lightning_stream.order.forget import Forgotten
from lightning_stream.order.packing import RowPacking

BATCH = 24  # it divides over 1, 2, 3, 4, 6 and 8 ranks
SIZES = {"web": 1100, "code": 500, "math": 300}
LONG = 40


@dataclass(frozen=True)
class Composition:
    """A run over three streams, as `lightning_stream.order` sees it.

    Attributes:
        settings: Arguments of `OrderConfig.resolve`.
        weights: Of each stream.
        packed: Arguments of `RowPacking`; None if positions count samples.
        keep: From sample ids and their lengths to those that a filter keeps.
        changes: Weights that a run changes to while training, each at a random step.
        forget: How many samples are forgotten.
        balance: The cost of documents by their lengths.
    """

    settings: Mapping[str, Any] = field(default_factory=dict)
    weights: tuple[StreamWeights, ...] = (StreamWeights(),) * 3
    packed: Mapping[str, Any] | None = None
    keep: Callable[[NDArray[np.int64], NDArray[np.int64]], NDArray[np.bool_]] | None = None
    changes: tuple[Mapping[str, float], ...] = ()
    forget: int = 0
    balance: Callable[[NDArray[np.int64]], NDArray[Any]] | None = None
    most_length: int = 70
    replication: int = 1
    batch_sizes: tuple[int, ...] = (BATCH,)


@dataclass(frozen=True)
class Data:
    """The data of a composition, after its filter."""

    snapshot: Snapshot
    lengths: NDArray[np.uint32]

    @classmethod
    def of(cls, one: Composition, seed: int) -> Data:
        """Three streams of shards of different sizes; some documents are empty, some have many rows."""
        rng = np.random.default_rng(seed)
        sizes = [np.diff(np.linspace(0, size, 12).astype(int)) for size in SIZES.values()]
        snapshot = Snapshot.of(sizes, list(SIZES))
        lengths = rng.integers(0, one.most_length, snapshot.num_samples).astype(np.uint32)
        lengths[rng.integers(0, len(lengths), len(lengths) // 50)] = 0
        lengths[rng.integers(0, len(lengths), 5)] = 10 * LONG + 3
        if one.keep is None:
            return cls(snapshot, lengths)
        mask = one.keep(np.arange(len(lengths)), lengths.astype(np.int64))
        return cls(snapshot.subset(Bitmap.of_mask(mask)), lengths[mask])


def run_of(one: Composition, data: Data, resumed: OrderConfig | None = None, **settings: Any) -> RunOrder:
    """The order of the composition, as a new process makes it."""
    rows = None if one.packed is None else RowPacking(**one.packed)
    forgotten = forgotten_of(one, data)
    given = {"shuffle": True, "seed": 5, **one.settings, **settings}
    config = OrderConfig.resolve(
        batch_size=BATCH, device_batch_size=3, packing=rows, resumed=resumed,
        forgotten=None if forgotten is None else forgotten.digest, **given,
    )  # fmt: skip
    return RunOrder(data.snapshot, one.weights, config, None if rows is None else data.lengths, forgotten=forgotten)


def forgotten_of(one: Composition, data: Data) -> Forgotten | None:
    """The forgotten samples of a composition."""
    if not one.forget:
        return None
    return Forgotten.of(data.snapshot, random.Random(3).sample(range(data.snapshot.num_samples), one.forget))


def balance_of(one: Composition, data: Data, device_batch_size: int) -> Balance | None:
    """What the shares of a composition are balanced by."""
    return None if one.balance is None else Balance(one.balance, device_batch_size, lambda: data.lengths)


def square(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """What attention costs."""
    return lengths * lengths


def as_they_are(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """What a model costs without attention."""
    return lengths


def _even(ids: NDArray[np.int64], lengths: NDArray[np.int64]) -> NDArray[np.bool_]:
    return (lengths >= 3) & (ids % 7 != 2)


POINTS = [(0, {"web": 0.6, "code": 0.3, "math": 0.1}), (2000, {"web": 0.2, "code": 0.3, "math": 0.5})]
MEANS = {"web": 30.5, "code": 40, "math": 20}
TOKENS = [(at * 30, weights) for at, weights in POINTS]
STEPS = [(at // BATCH, weights) for at, weights in POINTS]
PACKED = {"row_length": LONG, "window": 100}
EPOCH = {"epoch_size": 1800}
TWO = (BATCH, 2 * BATCH)
EVENTS = ({"code": 3, "math": 1}, {"web": 1, "math": 1})


def scheduled(points: Any, **given: Any) -> dict[str, Any]:
    """The settings of an order with a schedule."""
    return {**EPOCH, "schedule": Schedule(points, streams=tuple(SIZES), **given)}


COMPOSITIONS: dict[str, Composition] = {
    "pack": Composition(packed=PACKED, batch_sizes=TWO),
    "pack in index order": Composition({"shuffle": False}, packed=PACKED),
    "filter, pack": Composition(packed=PACKED, keep=_even),
    "stratified, pack": Composition({"batching_method": "stratified"}, packed=PACKED, batch_sizes=TWO),
    "schedule in samples": Composition(scheduled(POINTS), batch_sizes=TWO),
    "linear schedule in tokens, pack": Composition(
        scheduled(TOKENS, unit="tokens", interpolation="linear", mean_lengths=MEANS), packed=PACKED
    ),
    "linear schedule in steps": Composition(scheduled(STEPS, unit="steps", interpolation="linear")),
    "schedule that stops, pack": Composition(scheduled(POINTS, exhausted="stop"), packed=PACKED, batch_sizes=TWO),
    "schedule of one stream a batch": Composition(
        {**scheduled(POINTS), "batching_method": "per_stream", "epoch_size": 1824}
    ),
    "schedule of device blocks": Composition(
        {**scheduled(POINTS), "batching_method": "device_per_stream", "epoch_size": 1824}
    ),
    "schedule, changes": Composition(scheduled(POINTS), changes=EVENTS, batch_sizes=TWO),
    "schedule, changes, pack": Composition(
        scheduled(POINTS, interpolation="linear"), packed=PACKED, changes=EVENTS, batch_sizes=TWO
    ),
    "balance by tokens": Composition(balance=as_they_are, batch_sizes=TWO),
    "pack, balance by a cost": Composition(packed=PACKED, balance=square, batch_sizes=TWO),
    "stratified, pack, balance": Composition({"batching_method": "stratified"}, packed=PACKED, balance=square),
    "forget, pack": Composition(packed=PACKED, forget=40),
    "forget, schedule": Composition(scheduled(POINTS), forget=40),
    "forget, schedule, pack": Composition(scheduled(POINTS), packed=PACKED, forget=40),
    "truncate, pack": Composition(packed={**PACKED, "long_documents": "truncate"}, batch_sizes=TWO),
    "drop, pack": Composition(packed={**PACKED, "long_documents": "drop"}),
    "documents longer than a window's rows": Composition(packed={"row_length": 7, "window": 5}, most_length=30),
    "rows of one token": Composition(packed={"row_length": 1, "window": 7}, most_length=4),
    "epoch size, pack": Composition({"epoch_size": 777}, packed=PACKED),
    "proportion, pack": Composition(
        {"epoch_size": 1500, "batching_method": "stratified"},
        tuple(StreamWeights(proportion=one) for one in (0.5, 0.3, 0.2)), packed=PACKED,
    ),
    "repeat, pack": Composition({}, tuple(StreamWeights(repeat=one) for one in (0.5, 1, 2.5)), packed=PACKED),
    "choose, pack": Composition(
        {"sampling_method": "fixed"}, tuple(StreamWeights(choose=one) for one in (600, 700, 100)), packed=PACKED
    ),
    "replication, pack, balance": Composition(packed=PACKED, balance=square, replication=2),
    "filter, schedule, changes, pack, balance": Composition(
        scheduled(POINTS), packed=PACKED, keep=_even, changes=EVENTS, balance=square, batch_sizes=TWO
    ),
}  # fmt: skip
