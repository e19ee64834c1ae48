"""Synthetic flowers: five classes to learn where there are no photos and no network; several classes share colors."""

import cmath
import colorsys
import math
from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from random import Random

import numpy as np
from PIL import Image, ImageDraw, ImageFilter

Color = tuple[int, ...]
Range = tuple[float, float]
SIZE = 96  # pixels
_BACKGROUNDS = (((0.2, 0.38), 0.6), ((0.53, 0.62), 0.95), ((0.03, 0.11), 0.5), ((0.0, 1.0), 0.8))


def write_flowers(folder: Path, count: int) -> None:
    """Write `count` drawings as JPEG files into class folders, the same files each time."""
    for number, kind in zip(range(count), cycle(FLOWERS), strict=False):
        (folder / kind).mkdir(parents=True, exist_ok=True)
        draw_flower(kind, number).save(folder / kind / f"{number:05d}.jpg", quality=85)


def draw_flower(kind: str, seed: int) -> Image.Image:
    """Draw one to three flowers of a kind, an RGB image of `SIZE` pixels a side."""
    rng, noise = Random(f"{kind} {seed}"), np.random.default_rng([seed, len(kind)])
    side = 2 * SIZE  # drawn twice as large, then reduced: that smooths the edges
    hue, value = rng.choice(_BACKGROUNDS)
    dark, light = (np.array(_hsv(rng, hue, (0.1, 0.7), (low, value)), np.float32) for low in (0.1, 0.4))
    clouds = Image.fromarray(noise.random((rng.randint(3, 11),) * 2, np.float32))
    mix = np.asarray(clouds.resize((side, side), Image.Resampling.BICUBIC))[..., None]
    image = Image.fromarray(np.clip(dark + mix * (light - dark), 0, 255).astype(np.uint8))
    count = rng.choice([1, 1, 1, 2, 3])
    for number in range(count):
        center = side * complex((number + 0.5) / count + rng.gauss(0, 0.05), rng.uniform(0.34, 0.55))
        pen = _Pen(ImageDraw.Draw(image), rng, center, side * rng.uniform(0.26, 0.42) / count**0.45)
        pen.stem()
        FLOWERS[kind](pen)
    image = image.filter(ImageFilter.GaussianBlur(rng.uniform(0.2, 1.6))).reduce(2)
    pixels = np.asarray(image, np.float32) * rng.uniform(0.7, 1.15) + rng.uniform(-15, 25)
    pixels = pixels * np.exp(noise.normal(0, 0.07, 3)) + noise.normal(0, rng.uniform(1, 9), (SIZE, SIZE, 1))
    return Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8))


class _Pen:
    """Draws around a flower's center, in units of its radius; a point is a complex number, y down."""

    def __init__(self, draw: ImageDraw.ImageDraw, rng: Random, center: complex, radius: float) -> None:
        self.draw, self.rng, self.center, self.radius = draw, rng, center, radius
        self.tilt = rng.uniform(0.65, 1.0)  # seen from the side, a flower is lower than wide

    def color(self, hue: Range, saturation: Range, value: Range) -> Color:
        return _hsv(self.rng, hue, saturation, value)

    def stem(self) -> None:
        """The stem with a leaf."""
        green, lean = self.color((0.24, 0.36), (0.5, 0.9), (0.25, 0.6)), self.rng.gauss(0, 0.3)
        stem = [self._at(complex(lean * t * t, 4 * t)) for t in np.linspace(0, 1, 8).tolist()]
        self.draw.line(stem, green, max(2, round(0.1 * self.radius)), joint="curve")
        self.petal(self.rng.choice([0.94, -0.94]), (0.0, 1.5), 0.25, green, complex(lean * 0.25, 1.8))

    def petal(self, turn: float, reach: Range, width: float, fill: Color, foot: complex = 0j) -> None:
        """A petal that points along `turn` (0 is up), from the first distance of the center to the second."""
        points = []
        for t in np.linspace(0, 2 * math.pi, 20).tolist():
            across = math.copysign(abs(math.sin(t)) ** 0.8, math.sin(t)) * width
            point = complex(reach[0] + (reach[1] - reach[0]) * (1 - math.cos(t)) / 2, across)
            point *= cmath.exp(1j * (turn - math.pi / 2))
            points.append(self._at(foot + complex(point.real, point.imag * self.tilt)))
        self.draw.polygon(points, fill, _shade(fill, 0.7))

    def ring(self, count: int, reach: Range, width: float, fill: Color, loose: float = 0.06) -> None:
        """Petals around the center, none quite like the next."""
        start = self.rng.uniform(0, 6.28)
        for index in range(count):
            turn, length = 2 * math.pi * (index + self.rng.gauss(0, loose)) / count, self.rng.uniform(0.85, 1.05)
            shade = _shade(fill, self.rng.uniform(0.85, 1.08))
            self.petal(start + turn, (reach[0], reach[1] * length), width, shade)

    def disc(self, radius: float, fill: Color) -> None:
        """A filled ellipse around the center."""
        corner = complex(radius, radius * self.tilt)
        self.draw.ellipse((*self._at(-corner), *self._at(corner)), fill)

    def _at(self, point: complex) -> tuple[float, float]:
        place = self.center + self.radius * point
        return place.real, place.imag


def _daisy(pen: _Pen) -> None:
    count = pen.rng.randint(12, 19)
    pen.ring(count, (0.15, 1.0), 2.2 / count, pen.color((0.0, 1.0), (0.0, 0.15), (0.88, 1.0)))
    pen.disc(pen.rng.uniform(0.22, 0.32), pen.color((0.11, 0.15), (0.8, 1.0), (0.8, 1.0)))


def _dandelion(pen: _Pen) -> None:
    is_ball = pen.rng.random() < 0.35  # of seeds
    fill = pen.color(*(((0.1, 0.6), (0.0, 0.1)) if is_ball else ((0.13, 0.16), (0.85, 1.0))), (0.8, 1.0))
    for reach in (1.0, 0.8, 0.6, 0.4):
        pen.ring(int(16 + 26 * reach), (0.1, reach), 0.02 if is_ball else 0.045, fill, 0.35)
    if is_ball:
        pen.disc(0.13, pen.color((0.06, 0.2), (0.4, 0.6), (0.3, 0.5)))


def _rose(pen: _Pen) -> None:
    fill = pen.color((0.9, 1.02), (0.1, 0.95), (0.65, 1.0))
    for ring, reach in enumerate(np.linspace(1.0, 0.25, 6).tolist()):
        pen.ring(max(3, 6 - ring), (0.0, reach), 0.52 * reach, _shade(fill, 1.05 - 0.09 * ring), 0.1)
    pen.disc(0.08, _shade(fill, 0.45))


def _sunflower(pen: _Pen) -> None:
    yellow, count = pen.color((0.1, 0.15), (0.8, 1.0), (0.85, 1.0)), pen.rng.randint(15, 23)
    for reach, shade in ((1.0, 0.85), (0.92, 1.0)):
        pen.ring(count, (0.3, reach), 2.0 / count, _shade(yellow, shade))
    brown = pen.color((0.04, 0.1), (0.5, 0.9), (0.15, 0.4))
    for radius, shade in ((pen.rng.uniform(0.45, 0.58), 1.0), (0.3, 1.5), (0.2, 0.7)):
        pen.disc(radius, _shade(brown, shade))


def _tulip(pen: _Pen) -> None:
    hue, pen.tilt = pen.rng.choice([0.0, 0.05, 0.14, 0.78, 0.92]), 1.0
    fill = pen.color((hue - 0.02, hue + 0.02), (0.5, 1.0), (0.7, 1.0))
    for turn, shade in ((-0.3, 0.75), (0.3, 0.75), (-0.16, 0.92), (0.16, 0.92), (0.0, 1.05)):
        pen.petal(turn, (0.0, 1.7), 0.42, _shade(fill, shade), 0.85j)


FLOWERS: dict[str, Callable[[_Pen], None]] = {
    "daisy": _daisy, "dandelion": _dandelion, "roses": _rose, "sunflowers": _sunflower, "tulips": _tulip
}  # fmt: skip


def _hsv(rng: Random, *ranges: Range) -> Color:
    """A random color, by its ranges of hue, saturation and value in [0, 1]."""
    return tuple(int(255 * one) for one in colorsys.hsv_to_rgb(*(rng.uniform(low, high) for low, high in ranges)))


def _shade(color: Color, factor: float) -> Color:
    return tuple(min(255, int(channel * factor)) for channel in color)
