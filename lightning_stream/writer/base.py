"""What all writers share: settings, where shards go, and the index that is put last."""

from __future__ import annotations

import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, TypeAlias

from lightning_stream.formats.compression import check_compression, compress, extension
from lightning_stream.formats.hashing import check_hashes, digest
from lightning_stream.formats.index import INDEX_NAME, index_bytes
from lightning_stream.formats.pack import MAX_FILE_BYTES, file_object, schema_object
from lightning_stream.formats.schema import FileEntry, Schema
from lightning_stream.formats.sizes import parse_bytes
from lightning_stream.writer.batch import batch_columns
from lightning_stream.writer.pipeline import Pipeline
from lightning_stream.writer.target import Target

Out: TypeAlias = "str | os.PathLike[str] | tuple[str | os.PathLike[str], str | os.PathLike[str]]"

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class WriterConfig:
    """How shards are cut and packed."""

    compression: str | None
    hashes: tuple[str, ...]
    size_limit: int | None
    exist_ok: bool

    @classmethod
    def make(
        cls, compression: str | None, hashes: Iterable[str] | None, size_limit: int | str | None, exist_ok: bool
    ) -> WriterConfig:
        """Check a writer's settings.

        Raises:
            ValueError: An unknown compression or hash, or a size limit beyond what offsets of 32 bits can describe.
        """
        limit = None if size_limit is None else parse_bytes(size_limit, "size_limit")
        if limit is not None and limit > MAX_FILE_BYTES:
            raise ValueError(f"size_limit must stay under 4 GiB, since offsets have 32 bits; got {size_limit!r}.")
        return cls(check_compression(compression), check_hashes(hashes), limit, exist_ok)


@dataclass(frozen=True)
class CutShard:
    """The samples of one shard, encoded, and not yet written: its files as (``"data"`` or ``"meta"``, bytes)."""

    number: int
    num_samples: int
    files: tuple[tuple[str, bytes], ...]


class ShardWriter(ABC):
    """Cuts samples into shards, and lands each shard in threads of its own: hash, compress, hash, put.

    Use it as a context, or call `finish`. Until then there is no index, hence no dataset; a context that raises
    leaves none.
    """

    _format = ""

    def __init__(
        self,
        out: Out,
        config: WriterConfig,
        *,
        keep_local: bool,
        max_workers: int | None,
        progress_bar: bool,
        store_options: Mapping[str, Any] | None,
    ) -> None:
        self._config = config
        self._target = Target(out, keep_local, store_options)
        self._pipeline: Pipeline[dict[str, Any]] = Pipeline(max_workers)
        self._progress_bar = progress_bar
        self._opened = False
        self._finished = False
        self._next_shard = 0
        self.num_samples = 0

    @property
    @abstractmethod
    def _schema(self) -> Schema: ...

    @abstractmethod
    def _cut(self) -> CutShard | None:
        """The samples gathered so far, as a shard; None if there are none."""

    @abstractmethod
    def _add(self, sample: Mapping[str, Any]) -> None:
        """Take one sample, and send a shard off when it is full."""

    @abstractmethod
    def _add_batch(self, columns: dict[str, Any], num_rows: int) -> None:
        """Take the rows of a batch, at least one."""

    def write(self, sample: Mapping[str, Any]) -> None:
        """Add one sample.

        Raises:
            TypeError: A value of the wrong type; names the column.
            ValueError: A column is missing, or a value is out of range; or the writer is finished.
            StoreError: An earlier shard could not be put.
        """
        self._open()
        self._add(sample)
        self.num_samples += 1

    def write_batch(self, batch: Any) -> None:
        """Add the rows of a batch: a mapping of column names to arrays or lists, an Arrow record batch or table, or a
        pandas frame. The same bytes as `write` of each row, at a fraction of the time.

        Raises:
            TypeError: Not a batch, or values of a wrong type; names the column.
            ValueError: As for `write`, or columns of different lengths. No row of the batch is then written.
        """
        self._open()
        columns, num_rows = batch_columns(batch)
        if num_rows:
            self._add_batch(columns, num_rows)
        self.num_samples += num_rows

    def finish(self) -> None:
        """Write the last shard, wait until all have landed, and put the index. Idempotent.

        Raises:
            StoreError: A shard or the index could not be put; then there is no index.
        """
        if self._finished:
            return
        self._open()
        self._send()
        entries = self._pipeline.finish()
        self._target.put(INDEX_NAME, index_bytes(entries))
        self._finished = True

    def _open(self) -> None:
        if self._finished:
            raise ValueError("the writer is finished: its index is put. Make a new writer for more samples.")
        if not self._opened:
            self._target.prepare(self._config.exist_ok)
            self._opened = True

    def _send(self) -> None:
        """Hand over the samples gathered so far."""
        cut = self._cut()
        if cut is not None:
            self._next_shard += 1
            self._pipeline.submit(lambda: self._land(cut))

    def _land(self, cut: CutShard) -> dict[str, Any]:
        """Put one shard; give its index entry. Runs in a thread."""
        entry = schema_object(self._schema) | {"samples": cut.num_samples}
        for part, data in cut.files:
            suffix = ".meta" if part == "meta" else ""
            raw, packed = self._put_file(f"shard.{cut.number:05}.{self._format}{suffix}", data)
            entry[f"raw_{part}"], entry[f"zip_{part}"] = file_object(raw), file_object(packed)
        return entry

    def _put_file(self, basename: str, data: bytes) -> tuple[FileEntry, FileEntry | None]:
        config = self._config
        raw = _file_entry(basename, data, config.hashes)
        if config.compression is None:
            self._target.put(basename, data)
            return raw, None
        packed_data = compress(config.compression, data)
        packed = _file_entry(f"{basename}.{extension(config.compression)}", packed_data, config.hashes)
        self._target.put(packed.basename, packed_data)
        return raw, packed

    def __enter__(self) -> Any:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.finish()
            return
        self._pipeline.abandon()
        left = self._target.put_names
        _LOG.error(
            "writing to %s ended with %s: there is no index, so no dataset. Left there: %s.",
            self._target,
            kind.__name__,
            f"{len(left)} files, {left[0]} to {left[-1]}" if left else "nothing",
        )


def _file_entry(basename: str, data: bytes, hashes: tuple[str, ...]) -> FileEntry:
    return FileEntry(basename, len(data), {name: digest(name, data) for name in hashes})


def local_path(out: Out) -> Path | None:
    """The local folder that ``out`` names, if any."""
    first = out[0] if isinstance(out, tuple) else out
    return None if "://" in os.fspath(first) else Path(first)
