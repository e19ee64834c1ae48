"""Datasets with an index.json, MDS or a row format: read through the usual reader, to be written as other shards."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from lightning_stream.errors import AccessError, NotFoundError, StoreError, redact
from lightning_stream.formats.encodings import get_encoding
from lightning_stream.formats.encodings.base import BinaryColumn
from lightning_stream.formats.index import INDEX_NAME, Index
from lightning_stream.reading.reader import SampleReader
from lightning_stream.reading.shard_table import ReaderConfig
from lightning_stream.reading.stream import Stream
from lightning_stream.reading.stream_shards import StreamShards
from lightning_stream.shared_files import scratch_folder
from lightning_stream.sources.base import Asked, Batch, Batches, Columns, Piece, Pieces, Reader, Source, SourceSchema
from lightning_stream.sources.choose import SPLIT_OF
from lightning_stream.sources.files import Files, SourceFile, split_place
from lightning_stream.stores import Options, absolute, is_remote, open_store
from lightning_stream.threads import DaemonPool
from lightning_stream.version_log import is_listed

_ROW_ENCODINGS = {"float": "float64"}  # what MDS calls the types of row formats, where it has another name
_ROWS = 256


def open_dataset(source: Any, kind: str | None, options: Mapping[str, Any] | None, store_options: Any) -> Source | None:
    """The dataset with an index.json at a path or URL, or those of its splits; None if something else is there."""
    if kind not in (None, "mds") or not isinstance(source, (str, os.PathLike)):
        return None
    uri = absolute(os.fspath(source).rstrip("/").removesuffix(f"/{INDEX_NAME}"))
    if kind is None and split_place(uri)[1]:
        return None
    index_files = {"": index_file} if (index_file := _index_at(uri, store_options)) else {}
    for folder, split in SPLIT_OF.items() if not index_files else ():
        if index_file := _index_at(f"{uri}/{folder}", store_options):
            index_files.setdefault(split, index_file)
    if not index_files and kind is None:
        return None
    if not index_files:
        raise NotFoundError(f"{redact(uri)} has no {INDEX_NAME} of a dataset, nor have its splits. Check the path.")
    if others := (options or {}).keys() - {"version"}:
        raise ValueError(f"source_options of a dataset with an {INDEX_NAME} are version; found {', '.join(others)}.")
    reader = MdsReader(**(options or {}), options=store_options if is_remote(uri) else None)
    splits = dict[str, tuple[SourceFile, ...]]()
    for split, file in sorted(index_files.items(), key=lambda pair: pair[0] == "train"):
        reader.begin([file])
        splits = {split: (replace(file, num_bytes=reader.num_bytes),), **splits}
    files = tuple(file for split_files in splits.values() for file in split_files)
    return Source(redact(uri), files, reader, {} if "" in splits else splits)


def _index_at(uri: str, options: Options | None) -> SourceFile | None:
    """The index of a dataset; other formats have files of that name, too."""
    options = options if is_remote(uri) else None
    with suppress(NotFoundError):
        store = open_store(uri, options)
        try:
            data = store.read(INDEX_NAME)
        except AccessError:
            if is_listed(store, INDEX_NAME, unknown=True):
                raise
            return None  # some stores refuse what is not there
        if b'"shards"' in data:
            (entry,) = (file for file in store.list(INDEX_NAME) if file.name == INDEX_NAME)
            return SourceFile(uri, INDEX_NAME, 0, "", value=entry.version, store=store)
    return None


@dataclass
class MdsReader(Reader):
    """Samples of a dataset with an index.json. Values are decoded only where a column is written in another encoding.

    Attributes:
        version: The version that is read, by its number or digits of its digest; None for the newest.
        digest: That of the version's index, which identifies the source.
        stamp: What else identifies a source without hashes: the time of its index, or the store's version of it.
        options: Those of the store.
    """

    kind = "mds"
    is_cut_by_piece = True
    version: int | str | None = None
    digest: str = ""
    stamp: str = ""
    options: Options | None = field(default=None, repr=False)

    def begin(self, files: Files) -> None:
        """Read the index, the deleted samples and the lengths."""
        self._file = files[0]
        with self._opened(None) as reader:
            (self._index,) = reader.indexes
            self._edges = reader.snapshot.shard_offsets
            self.lengths = {name: reader.lengths(name) for name in self._index.lengths}
        self.digest = self._index.digest
        self.stamp = "" if all(schema.hashes for schema in self._index.schemas) else str(self._file.value)
        self.source_digest = self.digest if self._index.deleted is None else ""

    @property
    def num_bytes(self) -> int:
        """Bytes of all samples."""
        return int(self._index.raw_bytes.sum())

    def find_columns(self, files: Files, asked: Asked | None) -> SourceSchema:
        """Return the columns of the index. ValueError where shards differ in them and none are asked for."""
        sets = self._index.column_sets
        if asked is None and len(sets) > 1:
            known = "; ".join(", ".join(f"{name}={kind}" for name, kind in column_set.items()) for column_set in sets)
            raise ValueError(f"{files[0].root} has shards with different columns: {known}. Pass columns= to choose.")
        notes = {}
        with suppress(StoreError, ValueError, KeyError, TypeError):
            notes = {"classes": dict(json.loads(self._file.beside("manifest.json"))["classes"])}
        known_columns = {name: kind for column_set in sets for name, kind in column_set.items()}
        return SourceSchema({name: _ROW_ENCODINGS.get(kind, kind) for name, kind in known_columns.items()}, notes)

    def scan(
        self,
        files: Files,
        columns: Columns,  # noqa: ARG002
        pool: DaemonPool,  # noqa: ARG002
    ) -> Iterator[Piece]:
        """Yield the samples of each shard that are not deleted."""
        edges = self._edges.tolist()
        for begin, end, num_bytes in zip(edges, edges[1:], self._index.raw_bytes.tolist(), strict=False):
            if begin < end:
                yield Piece(files[0], begin, end, num_bytes, end - begin)

    def read(self, splits: Pieces, columns: Columns) -> Batches:
        """Yield columns of values, in the bytes in which they are stored where these are written again."""
        sets = self._index.column_sets
        formats = {schema.format for schema in self._index.schemas}
        unchanged = {
            name for name, kind in columns.items() if formats == {"mds"} and all(s.get(name) == kind for s in sets)
        }
        raw = {name for name in unchanged if getattr(get_encoding(columns[name]), "layout", None) is None}
        for split in splits:
            with self._opened(columns, raw) as reader:
                for first in range(split.begin, split.end or 0, _ROWS):
                    ids = np.arange(first, min(split.end or 0, first + _ROWS))
                    batch = reader.batch(ids)
                    for name in raw:
                        batch[name] = BinaryColumn(batch[name])
                        batch[name].encoding = columns[name]
                    rows = {name: batch[name] for name in columns}
                    lengths = {name: numbers[ids] for name, numbers in self.lengths.items()}
                    yield Batch(rows, f"{self._file.root}, samples {ids[0]:,} to {ids[-1]:,}", lengths)

    def _opened(self, columns: Columns | None, raw: Collection[str] = ()) -> AbstractContextManager[SampleReader]:
        """A reader of the dataset, which decodes no `raw` column."""
        url = self._file.root
        config = ReaderConfig(decoders=dict.fromkeys(raw, bytes))
        if columns is None:
            return temporary_reader(url, self.options, version=self.version, config=config)
        is_mds = all(schema.format == "mds" for schema in self._index.schemas)
        index = self._index.choose(list(columns)) if is_mds else self._index
        return temporary_reader(url, self.options, index=index, config=config)


@contextmanager
def temporary_reader(
    url: str,
    options: Options | None,
    *,
    index: Index | None = None,
    version: int | str | None = None,
    config: ReaderConfig | None = None,
) -> Iterator[SampleReader]:
    """A reader of a dataset, or of the shards of an index alone; what it downloads is deleted at the end.

    All samples come from verified shards. Those of this machine that are not compressed are read where they are.
    """
    config = replace(config or ReaderConfig(), start_by_range=False)
    is_here = index is not None and not is_remote(url) and not any(schema.compression for schema in index.schemas)
    with scratch_folder() as folder:
        stream = Stream(url, local=None if is_here else folder, options=options, version=version)
        with closing(SampleReader(StreamShards([stream], config=config))) as reader:
            if index is not None:
                reader.shards.indexes = (index,)
            yield reader
