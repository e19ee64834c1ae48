"""What all writers share: cutting samples into shards, landing shards in threads, and the index that is put last."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from lightning_stream.formats.index.schema import MAX_FILE_BYTES, schema_object
from lightning_stream.formats.shard_encoder import EncodedBatch, ShardEncoder
from lightning_stream.writer.append import Appended
from lightning_stream.writer.batch import batch_columns
from lightning_stream.writer.config import WriterConfig
from lightning_stream.writer.gathered import Gathered, Pool
from lightning_stream.writer.land import land_shard
from lightning_stream.writer.pipeline import Pipeline
from lightning_stream.writer.target import Target

if TYPE_CHECKING:
    from typing_extensions import Self

Out: TypeAlias = "str | os.PathLike[str] | tuple[str | os.PathLike[str], str | os.PathLike[str]]"

_LOG = logging.getLogger(__name__)


class ShardWriter(ABC):
    """Cuts samples into shards, and lands each shard in threads of its own: hash, compress, hash, put.

    Use it as a context, or call `finish`. Until then there is no index, hence no dataset; a context that raises
    leaves none, and logs what it left. At most ``max_workers`` + 1 shards are in memory.

    Attributes:
        num_samples: Samples taken so far.
        columns, column_names, column_encodings: What it writes; None until known, where they are inferred.
        size_limit, compression, hashes, keep_local: As given, or by default.
        local, remote: The local folder and the URL of `out`; None where it has none.
    """

    def __init__(self, target: Target, config: WriterConfig, columns: Mapping[str, str] | None) -> None:
        self._target = target
        self._config = config
        self._columns = None if columns is None else dict(columns)
        self._num_columns = 0
        self._told_surplus = False
        self._max_file_bytes = config.max_file_bytes
        self._pipeline: Pipeline[dict[str, Any]] = Pipeline(config.num_workers(target.is_local))
        self._packer: ShardEncoder | None = None
        self._appended = Appended.nothing()
        self._opened = self._finished = False
        self._num_sent = 0
        self._pool = Pool()
        self._gathered = Gathered(self._pool, 0)
        self.num_samples = 0
        # What users of MDS writers read. Nothing of ours reads it: a subclass may use the names for its own.
        self.size_limit, self.compression, self.hashes = config.size_limit, config.compression, list(config.hashes)
        self.local, self.remote, self.keep_local = target.local, target.remote, target.keep_local
        self._entries: list[dict[str, Any]] = []
        self._show_columns(self._columns)

    def _show_columns(self, columns: Mapping[str, str] | None) -> None:
        self.columns = None if columns is None else dict(columns)
        self.column_names = None if columns is None else sorted(columns)
        self.column_encodings = None if columns is None else [columns[name] for name in sorted(columns)]

    def get_config(self) -> dict[str, Any]:
        """What the index says of every shard: format, columns and how they are packed.

        Raises:
            ValueError: No columns were given, and no sample came to infer them from.
        """
        return schema_object((self._packer or self._make_packer(None, None)).schema)

    @property
    def shards(self) -> list[dict[str, Any]]:
        """The index entries of the shards written; empty until `finish`."""
        return self._entries

    def flush_shard(self) -> None:
        """End the current shard here; the next sample begins another."""
        if self._packer is not None:
            self._send(self._packer)

    @abstractmethod
    def _make_packer(self, sample: Mapping[str, Any] | None, columns: dict[str, Any] | None) -> ShardEncoder:
        """The packer, from the columns given, or else from the first sample or batch."""

    def write(self, sample: Mapping[str, Any]) -> None:
        """Add one sample. What is in it beside the columns is not written, and told of once.

        Raises:
            TypeError: A value of the wrong type; names the column.
            ValueError: A column is missing, or a value is out of range; or there are values beyond columns that were
                inferred; or the writer is finished.
            StoreError: An earlier shard could not be put.
        """
        packer = self._packer or self._open(sample, None)
        parts = packer.encode(sample)
        if len(sample) != self._num_columns:
            self._tell_surplus(packer, sample)
        if not self._gathered.add_sample(parts, packer.per_sample_overhead, self._max_file_bytes):
            self._make_room(packer, sum(map(len, parts)))
            self._gathered.add_sample(parts, packer.per_sample_overhead, MAX_FILE_BYTES)
        self.num_samples += 1

    def write_batch(self, batch: Any) -> None:
        """Add the rows of a batch: a mapping of column names to arrays or lists, an Arrow record batch or table, or a
        pandas frame. The same bytes as `write` of each row, at a fraction of the time.

        Raises:
            TypeError: Not a batch, or values of a wrong type; names the column.
            ValueError: As for `write`, or columns of different lengths. No row of the batch is then written.
        """
        columns, num_rows = batch_columns(batch)
        if num_rows:
            packer = self._packer or self._open(None, columns)
            if set(columns) - set(packer.schema.names):
                self._tell_surplus(packer, columns)
            self._add_rows(packer, columns, num_rows)
            self.num_samples += num_rows

    def _add_rows(self, packer: ShardEncoder, columns: dict[str, Any], num_rows: int) -> None:
        self._add_encoded(packer, packer.encode_batch(columns, num_rows))

    def _add_encoded(self, packer: ShardEncoder, batch: EncodedBatch) -> None:
        num_rows = len(batch.sizes)
        ends = np.cumsum(batch.sizes + packer.per_sample_overhead)
        begin = taken = 0
        while begin < num_rows:
            room = self._max_file_bytes - self._gathered.file_bytes
            end = max(begin, int(np.searchsorted(ends, taken + room, side="right")))
            if end == begin and self._gathered.sizes:
                self._make_room(packer, int(batch.sizes[begin]))
                continue
            if end == begin:  # a row that fits no shard but one of its own
                self._check_alone(packer, int(batch.sizes[begin]))
                end += 1
            gathered = self._gathered
            batch.copy_to(gathered, begin, end)
            gathered.sizes += batch.sizes[begin:end].tolist()
            gathered.file_bytes += int(ends[end - 1]) - taken
            begin, taken = end, int(ends[end - 1])

    def finish(self) -> None:
        """Write the last shard, wait until all have landed, and put the index. Idempotent.

        Raises:
            ValueError: No columns were given, and no sample came to infer them from.
            StoreError: A shard or the index could not be put; then there is no index.
        """
        if self._finished:
            return
        packer = self._packer or self._open(None, None)
        self._send(packer)
        entries = self._pipeline.finish()
        self._entries = list(entries)
        self._pool.clear()
        self._appended.put_index(self._target, entries)
        self._finished = True
        self._packer = None
        if self._config.progress_bar:
            sys.stderr.write(f"\n{self._target}: {self.num_samples:,} samples in {len(entries):,} shards\n")

    def _open(self, sample: Mapping[str, Any] | None, columns: dict[str, Any] | None) -> ShardEncoder:
        if self._finished:
            raise ValueError("the writer is finished: its index is put. Make a new writer for more samples.")
        if not self._opened:
            self._appended = self._target.prepare(self._config)
            self._opened = True
        packer = self._make_packer(sample, columns)
        self._appended.check(packer.schema)
        self._gathered = Gathered(self._pool, packer.header_bytes)
        self._packer, self._num_columns = packer, len(packer.schema.names)
        self._show_columns(packer.schema.columns)
        return packer

    def _tell_surplus(self, packer: ShardEncoder, given: Iterable[str]) -> None:
        """What is no column is not written. Where the columns were chosen by the caller that may be meant, and is told
        once; where they were not, a value would be lost.

        Raises:
            ValueError: The columns were inferred from the first sample, or taken from the dataset appended to.
        """
        surplus = ", ".join(sorted(repr(name) for name in set(given) - set(packer.schema.names)))
        columns = ", ".join(packer.schema.names)
        if self._columns is None:
            raise ValueError(
                f"what is no column cannot be written: {surplus}; the columns are {columns}, as "
                f"{'the dataset appended to has them' if self._config.append else 'inferred from the first sample'}. "
                "Pass columns= to name those to write."
            )
        if not self._told_surplus:
            self._told_surplus = True
            warnings.warn(
                f"what is no column is not written: {surplus}; the columns are {columns}. Add to columns= what is to "
                "be kept.",
                stacklevel=3,
            )

    def _make_room(self, packer: ShardEncoder, num_bytes: int) -> None:
        """The gathered samples and the next one do not fit one shard: begin another."""
        self._check_alone(packer, num_bytes)
        if self._config.size_limit is None:
            raise ValueError(
                f"without size_limit all samples go to one shard, which must stay under 4 GiB, since its offsets have "
                f"32 bits; after {self.num_samples} samples it is full. Set size_limit."
            )
        self._send(packer)

    def _check_alone(self, packer: ShardEncoder, num_bytes: int) -> None:
        if packer.header_bytes + num_bytes + packer.per_sample_overhead > MAX_FILE_BYTES:
            raise ValueError(
                f"a shard must stay under 4 GiB, since its offsets have 32 bits; one sample has {num_bytes:,} bytes. "
                "Split the sample."
            )

    def _send(self, packer: ShardEncoder) -> None:
        """Hand over the samples gathered so far."""
        gathered = self._gathered
        if not gathered.sizes:
            return
        self._gathered = Gathered(self._pool, packer.header_bytes)
        name = f"shard.{self._appended.next_shard + self._num_sent:05}.{packer.schema.format}"
        self._num_sent += 1
        self._pipeline.submit(lambda: land_shard(name, packer, gathered, self._target))
        if self._config.progress_bar:
            sys.stderr.write(f"\r{self._num_sent:,} shards, {self.num_samples:,} samples")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.finish()
            return
        self._pipeline.abandon()
        left = sorted(self._target.put_names)
        _LOG.error(
            "writing to %s ended with %s: no index was put by it, so %s. Left there: %s.",
            self._target,
            kind.__name__,
            "the dataset is as before" if self._config.append else "what it wrote is no dataset",
            f"{len(left)} files, {left[0]} to {left[-1]}" if left else "nothing new",
        )
