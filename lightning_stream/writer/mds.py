"""The writer of MDS shards."""

from __future__ import annotations

from collections.abc import Mapping

from lightning_stream.formats.mds.encode import MdsEncoder
from lightning_stream.formats.shard_encoder import ShardEncoder
from lightning_stream.writer.base import ShardWriter


class MDSWriter(ShardWriter):
    """Write samples as MDS shards, and index.json last.

    Example::

        with MDSWriter(out="s3://bucket/train", columns={"text": "str", "label": "int"}) as writer:
            writer.write({"text": "a sample", "label": 3})
            writer.write_batch({"text": ["two", "more"], "label": [1, 2]})

    Args:
        out: A local folder, a URL, or (local folder, URL).
        columns: Encoding by column name. None: inferred from the first sample or batch; those of the dataset, if shards
            are appended to it.
        keep_local: Keep the local copies of a pair too.
        compression: E.g. ``"zstd"`` or ``"zstd:7"``; None for no compression.
        hashes: The hashes of every file in the index, by which readers check files, e.g. ``["sha1"]``; None for
            ``["xxh3_64"]``, ``[]`` for no hashes.
        size_limit: Bytes after which a shard is full, as a number or ``"64mb"``; None for one shard.
        overwrite: Replace the dataset at ``out`` as a whole, when this writer finishes. Other files there stay.
        append: Add shards to the dataset at ``out``, under a new version of its index. The version before stays beside
            it: `Stream(version=...)` opens it.
        max_workers: Number of threads that hash, compress and put shards; 0 to use the caller's thread.
        progress_bar: Report shards on stderr.
        retry: How often a failed request to the remote store is tried again; None for the default.
        store_options: Options of the remote store.
        exist_ok: The name that mosaicml-streaming has for `overwrite`.

    Raises:
        ValueError: A setting is wrong, or an encoding is unknown.
    """

    def _make_encoder(self, columns: Mapping[str, str]) -> ShardEncoder:
        config = self._config
        return MdsEncoder(columns, config.compression, config.hashes, config.size_limit)
