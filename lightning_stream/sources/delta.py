"""Delta tables: the Parquet files of one version, without the rows that it has deleted.

The table's log is copied through our own store, and read by ``deltalake``: so every store works, with its own
credentials. Nothing is written to the table.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from lightning_stream.errors import FormatError, LightningStreamError, NotFoundError, needs, summarize
from lightning_stream.shared_files import scratch_folder
from lightning_stream.sources.arrow import arrow_columns
from lightning_stream.sources.base import Asked, Batches, Columns, Piece, Pieces, SourceSchema
from lightning_stream.sources.files import DELTA_LOG, Files, Listing, SourceFile, named_in_data
from lightning_stream.sources.tables import ParquetReader
from lightning_stream.stores import Store
from lightning_stream.threads import DaemonPool
from lightning_stream.writer.batch import arrow_numbers

_CONNECTIONS = 16
_UUID_CHARS = 20  # of a file of deleted rows, behind its folder


@dataclass
class DeltaReader(ParquetReader):
    """Rows of a Delta table.

    Attributes:
        version: The table's version; None for the newest.
        partition: Of a shard: the values of the columns that are in the names of folders, with their Arrow types.
        deleted: Of a shard: the numbers of its deleted rows.
        absent: Of a shard: columns that were added to the table after its file was written.
    """

    kind = "delta"
    version: int | None = None
    partition: Mapping[str, tuple[Any, str]] = field(default_factory=dict)
    deleted: Sequence[int] = ()
    absent: Sequence[str] = ()

    def open_log(self, listing: Listing) -> list[SourceFile]:
        """Read the log of a table; return the files of this version, among those that were found, sorted by name."""
        store = listing.log[0].store
        assert store is not None
        with needs("deltalake", "delta", f"reading the Delta table {store.url}"):
            from deltalake import DeltaTable
        with scratch_folder() as folder:
            _copy(store, listing.log, folder)
            try:
                table = DeltaTable(folder, version=self.version)
                if table.metadata().configuration.get("delta.columnMapping.mode", "none") != "none":
                    raise FormatError(f"{store.url}: columns with mapped names cannot be read. Convert the table.")
                self.version = table.version()  # of two versions, the files may be the same
                self._schema = pa.schema(table.schema().to_arrow())
                actions = sorted(
                    pa.table(table.get_add_actions(flatten=True)).to_pylist(), key=lambda action: action["path"]
                )
                self._vectors = self._deletions(table, store, listing.files, Path(folder))
            except LightningStreamError:
                raise
            except Exception as error:  # deltalake's own classes are many
                raise FormatError(f"{store.url} cannot be read as a Delta table: {summarize(error)}") from error
        if not actions:
            raise NotFoundError(f"version {self.version} of the Delta table {store.url} has no rows. Read another one.")
        self._actions = {_named_by_log(unquote(action["path"]), store): action for action in actions}
        by_name = {file.name: file for file in listing.files}
        if missing := [name for name in self._actions if name not in by_name]:
            raise NotFoundError(
                f"{store.url}/{missing[0]} belongs to version {self.version} of the Delta table, but is gone: it may "
                "have been vacuumed. Read a newer version."
            )
        return [by_name[name] for name in self._actions]

    def _deletions(self, table: Any, store: Store, files: Files, folder: Path) -> dict[str, np.ndarray[Any, Any]]:
        """The numbers of the deleted rows of each file."""
        if "deletionVectors" not in (table.protocol().reader_features or ()):
            return {}
        _copy(store, [file for file in files if "deletion_vector_" in file.name and file.ending == ".bin"], folder)
        _check_vectors(folder / DELTA_LOG, store)
        vectors = pa.table(table.deletion_vectors()).select(["filepath", "selection_vector"])
        prefix = f"{folder.as_uri()}/"
        return {
            unquote(str(path).removeprefix(prefix)): np.flatnonzero(~arrow_numbers(is_kept.values))
            for path, is_kept in zip(*vectors, strict=True)
        }

    def find_columns(self, files: Files, asked: Asked | None) -> SourceSchema:
        return SourceSchema(arrow_columns(self._schema, asked))

    def pieces_of(self, file: SourceFile, columns: Columns) -> list[Piece]:
        action = self._actions[file.name]
        # The settings are those of all columns of the table: what is read of it does not make it another table.
        partition = {}
        for key, value in action.items():
            if key.startswith("partition."):
                name = key.removeprefix("partition.")
                partition[name] = _plain(value), str(self._schema.field(name).type).replace("_view", "")
        with self._opened(file, headers=True) as table:
            stored = set(table.schema.names)
            groups = table.pieces()
        absent = [name for name in self._schema.names if name not in stored and name not in partition]
        nulls = [*absent, *(name for name, (value, _) in partition.items() if value is None)]
        pieces = []
        begin = 0
        deleted = self._vectors.get(file.name, np.empty(0, np.int64))
        for group in groups:
            here = deleted[(deleted >= begin) & (deleted < begin + group.num_rows)] - begin
            settings = {"partition": partition, "deleted": here.tolist(), "absent": absent}
            settings = {name: value for name, value in settings.items() if value}
            rows = group.num_rows - len(here)
            begin += group.num_rows
            if rows:
                pieces.append(group._replace(num_rows=rows, settings=settings, nulls=(*group.nulls, *nulls)))
        return pieces

    def read(self, splits: Pieces, columns: Columns) -> Batches:
        """Yield the rows of a row group that are not deleted, with the columns of the table."""
        begin = 0
        for batch in super().read(splits, columns):
            is_kept = ~np.isin(np.arange(batch.rows.num_rows) + begin, self.deleted)
            begin += len(is_kept)
            yield batch if is_kept.all() else batch._replace(rows=batch.rows.filter(pa.array(is_kept)))

    def _constants(self, names: Sequence[str], columns: Columns, file: SourceFile) -> dict[str, tuple[Any, str]]:
        constants = {**self.partition, **dict.fromkeys(self.absent, (None, "null"))}
        return {name: constant for name, constant in constants.items() if name in columns}


def _copy(store: Store, files: Iterable[SourceFile], folder: Path | str) -> None:
    """Copy some files of a store, several at once."""

    def copy(file: SourceFile) -> None:
        path = Path(folder, file.name)
        path.parent.mkdir(parents=True, exist_ok=True)
        store.get(file.name, path, file.num_bytes)

    with DaemonPool(_CONNECTIONS, "delta") as pool:
        pool.map(copy, files)


def _named_by_log(path: str, store: Store) -> str:
    """The name of a file below the table's root; FormatError for one that lies elsewhere."""
    prefix = next((root for root in (f"{store.url}/", f"file://{store.url}/") if path.startswith(root)), "")
    return named_in_data(path.removeprefix(prefix), store.url)


def _check_vectors(log: Path, store: Store) -> None:
    """Raise FormatError if a file of deleted rows lies outside the table: ``deltalake`` would read it anywhere."""
    lines = (line for path in log.glob("*.json") for line in path.read_text().splitlines() if line)
    adds = [json.loads(line).get("add") for line in lines]
    for path in log.glob("*.parquet"):
        checkpoint = pq.read_table(path)
        adds += checkpoint["add"].to_pylist() if "add" in checkpoint.column_names else []
    for vector in [add["deletionVector"] for add in adds if add and add.get("deletionVector")]:
        if vector["storageType"] == "p":
            _named_by_log(unquote(vector["pathOrInlineDv"]), store)
        elif vector["storageType"] == "u" and (folder := vector["pathOrInlineDv"][:-_UUID_CHARS]):
            named_in_data(folder, store.url)


def _plain(value: Any) -> Any:
    """A partition's value as JSON knows it; Arrow casts texts to dates and decimals."""
    if isinstance(value, bytes):
        raise FormatError("a table that is partitioned by binary values cannot be read. Write it by another column.")
    return value if isinstance(value, (str, int, float, type(None))) else str(value)
