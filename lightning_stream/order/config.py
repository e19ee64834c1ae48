"""The settings of a training run's order: chosen at its first start and kept in its state."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
from msgspec import Struct, structs

from lightning_stream.errors import StateError, VersionMismatch

from .buckets import LengthBuckets
from .methods import METHODS, MOSAIC, SCHEDULED, BatchingMethod
from .mosaic.partitions import PARTITIONS
from .mosaic.shuffles import SHUFFLES
from .packing import RowPacking
from .rules import MAYBE_TEXT, Rule, count, is_count, one_of, plain, violations
from .schedule import Schedule
from .world import World

ORDER_VERSION = 1
"""It grows whenever the native order gives other ids for the same settings."""

MOSAIC_ALGORITHMS = SHUFFLES
UNIFORM = "uniform"
SAMPLER = "sampler"

PUBLIC_NAMES = {
    "seed": "shuffle_seed",
    "algorithm": "shuffle_algo",
    "canonical_nodes": "num_canonical_nodes",
    "partition": "partition_algo",
}
"""The names that a user gives settings by, where they differ."""

NATIVE_NAMES = ("quick_start", "sticky")
"""Settings that only a native order has, and only with shuffle."""

_ACTIVE_PARTS = 128
MOST_NODES = 2**16
_MOST_SAMPLES = 2**24  # of a batch; like MOST_NODES far above any run's: a damaged state must not fill the memory
_DEFAULTS = {
    "shuffle": False,
    "seed": 9176,
    "batching_method": "random",
    "sampling_method": "balanced",
    "sampling_granularity": 1,
    "switches": (),
}  # of settings that are not None where the user leaves them open


class MosaicConfig(Struct, frozen=True):
    """Settings of the orders of mosaicml-streaming alone.

    Example: ``OrderConfig.resolve(batch_size=256, shuffle=True, mosaic=MosaicConfig("orig"))``.
    """

    partition: str = "relaxed"  # or "orig"
    shuffle_block_size: int | None = None  # samples; None means that library's default
    initial_physical_nodes: int | None = None  # at the run's first start
    ranks_per_node: int | None = None  # data ranks, at the run's first start
    batch_size: int | None = None  # samples of all ranks in one of that library's batches, accumulation excluded


class Switch(Struct, frozen=True):
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


class OrderConfig(Struct, frozen=True, kw_only=True, omit_defaults=True, rename={"device_block": "block"}):
    """The order settings of a run. Make them with :meth:`resolve`, which chooses what the user left open.

    A setting with a default is one that older states lack; a state has it only where it is another.

    Example::

        config = OrderConfig.resolve(batch_size=256, shuffle=True)
        config.canonical_nodes, config.window  # (16, 8)
    """

    shuffle: bool  # whether samples are shuffled at all; else they come in index order
    seed: int  # key of every permutation, in [0, 2**63)
    algorithm: str  # "window", "uniform", "sampler", or one of mosaicml-streaming's
    canonical_nodes: int  # C: samples are split evenly into this many canonical nodes
    window: int  # w, parts of shards active at once in a canonical node
    batching_method: str  # "random", "stratified", "per_stream" or "device_per_stream"
    device_block: int | None  # m of "device_per_stream": samples of one stream, the first run's batch per device
    batch_size: int | None  # B where the order depends on it ("per_stream")
    sampling_method: str  # "balanced", which draws other samples each epoch; "fixed" always draws the same
    sampling_granularity: int  # samples taken from a shard at a time where a stream is only partly drawn
    epoch_size: int | None  # samples of an epoch over all streams; None for the sum that the weights give
    mosaic: MosaicConfig | None  # settings of the orders of mosaicml-streaming; None for the native order
    packing: RowPacking | None = None  # how samples are packed into rows; None: positions count samples
    forgotten: str | None = None  # the digest of the samples in whose places others are delivered, see `Forgotten`
    schedule: Schedule | None = None  # the streams' weights over the run; None for those of each stream
    buckets: LengthBuckets | None = None  # how samples of similar lengths come together; None: they do not
    switches: tuple[Switch, ...] = ()  # to other versions of the data
    quick_start: bool = False  # whether an epoch begins with the beginnings of its first shards
    sticky: bool = False  # whether canonical nodes move little when nodes come and go, see `Placement`
    even_rows: bool | str = False  # what all parts of a window of packed rows have equally much of

    def __post_init__(self) -> None:
        if problems := [*self._problems()]:
            raise ValueError("The order settings must be valid. " + " ".join(problems))

    def _problems(self) -> Iterator[str]:
        """One sentence for everything that is wrong."""
        wrong = violations(structs.asdict(self), _RULES, PUBLIC_NAMES)
        method = METHODS.get(self.batching_method) if isinstance(self.batching_method, str) else None
        if method is not None and method.fixed is not None and getattr(self, method.fixed) is None:
            wrong.append(f"{self.batching_method} needs {_SIZES[method.fixed]} from the start.")
        if self.mosaic is not None:
            wrong += violations(structs.asdict(self.mosaic), _MOSAIC_RULES, PUBLIC_NAMES)
            method = MOSAIC
        yield from wrong
        if self.mosaic is not None and self.forgotten is not None:
            yield f"Samples are forgotten in the native order only, not with {self.algorithm!r}: omit forget."
        if self.needs_lengths and method is not None and not method.can_be_packed:
            able = [name for name, other in METHODS.items() if other.can_be_packed]
            what = "Rows are packed from" if self.packing else "Samples are sorted by length in"
            yield f"{what} the native order with batching_method {' or '.join(able)}."
        if self.packing is not None and self.buckets is not None:
            yield "Packed rows have one length: omit bucket_by and batch_tokens, and set the batch size."
        if self.schedule is not None and not wrong:
            yield from self._schedule_problems(self.schedule)
        places = [(switch.epoch, switch.position) for switch in self.switches]
        if places != sorted(places) or not all(is_count(value, 0) for place in places for value in place):
            yield f"Switches of versions must follow each other, but they are at {places}."

    def _schedule_problems(self, schedule: Schedule) -> Iterator[str]:
        length = self.block_length
        counts_steps = schedule.unit == "steps"
        if self.mosaic is not None:
            yield f"A schedule needs the native order, but shuffle_algo is {self.algorithm!r}: omit it."
        if counts_steps and self.batch_size is None:
            yield "A schedule in steps needs a batch size from the start."
        if counts_steps and self.has_budget:
            yield "A schedule in steps needs batches of one size: with batch_tokens, count samples or tokens."
        if length > 1 and (self.epoch_size is None or self.epoch_size % length):
            yield (
                f"{self.batching_method} takes {length} samples of a stream at a time, so with a schedule epoch_size "
                f"must be a multiple of that, not {self.epoch_size}."
            )
        if length > 1 and any(schedule.stops):
            yield (
                f"exhausted='stop' would end a stream within the {length} samples that {self.batching_method} takes at "
                "a time: use 'repeat', or another batching_method."
            )

    @classmethod
    def resolve(
        cls,
        *,
        batch_size: int | None,
        device_batch_size: int | None = None,
        resumed: OrderConfig | None = None,
        world: World | None = None,
        **settings: Any,
    ) -> OrderConfig:
        """Choose what was left open, from the first run's B (``batch_size``).

        Only ``device_per_stream`` (by ``device_batch_size``) and the orders of mosaicml-streaming depend on hardware.

        Args:
            batch_size: B, the samples of one optimizer step over all replicas; None where it is unknown.
            device_batch_size: The first run's samples per device and micro-batch: m of ``device_per_stream``.
            resumed: The settings of the state to resume from, for what is None (nodes, window, m, quick_start,
                sticky, even_rows).
            world: The first run's processes; only the orders of mosaicml-streaming depend on them.
            settings: Any of the fields but ``batch_size`` and ``device_block``. An ``algorithm`` of None means
                ``"window"``, ``canonical_nodes`` the largest divisor of B that is at most 16, ``window``
                ``ceil(128 / canonical_nodes)``, and ``quick_start`` True for a new run that shuffles natively.

        Raises:
            ValueError: Settings that are wrong or missing; every problem is named.
        """
        values: dict[str, Any] = dict.fromkeys(cls.__struct_fields__) | _DEFAULTS | settings
        algorithm = values["algorithm"]
        mosaic = values["mosaic"]
        schedule = values["schedule"]
        if mosaic is not None or algorithm in MOSAIC_ALGORITHMS:
            mosaic = _resolve_mosaic(mosaic, resumed, world or World(), device_batch_size)
            algorithm = algorithm or MOSAIC_ALGORITHMS[0]
        if resumed is not None:
            device_batch_size = resumed.device_block or device_batch_size
            schedule = schedule and schedule.resumed(resumed.schedule)
            values |= {name: getattr(resumed, name) for name in _KEPT if values[name] is None}
        if values["canonical_nodes"] is None:
            values["canonical_nodes"] = _default_nodes(batch_size, algorithm, mosaic)
        if values["window"] is None:
            values["window"] = -(-_ACTIVE_PARTS // max(values["canonical_nodes"], 1))
        sizes = {"batch_size": batch_size, "device_block": device_batch_size}
        method = METHODS.get(values["batching_method"])
        if method is not None and method.fixed is not None:
            values[method.fixed] = sizes[method.fixed]
        if schedule is not None and schedule.unit == "steps":
            values["batch_size"] = (resumed and resumed.batch_size) or batch_size
        is_native = values["shuffle"] and mosaic is None
        values["quick_start"] = is_native and values["quick_start"] is not False
        values["sticky"] = is_native and values["sticky"] is True
        is_packed = values["shuffle"] and values["packing"] is not None
        values["even_rows"] = is_packed and (values["even_rows"] or False)
        return cls(**(values | {"algorithm": algorithm or "window", "mosaic": mosaic, "schedule": schedule}))

    @property
    def has_budget(self) -> bool:
        """Whether batches have as many samples as a number of tokens allows."""
        return self.buckets is not None and self.buckets.batch_tokens is not None

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

    @property
    def block_length(self) -> int:
        """Consecutive samples of one stream that stay together, where the batching method keeps any."""
        fixed = self.batching.fixed
        return 1 if fixed is None else getattr(self, fixed) or 1

    def to_state(self) -> dict[str, Any]:
        """The settings as a dict of plain values."""
        return plain(self)

    @property
    def digest(self) -> str:
        """16 hexadecimal digits that differ for any other settings."""
        return hashlib.sha256(json.dumps(self.to_state(), sort_keys=True).encode()).hexdigest()[:16]

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> OrderConfig:
        """Read the result of :meth:`to_state`; raise VersionMismatch for a newer one, StateError for anything else."""
        if unknown := _unknown_settings(cls, state):
            raise VersionMismatch(
                f"The order settings of a state must be those that this version has, but it has none named {unknown}: "
                "the state was written by a newer lightning-stream. Install that one to continue the run."
            )
        try:
            return msgspec.convert({**state}, cls)
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
    config: MosaicConfig | None, resumed: OrderConfig | None, world: World, device_batch_size: int | None
) -> MosaicConfig:
    """Fill in what was left open: from the state, else from the first run's world."""
    config = config or MosaicConfig()
    first = (resumed and resumed.mosaic) or MosaicConfig()
    here = {
        "initial_physical_nodes": world.num_nodes,
        "ranks_per_node": world.num_replicas // world.num_nodes,
        "batch_size": None if device_batch_size is None else device_batch_size * world.num_replicas,
    }
    chosen = {name: getattr(config, name) or getattr(first, name) or value for name, value in here.items()}
    return structs.replace(config, **chosen)


def _unknown_settings(kind: type, values: object) -> list[str]:
    """The names in a state that this version has no settings for, in all its parts."""
    if isinstance(values, list | tuple):
        return [name for part in values for name in _unknown_settings(kind, part)]
    if not isinstance(values, Mapping):
        return []  # refused where it is read
    known = {"block" if name == "device_block" else name for name in kind.__annotations__}
    parts = _PARTS.items() if kind is OrderConfig else ()
    unknown = sorted(str(name) for name in values if name not in known)
    return unknown + [name for key, part in parts for name in _unknown_settings(part, values.get(key))]


_KEPT = (
    "canonical_nodes",
    "window",
    *NATIVE_NAMES,
    "even_rows",
)  # by a run that resumes, where the user does not say
_SIZES = {"batch_size": "a batch size", "device_block": "the batch size per device"}
_PARTS: dict[str, type] = {
    "mosaic": MosaicConfig,
    "packing": RowPacking,
    "schedule": Schedule,
    "buckets": LengthBuckets,
    "switches": Switch,
}
_RULES = {
    "algorithm": one_of("window", UNIFORM, SAMPLER, *MOSAIC_ALGORITHMS),
    "batching_method": one_of(*METHODS),
    "sampling_method": one_of("balanced", "fixed"),
    **dict.fromkeys(("shuffle", "quick_start", "sticky"), one_of(True, False)),
    "even_rows": Rule("True, False or a string", lambda value: isinstance(value, bool | str)),
    "canonical_nodes": count(1, MOST_NODES),
    "window": count(1, MOST_NODES),
    "sampling_granularity": count(1),
    "device_block": count(1, _MOST_SAMPLES, optional=True),
    "batch_size": count(1, _MOST_SAMPLES, optional=True),
    "epoch_size": count(1, optional=True),
    "forgotten": MAYBE_TEXT,
    "seed": count(),
}
_MOSAIC_RULES = {
    "partition": one_of(*PARTITIONS),
    "shuffle_block_size": count(1, optional=True),
    "initial_physical_nodes": count(1, MOST_NODES, optional=True),
    "ranks_per_node": count(1, MOST_NODES, optional=True),
    "batch_size": count(1, _MOST_SAMPLES, optional=True),
}
