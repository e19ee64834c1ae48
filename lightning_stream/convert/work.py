"""What one process does: read a part, and write it to every split that has a share in it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from lightning_stream.convert.job import Job
from lightning_stream.convert.nulls import NullRule, settled, taken
from lightning_stream.convert.part import PartWriter, RefusedError, Statistics
from lightning_stream.convert.plan import Part
from lightning_stream.convert.receipt import Receipt, receipt_name
from lightning_stream.convert.sources.base import Batch, Reader
from lightning_stream.convert.spill import SpillWriter
from lightning_stream.convert.split import HeldOut
from lightning_stream.convert.transform import Transform

Tell = Callable[[int], None]
_TELL_ROWS = 100


@dataclass(frozen=True)
class Work:
    """What all parts have in common. Picklable.

    Attributes:
        reader: Reads the source.
        read: The columns that are read, with their encodings.
        jobs: The datasets that are written: by the name of the split, or one named ``""``. Rows of other splits are
            left out.
        transform: What becomes of rows.
        nulls: What becomes of null values.
        val_fraction: Which rows go to the split that is held out; None where there is one dataset.
    """

    reader: Reader
    read: Mapping[str, str]
    jobs: Mapping[str, Job]
    transform: Transform
    nulls: NullRule
    val_fraction: HeldOut | None

    def run(self, part: Part, tell: Tell) -> dict[str, Receipt]:
        """Write a part, and then its receipts; give them by split.

        Args:
            part: Which.
            tell: Called with a number of rows when so many more are written.
        """
        receipts = self.written(part, tell)
        tell(sum(receipt.num_samples for receipt in receipts.values()))
        for split, receipt in receipts.items():
            if all(each.is_good for each in receipts.values()):
                job = self.jobs[split]
                job.store.put(receipt_name(job.fingerprint, part.number), receipt.to_bytes())
        return receipts

    def writer(self, split: str, part: int) -> PartWriter | SpillWriter:
        """What takes the rows of a part that belong to a split."""
        return PartWriter(self.jobs[split], part)

    def written(self, part: Part, tell: Tell) -> dict[str, Receipt]:
        """Write a part; its receipts, that are not put anywhere yet."""
        nulls: dict[str, int] = {}
        outs = {split: _Out(self.writer(split, part.number), Statistics()) for split in self.jobs}
        try:
            with ExitStack() as open_writers:
                for out in outs.values():
                    open_writers.enter_context(out.writer)
                self._write(part, outs, nulls, tell)
        except RefusedError as error:
            return {split: Receipt(part.number, "", refused=str(error)) for split in outs}
        receipts = {split: out.receipt(part.number, nulls) for split, out in outs.items()}
        self.finish(part, {split: out.writer for split, out in outs.items()}, receipts)
        return receipts

    def finish(self, part: Part, writers: Mapping[str, Any], receipts: Mapping[str, Receipt]) -> None:
        """Called when all rows of a part are written."""

    def _write(self, part: Part, outs: Mapping[str, _Out], nulls: dict[str, int], tell: Tell) -> None:
        row = 0
        batches = _refusing(self.reader.read_all(part.spans, self.read))
        if self.transform.is_given:
            for sample, where in self.transform.samples(batches):
                out = outs.get(self._split(part.number, row, sample))
                if out is not None:
                    out.add_sample(sample, where or str(part))
                row += 1
                if row % _TELL_ROWS == 0:
                    tell(row)
            return
        for batch in batches:
            found = _settled(batch, self.read, self.nulls, nulls)
            if found is None:
                continue
            values, num_rows = found
            if num_rows:
                self._add(outs, values, part.number, row, num_rows, batch.where)
                row += num_rows
                tell(row)

    def _split(self, part: int, row: int, sample: Mapping[str, Any]) -> str:
        return "" if self.val_fraction is None else self.val_fraction.of_sample(part, row, sample)

    def _add(
        self, outs: Mapping[str, _Out], values: dict[str, Any], part: int, row: int, num_rows: int, where: str
    ) -> None:
        if self.val_fraction is None:
            outs[""].add(values, where)
            return
        for split, kept in self.val_fraction.of_rows(part, row, num_rows, values).items():
            if len(kept) and split in outs:
                outs[split].add({name: taken(column, kept) for name, column in values.items()}, where)


@dataclass(frozen=True)
class _Out:
    writer: PartWriter | SpillWriter
    statistics: Statistics

    def add(self, values: dict[str, Any], where: str) -> None:
        try:
            self.writer.write_batch(values)
        except (TypeError, ValueError, OverflowError) as error:
            raise RefusedError(f"{where}: {error}") from error
        self.statistics.add(values)

    def add_sample(self, sample: Mapping[str, Any], where: str) -> None:
        try:
            self.writer.write(sample)
        except (TypeError, ValueError, OverflowError) as error:
            raise RefusedError(f"{where}: {error}") from error

    def receipt(self, number: int, nulls: Mapping[str, int]) -> Receipt:
        shards = tuple(self.writer.shards)
        return Receipt(number, "", self.writer.num_samples, shards, self.statistics.columns, nulls)


def _settled(batch: Batch, columns: Mapping[str, str], rule: NullRule, nulls: dict[str, int]) -> Any:
    try:
        return settled(batch.columns, columns, rule, nulls)
    except (TypeError, ValueError, OverflowError) as error:
        raise RefusedError(f"{batch.where}: {error}") from error


def _refusing(given: Iterable[Any]) -> Iterator[Any]:
    """The same; a ValueError on the way is about a value, and not to be tried again."""
    source = iter(given)
    while True:
        try:
            each = next(source)
        except StopIteration:
            return
        except ValueError as error:
            raise RefusedError(str(error)) from error
        yield each
