"""Samples as one page of HTML that needs no other file: a card for each, with its images, sounds and values."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from lightning_stream.cli.output import as_text
from lightning_stream.cli.values import is_image, plain
from lightning_stream.formats.encodings.images import pillow, rgb
from lightning_stream.formats.encodings.jpeg import FORMATS
from lightning_stream.formats.encodings.media import Media
from lightning_stream.pages import page
from lightning_stream.shared_files import Modes, make_folder, publish_bytes

_IMAGE_STARTS = (b"\xff\xd8", b"\x89PNG\r\n\x1a\n", b"GIF8", b"RIFF")
_SOUND = {b"ID3": "mpeg", b"\xff\xfb": "mpeg", b"fLaC": "flac", b"OggS": "ogg", b"RIFF": "wav"}
_MOST_SOUND_BYTES = 4 << 20
_TEXT_CHARACTERS = 600
_MODES = Modes(0o644, 0o755)  # a page is for others to look at
_THUMB = (320, 320)  # pixels


def checked_path(text: str) -> Path:
    """The file of a page; ValueError unless its name ends with .html."""
    path = Path(text)
    if path.suffix != ".html":
        raise ValueError(f"--page takes the name of a file that ends with .html; found {text}")
    return path


def write_page(path: Path, title: str, about: str, samples: Mapping[int, Mapping[str, Any]]) -> None:
    """Write samples by their ids as a page; a former one is replaced as a whole."""
    cards = "\n".join(_card(number, sample) for number, sample in samples.items())
    width = 220 if "<img" in cards else 420
    text = page(title, about, f'<div class="cards" style="--card: {width}px">\n{cards}\n</div>')
    make_folder(path.absolute().parent, _MODES)
    publish_bytes(text.encode(), path, _MODES, durable=False)


def _card(number: int, sample: Mapping[str, Any]) -> str:
    media, rows = [], []
    for name, value in sample.items():
        label = html.escape(name)
        images, problem = _thumbnails(value)
        media += [f'<img loading="lazy" alt="{label} of sample {number}" src="{image}">' for image in images]
        if sound := _sound(value):
            media.append(f'<audio controls preload="none" src="{sound}" aria-label="{label}"></audio>')
        rows.append(f"<dt>{label}</dt><dd>{html.escape(_text(value) + problem)}</dd>")
    return f"<article><h2>sample {number:,}</h2>{''.join(media)}<dl>{''.join(rows)}</dl></article>"


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value if len(value) <= _TEXT_CHARACTERS else f"{value[:_TEXT_CHARACTERS]}… ({len(value):,} characters)"
    return as_text("", plain(value))


def _images_in(value: Any) -> Iterator[Any]:
    """The images of Pillow that a value is or holds: an image, the bytes of one, pixels, or a list of these."""
    if is_image(value):
        yield value
    elif isinstance(value, list):
        for part in value:
            if not isinstance(part, (str, int, float, list, dict)):
                yield from _images_in(part)
    elif isinstance(value, bytes) and value.startswith(_IMAGE_STARTS) and value[8:12] != b"WAVE":
        try:
            yield pillow().open(io.BytesIO(value), formats=FORMATS)
        except OSError:  # other bytes that begin so
            return
    elif isinstance(value, np.ndarray) and value.dtype == np.uint8 and value.ndim in (2, 3):
        has_channels_first = value.ndim == 3 and value.shape[0] in (1, 3)
        pixels = np.moveaxis(value, 0, -1) if has_channels_first else value
        if min(pixels.shape[:2]) >= 8 and pixels.shape[2:] in ((), (1,), (3,)):
            gray = pixels.squeeze(-1) if pixels.shape[2:] == (1,) else pixels
            yield pillow().fromarray(np.ascontiguousarray(gray))


def _thumbnails(value: Any) -> tuple[list[str], str]:
    """Small copies of the images that a value is or holds; and why there are none, if they cannot be decoded."""
    try:
        return [_thumbnail(image) for image in _images_in(value)], ""
    except Exception as error:  # noqa: BLE001 - Pillow raises anything for a damaged file
        return [], f" (cannot be decoded: {' '.join(str(error).split())})"


def _thumbnail(image: Any) -> str:
    image = rgb(image)
    image.thumbnail(_THUMB)
    data = io.BytesIO()
    image.save(data, "JPEG", quality=85)
    return _embedded("image/jpeg", data.getvalue())


def _embedded(kind: str, data: bytes) -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def _sound(value: Any) -> str | None:
    """Sound of a kind that browsers play, as the source of an element; None for anything else."""
    data = value.data if isinstance(value, Media) else value
    if not isinstance(data, bytes) or len(data) > _MOST_SOUND_BYTES:
        return None
    kind = next((kind for start, kind in _SOUND.items() if data.startswith(start)), None)
    if kind is None or (kind == "wav" and data[8:12] != b"WAVE"):
        return None
    return _embedded(f"audio/{kind}", data)
