"""The samples that commands read: through which reader, how they are printed, and as a page of HTML."""

from __future__ import annotations

import base64
import html
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

from lightning_stream.cli.arguments import FoundDataset, Options, reader_over
from lightning_stream.cli.output import as_text
from lightning_stream.formats.encodings.images import pillow, rgb
from lightning_stream.formats.encodings.jpeg import FORMATS
from lightning_stream.formats.encodings.media import Media, measured
from lightning_stream.pages import page
from lightning_stream.reading.reader import SampleReader
from lightning_stream.shared_files import Modes, make_folder, publish_bytes, scratch_folder

_SHOWN_NUMBERS, _SHOWN_CHARACTERS, _CHARACTERS_ON_PAGE = 16, 90, 600
_IMAGES = (b"\xff\xd8", b"\x89PNG", b"GIF8", b"RIFF")
_SOUNDS = {b"ID3": "mpeg", b"\xff\xfb": "mpeg", b"fLaC": "flac", b"OggS": "ogg", b"RIFF": "wav"}
_MOST_SOUND_BYTES = 4 << 20
_MODES = Modes(0o644, 0o755)  # a page is for others to look at
_THUMB = (320, 320)  # pixels


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


def is_image(value: Any) -> bool:
    """Whether a value is an image of Pillow."""
    return hasattr(value, "getbands")


def plain(value: Any) -> Any:
    """A value as JSON; for one that would fill the screen its kind and size, e.g. ``JPEG 320x263``."""
    if isinstance(value, (bytes, bytearray, Media)):
        return ", ".join([*_media_texts(measured(value)), f"{len(value):,} bytes"])
    if is_image(value):
        return f"{value.format or value.mode} {value.width}x{value.height}"
    if isinstance(value, (np.ndarray, np.generic)):
        return value.tolist() if value.size <= _SHOWN_NUMBERS else f"{value.dtype}{list(value.shape)}"
    if isinstance(value, list) and any(map(is_image, value)):
        return [plain(part) for part in value]
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return value if len(text) <= _SHOWN_CHARACTERS else f"{text[: _SHOWN_CHARACTERS - 3]}..."


def plain_sample(sample: Mapping[str, Any]) -> dict[str, Any]:
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


def write_page(name: str, title: str, about: str, samples: Mapping[int, Mapping[str, Any]]) -> None:
    """Write samples by their ids as a page; a former one is replaced as a whole. ValueError unless it ends in .html."""
    path = Path(name).absolute()
    if path.suffix != ".html":
        raise ValueError(f"--page takes the name of a file that ends with .html; found {name}")
    cards = "\n".join(_card(number, sample) for number, sample in samples.items())
    width = 220 if "<img" in cards else 420
    text = page(title, about, f'<div class="cards" style="--card: {width}px">\n{cards}\n</div>')
    make_folder(path.parent, _MODES)
    publish_bytes(text.encode(), path, _MODES, durable=False)


def _card(number: int, sample: Mapping[str, Any]) -> str:
    media, rows = "", ""
    for name, value in sample.items():
        label = html.escape(name)
        text = value[:_CHARACTERS_ON_PAGE] if isinstance(value, str) else as_text("", plain(value))
        try:
            for image in _images_in(value):
                media += f'<img loading="lazy" alt="{label} of sample {number}" src="{_thumbnail(image)}">'
        except Exception as error:  # noqa: BLE001 - Pillow raises anything for a damaged file
            text += f" (cannot be decoded: {' '.join(str(error).split())})"
        if sound := _sound(value):
            media += f'<audio controls preload="none" src="{sound}" aria-label="{label}"></audio>'
        rows += f"<dt>{label}</dt><dd>{html.escape(text)}</dd>"
    return f"<article><h2>sample {number:,}</h2>{media}<dl>{rows}</dl></article>"


def _images_in(value: Any) -> Iterator[Any]:
    """The images of Pillow that a value is or holds: an image, the bytes of one, pixels, or a list of these."""
    if is_image(value):
        yield value
    elif isinstance(value, list):
        for part in value:
            yield from _images_in(part)
    elif isinstance(value, bytes) and value.startswith(_IMAGES):
        with suppress(OSError):  # of other bytes that begin so
            yield pillow().open(io.BytesIO(value), formats=FORMATS)
    elif isinstance(value, np.ndarray) and value.dtype == np.uint8 and value.shape[2:] in ((1,), (3,)):
        yield pillow().fromarray(value.squeeze())


def _thumbnail(image: Any) -> str:
    image = rgb(image)
    image.thumbnail(_THUMB)
    data = io.BytesIO()
    image.save(data, "JPEG", quality=85)
    return _embedded("image/jpeg", data.getvalue())


def _embedded(kind: str, data: bytes) -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def _sound(value: Any) -> str:
    """Sound of a kind that browsers play, as the source of an element; empty for anything else."""
    data = value.data if isinstance(value, Media) else value
    if not isinstance(data, bytes) or len(data) > _MOST_SOUND_BYTES or "sample_rate" not in measured(value):
        return ""
    return next((_embedded(f"audio/{kind}", data) for start, kind in _SOUNDS.items() if data.startswith(start)), "")


def class_name(value: Any, names: Sequence[str] | None) -> Any:
    """The name of a class in place of its number; any other value as it is."""
    is_number = isinstance(value, (int, np.integer))
    return names[int(value)] if names and is_number and 0 <= value < len(names) else value


def with_class_names(sample: Mapping[str, Any], classes: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """A sample with the names of its classes in place of their numbers."""
    return {name: class_name(value, classes.get(name)) for name, value in sample.items()}
