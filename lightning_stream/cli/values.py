"""The samples that commands read: through which reader, and how their values are printed."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np

from lightning_stream.cli.arguments import FoundDataset, Options, reader_over
from lightning_stream.errors import StoreError
from lightning_stream.formats.encodings.media import Media, measured
from lightning_stream.reading.reader import SampleReader
from lightning_stream.shared_files import scratch_folder

_SHOWN_NUMBERS, _SHOWN_CHARACTERS = 16, 90


@contextmanager
def reader_of(dataset: FoundDataset, options: Options) -> Iterator[SampleReader]:
    """A reader of one dataset; what it downloads is deleted at the end."""
    with scratch_folder() as folder:
        reader = reader_over([dataset.stream(folder, options)])
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


def class_name(value: Any, names: Sequence[str] | None) -> Any:
    """The name of a class in place of its number; any other value as it is."""
    is_number = isinstance(value, (int, np.integer))
    return names[int(value)] if names and is_number and 0 <= value < len(names) else value


def is_image(value: Any) -> bool:
    """Whether a value is an image of Pillow."""
    return hasattr(value, "getbands")


def plain(value: Any) -> Any:
    """A value as JSON; for one that would fill the screen its kind and size, e.g. ``JPEG 320x263``."""
    if isinstance(value, (bytes, bytearray, Media)):
        return ", ".join([*_media_texts(measured(value)), f"{len(value):,} bytes"])
    if is_image(value):
        return f"{value.format or value.mode} {value.width}x{value.height}"
    if hasattr(value, "shape"):
        is_small = isinstance(value, (np.ndarray, np.generic)) and value.size <= _SHOWN_NUMBERS
        return value.tolist() if is_small else f"{value.dtype}{list(value.shape)}"
    if isinstance(value, list) and any(map(is_image, value)):
        return [plain(part) for part in value]
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
