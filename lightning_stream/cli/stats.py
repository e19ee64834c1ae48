"""``stats``: what the columns of a dataset hold."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from lightning_stream.cli.arguments import add_source, datasets_of
from lightning_stream.cli.output import ExitCode, Output
from lightning_stream.cli.samples import class_name, classes_of, is_image, reader_of
from lightning_stream.formats.encodings.media import Media, measured

HELP = "read samples and summarise each column: range, mean, missing values, counts"
_AT_ONCE, _MOST_DISTINCT, _SHOWN = 256, 1000, 8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``stats``."""
    add_source(parser)
    parser.add_argument("-n", "--count", type=int, metavar="N", help="read the first N samples only")


def run(options: argparse.Namespace, out: Output) -> int:
    """Summarise the columns of every dataset at the path or URL."""
    if options.count is not None and options.count < 1:
        raise ValueError(f"--count is at least 1; found {options.count}")
    out.data = {"datasets": []}
    for dataset in datasets_of(options):
        with reader_of(dataset, options.store_options) as reader:
            total = reader.snapshot.num_samples
            count, columns = min(total, options.count or total), dict[str, ColumnStats]()
            for first in range(0, count, _AT_ONCE):
                ids = np.arange(first, min(count, first + _AT_ONCE))
                for name, values in reader.batch(ids).items():
                    columns.setdefault(name, ColumnStats()).add(values)
                out.progress(f"{first + len(ids):,} of {count:,} samples")
        classes = classes_of(dataset)
        found = {name: column.summary(classes.get(name)) for name, column in columns.items()}
        out.line(f"{dataset.store.url}: {count:,} of {total:,} samples")
        for name, summary in found.items():
            out.show({name: summary})
        out.data["datasets"].append({"url": dataset.store.url, "samples": count, "columns": found})
    return ExitCode.OK


class ColumnStats:
    """Running statistics of one column's values."""

    def __init__(self) -> None:
        self._ranges: dict[str, _Range] = {}
        self._values: Counter[Any] | None = Counter()  # None: there are too many different ones
        self._kinds: Counter[str] = Counter()

    def add(self, values: Any) -> None:
        """Add the values of some samples: an array with a row for each, or a list."""
        if isinstance(values, np.ndarray) and values.dtype.kind in "biuf":
            self._add_numbers(values)
            return
        for value in values:
            self._add_value(value)

    def summary(self, classes: Sequence[str] | None) -> dict[str, Any]:
        """The statistics by their names; values are counted if at most 1,000 differ."""
        about: dict[str, Any] = {}
        missing = self._kinds.pop("missing", 0)
        if missing:
            about["missing"] = missing
        if len(self._kinds) > 1 or "json" in self._kinds:
            about["kinds"] = dict(self._kinds.most_common())
        for name, limits in self._ranges.items():
            about |= {name: found} if (found := limits.summary()) else {}
        if self._values:
            named = {class_name(key, classes): n for key, n in self._values.items()}
            about["distinct"] = len(named)
            repeated = Counter(named).most_common(_SHOWN)
            if repeated[0][1] > 1:
                about["most_common"] = {str(key)[:40]: n for key, n in repeated}
        return about

    def _count(self, values: Iterable[Any]) -> None:
        if self._values is not None:
            self._values.update(values)
            if len(self._values) > _MOST_DISTINCT:
                self._values = None

    def _range(self, name: str) -> _Range:
        return self._ranges.setdefault(name, _Range())

    def _add_numbers(self, values: Any) -> None:
        if values.ndim == 1:
            self._kinds[str(values.dtype)] += len(values)
            self._range("values").add(values)
            if values.dtype.kind != "f":
                self._count(values.tolist())
            return
        self._values = None
        self._kinds[f"{values.dtype}{list(values.shape[1:])}"] += len(values)
        self._range("elements").add(values)

    def _add_value(self, value: Any) -> None:
        if value is None:
            self._kinds["missing"] += 1
        elif is_image(value):
            self._kinds[f"{value.format or value.mode}"] += 1
            self._range("width").add([value.width])
            self._range("height").add([value.height])
        elif facts := measured(value):
            self._values = None
            self._kinds["video" if "width" in facts else "sound"] += 1
            for name, number in facts.items():
                self._range(name).add([number])
        elif isinstance(value, Media):
            self._add_value(value.data)
        elif isinstance(value, (str, bytes)):
            is_text = isinstance(value, str)
            self._kinds["text" if is_text else "bytes"] += 1
            self._range("characters" if is_text else "bytes").add([len(value)])
            if is_text and len(value) <= 100:
                self._count([value])
            else:
                self._values = None
        elif isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
            self._values = None
            self._kinds[f"{value.dtype}"] += 1
            self._range("items").add([value.size])
            self._range("elements").add(value)
        elif isinstance(value, (int, float)):
            self._add_numbers(np.array([value]))
        else:
            self._kinds["json"] += 1
            self._count([json.dumps(value, default=str, sort_keys=True)[:100]])


class _Range:
    """The least, the greatest and the mean of numbers, and how many are not finite."""

    def __init__(self) -> None:
        self._least, self._greatest = np.inf, -np.inf
        self._sum, self._squares, self._count, self._odd = 0.0, 0.0, 0, 0

    def add(self, numbers: Any) -> None:
        """Add numbers of any shape."""
        given = np.asarray(numbers).ravel()
        values = given.astype(np.float64)
        if given.dtype.kind == "f":
            values = values[np.isfinite(values)]
        self._odd += given.size - values.size
        if values.size:
            self._least = min(self._least, float(values.min()))
            self._greatest = max(self._greatest, float(values.max()))
            mean, count = float(values.mean()), self._count + values.size
            # The sum of squared differences from the mean, of both parts together (Chan, Golub, LeVeque 1979).
            apart = mean - self._sum / self._count if self._count else 0.0
            self._squares += float(((values - mean) ** 2).sum()) + apart**2 * self._count * values.size / count
            self._sum, self._count = self._sum + mean * values.size, count

    def summary(self) -> Mapping[str, Any]:
        """The statistics by their names."""
        odd = {"not_finite": self._odd} if self._odd else {}
        if not self._count:
            return odd
        limits = {"min": self._least, "mean": self._sum / self._count, "max": self._greatest}
        return {**limits, "std": (self._squares / self._count) ** 0.5, **odd}
