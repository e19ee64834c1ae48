"""The writer of MDS shards."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from lightning_stream.errors import suggesting
from lightning_stream.formats.encodings import get_encoding
from lightning_stream.formats.mds.encode import MdsEncoder
from lightning_stream.formats.shard_encoder import ShardEncoder
from lightning_stream.writer.base import Out, ShardWriter
from lightning_stream.writer.config import WriterConfig
from lightning_stream.writer.infer import infer_batch_columns, infer_columns
from lightning_stream.writer.target import Target, with_retries


class MDSWriter(ShardWriter):
    """Writes samples as MDS shards, and index.json last.

    Args:
        out: Where to: a local folder, a URL, or (local folder, URL).
        columns: Encoding by column name; None to infer them from the first sample or batch, or, when appending, to
            take those of the dataset.
        keep_local: With a pair, keep the local copies too.
        compression: E.g. ``"zstd"`` or ``"zstd:7"``; None for none.
        hashes: Digests of every file that go into the index, by which readers check what they fetch, e.g.
            ``["sha1"]``; None for ``["xxh3_64"]``, ``[]`` for none.
        size_limit: Bytes after which a shard is full, as a number or ``"64mb"``; None for one shard.
        exist_ok: Allow files at ``out`` already; those of the same name are replaced.
        append: Add shards to the dataset at ``out``, under a new version of its index; the old version stays beside it.
        max_workers: Threads that hash, compress and put shards; 0 to do that in the caller's.
        progress_bar: Report shards on stderr.
        retry: How often a failed request to the remote store is tried again; None for what suits the store.
        store_options: For the remote store.

    Raises:
        ValueError: A setting that is none, or an unknown encoding.
    """

    @suggesting
    def __init__(
        self,
        *,
        out: Out,
        columns: Mapping[str, str] | None = None,
        keep_local: bool = False,
        compression: str | None = None,
        hashes: Iterable[str] | None = None,
        size_limit: float | str | None = 1 << 26,
        exist_ok: bool = False,
        append: bool = False,
        max_workers: int | None = None,
        progress_bar: bool = False,
        retry: int | None = None,
        store_options: Mapping[str, Any] | None = None,
    ) -> None:
        config = WriterConfig.make(
            compression,
            hashes,
            size_limit,
            exist_ok=exist_ok,
            append=append,
            max_workers=max_workers,
            progress_bar=progress_bar,
        )
        super().__init__(Target(out, keep_local, with_retries(store_options, retry)), config, columns)
        for encoding in (self._columns or {}).values():
            get_encoding(encoding)

    def _make_packer(self, sample: Mapping[str, Any] | None, columns: dict[str, Any] | None) -> ShardEncoder:
        chosen = self._appended.columns if self._columns is None else self._columns
        if chosen is None and sample is not None:
            chosen = infer_columns(sample)
        elif chosen is None and columns is not None:
            chosen = infer_batch_columns(columns)
        elif chosen is None:
            raise ValueError("no columns were given, and no sample came to infer them from. Pass columns=.")
        config = self._config
        return MdsEncoder(chosen, config.compression, config.hashes, config.size_limit)
