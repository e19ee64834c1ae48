"""The settings of a training run's order: chosen at its first start and kept in its state."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from lightning_stream.errors import StateError, VersionMismatch
from lightning_stream.order.buckets import LengthBuckets
from lightning_stream.order.methods import METHODS, MOSAIC, SCHEDULED, BatchingMethod
from lightning_stream.order.mosaic.partitions import PARTITIONS
from lightning_stream.order.mosaic.shuffles import SHUFFLES
from lightning_stream.order.packing import RowPacking
from lightning_stream.order.rules import Rule, broken, count, is_count, one_of
from lightning_stream.order.schedule import Schedule
from lightning_stream.order.world import World

ORDER_VERSION = 1
"""It grows whenever the native order gives other ids for the same settings."""

MOSAIC_ALGORITHMS = SHUFFLES

_ACTIVE_PARTS = 128
_KEYS = {"device_block": "block"}  # a setting's name in a state, where it has another
MOST_NODES = 2**16
_MOST_SAMPLES = 2**24  # of a batch; like MOST_NODES far above any run's: a damaged state must not fill the memory


@dataclass(frozen=True)
class MosaicConfig:
    """Settings of the orders of mosaicml-streaming alone.

    Example: ``OrderConfig.resolve(batch_size=256, shuffle=True, mosaic=MosaicConfig("orig"))``.
    """

    partition: str = "relaxed"  # or "orig"
    shuffle_block_size: int | None = None  # samples; None means that library's default
    initial_physical_nodes: int | None = None  # at the run's first start
    ranks_per_node: int | None = None  # data ranks, at the run's first start
    batch_size: int | None = None  # samples of all ranks in one of that library's batches, accumulation excluded


@dataclass(frozen=True)
class Switch:
    """A training run continues with another version of its data; see `lightning_stream.order.switches`.

    Attributes:
        step: The optimizer step at which it was declared.
        epoch, position: Where that is, from the batch size that the run had then.
        digest, versions: The digest of the data from there on, and 16 digits of each stream's version.
    """

    step: int
    epoch: int
    position: int
    digest: str
    versions: tuple[str, ...] = ()


@dataclass(frozen=True)
class OrderConfig:
    """The order settings of a run. Make them with :meth:`resolve`, which chooses what the user left open.

    Example::

        config = OrderConfig.resolve(batch_size=256, shuffle=True)
        config.canonical_nodes, config.window  # (16, 8)
    """

    shuffle: bool  # whether samples are shuffled at all; else they come in index order
    seed: int  # key of every permutation, in [0, 2**63)
    algorithm: str  # "window", or one of mosaicml-streaming's
    canonical_nodes: int  # C: samples are split evenly into this many canonical nodes
    window: int  # w, parts of shards active at once in a canonical node
    batching_method: str = "random"  # or "stratified", "per_stream", "device_per_stream"
    device_block: int | None = None  # m of "device_per_stream": samples of one stream, the first run's batch per device
    batch_size: int | None = None  # B where the order depends on it ("per_stream")
    sampling_method: str = "balanced"  # which draws other samples each epoch; "fixed" always draws the same
    sampling_granularity: int = 1  # samples taken from a shard at a time where a stream is only partly drawn
    epoch_size: int | None = None  # samples of an epoch over all streams; None for the sum that the weights give
    mosaic: MosaicConfig | None = None  # settings of the orders of mosaicml-streaming; None for the native order
    packing: RowPacking | None = None  # how samples are packed into rows; None: positions count samples
    forgotten: str | None = None  # the digest of the samples in whose places others are delivered, see `Forgotten`
    schedule: Schedule | None = None  # the streams' weights over the run; None for those of each stream
    buckets: LengthBuckets | None = None  # how samples of similar lengths come together; None: they do not
    switches: tuple[Switch, ...] = ()  # to other versions of the data
    quick_start: bool = False  # whether an epoch begins with the beginnings of its first shards

    def __post_init__(self) -> None:
        problems = broken(vars(self), _RULES)
        method = METHODS.get(self.batching_method) if isinstance(self.batching_method, str) else None
        if method is not None and method.fixed is not None and getattr(self, method.fixed) is None:
            problems.append(method.lacks)
        problems += [] if self.mosaic is None else broken(vars(self.mosaic), _MOSAIC_RULES)
        kind = method if self.mosaic is None else MOSAIC
        if (self.packing or self.buckets) and kind is not None and not kind.can_be_packed:
            able = [name for name, one in METHODS.items() if one.can_be_packed]
            what = "Rows are packed from" if self.packing else "Samples are sorted by length in"
            problems.append(f"{what} the native order with batching_method {' or '.join(able)}.")
        if self.packing is not None and self.buckets is not None:
            problems.append("Packed rows have one length: omit bucket_by and batch_tokens, and set the batch size.")
        if self.mosaic is not None and self.forgotten is not None:
            problems.append(
                f"Samples are forgotten in the native order only, but shuffle_algo is {self.algorithm!r}: omit forget."
            )
        if self.schedule is not None and not problems:
            problems = self._schedule_problems(self.schedule)
        places = [(one.epoch, one.position) for one in self.switches]
        if places != sorted(places) or not all(is_count(number, 0) for place in places for number in place):
            problems.append(f"Switches of versions must follow each other, but they are at {places}.")
        if problems:
            raise ValueError("The order settings must be valid. " + " ".join(problems))

    def _schedule_problems(self, schedule: Schedule) -> list[str]:
        problems, length = [], self.batching.block_of(self)
        if self.mosaic is not None:
            problems.append(f"A schedule needs the native order, but algorithm is {self.algorithm!r}: omit it.")
        if schedule.unit == "steps" and self.batch_size is None:
            problems.append("A schedule in steps needs a batch size from the start.")
        if schedule.unit == "steps" and self.buckets is not None and self.buckets.batch_tokens is not None:
            problems.append(
                "A schedule in steps needs batches of one size: with batch_tokens, count samples or tokens."
            )
        if length > 1 and (self.epoch_size is None or self.epoch_size % length):
            problems.append(
                f"{self.batching_method} takes {length} samples of a stream at a time, so with a schedule epoch_size "
                f"must be a multiple of that, not {self.epoch_size}."
            )
        if length > 1 and any(schedule.stops):
            problems.append(
                f"exhausted='stop' would end a stream within the {length} samples that {self.batching_method} takes at "
                "a time: use 'repeat', or another batching_method."
            )
        return problems

    @classmethod
    def resolve(
        cls,
        *,
        batch_size: int | None,
        shuffle: bool = False,
        seed: int = 9176,
        algorithm: str | None = None,
        canonical_nodes: int | None = None,
        window: int | None = None,
        batching_method: str = "random",
        device_batch_size: int | None = None,
        sampling_method: str = "balanced",
        sampling_granularity: int = 1,
        epoch_size: int | None = None,
        mosaic: MosaicConfig | None = None,
        packing: RowPacking | None = None,
        forgotten: str | None = None,
        schedule: Schedule | None = None,
        buckets: LengthBuckets | None = None,
        switches: tuple[Switch, ...] = (),
        quick_start: bool | None = None,
        resumed: OrderConfig | None = None,
        world: World | None = None,
    ) -> OrderConfig:
        """Choose what was left open, from the first run's B (``batch_size``).

        Only ``device_per_stream`` (by ``device_batch_size``) and the orders of mosaicml-streaming depend on hardware.

        Args:
            batch_size: B, the samples of one optimizer step over all replicas; None where it is unknown.
            algorithm: None means ``"window"``.
            canonical_nodes: None means the largest divisor of B that is at most 16.
            window: None means ``ceil(128 / canonical_nodes)``.
            device_batch_size: The first run's samples per device and micro-batch: m of ``device_per_stream``.
            quick_start: None means True for a new run that shuffles in the native order.
            resumed: The settings of the state to resume from, for what is None (nodes, window, m, quick_start).
            world: The first run's processes; only the orders of mosaicml-streaming depend on them.

        Raises:
            ValueError: Settings that are wrong or missing; every problem is named.
        """
        if mosaic is not None or algorithm in MOSAIC_ALGORITHMS:
            mosaic = _resolve_mosaic(mosaic, resumed, world or World(), device_batch_size)
            algorithm = MOSAIC_ALGORITHMS[0] if algorithm is None else algorithm
        if resumed is not None:
            device_batch_size = resumed.device_block or device_batch_size
            canonical_nodes = resumed.canonical_nodes if canonical_nodes is None else canonical_nodes
            window = resumed.window if window is None else window
            schedule = schedule and schedule.resumed(resumed.schedule)
            quick_start = resumed.quick_start if quick_start is None else quick_start
        nodes = _default_nodes(batch_size, algorithm, mosaic) if canonical_nodes is None else canonical_nodes
        window = -(-_ACTIVE_PARTS // max(nodes, 1)) if window is None else window
        method = METHODS.get(batching_method)
        sizes = {"batch_size": batch_size, "device_block": device_batch_size}
        fixed = {} if method is None or method.fixed is None else {method.fixed: sizes[method.fixed]}
        if schedule is not None and schedule.unit == "steps":
            fixed["batch_size"] = (resumed and resumed.batch_size) or batch_size
        return cls(
            shuffle=shuffle,
            seed=seed,
            algorithm=algorithm or "window",
            canonical_nodes=nodes,
            window=window,
            batching_method=batching_method,
            **fixed,
            sampling_method=sampling_method,
            sampling_granularity=sampling_granularity,
            epoch_size=epoch_size,
            mosaic=mosaic,
            packing=packing,
            forgotten=forgotten,
            schedule=schedule,
            buckets=buckets,
            switches=switches,
            quick_start=shuffle and mosaic is None and quick_start is not False,
        )

    @property
    def needs_lengths(self) -> bool:
        """Whether the order depends on the samples' lengths."""
        return self.packing is not None or self.buckets is not None

    @property
    def batching(self) -> BatchingMethod:
        """What this order does with the streams. Nothing else compares the names of the methods."""
        if self.mosaic is not None:
            return MOSAIC
        return (METHODS if self.schedule is None else SCHEDULED)[self.batching_method]

    def to_state(self) -> dict[str, Any]:
        """The settings as a dict of plain values."""
        state = {_KEYS.get(name, name): value for name, value in asdict(replace(self, schedule=None)).items()}
        state["schedule"] = self.schedule and self.schedule.to_state()
        state["switches"] = [{**asdict(one), "versions": list(one.versions)} for one in self.switches]
        late = (
            "packing",
            "forgotten",
            "schedule",
            "buckets",
            "switches",
            "quick_start",
        )  # states without them stay as they were
        return {name: value for name, value in state.items() if value or name not in late}

    @property
    def digest(self) -> str:
        """16 hexadecimal digits that differ for any other settings."""
        return hashlib.sha256(json.dumps(self.to_state(), sort_keys=True).encode()).hexdigest()[:16]

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> OrderConfig:
        """Read the result of :meth:`to_state`; raise VersionMismatch for a newer one, StateError for anything else."""
        try:
            values = _known(OrderConfig, state)
            if values.get("mosaic") is not None:
                values["mosaic"] = MosaicConfig(**_known(MosaicConfig, values["mosaic"]))
            for name, kind in (("packing", RowPacking), ("buckets", LengthBuckets)):
                if values.get(name) is not None:
                    values[name] = kind(**_known(kind, values[name]))
            if values.get("schedule") is not None:
                values["schedule"] = Schedule.from_state(_known(Schedule, values["schedule"]))
            switches = (_known(Switch, one) for one in values.get("switches", ()))
            values["switches"] = tuple(Switch(**{**one, "versions": tuple(one["versions"])}) for one in switches)
            return cls(**values)
        except (TypeError, ValueError, AttributeError) as error:
            raise StateError(
                f"The order settings of a state must be those that this package wrote, but: {error} "
                "The state is damaged, or of a newer version or another library; load another checkpoint, or upgrade."
            ) from error


def _default_nodes(batch_size: int | None, algorithm: str | None, mosaic: MosaicConfig | None) -> int:
    """C where neither the user nor the state has it: that library's rule, or the largest divisor of B up to 16."""
    if mosaic is not None:
        return (mosaic.initial_physical_nodes or 1) * (64 if algorithm in ("py1s", "py2s") else 1)
    return max(nodes for nodes in range(1, 17) if (batch_size or 16) % nodes == 0)


def _resolve_mosaic(
    given: MosaicConfig | None, resumed: OrderConfig | None, world: World, device_batch_size: int | None
) -> MosaicConfig:
    """Fill in what was left open: from the state, else from the first run's world."""
    given = given or MosaicConfig()
    first = (resumed and resumed.mosaic) or MosaicConfig()
    here = None if device_batch_size is None else device_batch_size * world.num_replicas
    return replace(
        given,
        initial_physical_nodes=given.initial_physical_nodes or first.initial_physical_nodes or world.num_nodes,
        ranks_per_node=given.ranks_per_node or first.ranks_per_node or world.num_replicas // world.num_nodes,
        batch_size=given.batch_size or first.batch_size or here,
    )


def _known(
    kind: type[OrderConfig | MosaicConfig | RowPacking | LengthBuckets | Schedule | Switch], values: object
) -> dict[str, Any]:
    if not isinstance(values, Mapping):
        raise TypeError(f"expected a mapping of settings, found {type(values).__name__}.")
    names = {_KEYS.get(field.name, field.name): field.name for field in fields(kind)}
    if unknown := sorted(str(name) for name in values if name not in names):
        raise VersionMismatch(
            f"The order settings of a state must be those that this version has, but it has none named {unknown}: the "
            "state was written by a newer lightning-stream. Install that one to continue the run."
        )
    return {names[key]: value for key, value in values.items()}


_RULES = {
    "algorithm": one_of("window", *MOSAIC_ALGORITHMS),
    "batching_method": one_of(*METHODS),
    "sampling_method": one_of("balanced", "fixed"),
    "shuffle": one_of(True, False),
    "quick_start": one_of(True, False),
    "canonical_nodes": count(1, MOST_NODES),
    "window": count(1, MOST_NODES),
    "sampling_granularity": count(1),
    "device_block": count(1, _MOST_SAMPLES, optional=True),
    "batch_size": count(1, _MOST_SAMPLES, optional=True),
    "epoch_size": count(1, optional=True),
    "forgotten": Rule("None or a string", lambda value: value is None or isinstance(value, str)),
    "seed": count(),
}
_MOSAIC_RULES = {
    "partition": one_of(*PARTITIONS),
    "shuffle_block_size": count(1, optional=True),
    "initial_physical_nodes": count(1, MOST_NODES, optional=True),
    "ranks_per_node": count(1, MOST_NODES, optional=True),
    "batch_size": count(1, _MOST_SAMPLES, optional=True),
}
