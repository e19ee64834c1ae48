"""Sizes as text: a unit of bytes is 1024 of the next smaller one, a unit of samples 1000."""

from __future__ import annotations

import re
from numbers import Real
from typing import Any

_BYTES = {"b": 1, "kb": 1 << 10, "mb": 1 << 20, "gb": 1 << 30, "tb": 1 << 40, "pb": 1 << 50, "eb": 1 << 60}
_COUNTS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}
_SIZE = re.compile(r"\s*([0-9][0-9,_]*(?:\.[0-9]*)?|\.[0-9]+)\s*([a-z]*)\s*", re.IGNORECASE)


def parse_bytes(value: float | str, name: str = "size") -> int:
    """Return the bytes in a whole number, or in text such as ``"64mb"``; ValueError with ``name`` for other values."""
    return _parse(value, _BYTES | {"": 1}, name, '64mb"')


def parse_count(value: float | str, name: str = "count") -> int:
    """Return the number of samples in ``value``: a whole number, or text such as ``"100k"``, ``"64m"``."""
    return _parse(value, _COUNTS, name, '100k"')


def whole_number(value: Any) -> Any:
    """Return a whole number of any type as an int, and any other value as it is."""
    if isinstance(value, (int, str)) or not isinstance(value, Real):
        return value
    as_float = float(value)
    return int(as_float) if as_float.is_integer() else value


def _parse(value: float | str, units: dict[str, int], name: str, example: str) -> int:
    value = whole_number(value)
    if isinstance(value, int) and not isinstance(value, bool):
        if value < 0:
            raise ValueError(f"{name} must not be negative: got {value}.")
        return value
    match = _SIZE.fullmatch(value) if isinstance(value, str) else None
    unit = units.get(match[2].lower()) if match else None
    if match is None or unit is None:
        known = ", ".join(key for key in units if key)
        raise ValueError(f'{name} must be a whole number or a text such as "{example} (units: {known}): got {value!r}.')
    return int(float(match[1].replace(",", "").replace("_", "")) * unit)
