"""Counting and cutting batches for Composer: filler never counts, and every rank cuts into the same number of pieces.

Composer weighs losses by sample counts over all ranks and micro-batches, so that shares may differ in size. What must
not differ is the number of micro-batches: sharded models wait for each other in every forward pass.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from lightning_stream.loader import StreamingDataLoader
from lightning_stream.order import num_micro_batches
from lightning_stream.order.micro_batches import BatchInfo


@dataclass(frozen=True)
class Piece:
    """What is being trained on: a batch, or a micro-batch of it.

    Attributes:
        rows: Rows of the batch as it was delivered, int64[n].
        filler: bool[n]; True where a row only fills up and must not count.
    """

    rows: NDArray[np.int64]
    filler: NDArray[np.bool_]

    @property
    def num_samples(self) -> int:
        """Rows that count."""
        return int(self.filler.size - np.count_nonzero(self.filler))


class BatchCounter:
    """Counts and cuts the batches of one loader, as Composer's `DataSpec` asks.

    Args:
        loader: Whose batches these are.
        token_column: Column whose elements are tokens; a batch without it has none.
        padding_id: Tokens of this value do not count.
    """

    def __init__(
        self, loader: StreamingDataLoader, token_column: str = "input_ids", padding_id: int | None = None
    ) -> None:
        self._loader = loader
        self._token_column = token_column
        self._padding_id = padding_id
        self._piece: Piece | None = None  # the micro-batch at hand; None for the whole batch

    def num_samples(self, batch: Any) -> int | float:
        """Samples that count in a batch or micro-batch.

        Summed over all ranks this counts each sample once: where ranks share samples, each counts its part of them.
        """
        replication = self._loader.detect_world().replication
        piece, length = self._at_hand(), length_of(batch)
        count = length if piece is None or length not in (None, piece.rows.size) else piece.num_samples
        if count is None:
            raise _unknown(batch, "get_num_samples_in_batch")
        return count if replication == 1 else count / replication

    def num_tokens(self, batch: Any) -> int | dict[str, int]:
        """Tokens that count in a batch or micro-batch."""
        column = batch.get(self._token_column) if isinstance(batch, Mapping) else None
        if column is None:
            return 0
        piece = self._at_hand()
        if piece is not None and piece.filler.any() and len(column) == piece.filler.size:
            real = np.flatnonzero(~piece.filler)
            column = _take(column, real, len(column)) if len(real) else column[:0]
        count = sum(self._tokens_of(row) for row in column) if isinstance(column, list) else self._tokens_of(column)
        world = self._loader.detect_world()
        if world.replication == 1:
            return count
        # The clock adds up all ranks; the weights of the loss need each rank's own count.
        return {"total": count if world.rank % world.replication == 0 else 0, "loss_generating": count}

    def _tokens_of(self, tokens: Any) -> int:
        values = tokens if isinstance(tokens, torch.Tensor) else torch.as_tensor(tokens)
        return values.numel() if self._padding_id is None else int((values != self._padding_id).sum())

    def split(self, batch: Any, size: float) -> Sequence[Any]:
        """Cut a batch into micro-batches of about this size; filler is left out where samples remain without it."""
        if int(size) != size or size < 1:
            raise ValueError(
                f"a micro-batch has whole samples, at least one; device_train_microbatch_size is {size}. "
                "To cut samples themselves, pass split_batch= to data_spec"
            )
        info, length = self._loader.last_batch, length_of(batch)
        if length is None or (info is not None and info.ids.size != length):
            return self._split_unknown(batch, length, int(size))
        filler = np.zeros(length, dtype=np.bool_) if info is None else info.filler
        pieces = cut(filler, self._num_pieces(info, length, int(size)), int(size))
        if len(pieces) == 1 and pieces[0].rows.size == length:
            return MicroBatches(self, [batch], pieces)
        return MicroBatches(self, [_take(batch, piece.rows, length) for piece in pieces], pieces)

    def _split_unknown(self, batch: Any, length: int | None, size: int) -> Sequence[Any]:
        """A batch that a transform changed is cut by what it has; one that cannot be read is only passed on whole."""
        if length is not None:
            rows = np.arange(length)
            return [_take(batch, rows[begin : begin + size], length) for begin in range(0, length, size)]
        info = self._loader.last_batch
        if info is not None and info.ids.size <= size and not info.filler.any():
            return [batch]
        raise _unknown(batch, "split_batch")

    def _num_pieces(self, info: BatchInfo | None, length: int, size: int) -> int:
        """The same on every rank, also where their shares differ by a sample."""
        if info is None or self._loader.tail != "exact":
            return -(-length // size)
        return num_micro_batches(info.end - info.begin, size, self._loader.detect_world().num_replicas)

    def _at_hand(self) -> Piece | None:
        info = self._loader.last_batch
        if self._piece is not None or info is None:
            return self._piece
        return Piece(np.arange(info.ids.size), info.filler)

    def hold(self, piece: Piece | None) -> None:
        """Say which micro-batch is at hand; None for the whole batch."""
        self._piece = piece


class MicroBatches(Sequence[Any]):
    """Micro-batches that tell the counter which of them is at hand, since a batch itself does not say what is filler.

    Args:
        counter: Who is told.
        batches: The micro-batches.
        pieces: What each is made of.
    """

    def __init__(self, counter: BatchCounter, batches: list[Any], pieces: list[Piece]) -> None:
        self._counter, self._batches, self._pieces = counter, batches, pieces

    def __len__(self) -> int:
        return len(self._batches)

    def __getitem__(self, index: Any) -> Any:
        return self._batches[index]

    def __iter__(self) -> Iterator[Any]:
        try:
            for batch, piece in zip(self._batches, self._pieces, strict=True):
                self._counter.hold(piece)
                yield batch
        finally:
            self._counter.hold(None)


def cut(filler: NDArray[np.bool_], num_pieces: int, size: int) -> list[Piece]:
    """Cut a batch into so many pieces, without filler; a piece left empty gets one row of it, which does not count.

    Args:
        filler: bool[n], which rows of the batch are filler.
        num_pieces: How many, at least 1.
        size: Rows of a piece; without filler all but the last have exactly as many, if that makes `num_pieces`.
    """
    real, spare = np.flatnonzero(~filler), np.flatnonzero(filler)
    count = len(real)
    if not len(spare) and -(-count // size) == num_pieces:
        ends = [*range(0, count, size), count]
    else:
        ends = [max(count * i // num_pieces, min(i, count)) for i in range(num_pieces + 1)]
    pieces = []
    for begin, end in pairwise(ends):
        rows = real[begin:end] if end > begin else np.arange(len(filler))[-1:]
        pieces.append(Piece(rows, np.full(len(rows), end <= begin)))
    return pieces


def length_of(batch: Any) -> int | None:
    """How many samples a batch has by its columns; None where that cannot be told.

    A dict or tuple holds columns: tensors, arrays, or lists of one value per sample. A list of dicts or of plain values
    holds samples.

    Raises:
        ValueError: The columns contradict each other.
    """
    columns = list(_columns(batch))
    arrays = {len(column) for column in columns if isinstance(column, (torch.Tensor, np.ndarray)) and column.ndim}
    lengths = arrays or {len(column) for column in columns if isinstance(column, (list, tuple))}
    if len(lengths) > 1:
        raise ValueError(
            f"all columns of a batch have one row per sample; found columns of {sorted(lengths)} rows. Pass "
            "get_num_samples_in_batch= and split_batch= to data_spec for batches made otherwise"
        )
    return next(iter(lengths), None)


def _columns(batch: Any) -> Iterable[Any]:
    if isinstance(batch, Mapping):
        for value in batch.values():
            yield from _columns(value) if isinstance(value, Mapping) else (value,)
    elif _holds_columns(batch):
        for value in batch:
            yield from _columns(value) if isinstance(value, Mapping) else (value,)
    else:
        yield batch


def _holds_columns(batch: Any) -> bool:
    if not isinstance(batch, (list, tuple)):
        return False
    if isinstance(batch, list) and all(isinstance(value, Mapping) for value in batch):
        return False
    return any(isinstance(value, (torch.Tensor, np.ndarray, list, tuple, Mapping)) for value in batch)


def _take(batch: Any, rows: NDArray[np.int64], length: int) -> Any:
    """These rows of every column that has one per sample; anything else goes into each micro-batch as it is."""
    if isinstance(batch, Mapping):
        return {name: _take_value(value, rows, length) for name, value in batch.items()}
    if _holds_columns(batch):
        taken = [_take_value(value, rows, length) for value in batch]
        return type(batch)(*taken) if hasattr(batch, "_fields") else type(batch)(taken)
    return _take_column(batch, rows, length)


def _take_value(value: Any, rows: NDArray[np.int64], length: int) -> Any:
    return _take(value, rows, length) if isinstance(value, Mapping) else _take_column(value, rows, length)


def _take_column(column: Any, rows: NDArray[np.int64], length: int) -> Any:
    begin = int(rows[0])
    adjacent = int(rows[-1]) - begin + 1 == len(rows)
    if isinstance(column, (torch.Tensor, np.ndarray)):
        if column.ndim == 0 or len(column) != length:
            return column
        if adjacent:
            return column[begin : begin + len(rows)]
        return column[torch.from_numpy(rows)] if isinstance(column, torch.Tensor) else column[rows]
    if isinstance(column, (list, tuple)) and len(column) == length:
        return [column[row] for row in rows.tolist()]
    return column


def _unknown(batch: Any, argument: str) -> TypeError:
    return TypeError(
        f"the samples of a batch can be told apart in tensors, arrays, and dicts, tuples or lists of them; found "
        f"{type(batch).__name__}. Pass {argument}= to data_spec"
    )
