"""Synthetic flowers: five classes to learn where there are no photos and no network. Whatever shows them must say so.

Shape, colour, number, size, pose, background, light and noise vary; several classes share colours.
"""

from __future__ import annotations

import colorsys
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFilter

Rng = np.random.Generator
Colour = tuple[int, int, int]
SIZE = 96  # pixels
_BACKGROUNDS = (((0.2, 0.38), 0.6), ((0.53, 0.62), 0.95), ((0.03, 0.11), 0.5), ((0.0, 1.0), 0.8))


def write_flowers(folder: Path, count: int) -> None:
    """Write `count` drawings as JPEG files into class folders, the same files each time."""
    for number in range(count):
        kind = list(FLOWERS)[number % len(FLOWERS)]
        path = folder / kind / f"{number:05d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        draw_flower(kind, number).save(path, quality=85)


def draw_flower(kind: str, seed: int) -> Image.Image:
    """Draw one to three flowers of a kind, an RGB image of `SIZE` pixels a side.

    Example::

        draw_flower("daisy", seed=7).save("daisy.png")
    """
    rng = np.random.default_rng([seed, len(kind)])
    side = 2 * SIZE  # drawn twice as large, then reduced: that smooths the edges
    image = _background(rng, side)
    count = int(rng.choice([1, 2, 3], p=[0.6, 0.25, 0.15]))
    for place in range(count):
        radius = side * float(rng.uniform(0.26, 0.42)) / count**0.45
        x = side * ((place + 0.5) / count + float(rng.normal(0, 0.05)))
        _Pen(ImageDraw.Draw(image), rng, x, side * float(rng.uniform(0.34, 0.55)), radius).flower(kind)
    image = image.filter(ImageFilter.GaussianBlur(float(rng.uniform(0.2, 1.6)))).reduce(2)
    pixels = np.asarray(image, np.float32) * rng.uniform(0.7, 1.15) + rng.uniform(-15, 25)
    pixels = pixels * np.exp(rng.normal(0, 0.07, 3)) + rng.normal(0, rng.uniform(1, 9), (SIZE, SIZE, 1))
    return Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8))


class _Pen:
    """Draws around a flower's centre, in units of its radius."""

    def __init__(self, draw: ImageDraw.ImageDraw, rng: Rng, x: float, y: float, radius: float) -> None:
        self.draw, self.rng, self.x, self.y, self.radius = draw, rng, x, y, radius
        self.tilt = float(rng.uniform(0.65, 1.0))  # seen from the side, a flower is lower than wide

    def flower(self, kind: str) -> None:
        """The stem with a leaf, then the flower."""
        green = _hsv(self.rng, (0.24, 0.36), (0.5, 0.9), (0.25, 0.6))
        lean = float(self.rng.normal(0, 0.3))
        stem = [(lean * t * t, 4 * t) for t in np.linspace(0, 1, 8)]
        self.draw.line([self._at(x, y) for x, y in stem], green, max(2, round(0.1 * self.radius)), joint="curve")
        self.petal(math.pi * float(self.rng.choice([0.3, -0.3])), (0.0, 1.5), 0.25, green, (lean * 0.25, 1.8))
        FLOWERS[kind](self)

    def petal(
        self, turn: float, reach: tuple[float, float], width: float, fill: Colour, foot: tuple[float, float] = (0, 0)
    ) -> None:
        """A petal that points along `turn` (0 is up), from the first distance of the centre to the second."""
        t = np.linspace(0, math.pi, 10)
        along = reach[0] + (reach[1] - reach[0]) * (1 - np.cos(t)) / 2
        across = width * np.sin(t) ** 0.8
        along, across = np.concatenate([along, along[::-1]]), np.concatenate([across, -across[::-1]])
        x, y = across * math.cos(turn) + along * math.sin(turn), across * math.sin(turn) - along * math.cos(turn)
        points = [self._at(foot[0] + a, foot[1] + b * self.tilt) for a, b in zip(x, y, strict=True)]
        self.draw.polygon(points, fill, _shade(fill, 0.7))

    def ring(self, count: int, reach: tuple[float, float], width: float, fill: Colour, loose: float = 0.06) -> None:
        """Petals around the centre, none quite like the next."""
        start = float(self.rng.uniform(0, 6.28))
        for index in range(count):
            turn = start + 2 * math.pi * (index + float(self.rng.normal(0, loose))) / count
            length = reach[1] * float(self.rng.uniform(0.85, 1.05))
            self.petal(turn, (reach[0], length), width, _shade(fill, float(self.rng.uniform(0.85, 1.08))))

    def disc(self, radius: float, fill: Colour) -> None:
        """A filled ellipse around the centre."""
        height = radius * self.tilt
        self.draw.ellipse((*self._at(-radius, -height), *self._at(radius, height)), fill)

    def _at(self, x: float, y: float) -> tuple[float, float]:
        return self.x + self.radius * float(x), self.y + self.radius * float(y)


def _daisy(pen: _Pen) -> None:
    white = _hsv(pen.rng, (0.0, 1.0), (0.0, 0.15), (0.88, 1.0))
    count = int(pen.rng.integers(12, 20))
    pen.ring(count, (0.15, 1.0), 2.2 / count, white)
    pen.disc(float(pen.rng.uniform(0.22, 0.32)), _hsv(pen.rng, (0.11, 0.15), (0.8, 1.0), (0.8, 1.0)))


def _dandelion(pen: _Pen) -> None:
    is_ball = pen.rng.random() < 0.35  # of seeds
    hue, saturation = ((0.1, 0.6), (0.0, 0.1)) if is_ball else ((0.13, 0.16), (0.85, 1.0))
    fill = _hsv(pen.rng, hue, saturation, (0.8, 1.0))
    for reach in (1.0, 0.8, 0.6, 0.4):
        pen.ring(int(16 + 26 * reach), (0.1, reach), 0.02 if is_ball else 0.045, fill, 0.35)
    if is_ball:
        pen.disc(0.13, _hsv(pen.rng, (0.06, 0.2), (0.4, 0.6), (0.3, 0.5)))


def _rose(pen: _Pen) -> None:
    fill = _hsv(pen.rng, (0.9, 1.02), (0.1, 0.95), (0.65, 1.0))
    for ring, reach in enumerate(np.linspace(1.0, 0.25, 6)):
        pen.ring(max(3, 6 - ring), (0.0, float(reach)), 0.52 * float(reach), _shade(fill, 1.05 - 0.09 * ring), 0.1)
    pen.disc(0.08, _shade(fill, 0.45))


def _sunflower(pen: _Pen) -> None:
    yellow = _hsv(pen.rng, (0.1, 0.15), (0.8, 1.0), (0.85, 1.0))
    count = int(pen.rng.integers(15, 24))
    for reach, shade in ((1.0, 0.85), (0.92, 1.0)):
        pen.ring(count, (0.3, reach), 2.0 / count, _shade(yellow, shade))
    brown = _hsv(pen.rng, (0.04, 0.1), (0.5, 0.9), (0.15, 0.4))
    for radius, shade in ((float(pen.rng.uniform(0.45, 0.58)), 1.0), (0.3, 1.5), (0.2, 0.7)):
        pen.disc(radius, _shade(brown, shade))


def _tulip(pen: _Pen) -> None:
    hue = float(pen.rng.choice([0.0, 0.05, 0.14, 0.78, 0.92]))
    fill = _hsv(pen.rng, (hue - 0.02, hue + 0.02), (0.5, 1.0), (0.7, 1.0))
    pen.tilt = 1.0
    for turn, shade in ((-0.3, 0.75), (0.3, 0.75), (-0.16, 0.92), (0.16, 0.92), (0.0, 1.05)):
        pen.petal(turn, (0.0, 1.7), 0.42, _shade(fill, shade), (0.0, 0.85))


FLOWERS: dict[str, Callable[[_Pen], None]] = {
    "daisy": _daisy, "dandelion": _dandelion, "roses": _rose, "sunflowers": _sunflower, "tulips": _tulip
}  # fmt: skip
"""What draws each class; a label is a place in here."""


def _background(rng: Rng, side: int) -> Image.Image:
    """Two colours of a meadow, a sky, soil or a wall, in soft clouds."""
    hue, value = _BACKGROUNDS[int(rng.integers(len(_BACKGROUNDS)))]
    dark, light = (np.array(_hsv(rng, hue, (0.1, 0.7), (low, value)), np.float32) for low in (0.1, 0.4))
    cells = Image.fromarray(rng.random((int(rng.integers(3, 12)),) * 2, np.float32))
    mix = np.asarray(cells.resize((side, side), Image.Resampling.BICUBIC))[..., None]
    return Image.fromarray(np.clip(dark + mix * (light - dark), 0, 255).astype(np.uint8))


def _hsv(rng: Rng, *ranges: Sequence[float]) -> Colour:
    """A random colour, by its ranges of hue, saturation and value in [0, 1]."""
    red, green, blue = colorsys.hsv_to_rgb(*(float(rng.uniform(each[0], each[1])) for each in ranges))
    return int(255 * red), int(255 * green), int(255 * blue)


def _shade(colour: Colour, factor: float) -> Colour:
    red, green, blue = (min(255, int(channel * factor)) for channel in colour)
    return red, green, blue
