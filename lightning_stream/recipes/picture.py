"""One picture of held-out samples with their labels and what the model says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont, ImageOps

_TILE, _CAPTION, _GAP, _TITLE = 168, 40, 12, 64
_INK, _PALE, _RIGHT, _WRONG = (34, 34, 40), (110, 110, 120), (24, 128, 70), (196, 44, 44)


@dataclass(frozen=True)
class Prediction:
    """A sample and what the model says.

    Attributes:
        image: The picture as it was read.
        label: Its class.
        predicted: The class that the model finds likeliest.
        confidence: The probability it gives that class.
    """

    image: Image.Image
    label: str
    predicted: str
    confidence: float


def draw_predictions(predictions: Sequence[Prediction], title: str, subtitle: str, columns: int = 8) -> Image.Image:
    """Lay samples out in rows; right predictions in green, wrong ones in red with the label."""
    columns = max(4, min(columns, len(predictions)))
    rows = -(-len(predictions) // columns)
    width = columns * (_TILE + _GAP) + _GAP
    sheet = Image.new("RGB", (width, _TITLE + rows * (_TILE + _CAPTION + _GAP) + _GAP), (250, 249, 246))
    draw = ImageDraw.Draw(sheet)
    draw.text((_GAP, 10), title, fill=_INK, font=_font(22))
    draw.text((_GAP, 38), subtitle, fill=_PALE, font=_font(14))
    for place, prediction in enumerate(predictions):
        left = _GAP + place % columns * (_TILE + _GAP)
        top = _TITLE + place // columns * (_TILE + _CAPTION + _GAP)
        right = prediction.predicted == prediction.label
        sheet.paste(ImageOps.fit(prediction.image.convert("RGB"), (_TILE, _TILE)), (left, top))
        tint = _RIGHT if right else _WRONG
        draw.rectangle((left, top + _TILE, left + _TILE - 1, top + _TILE + 2), fill=tint)
        said = f"{prediction.predicted} {prediction.confidence:.0%}"
        draw.text((left, top + _TILE + 6), said, fill=tint, font=_font(15))
        truth = "right" if right else f"is: {prediction.label}"
        draw.text((left, top + _TILE + 24), truth, fill=_PALE, font=_font(12))
    return sheet


def draw_captioned(pictures: Sequence[Image.Image], captions: Sequence[str], title: str) -> Image.Image:
    """Lay pictures out in rows, one row for each caption, as many in each."""
    columns = len(pictures) // len(captions)
    step = _TILE + _GAP
    high = _TILE + _CAPTION
    sheet = Image.new("RGB", (max(3, columns) * step + _GAP, _TITLE + len(captions) * high + _GAP), (250, 249, 246))
    draw = ImageDraw.Draw(sheet)
    draw.text((_GAP, 16), title, fill=_INK, font=_font(22))
    for row, caption in enumerate(captions):
        top = _TITLE + row * high
        for column, picture in enumerate(pictures[row * columns : (row + 1) * columns]):
            sheet.paste(picture.resize((_TILE, _TILE), Image.Resampling.BICUBIC), (_GAP + column * step, top))
        draw.text((_GAP, top + _TILE + 8), caption, fill=_PALE, font=_font(15))
    return sheet


def save_picture(sheet: Image.Image, path: Path) -> None:
    """Write it as PNG."""
    path.parent.mkdir(parents=True, exist_ok=True)
    sheet.save(path, format="PNG", optimize=True)


def _font(size: int) -> ImageFont.ImageFont | ImageFont.FreeTypeFont:
    return ImageFont.load_default(size)
