"""A reader of the samples of several versions of its streams, between which a training run switches."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_stream.formats.index import Index
from lightning_stream.formats.memory import Int64s
from lightning_stream.formats.shard import Buffers, Ragged
from lightning_stream.order.bitmap import Bitmap
from lightning_stream.order.switches import DataVersion
from lightning_stream.reading.mapped import MapReader, MapStream
from lightning_stream.reading.reader import SampleReader
from lightning_stream.reading.shard_table import ReaderConfig
from lightning_stream.reading.stream import (
    CacheDefaults,
    Stream,
    name_of,
    version_at,
    version_index,
    versions_of,
    with_version,
)
from lightning_stream.reading.stream_shards import StreamShards


def reader_of(streams: Sequence[Stream], defaults: CacheDefaults, config: ReaderConfig) -> SampleReader:
    """The reader of these streams, which may switch versions, or be datasets that read their samples themselves."""
    mapped = [stream for stream in streams if isinstance(stream, MapStream)]
    if mapped:
        return MapReader(mapped)
    kind = SwitchedReader if any(len(versions_of(stream)) > 1 for stream in streams) else SampleReader
    return kind(StreamShards(streams, defaults, config))


class SwitchedReader(SampleReader):
    """Reads the samples that any of the versions of its streams has: its sample ids count them.

    The shards are those of the last versions, which begin with the shards of all versions before.
    """

    @property
    def steps(self) -> list[int]:
        """The optimizer steps from which each of the versions holds; the first is 0."""
        return sorted({step for stream in self.streams for step, _ in versions_of(stream)})

    @cached_property
    def members(self) -> Bitmap | None:
        """Which of the samples in the shards any version has."""
        mask = np.logical_or.reduce([mask for _, mask in self._versions])
        return None if mask.all() else Bitmap.of_mask(mask)

    @cached_property
    def versions(self) -> list[DataVersion]:
        """The data of each version."""
        rows = slice(None) if self.members is None else self.members.mask
        return [DataVersion(reader.snapshot, Bitmap.of_mask(mask[rows])) for reader, mask in self._versions]

    def sample(self, sample_id: int, version: int | None = None) -> dict[str, Any]:
        """Read one sample, with the columns that a version has; None for the last one that has the sample."""
        lacking = self._lacking(np.array([sample_id]), version)
        sample = super().sample(sample_id)
        return {name: value for name, value in sample.items() if name not in lacking or not lacking[name][0]}

    def batch(self, ids: Int64s, out: Buffers | None = None, version: int | None = None) -> dict[str, Any]:
        """Gather samples as columns: those that a version has, and None for samples whose streams lack one there.

        None for the last version that has each sample.
        """
        batch = super().batch(ids, out)
        for name, lacking in self._lacking(ids, version).items():
            if name in batch and version is not None and self._lacks[name][version].all():
                del batch[name]
            elif name in batch and lacking.any():
                values = zip(lacking, batch[name], strict=True)
                batch[name] = Ragged([None if is_absent else value for is_absent, value in values])
        return batch

    def _lacking(self, ids: Int64s, version: int | None) -> dict[str, NDArray[np.bool_]]:
        """Whether each sample lacks a column that was added between versions, by its name.

        A sample that was deleted before may have a wrong value there.
        """
        if not self._lacks:
            return {}
        versions = np.full(len(ids), version or 0)
        for k, data in enumerate(self.versions if version is None else ()):
            versions[data.members.has(ids)] = k
        streams = self.snapshot.streams_of(ids)
        return {name: table[versions, streams] for name, table in self._lacks.items()}

    @cached_property
    def _lacks(self) -> dict[str, NDArray[np.bool_]]:
        """The streams that lack a column that was added between versions, by its name: bool[versions, streams]."""
        have = [[set().union(*index.column_sets) for index in reader.indexes] for reader, _ in self._versions]
        tables = {
            name: np.array([[name not in names for names in streams] for streams in have])
            for name in set().union(*have[-1])
        }
        return {name: table for name, table in tables.items() if (table != table[-1]).any()}

    @cached_property
    def _versions(self) -> list[tuple[SampleReader, NDArray[np.bool_]]]:
        """A reader of each version alone, and which of the samples in the shards it has."""
        return [self._version(step) for step in self.steps]

    def _version(self, step: int) -> tuple[SampleReader, NDArray[np.bool_]]:
        streams = [with_version(stream, version_at(stream, step)) for stream in self.streams]
        reader = SampleReader(StreamShards(streams, self.shards.defaults, self.shards.config))
        reader.shards.indexes = tuple(map(version_index, streams, reader.caches))  # with any columns
        mask = np.zeros(self.shards.snapshot.num_samples, np.bool_)
        begin = 0
        for stream, index, last in zip(self.streams, reader.indexes, self.indexes, strict=True):
            _check_same_ids(stream, index, last)
            mask[begin : begin + index.num_samples] = True
            begin += last.num_samples
        if reader.members is not None:
            mask[mask] = reader.members.mask
        return reader, mask


def _check_same_ids(stream: Stream, index: Index, last: Index) -> None:
    """Raise ValueError unless a version's samples have the same ids in the last version."""
    if not last.begins_with(index):
        raise ValueError(
            "a training run switches to a version that has the shards of the one before, as after appends, deletions "
            f"and added columns; the shards of version {index.digest[:16]} of {name_of(stream)} are not those of "
            f"{last.digest[:16]}, as after versions.compact. Name versions in their order, or begin another run."
        )
