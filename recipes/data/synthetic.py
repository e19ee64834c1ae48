"""Synthetic samples, so that each recipe runs without a network: flowers with captions, stories, chats, chats about
flowers, and rows.

Each function returns the same for the same arguments.
"""

import cmath
import colorsys
import math
from collections.abc import Iterable
from io import BytesIO
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from PIL import Image, ImageDraw, ImageFilter


class _Kind(NamedTuple):
    """How a kind of flower looks; hue, saturation and value from 0 to 1, lengths in radii."""

    petals: tuple[int, int]
    rings: tuple[float, ...]  # how far the petals of each ring reach
    width: float
    hues: tuple[float, float]
    saturation: float
    heart: float  # radius of the disc in the middle
    heart_hue: float = 0.0
    spread: float = 2 * math.pi  # of the petals, as an angle


FLOWERS = {
    "daisy": _Kind((12, 19), (1.0,), 0.14, (0.0, 1.0), 0.1, 0.28, 0.14),
    "dandelion": _Kind((24, 40), (1.0, 0.75, 0.5), 0.05, (0.13, 0.17), 0.95, 0.0),
    "roses": _Kind((4, 6), (1.0, 0.8, 0.6, 0.4, 0.2), 0.5, (0.88, 1.02), 0.7, 0.08, 0.95),
    "sunflowers": _Kind((15, 23), (1.0, 0.9), 0.11, (0.1, 0.15), 0.9, 0.5, 0.07),
    "tulips": _Kind((3, 3), (1.2,), 0.45, (0.75, 1.15), 0.8, 0.0, spread=2.0),
}


def write_flowers(folder: Path, count: int) -> None:
    """Write `count` drawings as JPEG files into class folders."""
    for number in range(count):
        (sample,) = captioned_flower(number)
        path = folder / sample["caption"].split()[-1] / f"{number:05d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(sample["image"])


def draw_flower(kind: str, seed: int) -> Image.Image:
    """Draw a flower of a kind, an RGB image of 96 x 96 pixels."""
    rng = Random(f"{kind} {seed}")
    look = FLOWERS[kind]
    side = 192  # reduced by two in the end: that smooths the edges
    image = Image.new("RGB", (side, side), _color(rng.random(), rng.uniform(0.1, 0.7), rng.uniform(0.1, 0.9)))
    draw = ImageDraw.Draw(image)
    center = side * complex(rng.uniform(0.4, 0.6), rng.uniform(0.34, 0.55))
    radius = side * rng.uniform(0.22, 0.36)
    hue = rng.uniform(*look.hues)
    start = rng.uniform(0, 6)
    draw.line([_xy(center), _xy(center + 1j * side)], _color(0.3, 0.8, rng.uniform(0.25, 0.6)), round(0.1 * radius))
    for ring, reach in enumerate(look.rings):
        count = rng.randint(*look.petals)
        for index in range(count):
            angle = start + ring + look.spread * index / count + rng.gauss(0, 0.04)
            fill = _color(hue, look.saturation, rng.uniform(0.75, 1.0) - 0.08 * ring)
            draw.polygon(_petal(center, radius * reach, radius * look.width, angle), fill, "black")
    heart = complex(radius, radius) * look.heart
    draw.ellipse((*_xy(center - heart), *_xy(center + heart)), _color(look.heart_hue, 0.8, rng.uniform(0.4, 0.9)))
    return image.filter(ImageFilter.GaussianBlur(rng.uniform(0.2, 1.6))).reduce(2)


def _petal(center: complex, reach: float, width: float, angle: float) -> list[tuple[float, float]]:
    """The outline of an ellipse from the center along `angle`."""
    steps = [2 * math.pi * step / 16 for step in range(16)]
    points = [complex(reach * (1 - math.cos(step)) / 2, width * math.sin(step)) for step in steps]
    return [_xy(center + point * cmath.exp(1j * angle)) for point in points]


def _xy(point: complex) -> tuple[float, float]:
    return point.real, point.imag


def _color(hue: float, saturation: float, value: float) -> tuple[int, int, int]:
    red, green, blue = colorsys.hsv_to_rgb(hue % 1, saturation, value)
    return round(255 * red), round(255 * green), round(255 * blue)


def captioned_flower(number: int) -> list[dict[str, Any]]:
    """A sample: a JPEG of a drawn flower, and its caption."""
    kind = [*FLOWERS][number % len(FLOWERS)]
    out = BytesIO()
    draw_flower(kind, number).save(out, format="JPEG", quality=85)
    return [{"image": out.getvalue(), "caption": f"a photo of {kind}"}]


_PHRASES = [
    line.split("|")
    for line in (
        "The miller|The old fox|A young queen|The ferryman|Her brother|The clockmaker",
        "found|carried|sold|hid|painted|lost|repaired",
        "a silver key|three apples|the broken lamp|a letter|the blue door",
        "by the river.|under the bridge.|in the tower.|behind the mill.|at the market.",
    )
]


def story(number: int) -> list[dict[str, str]]:
    """A sample: a story of two to seven sentences."""
    rng = Random(number)
    return [{"text": " ".join(rng.choice(phrases) for _ in range(rng.randint(2, 7)) for phrases in _PHRASES)}]


def chat(number: int) -> list[dict[str, Any]]:
    """A sample: a conversation of one to five sums."""
    rng = Random(number)
    terms = [(rng.randrange(10), rng.randrange(10)) for _ in range(rng.randint(1, 5))]
    return [{"messages": _messages((f"{a} + {b}?", str(a + b)) for a, b in terms)}]


def flower_chat(number: int) -> list[dict[str, Any]]:
    """A sample: a conversation about one to three drawn flowers, and their JPEG files."""
    rng = Random(number)
    flowers = [captioned_flower(rng.randrange(10_000))[0] for _ in range(rng.randint(1, 3))]
    answers = ((f"photo {place}?", flower["caption"]) for place, flower in enumerate(flowers, 1))
    return [{"messages": _messages(answers), "images": [flower["image"] for flower in flowers]}]


def _messages(answers: Iterable[tuple[str, str]]) -> list[dict[str, str]]:
    """A conversation of questions and answers."""
    said = [said for both in answers for said in zip(("user", "assistant"), both, strict=True)]
    return [{"role": role, "content": content} for role, content in said]


def table_row(number: int) -> list[dict[str, float]]:
    """A sample: a row in which `y` depends on `a`, `b` and `c`, and hardly on `d`."""
    rng = Random(number)
    a, b, c, d = (rng.gauss(0, 1) for _ in range(4))
    return [{"a": a, "b": b, "c": c, "d": d, "y": 2 * math.sin(a) + b * c + 0.1 * d}]
