"""The samples that commands read: which ones, through which reader, and how their values are printed."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np

from lightning_stream.cli.arguments import FoundDataset
from lightning_stream.errors import StoreError
from lightning_stream.formats.encodings.media import Media, measured
from lightning_stream.reading.reader import SampleReader
from lightning_stream.reading.stream import CacheDefaults
from lightning_stream.reading.stream_shards import ReaderConfig
from lightning_stream.shared_files import scratch_folder

_SHOWN_NUMBERS, _SHOWN_CHARACTERS = 16, 90


def add_ids(parser: argparse.ArgumentParser, count: int) -> None:
    """Let a command take the samples that it reads."""
    parser.add_argument("-n", "--count", type=int, default=count, metavar="N", help=f"samples (default: {count})")
    parser.add_argument("--ids", metavar="IDS", help="sample ids instead, e.g. 1337 or 0:10,500")


def chosen_ids(text: str | None, count: int, num_samples: int) -> list[int]:
    """The ids in ``0:10,500``; without a text the first ``count``. ValueError for ids that the dataset has not."""
    if text is None:
        if count < 1:
            raise ValueError(f"--count is at least 1; found {count}")
        return list(range(min(count, num_samples)))
    ranges: list[range] = []
    for part in text.split(","):
        begin, colon, end = part.partition(":")
        try:
            first = int(begin or 0)
            ranges.append(range(first, int(end) if end else num_samples) if colon else range(first, first + 1))
        except ValueError as error:
            raise ValueError(f"--ids takes numbers and ranges, e.g. 0:10,500; found {text!r}") from error
    ends = [number for one in ranges if one for number in (one[0], one[-1])]
    wrong = next((number for number in ends if not 0 <= number < num_samples), None)
    if wrong is not None or not ends:
        shown = f"{wrong:,}" if wrong is not None else "none"
        raise ValueError(f"sample ids are 0 to {num_samples - 1:,} in this dataset; found {shown}")
    return [number for one in ranges for number in one]


@contextmanager
def reader_of(dataset: FoundDataset, store_options: dict[str, Any] | None) -> Iterator[SampleReader]:
    """A reader of one dataset; what it downloads is deleted at the end."""
    with scratch_folder() as folder:
        reader = SampleReader([dataset.stream(folder, store_options)], CacheDefaults(), ReaderConfig())
        reader.indexes = (dataset.index,)  # which was read to find the dataset
        try:
            yield reader
        finally:
            reader.close()


def classes_of(dataset: FoundDataset) -> dict[str, list[str]]:
    """The names of the classes by column, which `convert` writes beside the index; empty without them."""
    with suppress(StoreError, ValueError, KeyError, TypeError):
        return dict(json.loads(dataset.store.read("manifest.json"))["classes"])
    return {}


def with_class_names(sample: dict[str, Any], classes: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """A sample with the names of its classes in place of their numbers."""
    return {name: class_name(value, classes.get(name)) for name, value in sample.items()}


def class_name(value: Any, names: Sequence[str] | None) -> Any:
    """The name of a class in place of its number; any other value as it is."""
    is_number = names is not None and isinstance(value, (int, np.integer)) and 0 <= value < len(names)
    return names[int(value)] if names and is_number else value


def plain(value: Any) -> Any:
    """A value as JSON; for one that would fill the screen its kind and size, e.g. ``JPEG 320x263``."""
    if isinstance(value, (bytes, bytearray, Media)):
        return ", ".join([*_media_texts(measured(value)), f"{len(value):,} bytes"])
    if is_image(value):
        return f"{value.format or value.mode} {value.width}x{value.height}"
    if hasattr(value, "shape"):
        small = isinstance(value, (np.ndarray, np.generic)) and value.size <= _SHOWN_NUMBERS
        return value.tolist() if small else f"{value.dtype}{list(value.shape)}"
    if isinstance(value, list) and any(map(is_image, value)):
        return [plain(one) for one in value]
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return value if len(text) <= _SHOWN_CHARACTERS else f"{text[: _SHOWN_CHARACTERS - 3]}..."


def _media_texts(facts: Mapping[str, float]) -> list[str]:
    """The length and kind of a sound or video: ``12.3 s``, ``16 kHz``, ``2 channels``."""
    if not facts:
        return []
    length = f"{facts['seconds']:.1f} s"
    if "width" in facts:
        return [length, f"{facts['width']}x{facts['height']}"]
    channels = f"{facts['channels']} channel{'s' * (facts['channels'] != 1)}"
    return [length, f"{facts['sample_rate'] / 1000:g} kHz", channels]


def is_image(value: Any) -> bool:
    """Whether a value is an image of Pillow."""
    return hasattr(value, "getbands")
