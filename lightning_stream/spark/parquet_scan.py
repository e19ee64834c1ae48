"""A DataFrame that only reads Parquet files: its tasks read them by Arrow, without Java.

Java passes each number of an array to Python by a call of its own, which takes longer than everything else.
So where a plan only reads columns of Parquet files that lie in a file system of the machine, each task reads the
row groups that Spark would have read in it. The partitions, and so the files that are written, stay the same.

Spark's own classes decide whether a plan is one, since there is no public way. Spark itself reads whatever may give
other rows: filters, partitioned tables, Delta, times and decimals, files of other types than the DataFrame's.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

from lightning_stream.errors import FormatError

_LOG = logging.getLogger(__name__)
_MOST_FILES = 4096  # the driver looks into each of them first
_LOOK_AT_ONCE = 16
_ROWS = 8192
_BUFFER_BYTES = 1 << 20  # read at a time: a mounted bucket is slow to answer
_KNOWN_OPTIONS = {"path", "paths", "compression"}
_TYPES = {
    "ByteType": "int8",
    "ShortType": "int16",
    "IntegerType": "int32",
    "LongType": "int64",
    "FloatType": "float",
    "DoubleType": "double",
    "BooleanType": "bool",
    "StringType": "string",
    "BinaryType": "binary",
}


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
        types = _arrow_types(dataframe.schema)
        if types is None or not hasattr(dataframe, "_jdf"):
            return None
        try:
            partitions = _partitions(dataframe)
            if partitions is None or not _are_whole(partitions):
                return None
            scan = cls(partitions, types)
            return scan if scan.fits_files() else None
        except Exception as error:  # noqa: BLE001 - a Spark of other classes; its own way of reading is always right
            _LOG.debug("Spark reads the rows itself: %s", error)
            return None

    def fits_files(self) -> bool:
        """Whether every file is as Spark listed it, and has the columns as they are in the DataFrame."""
        files = {split.path: split.num_bytes for partition in self.partitions for split in partition}
        if not 0 < len(files) <= _MOST_FILES:
            return False

        def fits(path: str) -> bool:
            return Path(path).stat().st_size == files[path] and _fits(_opened(path).schema_arrow, self.types)

        with ThreadPoolExecutor(_LOOK_AT_ONCE) as pool:
            return all(pool.map(fits, files))

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
    import pyarrow.parquet as pq

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


def _arrow_types(schema: Any) -> dict[str, str] | None:
    """By column; None where one is of a type that Spark and Arrow might read differently."""
    types = {field.name: _arrow_type(field.dataType) for field in schema.fields}
    if len(types) < len(schema.fields) or not all(types.values()) or any("." in name for name in types):
        return None  # Arrow takes a name with a dot for a path
    return {name: kind for name, kind in types.items() if kind is not None}


def _arrow_type(spark_type: Any) -> str | None:
    kind = type(spark_type).__name__
    if kind == "ArrayType":
        inner = _arrow_type(spark_type.elementType)
        return inner and f"list<{inner}>"
    return _TYPES.get(kind)


def _fits(schema: Any, types: Mapping[str, str]) -> bool:
    """Whether a file has these columns, each once and of this type."""
    folded = [name.casefold() for name in schema.names]  # Spark may ignore case
    return all(
        name in schema.names and folded.count(name.casefold()) == 1 and _type_name(schema.field(name).type) == kind
        for name, kind in types.items()
    )


def _type_name(arrow_type: Any) -> str:
    import pyarrow as pa

    if pa.types.is_list(arrow_type) or pa.types.is_large_list(arrow_type):
        return f"list<{_type_name(arrow_type.value_type)}>"
    return str(arrow_type).removeprefix("large_")


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
        chosen = list(_items(plan.projectList()))
        if any(_class_of(one) != "AttributeReference" for one in chosen):
            return None
        plan = plan.child()
    if _class_of(plan) != "LogicalRelation" or not _is_plain(plan.relation()):
        return None
    leaves = list(_items(execution.executedPlan().collectLeaves()))
    if len(leaves) != 1 or _class_of(leaves[0]) != "FileSourceScanExec":
        return None
    read = list(_items(leaves[0].inputRDDs()))
    if len(read) != 1 or _class_of(read[0]) != "FileScanRDD":
        return None
    found = [tuple(_split(file) for file in partition.files()) for partition in _items(read[0].filePartitions())]
    if any(split is None for partition in found for split in partition):
        return None
    return tuple(tuple(split for split in partition if split is not None) for partition in found)


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


def _split(file: Any) -> FileSplit | None:
    """None for a file of another file system than the machine's own."""
    url = urlparse(file.filePath().toString())
    if url.scheme != "file":
        return None
    return FileSplit(unquote(url.path), file.start(), file.start() + file.length(), file.fileSize())


def _class_of(thing: Any) -> str:
    return str(thing.getClass().getSimpleName())


def _items(sequence: Any) -> Iterator[Any]:
    """The items of one of Scala's sequences."""
    iterator = sequence.iterator()
    while iterator.hasNext():
        yield iterator.next()
