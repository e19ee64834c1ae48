"""The writer of MDS shards."""

from __future__ import annotations

from collections.abc import Mapping

from lightning_stream.formats.mds.encode import MdsEncoder
from lightning_stream.formats.shard_encoder import ShardEncoder
from lightning_stream.writer.base import ShardWriter


class MDSWriter(ShardWriter):
    """Writes samples as MDS shards, and index.json last.

    Example::

        with MDSWriter(out="s3://bucket/train", columns={"text": "str", "label": "int"}) as writer:
            writer.write({"text": "a sample", "label": 3})
            writer.write_batch({"text": ["two", "more"], "label": [1, 2]})

    Args:
        out: Where to: a local folder, a URL, or (local folder, URL).
        columns: Encoding by column name; None to infer them from the first sample or batch, or, when appending, to
            take those of the dataset.
        keep_local: With a pair, keep the local copies too.
        compression: E.g. ``"zstd"`` or ``"zstd:7"``; None for none.
        hashes: Digests of every file that go into the index, by which readers check what they fetch, e.g.
            ``["sha1"]``; None for ``["xxh3_64"]``, ``[]`` for none.
        size_limit: Bytes after which a shard is full, as a number or ``"64mb"``; None for one shard.
        overwrite: Replace the dataset at ``out`` as a whole, when this writer finishes. Other files there stay.
        append: Add shards to the dataset at ``out``, under a new version of its index. The version before stays beside
            it: `Stream(version=...)` opens it.
        max_workers: Threads that hash, compress and put shards; 0 to do that in the caller's.
        progress_bar: Report shards on stderr.
        retry: How often a failed request to the remote store is tried again; None for what suits the store.
        store_options: For the remote store.
        exist_ok: mosaicml-streaming's word for `overwrite`.

    Raises:
        ValueError: A wrong setting, or an unknown encoding.
    """

    def _make_encoder(self, columns: Mapping[str, str]) -> ShardEncoder:
        config = self._config
        return MdsEncoder(columns, config.compression, config.hashes, config.size_limit)
