"""A reader of samples that are no shards: those of any datasets with ``__len__`` and ``__getitem__``.

To the order each dataset is a stream of one shard, which has no file. So the order, the batches and the position are
those of streamed data; only the reading is the dataset's own.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, cast
from urllib.parse import quote

import numpy as np

from lightning_stream.cache import ShardCache
from lightning_stream.formats.index import Index
from lightning_stream.formats.memory import Int64s
from lightning_stream.formats.model import FileEntry, Origin, Schema, index_text, to_text
from lightning_stream.formats.shard import Buffers
from lightning_stream.order import Snapshot
from lightning_stream.reading.lengths import Lengths
from lightning_stream.reading.reader import SampleReader
from lightning_stream.reading.stream import Stream
from lightning_stream.reading.stream_shards import StreamShards


class MapStream(Stream):
    """One dataset of a mixture that is read by its own ``__getitem__``.

    Args:
        dataset: An object with ``__len__``, and ``__getitem__`` or ``__getitems__``.
        name: What messages and a `Schedule` call it.
        proportion: Share of the epoch that comes from it; None where there is one dataset, or a schedule.
        lengths: Lengths of its samples by name: an array or list, or a function that returns one for the dataset.
    """

    def __init__(
        self, dataset: Any, name: str, proportion: float | None = None, lengths: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__(local=name, name=name, proportion=proportion)
        self.dataset = dataset
        self.lengths = dict(lengths or {})

    def __getstate__(self) -> dict[str, Any]:
        """Without the lengths, since functions may not be pickled: a reader's state has what was read."""
        return {**vars(self), "lengths": {}}

    def read_lengths(self, name: str) -> Lengths:
        """The lengths of this name. ValueError where there are none, or other numbers."""
        if name not in self.lengths:
            raise ValueError(
                f"the order needs the samples' lengths {name!r}; found {', '.join(self.lengths) or 'none'}. Pass "
                f"lengths={{{name!r}: numbers}}, or a function that returns them for the dataset"
            )
        lengths = self.lengths[name]
        try:
            lengths = np.asarray(lengths(self.dataset) if callable(lengths) else lengths)
        except Exception as error:
            error.add_note("This function of lengths= is called with the dataset, and returns those of all samples.")
            raise
        size = len(self.dataset)
        is_right = lengths.shape == (size,) and (not size or lengths.dtype.kind in "iu")
        if not is_right or (size and not 0 <= lengths.min() <= lengths.max() < 2**32):
            raise ValueError(
                f"lengths are whole numbers below 2**32, one for each of the {size} samples; found {lengths.dtype} of "
                f"shape {lengths.shape} for {name!r} of {self.local}. Pass an array, or a function that returns one"
            )
        return lengths.astype(np.uint32)


class MapReader(SampleReader):
    """Reads samples of datasets by their ``__getitem__``."""

    def __init__(self, streams: Sequence[MapStream]) -> None:
        super().__init__(StreamShards(streams))
        is_mixed = len(streams) > 1
        self.shards.indexes = tuple(_index(str(stream.local), len(stream.dataset), is_mixed) for stream in streams)
        self.shards.num_files = 0  # so there is nothing to look ahead for
        datasets = [stream.dataset for stream in streams]
        calls = [getattr(dataset, "__getitem__", None) or partial(_single, dataset) for dataset in datasets]
        many = getattr(datasets[0], "__getitems__", None)
        self.read_many: Callable[[list[int]], Sequence[Any]] | None = None if is_mixed else many
        self.read = partial(_read, calls, self.snapshot.shard_offsets.tolist()) if is_mixed else calls[0]

    def __getstate__(self) -> dict[str, Any]:
        names = cast("MapStream", self.streams[0]).lengths
        return {**super().__getstate__(), "_lengths": {**self._lengths, **{name: self.lengths(name) for name in names}}}

    @cached_property
    def snapshot(self) -> Snapshot:
        """The samples as the order sees them; they have no versions."""
        return replace(self.shards.snapshot, stream_digests=(), source_digests=(), table_versions=())

    @property
    def caches(self) -> tuple[ShardCache, ...]:
        """None: there are no files."""
        return ()

    def require_samples(self) -> None:
        """Raise ValueError where there are none, or where a dataset has others than it had: they are planned once."""
        super().require_samples()
        sizes = [len(cast("MapStream", stream).dataset) for stream in self.streams]
        if sizes != (planned := self.snapshot.sizes.tolist()):
            raise ValueError(
                f"a loader plans the samples that its dataset has when it is made; found {planned} samples then and "
                f"{sizes} now. Make a new loader when samples are added or removed"
            )

    def sample(self, sample_id: int, version: int | None = None) -> Any:  # noqa: ARG002
        """One sample, as its dataset returns it."""
        return self.read(sample_id)

    def batch(
        self,
        ids: Int64s,
        out: Buffers | None = None,  # noqa: ARG002
        version: int | None = None,  # noqa: ARG002
    ) -> dict[str, Any]:
        """Samples that are mappings, as columns: lists of their values."""
        samples = [self.read(sample_id) for sample_id in ids.tolist()]
        return columns_of(samples, samples[0])

    def fetch(self, shards: Int64s) -> None:
        """Nothing: there is nothing to fetch."""

    def _read_lengths(self, name: str) -> Lengths:
        lengths = np.concatenate([cast("MapStream", stream).read_lengths(name) for stream in self.streams])
        lengths.setflags(write=False)
        return lengths


def columns_of(samples: Sequence[Any], names: Iterable[str]) -> dict[str, Any]:
    """Columns of samples that are mappings, as lists of arrays. ValueError for other samples."""
    try:
        return {name: [np.asarray(sample[name]) for sample in samples] for name in names}
    except (KeyError, TypeError, IndexError) as error:
        raise ValueError(
            f"columns are read from samples that are mappings with {', '.join(map(repr, names))}; found "
            f"{type(samples[0]).__name__}, and {error!r}. Return such samples from the dataset, or pack them whole: "
            "Packing(column=None)"
        ) from error


def _read(calls: Sequence[Callable[[int], Any]], begins: Sequence[int], sample_id: int) -> Any:
    """A sample of several datasets, one dataset after another, by its number, as its dataset returns it."""
    which = bisect_right(begins, sample_id) - 1
    return calls[which](sample_id - begins[which])


def _single(dataset: Any, sample_id: int) -> Any:
    return dataset.__getitems__([sample_id])[0]


def _index(name: str, num_samples: int, is_mixed: bool) -> Index:
    """The index of one shard without a file; where several are mixed, with its name in the digest."""
    file = f"dataset-{quote(name, safe='')}" if is_mixed else "dataset"
    raw = FileEntry(file, 0, {}, origin=Origin("samples", file, 0, "", 0, num_samples))
    shard = Schema("mds", ("sample",), ("bytes",), (None,)).shard(num_samples, raw)
    return Index.from_bytes(index_text([to_text(shard)]), name).choose([])
