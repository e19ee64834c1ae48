"""``preview``: samples as a page of HTML, or as a picture with a grid of images."""

from __future__ import annotations

import argparse
import base64
import html
import io
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lightning_stream.cli.arguments import add_source, one_dataset_at
from lightning_stream.cli.output import ExitCode, Output, as_text
from lightning_stream.cli.samples import add_ids, chosen_ids, classes_of, is_image, plain, reader_of, with_class_names
from lightning_stream.formats.encodings.images import pillow, rgb
from lightning_stream.formats.encodings.jpeg import FORMATS
from lightning_stream.formats.encodings.media import Media
from lightning_stream.pages import page as html_page
from lightning_stream.shared_files import Modes, make_folder, publish_bytes

HELP = "write samples as a page of HTML, or images as one picture"
EXAMPLES = """examples:
  lightning-stream preview s3://bucket/train
  lightning-stream preview s3://bucket/train --count 100 --out flowers.png
  lightning-stream preview shards/val --ids 17,1337 --out two.html
"""
_IMAGE_STARTS = (b"\xff\xd8", b"\x89PNG\r\n\x1a\n", b"GIF8", b"RIFF")
_SOUND = {b"ID3": "mpeg", b"\xff\xfb": "mpeg", b"fLaC": "flac", b"OggS": "ogg", b"RIFF": "wav"}
_MOST_SOUND_BYTES = 4 << 20
_TEXT_CHARACTERS = 600
_MODES = Modes(0o644, 0o755)  # a preview is for others to look at
_THUMB, _PICTURE_THUMB, _LABEL, _GAP = 320, 160, 28, 8  # pixels


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``preview``."""
    add_source(parser)
    add_ids(parser, 48)
    parser.add_argument("--out", default="preview.html", metavar="FILE", help=".html or .png (default: preview.html)")


def run(options: argparse.Namespace, out: Output) -> int:
    """Write the samples of a dataset into one file."""
    path = preview_path(options.out, "--out")
    dataset = one_dataset_at(options.remote, options, "preview shows one dataset")
    with reader_of(dataset, options.store_options) as reader:
        num_samples = reader.snapshot.num_samples
        ids = chosen_ids(options.ids, options.count, num_samples)
        classes = classes_of(dataset)
        samples = {number: with_class_names(reader.sample(number), classes) for number in ids}
        url, columns = dataset.store.url, [f"{name}: {kind}" for name, kind in dataset.index.columns.items()]
        about = f"{len(ids):,} of {num_samples:,} samples · columns: {as_text('', columns)}"
        write_preview(path, url, about, samples)
    out.data = {"url": url, "path": str(path), "ids": ids}
    out.line(f"{len(ids):,} samples of {url} in {path}")
    return ExitCode.OK


def preview_path(text: str, flag: str) -> Path:
    """The file of a preview; ValueError unless its name ends with .html or .png."""
    path = Path(text)
    if path.suffix not in (".html", ".png"):
        raise ValueError(f"{flag} takes a file that ends with .html or .png; found {text}")
    return path


def write_preview(path: Path, title: str, about: str, samples: Mapping[int, Mapping[str, Any]]) -> None:
    """Write samples by their ids as a page, or their images as a picture; ValueError for a picture without images."""
    content = _picture(samples) if path.suffix == ".png" else page(title, about, samples).encode()
    make_folder(path.absolute().parent, _MODES)
    publish_bytes(content, path, _MODES, durable=False)


def page(title: str, about: str, samples: Mapping[int, Mapping[str, Any]]) -> str:
    """A page of HTML that needs no other file, with one card for each sample."""
    cards = "\n".join(_card(number, sample) for number, sample in samples.items())
    width = 220 if "<img" in cards else 420
    return html_page(title, about, f'<div class="cards" style="--card: {width}px">\n{cards}\n</div>')


def _card(number: int, sample: Mapping[str, Any]) -> str:
    shown, rows = [], []
    for name, value in sample.items():
        images, problem = _thumbnails(value, _THUMB)
        label = html.escape(name)
        shown += [f'<img loading="lazy" alt="{label} of sample {number}" src="{_embedded(each)}">' for each in images]
        if sound := _sound(value):
            shown.append(f'<audio controls preload="none" src="{sound}" aria-label="{label}"></audio>')
        rows.append(f"<dt>{label}</dt><dd>{html.escape(_text(value) + problem)}</dd>")
    values = f"<dl>{''.join(rows)}</dl>" if rows else ""
    return f"<article><h2>sample {number:,}</h2>{''.join(shown)}{values}</article>"


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value if len(value) <= _TEXT_CHARACTERS else f"{value[:_TEXT_CHARACTERS]}… ({len(value):,} characters)"
    return as_text("", plain(value))


def images_in(value: Any) -> Iterator[Any]:
    """The images of Pillow that a value is or holds: an image, the bytes of one, pixels, or a list of these."""
    if is_image(value):
        yield value
    elif isinstance(value, list):
        for one in value:
            if not isinstance(one, (str, int, float, list, dict)):
                yield from images_in(one)
    elif isinstance(value, bytes) and value.startswith(_IMAGE_STARTS) and value[8:12] != b"WAVE":
        try:
            yield pillow().open(io.BytesIO(value), formats=FORMATS)
        except OSError:  # other bytes that begin so
            return
    elif isinstance(value, np.ndarray) and value.dtype == np.uint8 and value.ndim in (2, 3):
        pixels = np.moveaxis(value, 0, -1) if value.ndim == 3 and value.shape[0] in (1, 3) else value
        if min(pixels.shape[:2]) >= 8 and (pixels.ndim == 2 or pixels.shape[2] in (1, 3)):
            yield pillow().fromarray(np.ascontiguousarray(pixels.squeeze(-1) if pixels.shape[2:] == (1,) else pixels))


def _thumbnails(value: Any, size: int) -> tuple[list[Any], str]:
    """Small copies of the images that a value is or holds; and why there are none, if they cannot be decoded."""
    try:
        return [_thumbnail(image, size) for image in images_in(value)], ""
    except Exception as error:  # noqa: BLE001 - Pillow raises anything for a damaged file
        return [], f" (cannot be decoded: {' '.join(str(error).split())})"


def _thumbnail(image: Any, size: int) -> Any:
    image = rgb(image)
    image.thumbnail((size, size))
    return image


def _embedded(image: Any) -> str:
    data = io.BytesIO()
    image.save(data, "JPEG", quality=85)
    return f"data:image/jpeg;base64,{base64.b64encode(data.getvalue()).decode()}"


def _sound(value: Any) -> str | None:
    """Sound of a kind that browsers play, as the source of an element; None for anything else."""
    value = value.data if isinstance(value, Media) else value
    if not isinstance(value, bytes) or len(value) > _MOST_SOUND_BYTES:
        return None
    kind = next((kind for start, kind in _SOUND.items() if value.startswith(start)), None)
    if kind is None or (kind == "wav" and value[8:12] != b"WAVE"):
        return None
    return f"data:audio/{kind};base64,{base64.b64encode(value).decode()}"


def _picture(samples: Mapping[int, Mapping[str, Any]]) -> bytes:
    """All images in a grid, each above its sample's id and short values, as PNG."""
    cells: list[tuple[Any, str]] = []
    size = (_PICTURE_THUMB, _PICTURE_THUMB)
    for number, sample in samples.items():
        found = [_thumbnails(value, _PICTURE_THUMB) for value in sample.values()]
        labels = [as_text("", plain(value)) for value in sample.values() if isinstance(value, (int, str, np.integer))]
        cells += [(image, f"{number} · {' · '.join(labels)}") for images, _ in found for image in images]
        cells += [(pillow().new("RGB", size, "#ddd"), f"{number}{problem}") for _, problem in found if problem]
    if not cells:
        names = list(dict.fromkeys(name for sample in samples.values() for name in sample))
        raise ValueError(f"a .png shows images; these samples have none, but {as_text('', names)}.")
    data = io.BytesIO()
    _grid(cells).save(data, "PNG")
    return data.getvalue()


def _grid(cells: Sequence[tuple[Any, str]]) -> Any:
    from PIL import ImageDraw

    per_row = min(len(cells), max(1, round((len(cells) * 1.5) ** 0.5)))
    width, height = _PICTURE_THUMB + _GAP, _PICTURE_THUMB + _LABEL
    rows = -(-len(cells) // per_row)
    sheet = pillow().new("RGB", (per_row * width + _GAP, rows * height + _GAP), "white")
    draw = ImageDraw.Draw(sheet)
    for k, (image, label) in enumerate(cells):
        x, y = _GAP + k % per_row * width, _GAP + k // per_row * height
        sheet.paste(image, (x + (_PICTURE_THUMB - image.width) // 2, y + (_PICTURE_THUMB - image.height) // 2))
        while label and draw.textlength(label) > _PICTURE_THUMB:
            label = label[:-1]
        draw.text((x, y + _PICTURE_THUMB + 4), label, fill="#444")
    return sheet
