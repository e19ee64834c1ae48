"""Add lengths to a dataset that exists: its samples are read once, by several processes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from lightning_stream.convert.mds import temporary_reader
from lightning_stream.errors import FormatError, checking
from lightning_stream.formats.index import Index
from lightning_stream.processes import Progress, num_processes, refuse_in_worker, run_partitions
from lightning_stream.reading.reader import SampleReader
from lightning_stream.reading.shard_table import ReaderConfig
from lightning_stream.stores import Options, absolute
from lightning_stream.version_log import Edit
from lightning_stream.writer.lengths import (
    LengthFunctions,
    Lengths,
    check_functions,
    check_measurable,
    measure_batch,
    put_lengths,
)
from lightning_stream.writer.place import Place, begun

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_PARTITION_BYTES = 64 << 20  # of shards, which one process reads
_ROWS = 256  # read at a time, so that a few images are decoded at once


@checking
def add_lengths(
    out: Place,
    lengths: LengthFunctions,
    *,
    num_workers: int | None = None,
    overwrite: bool = False,
    progress_bar: bool = False,
    store_options: Mapping[str, Any] | None = None,
    allow_unsafe_types: bool = False,
    spark: SparkSession | None = None,
) -> Lengths:
    """Add lengths to a dataset: every sample is read once, and then files of numbers and the index are put.

    The samples stay as they are, and so does the digest by which a resumed run knows its data. Readers see the lengths
    when they open the dataset the next time. Of several versions, only the newest gets them.

    Example::

        add_lengths("s3://bucket/train", {"tokens": len})

    Args:
        out: Folder or URL of the dataset.
        lengths: Functions by name, as `MDSWriter` takes them.
        num_workers: Processes; None for one per processor. 1 reads in this process.
        overwrite: Replace lengths of these names.
        progress_bar: Show a line that counts partitions and rows on stderr.
        store_options: Options of the store.
        allow_unsafe_types: Whether to decode the ``pkl`` encoding, which runs code that the data names.
        spark: A Spark session, whose executors do the work of the processes, on all machines of its cluster.

    Returns:
        The numbers by name, uint32[num_samples] each, in the order of the samples.

    Raises:
        FileExistsError: The dataset has lengths of such a name already.
        NotFoundError: There is no dataset.
        ValueError: A function gives no whole number, or ``len`` is given for a column that does not exist.
        ConflictError: Another writer changed the dataset meanwhile; its dataset stays, without these lengths.
    """
    refuse_in_worker("add_lengths()")
    functions = check_functions(lengths)
    place, index = begun(out, "edit", store_options)
    for columns in index.column_sets:
        check_measurable(functions, columns)
    remaining = _remaining(index, functions, overwrite)
    cuts = enumerate(index.cut(_PARTITION_BYTES))
    partitions = [_Shards(partition_id, index.part(*shards)) for partition_id, shards in cuts]
    progress = Progress(len(partitions), "reading") if progress_bar else lambda _: None
    task = _Measuring(absolute(out), store_options, functions, allow_unsafe_types).run
    report = lambda measured: progress(len(next(iter(measured.values()), ())))  # noqa: E731
    done = run_partitions(task, partitions, spark or num_processes(num_workers), report)
    measured = _joined(functions, [done[partition.partition_id] for partition in partitions])
    hashes = index.schemas[0].hashes if index.schemas else ()
    files = put_lengths(place, measured, hashes)
    place.commit(Edit("lengths", (), {**remaining, **files}))
    return measured


def _remaining(index: Index, functions: LengthFunctions, overwrite: bool) -> dict[str, Any]:
    """Return the lengths that the dataset keeps; FileExistsError if it has one of these names already."""
    try:
        lengths = dict(index.lengths)
    except FormatError:
        if not overwrite:
            raise
        return {}  # no reader can use them
    there = [name for name in functions if name in lengths]
    if there and not overwrite:
        raise FileExistsError(
            f"{index.where} has the lengths {', '.join(there)} already. Pass overwrite=True to measure again."
        )
    return lengths


@dataclass(frozen=True)
class _Shards:
    """Some shards in a row, which one process reads."""

    partition_id: int
    index: Index

    def __str__(self) -> str:
        names = [self.index.entry(shard).raw.basename for shard in (0, len(self.index) - 1)]
        return f"the lengths of {' to '.join(names)}"


def _joined(names: Iterable[str], parts: Sequence[Lengths]) -> Lengths:
    """Return the lengths of all parts, one part after another."""
    return {name: np.concatenate([np.empty(0, np.uint32), *(part[name] for part in parts)]) for name in names}


@dataclass(frozen=True)
class _Measuring:
    """Measures the samples of partitions. Picklable."""

    url: str
    store_options: Options | None
    functions: LengthFunctions
    allow_unsafe_types: bool

    def run(self, partition: _Shards) -> Lengths:
        measured: list[Lengths] = []
        config = ReaderConfig(allow_unsafe_types=self.allow_unsafe_types)
        with temporary_reader(self.url, self.store_options, index=partition.index, config=config) as reader:
            offsets = reader.snapshot.shard_offsets.tolist()
            with reader.read_ahead(np.arange(offsets[-1])):
                for begin, end in pairwise(offsets):
                    measured += self._of_shard(reader, begin, end)
        return _joined(self.functions, measured)

    def _of_shard(self, reader: SampleReader, begin: int, end: int) -> Iterator[Lengths]:
        """The lengths of the samples [begin, end), which are those of a shard."""
        for first in range(begin, end, _ROWS):
            ids = np.arange(first, min(first + _ROWS, end))
            columns = reader.batch(ids)
            yield measure_batch(self.functions, columns, len(ids), columns)
