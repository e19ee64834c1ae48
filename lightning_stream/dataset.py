"""`StreamingDataset`: streams, an order over their samples, random access; the name and arguments MDS users know."""

from __future__ import annotations

import copy
import math
import operator
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import IterableDataset

from lightning_stream.cache import CacheConfig
from lightning_stream.formats.sizes import parse_bytes, parse_count
from lightning_stream.loading.distributed import Dimensions, WorldLike
from lightning_stream.loading.plain import PlainIterations
from lightning_stream.loading.source import SampleSource, Transform
from lightning_stream.order import MosaicConfig, OrderConfig
from lightning_stream.order.config import MOSAIC_ALGORITHMS
from lightning_stream.reading.bad_samples import Policy, bad_data
from lightning_stream.reading.reader import ReaderConfig, SampleReader
from lightning_stream.reading.stream import CacheDefaults, Stream


class _Readable:
    """An attribute of ours that a subclass may take for itself: what it stores under this name never meets us."""

    def __init__(self, read: Callable[[SampleSource], Any]) -> None:
        self._read = read

    def __get__(self, dataset: StreamingDataset | None, owner: type) -> Any:
        return self if dataset is None else self._read(dataset._streaming_source)  # noqa: SLF001 - its own class


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
            the global generators of random, numpy and torch, which are seeded for each sample by its place in the
            run; or take a second argument `rng`, a `numpy.random.Generator` of that place, which is faster.
        decoders: Column name to what turns its stored bytes into a value, instead of its encoding; e.g.
            ``{"image": lightning_stream.formats.jpeg.decode_jpeg}`` for arrays instead of PIL images.
        window: Shards active at once in each canonical node; None for about 128 over all of them.
        world: Which processes train together: a `World`, a ``(rank, num_ranks)`` pair or a device mesh; None to detect
            it when needed.
        data_dimension: With a device mesh, the name or names of its data-parallel dimensions.
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
        data_dimension: Dimensions = "dp",
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
        order_arguments: dict[str, Any] = {
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
        OrderConfig.resolve(batch_size=1, device_batch_size=1, **order_arguments)  # refuses wrong values now
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
        # All that reading needs is in these two: the attributes of a subclass never meet them.
        self._streaming_source = SampleSource(
            SampleReader(self.streams, defaults, reading),
            bad_data(on_bad_sample, on_bad_shard, quarantine, shuffle_seed),
            order_arguments,
            shuffle_seed,
            predownload=predownload,
            transform=transform,
            world=world,
            replication=replication,
            data_dimension=data_dimension,
        )
        self._streaming_plain = PlainIterations(batch_size)

    # What the data is

    reader = _Readable(lambda source: source.reader)
    snapshot = _Readable(lambda source: source.snapshot)
    order = _Readable(lambda source: source.order)
    transform = _Readable(lambda source: source.transform)

    @property
    def size(self) -> int:
        """Samples in all shards: the valid indices of ``dataset[i]``."""
        return self._streaming_source.snapshot.num_samples

    @property
    def num_samples(self) -> int:
        """Samples drawn per epoch, over all replicas."""
        return self._streaming_plain.order(self._streaming_source).num_samples

    def __len__(self) -> int:
        """Samples of one replica in a full epoch."""
        num_samples = self._streaming_plain.order(self._streaming_source).num_samples
        return math.ceil(num_samples / self._streaming_source.detect_world().num_replicas)

    def subset(self, ids: Iterable[int] | NDArray[np.int64]) -> StreamingDataset:
        """Some samples as a dataset with an order, a fingerprint and a position of its own; reads only their shards.

        Args:
            ids: Sample ids of this dataset, each at most once.
        """
        part = copy.copy(self)
        vars(part).update(
            _streaming_source=self._streaming_source.subset(ids),
            _streaming_plain=PlainIterations(self._streaming_plain.batch_size),
        )
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
        return self.get_item(number % size)

    def get_item(self, sample_id: int, retry: int = 7) -> Any:  # noqa: ARG002 - mosaicml-streaming's argument
        """Read one sample, in [0, size). A subclass may override it; so may it override ``__getitem__``.

        Args:
            sample_id: The sample.
            retry: Taken as mosaicml-streaming takes it; the store's own retries suffice.
        """
        return self._streaming_source.reader.sample(sample_id)

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
        return self._streaming_source.reader.batch(array, out)

    # Iteration without a loader of ours, and its position

    def __iter__(self) -> Iterator[Any]:
        """Yield this rank's samples; in a worker of a plain DataLoader, the samples of that worker's batches."""
        return self._streaming_plain.iterate(self, source_of(self))

    def set_epoch(self, epoch: int) -> None:
        """Start the next iteration at the beginning of this epoch; a loaded state is kept.

        Accelerate calls it before each iteration, with a count of its own.
        """
        self._streaming_plain.set_epoch(self, self._streaming_source, epoch)

    def warm(self, steps: int) -> int:
        """Fetch, before training, the shards of this rank's first optimizer steps from where the next iteration starts.

        For a run through a `StreamingDataLoader`, use its `warm`, which knows the global batch. Returns their number.
        """
        return self._streaming_plain.warm(self._streaming_source, steps)

    def state_dict(self, num_samples: int | None = None, from_beginning: bool = True) -> dict[str, Any]:
        """The position after so many samples, in the form that `load_state_dict` reads.

        Args:
            num_samples: Samples trained on over all replicas, padding excluded; None for those yielded in this
                process, as torchdata's StatefulDataLoader asks.
            from_beginning: Whether they count from the beginning of the epoch, or from where this iteration started.
        """
        return self._streaming_plain.state_dict(self._streaming_source, num_samples, from_beginning)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state: the next iteration starts there; at an epoch's end it is that epoch's empty rest.

        Raises:
            StateError: It cannot be continued over this data under these settings; says what differs.
        """
        self._streaming_plain.load_state_dict(self._streaming_source, state)


def source_of(dataset: StreamingDataset) -> SampleSource:
    """What a dataset reads, as a value; with the subclass's own way to read a sample, if it has one."""
    kind = type(dataset)
    own = kind.__getitem__ is not StreamingDataset.__getitem__ or kind.get_item is not StreamingDataset.get_item
    source = dataset._streaming_source  # noqa: SLF001 - the one door to it
    return replace(source, read_one=dataset.__getitem__) if own else source


def plain_iterations_of(dataset: StreamingDataset) -> PlainIterations:
    """The position of a dataset that is read without a `StreamingDataLoader`."""
    return dataset._streaming_plain  # noqa: SLF001 - the one door to it


def _check_weights(streams: Sequence[Stream]) -> None:
    relative = [stream for stream in streams if stream.proportion is not None]
    if relative and len(relative) < len(streams):
        others = [stream for stream in streams if stream.proportion is None]
        raise ValueError(
            "the streams of a mix are weighted all by proportion, or all by repeat or choose; found a proportion for "
            f"{relative} and none for {others}. Give every stream a proportion, or none"
        )
