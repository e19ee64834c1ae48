"""Columns that hold the values of all files, rows of a source as values that an encoder takes, and nulls."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from lightning_stream.formats.encodings.base import cast_numbers
from lightning_stream.sources.base import Columns, Piece, Pieces, Reader, Row
from lightning_stream.writer.batch import batch_columns

_NUMBERS = ("int", "uint", "float")
OTHER_ENCODING = "Correct the value, or pass columns= with an encoding that takes it, e.g. 'json'."
LARGEST_FLOAT = 1 << 53  # up to it, every whole number is a float64


def nullable_columns(reader: Reader, columns: Columns, pieces: Pieces) -> dict[str, str]:
    """Return the columns where those that are known to have nulls are json, if the reader can do that.

    MDS has no null but in json.
    """
    known = {name for piece in pieces for name in piece.nulls} if reader.takes_nulls else ()
    nulls = [name for name in known if columns.get(name, "json") not in ("bytes", "json")]
    return {**columns, **dict.fromkeys(nulls, "json")}


def widened_columns(columns: Columns, pieces: Iterable[Piece]) -> dict[str, str]:
    """Return the columns with encodings that hold the values of all files exactly; ValueError if there are none."""
    wider = [pair for piece in pieces for pair in piece.types.items()]
    if not wider:
        return dict(columns)
    from lightning_stream.sources.arrow import common_type, encoding_of

    types: dict[str, Any] = {}
    for name, kind in wider:
        try:
            types[name] = common_type(types.get(name, kind), kind)
        except ValueError as error:
            raise ValueError(f"column {name!r}: {error}. Cast it, or name the encodings by columns=.") from error
    return {**columns, **{name: encoding_of(kind) for name, kind in types.items()}}


@dataclass(frozen=True)
class NullRule:
    """How nulls are treated in columns whose encoding has none: all but json."""

    fill: Mapping[str, Any] = field(default_factory=dict)
    drop: bool = False

    def settle(
        self, rows: Any, columns: Columns, nulls: dict[str, int], truths: set[str]
    ) -> tuple[dict[str, Any], int]:
        """Return an Arrow batch, or rows, as columns of values for a writer, and the number of rows.

        There are no rows if nulls are left; ``nulls`` counts them by column. ``truths`` gets the columns of numbers
        that hold truth values, which become 1 and 0.
        """
        if isinstance(rows, Mapping):
            return batch_columns(rows)
        if not hasattr(rows, "schema"):
            return batch_columns(self._plain(rows, columns, nulls, truths))
        from lightning_stream.sources.arrow import settle_nulls, writer_columns

        batch = settle_nulls(rows, columns, self.fill, self.drop, nulls)
        return batch_columns({} if nulls or not batch.num_rows else writer_columns(batch, columns))

    def _plain(self, rows: Sequence[Row], columns: Columns, nulls: dict[str, int], truths: set[str]) -> dict[str, Any]:
        needed = {name for name, encoding in columns.items() if encoding != "json"}
        if self.drop:
            rows = [row for row in rows if all(row.get(name) is not None for name in needed - self.fill.keys())]
        lists = {name: [row.get(name) for row in rows] for name in columns}
        for name in lists.keys() & self.fill.keys():
            lists[name] = [self.fill[name] if value is None else value for value in lists[name]]
        for name in needed:
            count = sum(value is None for value in lists[name])  # not list.count: arrays compare by element
            if count:
                nulls[name] = nulls.get(name, 0) + count
        return {} if nulls else {name: _fitted(name, lists[name], columns[name], truths) for name in lists}


def _has_truths(values: Any, array: Any) -> bool:
    """Whether a list that became an array has a truth value, which is 1 or 0 there."""
    is_flat = isinstance(values, list) and array.ndim == 1
    return is_flat and any(type(values[k]) is bool for k in np.flatnonzero(array == array.astype(bool)))


def _fitted(name: str, values: list[Any], encoding: str, truths: set[str]) -> Any:
    """Values as a writer takes them: lists as arrays, and numbers in one array, if that is what the encoding stores."""
    kinds = set(map(type, values))
    if bool in kinds and encoding.startswith(("int", "float")):
        truths.add(name)
    try:
        if encoding.startswith("ndarray"):
            arrays = [_array(value, encoding) if isinstance(value, list) else value for value in values]
            if any(map(_has_truths, values, arrays)):
                truths.add(name)
            return arrays
        if values and encoding.startswith(_NUMBERS) and (kinds <= {int, bool} or kinds <= {int, float}):
            if encoding.startswith("float"):
                _check_exact(values)
                return np.array(values, np.float64)
            array = np.array(values)
            return values if array.dtype.kind == "f" else array  # NumPy rounds large ones beside others
    except (ValueError, TypeError, OverflowError) as error:
        raise ValueError(f"column {name!r}: {error}") from error
    return values


def _check_exact(values: Sequence[Any]) -> None:
    """Raise ValueError for a whole number, nested or not, that no float64 is equal to."""
    for value in values:
        if isinstance(value, list):
            _check_exact(value)
        elif type(value) is int and abs(value) > LARGEST_FLOAT and float(value) != value:
            raise ValueError(f"{value} is no float64; it would be rounded.")


def _array(value: list[Any], encoding: str) -> Any:
    dtype = encoding.split(":")[1] if ":" in encoding else None
    array = np.array(value) if value else np.array(value, dtype)
    if array.dtype.kind == "f" or str(dtype).startswith("float"):
        _check_exact(value)
    if array.dtype.kind not in "iufb":
        raise ValueError(f"{value!s:.60} does not fit {encoding}.")
    return array if dtype is None else cast_numbers(array, np.dtype(dtype))
