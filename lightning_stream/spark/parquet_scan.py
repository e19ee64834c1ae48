"""A DataFrame that only reads Parquet files: its tasks read them by Arrow, without Java.

Java passes each number of an array to Python by a call of its own, which takes longer than everything else.
So where a plan only reads columns of Parquet files that lie in a file system of the machine, each task reads the
row groups that Spark would have read in it. The partitions, and so the files that are written, stay the same.

Spark's own classes decide whether a plan is one, since there is no public way. Spark itself reads whatever may give
other rows: filters, partitioned tables, Delta, times and decimals, files of other types than the DataFrame's.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from lightning_stream.errors import FormatError
from lightning_stream.spark.plan import local_path
from lightning_stream.spark.schema import arrow_type

_LOG = logging.getLogger(__name__)
_MOST_FILES = 4096  # the driver looks into each of them first
_LOOK_AT_ONCE = 16
_ROWS = 8192
_BUFFER_BYTES = 1 << 20  # read at a time: a mounted bucket is slow to answer
_KNOWN_OPTIONS = {"path", "paths", "compression"}
# Arrow's names of the types that Spark and Arrow read alike.
_SCANNED = re.compile(r"(list<)*(int(8|16|32|64)|float|double|bool|string|binary)>*")


@dataclass(frozen=True)
class FileSplit:
    """The bytes ``[begin, end)`` of a file. Row groups whose middle lies there are read, as by Parquet's own readers.

    Attributes:
        path: The file.
        begin, end: Offsets in it.
        num_bytes: Of the whole file, when Spark listed it.
    """

    path: str
    begin: int
    end: int
    num_bytes: int


@dataclass(frozen=True)
class ParquetScan:
    """What every partition of a DataFrame reads.

    Attributes:
        partitions: The splits of each.
        types: Arrow's name of the type by column, in the DataFrame's order.
    """

    partitions: tuple[tuple[FileSplit, ...], ...]
    types: Mapping[str, str]

    @classmethod
    def of(cls, dataframe: Any) -> ParquetScan | None:
        """What the DataFrame reads; None where that is more than columns of Parquet files, or not known."""
        fields = dataframe.schema.fields
        types = {field.name: _type_name(arrow_type(field.dataType)) for field in fields}
        # Arrow takes a name with a dot for a path.
        fits = all(_SCANNED.fullmatch(kind) and "." not in name for name, kind in types.items())
        if not fits or len(types) < len(fields) or not hasattr(dataframe, "_jdf"):
            return None
        try:
            partitions = _partitions(dataframe)
            if partitions is None or not _are_whole(partitions) or not _fit_files(partitions, types):
                return None
        except Exception as error:  # noqa: BLE001 - a Spark of other classes; its own way of reading is always right
            _LOG.debug("Spark reads the rows itself: %s", error)
            return None
        return cls(partitions, types)

    def read(self, partition: int, batch_rows: int | None) -> Iterator[Any]:
        """The rows of a partition, as Arrow batches.

        Raises:
            FormatError: A file has changed since, or is damaged.
        """
        for split in self.partitions[partition]:
            if Path(split.path).stat().st_size != split.num_bytes:
                raise FormatError(f"{split.path} has changed since the DataFrame was made. Make it again.")
            try:
                file = _opened(split.path)
                groups = _row_groups(file.metadata, split)
                if groups:
                    yield from file.iter_batches(
                        batch_rows or _ROWS, row_groups=groups, columns=list(self.types), use_threads=False
                    )
            except OSError as error:  # what Arrow raises for damaged pages
                raise FormatError(f"{split.path} cannot be read as Parquet: {error}") from error


def _opened(path: str) -> Any:
    return pq.ParquetFile(path, buffer_size=_BUFFER_BYTES, page_checksum_verification=True)


def _row_groups(metadata: Any, split: FileSplit) -> list[int]:
    """The row groups of a split: those whose middle lies in it, each in exactly one of a file's splits."""
    groups = []
    for number in range(metadata.num_row_groups):
        chunks = [metadata.row_group(number).column(k) for k in range(metadata.num_columns)]
        begin = chunks[0].data_page_offset
        if chunks[0].has_dictionary_page and chunks[0].dictionary_page_offset:
            begin = min(begin, chunks[0].dictionary_page_offset)
        middle = begin + sum(chunk.total_compressed_size for chunk in chunks) // 2
        if split.begin <= middle < split.end:
            groups.append(number)
    return groups


def _fit_files(partitions: Sequence[Sequence[FileSplit]], types: Mapping[str, str]) -> bool:
    """Whether every file is as Spark listed it, and has these columns, each once and of this type."""
    files = {split.path: split.num_bytes for splits in partitions for split in splits}
    if not 0 < len(files) <= _MOST_FILES:
        return False

    def fits(path: str) -> bool:
        schema = _opened(path).schema_arrow
        folded = [name.casefold() for name in schema.names]  # Spark may ignore case
        return Path(path).stat().st_size == files[path] and all(
            name in schema.names and folded.count(name.casefold()) == 1 and _type_name(schema.field(name).type) == kind
            for name, kind in types.items()
        )

    with ThreadPoolExecutor(_LOOK_AT_ONCE) as pool:
        return all(pool.map(fits, files))


def _type_name(kind: pa.DataType | None) -> str:
    if kind is not None and (pa.types.is_list(kind) or pa.types.is_large_list(kind)):
        return f"list<{_type_name(kind.value_type)}>"
    return str(kind).removeprefix("large_")


def _are_whole(partitions: Sequence[Sequence[FileSplit]]) -> bool:
    """Whether the splits of every file are all of it, without overlap: then no row group is lost or read twice."""
    by_file: dict[str, list[FileSplit]] = {}
    for partition in partitions:
        for split in partition:
            by_file.setdefault(split.path, []).append(split)
    for splits in by_file.values():
        edges = sorted((one.begin, one.end) for one in splits)
        ends = [0, *(end for _, end in edges)]
        if [begin for begin, _ in edges] != ends[:-1] or ends[-1] != splits[0].num_bytes:
            return False
    return True


def _partitions(dataframe: Any) -> tuple[tuple[FileSplit, ...], ...] | None:
    """What Spark's tasks would read; None if the plan is anything but columns of Parquet files in local folders."""
    execution = dataframe._jdf.queryExecution()  # noqa: SLF001 - the only way to Spark's plan
    plan = execution.optimizedPlan()
    if _class_of(plan) == "Project":
        if any(_class_of(one) != "AttributeReference" for one in _items(plan.projectList())):
            return None
        plan = plan.child()
    if _class_of(plan) != "LogicalRelation" or not _is_plain(plan.relation()):
        return None
    leaves = list(_items(execution.executedPlan().collectLeaves()))
    if list(map(_class_of, leaves)) != ["FileSourceScanExec"]:
        return None
    read = list(_items(leaves[0].inputRDDs()))
    if list(map(_class_of, read)) != ["FileScanRDD"]:
        return None
    found: list[tuple[FileSplit, ...]] = []
    for partition in _items(read[0].filePartitions()):
        splits = []
        for file in partition.files():
            path = local_path(file.filePath().toString())
            if path is None:
                return None
            splits.append(FileSplit(str(path), file.start(), file.start() + file.length(), file.fileSize()))
        found.append(tuple(splits))
    return tuple(found)


def _is_plain(relation: Any) -> bool:
    """Whether it is Parquet files alone: not partitioned, bucketed, of a table format, or read with options."""
    if _class_of(relation) != "HadoopFsRelation":
        return False
    return (
        relation.fileFormat().getClass().getName()
        == "org.apache.spark.sql.execution.datasources.parquet.ParquetFileFormat"
        and _class_of(relation.location()) == "InMemoryFileIndex"
        and relation.partitionSchema().length() == 0
        and relation.bucketSpec().isEmpty()
        and {pair._1() for pair in _items(relation.options().toSeq())} <= _KNOWN_OPTIONS  # noqa: SLF001 - Scala's name
    )


def _class_of(thing: Any) -> str:
    return str(thing.getClass().getSimpleName())


def _items(sequence: Any) -> Iterator[Any]:
    """The items of one of Scala's sequences."""
    iterator = sequence.iterator()
    while iterator.hasNext():
        yield iterator.next()
