"""Rows that come as Python values: their columns, and what encodings fit all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from lightning_stream.convert.sources.base import chosen_columns
from lightning_stream.writer.infer import infer_encoding

SAMPLED_ROWS = 10_000


def columns_of(rows: Sequence[Mapping[str, Any]], columns: Mapping[str, str], *, strict: bool) -> dict[str, list[Any]]:
    """Return the values by column, None where a row has no such key; `strict` refuses values beyond the columns."""
    for row in rows if strict else ():
        if not row.keys() <= columns.keys():
            others = ", ".join(sorted(map(str, row.keys() - columns.keys())))
            key = f"sample {row['__key__']!r}: " if "__key__" in row else ""
            raise ValueError(
                f"{key}a row has {others}, unlike the rows that the columns were inferred from. Pass columns= to "
                "choose what is written."
            )
    return {name: [row.get(name) for row in rows] for name in columns}


def infer_rows(rows: Sequence[Mapping[str, Any]], asked: Mapping[str, str] | None, where: str) -> dict[str, str]:
    """Return encodings that fit all of these rows.

    Whole numbers become ``int64``, numbers ``float64``, truth values ``uint8``, text ``str``, lists of numbers
    ``ndarray``, everything else, and values of several types, ``json``. Nulls do not matter.
    """
    names = dict.fromkeys(name for row in rows for name in row)
    if asked is not None:
        return chosen_columns(dict.fromkeys(names, ""), asked, where)
    if not names:
        raise ValueError(f"{where} is empty: there is nothing to write.")
    return {name: _fitting(name, [row[name] for row in rows if row.get(name) is not None]) for name in names}


def _fitting(name: str, values: Sequence[Any]) -> str:
    found = {_encoding(name, value) for value in values}
    if found == {"int64", "float64"}:
        return "float64"
    if found == {"ndarray:int64", "ndarray:float64"}:
        return "ndarray:float64"
    return found.pop() if len(found) == 1 else "json"


def _encoding(name: str, value: Any) -> str:
    if type(value) is int:
        return "int64" if -(1 << 63) <= value < 1 << 63 else "json"
    if type(value) is list:
        kinds = {type(element) for element in value}
        if kinds and kinds <= {int, float}:
            return "ndarray:float64" if float in kinds else "ndarray:int64"
        return "json"
    return infer_encoding(name, value)


def fit_values(values: Any, encoding: str) -> Any:
    """Return values as a writer takes them for this encoding: lists as arrays, numbers in one array."""
    if not isinstance(values, list) or not values:
        return values
    if encoding.startswith("ndarray"):
        return [_array(value, encoding) if isinstance(value, list) else value for value in values]
    kinds = set(map(type, values))
    if kinds <= {int, bool} or kinds <= {int, float}:
        return np.array(values) if kinds <= {int, bool} else np.array(values, np.float64)
    return values


def _array(value: list[Any], encoding: str) -> Any:
    dtype = encoding.split(":")[1] if ":" in encoding else None
    array = np.array(value) if value else np.array(value, dtype)
    if dtype is None or array.dtype == dtype:
        return array
    cast = array.astype(dtype)
    whole = cast.dtype.kind in "iu" and not np.array_equal(cast, array)
    if whole or array.dtype.kind not in "iufb":
        raise ValueError(f"{value!s:.60} does not fit {encoding}.")
    return cast
