"""From sample ids to samples and columns.

A `SampleReader` numbers the samples of all streams (one stream after another, shards in index order), keeps a bounded
number of shards mapped, and fetches those that are needed soon in threads of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property
from itertools import chain
from typing import Any, TypeAlias, TypeVar

import numpy as np

from lightning_stream.cache import ShardCache
from lightning_stream.errors import DigestError, FormatError
from lightning_stream.formats.encodings.images import load_images
from lightning_stream.formats.hashing import digest
from lightning_stream.formats.index import Index, ShardEntry
from lightning_stream.formats.mds.gather import Group, flat_copies, merge_groups
from lightning_stream.formats.memory import Int64s
from lightning_stream.formats.shard import Buffers, Shard, gather, gather_groups
from lightning_stream.order import Snapshot
from lightning_stream.order.bitmap import Bitmap
from lightning_stream.reading.length_expression import LengthExpression, is_expression
from lightning_stream.reading.lengths import Lengths, read_lengths
from lightning_stream.reading.proofs import UnverifiedRead
from lightning_stream.reading.shard_pool import UseFlat, Want
from lightning_stream.reading.stream import name_of
from lightning_stream.reading.stream_shards import StreamShards
from lightning_stream.threads import DaemonPool

T = TypeVar("T")
Choice: TypeAlias = tuple[Bitmap, Mapping[str, int]]
Choose: TypeAlias = Callable[["SampleReader"], Choice]
_DERIVED_TOGETHER = 1 << 20
_MOST_LENGTH = (1 << 32) - 1


class SampleReader:
    """Reads samples of several streams by sample id. Picklable; safe under fork and threads.

    Nothing is read or fetched before the first use.

    Attributes:
        shards: What the readers share that `only` makes.
        streams: Of which each has the samples behind those of the one before.
        counters: What was measured.
    """

    def __init__(self, shards: StreamShards) -> None:
        self.shards = shards
        self.streams = shards.streams
        self.counters = shards.counters
        self.parent: SampleReader | None = None
        self._choose: Bitmap | Choose | None = None
        self._lengths: dict[str, Lengths] = {}
        self._length_digests: dict[str, str] = {}

    def only(self, chosen: Bitmap | Choose) -> SampleReader:
        """A reader of some of these samples alone, which shares the shards; its sample ids count them.

        Args:
            chosen: Their ids here; or what finds them on first use, with how many each rule left.
        """
        part = SampleReader(self.shards)
        part.parent = self
        part._choose = chosen
        return part

    def __getstate__(self) -> dict[str, Any]:
        # The function that chose the samples, e.g. a lambda, is no longer needed and may not be picklable.
        choose = None if "_choice" in self.__dict__ else self._choose
        return {**self.__dict__, "_lengths": {}, "_choose": choose}

    @property
    def caches(self) -> tuple[ShardCache, ...]:
        """One cache per stream."""
        return self.shards.caches

    @property
    def indexes(self) -> tuple[Index, ...]:
        """One parsed index per stream; fetched on first use."""
        return self.shards.indexes

    @cached_property
    def _choice(self) -> Choice:
        assert self.parent is not None
        assert self._choose is not None
        return (self._choose, {}) if isinstance(self._choose, Bitmap) else self._choose(self.parent)

    @property
    def left(self) -> Mapping[str, int]:
        """How many samples of the parent were left after each rule, by the rule; none where ids were given."""
        return self._choice[1]

    @cached_property
    def members(self) -> Bitmap | None:
        """Which of the samples in the shards these are; None where these are all of them."""
        if self.parent is None:
            return self.shards.undeleted
        chosen = self._choice[0]
        before = self.parent.members
        if before is None:
            return chosen
        mask = before.mask
        mask[mask] = chosen.mask
        return Bitmap.of_mask(mask)

    @cached_property
    def snapshot(self) -> Snapshot:
        """The data as the order sees it."""
        if self.parent is not None:
            return self.parent.snapshot.subset(self._choice[0])
        return self.shards.snapshot if self.members is None else self.shards.snapshot.subset(self.members)

    def lengths(self, name: str) -> Lengths:
        """Return a length of every sample, e.g. its tokens, by sample id: uint32[num_samples], read-only.

        No sample is read. The numbers are in files beside the shards, which are downloaded once per machine and stay in
        the cache whatever its limit is (4 bytes per sample). Without such files, the length of the only column of
        variable size follows from the offset tables of shards that are not compressed: the bytes of ``bytes`` and
        ``str``, and the items of arrays, which must have one dimension (the first one of each shard is checked).

        The name may be an expression, such as ``"tokens + 576 * images"``, see `LengthExpression`.

        Raises:
            NotFoundError: A stream has no such lengths; says how to add them.
            DigestError, FormatError: They are damaged, or do not fit the index.
            ValueError: An expression that is wrong, or gives numbers that are no lengths.
        """
        if name not in self._lengths:
            is_derived = self._expression(name) is not None
            self._lengths[name] = self._derived(name) if is_derived else self._read_lengths(name)
        return self._lengths[name]

    def lengths_digest(self, name: str) -> str:
        """Return 32 hex digits of these numbers: other lengths give another packing."""
        if name not in self._length_digests:
            self._length_digests[name] = digest("xxh3_128", self.lengths(name).view(np.uint8).data)
        return self._length_digests[name]

    def amounts(self, name: str, ids: Int64s) -> Int64s:
        """The lengths of some samples, or what an expression makes of them, which may be more than 32 bits hold."""
        expression = self._expression(name)
        if expression is None:
            return self.lengths(name)[ids].astype(np.int64)
        return expression({term: self.lengths(term)[ids] for term in expression.names})

    def stored_lengths(self, name: str) -> tuple[str, ...]:
        """The names of the lengths that an expression needs; of a name, itself."""
        expression = self._expression(name)
        return (name,) if expression is None else expression.names

    def _expression(self, name: str) -> LengthExpression | None:
        if not is_expression(name) or any(name in {*index.lengths, *index.columns} for index in self.indexes):
            return None
        return LengthExpression(name)

    def _derived(self, name: str) -> Lengths:
        lengths = np.empty(self.snapshot.num_samples, np.uint32)
        for begin in range(0, len(lengths), _DERIVED_TOGETHER):
            ids = np.arange(begin, min(begin + _DERIVED_TOGETHER, len(lengths)))
            amounts = self.amounts(name, ids)
            if (most := int(amounts.max())) > _MOST_LENGTH:
                raise ValueError(f"a length is at most {_MOST_LENGTH:,}; {name!r} gives {most:,}. Correct it")
            lengths[ids] = amounts
        lengths.setflags(write=False)
        return lengths

    def _read_lengths(self, name: str) -> Lengths:
        lengths = read_lengths(self.caches, self.shards.indexes_with_lengths, name)
        if self.members is not None:
            lengths = lengths[self.members.mask]
            lengths.setflags(write=False)
        return lengths

    def require_samples(self) -> None:
        """Raise ValueError where there is nothing to iterate over."""
        if self.snapshot.num_samples == 0:
            names = ", ".join(map(name_of, self.streams))
            raise ValueError(
                f"there must be samples to iterate over; {names} has none in {self.snapshot.num_shards} shards. "
                "Check what was written to it, or which samples were chosen."
            )

    def entry(self, shard: int) -> tuple[ShardCache, ShardEntry]:
        """Cache and index entry of a shard, by its id."""
        return self.shards.entry(shard)

    def original_ids(self, ids: Int64s) -> Int64s:
        """The ids of these samples in the streams: others only after deletions, or where a filter or subset chose."""
        return ids if self.members is None else self.members.select(ids)

    def sample(self, sample_id: int, version: int | None = None) -> dict[str, Any]:  # noqa: ARG002 - see `switched`
        """Read one sample: column name to value. `version` counts where a training run switches versions.

        Raises:
            FormatError: It cannot be decoded; names the sample, its stream, its shard and the column.
        """
        offsets = self.shards.snapshot.shard_offsets
        row = sample_id if self.members is None else self.members[sample_id]
        within = row - int(offsets[shard_id := int(offsets.searchsorted(row, side="right")) - 1])
        if not self.shards.num_joined:
            return self._part_of_sample(sample_id, shard_id, within)
        shard_ids = self.shards.with_joined(np.array([shard_id])).tolist()
        values = dict(chain.from_iterable(self._part_of_sample(sample_id, part, within).items() for part in shard_ids))
        return {name: values[name] for name in self.shards.merged_columns or () if name in values}

    def _part_of_sample(self, sample_id: int, shard_id: int, within: int) -> dict[str, Any]:
        """The columns of a sample that one shard has."""
        pool = self.shards.pool
        read = None
        before = pool.num_fetched_again
        if (shard := pool.open.get(shard_id)) is None:
            shard, read = pool.of_batch([shard_id], {shard_id: np.array([within])})[shard_id]
        try:
            sample = shard.sample(within if read is None else 0)
            if self.shards.config.load_images:
                for name, value in sample.items():
                    load_images(name, value)
        except FormatError as error:
            if read is not None:
                pool.partial.distrust(shard_id)
            if read is not None or pool.fetched_again(shard_id, pool.open.lease(shard_id, shard), before):
                return self._part_of_sample(sample_id, shard_id, within)
            ids = np.array([sample_id])
            stream = int(self.snapshot.streams_of(ids)[0])
            shown_id = int(self.original_ids(ids)[0])
            where = f"sample {shown_id}, in {self.entry(shard_id)[1].raw.basename} of {name_of(self.streams[stream])}"
            raise FormatError(f"{where}: {error}") from error.__cause__
        if read is not None:
            self._note_unverified([read])
        return sample

    def _note_unverified(self, reads: list[UnverifiedRead]) -> None:
        """Note the samples of this read that came before their shards were verified."""
        of_thread = self.counters.of_thread
        unverified = self.shards.pool.unverified
        if of_thread.unverified is None:
            unverified.add(reads)
        else:
            of_thread.unverified += unverified.unproven(reads)

    def open_for(self, sample_id: int) -> None:
        """Open the sample's shard, without reading from it."""
        shard_ids = self.shards.with_joined(self.snapshot.shards_of(np.array([sample_id]))).tolist()
        with self.shards.pool.reading(shard_ids):
            for shard_id in shard_ids:
                self.shards.pool.shard(shard_id)

    def batch(
        self,
        ids: Int64s,
        out: Buffers | None = None,
        version: int | None = None,  # noqa: ARG002 - see `switched`
    ) -> dict[str, Any]:
        """Gather samples as columns, in the order of `ids`.

        Args:
            ids: Sample ids, int64[n].
            out: Writable buffers (arrays, pinned or shared memory) that fixed-size columns are gathered into, by name;
                or a function that returns one of so many bytes, or None.

        Returns:
            Column name to an array of n rows (numbers and arrays of fixed shape) or a list of n values. Where streams
            have different columns, all of them; columns that not every stream has in the same encoding are lists, with
            None where a sample lacks the column.

        Raises:
            FormatError: As `sample`, for the first sample that cannot be decoded.
        """
        if not len(ids):
            raise ValueError("a batch needs at least one sample id, since its columns are those of its samples")
        return self._read(ids, out)

    def _read(self, ids: Int64s, out: Buffers | None = None, names: Collection[str] | None = None) -> dict[str, Any]:
        """As `batch`; of `names`, only these columns count, also for what cannot be decoded."""
        try:
            return self._columns(ids, out, names)
        except DigestError:
            raise
        except FormatError:
            for sample_id in ids.tolist():  # fetches damaged shards again; raises for a sample that stays damaged
                if names is None or not self._can_read(sample_id, names):
                    self.sample(sample_id)
            return self._columns(ids, out, names)

    def _can_read(self, sample_id: int, names: Collection[str]) -> bool:
        try:
            self._columns(np.array([sample_id]), None, names)
        except FormatError:
            return False
        return True

    def use_flat(self, ids: Int64s, names: Sequence[str], use: UseFlat[T]) -> T:
        """The result of ``use``, which gets where the 1-d arrays of some columns lie in memory, and copies from there.

        Raises:
            ValueError: There is no such column.
            FormatError: As `batch`; also for values that are no 1-d arrays of one dtype.
        """
        result = self.shards.pool.open.flat_arrays(*self.shards.snapshot.locate(self.original_ids(ids)), names, use)
        if result is not None:
            return result
        columns = self._read(ids, None, names)  # not all: what is bad must not depend on which shards are open
        return use(*flat_copies(columns if columns.keys() == {*names} else self.batch(ids), names))

    def _columns(self, ids: Int64s, out: Buffers | None, names: Collection[str] | None) -> dict[str, Any]:
        reads: list[UnverifiedRead] = []
        of_shard, within = self.shards.snapshot.locate(self.original_ids(ids))
        merged = self.shards.merged_columns
        if merged is None:
            gathered = self.shards.pool.open.gather(of_shard, within, out, 0, names)
            columns = gathered or gather(*self._opened(of_shard, within, reads), out, names)
        else:
            merged = {name: in_all for name, in_all in merged.items() if names is None or name in names}
            columns = merge_groups(self._groups(of_shard, within, reads, names), merged, len(ids), out)
        for name, values in columns.items() if self.shards.config.load_images else ():
            load_images(name, values)
        if reads:
            self._note_unverified(reads)
        return columns

    def _groups(
        self, of_shard: Int64s, within: Int64s, reads: list[UnverifiedRead], names: Collection[str] | None
    ) -> list[Group]:
        """Gather samples from their shards, and then from those joined to them: rows, and some of their columns."""
        groups: list[Group] = []
        for joined, rows in self.shards.parts(of_shard):
            shards = of_shard[rows]
            indices = within[rows]
            if columns := self.shards.pool.open.gather(shards, indices, None, joined, names):
                groups.append((rows, columns))
                continue
            opened = self._opened(shards + joined * self.shards.num_shards, indices, reads)
            groups += [(rows[members], columns) for members, columns in gather_groups(*opened, None, names)]
        return groups

    def _opened(
        self, of_shard: Int64s, within: Int64s, reads: list[UnverifiedRead]
    ) -> tuple[list[Shard], Int64s, Int64s]:
        """The shards of some samples, opened, or these samples alone; and for each sample which of them, and where."""
        pool = self.shards.pool
        shard_ids, which = np.unique(of_shard, return_inverse=True)
        # With an index, numpy does not import numpy.ma for it: 10 ms of the first batch.
        wanted = {
            shard_id: np.unique(within[which == k], return_index=True)[0]
            for k, shard_id in enumerate(shard_ids.tolist())
            if shard_id not in pool.open
        }
        opened = pool.of_batch(shard_ids.tolist(), wanted)
        for shard_id, (_, read) in opened.items():
            if read is not None:
                rows = of_shard == shard_id
                within[rows] = wanted[shard_id].searchsorted(within[rows])
                reads.append(read)
        return [opened[shard_id][0] for shard_id in shard_ids.tolist()], which, within

    def read_ahead(self, ids: Int64s) -> Want:
        """Begin to fetch the shards of `ids` that are not here, in the order of their first use.

        Not those whose samples here are so few that they come by ranges. Drop the result once the samples were read, or
        will not be.
        """
        pool = self.shards.pool
        shards = self.snapshot.shards_of(ids)
        if self.members is not None:
            absent = [shard_id for shard_id in np.unique(shards).tolist() if shard_id not in pool.open]
            shards = shards[~np.isin(shards, list(filter(self._is_few, absent)))]
        shard_ids = self.shards.with_joined(shards)
        if not self.shards.is_limited and pool.open.has(shard_ids):
            return Want(pool, [])
        return pool.want(list(dict.fromkeys(shard_ids.tolist())))

    def _is_few(self, shard_id: int) -> bool:
        """Whether all samples that are read of a shard cost less than the shard."""
        num_samples = self.shards.entry(shard_id)[1].num_samples
        num_few = int(self.snapshot.sizes[shard_id])
        spread = np.arange(num_few) * num_samples // max(1, num_few)  # as if they lay evenly in it
        return self.shards.pool.partial.is_cheaper(shard_id, spread)

    def is_right(self, reads: Sequence[UnverifiedRead], *, wait: bool) -> bool:
        """Whether samples that were read unverified have the bytes of their verified shards, as far as these are here.

        With `wait`, for their shards: all of them.
        """
        return not reads or all(self.shards.pool.agreements(reads, wait=wait).values())

    def fetch(self, shards: Int64s) -> None:
        """Fetch shards into the cache, several at once. Raises the first failure."""
        with DaemonPool(self.shards.config.fetch_threads, "fetch") as pool:
            entries = map(self.entry, self.shards.with_joined(shards).tolist())
            for fetch in [pool.submit(cache.ensure, entry) for cache, entry in entries]:
                fetch.result()

    def close(self) -> None:
        """Close every mapped shard."""
        self.shards.close()
