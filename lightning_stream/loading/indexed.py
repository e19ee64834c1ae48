"""A dataset's samples by index, and what MDS users read of it, under the names of mosaicml-streaming."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_stream.loading.source import SampleSource
from lightning_stream.order import Snapshot
from lightning_stream.order.bitmap import as_ids

_OTHER_ORDER = "choose the order by shuffle_algo, batching_method, sampling_method and the weights of the streams"
NEVER_CALLED = {  # methods of mosaicml-streaming's dataset, and what does their work here
    "prepare_shard": "override _download_file of a Stream, and pass it as streams=[...]",
    **dict.fromkeys(
        ("evict_shard", "evict_coldest_shard", "_evict_shard", "_evict_coldest_shard"),
        "pass cache_limit=; the shard that is needed last is evicted first",
    ),
    **dict.fromkeys(("resample_streams", "_get_work", "_share_work", "_attach_work", "_each_sample_id"), _OTHER_ORDER),
    **dict.fromkeys(("_resume", "_resume_incr_epoch"), "override state_dict and load_state_dict"),
    **dict.fromkeys(("_prepare_thread", "_ready_thread"), "pass predownload="),
    "_set_shuffle_block_size": "pass shuffle_block_size=",
    "on_exception": "catch the exception where the batches are read",
}


class Readable:
    """An attribute whose name a subclass may use for itself without changing how this class works."""

    def __init__(self, read: Callable[[Any], Any]) -> None:
        self._read = read

    def __get__(self, dataset: object | None, owner: type) -> Any:
        return self if dataset is None else self._read(dataset)


def _of(read: Callable[[SampleSource], Any]) -> Readable:
    return Readable(lambda dataset: read(dataset._streaming_source))  # noqa: SLF001 - the class's own


class FileInfo(NamedTuple):
    """A file of a shard."""

    basename: str
    bytes: int
    hashes: Mapping[str, str]


class ShardInfo:
    """A shard as its index describes it; ``shard[i]`` reads its samples.

    Attributes:
        samples, size: How many samples it has.
        basename: Name of its uncompressed data file.
        compression, hashes, size_limit, column_names, column_encodings, column_sizes: As its writer chose them.
        raw_data, zip_data: Its data file, uncompressed and compressed; None where it is not compressed.
        file_pairs: Such pairs for all of its files.
    """

    def __init__(self, source: SampleSource, shard_id: int) -> None:
        _, entry = source.reader.entry(shard_id)
        schema = entry.schema
        self._source = source
        self._first = int(source.snapshot.shard_offsets[shard_id])
        self.samples = self.size = int(source.snapshot.sizes[shard_id])
        self.basename = entry.raw.basename
        self.compression = schema.compression
        self.hashes = list(schema.hashes)
        self.size_limit = schema.size_limit
        self.column_names = list(schema.names)
        self.column_encodings = list(schema.encodings)
        self.column_sizes = list(schema.sizes)
        self.file_pairs: list[Any] = [
            tuple(file and FileInfo(file.basename, file.num_bytes, file.hashes) for file in pair)
            for pair in entry.files
        ]
        self.raw_data, self.zip_data = self.file_pairs[0]

    def get_raw_size(self) -> int:
        """Bytes of its uncompressed files."""
        return sum(raw.bytes for raw, _ in self.file_pairs)

    def get_zip_size(self) -> int | None:
        """Bytes of its compressed files; None where it is not compressed."""
        return sum(packed.bytes for _, packed in self.file_pairs if packed) or None

    def get_max_size(self) -> int:
        """Bytes of all its files."""
        return self.get_raw_size() + (self.get_zip_size() or 0)

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: Any) -> Any:
        return read_at(index, self.samples, lambda i: self._source.reader.sample(self._first + i), self.__getitem__)

    def __repr__(self) -> str:
        return f"ShardInfo({self.basename!r}, {self.samples} samples, {self.get_raw_size()} bytes)"


class Shards(Sequence[ShardInfo]):
    """The shards of all streams; each is parsed when it is asked for."""

    def __init__(self, source: SampleSource) -> None:
        self._source = source

    def __len__(self) -> int:
        return self._source.snapshot.num_shards

    def __getitem__(self, index: int | slice) -> Any:
        chosen = range(len(self))[index]
        return ShardInfo(self._source, chosen) if isinstance(chosen, int) else [self[i] for i in chosen]


class Spanner:
    """From a sample id to its shard, and its index there."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot

    def __getitem__(self, sample_id: int) -> tuple[int, int]:
        checked = _checked(sample_id, 0, self._snapshot.num_samples)
        shards, within = self._snapshot.locate(np.array([checked]))
        return int(shards[0]), int(within[0])


class IndexedSamples:
    """Random access to samples. Whatever a subclass stores under these names, ours keeps working."""

    _streaming_source: SampleSource

    num_samples = size = _of(lambda source: source.snapshot.num_samples)
    num_shards = _of(lambda source: source.snapshot.num_shards)
    num_streams = _of(lambda source: len(source.reader.streams))
    shards = _of(Shards)
    spanner = _of(lambda source: Spanner(source.snapshot))
    samples_per_shard = _of(lambda source: source.snapshot.sizes)
    samples_per_stream = _of(lambda source: source.snapshot.stream_samples)
    shards_per_stream = _of(lambda source: np.diff(source.snapshot.stream_offsets))
    shard_offset_per_stream = _of(lambda source: source.snapshot.stream_offsets[:-1])
    sample_offset_per_shard = _of(lambda source: source.snapshot.shard_offsets[:-1])
    sample_offset_per_stream = _of(lambda source: source.snapshot.shard_offsets[source.snapshot.stream_offsets[:-1]])
    stream_per_shard = _of(
        lambda source: np.repeat(np.arange(source.snapshot.num_streams), np.diff(source.snapshot.stream_offsets))
    )
    world = _of(SampleSource.detect_world)
    reader = _of(lambda source: source.reader)
    snapshot = _of(lambda source: source.snapshot)
    order = _of(lambda source: source.order)
    transform = _of(lambda source: source.transform and source.transform.function)

    def __getitem__(self, index: Any) -> Any:
        """Read by index: a sample for an int (negative ones from the end), a list for a slice, list or array.

        Nested lists, and arrays of several dimensions, give lists nested in the same way.
        """
        return read_at(index, self._streaming_source.snapshot.num_samples, self.get_item, self.__getitem__)

    def get_item(self, sample_id: int, retry: int = 7) -> Any:  # noqa: ARG002 - mosaicml-streaming's argument
        """Read one sample, in [0, size). A subclass may override it, as it may override ``__getitem__``.

        `retry` is only accepted: the store's own retries suffice. IndexError for an id that there is not.
        """
        checked = _checked(sample_id, 0, self._streaming_source.snapshot.num_samples)
        return self._streaming_source.reader.sample(checked)

    def read_batch(
        self, ids: Iterable[int] | NDArray[np.int64], out: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """Gather samples as columns: arrays for numbers and arrays of fixed shape, lists for the rest.

        `ids` are sample ids in [0, size); `out` has writable buffers for fixed-size columns, by column name.
        """
        array = self._ids(ids)
        if array.ndim != 1:
            raise ValueError(f"a batch has its sample ids in one dimension; found {array.ndim}. Pass ids.reshape(-1)")
        return self._streaming_source.reader.batch(array, out)

    def _ids(self, ids: Iterable[int] | NDArray[np.int64]) -> NDArray[np.int64]:
        size = self._streaming_source.snapshot.num_samples
        array = as_ids(ids, "sample ids").astype(np.int64)
        if not (array.view(np.uint64) < size).all():  # negative ids are huge then
            raise IndexError(f"sample ids must be in [0, {size}); found {array.min()} to {array.max()}")
        return array

    def lengths(self, name: str) -> NDArray[np.uint32]:
        """Return a length of every sample, e.g. its tokens, by sample id: uint32[num_samples], read-only.

        Writers record lengths (``lengths={"tokens": len}``), and `add_lengths` adds them to a dataset. No sample is
        read. Without them, those of the only column of variable size follow from shards that are not compressed.

        Example::

            dataset.lengths("tokens").sum()  # the tokens of the dataset

        Raises:
            NotFoundError: A stream has no such lengths; says how to add them.
            DigestError, FormatError: They are damaged, or do not fit the index.
        """
        return self._streaming_source.reader.lengths(name)

    def original_ids(self, ids: Iterable[int] | NDArray[np.int64]) -> NDArray[np.int64]:
        """The ids in the streams of these samples: others only where a filter or `subset` chose among them.

        Example: ``dataset.original_ids(trace.ids)``.
        """
        return self._streaming_source.reader.original_ids(self._ids(ids))

    # The cache

    def prepare_shard(self, shard_id: int, blocking: bool = True) -> None:  # noqa: ARG002 - it returns with the shard
        """Fetch a shard into the cache folder."""
        num_shards = self._streaming_source.snapshot.num_shards
        checked = _checked(shard_id, -num_shards, num_shards, "shards")
        self._streaming_source.reader.fetch(np.array([checked % num_shards]))

    def evict_shard(self, shard_id: int) -> bool:
        """Delete a shard from the cache folder; False where it is not there, or another process reads it."""
        reader = self._streaming_source.reader
        num_shards = reader.snapshot.num_shards
        checked = _checked(shard_id, -num_shards, num_shards, "shards")
        shard_ids = reader.shards.with_joined(np.array([checked % num_shards])).tolist()
        reader.shards.pool.release(shard_ids)  # what is open cannot be evicted
        evicted = [cache.evict(entry) for cache, entry in map(reader.entry, shard_ids)]
        return evicted[0]  # those joined to it go with it

    @Readable
    def cache_usage(self) -> int:
        """Bytes of the shards in the cache folders."""
        reader = self._streaming_source.reader
        numbers = reader.shards.with_joined(np.arange(reader.snapshot.num_shards))
        entries = map(reader.entry, numbers.tolist())
        return sum(raw.num_bytes for cache, entry in entries if cache.present(entry) for raw, _ in entry.files)


def read_at(index: Any, size: int, read: Callable[[int], Any], again: Callable[[Any], Any]) -> Any:
    """Read what an index names among `size` samples: a whole number, a slice, or a list or array of them, also nested.

    `read` reads the sample of a number in [0, size), and `again` each element of a list, slice or array.
    """
    if isinstance(index, slice):
        return [again(i) for i in range(*index.indices(size))]
    if getattr(index, "ndim", 0) and hasattr(index, "tolist"):
        index = index.tolist()
    if isinstance(index, (list, tuple, range)):
        return [again(i) for i in index]
    return read(_checked(index, -size, size) % size)


def _checked(index: Any, first: int, size: int, what: str = "samples") -> int:
    """An index in [first, size) as an int."""
    if isinstance(index, bool) or not hasattr(index, "__index__"):
        raise TypeError(f"an index is a whole number, a slice, or a list or array of them; found {index!r}")
    position = operator.index(index)
    if not first <= position < size:
        raise IndexError(f"the dataset has {size} {what}: index {position} is not in [{first}, {size})")
    return position
