"""`excluded_ids`: what a filter says of each sample, asked once by a cluster instead of once by each machine."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from lightning_stream.errors import SnapshotMismatch
from lightning_stream.processes import ShardRange, run_partitions
from lightning_stream.reading.bad_samples import BadData
from lightning_stream.reading.filters import Evaluation, Keep
from lightning_stream.reading.reader import SampleReader
from lightning_stream.reading.stream import Stream
from lightning_stream.reading.stream_shards import StreamShards
from lightning_stream.shared_files import scratch_folder
from lightning_stream.stores import absolute

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_PART_BYTES = 256 << 20  # as many are read again where a machine is lost


def excluded_ids(
    remote: str,
    filter: Keep,  # noqa: A002 - the word for it
    *,
    spark: SparkSession,
    **reading: Any,
) -> NDArray[np.int64]:
    """Ask a function about every sample of a dataset, in the executors of Spark.

    Example::

        ids = excluded_ids("s3://bucket/train", is_long, spark=spark)
        np.save("short.npy", ids)  # StreamingDataset("s3://bucket/train", filter={"exclude_ids": "short.npy"})

    Args:
        remote: Folder or URL of the dataset, which the executors see, too.
        filter: Function of a sample (a dict) that returns whether it is kept, as `StreamingDataset` takes it.
        spark: The session.
        **reading: Further arguments of `Stream`, such as ``version`` and ``options``.

    Returns:
        The ids of the samples that are not kept, int64, ascending: the ``"exclude_ids"`` of a dataset's `filter`.
    """
    stream = partial(Stream, absolute(remote), **reading)
    with scratch_folder() as folder, closing(_reader(stream, folder)) as reader:
        asking = _Asking(stream, filter, reader.snapshot.digest)
        parts = [ShardRange(k, *pair) for k, pair in enumerate(reader.indexes[0].cut(_PART_BYTES))]
        answers = run_partitions(asking, parts, spark, lambda _: None)
        is_kept = np.concatenate([answers[part.partition_id] for part in parts])
        return reader.original_ids(np.flatnonzero(~is_kept))


@dataclass(frozen=True)
class _Asking:
    """Asks about the samples of some shards. Picklable."""

    stream: Callable[..., Stream]
    keep: Keep
    digest: str  # of the samples

    def __call__(self, part: ShardRange) -> NDArray[np.bool_]:
        with scratch_folder() as folder, closing(_reader(self.stream, folder)) as reader:
            if reader.snapshot.digest != self.digest:
                raise SnapshotMismatch(
                    f"{reader.indexes[0].where} was changed while its samples were asked about. Pass version= to read "
                    "one version, or ask again."
                )
            return Evaluation(reader, self.keep, BadData())(part)


def _reader(stream: Callable[..., Stream], folder: str) -> SampleReader:
    """A reader that fetches into a folder."""
    return SampleReader(StreamShards([stream(local=folder)]))
