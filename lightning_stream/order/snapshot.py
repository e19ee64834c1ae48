"""The data as the order sees it: the shards of every stream, and a digest that differs for any other data."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike

from .arrays import Ints, segment_of, starts_of
from .bitmap import Bitmap

_DIGITS = 16  # of a digest, by which a state names a version


@dataclass(frozen=True, eq=False)
class Snapshot:
    """The shards of all streams, one stream after another: sample ids and shard numbers count through them."""

    stream_names: tuple[str, ...]  # for messages only
    shard_sizes: tuple[Ints, ...]  # samples of each shard, one int64 array per stream
    digest: str  # differs for any other data: of shard names, counts, sizes and hashes
    stream_digests: tuple[str, ...] = ()  # the digest of each stream's index; () where they are not known
    source_digests: tuple[str, ...] = ()  # of the data that each stream was converted from; "" for none
    table_versions: tuple[int | None, ...] = ()  # of Delta tables, for messages only
    _part_of: tuple[Snapshot, Bitmap] | None = field(default=None, repr=False)  # all the data, and what was chosen

    def __post_init__(self) -> None:
        wrong = [sizes for sizes in self.shard_sizes if sizes.ndim != 1 or sizes.dtype != np.int64 or (sizes < 0).any()]
        if wrong or not 0 < len(self.shard_sizes) == len(self.stream_names):
            raise ValueError("A snapshot needs streams, each with a name and a 1-d int64 array of counts >= 0.")

    @classmethod
    def of(
        cls,
        shard_sizes: Sequence[ArrayLike],
        names: Sequence[str] | None = None,
        stream_digests: Sequence[str] | None = None,
        source_digests: Sequence[str] = (),
        table_versions: Sequence[int | None] = (),
    ) -> Snapshot:
        """A snapshot of shard sizes; its digest covers them and, where given, each stream's own digest.

        Example: ``Snapshot.of([[1000, 1000, 400], [500]])`` has 2900 samples in two streams.
        """
        sizes = tuple(np.ascontiguousarray(of_stream, np.int64) for of_stream in shard_sizes)
        names = [f"stream {i}" for i in range(len(sizes))] if names is None else names
        digest = _digest_of_shards(sizes, [""] * len(sizes) if stream_digests is None else stream_digests)
        return cls(
            tuple(names), sizes, digest, tuple(stream_digests or ()), tuple(source_digests), tuple(table_versions)
        )

    @property
    def num_streams(self) -> int:
        """How many streams are mixed."""
        return len(self.shard_sizes)

    @cached_property
    def stream_offsets(self) -> Ints:
        """int64[num_streams + 1]: the first shard of each stream, and the end."""
        return starts_of(np.array([len(sizes) for sizes in self.shard_sizes], np.int64))

    @cached_property
    def sizes(self) -> Ints:
        """int64[num_shards]: samples of every shard."""
        return self.shard_sizes[0] if self.num_streams == 1 else np.concatenate(self.shard_sizes)

    @cached_property
    def shard_offsets(self) -> Ints:
        """int64[num_shards + 1]: the first sample id of each shard, and the end."""
        return starts_of(self.sizes)

    @cached_property
    def stream_samples(self) -> Ints:
        """int64[num_streams]: samples of each stream."""
        return np.array([sizes.sum() for sizes in self.shard_sizes], np.int64)

    @property
    def num_samples(self) -> int:
        """Samples in all shards: the valid ids are [0, num_samples)."""
        return int(self.shard_offsets[-1])

    @property
    def num_shards(self) -> int:
        """Shards of all streams."""
        return int(self.stream_offsets[-1])

    def subset(self, chosen: Bitmap) -> Snapshot:
        """The snapshot of the chosen samples alone in the same streams and shards, with its own digest: sample i there
        is ``chosen[i]`` here.
        """
        counts = np.diff(chosen.count_before(self.shard_offsets))
        sizes = tuple(np.split(counts, self.stream_offsets[1:-1]))
        digest = _digest_of_subset(self.digest, chosen)
        return replace(self, shard_sizes=sizes, digest=digest, _part_of=(self, chosen))

    def digest_of(self, versions: Sequence[str]) -> str:
        """The digest of these samples where the streams have these versions, each its own or that of the data that it
        was converted from, by the first digits of its digest; empty for any other version.
        """
        if self._part_of is not None:
            parent, chosen = self._part_of
            digest = parent.digest_of(versions)
            return digest and _digest_of_subset(digest, chosen)
        if not 0 < len(versions) == len(self.stream_digests) == len(self.source_digests):
            return ""
        begins = [version[:_DIGITS] for version in versions]
        triples = zip(begins, self.stream_digests, self.source_digests, strict=True)
        digests = [stream if stream.startswith(begin) else source for begin, stream, source in triples]
        return _digest_of_shards(self.shard_sizes, digests) if all(map(str.startswith, digests, begins)) else ""

    def shards_of(self, ids: Ints) -> Ints:
        """The shard that holds each sample id."""
        return ids // self._shard_length if self._shard_length else segment_of(self.shard_offsets, ids)

    def locate(self, ids: Ints) -> tuple[Ints, Ints]:
        """The shard that holds each sample id, and the sample's index in it."""
        shards = self.shards_of(ids)
        begins = shards * self._shard_length if self._shard_length else self.shard_offsets.take(shards)
        return shards, ids - begins

    @cached_property
    def _shard_length(self) -> int:
        """Samples of every shard except the last, which may have less; 0 where they differ. With rows of a fixed size a
        division finds the shard, several times as fast as a search."""
        sizes = self.sizes
        differ = not len(sizes) or (sizes[:-1] != sizes[0]).any() or sizes[-1] > sizes[0]
        return 0 if differ else int(sizes[0])

    def streams_of(self, ids: Ints) -> Ints:
        """The stream that holds each sample id."""
        return segment_of(self.stream_offsets, self.shards_of(ids))


def max_active(shards: Ints, ahead: int = 0) -> int:
    """The most shards that are between their first use (``ahead`` samples before it) and their last use at once.

    ``shards`` has the shard of each sample in the order of use.
    """
    _, first = np.unique(shards, return_index=True)
    _, behind = np.unique(shards[::-1], return_index=True)
    begins = np.bincount(np.maximum(0, first - ahead), minlength=len(shards) + 1)
    ends = np.bincount(len(shards) - behind, minlength=len(shards) + 1)
    return int(np.cumsum(begins - ends).max())


def _digest_of_shards(shard_sizes: Sequence[Ints], stream_digests: Sequence[str]) -> str:
    total = hashlib.sha256(b"lightning-stream snapshot 1")
    for sizes, digest in zip(shard_sizes, stream_digests, strict=True):
        total.update(len(sizes).to_bytes(8, "little") + sizes.astype("<i8").tobytes() + digest.encode() + b"\0")
    return total.hexdigest()[:32]


def _digest_of_subset(digest: str, chosen: Bitmap) -> str:
    return hashlib.sha256(digest.encode() + chosen.bits.tobytes()).hexdigest()[:32]
