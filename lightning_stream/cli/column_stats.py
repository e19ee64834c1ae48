"""Statistics of the values of one column, for ``show --stats``."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from lightning_stream.cli.samples import class_name, is_image
from lightning_stream.formats.encodings.media import Media, measured

_MOST_DISTINCT, _SHOWN, _LONGEST = 1000, 8, 100


class ColumnStats:
    """Running statistics of one column's values."""

    def __init__(self) -> None:
        # The least, the greatest and the sum of numbers, and how many are finite and are not.
        self._ranges: dict[str, tuple[float, float, float, int, int]] = {}
        self._values: Counter[Any] = Counter()
        self._kinds: Counter[str] = Counter()

    def add(self, values: Any) -> None:
        """Add the values of some samples: an array with a row for each, or a list."""
        for value in values:
            kind, numbers, counted = _facts(value)
            self._kinds[kind] += 1
            for name, some in numbers.items():
                self._add_numbers(name, np.asarray(some, np.float64))
            if counted is not None and len(self._values) <= _MOST_DISTINCT:
                self._values[counted] += 1

    def _add_numbers(self, name: str, numbers: Any) -> None:
        finite = numbers[np.isfinite(numbers)]
        least, greatest, total, num_finite, num_odd = self._ranges.get(name, (np.inf, -np.inf, 0.0, 0, 0))
        self._ranges[name] = (
            float(finite.min(initial=least)),
            float(finite.max(initial=greatest)),
            total + float(finite.sum()),
            num_finite + finite.size,
            num_odd + numbers.size - finite.size,
        )

    def summary(self, classes: Sequence[str] | None) -> dict[str, Any]:
        """The statistics by their names; values are counted if at most 1,000 differ."""
        about: dict[str, Any] = {"kinds": dict(self._kinds.most_common())}
        for name, (least, greatest, total, num_finite, num_odd) in self._ranges.items():
            about[name] = {"min": least, "mean": total / max(1, num_finite), "max": greatest}
            about[name] |= {"not_finite": num_odd} if num_odd else {}
        if 0 < len(self._values) <= _MOST_DISTINCT:
            about["distinct"] = len(self._values)
            most = [item for item in self._values.most_common(_SHOWN) if item[1] > 1]
            named = {str(class_name(value, classes))[:40]: count for value, count in most}
            about |= {"most_common": named} if named else {}
        return about


def _facts(value: Any) -> tuple[str, dict[str, Any], Any]:
    """The kind of a value, its numbers by name, and what is counted; None if it is not counted."""
    if value is None:
        return "missing", {}, None
    if is_image(value):
        return value.format or value.mode, {"width": value.width, "height": value.height}, None
    if facts := measured(value):
        return "video" if "width" in facts else "sound", facts, None
    if isinstance(value, str):
        return "text", {"characters": len(value)}, value[:_LONGEST]
    if isinstance(value, (bytes, Media)):
        return "bytes", {"bytes": len(value)}, None
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        return str(value.dtype), {"items": value.size, "elements": value}, None
    if isinstance(value, (int, float, np.number)):
        is_whole = isinstance(value, (int, np.integer))
        return type(value).__name__, {"values": value}, int(value) if is_whole else None
    return "json", {}, json.dumps(value, default=str, sort_keys=True)[:_LONGEST]
