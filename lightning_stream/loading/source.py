"""The samples of a dataset as a value: where they are, their order, and how a batch of them is read.

A worker process gets one; it never calls the dataset back, except where a subclass reads samples in its own way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_stream.loading.collate import collate_columns, collate_samples
from lightning_stream.loading.distributed import Dimensions, WorldLike, detect_world
from lightning_stream.loading.randomness import SeededCall, preserved_generators, seed_sample
from lightning_stream.loading.shared_position import Start
from lightning_stream.order import BatchPlan, OrderConfig, RunOrder, Snapshot, Tail, World
from lightning_stream.order.bitmap import Bitmap
from lightning_stream.order.micro_batches import MicroBatch, MicroBatches
from lightning_stream.reading.bad_samples import BadData
from lightning_stream.reading.reader import SampleReader
from lightning_stream.reading.stream import weights_of
from lightning_stream.reading.subset import SubsetReader

Transform = Callable[..., Any]


@dataclass(frozen=True)
class BatchSettings:
    """How a training run's data is divided into batches."""

    world: World  # this process among all that train
    device_batch_size: int  # samples of a micro-batch on one device
    global_batch_size: int  # B, samples of one optimizer step over all replicas
    tail: Tail  # what happens to the last partial batch of an epoch
    order: OrderConfig
    padding: bool = True  # whether a rank gets padding beside samples of its own, so that all ranks have equal shapes

    def plan(self, source: SampleSource, start: Start) -> BatchPlan:
        """The global batches from a start to the end of its epoch."""
        order, size = source.order(self.order).epoch(start.epoch), self.global_batch_size
        return BatchPlan(order, batch_size=size, world=self.world, tail=self.tail, start=start.position)

    def micro_batches(self, source: SampleSource, start: Start) -> MicroBatches:
        """This rank's micro-batches from a start to the end of its epoch."""
        return MicroBatches(self.plan(source, start), self.device_batch_size, self.padding)


@dataclass
class SampleSource:
    """What a dataset reads, in which order, and what becomes of a sample; see also `StreamingDataset`."""

    reader: SampleReader  # from sample ids to samples and columns
    bad_data: BadData  # what to do with what cannot be read
    order_arguments: Mapping[str, Any]  # the user's settings of the order, see `OrderConfig.resolve`
    seed: int  # key of the order and of what is drawn at random
    predownload: int | None = None  # samples each worker fetches ahead; None to choose
    transform: Transform | None = None  # called with each sample
    read_one: Callable[[int], Any] | None = None  # a subclass's own way to read a sample by its id
    world: WorldLike = None
    replication: int | None = None
    data_dimension: Dimensions = "dp"
    _seeded: SeededCall | None = field(default=None, init=False, repr=False)
    orders: dict[OrderConfig, RunOrder] = field(default_factory=dict, repr=False)  # the latest; shared by copies

    def __post_init__(self) -> None:
        self._seeded = None if self.transform is None else SeededCall(self.transform, self.seed)

    @property
    def snapshot(self) -> Snapshot:
        """The shards of all streams, with a digest; reads the indexes on first use."""
        return self.reader.snapshot

    def detect_world(self) -> World:
        """The world this process is in, as given or as detected now."""
        return detect_world(self.world, self.replication or 1, self.data_dimension)

    def settings(
        self, world: World, device_batch_size: int, accumulate: int, tail: Tail, resumed: OrderConfig | None = None
    ) -> BatchSettings:
        """How a training run's data is divided into batches, with `accumulate` micro-batches of an optimizer step.

        `resumed` has the settings of a state that the run continues from; they fill in before any default does.
        """
        size = device_batch_size * accumulate * world.num_replicas
        order = OrderConfig.resolve(
            batch_size=size, device_batch_size=device_batch_size, world=world, resumed=resumed, **self.order_arguments
        )
        return BatchSettings(world, device_batch_size, size, tail, order)

    def order(self, config: OrderConfig) -> RunOrder:
        """The order of a training run with these settings; the latest is kept."""
        found = self.orders.get(config)
        if found is None:
            found = RunOrder(self.snapshot, tuple(map(weights_of, self.reader.streams)), config)
            self.orders.clear()
            self.orders[config] = found
        return found

    def subset(self, ids: Iterable[int] | NDArray[np.int64]) -> SampleSource:
        """Some samples of this source, with an order of their own."""
        chosen = Bitmap.of_ids(ids if isinstance(ids, np.ndarray) else list(ids), self.snapshot.num_samples)
        bad_data = BadData(self.bad_data.policy)
        return replace(self, reader=SubsetReader(self.reader, chosen), bad_data=bad_data, orders={})

    def batch(self, batch: MicroBatch, collate: SeededCall | None) -> Any:
        """Read, transform and collate one micro-batch.

        Columns are gathered at once where nothing asks for single samples: no transform, no collate function, no
        subclass that reads samples in its own way.
        """
        if self.transform is None and collate is None and self.read_one is None:
            return collate_columns(self.reader.batch(batch.delivered))
        samples = self.samples(batch)
        if collate is None:
            return collate_samples(samples)
        with preserved_generators(), self._named("collating", batch.delivered[:8].tolist()):
            return collate(samples, batch.epoch, int(batch.positions[0]))

    def samples(self, batch: MicroBatch) -> list[Any]:
        """Read and transform the samples of one micro-batch."""
        ids = batch.delivered.tolist()
        if self.transform is None and self.read_one is None:
            return [self.reader.sample(sample_id) for sample_id in ids]
        with preserved_generators():
            return [self._one(one, batch.epoch, at) for one, at in zip(ids, batch.positions.tolist(), strict=True)]

    def _one(self, sample_id: int, epoch: int, position: int) -> Any:
        if self.read_one is None:
            sample: Any = self.reader.sample(sample_id)
        else:
            seed_sample(self.seed, epoch, position)
            with self._named("reading", [sample_id]):
                sample = self.read_one(sample_id)
        if self._seeded is None:
            return sample
        with self._named("transforming", [sample_id]):
            return self._seeded(sample, epoch, position)

    @contextmanager
    def _named(self, doing: str, ids: list[int]) -> Iterator[None]:
        """Add to an error of the user's code which samples it came from."""
        try:
            yield
        except Exception as error:
            shards = self.snapshot.shards_of(np.array(ids))
            stream = self.snapshot.stream_names[int(self.snapshot.streams_of(np.array(ids[:1]))[0])]
            files = sorted({self.reader.entry(int(shard))[1].raw.basename for shard in shards})
            note = f"While {doing} samples {ids} of stream {stream!r}, shard {', '.join(files)}."
            # A note shows in the traceback, also in one that crosses processes; the error's type and text stay.
            error.__notes__ = [*getattr(error, "__notes__", ()), note]  # type: ignore[attr-defined]
            raise
