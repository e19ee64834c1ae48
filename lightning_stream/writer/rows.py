"""The writers of row formats: JSON lines, and values with separators."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from lightning_stream.errors import suggesting
from lightning_stream.formats.index.schema import SEPARATORS, Schema
from lightning_stream.formats.rows.encode import RowEncoder
from lightning_stream.formats.shard_encoder import ShardEncoder, require_columns
from lightning_stream.writer.base import Out, ShardWriter
from lightning_stream.writer.config import WriterConfig
from lightning_stream.writer.infer import infer_batch_columns, infer_columns
from lightning_stream.writer.target import Target, with_retries


class _RowWriter(ShardWriter):
    """Writes samples as rows of text, and index.json last.

    Args:
        out: Where to: a local folder, a URL, or (local folder, URL).
        columns: ``"str"``, ``"int"`` or ``"float"`` by column name; None to infer them from the first sample.
        newline: End of a row.
        keep_local: With a pair, keep the local copies too.
        compression: E.g. ``"zstd"``; None for none.
        hashes: Digests of every file that go into the index, by which readers check what they fetch, e.g.
            ``["sha1"]``; None for ``["xxh3_64"]``, ``[]`` for none.
        size_limit: Bytes after which a shard's text is full; None for one shard.
        exist_ok: Allow files at ``out`` already; those of the same name are replaced.
        append: Add shards to the dataset at ``out``, under a new version of its index.
        max_workers: Threads that hash, compress and put shards; 0 to do that in the caller's.
        progress_bar: Report shards on stderr.
        retry: How often a failed request to the remote store is tried again; None for what suits the store.
        store_options: For the remote store.

    Raises:
        ValueError: A setting that is none, or a column type that row formats lack.
    """

    _format: ClassVar[str]

    @suggesting
    def __init__(
        self,
        *,
        out: Out,
        columns: Mapping[str, str] | None = None,
        newline: str = "\n",
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
        if not newline:
            raise ValueError("newline must not be empty.")
        self._newline = newline
        self._separator = SEPARATORS.get(self._format)
        if self._format != "xsv":
            self._check_columns()

    def _check_columns(self) -> None:
        if self._columns is not None:
            self._packer_of(self._columns)

    def _packer_of(self, columns: Mapping[str, str]) -> ShardEncoder:
        require_columns(columns)
        config, names = self._config, tuple(sorted(columns))
        kinds = tuple(columns[name] for name in names)
        sizes: tuple[None, ...] = (None,) * len(names)
        about = (config.compression, config.hashes, config.size_limit, self._newline, self._separator)
        return RowEncoder(Schema(self._format, names, kinds, sizes, *about))

    def _make_packer(self, sample: Mapping[str, Any] | None, columns: dict[str, Any] | None) -> ShardEncoder:
        chosen = self._appended.columns if self._columns is None else self._columns
        if chosen is None and sample is not None:
            chosen = {name: _row_type(encoding) for name, encoding in infer_columns(sample).items()}
        elif chosen is None and columns is not None:
            chosen = {name: _row_type(encoding) for name, encoding in infer_batch_columns(columns).items()}
        elif chosen is None:
            raise ValueError("no columns were given, and no sample came to infer them from. Pass columns=.")
        return self._packer_of(chosen)


class JSONWriter(_RowWriter):
    """Writes JSON lines: one object per row, keys sorted."""

    _format = "json"


class CSVWriter(_RowWriter):
    """Writes values with commas between, unquoted: a value that holds a comma or the newline is refused."""

    _format = "csv"


class TSVWriter(_RowWriter):
    """Writes values with tabs between, unquoted: a value that holds a tab or the newline is refused."""

    _format = "tsv"


class XSVWriter(_RowWriter):
    """Writes values with ``separator`` between, unquoted: a value that holds it or the newline is refused."""

    _format = "xsv"

    def __init__(self, *, separator: str, **options: Any) -> None:
        super().__init__(**options)
        if not separator:
            raise ValueError("separator must not be empty.")
        self._separator = separator
        self._check_columns()


def _row_type(encoding: str) -> str:
    """The row type for what an MDS column would be."""
    if encoding.startswith(("int", "uint")):
        return "int"
    return "float" if encoding.startswith("float") else encoding
