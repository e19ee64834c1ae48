"""The writers of all formats: MDS, JSON lines, and values with separators."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, ClassVar

from lightning_stream.formats.mds.encode import MdsEncoder
from lightning_stream.formats.model import SEEKABLE, Schema
from lightning_stream.formats.rows import RowEncoder
from lightning_stream.formats.shard_encoder import ShardEncoder, check_columns

from .base import ShardWriter


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
        compression: E.g. ``"zstd"`` or ``"zstd:7"``; ``"zstd:seekable"`` for frames of at most 256 samples that readers
            can fetch alone; None for no compression.
        hashes: The hashes of every file in the index, by which readers check files, e.g. ``["sha1"]``; None for
            ``["xxh3_64"]``, ``[]`` for no hashes.
        size_limit: Bytes after which a shard is full, as a number or ``"64mb"``; None or 0 for one shard.
        overwrite: Replace the dataset at ``out`` as a whole, when this writer finishes. Other files there stay.
        append: Add shards to the dataset at ``out``, as a new version of it. `Stream(version=...)` opens the versions
            before. Several writers may append at the same time.
        max_workers: Number of threads that hash, compress and put shards; 0 to use the caller's thread.
        progress_bar: Report shards on stderr.
        retry: How often a failed request to the remote store is tried again; None for the default.
        store_options: Options of the remote store.
        exist_ok: The name that mosaicml-streaming has for `overwrite`.
        lengths: Functions by name, e.g. ``{"tokens": len}``, whose results readers get before any sample
            (`StreamingDataset.lengths`): whole numbers below 2**32. A function gets the value of the column of its
            name, or the whole sample if there is no such column.
        message: With `append`, a note about it, which ``lightning-stream log`` shows.
        key: With `append`, a name of it such as ``"batch-17"``. If the dataset has an append of this key already,
            nothing is added: a job that was killed can be repeated.

    Raises:
        ValueError: A setting is wrong, or an encoding is unknown.
    """

    def _make_encoder(self, columns: Mapping[str, str]) -> ShardEncoder:
        return MdsEncoder(columns, *self._config)


class _RowWriter(ShardWriter):
    """Writes rows of text that end with ``newline``. A column is ``"str"``, ``"int"`` or ``"float"``."""

    _format: ClassVar[str]
    _separator: str | None = None

    def __init__(self, *, newline: str = "\n", **options: Any) -> None:
        if not newline:
            raise ValueError("newline must not be empty.")
        self._newline = newline
        super().__init__(**options)

    def _make_encoder(self, columns: Mapping[str, str]) -> ShardEncoder:
        check_columns(columns)
        if (self.compression or "").startswith(SEEKABLE):
            raise ValueError(f"compression={self.compression!r} is for MDS shards alone. Use MDSWriter, or 'zstd'.")
        names = tuple(sorted(columns))
        kinds = tuple(columns[name] for name in names)
        sizes = (None,) * len(names)
        return RowEncoder(Schema(self._format, names, kinds, sizes, *self._config, self._newline, self._separator))

    def _inferred(self, columns: dict[str, str]) -> dict[str, str]:
        return {name: re.sub("^u?(int|float).*", r"\1", encoding) for name, encoding in columns.items()}  # without bits


class JSONWriter(_RowWriter):
    """Write JSON lines: one object per row, keys sorted. The arguments are those of `MDSWriter`, and ``newline``.

    Example::

        with JSONWriter(out="rows", columns={"text": "str", "label": "int"}) as writer:
            writer.write({"text": "a sample", "label": 3})
    """

    _format = "json"


class CSVWriter(_RowWriter):
    """Write values with commas between them, unquoted: a value that holds a comma or the newline is refused.

    Example::

        with CSVWriter(out="rows", columns={"word": "str", "count": "int"}) as writer:
            writer.write({"word": "sample", "count": 3})
    """

    _format = "csv"
    _separator = ","


class TSVWriter(_RowWriter):
    """Write values with tabs between them, unquoted: a value that holds a tab or the newline is refused.

    Example::

        with TSVWriter(out="rows", columns={"word": "str", "count": "int"}) as writer:
            writer.write({"word": "sample", "count": 3})
    """

    _format = "tsv"
    _separator = "\t"


class XSVWriter(_RowWriter):
    """Write values with ``separator`` between them, unquoted: a value that holds it or the newline is refused.

    Example::

        with XSVWriter(out="rows", columns={"word": "str", "count": "int"}, separator="|") as writer:
            writer.write({"word": "sample", "count": 3})
    """

    _format = "xsv"

    def __init__(self, *, separator: str, **options: Any) -> None:
        if not separator:
            raise ValueError("separator must not be empty.")
        self._separator = separator
        super().__init__(**options)
