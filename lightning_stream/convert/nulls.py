"""What becomes of null values: MDS has none but in json columns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lightning_stream.convert.sources.rows import fit_values
from lightning_stream.formats.encodings.base import BinaryColumn
from lightning_stream.writer.batch import batch_columns


@dataclass(frozen=True)
class NullRule:
    """How nulls are treated where an encoding has none.

    Attributes:
        fill: A value by column, to write in their place.
        drop: Leave out rows that hold others.
    """

    fill: Mapping[str, Any] = field(default_factory=dict)
    drop: bool = False


def settled(
    values: Any, columns: Mapping[str, str], rule: NullRule, nulls: dict[str, int]
) -> tuple[dict[str, Any], int] | None:
    """A batch as a writer takes it, and its number of rows; None if nulls are left, which are counted.

    Raises:
        ValueError: A value that its encoding does not take; names the column.
    """
    found = _arrow if hasattr(values, "schema") else _plain
    held = found(values, columns, rule, nulls)
    return None if nulls else batch_columns(held)


def _arrow(batch: Any, columns: Mapping[str, str], rule: NullRule, nulls: dict[str, int]) -> Any:
    from lightning_stream.convert.arrow import count_nulls, drop_nulls, fill_nulls, writer_columns

    if not batch.num_rows:
        return {}
    batch = fill_nulls(batch, rule.fill) if rule.fill else batch
    batch = drop_nulls(batch, columns) if rule.drop else batch
    for name, count in count_nulls(batch, columns).items():
        nulls[name] = nulls.get(name, 0) + count
    return {} if nulls else writer_columns(batch, columns)


def _plain(batch: Mapping[str, Any], columns: Mapping[str, str], rule: NullRule, nulls: dict[str, int]) -> Any:
    held = {name: batch[name] for name in columns}
    lists = [name for name, values in held.items() if type(values) is list and columns[name] != "json"]
    for name in lists:
        if name in rule.fill:
            held[name] = [rule.fill[name] if value is None else value for value in held[name]]
    if rule.drop:
        rows = zip(*(held[name] for name in lists), strict=True)
        kept = [k for k, row in enumerate(rows) if all(value is not None for value in row)]
        held = {name: taken(values, kept) for name, values in held.items()} if lists else held
    for name in lists:
        count = sum(value is None for value in held[name])  # not count(): arrays compare by element
        if count:
            nulls[name] = nulls.get(name, 0) + count
    return {} if nulls else {name: _fitted(name, values, columns[name]) for name, values in held.items()}


def _fitted(name: str, values: Any, encoding: str) -> Any:
    try:
        return fit_values(values, encoding)
    except (ValueError, TypeError, OverflowError) as error:
        raise ValueError(f"column {name!r}: {error}") from error


def taken(values: Any, kept: Any) -> Any:
    """The rows of these numbers, of a column of any kind."""
    if not isinstance(values, list) and hasattr(values, "dtype"):
        return values[kept]
    chosen = [values[k] for k in kept]
    if isinstance(values, BinaryColumn):
        pieces = BinaryColumn(chosen)
        pieces.encoding = values.encoding
        return pieces
    return chosen
