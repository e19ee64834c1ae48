"""What one process does with a partition: read it, transform it, settle nulls, and write it to every split."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from lightning_stream.convert.partition import OutputSpec, PartitionWriter, RefusedError
from lightning_stream.convert.receipt import Receipt, receipt_name
from lightning_stream.convert.sources.base import Batch, Partition, Reader
from lightning_stream.convert.sources.rows import columns_of, fit_values
from lightning_stream.convert.split import ValidationSplit
from lightning_stream.formats.encodings.base import BinaryColumn
from lightning_stream.writer.batch import batch_columns

Row: TypeAlias = "dict[str, Any]"


@dataclass(frozen=True)
class Transform:
    """A function of the user's, or none."""

    of_row: Callable[[Row], Any] | None = None
    of_partition: Callable[[Iterator[Row]], Iterable[Mapping[str, Any]]] | None = None

    def __post_init__(self) -> None:
        if self.of_row is not None and self.of_partition is not None:
            raise ValueError("pass transform= or transform_partition=, not both.")

    @property
    def function(self) -> Callable[..., Any] | None:
        """The function; None to write the rows as they are."""
        return self.of_row or self.of_partition

    def samples(self, batches: Iterable[Batch]) -> Iterator[tuple[Mapping[str, Any], str]]:
        """Yield the samples made from a partition's rows, each with where its row was, if that is known."""
        if self.of_partition is not None:
            made = self.of_partition(row for batch in batches for row in rows_of(batch))
            yield from ((sample, "") for sample in _samples(made, "transform_partition"))
            return
        assert self.of_row is not None
        for batch in batches:
            for row in rows_of(batch):
                made = self.of_row(row)
                if isinstance(made, Mapping):
                    yield made, batch.where
                elif made is not None:
                    yield from ((sample, batch.where) for sample in _samples(made, "transform"))


def _samples(made: Any, name: str) -> Iterator[Mapping[str, Any]]:
    if not isinstance(made, Iterable) or isinstance(made, (str, bytes, Mapping)):
        raise TypeError(f"{name} must return samples (dicts); got {type(made).__name__}.")
    for sample in made:
        if not isinstance(sample, Mapping):
            raise TypeError(f"{name} must return samples (dicts); one of them is {type(sample).__name__}.")
        yield sample


def rows_of(batch: Batch) -> Iterator[Row]:
    """Yield the rows of a batch as dicts of Python values."""
    values = batch.columns
    if isinstance(values, list):
        yield from values
    elif hasattr(values, "to_pylist"):
        yield from values.to_pylist()
    else:
        columns = [column.tolist() if getattr(column, "ndim", 0) == 1 else column for column in values.values()]
        for row in zip(*columns, strict=True):
            yield dict(zip(values, row, strict=True))


@dataclass(frozen=True)
class NullRule:
    """How nulls are treated in columns whose encoding has none: all but json."""

    fill: Mapping[str, Any] = field(default_factory=dict)
    drop: bool = False

    def settle(self, batch: Any, columns: Mapping[str, str], nulls: dict[str, int]) -> tuple[dict[str, Any], int]:
        """Return a batch as a writer takes it, and its number of rows; no rows if nulls are left, which are counted."""
        settle = self._arrow if hasattr(batch, "schema") else self._plain
        values = settle(batch, columns, nulls)
        return batch_columns({} if nulls else values)

    def _arrow(self, batch: Any, columns: Mapping[str, str], nulls: dict[str, int]) -> Any:
        from lightning_stream.convert.arrow import count_nulls, drop_nulls, fill_nulls, writer_columns

        if not batch.num_rows:
            return {}
        batch = fill_nulls(batch, self.fill) if self.fill else batch
        batch = drop_nulls(batch, columns) if self.drop else batch
        for name, count in count_nulls(batch, columns).items():
            nulls[name] = nulls.get(name, 0) + count
        return {} if nulls else writer_columns(batch, columns)

    def _plain(self, batch: Mapping[str, Any], columns: Mapping[str, str], nulls: dict[str, int]) -> Any:
        held = {name: batch[name] for name in columns}
        lists = [name for name, values in held.items() if type(values) is list and columns[name] != "json"]
        for name in set(lists) & self.fill.keys():
            held[name] = [self.fill[name] if value is None else value for value in held[name]]
        if self.drop and lists:
            rows = zip(*(held[name] for name in lists), strict=True)
            kept = [k for k, row in enumerate(rows) if all(value is not None for value in row)]
            held = {name: taken(values, kept) for name, values in held.items()}
        for name in lists:
            count = sum(value is None for value in held[name])  # not list.count: arrays compare by element
            if count:
                nulls[name] = nulls.get(name, 0) + count
        return {} if nulls else {name: _fitted(name, values, columns[name]) for name, values in held.items()}


def _fitted(name: str, values: Any, encoding: str) -> Any:
    try:
        return fit_values(values, encoding)
    except (ValueError, TypeError, OverflowError) as error:
        raise ValueError(f"column {name!r}: {error}") from error


def taken(values: Any, kept: Any) -> Any:
    """Return the rows of these numbers, of a column of any kind."""
    if not isinstance(values, list) and hasattr(values, "dtype"):
        return values[kept]
    chosen = [values[k] for k in kept]
    if isinstance(values, BinaryColumn):
        pieces = BinaryColumn(chosen)
        pieces.encoding = values.encoding
        return pieces
    return chosen


@dataclass(frozen=True)
class PartitionTask:
    """What all partitions have in common. Picklable."""

    reader: Reader
    read: Mapping[str, str]
    specs: Mapping[str, OutputSpec]
    transform: Transform
    nulls: NullRule
    split: ValidationSplit | None
    strict: bool

    def run(self, partition: Partition) -> dict[str, Receipt]:
        """Write a partition, and then its receipts; return them by split."""
        nulls: dict[str, int] = {}
        writers = {split: self.writer(split, partition.number) for split in self.specs}
        try:
            with ExitStack() as open_writers:
                for writer in writers.values():
                    open_writers.enter_context(writer)
                self._write(partition, writers, nulls)
        except RefusedError as error:
            return {split: Receipt(partition.number, "", refused=str(error)) for split in writers}
        receipts = {
            split: Receipt(partition.number, "", writer.num_samples, tuple(writer.shards), nulls)
            for split, writer in writers.items()
        }
        for split, receipt in receipts.items():
            if receipt.is_good:
                spec = self.specs[split]
                spec.store.put(receipt_name(spec.fingerprint, partition.number), receipt.to_bytes())
        return receipts

    def writer(self, split: str, number: int) -> PartitionWriter:
        """Take the rows of a partition that belong to a split."""
        return PartitionWriter(self.specs[split], number)

    def _write(self, partition: Partition, writers: Mapping[str, PartitionWriter], nulls: dict[str, int]) -> None:
        batches = _refusing(self.reader.read_all(partition.splits, self.read))
        if self.transform.function is None:
            for batch in batches:
                self._write_batch(batch, writers, nulls)
            return
        for sample, where in self.transform.samples(batches):
            with _refused_at(where or str(partition)):
                writer = writers.get("" if self.split is None else self.split.of_sample(sample))
                if writer is not None:
                    writer.write(sample)

    def _write_batch(self, batch: Batch, writers: Mapping[str, PartitionWriter], nulls: dict[str, int]) -> None:
        with _refused_at(batch.where):
            found = batch.columns
            found = columns_of(found, self.read, strict=self.strict) if isinstance(found, list) else found
            values, num_rows = self.nulls.settle(found, self.read, nulls)
            if self.split is None or not num_rows:
                parts = {"": values} if num_rows else {}
            else:
                rows = self.split.of_rows(values, num_rows)
                parts = {
                    split: {name: taken(column, kept) for name, column in values.items()}
                    for split, kept in rows.items()
                    if len(kept) and split in writers
                }
            for split, chosen in parts.items():
                writers[split].write_batch(chosen)


@contextmanager
def _refused_at(where: str) -> Iterator[None]:
    """Raise errors about a value as `RefusedError`, with where the value is."""
    try:
        yield
    except (TypeError, ValueError, OverflowError) as error:
        raise RefusedError(f"{where}: {error}") from error


def _refusing(batches: Iterator[Batch]) -> Iterator[Batch]:
    """The same; a ValueError on the way is about a value, so another attempt would not help."""
    while True:
        try:
            batch = next(batches)
        except StopIteration:
            return
        except ValueError as error:
            raise RefusedError(str(error)) from error
        yield batch
