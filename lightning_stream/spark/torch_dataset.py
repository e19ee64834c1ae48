"""A Spark DataFrame as a PyTorch dataset, without ``.collect()``."""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset, get_worker_info

from lightning_stream.dataset import StreamingDataset
from lightning_stream.spark.convert import quoted
from lightning_stream.spark.frame_cache import FrameCache


class Rows:
    """A DataFrame whose rows can also be read by number: ``rows[i]`` is a dict; everything else is the DataFrame's."""

    def __init__(self, dataframe: Any, cache: FrameCache) -> None:
        self.dataframe = dataframe
        self.cache = cache

    def __reduce__(self) -> Any:
        return Rows, (None, self.cache)

    def __getitem__(self, key: Any) -> Any:
        """A row by its number (an IndexError ends a loop over them), or the DataFrame's own value for another key."""
        if not isinstance(key, (int, np.integer)):
            return self.dataframe[key]
        return self.cache.wait().sample(_checked(int(key), len(self)))

    def __len__(self) -> int:
        """Number of rows; waits until it is known."""
        return len(self.cache)

    def count(self) -> int:
        """The same, under Spark's name."""
        return len(self)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or self.dataframe is None:
            raise AttributeError(name)
        return getattr(self.dataframe, name)


class StreamToTorchDataset(Dataset[Any]):
    """A map-style dataset over a Spark DataFrame.

    Spark converts the rows, partition by partition, into a cache of shards keyed by the DataFrame's plan and files; the
    driver holds none of them. ``dataset[i]`` is ``(features, label)``, ``dataset[[...]]`` or a slice the same for many
    rows at once, and a `DataLoader` may shuffle it and use workers. `batches` gives the first batches while later
    partitions are still being converted.

    A subclass may define ``__init__`` and ``__getitem__`` of its own, and read rows by ``self.spark_df[idx]``::

        class Wine(StreamToTorchDataset):
            def __init__(self, spark_df):
                self.spark_df = spark_df

            def __getitem__(self, idx):
                row = self.spark_df[idx]
                return torch.tensor([row["pH"], row["alcohol"]]), torch.tensor(row["quality"])

    Args:
        spark_df: The rows. Sort it if the numbers of rows matter.
        feature_cols: Columns of numbers, or of arrays or vectors of one length, joined in this order.
        label_col: Column of the label; None for features alone.
        device: Where batches go. In a DataLoader's worker they stay on the CPU.
        dtype: Of the features.
        label_dtype: Of the label.
        cache: Folder or URL for the shards, which driver and executors share; None for a folder of this machine.
    """

    cache: str | os.PathLike[str] | None = None
    feature_cols: Sequence[str] = ()
    label_col: str | None = None
    device: str | torch.device = "cpu"
    dtype: torch.dtype = torch.float32
    label_dtype: torch.dtype = torch.float32
    _rows: Rows | None = None

    def __init__(
        self,
        spark_df: Any,
        feature_cols: Sequence[str],
        label_col: str | None = None,
        *,
        device: str | torch.device = "cpu",
        dtype: torch.dtype = torch.float32,
        label_dtype: torch.dtype = torch.float32,
        cache: str | os.PathLike[str] | None = None,
    ) -> None:
        if isinstance(feature_cols, str):
            raise TypeError(
                f"feature_cols is a list of names; found the text {feature_cols!r}: pass [{feature_cols!r}]."
            )
        self.feature_cols = list(feature_cols)
        self.label_col = label_col
        names = dict.fromkeys([*self.feature_cols, *([] if label_col is None else [label_col])])
        missing = [name for name in names if name not in spark_df.columns]
        if missing or not self.feature_cols:
            raise ValueError(
                f"feature_cols and label_col name columns of the DataFrame, which has {', '.join(spark_df.columns)}; "
                f"found {', '.join(missing) if missing else 'no feature_cols'}."
            )
        self.device = device
        self.dtype = dtype
        self.label_dtype = label_dtype
        self.cache = cache
        self.spark_df = spark_df.select(*map(quoted, names))

    @property
    def spark_df(self) -> Any:
        """The DataFrame, with rows by number."""
        if self._rows is None:
            raise AttributeError(
                "set self.spark_df to a DataFrame in __init__, or call super().__init__(spark_df, ...)"
            )
        return self._rows

    @spark_df.setter
    def spark_df(self, dataframe: Any) -> None:
        self._rows = Rows(dataframe, FrameCache(dataframe, cache=self.cache))

    def __len__(self) -> int:
        """Number of rows; waits until all are converted."""
        return len(self.spark_df)

    def __getitem__(self, index: Any) -> Any:
        """``(features, label)`` of one row, or of many rows for a slice or a sequence of numbers."""
        if isinstance(index, (int, np.integer)):
            return _sample([column[0] for column in self._rows_at([_checked(int(index), len(self))])])
        if isinstance(index, (str, float)):
            raise TypeError(f"rows are taken by number, slice or a sequence of numbers; found {index!r}.")
        if isinstance(index, slice):
            index = range(*index.indices(len(self)))
        return _sample(self._rows_at([_checked(int(row), len(self)) for row in index]))

    def __getitems__(self, indices: list[int]) -> list[Any]:
        """Many samples at once, as a DataLoader asks for them."""
        if type(self).__getitem__ is not StreamToTorchDataset.__getitem__:
            return [self[index] for index in indices]
        return list(map(_sample, zip(*self._rows_at(indices), strict=True)))

    def _rows_at(self, indices: Sequence[int]) -> list[Tensor]:
        return self._tensors(self.spark_df.cache.wait().batch(np.asarray(indices, np.int64)))

    def batches(
        self, batch_size: int, *, shuffle: bool = False, seed: int = 0, drop_last: bool = False
    ) -> Iterator[Any]:
        """One pass over all rows in batches, the first of them while later partitions are still being converted.

        Args:
            batch_size: Rows of a batch.
            shuffle: Mix the rows within each partition. For a shuffle over all rows use a DataLoader.
            seed: Of the shuffle.
            drop_last: Drop a smaller last batch.
        """
        pending: list[Tensor] = []
        for partition_id, reader in enumerate(self.spark_df.cache.parts()):
            ids = np.arange(reader.snapshot.num_samples)
            if shuffle:
                np.random.default_rng([seed, partition_id]).shuffle(ids)
            while len(ids):
                missing = batch_size - (len(pending[0]) if pending else 0)
                columns = self._tensors(reader.batch(ids[:missing]))
                ids = ids[missing:]
                pending = list(map(torch.cat, zip(pending, columns, strict=True))) if pending else columns
                if len(pending[0]) == batch_size:
                    yield _sample(pending)
                    pending = []
            reader.close()
        if pending and not drop_last:
            yield _sample(pending)

    def _tensors(self, columns: Mapping[str, Any]) -> list[Tensor]:
        """A batch's columns as features (n, width) and, if there is a label, labels (n, ...), on the device."""
        parts = [_numbers(columns[name], name) for name in self.feature_cols]
        features = np.concatenate([part.reshape(len(part), -1) for part in parts], axis=1)
        tensors = [torch.from_numpy(features).to(self.dtype)]
        if self.label_col is not None:
            tensors.append(torch.from_numpy(_numbers(columns[self.label_col], self.label_col)).to(self.label_dtype))
        return list(map(self._moved, tensors))

    def _moved(self, tensor: Tensor) -> Tensor:
        """Move a tensor to the device: from pinned memory, without waiting."""
        device = torch.device(self.device)
        if device.type == "cpu" or get_worker_info() is not None:
            return tensor
        return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)


def dataset_from_spark(
    dataframe: Any,
    columns: Sequence[str] | None = None,
    *,
    cache: str | os.PathLike[str] | None = None,
    **settings: Any,
) -> StreamingDataset:
    """A `StreamingDataset` over a DataFrame: elastic, deterministic, resumable. Waits until Spark has converted it.

    The same plan over the same files, none of which has changed, is converted once; later calls, in any session, read
    the cache.

    Args:
        dataframe: The rows.
        columns: Those to keep; None for all.
        cache: As for `StreamToTorchDataset`.
        **settings: Of `StreamingDataset`: ``shuffle``, ``batch_size``, ``transform`` and so on.
    """
    rows = FrameCache(dataframe, columns, cache)
    rows.wait()
    dataset = StreamingDataset(remote=rows.uri, **settings)
    if rows.lease is not None:
        weakref.finalize(dataset, rows.lease.close)
    return dataset


def _sample(columns: Sequence[Tensor]) -> Any:
    """Features and label; features alone where there is no label."""
    return tuple(columns) if len(columns) > 1 else columns[0]


def _checked(index: int, count: int) -> int:
    if not -count <= index < count:
        raise IndexError(f"row {index} of a DataFrame with {count} rows")
    return index % count


def _numbers(values: Any, name: str) -> NDArray[Any]:
    """A column as one array of numbers."""
    try:
        if isinstance(values, list) and isinstance(values[0], (str, bytes)):
            raise TypeError(f"no numbers: {values[0]!r:.40}")  # numpy would read digits
        is_of_values = isinstance(values, list) and not isinstance(values[0], np.ndarray)
        array = np.asarray(values, np.float64 if is_of_values else None)
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"column {name!r} must hold numbers, or arrays of one length; found {values[0]!r:.60}. Convert it in Spark."
        ) from error
    if array.dtype.kind == "u" and array.dtype.itemsize > 1:
        array = array.astype(np.int64)
    return array if array.flags.writeable else array.copy()
