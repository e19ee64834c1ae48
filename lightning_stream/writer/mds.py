"""The writer of MDS shards."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from lightning_stream.formats.pack import MAX_FILE_BYTES, RowEncoder, config_bytes, mds_file, mds_schema
from lightning_stream.formats.schema import Schema
from lightning_stream.writer.base import CutShard, Out, ShardWriter, WriterConfig
from lightning_stream.writer.batch_encode import encode_batch
from lightning_stream.writer.infer import infer_batch_columns, infer_columns


class MDSWriter(ShardWriter):
    """Writes samples as MDS shards, and index.json last.

    Args:
        out: Where to: a local folder, a URL, or (local folder, URL).
        columns: Encoding by column name; None to infer them from the first sample.
        keep_local: With a pair, keep the local copies too.
        compression: E.g. ``"zstd"`` or ``"zstd:7"``; None for none.
        hashes: E.g. ``["xxh64"]``: digests of every file go into the index.
        size_limit: Bytes after which a shard is full, as a number or ``"64mb"``; None for one shard.
        exist_ok: Allow files at ``out`` already; those of the same name are replaced.
        max_workers: Threads that hash, compress and put shards; 0 to do that in the caller's.
        progress_bar: Report landed shards on stderr.
        store_options: For the remote store.

    Raises:
        ValueError: A setting that is none, or an unknown encoding.
    """

    _format = "mds"

    def __init__(
        self,
        *,
        out: Out,
        columns: Mapping[str, str] | None = None,
        keep_local: bool = False,
        compression: str | None = None,
        hashes: Iterable[str] | None = None,
        size_limit: int | str | None = 1 << 26,
        exist_ok: bool = False,
        max_workers: int | None = None,
        progress_bar: bool = False,
        store_options: Mapping[str, Any] | None = None,
    ) -> None:
        config = WriterConfig.make(compression, hashes, size_limit, exist_ok)
        super().__init__(
            out,
            config,
            keep_local=keep_local,
            max_workers=max_workers,
            progress_bar=progress_bar,
            store_options=store_options,
        )
        self._layout = None if columns is None else _MdsLayout(columns, config)
        self._clear()

    @property
    def _schema(self) -> Schema:
        if self._layout is None:
            raise ValueError("no columns were given, and no sample to infer them from: pass columns=.")
        return self._layout.schema

    def _clear(self) -> None:
        self._parts: list[Any] = []
        self._sizes: list[int] = []
        self._file_bytes = 0 if self._layout is None else self._layout.empty_bytes

    def _add(self, sample: Mapping[str, Any]) -> None:
        if self._layout is None:
            self._layout = _MdsLayout(infer_columns(sample), self._config)
            self._clear()
        parts = self._layout.encoder.encode(sample)
        num_bytes = sum(map(len, parts))
        limit = MAX_FILE_BYTES if self._config.size_limit is None else self._config.size_limit
        if limit < self._file_bytes + num_bytes + 4:
            self._make_room(num_bytes)
        self._parts += parts
        self._sizes.append(num_bytes)
        self._file_bytes += num_bytes + 4

    def _add_batch(self, columns: dict[str, Any], num_rows: int) -> None:
        if self._layout is None:
            self._layout = _MdsLayout(infer_batch_columns(columns), self._config)
            self._clear()
        batch = encode_batch(self._layout.schema, columns, num_rows)
        limit = MAX_FILE_BYTES if self._config.size_limit is None else self._config.size_limit
        ends = np.cumsum(batch.sizes + 4)
        begin = 0
        while begin < num_rows:
            taken = int(ends[begin - 1]) if begin else 0
            end = int(np.searchsorted(ends, limit - self._file_bytes + taken, side="right"))
            if end <= begin:
                # full, or a row that fits no shard but one of its own
                self._make_room(int(batch.sizes[begin]))
                end = max(begin + 1, int(np.searchsorted(ends, limit - self._file_bytes + taken, side="right")))
            self._parts += batch.rows(begin, end)
            self._sizes += batch.sizes[begin:end].tolist()
            self._file_bytes += int(ends[end - 1]) - taken
            begin = end

    def _make_room(self, num_bytes: int) -> None:
        """The gathered samples and the next one do not fit one shard: begin another."""
        layout = self._layout
        assert layout is not None
        if self._config.size_limit is None or layout.empty_bytes + num_bytes + 4 > MAX_FILE_BYTES:
            raise ValueError(
                "a shard must stay under 4 GiB, since its offsets have 32 bits; "
                f"the next sample has {num_bytes} bytes, after {self._file_bytes}. Set size_limit, or split the sample."
            )
        self._send()

    def _cut(self) -> CutShard | None:
        layout = self._layout
        if not self._sizes or layout is None:
            return None
        data = mds_file(layout.config_bytes, self._sizes, self._parts)
        cut = CutShard(self._next_shard, len(self._sizes), (("data", data),))
        self._clear()
        return cut


class _MdsLayout:
    """What is known once the columns are."""

    def __init__(self, columns: Mapping[str, str], config: WriterConfig) -> None:
        self.schema = mds_schema(columns, config.compression, config.hashes, config.size_limit)
        self.config_bytes = config_bytes(self.schema)
        self.encoder = RowEncoder(self.schema)
        self.empty_bytes = 8 + len(self.config_bytes)
