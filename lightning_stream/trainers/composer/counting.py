"""Counting and cutting batches for Composer: padding never counts, and every rank cuts into the same number of pieces.

Composer weighs losses by sample counts over all ranks and micro-batches, so that shares may differ in size. What must
not differ is the number of micro-batches: sharded models wait for each other in every forward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from lightning_stream.loader import StreamingDataLoader
from lightning_stream.loading.packing import take_rows
from lightning_stream.order import num_micro_batches


class BatchCounter:
    """Counts and cuts the batches of one loader, as Composer's `DataSpec` asks; see `data_spec` for the arguments."""

    def __init__(
        self, loader: StreamingDataLoader, token_column: str = "input_ids", padding_id: int | None = None
    ) -> None:
        self._loader = loader
        self._token_column = token_column
        self._padding_id = padding_id
        self.at_padding = False  # whether the current micro-batch is padding

    def num_samples(self, batch: Any) -> int | float:
        """Samples that count in a batch or micro-batch.

        Summed over all ranks this counts each sample once: where ranks share samples, each counts its part of them.
        """
        length = length_of(batch)
        if length is None:
            if self._loader.last_batch is None:
                raise _unknown(batch, "get_num_samples_in_batch")
            length = self._loader.last_batch.num_samples
        count = 0 if self._is_padding else length
        replication = self._loader.detect_world().replication
        return count if replication == 1 else count / replication

    @property
    def _is_padding(self) -> bool:
        """Whether the current batch or micro-batch is padding."""
        current = self._loader.last_batch
        return self.at_padding or (current is not None and bool(current.filler.all()))

    def num_tokens(self, batch: Any) -> int | dict[str, int]:
        """Tokens that count in a batch or micro-batch."""
        column = batch.get(self._token_column) if isinstance(batch, Mapping) else None
        current = self._loader.last_batch
        is_packed = current is not None and current.rows is not None
        packed = batch.get("num_tokens") if isinstance(batch, Mapping) and is_packed else None
        if (column is None and packed is None) or self._is_padding:
            return 0
        if packed is not None:
            count = int(packed.sum())
        else:
            count = sum(self._tokens_of(row) for row in column) if isinstance(column, list) else self._tokens_of(column)
        world = self._loader.detect_world()
        if world.replication == 1:
            return count
        # The clock adds up all ranks; the weights of the loss need each rank's own count.
        return {"total": count if world.rank % world.replication == 0 else 0, "loss_generating": count}

    def _tokens_of(self, tokens: Any) -> int:
        values = torch.as_tensor(tokens)
        return values.numel() if self._padding_id is None else int((values != self._padding_id).sum())

    def split(self, batch: Any, size: float) -> Sequence[Any]:
        """Cut a batch into micro-batches of at most this size, the same number on every rank."""
        if int(size) != size or size < 1:
            raise ValueError(
                f"a micro-batch has whole samples, at least one; device_train_microbatch_size is {size}. "
                "To cut samples themselves, pass split_batch= to data_spec"
            )
        current = self._loader.last_batch
        length = length_of(batch)
        if length is None:
            if current is not None and current.ids.size <= size:
                return [batch]
            raise _unknown(batch, "split_batch")
        if current is None or current.ids.size != length:  # a transform made other rows of it
            count = -(-length // int(size))
        else:
            count = num_micro_batches(current.end - current.begin, int(size), self._loader.detect_world().num_replicas)
        if count == 1:
            return [batch]

        def cut(begin: int, end: int) -> Any:
            if _is_joined(batch):
                return take_rows(batch, slice(begin, end))
            return _changed(batch, lambda column: _take(column, slice(begin, end), length))

        if length < count:  # this rank has a sample less than others
            rows = [min(k, length - 1) for k in range(count)]
            return _Padded(self, [cut(row, row + 1) for row in rows], length)
        # Full ones first where that makes as many, since shapes are then alike.
        evenly = -(-length // int(size)) != count
        ends = [length * i // count if evenly else min(i * int(size), length) for i in range(count + 1)]
        return [cut(begin, end) for begin, end in pairwise(ends)]


class _Padded(list[Any]):
    """Micro-batches whose last ones are padding, which a batch itself does not say."""

    def __init__(self, counter: BatchCounter, pieces: list[Any], num_real: int) -> None:
        super().__init__(pieces)
        self._counter = counter
        self._num_real = num_real

    def __iter__(self) -> Iterator[Any]:
        try:
            for k, piece in enumerate(super().__iter__()):
                self._counter.at_padding = k >= self._num_real
                yield piece
        finally:
            self._counter.at_padding = False


def length_of(batch: Any) -> int | None:
    """How many samples a batch has by its columns, or rows of packed samples; None where that is unknown.

    A dict or tuple holds columns: tensors, arrays, or lists of one value per sample. A list of dicts or of plain values
    holds samples.

    Raises:
        ValueError: The columns contradict each other.
    """
    if _is_joined(batch):
        return len(batch["row_splits"]) - 1
    columns: list[Any] = []
    _changed(batch, columns.append)
    arrays = {len(column) for column in columns if isinstance(column, (torch.Tensor, np.ndarray)) and column.ndim}
    lengths = arrays or {len(column) for column in columns if isinstance(column, (list, tuple))}
    if len(lengths) > 1:
        raise ValueError(
            f"all columns of a batch have one row per sample; found columns of {sorted(lengths)} rows. Pass "
            "get_num_samples_in_batch= and split_batch= to data_spec for batches made otherwise"
        )
    return next(iter(lengths), None)


def _is_joined(batch: Any) -> bool:
    """Whether this is a batch of whole samples that are packed into rows."""
    return isinstance(batch, Mapping) and batch.keys() >= {"row_splits", "cu_seqlens", "splits"}


def _changed(batch: Any, change: Callable[[Any], Any]) -> Any:
    """A batch with each of its columns changed; what holds no columns is one."""

    def changed(value: Any) -> Any:
        return _changed(value, change) if isinstance(value, Mapping) else change(value)

    if isinstance(batch, Mapping):
        return {name: changed(value) for name, value in batch.items()}
    if not _holds_columns(batch):
        return change(batch)
    values = [changed(value) for value in batch]
    return type(batch)(*values) if hasattr(batch, "_fields") else type(batch)(values)


def _holds_columns(batch: Any) -> bool:
    if not isinstance(batch, (list, tuple)):
        return False
    if isinstance(batch, list) and all(isinstance(value, Mapping) for value in batch):
        return False
    return any(isinstance(value, (torch.Tensor, np.ndarray, list, tuple, Mapping)) for value in batch)


def _take(column: Any, rows: slice, length: int) -> Any:
    """These rows of a column that has one per sample; anything else goes into each micro-batch unchanged."""
    if isinstance(column, (torch.Tensor, np.ndarray)):
        return column[rows] if column.ndim and len(column) == length else column
    if isinstance(column, (list, tuple)) and len(column) == length:
        return list(column[rows])
    return column


def _unknown(batch: Any, argument: str) -> TypeError:
    return TypeError(
        f"samples can be counted in tensors, arrays, and dicts, tuples or lists of them; found "
        f"{type(batch).__name__}. Pass {argument}= to data_spec"
    )
