"""`StreamingDataset`: streams, an order over their samples, random access; the name and arguments MDS users know."""

from __future__ import annotations

import copy
import math
import operator
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import IterableDataset, get_worker_info

from lightning_stream.cache import CacheConfig
from lightning_stream.errors import StateError
from lightning_stream.formats.sizes import parse_bytes, parse_count
from lightning_stream.loading.collate import collate_columns, collate_samples
from lightning_stream.loading.distributed import WorldLike, detect_world
from lightning_stream.loading.randomness import seed_sample, undisturbed_generators
from lightning_stream.loading.resume import order_in, position_in
from lightning_stream.loading.settings import BatchSettings
from lightning_stream.loading.shared_position import SharedPosition, Start
from lightning_stream.order import MosaicConfig, OrderConfig, Position, RunOrder, Snapshot, Tail, World
from lightning_stream.order.config import MOSAIC_ALGORITHMS
from lightning_stream.order.micro_batches import BatchInfo, micro_batches
from lightning_stream.reading.bad_samples import BadData, Policy, bad_data, readable
from lightning_stream.reading.look_ahead import read_ahead, warm
from lightning_stream.reading.reader import ReaderConfig, SampleReader
from lightning_stream.reading.stream import CacheDefaults, Stream, weights_of
from lightning_stream.reading.subset import SubsetReader

Transform = Callable[[dict[str, Any]], Any]


class StreamingDataset(IterableDataset[Any]):
    """Samples streamed from one or several datasets in an order that is elastic, deterministic and resumable.

    Iterated through a `StreamingDataLoader` (or a trainer's wrapper of one), every global batch is the same on any
    number of nodes, ranks and workers. ``dataset[i]`` reads any sample. Nothing is read before the first use.

    Args:
        streams: Several streams to mix; else `remote`, `local` and `split` describe one.
        remote, local, split: See `Stream`.
        download_retry: How often a failed request is tried again; None for what suits the store.
        download_timeout: Longest silence on a connection, in seconds; None for what suits the store.
        validate_hash: Name of the hash to check fetched files with; None checks whatever the index has.
        keep_zip: Whether compressed files stay in the cache after decompression.
        epoch_size: Samples per epoch (``"100k"`` is understood); None for what the streams' weights say.
        predownload: Samples each worker fetches ahead of what it delivers; None for eight batches,
            and more while connections would be idle and nothing is evicted.
        cache_limit: Bytes (``"10gb"``) each cache folder may hold; None for no limit.
        sampling_method: ``"balanced"`` draws anew each epoch, ``"fixed"`` the same samples always.
        sampling_granularity: Samples taken from a shard at a time where a stream is only partly drawn.
        partition_algo: For mosaicml-streaming's orders: ``"relaxed"`` or ``"orig"``.
        num_canonical_nodes: Parts of the data that stay on one node each; None derives it from the global batch size.
        batch_size: Samples per device; needed by a plain `torch.utils.data.DataLoader` with workers.
        shuffle: Whether to shuffle.
        shuffle_algo: None or ``"window"`` for the native order; or mosaicml-streaming's ``py1e py1br py1s py2s naive``.
        shuffle_seed: Key of every permutation.
        shuffle_block_size: For mosaicml-streaming's block-based orders, in samples.
        batching_method: ``random``, ``stratified``, ``per_stream`` or ``device_per_stream``.
        allow_unsafe_types: Whether to decode the ``pkl`` encoding, which runs code that the data names.
        replication: Groups of this many consecutive ranks get the same samples.
        transform: Called with each sample (a dict) in the worker; its result is what is collated. It may draw from
            the global generators of random, numpy and torch: they are seeded for each sample by its place in the run.
        decoders: Column name to what turns its stored bytes into a value, instead of its encoding; e.g.
            ``{"image": lightning_stream.formats.jpeg.decode_jpeg}`` for arrays instead of PIL images.
        window: Shards active at once in each canonical node; None for about 128 over all of them.
        world: Which processes train together: a `World`, a ``(rank, num_ranks)`` pair or a device mesh; None to detect
            it when needed.
        data_dimension: With a device mesh, the name of its data-parallel dimension.
        shared_cache: Whether other users of the machine may share the cache folder.
        on_bad_sample: ``"raise"``, or ``"substitute"`` to deliver another sample of the stream where one cannot be
            decoded: the same one in every world, so that all ranks keep step.
        on_bad_shard: The same where a shard is missing in the store, or has other bytes than the index says.
        quarantine: File that lists what was bad, a JSON object a line; None for one in the first cache folder.
        start_by_range: Whether samples whose shards are still on their way may come by ranges of their own: the first
            batches need not wait for whole shards. What comes so is compared with the shard only once that is here
            and verified: a difference ends the run.
        stream_config: Further arguments of the stream that is made of `remote` and `local`, e.g.
            ``{"options": {"endpoint_url": ...}}``.
        stream_name: Only ``"stream"``: streams of a class of your own are passed as `streams`.

    Raises:
        ValueError: Settings that contradict each other.
    """

    def __init__(
        self,
        *,
        streams: Sequence[Stream] | None = None,
        remote: str | os.PathLike[str] | None = None,
        local: str | os.PathLike[str] | None = None,
        split: str | None = None,
        download_retry: int | None = None,
        download_timeout: float | None = None,
        validate_hash: str | None = None,
        keep_zip: bool = False,
        epoch_size: int | str | None = None,
        predownload: int | None = None,
        cache_limit: int | str | None = None,
        sampling_method: str = "balanced",
        sampling_granularity: int = 1,
        partition_algo: str = "relaxed",
        num_canonical_nodes: int | None = None,
        batch_size: int | None = None,
        shuffle: bool = False,
        shuffle_algo: str | None = None,
        shuffle_seed: int = 9176,
        shuffle_block_size: int | None = None,
        batching_method: str = "random",
        allow_unsafe_types: bool = False,
        replication: int | None = None,
        stream_name: str = "stream",
        stream_config: Mapping[str, Any] | None = None,
        transform: Transform | None = None,
        decoders: Mapping[str, Callable[[bytes], Any]] | None = None,
        window: int | None = None,
        world: WorldLike = None,
        data_dimension: str = "dp",
        shared_cache: bool = False,
        on_bad_sample: Policy = "raise",
        on_bad_shard: Policy = "raise",
        quarantine: str | os.PathLike[str] | None = None,
        start_by_range: bool = False,
    ) -> None:
        if stream_name != "stream":
            raise ValueError(
                f"a stream of another class is passed itself; found stream_name={stream_name!r}. Pass "
                "streams=[YourStream(...)]"
            )
        given = {"remote": remote, "local": local, "split": split}
        single = {**(stream_config or {}), **{name: value for name, value in given.items() if value is not None}}
        if streams is not None and single:
            raise ValueError("pass either streams=, or remote=/local=/split= of a single one, not both")
        self.streams = tuple(streams) if streams is not None else (Stream(**single),)
        self.batch_size = batch_size
        self.shuffle = shuffle
        self.shuffle_seed = shuffle_seed
        self.replication = replication
        self.predownload = predownload
        self.transform = transform
        self.world = world
        self.data_dimension = data_dimension
        self._shuffle_algo = shuffle_algo
        self._order_arguments: dict[str, Any] = {
            "shuffle": shuffle,
            "seed": shuffle_seed,
            "algorithm": shuffle_algo,
            "canonical_nodes": num_canonical_nodes,
            "window": window,
            "batching_method": batching_method,
            "sampling_method": sampling_method,
            "sampling_granularity": sampling_granularity,
            "epoch_size": None if epoch_size is None else parse_count(epoch_size),
            "mosaic": MosaicConfig(partition_algo, shuffle_block_size) if shuffle_algo in MOSAIC_ALGORITHMS else None,
        }
        OrderConfig.resolve(batch_size=1, device_batch_size=1, **self._order_arguments)  # refuses wrong values now
        _check_weights(self.streams)
        config = CacheConfig(
            limit_bytes=None if cache_limit is None else parse_bytes(cache_limit),
            validate_hash=validate_hash or "auto",
            keep_zip=keep_zip,
            shared=shared_cache,
        )
        defaults = CacheDefaults(config, retries=download_retry, timeout_s=download_timeout)
        reading = ReaderConfig(
            allow_unsafe_types=allow_unsafe_types,
            decoders=decoders,
            start_by_range=start_by_range,
            load_images=on_bad_sample == "substitute",
        )
        self.reader = SampleReader(self.streams, defaults, reading)
        self.bad_data = bad_data(on_bad_sample, on_bad_shard, quarantine, shuffle_seed)
        self.read_by_loader = False  # a StreamingDataLoader then has the position
        self._shared = SharedPosition()
        self._loaded: Position | None = None
        self._run_order: RunOrder | None = None

    # What the data is

    @property
    def snapshot(self) -> Snapshot:
        """The shards of all streams, with a digest; reads the indexes on first use."""
        return self.reader.snapshot

    @property
    def size(self) -> int:
        """Samples in all shards: the valid indices of ``dataset[i]``."""
        return self.snapshot.num_samples

    @property
    def num_samples(self) -> int:
        """Samples drawn per epoch, over all replicas."""
        return self.order(self._own_settings().order).num_samples

    def __len__(self) -> int:
        """Samples of one replica in a full epoch."""
        return math.ceil(self.num_samples / self.detect_world().num_replicas)

    def detect_world(self) -> World:
        """The world this process is in, as given or as detected now."""
        return detect_world(self.world, self.replication or 1, self.data_dimension)

    # Its order

    def batch_settings(
        self, world: World, device_batch_size: int, accumulate: int, tail: Tail, resumed: OrderConfig | None = None
    ) -> BatchSettings:
        """What a run's batches are: the order settings fill in what the user left open.

        Args:
            world: This process among all that train.
            device_batch_size: Samples of a micro-batch on one device.
            accumulate: Micro-batches of one optimizer step on each device.
            tail: What happens to an epoch's rest.
            resumed: The settings of a state that the run continues from; they fill in before any default does.
        """
        size = device_batch_size * accumulate * world.num_replicas
        order = OrderConfig.resolve(
            batch_size=size, device_batch_size=device_batch_size, world=world, resumed=resumed, **self._order_arguments
        )
        return BatchSettings(world, device_batch_size, size, tail, order)

    def order(self, config: OrderConfig) -> RunOrder:
        """The order of a run with these settings over this data; the latest is kept."""
        if self._run_order is None or self._run_order.config != config:
            self._run_order = RunOrder(self.snapshot, tuple(map(weights_of, self.streams)), config)
        return self._run_order

    def subset(self, ids: Iterable[int] | NDArray[np.int64]) -> StreamingDataset:
        """Some samples as a dataset with an order, a fingerprint and a position of its own; reads only their shards.

        Args:
            ids: Sample ids of this dataset, each at most once.
        """
        chosen = np.asarray(ids if isinstance(ids, np.ndarray) else list(ids), np.int64)
        part = copy.copy(self)
        part.__dict__ |= {
            "reader": SubsetReader(self.reader, chosen),
            "bad_data": BadData(self.bad_data.policy),
            "_shared": SharedPosition(),
            "_loaded": None,
            "_run_order": None,
        }
        return part

    # Random access

    def __getitem__(self, index: Any) -> Any:
        """Read by index: one sample for an int (negative ones from the end), a list for a slice, list or array."""
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(self.size))]
        if isinstance(index, (list, tuple)) or (isinstance(index, (np.ndarray, torch.Tensor)) and index.ndim):
            return [self[i] for i in np.asarray(index).reshape(-1).tolist()]
        if isinstance(index, bool) or not hasattr(index, "__index__"):
            raise TypeError(f"an index is a whole number, a slice, or a list or array of them; found {index!r}")
        number, size = operator.index(index), self.size
        if not -size <= number < size:
            raise IndexError(f"the dataset has {size} samples: index {number} is not in [-{size}, {size})")
        return self.reader.sample(number % size)

    def read_batch(
        self, ids: Iterable[int] | NDArray[np.int64], out: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """Gather samples as columns: arrays for numbers and arrays of fixed shape, lists for the rest.

        Args:
            ids: Sample ids, each in [0, size).
            out: Writable buffers for fixed-size columns, by column name.
        """
        array = np.asarray(ids if isinstance(ids, np.ndarray) else list(ids), dtype=np.int64)
        if not (array.view(np.uint64) < self.size).all():  # negative ids are huge then
            raise IndexError(f"sample ids must be in [0, {self.size}); found {array.min()} to {array.max()}")
        return self.reader.batch(array, out)

    def deliver(self, info: BatchInfo, collate: Callable[[list[Any]], Any] | None = None) -> Any:
        """Read, transform and collate one micro-batch.

        Gathered as columns where nothing asks for single samples: no transform, no collate function of the user's,
        no `__getitem__` of a subclass.
        """
        if self.transform is None and collate is None and not self._reads_by_item:
            return collate_columns(self.reader.batch(info.delivered))
        return (collate or collate_samples)(self._samples(info))

    @property
    def _reads_by_item(self) -> bool:
        return type(self).__getitem__ is not StreamingDataset.__getitem__

    def _samples(self, info: BatchInfo) -> list[Any]:
        read = self.__getitem__ if self._reads_by_item else self.reader.sample
        if self.transform is None and not self._reads_by_item:
            return [read(sample_id) for sample_id in info.delivered.tolist()]
        samples = []
        with undisturbed_generators():
            for sample_id, position in zip(info.delivered.tolist(), info.positions.tolist(), strict=True):
                seed_sample(self.shuffle_seed, info.epoch, position)
                sample = read(sample_id)
                samples.append(sample if self.transform is None else self.transform(sample))
        return samples

    # Iteration without a loader of ours, and its position

    def __iter__(self) -> Iterator[Any]:
        """Yield this rank's samples; in a worker of a plain DataLoader, the samples of that worker's batches."""
        worker = get_worker_info()
        if worker is not None and worker.num_workers > 1 and self.batch_size is None:
            raise ValueError(
                f"{worker.num_workers} DataLoader workers deal batches among them, so the dataset must know the batch "
                "size: pass batch_size= to StreamingDataset, the same as to the DataLoader, or use StreamingDataLoader"
            )
        self.reader.require_samples()
        index, count = (worker.id, worker.num_workers) if worker is not None else (0, 1)
        key = worker.seed - worker.id if worker is not None else os.getpid()
        settings = self._own_settings()
        start = self._shared.begin(key or 1, index)
        plan = settings.plan(self, start)
        own = micro_batches(plan, settings.device_batch_size, index, count)
        for info in read_ahead(self.reader, plan, own, self.predownload, settings.device_batch_size):
            yield from readable(self, info, self._samples)[0]

    def warm(self, steps: int) -> int:
        """Fetch, before training, the shards of this rank's first optimizer steps from where the next iteration starts.

        For a run through a `StreamingDataLoader`, use its `warm`, which knows the global batch. Returns their number.
        """
        return warm(self.reader, self._own_settings().plan(self, self._shared.upcoming), steps)

    def _own_settings(self, state: Mapping[str, Any] | None = None) -> BatchSettings:
        """What this rank's batches are where no loader of ours says it."""
        resumed = self._loaded.order if self._loaded is not None else None
        if state is not None:
            resumed = order_in(state)
        return self.batch_settings(self.detect_world(), self.batch_size or 1, 1, "pad", resumed)

    def state_dict(self, num_samples: int, from_beginning: bool) -> dict[str, Any]:
        """The position after so many samples, in the form that `load_state_dict` reads.

        Args:
            num_samples: Samples trained on over all replicas, filler excluded.
            from_beginning: Whether they count from the beginning of the epoch, or from where this iteration started.
        """
        if self.read_by_loader:
            raise StateError(
                "the position of a run is kept by who hands out its batches, and this dataset is read by a "
                "StreamingDataLoader: save loader.state_dict() instead; under Composer, hand the trainer data_spec(...)"
            )
        settings = self._own_settings()
        run = self.order(settings.order)
        began = self._shared.current
        start = began or self._shared.upcoming
        position = Position.start(run, batch_size=settings.global_batch_size, tail=settings.tail, epoch=start.epoch)
        if began is not None and num_samples == 0 and from_beginning:
            return position.next_epoch().to_state()  # asked between epochs: the one that was iterated is over
        reached = num_samples if from_beginning else start.position + num_samples
        return position.advanced(run, min(reached, run.num_samples)).to_state()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state: the next iteration starts there.

        Raises:
            StateError: It cannot be continued over this data under these settings; says what differs.
        """
        self._loaded = position_in(state, self, self._own_settings(state))
        self._shared.upcoming = Start.of(self._loaded)


def _check_weights(streams: Sequence[Stream]) -> None:
    relative = [stream for stream in streams if stream.proportion is not None]
    if relative and len(relative) < len(streams):
        others = [stream for stream in streams if stream.proportion is None]
        raise ValueError(
            "the streams of a mix are weighted all by proportion, or all by repeat or choose; found a proportion for "
            f"{relative} and none for {others}. Give every stream a proportion, or none"
        )
