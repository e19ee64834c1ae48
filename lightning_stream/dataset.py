"""`StreamingDataset` and `LocalDataset`, with the names and arguments that MDS users know."""

from __future__ import annotations

import copy
import math
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from inspect import signature
from math import gcd
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Dataset, IterableDataset

from lightning_stream.cache import CacheConfig
from lightning_stream.distributed import WorldLike
from lightning_stream.errors import by_name, checking, refuse_overrides
from lightning_stream.formats.sizes import parse_bytes, parse_count, whole_number
from lightning_stream.former_names import parts_of, taking_former
from lightning_stream.loading.describe import as_html, described, described_without_batches
from lightning_stream.loading.indexed import NEVER_CALLED, IndexedSamples, Readable
from lightning_stream.loading.packing import Bucketing, Packing
from lightning_stream.loading.plain import PlainIterations
from lightning_stream.loading.randomness import READING, SeededCall
from lightning_stream.loading.source import SampleSource
from lightning_stream.order import MosaicConfig, OrderConfig, Schedule, StreamWeights
from lightning_stream.order.balance import Cost
from lightning_stream.order.bitmap import as_ids
from lightning_stream.order.buckets import LengthBuckets
from lightning_stream.order.config import MOSAIC_ALGORITHMS, SAMPLER, UNIFORM
from lightning_stream.order.mosaic.partitions import PARTITIONS
from lightning_stream.order.replay import Replay
from lightning_stream.order.rules import count, violations
from lightning_stream.order.run import check_weights
from lightning_stream.questions import Occurrence
from lightning_stream.questions.describe import PUBLIC_NAMES, Chain
from lightning_stream.reading.bad_samples import BadData, BadDataPolicy, OnBad
from lightning_stream.reading.filters import Filters, Keep
from lightning_stream.reading.mapped import MapStream
from lightning_stream.reading.shard_table import ReaderConfig
from lightning_stream.reading.stream import CacheDefaults, Stream, labels_of, name_of, weights_of, with_split
from lightning_stream.reading.switched import reader_of

_SHOWN_STREAMS = 4
_FIXED = """batch_size batching_method cache_limit num_canonical_nodes partition_algo predownload replication
sampling_granularity sampling_method shuffle shuffle_algo shuffle_block_size shuffle_seed"""  # attributes of arguments


class StreamingDataset(IndexedSamples, IterableDataset[Any]):
    """Samples streamed from one or several datasets in an order that is elastic, deterministic and resumable.

    Iterated through a `StreamingDataLoader` (or a trainer's wrapper of one), every global batch is the same on any
    number of nodes, ranks and workers. ``dataset[i]`` reads any sample. Nothing is read before the first use.

    Example::

        dataset = StreamingDataset("s3://bucket/train", shuffle=True, cache_limit="100gb")
        loader = StreamingDataLoader(dataset, batch_size=32, num_workers=4)

    Args:
        remote, local, split, version, format, columns, media_root: See `Stream`.
        streams: Several streams to mix, or their paths and URLs, instead of `remote`, `local` and `split`.
        download_retry: How often a failed request is tried again; None for the store's default.
        download_timeout: Longest silence on a connection, in seconds; None for the store's default.
        validate_hash: Name of the hash to check fetched files with; None checks the hashes that the index has.
        keep_zip: Whether compressed files stay in the cache after decompression.
        epoch_size: Samples per epoch, e.g. ``"100k"``; None to derive it from the streams' weights.
        predownload: Samples each worker fetches ahead of what it delivers; None for eight batches, and more while
            connections would be idle and nothing is evicted. Or a mapping with these ``"samples"`` and ``"by_range"``:
            whether samples whose shards are still being fetched may be read by byte ranges. None does so where that is
            faster and takes at most 5 % more requests, unless bad data is substituted; True wherever a range costs less
            than the shard; False never, as with `validate_hash`. The bytes are compared with the verified shard before
            a state is taken and when an iteration ends: a difference is an error.
        cache_limit: Bytes (``"10gb"``) that the cache folders of all streams may hold together; None for no limit.
        sampling_method: ``"balanced"`` draws again each epoch, ``"fixed"`` the same samples always.
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
            the global generators of random, numpy and torch, which are seeded for each sample by its position
            in the run; or take a second argument `rng`, a `numpy.random.Generator` of that position, which is faster.
        decoders: Column name to what turns its stored bytes into a value, instead of its encoding; e.g.
            ``{"image": lightning_stream.decode_jpeg}`` for arrays instead of PIL images.
        window: Shards active at once in each canonical node; None for about 128 in total. Or a mapping with these
            ``"shards"`` and ``"quick_start"``: whether an epoch begins with the beginnings of its first shards, so that
            the first batches need not wait for whole ones, and the window grows over the next batches. None: as the
            state that a run continues from, True for a new run.
        world: Which processes train together: a `World`, a ``(rank, num_ranks)`` pair, a device mesh whose data
            dimension is ``"dp"`` (or ``dp_replicate`` and ``dp_shard``), or a pair of a mesh and the name or names of
            its data-parallel dimensions, e.g. ``(mesh, ("replicate", "shard"))``; None to detect it when needed.
        shared_cache: Whether other users of the machine may share the cache folder.
        on_bad: ``"raise"``, or ``"substitute"`` to deliver another sample of the stream where one cannot be
            decoded: the same one in every world, so that all ranks keep step.
            Also where its shard is missing in the store, or has other bytes than the index says. Or a mapping with
            these words for ``"sample"`` and ``"shard"``, ``"raise"`` where it has none, and ``"quarantine"``: the file
            that lists what was bad, a JSON object a line, by default in the first cache folder.
        balance: Which samples of a global batch each replica computes: None for those of its own canonical nodes,
            ``"tokens"`` for equally many tokens, an expression of lengths such as ``"tokens ** 2 + 40 * images"``, or a
            function from lengths (int64[n]) to costs (n numbers, the same on every machine), e.g.
            ``lambda tokens: tokens * tokens``, for equal costs. Of packed documents, lengths are those in the row; by
            other lengths than they are packed by, each part of a document costs as the whole. Global batches, numbers
            of samples and states are the same with any of them, and every machine reads the shards that it reads
            without: `num_canonical_nodes` = 1 balances over all machines, but each of them reads all shards.
        forget: Ids of samples that are never delivered, but others of their streams in their places. A run continues so
            from a state before it saw any of them: `plan_replay` finds the newest.
        pack: How documents, or whole samples, are packed into rows of one length, see `Packing`; a batch then has rows.
        schedule: The streams' weights over the run, by their names: a `Schedule`, or its points alone, in samples.
        bucket_by: Name or expression of lengths, e.g. ``"tokens"``: each global batch then has samples of similar
            lengths, so that padding them to the longest costs little. The lengths must be known, see
            `MDSWriter(lengths=...)`. Or a mapping with these ``"lengths"`` and ``"window"``: the samples that are
            sorted together, by default 16,384, or 64 batches where these are more.
        batch_tokens: Instead of batch sizes: tokens of a global batch at most, over all devices and with all samples
            padded to the longest. Each batch has as many samples of similar lengths as there is room for; the number
            of batches is the same on every rank. `bucket_by` defaults to ``"tokens"``. Or a mapping with these
            ``"tokens"`` and ``"multiple"``: the sizes of all batches are multiples of it, so that numbers of devices
            that divide it get equal shares, and all others padding; by default the largest of 1, 2, 4, 8, 16 that the
            longest samples leave room for.
        stream_config: Further arguments of the stream that is made of `remote` and `local`, e.g.
            ``{"options": {"endpoint_url": ...}}``.
        filter: Function of a sample (a dict, before `transform`) that returns whether it is kept. It is evaluated once
            per machine, in parallel, and its answers are kept in the first cache folder; a changed function is
            evaluated again. A sample's answer must always be the same. Or a mapping with this function as ``"sample"``
            and, for which no sample is read, ``"lengths"``: the least and greatest that are kept, None for no limit, by
            the name of a length, ``{"tokens": (64, 4096)}``, or a function from the array of all samples' lengths to a
            bool array, of several arrays with a tuple of names; and ``"exclude_ids"``: ids of samples that are not
            kept, numbers or a file with one a line or of numpy (``.npy``).
        stream_name: Only ``"stream"``: streams of a class of your own are passed as `streams`.

    The ids of samples count those that are kept; `original_ids` gives their ids in the streams, which are those of
    ``exclude_ids`` and of the quarantine. Whole numbers may be floats (``1e9``). The arguments of mosaicml-streaming's
    dataset are attributes, too.

    Raises:
        ValueError: Settings that contradict each other.
        TypeError: An unknown argument; or a subclass overrides a method that would never be called.
    """

    @taking_former
    @checking
    def __init__(
        self,
        remote: str | os.PathLike[str] | None = None,
        *,
        streams: Sequence[Stream | str] | None = None,
        local: str | os.PathLike[str] | None = None,
        split: str | None = None,
        download_retry: int | None = None,
        download_timeout: float | None = None,
        validate_hash: str | None = None,
        keep_zip: bool | None = False,
        epoch_size: float | str | None = None,
        predownload: float | Mapping[str, Any] | None = None,
        cache_limit: float | str | None = None,
        sampling_method: str = "balanced",
        sampling_granularity: float = 1,
        partition_algo: str = "relaxed",
        num_canonical_nodes: float | None = None,
        batch_size: float | None = None,
        shuffle: bool = False,
        shuffle_algo: str | None = None,
        shuffle_seed: float = 9176,
        shuffle_block_size: float | None = None,
        batching_method: str = "random",
        allow_unsafe_types: bool = False,
        replication: float | None = None,
        bucket_by: str | Mapping[str, Any] | None = None,
        batch_tokens: float | Mapping[str, Any] | None = None,
        stream_name: str = "stream",
        stream_config: Mapping[str, Any] | None = None,
        transform: Callable[..., Any] | None = None,
        decoders: Mapping[str, Callable[[bytes], Any]] | None = None,
        window: float | Mapping[str, Any] | None = None,
        world: WorldLike = None,
        shared_cache: bool = False,
        on_bad: OnBad = "raise",
        pack: Packing | None = None,
        version: str | int | Sequence[tuple[int, str | int]] | None = None,
        format: str | None = None,  # noqa: A002 - the word for it
        columns: Mapping[str, str] | Sequence[str] | None = None,
        media_root: str | os.PathLike[str] | None = None,
        balance: str | Cost | None = None,
        forget: Iterable[int] | None = None,
        filter: Keep | Mapping[str, Any] | None = None,  # noqa: A002 - the word for it
        schedule: Schedule | Sequence[tuple[float, Mapping[str, float]]] | None = None,
    ) -> None:
        refuse_overrides(type(self), IndexedSamples, NEVER_CALLED)
        single: dict[str, Any] = {"remote": remote, "local": local, "split": split, "version": version}
        single |= {"format": format, "columns": columns, "media_root": media_root}
        self.streams = _chosen_streams(streams, stream_name, single, stream_config)
        ahead = parts_of("predownload", predownload)
        counts = _whole_numbers(batch_size=batch_size, predownload=ahead.get("samples"), replication=replication)
        self.batch_size, self.predownload, self.replication = counts
        counts = _whole_numbers(shuffle_block_size=shuffle_block_size, num_canonical_nodes=num_canonical_nodes)
        self.shuffle_block_size, self.num_canonical_nodes = counts
        self.shuffle = bool(shuffle)
        self.shuffle_seed = whole_number(shuffle_seed)
        self.shuffle_algo = shuffle_algo or "window"
        self.sampling_method = sampling_method
        self.sampling_granularity = whole_number(sampling_granularity)
        self.batching_method = batching_method
        self.partition_algo = partition_algo
        self.cache_limit = None if cache_limit is None else parse_bytes(cache_limit, "cache_limit") or None
        self.allow_unsafe_types = allow_unsafe_types
        active = parts_of("window", window)
        order_arguments: dict[str, Any] = {
            "shuffle": self.shuffle,
            "seed": self.shuffle_seed,
            "algorithm": shuffle_algo,
            "canonical_nodes": self.num_canonical_nodes,
            "window": whole_number(active.get("shards")),
            "quick_start": active.get("quick_start"),
            "batching_method": batching_method,
            "sampling_method": sampling_method,
            "sampling_granularity": self.sampling_granularity,
            "epoch_size": None if epoch_size is None else parse_count(epoch_size, "epoch_size") or None,
            "mosaic": _mosaic_settings(shuffle_algo, partition_algo, self.shuffle_block_size),
            "schedule": _bound_schedule(schedule, self.streams),
        }
        buckets = _bucketing(parts_of("bucket_by", bucket_by), parts_of("batch_tokens", batch_tokens))
        _check_order(order_arguments, self.streams, self.batch_size or 1, pack, balance, buckets, forget)
        bad = BadData(BadDataPolicy.of(on_bad, self.shuffle_seed), names=_columns_of_rows(pack))
        config = CacheConfig(self.cache_limit, validate_hash or None, keep_zip=bool(keep_zip), shared=shared_cache)
        filters = Filters(**parts_of("filter", filter), policy=bad.policy)
        reading = ReaderConfig(
            allow_unsafe_types=allow_unsafe_types,
            decoders=by_name("decoders must be functions", decoders, "{'image': decode_jpeg}", calls=True),
            start_by_range=ahead.get("by_range", False if bad.policy.substitutes else None),
            load_images=bad.policy.sample == "substitute",
        )
        # All that reading needs is in these two: the attributes of a subclass never meet them.
        self._streaming_source = SampleSource(
            filters.applied(reader_of(self.streams, CacheDefaults(config, download_retry, download_timeout), reading)),
            bad,
            order_arguments,
            self.shuffle_seed,
            predownload=self.predownload,
            transform=None if transform is None else SeededCall(transform, self.shuffle_seed),
            world=world,
            replication=self.replication,
            packing=pack,
            balance=balance,
            buckets=buckets,
            forget=None if forget is None else as_ids(forget, "forget").astype(np.int64),
        )
        self._streaming_plain = PlainIterations(self._streaming_source, self.batch_size)

    def __setattr__(self, name: str, value: Any) -> None:
        here = vars(self).get(name) if name in _FIXED.split() else None
        if isinstance(value, type(here)) and value != here:  # else it is something of a subclass's own
            text = f"found {name} set to {value!r} afterwards"
            warnings.warn(f"arguments of a dataset count when it is made; {text}. Pass it then", stacklevel=2)
        super().__setattr__(name, value)

    def __repr__(self) -> str:
        reader = self._streaming_source.reader
        order = dict(self._streaming_source.order_arguments)
        snapshot = vars(reader).get("snapshot")  # only if it was read already
        known = [] if snapshot is None else [f"{snapshot.num_samples:,} samples in {snapshot.num_shards:,} shards"]
        arguments = {PUBLIC_NAMES.get(name, name): value for name, value in order.items() if name != "mosaic"}
        arguments["batch_size"] = self._streaming_plain.batch_size
        quick_start = arguments.pop("quick_start")
        if quick_start is not None:
            arguments["window"] = {"shards": arguments["window"], "quick_start": quick_start}
        defaults = signature(StreamingDataset).parameters
        settings = [f"{name}={value!r}" for name, value in arguments.items() if value != defaults[name].default]
        streams = [repr(stream) for stream in reader.streams[:_SHOWN_STREAMS]]
        count = len(reader.streams)
        more = [f"... {count:,} streams"] if count > _SHOWN_STREAMS else []
        return f"{type(self).__name__}({', '.join([*streams, *more, *known, *settings])})"

    @Readable
    def batch_tokens(self) -> int | None:
        """Tokens of a global batch at most; None where batches have one number of samples."""
        return self._streaming_source.batch_tokens

    @Readable
    def epoch_size(self) -> int:
        """Samples drawn per epoch, over all replicas."""
        return self._streaming_plain.order().num_samples

    @Readable
    def initial_physical_nodes(self) -> int | None:
        """Nodes of the run's first start, for mosaicml-streaming's orders; None for the native one."""
        mosaic = self._streaming_plain.settings().order.mosaic
        return None if mosaic is None else mosaic.initial_physical_nodes

    @property
    def next_epoch(self) -> int:
        """The epoch that the next iteration begins in; set it to begin another."""
        return self._streaming_plain.next_epoch

    @next_epoch.setter
    def next_epoch(self, epoch: int) -> None:
        self._streaming_plain.next_epoch = epoch

    def __bool__(self) -> bool:
        """Whether it has samples; epochs of packed rows have no length."""
        return self._streaming_source.snapshot.num_samples > 0

    def __len__(self) -> int:
        """Samples of one replica in a full epoch."""
        if self._streaming_source.packing is not None:
            raise TypeError("the epochs of packed rows differ in length, so the dataset has none; see Packing")
        num_samples = self._streaming_plain.order().num_samples
        return math.ceil(num_samples / self._streaming_source.detect_world().num_replicas)

    length = Readable(__len__)

    def subset(self, ids: Iterable[int] | NDArray[np.int64]) -> StreamingDataset:
        """Make a dataset of some samples, with its own order, fingerprint and position; it reads only their shards.

        Args:
            ids: Sample ids of this dataset, each at most once.
        """
        part = copy.copy(self)
        source = self._streaming_source.subset(ids)
        plain = PlainIterations(source, self._streaming_plain.batch_size)
        vars(part).update(_streaming_source=source, _streaming_plain=plain)
        return part

    # Questions about the run

    _repr_html_ = as_html

    def describe(self, count_rows: bool | None = None) -> Chain:
        """The chain from the streams to this rank's batches: settings, counts and a digest of every stage.

        `print` shows it on one screen. Of a dataset that a `StreamingDataLoader` reads, it is that of the loader;
        without one, and without a `batch_size`, the chain ends before the batches. It reads the indexes, and evaluates
        the filters.

        Args:
            count_rows: Whether to plan the epoch where documents are packed or batches have a budget of tokens, about 3
                million documents per second, which counts rows, batches and padding; None for up to a million.

        Example::

            print(dataset.describe())
            dataset.describe()["streams"].counts["samples"]
        """
        loader = self._streaming_plain.loader
        if loader is not None:
            return loader.describe(count_rows)
        source = self._streaming_source
        plain = self._streaming_plain
        settings = plain.settings()
        epoch = plain.next_epoch
        if plain.batch_size is not None or source.batch_tokens is not None:
            return described(source, settings, epoch, count_rows)
        return described_without_batches(source, settings, epoch)

    def where(self, sample_id: int, epochs: Iterable[int] | None = None) -> list[Occurrence]:
        """When and where the training run sees a sample, done or to come: ``(epoch, step, rank, micro_batch, row)``.

        It is computed, not recorded: for this world and batch size, and the changes of the batch size in the current
        epoch, which is what `epochs` defaults to. Padding does not count.

        Raises:
            ValueError: There is no such sample or epoch; or the dataset has no batch size, and no loader has begun to
                read it.

        Example: ``dataset.where(7, epochs=range(3))`` is ``[Occurrence(epoch=0, step=12, rank=3, ...), ...]``.
        """
        return self._streaming_plain.where(sample_id, epochs)

    def plan_replay(self, ids: Iterable[int], states: Sequence[Mapping[str, Any]]) -> Replay:
        """What it takes that a run has never seen some samples: the newest of its states that is before all of them.

        Continue from it with ``forget=ids``: the run is then the same as if it had begun so. Samples delivered in place
        of bad ones are not searched.

        Example: ``states[dataset.plan_replay([7], states).checkpoint]``
        """
        return self._streaming_source.plan_replay(ids, states)

    # Iteration without a loader of ours, and its position

    def __iter__(self) -> Iterator[Any]:
        """Yield this rank's samples; in a worker of a plain DataLoader, the samples of that worker's batches."""
        return self._streaming_plain.iterate(source_of(self))

    def set_epoch(self, epoch: int) -> None:
        """Start the next iteration at the beginning of this epoch; a loaded state is kept.

        Until then, states are those of the iteration in progress. Accelerate calls it before each iteration, with a
        count of its own.
        """
        self._streaming_plain.set_epoch(epoch)

    def warm(self, steps: int) -> int:
        """Fetch, before training, the shards of this rank's first optimizer steps from where the next iteration starts.

        For a run through a `StreamingDataLoader`, use its `warm`, which knows the global batch. Returns their number.
        """
        return self._streaming_plain.warm(steps)

    def state_dict(self, num_samples: int | None = None, from_beginning: bool = True) -> dict[str, Any]:
        """The position after so many samples, in the form that `load_state_dict` reads.

        Args:
            num_samples: Samples trained on over all replicas, padding excluded: 0 between epochs is where the next one
                begins. None for those yielded in this process, as torchdata's StatefulDataLoader asks.
            from_beginning: Whether they count from the beginning of the epoch, or from where this iteration started.
        """
        return self._streaming_plain.state_dict(num_samples, from_beginning)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state: the next iteration starts there; at an epoch's end it is that epoch's empty rest.

        Raises:
            StateError: It cannot be continued over this data with these settings; the message names the difference.
        """
        self._streaming_plain.load_state_dict(state)


class LocalDataset(IndexedSamples, Dataset[Any]):
    """Random access to a dataset in a local folder: no order, no cache, nothing to resume.

    A subclass may override ``get_item`` or ``__getitem__``. Example: ``LocalDataset("data/train")[7]``.

    Args:
        local: The folder that holds index.json.
        split: Sub-folder of it.
        allow_unsafe_types: Whether to decode the ``pkl`` encoding, which runs code that the data names.
    """

    @checking
    def __init__(
        self, local: str | os.PathLike[str], split: str | None = None, allow_unsafe_types: bool = False
    ) -> None:
        refuse_overrides(type(self), IndexedSamples, NEVER_CALLED)
        self.local = os.fspath(local)
        self.split = split or ""
        dataset = StreamingDataset(local=local, split=split, allow_unsafe_types=allow_unsafe_types)
        self._streaming_source = dataset._streaming_source  # noqa: SLF001 - the same reader

    def __len__(self) -> int:
        return self._streaming_source.snapshot.num_samples

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.local!r}, split={self.split!r})"


def source_of(dataset: StreamingDataset) -> SampleSource:
    """The source of a dataset, with the subclass's own way to read a sample, if it has one."""
    kind = type(dataset)
    overrides = kind.__getitem__ is not StreamingDataset.__getitem__ or kind.get_item is not StreamingDataset.get_item
    source = dataset._streaming_source  # noqa: SLF001 - the one door to it
    if not overrides:
        return source
    bad = replace(source.bad_data, names=None)  # its own way reads whole samples
    return replace(source, bad_data=bad, read_one=SeededCall(dataset.__getitem__, source.seed ^ READING))


def plain_iterations_of(dataset: StreamingDataset) -> PlainIterations:
    """The position of a dataset that is read without a `StreamingDataLoader`."""
    return dataset._streaming_plain  # noqa: SLF001 - the one door to it


# The arguments of a dataset


def _whole_numbers(**arguments: float | None) -> list[int | None]:
    """Numbers that may be floats (``1e9``) or None, as whole numbers; raise ValueError for others."""
    numbers = {name: whole_number(value) for name, value in arguments.items()}
    rules = {name: count(int(name != "predownload"), optional=True) for name in numbers}
    if problems := violations(numbers, rules):
        raise ValueError(" ".join(problems))
    return list(numbers.values())


def _bound_schedule(schedule: Any, streams: Sequence[Stream]) -> Schedule | None:
    """The schedule of a mixture, given as itself or by its points, for streams in this order."""
    if schedule is None:
        return None
    return (schedule if isinstance(schedule, Schedule) else Schedule(schedule)).of_streams(labels_of(streams))


def _bucketing(by: Mapping[str, Any], budget: Mapping[str, Any]) -> Bucketing | None:
    """How samples of similar lengths come together; None if they do not. ValueError for parts that lack another."""
    numbers = {
        "window of bucket_by": by.get("window"),
        "tokens of batch_tokens": budget.get("tokens"),
        "multiple of batch_tokens": budget.get("multiple"),
    }
    window, tokens, multiple = _whole_numbers(**numbers)
    lengths = by.get("lengths")
    if tokens is None and multiple is not None:
        raise ValueError(
            f"the multiple of batch_tokens needs its tokens; found {dict(budget)}. Pass e.g. "
            f'{{"tokens": 65_536, "multiple": {multiple}}}'
        )
    if lengths is None and tokens is None:
        if window is None:
            return None
        raise ValueError(
            f"the window of bucket_by needs its lengths; found {dict(by)}. Pass e.g. "
            f'{{"lengths": "tokens", "window": {window}}}'
        )
    return Bucketing("tokens" if lengths is None else lengths, window, tokens, multiple)


def _columns_of_rows(pack: Packing | None) -> tuple[str, ...] | None:
    """The columns that packed rows are made of; None where samples are read as a whole."""
    return None if pack is None or pack.column is None else (pack.column, *pack.columns)


def _mosaic_settings(algorithm: str | None, partition: str, block_size: int | None) -> MosaicConfig | None:
    """The settings of the orders of mosaicml-streaming; None for the native one. ValueError for a wrong partition."""
    if partition not in PARTITIONS:
        raise ValueError(f"partition_algo is one of {', '.join(PARTITIONS)}; found {partition!r}. Correct it")
    return MosaicConfig(partition, block_size) if algorithm in MOSAIC_ALGORITHMS else None


def _check_order(
    arguments: Mapping[str, Any],
    streams: Sequence[Stream],
    batch_size: int,
    pack: Packing | None,
    balance: object,
    buckets: Bucketing | None,
    forget: object,
) -> None:
    """Raise ValueError for settings of an order that are wrong, or contradict each other or the streams' weights."""
    if not isinstance(pack, Packing | None):
        raise TypeError(f"pack is a Packing; found {pack!r}. Pass e.g. Packing(row_length=2048)")
    rows = None if pack is None else pack.rows("")
    sorted_by = None if buckets is None else LengthBuckets(1, 1, buckets.batch_tokens)
    settings = {**arguments, "packing": rows, "buckets": sorted_by, "forgotten": None if forget is None else ""}
    order = OrderConfig.resolve(batch_size=1, device_batch_size=1, **settings)
    if order.algorithm in (UNIFORM, SAMPLER) and not isinstance(streams[0], MapStream):
        raise ValueError(
            f"shuffle_algo is one of window, {', '.join(MOSAIC_ALGORITHMS)} where data come in shards; found "
            f"{order.algorithm!r}, the order of a StatefulDataLoader. Omit it"
        )
    weights = tuple(map(weights_of, streams))
    if order.schedule is not None or any(weight != StreamWeights() for weight in weights):
        check_weights(order, [*map(name_of, streams)], weights)
    check_blocks(arguments, batch_size, batch_size)
    if not (balance is None or isinstance(balance, str) or callable(balance)):
        raise TypeError(f"balance is the name of lengths or a function of them; found {balance!r}. Pass e.g. 'tokens'")
    if balance is not None and not order.batching.can_be_balanced:
        raise ValueError(
            f"this order assigns samples to ranks itself; found balance={balance!r} with batching_method="
            f"{order.batching_method!r} and shuffle_algo={order.algorithm!r}. Omit balance, or choose another order"
        )


def check_blocks(arguments: Mapping[str, Any], batch_size: int, block: int) -> None:
    """Raise ValueError for a schedule whose epochs cannot be cut into batches of one stream.

    ``batch_size`` divides the global batch; ``block`` is the batch per device. A state may bring another block, which
    divides the epochs.
    """
    if arguments["schedule"] is not None:
        shared = gcd(block, arguments["epoch_size"] or 0)
        block = 1 if 1 < shared < block else block
        OrderConfig.resolve(batch_size=batch_size, device_batch_size=block, **arguments)


def _chosen_streams(
    given_streams: Sequence[Stream | str] | None,
    name: str,
    arguments: Mapping[str, Any],
    config: Mapping[str, Any] | None,
) -> tuple[Stream, ...]:
    """The streams of a dataset, given themselves or by the arguments of a single one."""
    if name != "stream":
        raise ValueError(
            f"a stream of another class is passed itself; found stream_name={name!r}. Pass streams=[YourStream(...)]"
        )
    if isinstance(given_streams, Stream | str | os.PathLike | set | frozenset | Mapping):  # ranks differ in its order
        raise TypeError(f"streams is a list of Streams and paths; found a {type(given_streams).__name__}. Pass a list")
    if not given_streams:
        of_config = by_name("stream_config must be arguments", config, "{'name': 'web'}")
        return (Stream(**{**of_config, **{name: value for name, value in arguments.items() if value is not None}}),)
    if config or any(arguments[name] is not None for name in arguments if name != "split"):
        raise ValueError("pass either streams=, or remote=, local=... of a single one, not both")
    streams = [stream if isinstance(stream, Stream) else Stream(stream) for stream in given_streams]
    relative = [stream for stream in streams if stream.proportion is not None]
    if relative and len(relative) < len(streams):
        raise ValueError(
            "the streams of a mix are weighted all by proportion, or all by repeat or choose; found a proportion for "
            f"{relative} alone. Give every stream a proportion, or none"
        )
    return tuple(with_split(stream, arguments["split"] or "") for stream in streams)
