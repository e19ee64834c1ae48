"""What one process does with a partition: read it, transform it, settle nulls, and write each row to its split."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from lightning_stream.convert.partition import (
    OutputSpec,
    PartitionWriter,
    Receipt,
    RefusedError,
    encoded_rows,
    refusing,
)
from lightning_stream.formats.encodings import plain_values
from lightning_stream.formats.mds.encode import MdsEncoder
from lightning_stream.sources.base import Batch, Batches, Columns, Partition, Pieces, Reader, Row, batched, read_splits
from lightning_stream.sources.files import readable
from lightning_stream.sources.nulls import NullRule
from lightning_stream.writer.batch import check_texts
from lightning_stream.writer.lengths import LengthFunctions, measure_batch

TRAIN = "train"
VAL = "val"


def kept_length(sample: Any) -> int:
    """Stand for a length that the source has: nothing is measured."""
    raise NotImplementedError(f"the length of {sample!r:.60} comes with its batch")


@dataclass(frozen=True)
class Transform:
    """A function of the user's, or none."""

    of_row: Callable[[dict[str, Any]], Any] | None = None
    of_partition: Callable[[Iterator[dict[str, Any]]], Iterable[Row]] | None = None

    def __post_init__(self) -> None:
        if self.of_row is not None and self.of_partition is not None:
            raise ValueError("pass transform= or transform_partition=, not both.")

    @property
    def function(self) -> Callable[..., Any] | None:
        """The function; None to write the rows as they are."""
        return self.of_row or self.of_partition

    def samples(self, batches: Iterable[Batch], partition: str) -> Iterator[tuple[Row, str]]:
        """Yield the samples made from a partition's rows, each with where its row was, as far as that is known."""
        rows = ((row, batch.where) for batch in batches for row in _dicts(batch))
        if self.of_row is None:
            assert self.of_partition is not None
            made = self.of_partition(row for row, _ in rows)
            yield from ((sample, partition) for sample in _checked(made, "transform_partition"))
            return
        for row, where in rows:
            made = self.of_row(row)
            if made is not None:
                samples = [made] if isinstance(made, Mapping) else _checked(made, "transform")
                yield from ((sample, where) for sample in samples)


def _dicts(batch: Batch) -> Iterable[Any]:
    if isinstance(batch.rows, list):
        return batch.rows
    if not isinstance(batch.rows, Mapping):
        return batch.rows.to_pylist()  # type: ignore[no-any-return]
    columns = map(plain_values, batch.rows.values())
    numbers = [column.tolist() if isinstance(column, np.ndarray) and column.ndim == 1 else column for column in columns]
    return (dict(zip(batch.rows, row, strict=True)) for row in zip(*numbers, strict=True))


def _checked(made: Any, name: str) -> Iterator[Row]:
    if not isinstance(made, Iterable) or isinstance(made, (str, bytes, Mapping)):
        raise TypeError(f"{name} must return samples (dicts); got {type(made).__name__}.")
    for sample in made:
        if not isinstance(sample, Mapping):
            raise TypeError(f"{name} must return samples (dicts); one of them is {type(sample).__name__}.")
        yield sample


def _refuse_others(rows: Sequence[Row], columns: Columns) -> None:
    """Raise ValueError if a row has a value beyond the columns that were inferred."""
    for row in rows:
        if not row.keys() <= columns.keys():
            others = ", ".join(sorted(map(str, row.keys() - columns.keys())))
            key = f"sample {row['__key__']!r}: " if "__key__" in row else ""
            raise ValueError(
                f"{key}a row has {others}, unlike the rows that the columns were inferred from. Pass columns= to "
                "choose what is written."
            )


@dataclass(frozen=True)
class ValidationSplit:
    """Chooses rows by a hash of their encoded bytes, or of one column's value.

    A row keeps its split when files are added, removed or reordered. Equal rows are in the same split.

    Attributes:
        fraction: The expected share of rows, in (0, 1).
        seed: Another seed chooses other rows.
        group_by: A column: rows with the same value there are in the same split.
        columns: The columns that are hashed, with their encodings; unused with `group_by`.
    """

    fraction: float
    seed: int
    group_by: str | None
    columns: Columns

    def __post_init__(self) -> None:
        if not 0 < self.fraction < 1:
            raise ValueError(f"val_fraction must be between 0 and 1; got {self.fraction}.")

    def of_rows(self, values: Mapping[str, Any], num_rows: int) -> dict[str, NDArray[np.int64]]:
        """Return the numbers of a batch's rows by split."""
        below = int(self.fraction * 2**64)
        hashes = (xxhash.xxh3_64_intdigest(data, seed=self.seed) for data in self._hashed(values, num_rows))
        chosen = np.fromiter((row_hash < below for row_hash in hashes), np.bool_, num_rows)
        return {TRAIN: np.flatnonzero(~chosen), VAL: np.flatnonzero(chosen)}

    def _hashed(self, values: Mapping[str, Any], num_rows: int) -> Iterable[Any]:
        if self.group_by is None:
            encoder = MdsEncoder(self.columns)
            return encoder.encode_batch({name: values[name] for name in self.columns}, num_rows).rows()
        groups = plain_values(values[self.group_by])
        return map(_group_bytes, groups.tolist() if isinstance(groups, np.ndarray) else groups)


def _group_bytes(value: Any) -> bytes:
    return bytes(value) if isinstance(value, (bytes, memoryview)) else str(value).encode()


@dataclass(frozen=True)
class PartitionTask:
    """What all partitions have in common. Picklable."""

    reader: Reader
    read: Columns  # the columns that are read, with their encodings
    columns: Columns  # those that are written
    specs: Mapping[str, OutputSpec]  # the datasets that are written, by split
    transform: Transform
    nulls: NullRule
    split: ValidationSplit | None  # None if there is one dataset
    strict: bool  # whether the columns were inferred, so that a value beyond them is refused
    lengths: LengthFunctions  # what readers get before any sample, by name
    by_piece: bool  # whether each piece of the source becomes a shard
    make_writer: Callable[[OutputSpec, int], PartitionWriter] = PartitionWriter  # of a dataset, for a partition

    def run(self, partition: Partition) -> dict[str, Receipt]:
        """Write a partition, and then its receipts; return them by split."""
        partition_id = partition.partition_id
        nulls = dict[str, int]()
        writers = {split: self.make_writer(spec, partition_id) for split, spec in self.specs.items()}
        try:
            with ExitStack() as open_writers:
                for writer in writers.values():
                    open_writers.enter_context(writer)
                rows = self._fill(writers, partition, nulls)
        except RefusedError as error:
            return {split: Receipt(partition_id, refused=str(error)) for split in writers}
        return {split: self.specs[split].put(writer.receipt(nulls, rows)) for split, writer in writers.items()}

    def _fill(self, writers: Mapping[str, PartitionWriter], partition: Partition, nulls: dict[str, int]) -> list[int]:
        """Write all rows; return how many each piece has, where each becomes a shard."""
        ends = []
        for splits in [(split,) for split in partition.splits] if self.by_piece else [partition.splits]:
            for batch in self._batches(splits, str(partition)):
                with refusing(f"{batch.where}: "):
                    self._write(batch, writers, nulls)
            for writer in writers.values() if self.by_piece else ():
                writer.flush_shard()
                ends.append(writer.num_samples)
        return np.diff(ends, prepend=0).tolist()

    def _batches(self, splits: Pieces, where: str) -> Batches:
        batches = _refusing(read_splits(self.reader, splits, self.read))
        return batches if self.transform.function is None else batched(self.transform.samples(batches, where))

    @cached_property
    def _encoder(self) -> MdsEncoder:
        return MdsEncoder(self.columns)

    def _write(self, batch: Batch, writers: Mapping[str, PartitionWriter], nulls: dict[str, int]) -> None:
        rows = batch.rows
        if self.strict and isinstance(rows, list):
            _refuse_others(rows, self.columns)
        truths = set[str]()
        # What a transform returned is no word about files.
        with readable(batch.where) if hasattr(rows, "schema") else nullcontext():
            values, num_rows = self.nulls.settle(rows, self.columns, nulls, truths)
            if truths and self.strict:
                raise ValueError(f"column {min(truths)!r}: found a truth value among numbers.")
        if not num_rows:
            return
        check_texts(values)
        encoded = self._encoder.encode_batch(values, num_rows)
        measured = {name: function for name, function in self.lengths.items() if function is not kept_length}
        lengths = {**batch.lengths, **measure_batch(measured, values, num_rows, tuple(self.columns))}
        lengths = {name: lengths[name] for name in self.lengths}
        if self.split is None:
            writers[""].write_encoded(encoded, lengths)
            return
        row_bytes = encoded.rows()
        for split, selected in self.split.of_rows(values, num_rows).items():
            if split in writers:
                chosen = {name: numbers[selected] for name, numbers in lengths.items()}
                writers[split].write_encoded(encoded_rows([row_bytes[k] for k in selected.tolist()]), chosen)


def _refusing(batches: Batches) -> Batches:
    """Yield the batches; a ValueError of a reader is about a value, so another attempt would not help."""
    try:
        yield from batches
    except ValueError as error:
        raise RefusedError(str(error)) from error
