"""What becomes of rows before they are written: a function of the user's, called with each, or with all of a part."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from lightning_stream.convert.code import source_text
from lightning_stream.convert.sources.base import Batch

Row: TypeAlias = "dict[str, Any]"


@dataclass(frozen=True)
class Transform:
    """A function of the user's, or none.

    Attributes:
        of_row: From a row to a sample, None for none, or several samples.
        of_rows: From the rows of a part, in order, to its samples.
    """

    of_row: Callable[[Row], Any] | None = None
    of_rows: Callable[[Iterator[Row]], Iterable[Mapping[str, Any]]] | None = None

    def __post_init__(self) -> None:
        if self.of_row is not None and self.of_rows is not None:
            raise ValueError("pass transform= or transform_partition=, not both.")

    @property
    def is_given(self) -> bool:
        """Whether rows are not written as they are."""
        return self.of_row is not None or self.of_rows is not None

    @property
    def told(self) -> str:
        """What tells it from another."""
        return source_text(self.of_row or self.of_rows)

    def samples(self, batches: Iterable[Batch]) -> Iterator[tuple[Mapping[str, Any], str]]:
        """The samples it makes of the rows of a part, each with where its row was, if that is known.

        Raises:
            TypeError: It gives something else than samples.
        """
        if self.of_rows is not None:
            rows = (row for batch in batches for row in rows_of(batch))
            for sample in _iterable(self.of_rows(rows), "transform_partition"):
                yield _sample(sample, "transform_partition"), ""
            return
        assert self.of_row is not None
        for batch in batches:
            for row in rows_of(batch):
                made = self.of_row(row)
                if isinstance(made, Mapping):
                    yield made, batch.where
                elif made is not None:
                    for sample in _iterable(made, "transform"):
                        yield _sample(sample, "transform"), batch.where


def _iterable(made: Any, name: str) -> Iterable[Any]:
    if isinstance(made, Iterable) and not isinstance(made, (str, bytes, Mapping)):
        return made
    raise TypeError(f"{name} must give samples (dicts); got {type(made).__name__}.")


def _sample(made: Any, name: str) -> Mapping[str, Any]:
    if isinstance(made, Mapping):
        return made
    raise TypeError(f"{name} must give samples (dicts); one of them is {type(made).__name__}.")


def rows_of(batch: Batch) -> Iterator[Row]:
    """The rows of a batch as dicts of Python values."""
    values = batch.columns
    if isinstance(values, list):
        yield from values
        return
    if hasattr(values, "to_pylist"):
        yield from values.to_pylist()
        return
    names = list(values)
    columns = [column.tolist() if getattr(column, "ndim", 0) == 1 else column for column in values.values()]
    for row in zip(*columns, strict=True):
        yield dict(zip(names, row, strict=True))
