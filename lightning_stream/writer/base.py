"""What all writers share: they cut samples into shards, put the shards from threads, and put the index last."""

from __future__ import annotations

import logging
import os
import warnings
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from lightning_stream.errors import ConflictError, by_name, checking, refuse_overrides, write_stderr
from lightning_stream.formats.codecs import check_compression, compress, suffix
from lightning_stream.formats.hashing import digest_parts, hashes_to_write
from lightning_stream.formats.model import MAX_FILE_BYTES, FileEntry, Schema, ShardEntry, to_text
from lightning_stream.formats.shard_encoder import EncodedBatch, ShardEncoder
from lightning_stream.formats.sizes import parse_bytes
from lightning_stream.version_log import Edit

from .batch import batch_columns, check_texts
from .infer import check_appendable, infer_column, infer_columns
from .lengths import (
    LengthFunctions,
    Lengths,
    check_functions,
    check_measurable,
    measure_batch,
    measure_sample,
    put_lengths,
)
from .pipeline import Pipeline
from .place import Mode, Out, Transaction
from .shard_buffer import Pool, ShardBuffer

if TYPE_CHECKING:
    from typing import Self

_LOG = logging.getLogger(__name__)
_DEFAULT_WORKERS = 4
_NEVER_CALLED = dict.fromkeys(  # of mosaicml-streaming's
    ("encode_sample", "encode_joint_shard", "encode_split_shard", "get_config"),
    "override write(), or call register_encoding()",
)
_QUICK_HASHES = frozenset({"xxh3_64", "xxh3_128", "xxh128", "xxh64"})  # faster than any disk


class WriterConfig(NamedTuple):
    """How shards are cut and packed."""

    compression: str | None
    hashes: tuple[str, ...]
    size_limit: int | None

    @classmethod
    def make(cls, compression: str | None, hashes: Iterable[str] | None, limit: float | str | None) -> WriterConfig:
        """Check a writer's settings, and raise ValueError for a wrong one. An empty compression is None."""
        size_limit = None if limit is None else parse_bytes(limit, "size_limit") or None
        if size_limit is not None and size_limit > MAX_FILE_BYTES:
            raise ValueError(f"size_limit must stay under 4 GiB, since offsets have 32 bits; got {limit!r}.")
        return cls(check_compression(compression or None), hashes_to_write(hashes), size_limit)


class ShardWriter(ABC):
    """Cuts samples into shards, and compresses, hashes and puts each shard in a thread.

    Use it as a context, or call `finish`. Until then readers see the dataset as it was, also after a crash. If several
    writers write to one place at once, one wins and the others get an error. At most ``max_workers`` + 1 shards are in
    memory; a `write_batch` encodes its whole batch first, which is there beside them. The arguments are those of
    `MDSWriter`.

    Attributes:
        num_samples: The number of samples written so far.
        shards: The index entries of the shards; empty until `finish`.
        length_files: The index entries of the files of each length, by name; empty until `finish`.
        columns, column_names, column_encodings: The columns; None until they are known, if they are inferred.
        size_limit, compression, hashes, keep_local: As given, or by default.
        local, remote: The local folder and the URL of `out`; None where it has none.
    """

    @checking
    def __init__(
        self,
        *,
        out: Out | Transaction,
        columns: Mapping[str, str] | None = None,
        keep_local: bool = False,
        compression: str | None = None,
        hashes: Iterable[str] | None = None,
        size_limit: float | str | None = 1 << 26,
        overwrite: bool = False,
        append: bool = False,
        max_workers: int | None = None,
        progress_bar: bool = False,
        retry: int | None = None,
        store_options: Mapping[str, Any] | None = None,
        exist_ok: bool = False,
        lengths: LengthFunctions | None = None,
        message: str = "",
        key: str | None = None,
    ) -> None:
        rule = "samples are changed in write(), and values encoded by an encoding"
        refuse_overrides(type(self), ShardWriter, _NEVER_CALLED, rule)
        self._config = codec, names, limit = WriterConfig.make(compression, hashes, size_limit)
        if append and (overwrite or exist_ok):
            raise ValueError("append=True adds to the dataset, overwrite=True replaces it; found both. Pass one.")
        if (message or key) and not append:
            raise ValueError("message and key describe an append in the log of versions; pass append=True with them.")
        if not isinstance(out, Transaction):
            retries = {} if retry is None else {"retries": retry}
            out = Transaction(out, keep_local, {**retries, **(store_options or {})})
        self._place = place = out
        if append:
            place.key = key or ""
        self._message = message
        self._mode: Mode = "append" if append else "overwrite" if overwrite or exist_ok else "new"
        self._columns = None if columns is None else by_name("columns must be encodings", columns, "{'text': 'str'}")
        self._num_columns = 0
        self._has_reported_extra = False
        self._progress_bar = progress_bar
        self._max_file_bytes = MAX_FILE_BYTES if limit is None else limit
        if max_workers is None:  # one thread holds less memory, and suffices if a disk is the limit
            only_writes = place.is_local and codec is None and _QUICK_HASHES.issuperset(names)
            max_workers = 1 if only_writes else min(_DEFAULT_WORKERS, os.cpu_count() or 1)
        self._pipeline: Pipeline[ShardEntry] = Pipeline(max_workers)
        self._encoder: ShardEncoder | None = None
        self._opened = self._finished = False
        self._num_sent = 0
        self._pool = Pool()
        self._buffer = ShardBuffer(self._pool, 0)
        self._length_functions = check_functions(lengths)
        self._lengths = {name: array("I") for name in self._length_functions}
        self.length_files: dict[str, tuple[FileEntry, ...]] = {}
        self.num_samples = 0
        # Users of MDS writers read these. This class does not: a subclass may give the names another meaning.
        self.size_limit = limit
        self.compression = codec
        self.hashes = list(names)
        self.local = place.local
        self.remote = place.remote
        self.keep_local = place.keep_local
        self.shards: list[dict[str, Any]] = []
        self._show_columns(self._columns)
        if self._columns is not None:
            self._make_encoder(self._columns)  # refuses unknown encodings now

    def _show_columns(self, columns: Mapping[str, str] | None) -> None:
        self.columns = None if columns is None else dict(columns)
        self.column_names = None if columns is None else sorted(columns)
        self.column_encodings = None if columns is None else [columns[name] for name in sorted(columns)]

    def get_config(self) -> dict[str, Any]:
        """Return the format, columns and packing in the index; ValueError if no columns are known."""
        return (self._encoder or self._make_encoder(self._chosen(None))).schema.to_object()

    def flush_shard(self) -> None:
        """End the current shard; the next sample begins another one. It ends every shard, also where overridden."""
        if self._encoder is not None:
            self._send(self._encoder)

    def _end_shard(self, encoder: ShardEncoder) -> None:
        """End the current shard through the method of a subclass; what that leaves is sent, too."""
        if self._buffer.sizes:
            self.flush_shard()
        self._send(encoder)

    @abstractmethod
    def _make_encoder(self, columns: Mapping[str, str]) -> ShardEncoder:
        """Return the encoder for these columns."""

    def _inferred(self, columns: dict[str, str]) -> dict[str, str]:
        """Translate inferred MDS encodings to the format's own types."""
        return columns

    def _chosen(self, infer: Callable[[], dict[str, str]] | None) -> Mapping[str, str]:
        """Return the given columns, else those of the dataset appended to, else those of the first sample or batch."""
        base = self._place.base
        if self._columns is not None:
            return self._columns
        if base is not None and base.schemas:
            return base.columns
        if infer is None:
            raise ValueError("no columns were given, and there is no sample to infer them from. Pass columns=.")
        return self._inferred(infer())

    def write(self, sample: Mapping[str, Any]) -> None:
        """Add one sample. Values that belong to no column are not written; a warning names them once.

        Raises:
            TypeError: A value has the wrong type; the message names the column.
            ValueError: A column is missing, a value is out of range, a value belongs to none of the inferred columns,
                or the writer is finished.
            StoreError: A shard could not be put. Then no index will be put either.
        """
        encoder = self._encoder or self._open(lambda: infer_columns(sample))
        parts = encoder.encode(sample)
        if len(sample) != self._num_columns and not self._has_reported_extra:
            self._report_extra_columns(encoder, sample)
        lengths = measure_sample(self._length_functions, sample, encoder.schema.names) if self._lengths else {}
        num_bytes = len(parts[0]) if len(parts) == 1 else sum(map(len, parts))
        file_bytes = num_bytes + encoder.per_sample_overhead
        is_full = self._buffer.file_bytes + file_bytes > self._max_file_bytes
        if is_full:
            self._check_fits(encoder, num_bytes, file_bytes)
        try:
            if is_full:
                self._end_shard(encoder)
            self._buffer.add_sample(parts, num_bytes, file_bytes)
            for name, length in lengths.items():
                self._lengths[name].append(length)
            self.num_samples += 1
        except BaseException as error:  # part of the sample may be in the shard, or its length may be missing
            self._pipeline.fail(error)
            raise

    def write_batch(self, batch: Any) -> None:
        """Add the rows of a batch: a mapping of column names to arrays or lists, an Arrow record batch or table, or a
        pandas frame. It writes the same bytes as `write` does for each row, in a fraction of the time.

        Raises:
            TypeError, ValueError, StoreError: As `write`; also for columns of different lengths, or if it is not a
                batch. Then no row of the batch is written.
        """
        columns, num_rows = batch_columns(batch)
        check_texts(columns)
        if num_rows:
            encoder = self._encoder or self._open(
                lambda: {name: infer_column(name, values) for name, values in columns.items()}
            )
            if set(columns) - set(encoder.schema.names):
                self._report_extra_columns(encoder, columns)
            encoded = encoder.encode_batch(columns, num_rows)
            lengths = measure_batch(self._length_functions, columns, num_rows, encoder.schema.names)
            self._add_encoded(encoder, encoded, lengths)

    def _add_encoded(self, encoder: ShardEncoder, batch: EncodedBatch, lengths: Lengths) -> None:
        """Add all rows, or none if one does not fit. An error between two rows makes the writer fail."""
        if not len(batch.sizes):
            return
        ends = np.cumsum(batch.sizes + encoder.per_sample_overhead)
        self._check_fits(encoder, int(batch.sizes.max()), int(ends[-1]))
        begin = taken = 0
        with self._pipeline:
            while True:  # in Python 3.12 and 3.13, a `while` with a condition would jump back outside of the block
                if begin == len(ends):
                    break
                room = self._max_file_bytes - self._buffer.file_bytes
                end = max(begin, int(np.searchsorted(ends, taken + room, side="right")))
                if end == begin and self._buffer.sizes:
                    self._end_shard(encoder)
                    continue
                end = max(end, begin + 1)  # a row that fits no shard gets one of its own
                buffer = self._buffer
                for chunk in batch.chunks(begin, end):
                    buffer.add(chunk)
                buffer.sizes += batch.sizes[begin:end].tolist()
                buffer.file_bytes += int(ends[end - 1]) - taken
                begin = end
                taken = int(ends[end - 1])
            for name, numbers in lengths.items():
                self._lengths[name].frombytes(numbers.tobytes())
            self.num_samples += len(batch.sizes)

    def finish(self) -> None:
        """Write the last shard, wait until all shards are put, and put the index. A second call does nothing.

        Raises:
            ValueError: No columns were given, and there is no sample to infer them from.
            FileExistsError, ConflictError: Another writer changed the dataset meanwhile; its dataset stays.
            StoreError: A shard or the index could not be put; then there is no index. After UnavailableError for an
                append's change, call it again: the samples are there once, whether or not the change had been put.
        """
        if self._finished:
            return
        encoder = self._encoder or self._open()
        try:
            self._end_shard(encoder)
            entries = self._pipeline.finish()
            self.shards = [entry.to_object() for entry in entries]
        finally:
            self._pipeline.close()  # no thread of a writer that failed puts anything later
        self._pool.clear()
        try:
            self.length_files = self.length_files or self._put_lengths()
            texts = list(map(to_text, entries))
            self._place.commit(Edit("append", texts, self.length_files, self._message, self._place.key))
        except (FileExistsError, ConflictError) as error:
            self._pipeline.fail(error)
            raise
        self._finished = True
        self._encoder = None
        if self._progress_bar:
            write_stderr(f"\n{self._place}: {self.num_samples:,} samples in {len(entries):,} shards\n")

    def _put_lengths(self) -> dict[str, tuple[FileEntry, ...]]:
        lengths = {name: np.array(numbers, np.uint32) for name, numbers in self._lengths.items()}
        with self._pipeline:  # some files may be put already
            return put_lengths(self._place, lengths, self._config.hashes)

    def _open(self, infer: Callable[[], dict[str, str]] | None = None) -> ShardEncoder:
        if self._finished:
            raise ValueError("the writer is finished, and its index is put. Make a new writer for more samples.")
        if not self._opened:
            self._place.begin(self._mode)
            self._opened = True
        encoder = self._make_encoder(self._chosen(infer))
        if self._place.base is not None:
            check_appendable(self._place.base, encoder.schema.format, encoder.schema.columns, self._lengths)
        check_measurable(self._length_functions, encoder.schema.names)
        self._buffer = ShardBuffer(self._pool, encoder.header_bytes)
        self._encoder = encoder
        self._num_columns = len(encoder.schema.names)
        self._show_columns(encoder.schema.columns)
        return encoder

    def _report_extra_columns(self, encoder: ShardEncoder, names: Iterable[str]) -> None:
        """Warn once about values that belong to no column. ValueError if the caller did not choose the columns."""
        if self._has_reported_extra:
            return
        extra = ", ".join(sorted(repr(name) for name in set(names) - set(encoder.schema.names)))
        columns = ", ".join(encoder.schema.names)
        if self._columns is None:
            known = "the dataset appended to has them" if self._mode == "append" else "inferred from the first sample"
            raise ValueError(
                f"values beyond the columns cannot be written: {extra}; the columns are {columns}, as {known}. "
                "Pass columns= with the columns to write."
            )
        self._has_reported_extra = True
        warnings.warn(
            f"values beyond the columns are not written: {extra}; the columns are {columns}. Add the ones to "
            "keep to columns=.",
            stacklevel=3,
        )

    def _check_fits(self, encoder: ShardEncoder, num_bytes: int, total_bytes: int) -> None:
        """Raise ValueError unless samples can be written: the largest has `num_bytes`, all need `total_bytes`."""
        if encoder.header_bytes + num_bytes + encoder.per_sample_overhead > MAX_FILE_BYTES:
            raise ValueError(f"a shard must stay under 4 GiB; one sample has {num_bytes:,} bytes. Split the sample.")
        if encoder.schema.size_limit is None and self._buffer.file_bytes + total_bytes > self._max_file_bytes:
            raise ValueError(
                f"without size_limit all samples go to one shard of 4 GiB; after {self.num_samples:,} it is full. "
                "Set size_limit."
            )

    def _send(self, encoder: ShardEncoder) -> None:
        """Hand the samples of the current shard to a thread."""
        buffer = self._buffer
        place = self._place
        if not buffer.sizes:
            return
        name = f"shard.{place.next_shard + self._num_sent:05}.{encoder.schema.format}"
        first = self._pipeline.first

        def put() -> ShardEntry:
            try:
                return finalize_shard(name, encoder, buffer.sizes, buffer.parts(), place, first)
            finally:
                buffer.release()

        with self._pipeline:
            self._pipeline.submit(put)
            self._buffer = ShardBuffer(self._pool, encoder.header_bytes)
            self._num_sent += 1
        if self._progress_bar:
            write_stderr(f"\r{self._num_sent:,} shards, {self.num_samples:,} samples")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if kind is None:
            self.finish()
            return
        if self._finished:  # before the error: the dataset is whole
            return
        self._pipeline.fail(error or kind())
        self._pipeline.close()
        self._log_error(kind)

    def _log_error(self, kind: type[BaseException]) -> None:
        """Say what an error has left."""
        left = sorted(self._place.done)
        _LOG.error(
            "writing to %s ended with %s before the index was put, so %s. It left %s.",
            self._place,
            kind.__name__,
            "no dataset was written" if self._mode == "new" else "the dataset is as before",
            f"{len(left)} files, {left[0]} to {left[-1]}" if left else "no files",
        )


def finalize_shard(
    name: str,
    encoder: ShardEncoder,
    sizes: Sequence[int],
    parts: Sequence[Any],
    place: Transaction,
    after: Future[Any] | None = None,
) -> ShardEntry:
    """Pack, hash, compress, hash and put a shard of samples of these sizes and bytes (``parts``); return its entry.

    The dataset's first shard, `after`, is put before all others: a second writer is refused before it has put anything.
    """
    files = list[Any]()  # raw and compressed, of each part
    for part, data in encoder.files(sizes, parts):
        files += _put_file(f"{name}.meta" if part == "meta" else name, data, encoder.schema, place, after)
    return encoder.schema.shard(len(sizes), *files)


def _put_file(
    name: str, parts: list[Any], schema: Schema, place: Transaction, after: Future[Any] | None
) -> tuple[FileEntry, FileEntry | None]:
    codec = schema.compression
    stored = parts if codec is None else [compress(codec, b"".join(parts))]
    name = place.name_of(name, stored)
    raw = _file_entry(name, parts, schema.hashes)
    packed = None if codec is None else _file_entry(f"{name}.{suffix(codec)}", stored, schema.hashes)
    if after is not None:
        after.result()
    place.part((packed or raw).basename, stored)
    return raw, packed


def _file_entry(name: str, parts: list[Any], hashes: tuple[str, ...]) -> FileEntry:
    return FileEntry(name, sum(map(len, parts)), digest_parts(hashes, parts))
