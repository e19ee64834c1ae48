"""The shards of all streams by number, with the shards of added columns that are joined to them.

The shards of the streams have the numbers 0 to n - 1, one stream after another. Those with a stream's first added
columns have the numbers from n on, in the same order: shard k and shard n + k have the same samples. Those with the
second added columns have the numbers from 2n on, and so on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_stream.cache import ShardCache
from lightning_stream.formats.index import Index, ShardEntry, mixed_columns
from lightning_stream.formats.rows import as_mds
from lightning_stream.formats.shard import Shard, open_shard

Decoders = Mapping[str, Callable[[bytes], Any]]


@dataclass(frozen=True)
class ReaderConfig:
    """Settings of a reader, per process.

    Attributes:
        max_open_shards: Shards mapped at the same time.
        fetch_threads: Shards fetched at the same time.
        allow_unsafe_types: Whether the ``pkl`` encoding may be decoded: it runs code that the data names.
        decoders: By column, a function from its stored bytes to a value, instead of its encoding.
        start_by_range: Whether samples may come by ranges while their shards are being fetched; None: where a whole
            batch may, within the reader's `spare_requests`.
        load_images: Whether images are decoded when they are read, which finds damaged pixels, and not later.
    """

    max_open_shards: int = 256
    fetch_threads: int = 4
    allow_unsafe_types: bool = False
    decoders: Mapping[str, Callable[[bytes], Any]] | None = None
    start_by_range: bool | None = None
    load_images: bool = False


class StreamShards:
    """The shards of streams, of which each has a cache and an index."""

    def __init__(self, caches: Sequence[ShardCache], indexes: Sequence[Index], config: ReaderConfig) -> None:
        self._caches, self._indexes, self._config = caches, indexes, config
        self._offsets: NDArray[np.int64] = np.cumsum([0, *map(len, indexes)])
        self.num_shards = int(self._offsets[-1])
        # Whether each shard has a first, a second... shard joined to it.
        self.has_joined: NDArray[np.bool_] = np.zeros(
            (max((len(index.joined) for index in indexes), default=0), self.num_shards), np.bool_
        )
        for first, index in zip(self._offsets.tolist(), indexes, strict=False):
            for row, other in zip(self.has_joined, index.joined, strict=False):
                row[first : first + len(other)] = True
        self.num_joined = len(self.has_joined)
        self.num_files = self.num_shards + int(self.has_joined.sum())

    @cached_property
    def mixed_columns(self) -> dict[str, bool] | None:
        """All columns, and whether all shards have them in one encoding; None where all shards have the same."""
        return mixed_columns(self._indexes)

    @cached_property
    def columns(self) -> dict[str, bool]:
        """As `mixed_columns`, also where all shards have the same columns."""
        same = dict.fromkeys(self._indexes[0].column_sets[0], True) if self.mixed_columns is None else {}
        return self.mixed_columns or same

    def with_joined(self, shards: NDArray[np.int64]) -> NDArray[np.int64]:
        """The numbers of shards, each before those that are joined to it."""
        if not self.num_joined:
            return shards
        here = np.concatenate([np.ones((1, len(shards)), np.bool_), self.has_joined[:, shards]])
        numbers: NDArray[np.int64] = shards + self.num_shards * np.arange(len(here))[:, None]
        found: NDArray[np.int64] = numbers.T[here.T]
        return found

    def parts(self, of_shard: NDArray[np.int64]) -> list[tuple[int, NDArray[np.int64]]]:
        """0 with all rows; 1, 2... with the rows whose shards (``of_shard``) have a first, a second... joined one."""
        joined = [(k, np.flatnonzero(has.take(of_shard))) for k, has in enumerate(self.has_joined, 1)]
        return [(0, np.arange(len(of_shard))), *((k, rows) for k, rows in joined if len(rows))]

    def entry(self, number: int) -> tuple[ShardCache, ShardEntry]:
        """Cache and index entry of a shard."""
        joined, shard = divmod(number, self.num_shards)
        stream = self._stream_of(shard)
        index = self._indexes[stream].joined[joined - 1] if joined else self._indexes[stream]
        return self._caches[stream], index.entry(shard - int(self._offsets[stream]))

    def files(self, stream: int) -> dict[str, int]:
        """The shards of a stream by the names of their files; a joined shard counts as the one that it is joined to."""
        first, index = int(self._offsets[stream]), self._indexes[stream]
        return {as_mds(entry).raw.basename: first + k for k in range(len(index)) for entry in index.entries(k)}

    def open(self, number: int, entry: ShardEntry, folder: Path) -> Shard:
        """Open a shard, to read those of its columns that are chosen."""
        stream = self._stream_of(number % self.num_shards)
        decoders: Decoders | None = self._decoders[stream]
        if decoders and self._indexes[stream].joined:  # the others are those of the shards beside it
            decoders = {name: one for name, one in decoders.items() if name in entry.schema.names}
        return open_shard(
            entry,
            folder,
            allow_unsafe_types=self._config.allow_unsafe_types,
            decoders=decoders,
            columns=self._indexes[stream].chosen,
        )

    def _stream_of(self, shard: int) -> int:
        return int(np.searchsorted(self._offsets, shard, side="right")) - 1

    @cached_property
    def _decoders(self) -> list[Decoders | None]:
        """The decoders of each stream's columns; ValueError for those of no column."""
        given = self._config.decoders or {}
        known = [{name for columns in index.column_sets for name in columns} for index in self._indexes]
        if absent := set(given).difference(*known):
            raise ValueError(
                f"decoders: no column {min(absent)!r}; there are {', '.join(sorted(set().union(*known)))}."
            )
        return [{name: one for name, one in given.items() if name in names} or None for names in known]
