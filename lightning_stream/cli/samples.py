"""The samples that commands read: how their values are printed, summarised, and written as a page of HTML."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lightning_stream.cli.output import Facts, as_text
from lightning_stream.formats.encodings.media import Media
from lightning_stream.media.facts import media_facts

_SHOWN_NUMBERS = 16
_SHOWN_CHARACTERS = 90
_MOST_DISTINCT = 1000
_MOST_COMMON = 8
_LONGEST = 100


def is_image(value: Any) -> bool:
    """Whether a value is an image of Pillow."""
    return hasattr(value, "getbands")


def plain(value: Any) -> Any:
    """A value as JSON; for one that would fill the screen its kind and size, e.g. ``JPEG 320x263``."""
    if isinstance(value, (bytes, bytearray, Media)):
        return ", ".join([*_media_texts(media_facts(value)), f"{len(value):,} bytes"])
    if is_image(value):
        return f"{value.format or value.mode} {value.width}x{value.height}"
    if isinstance(value, (np.ndarray, np.generic)):
        return value.tolist() if value.size <= _SHOWN_NUMBERS else f"{value.dtype}{list(value.shape)}"
    if isinstance(value, list) and any(map(is_image, value)):
        return [plain(part) for part in value]
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return value if len(text) <= _SHOWN_CHARACTERS else f"{text[: _SHOWN_CHARACTERS - 3]}..."


def plain_sample(sample: Mapping[str, Any]) -> Facts:
    """The values of a sample as JSON."""
    return {name: plain(value) for name, value in sample.items()}


def _media_texts(facts: Mapping[str, float]) -> Iterator[str]:
    """The length and kind of a sound or video: ``12.3 s``, ``16 kHz``, ``2 channels``."""
    if not facts:
        return
    yield f"{facts['seconds']:.1f} s"
    if "width" in facts:
        yield f"{facts['width']}x{facts['height']}"
    else:
        yield f"{facts['sample_rate'] / 1000:g} kHz"
        yield f"{facts['channels']} channel{'s' * (facts['channels'] != 1)}"


def write_page(file: str, title: str, subtitle: str, samples: Mapping[int, Mapping[str, Any]]) -> None:
    """Write samples by their ids as a page; a former one is replaced as a whole."""
    from lightning_stream.pages import write_sample_page

    write_sample_page(Path(file), title, subtitle, samples, lambda value: as_text("", plain(value)))


def class_name(value: Any, names: Sequence[str] | None) -> Any:
    """The name of a class in place of its number; any other value as it is."""
    is_number = isinstance(value, (int, np.integer))
    return names[int(value)] if names and is_number and 0 <= value < len(names) else value


def with_class_names(sample: Mapping[str, Any], classes: Mapping[str, Sequence[str]]) -> Facts:
    """A sample with the names of its classes in place of their numbers."""
    return {name: class_name(value, classes.get(name)) for name, value in sample.items()}


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

    def summary(self, classes: Sequence[str] | None) -> Facts:
        """The statistics by their names; values are counted if at most 1,000 differ."""
        facts: Facts = {"kinds": dict(self._kinds.most_common())}
        for name, (least, greatest, total, num_finite, num_odd) in self._ranges.items():
            facts[name] = {"min": least, "mean": total / max(1, num_finite), "max": greatest}
            facts[name] |= {"not_finite": num_odd} if num_odd else {}
        if 0 < len(self._values) <= _MOST_DISTINCT:
            facts["distinct"] = len(self._values)
            most = [item for item in self._values.most_common(_MOST_COMMON) if item[1] > 1]
            named = {str(class_name(value, classes))[:40]: count for value, count in most}
            facts |= {"most_common": named} if named else {}
        return facts


def _facts(value: Any) -> tuple[str, Facts, Any]:
    """The kind of a value, its numbers by name, and what is counted; None if it is not counted."""
    if value is None:
        return "missing", {}, None
    if is_image(value):
        return value.format or value.mode, {"width": value.width, "height": value.height}, None
    if facts := media_facts(value):
        return "video" if "width" in facts else "sound", facts, None
    if isinstance(value, str):
        return "text", {"characters": len(value)}, _counted(value)
    if isinstance(value, (bytes, Media)):
        return "bytes", {"bytes": len(value)}, None
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        return str(value.dtype), {"items": value.size, "elements": value}, None
    if isinstance(value, (int, float, np.number)):
        is_whole = isinstance(value, (int, np.integer))
        return type(value).__name__, {"values": value}, int(value) if is_whole else None
    return "json", {}, _counted(json.dumps(value, default=str, sort_keys=True))


def _counted(text: str) -> str:
    """What stands for a text where texts are counted: long ones may differ at their ends."""
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]} {hash(text)}"
