"""Statistics of the values of one column, for ``show --stats``."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from lightning_stream.cli.values import class_name, is_image
from lightning_stream.formats.encodings.media import Media, measured

_MOST_DISTINCT, _SHOWN, _LONGEST = 1000, 8, 100
_NUMBERS = "biuf"  # kinds of numpy's types
_Facts = tuple[str, Mapping[str, Any], Any]


class ColumnStats:
    """Running statistics of one column's values."""

    def __init__(self) -> None:
        self._ranges: dict[str, _Range] = {}
        self._values: Counter[Any] | None = Counter()  # None: too many differ, or they are not compared
        self._kinds: Counter[str] = Counter()

    def add(self, values: Any) -> None:
        """Add the values of some samples: an array with a row for each, or a list."""
        if isinstance(values, np.ndarray) and values.dtype.kind in _NUMBERS and values.ndim == 1:
            is_counted = values.dtype.kind != "f"
            self._add(str(values.dtype), {"values": values}, values.tolist() if is_counted else None, len(values))
            return
        for value in values:
            kind, numbers, counted = _facts(value)
            self._add(kind, numbers, None if counted is None else [counted])

    def summary(self, classes: Sequence[str] | None) -> dict[str, Any]:
        """The statistics by their names; values are counted if at most 1,000 differ."""
        missing = self._kinds.pop("missing", 0)
        about: dict[str, Any] = {"missing": missing} if missing else {}
        if len(self._kinds) > 1 or "json" in self._kinds:
            about["kinds"] = dict(self._kinds.most_common())
        about |= {name: numbers.summary() for name, numbers in self._ranges.items() if numbers.count or numbers.odd}
        if self._values:
            about["distinct"] = len(self._values)
            most = self._values.most_common(_SHOWN)
            if most[0][1] > 1:
                about["most_common"] = {str(class_name(value, classes))[:40]: count for value, count in most}
        return about

    def _add(self, kind: str, numbers: Mapping[str, Any], counted: Iterable[Any] | None, count: int = 1) -> None:
        self._kinds[kind] += count
        for name, some in numbers.items():
            self._ranges.setdefault(name, _Range()).add(some)
        if kind == "missing" or self._values is None:
            return
        self._values.update(counted or ())
        if counted is None or len(self._values) > _MOST_DISTINCT:
            self._values = None


def _facts(value: Any) -> _Facts:
    """The kind of a value, its numbers by name, and what is counted; None if it is not counted."""
    if value is None:
        return "missing", {}, None
    if is_image(value):
        return value.format or value.mode, {"width": value.width, "height": value.height}, None
    if facts := measured(value):
        return "video" if "width" in facts else "sound", facts, None
    if isinstance(value, Media):
        return _facts(value.data)
    if isinstance(value, str):
        return "text", {"characters": len(value)}, value if len(value) <= _LONGEST else None
    if isinstance(value, bytes):
        return "bytes", {"bytes": len(value)}, None
    if isinstance(value, np.ndarray) and value.dtype.kind in _NUMBERS:
        return str(value.dtype), {"items": value.size, "elements": value}, None
    if isinstance(value, (int, float, np.number)):
        return type(value).__name__, {"values": value}, value
    return "json", {}, json.dumps(value, default=str, sort_keys=True)[:_LONGEST]


class _Range:
    """The least, the greatest and the mean of numbers, and how many are not finite."""

    def __init__(self) -> None:
        self.count = self.odd = 0
        self._least, self._greatest = np.inf, -np.inf
        self._origin = self._sum = self._squares = 0.0  # sums are of differences from the first number, to stay exact

    def add(self, numbers: Any) -> None:
        """Add numbers of any shape."""
        values = np.asarray(numbers, np.float64).ravel()
        finite = values[np.isfinite(values)]
        self.odd += values.size - finite.size
        if not finite.size:
            return
        if not self.count:
            self._origin = float(finite[0])
        self.count += finite.size
        self._least = min(self._least, float(finite.min()))
        self._greatest = max(self._greatest, float(finite.max()))
        self._sum += float((finite - self._origin).sum())
        self._squares += float(((finite - self._origin) ** 2).sum())

    def summary(self) -> Mapping[str, Any]:
        """The statistics by their names."""
        odd = {"not_finite": self.odd} if self.odd else {}
        if not self.count:
            return odd
        shift = self._sum / self.count
        variance = max(0.0, self._squares / self.count - shift**2)
        limits = {"min": self._least, "mean": self._origin + shift, "max": self._greatest}
        return {**limits, "std": variance**0.5, **odd}
