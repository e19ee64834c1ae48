"""The samples of a dataset as a value: where they are, their order, and how it is divided into batches.

A worker process gets one; it never calls the dataset back, except where a subclass reads samples in its own way.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from multiprocessing import context, parent_process
from operator import attrgetter
from typing import Any, cast

import numpy as np
from msgspec import structs
from numpy.typing import NDArray
from torch.utils.data import get_worker_info

from lightning_stream.distributed import WorldLike, detect_world, refuse_other_replicas, with_names
from lightning_stream.errors import NotFoundError
from lightning_stream.formats.hashing import digest
from lightning_stream.loading.packing import Bucketing, Packing
from lightning_stream.loading.randomness import SeededCall
from lightning_stream.loading.sampler import SamplerLists
from lightning_stream.loading.shared_position import Start
from lightning_stream.order import BatchPlan, OrderConfig, Position, RunOrder, Schedule, Snapshot, Tail, World
from lightning_stream.order.balance import Balance, Cost, whole_costs
from lightning_stream.order.bitmap import Bitmap, as_ids
from lightning_stream.order.config import Switch
from lightning_stream.order.forget import Forgotten
from lightning_stream.order.methods import METHODS
from lightning_stream.order.micro_batches import MicroBatches
from lightning_stream.order.orders import ceil_div
from lightning_stream.order.placement import NO_REPORT, Report, num_readers, reader_of
from lightning_stream.order.replay import Replay, plan_replay
from lightning_stream.order.switches import SwitchedRun
from lightning_stream.questions import Delivery, Occurrence, where
from lightning_stream.reading.bad_samples import BadData
from lightning_stream.reading.reader import SampleReader
from lightning_stream.reading.stream import versions_of, weights_of
from lightning_stream.reading.switched import SwitchedReader

_AVERAGED = 1 << 20  # lengths at once
_COMPARED = 1 << 12  # samples whose costs all ranks compare


@dataclass(frozen=True)
class BatchSettings:
    """How a training run's data is divided into batches."""

    world: World  # this process among all that train
    device_batch_size: int  # samples of a micro-batch on one device
    global_batch_size: int  # B, samples of one optimizer step over all replicas
    tail: Tail  # what happens to the last partial batch of an epoch
    order: OrderConfig
    padding: bool = True  # whether a rank gets padding beside samples of its own, so that all ranks have equal shapes
    balance: Balance | None = None  # what decides which samples of a global batch a rank gets, beside their places
    accumulate: int = 1  # micro-batches of an optimizer step

    def plan(self, source: SampleSource, start: Start) -> BatchPlan:
        """The global batches from a start to the end of its epoch."""
        run = source.order(self.order)
        return BatchPlan(
            replace(run.epoch(start.epoch, start.counted_windows), following=run.following(start.epoch)),
            batch_size=self.global_batch_size,
            world=self.world,
            tail=self.tail,
            start=start.position,
            balance=self.balance,
            accumulate=self.accumulate,
        )

    def start(self, run: RunOrder, epoch: int = 0) -> Position:
        """The beginning of an epoch of a training run."""
        return Position.start(run, batch_size=self.global_batch_size, tail=self.tail, epoch=epoch)

    def where(
        self, source: SampleSource, position: Position, sample_id: int, epochs: Iterable[int] | None
    ) -> list[Occurrence]:
        """When and where the run of this position sees a sample, see `lightning_stream.questions.where`."""
        delivery = Delivery(self.world, self.device_batch_size, self.padding, self.balance, self.accumulate)
        return where(source.order(position.order), position, sample_id, delivery, epochs)

    def micro_batches(self, source: SampleSource, start: Start) -> MicroBatches:
        """This rank's micro-batches from a start to the end of its epoch."""
        return MicroBatches(self.plan(source, start), self.device_batch_size, self.padding)


@dataclass(frozen=True)
class _OfReader:
    """What a method of a reader (`lengths` or `amounts`) returns for a name; equal where reader and name are.

    Lengths stay out of a pickle: another process maps them itself.
    """

    method: Callable[..., Any]
    name: str

    def __call__(self, *arguments: Any) -> Any:
        return self.method(self.name, *arguments)


def _mean(lengths: NDArray[np.integer], counted: Callable[[NDArray[np.integer]], NDArray[np.integer]]) -> float:
    """The mean of lengths, of which only a part may be kept: the same number on every machine."""
    pieces = (lengths[begin : begin + _AVERAGED] for begin in range(0, len(lengths), _AVERAGED))
    total = sum(int(counted(piece).sum(dtype=np.int64)) for piece in pieces)
    return round(total / len(lengths), 3) if len(lengths) else 1.0


@dataclass
class SampleSource:
    """What a dataset reads and in which order, and the user's functions of a sample; see also `StreamingDataset`."""

    reader: SampleReader  # from sample ids to samples and columns
    bad_data: BadData  # what to do with what cannot be read
    order_arguments: Mapping[str, Any]  # the user's settings of the order, see `OrderConfig.resolve`
    seed: int  # key of the order and of what is drawn at random
    predownload: int | None = None  # samples each worker fetches ahead; None to choose
    transform: SeededCall | None = None  # called with each sample
    read_one: SeededCall | None = None  # a subclass's own way to read a sample by its id
    lists: SamplerLists | None = None  # the user's own order
    # From where a batch's arrays are made to what collates samples, without a function of the user's; None is our own.
    collating: Callable[[Callable[[int], Any] | None], Callable[[list[Any]], Any]] | None = None
    world: WorldLike = None
    replication: int | None = None
    packing: Packing | None = None  # how samples are packed into rows
    balance: str | Cost | None = None  # what shares are balanced by: the name of lengths, or a cost of lengths
    forget: NDArray[np.int64] | None = None  # ids of samples in whose places others are delivered
    buckets: Bucketing | None = None  # how samples of similar lengths come together
    sent: tuple[int, World] | None = None  # the process that this was sent from, and its world
    orders: dict[OrderConfig, RunOrder] = field(default_factory=dict, repr=False)  # the latest; shared by copies
    switched: dict[Any, OrderConfig] = field(default_factory=dict, repr=False)  # settings with their switches

    def __post_init__(self) -> None:
        if any(len(versions_of(stream)) > 1 for stream in self.reader.streams):
            self._refuse_with_switches()

    def __getstate__(self) -> dict[str, Any]:
        state = {**vars(self), "orders": {}}  # another process makes its own: those of packed rows hold all lengths
        if context.get_spawning_popen() is not None:  # on its way to another process
            state["sent"] = os.getpid(), self.detect_world()
        return state

    @property
    def snapshot(self) -> Snapshot:
        """The shards of all streams, with a digest; reads the indexes on first use."""
        return self.reader.snapshot

    def detect_world(self, of_loader: WorldLike = None) -> World:
        """The world as a loader of it was given, or the dataset, or as detected now.

        A spawned worker of torch's DataLoader has no process group to ask: its world is that of its trainer.

        Raises:
            ValueError: None was given, and Megatron divides the ranks into other replicas.
        """
        parent = parent_process()
        if self.sent is not None and parent is not None and self.sent[0] == parent.pid and get_worker_info():
            return self.sent[1]
        _, names = with_names(self.world)  # also of a mesh that only the loader has
        chosen = self.world if of_loader is None else of_loader
        world = detect_world(chosen, self.replication or 1, names)
        if chosen is None:
            refuse_other_replicas(world)
        return world

    def settings(
        self, world: World, device_batch_size: int, accumulate: int, tail: Tail, resumed: OrderConfig | None = None
    ) -> BatchSettings:
        """How a training run's data is divided into batches, with `accumulate` micro-batches of an optimizer step.

        `resumed` has the settings of a state that the run continues from; they fill in before any default does.
        """
        size = device_batch_size * accumulate * world.num_replicas
        arguments = {**self.order_arguments, "forgotten": self.forgotten and self.forgotten.digest}
        arguments["schedule"] = self.schedule
        arguments["sticky"] = None if resumed else True
        if self.packing is not None:
            arguments["packing"] = self.packing.resolved(self.reader, resumed)
            has_amounts = isinstance(self.balance, str) and self.balance != self.lengths_name
            even_rows = self.balance if has_amounts else self.balance is not None
            arguments["even_rows"] = None if resumed else even_rows
        if self.buckets is not None:
            arguments["buckets"] = buckets = self.buckets.resolved(self.reader, size, resumed)
            if buckets.batch_tokens is not None:
                size = buckets.batch_size
                device_batch_size = ceil_div(size, accumulate * world.num_replicas)
        order = OrderConfig.resolve(
            batch_size=size, device_batch_size=device_batch_size, world=world, resumed=resumed, **arguments
        )
        if self.is_switched:
            order = self._switched(order, size, tail, () if resumed is None else resumed.switches)
        balance = self._balance(device_batch_size)
        return BatchSettings(world, device_batch_size, size, tail, order, balance=balance, accumulate=accumulate)

    @property
    def lengths_name(self) -> str | None:
        """The name of the lengths that the order depends on."""
        if self.packing is not None:
            return self.packing.lengths_name
        return None if self.buckets is None else self.buckets.by

    @property
    def packs_whole(self) -> bool:
        """Whether whole samples are packed into rows."""
        return self.packing is not None and self.packing.is_whole

    @property
    def epochs_differ(self) -> bool:
        """Whether epochs have different numbers of batches."""
        schedule = self.order_arguments["schedule"]
        return self.counts_rows or self.is_switched or (schedule is not None and any(schedule.stops))

    @property
    def counts_rows(self) -> bool:
        """Whether an epoch's rows or batches are known only when all of them are planned."""
        return self.packing is not None or self.batch_tokens is not None

    @property
    def batch_tokens(self) -> int | None:
        """Tokens of a global batch at most; None where it has one number of samples."""
        return None if self.buckets is None else self.buckets.batch_tokens

    def _refuse_with_switches(self) -> None:
        """Raise ValueError for settings that a training run which switches versions cannot have."""
        arguments = self.order_arguments
        weights = [vars(weights_of(stream)).values() for stream in self.reader.streams]
        refused = {
            "shuffle_algo": arguments["mosaic"] is not None,
            "batching_method": METHODS[arguments["batching_method"]].is_mixed,
            "schedule": arguments["schedule"] is not None,
            "epoch_size": arguments["epoch_size"] is not None,
            "proportion, repeat or choose": any(value is not None for values in weights for value in values),
            "pack": self.packing is not None,
            "bucket_by or batch_tokens": self.buckets is not None,
            "forget": self.forget is not None,
            "filter or a subset": self.reader.parent is not None,
            "on_bad": self.bad_data.policy.substitutes,
        }
        if present := [name for name, is_given in refused.items() if is_given]:
            raise ValueError(
                "a training run that switches versions takes each sample once per epoch, in the native order; found "
                f"{'; '.join(present)}. Omit these, or name one version"
            )

    @property
    def is_switched(self) -> bool:
        """Whether the training run switches versions of its data."""
        return isinstance(self.reader, SwitchedReader)

    def _switched(self, order: OrderConfig, batch_size: int, tail: Tail, known: tuple[Switch, ...]) -> OrderConfig:
        """The order settings with the switches: those that a state knows, and others where their steps are now."""
        key = (order, batch_size, tail, known)
        reader = cast("SwitchedReader", self.reader)
        if key in self.switched:
            return self.switched[key]
        config = order
        for k, (step, data) in enumerate(zip(reader.steps[1:], reader.versions[1:], strict=True)):
            version_digest = data.snapshot.digest
            versions = tuple(stream_digest[:16] for stream_digest in data.snapshot.stream_digests)
            former = known[k] if k < len(known) else None
            if former is None or (former.step, former.digest) != (step, version_digest):
                run = cast("SwitchedRun", self.order(config))
                former = Switch(step, *run.place_of_step(step, batch_size, tail), version_digest, versions)
            config = structs.replace(config, switches=(*config.switches, former))
        self.switched[key] = config
        return config

    def _balance(self, device_batch_size: int) -> Balance | None:
        if self.balance is None:
            return None
        self.reader.amounts(self.balanced_by, np.empty(0, np.int64))  # raises now if there are none
        if self.balance != self.lengths_name and isinstance(self.balance, str):
            return Balance(_OfReader(self.reader.amounts, self.balance), device_batch_size)
        cost = None if isinstance(self.balance, str) else self.balance
        return Balance(cost, device_batch_size, _OfReader(self.reader.lengths, self.balanced_by))

    def balance_digest(self) -> str | None:
        """Other digits where this balance would be another one: by other lengths, or another cost of some of them."""
        if self.balance is None:
            return None
        size = self.snapshot.num_samples
        ids = np.arange(0, size, 1 + size // _COMPARED)
        amounts = self.reader.amounts(self.balanced_by, ids)
        costs = whole_costs(amounts if isinstance(self.balance, str) else self.balance(amounts), len(ids))
        lengths = map(self.reader.lengths_digest, self.reader.stored_lengths(self.balanced_by))
        return " ".join([digest("xxh3_128", costs.view(np.uint8).data), *lengths])

    @property
    def balanced_by(self) -> str:
        """The name of the lengths that shares are balanced by."""
        if isinstance(self.balance, str):
            return self.balance
        return self.lengths_name or "tokens"

    def order(self, config: OrderConfig) -> RunOrder:
        """The order of a training run with these settings; the latest is kept."""
        run = self.orders.get(config)
        if run is None:
            lengths = None if self.lengths_name is None else self.reader.lengths(self.lengths_name)
            if self.packing is not None and lengths is not None:
                self.packing.check_lengths(lengths)
            forgotten = None if config.forgotten is None else self.forgotten
            weights = tuple(map(weights_of, self.reader.streams))
            if isinstance(self.reader, SwitchedReader):
                run = SwitchedRun(self.snapshot, weights, config, self.reader.versions)
            else:
                even = config.even_rows
                amounts = _OfReader(self.reader.amounts, even) if isinstance(even, str) else None
                options: dict[str, Any] = {"forgotten": forgotten, "lists": self.lists, "amounts": amounts}
                run = RunOrder(self.snapshot, weights, config, lengths, **options)
            if forgotten is not None:  # nor may they be delivered in place of bad samples
                self.bad_data.samples.update(dict.fromkeys(forgotten.ids.tolist(), "it is forgotten"))
            self.orders.clear()
            self.orders[config] = run
        return run

    def disk(self, settings: BatchSettings) -> Report:
        """What this node's disk holds; `NO_REPORT` where that changes nothing."""
        if not settings.order.sticky or num_readers(settings.world) == 1:
            return NO_REPORT
        is_here = np.array(list(map(self.reader.shards.pool.is_present, range(self.snapshot.num_shards))), np.bool_)
        return reader_of(settings.world), self.order(settings.order).samples_on(is_here)

    @cached_property
    def schedule(self) -> Schedule | None:
        """The user's schedule; where it counts tokens, with the mean lengths of each stream's samples."""
        schedule: Schedule | None = self.order_arguments["schedule"]
        if schedule is None or schedule.mean_lengths:
            return schedule
        if not schedule.counts_tokens(is_packed=self.packing is not None):
            return schedule
        try:
            lengths = self.reader.lengths(self.lengths_name or "tokens")
        except NotFoundError as error:
            raise NotFoundError(f"{error} Or pass mean_lengths= to the Schedule.") from error
        edges = self.snapshot.shard_offsets[self.snapshot.stream_offsets].tolist()
        packed_tokens = np.asarray if self.packing is None else self.packing.rows("").packed_tokens
        means = [_mean(lengths[begin:end], packed_tokens) for begin, end in pairwise(edges)]
        return structs.replace(schedule, mean_lengths=dict(zip(schedule.streams, means, strict=True)))

    @cached_property
    def forgotten(self) -> Forgotten | None:
        """The forgotten samples; None if there are none."""
        return None if self.forget is None else Forgotten.of(self.snapshot, self.forget)

    def plan_replay(self, ids: Iterable[int] | NDArray[np.int64], states: Sequence[Mapping[str, Any]]) -> Replay:
        """Which of these states a run continues from that forgets samples, see `StreamingDataset.plan_replay`."""
        if self.is_switched:
            raise ValueError("a training run that switches versions cannot forget samples. Delete them in a version.")
        positions = [Position.from_state(state).converted(self.snapshot) for state in states]
        forgotten = None if self.forgotten is None else self.forgotten.digest
        last = max(positions, key=attrgetter("epoch", "position")).order.schedule if positions else None
        configs = [position.order for position in positions]
        orders = {
            structs.replace(config, forgotten=forgotten, schedule=config.schedule and config.schedule.resumed(last))
            for config in configs
        }  # a run may have changed its mixture
        if len(orders) != 1:
            raise ValueError(
                f"the states of one training run have one order; found {len(orders)} different ones in {len(states)} "
                "states. Pass the states of one run"
            )
        run = self.order(orders.pop())
        for position in positions:
            known = position.order.forgotten
            began = structs.replace(position.order, forgotten=None if known == forgotten else known)
            replace(position, order=began).check(run.forgetting(None))
        return plan_replay(run, ids, positions)

    def subset(self, ids: Iterable[int] | NDArray[np.int64]) -> SampleSource:
        """Some samples of this source, with an order of their own."""
        chosen = Bitmap.of_ids(as_ids(ids, "ids"), self.snapshot.num_samples)
        reader = self.reader.only(chosen)
        forget = self.forget
        reader.snapshot  # noqa: B018 - nothing has to be read for it, and a repr shows what is known
        if forget is not None:
            remaining = forget[chosen.mask[forget]]
            forget = chosen.count_before(remaining) if len(remaining) else None
        bad_data = BadData(self.bad_data.policy, names=self.bad_data.names, launch=self.bad_data.launch)
        return replace(self, reader=reader, bad_data=bad_data, forget=forget, orders={})
