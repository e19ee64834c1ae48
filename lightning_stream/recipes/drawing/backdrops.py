"""What lies behind the flowers, the same for all classes: meadow, sky, dusk, soil, wall, and lights out of focus."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageFilter

from lightning_stream.recipes.drawing.pen import Pen, colour

if TYPE_CHECKING:
    from collections.abc import Callable

    from lightning_stream.recipes.drawing.pen import Colour

Rng = np.random.Generator
Size = tuple[int, int]


def backdrop(rng: Rng, size: Size) -> Image.Image:
    """Draw a background of some kind.

    Args:
        rng: Decides everything.
        size: Width and height in pixels.
    """
    return _KINDS[int(rng.choice(len(_KINDS), p=_CHANCES))](rng, size)


def clouds(rng: Rng, size: Size, cells: int) -> NDArray[np.float32]:
    """Smooth noise in about [0, 1], float32[height, width], with features of a size / cells."""
    total = np.zeros((size[1], size[0]), dtype=np.float32)
    for octave, weight in ((1, 0.55), (2, 0.3), (4, 0.15)):
        grid = rng.random((cells * octave + 1, cells * octave + 1), dtype=np.float32)
        total += weight * np.asarray(Image.fromarray(grid).resize(size, Image.Resampling.BICUBIC))
    return total


def _between(mix: NDArray[np.float32], first: Colour, second: Colour) -> Image.Image:
    low, high = np.array(first, dtype=np.float32), np.array(second, dtype=np.float32)
    pixels = low + mix[..., None] * (high - low)
    return Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8))


def _meadow(rng: Rng, size: Size) -> Image.Image:
    hue = rng.uniform(0.2, 0.36)
    dark = colour(hue, rng.uniform(0.45, 0.9), rng.uniform(0.1, 0.3))
    light = colour(hue - 0.03, rng.uniform(0.4, 0.8), rng.uniform(0.4, 0.7))
    image = _between(clouds(rng, size, int(rng.integers(2, 7))), dark, light)
    pen = Pen.on(image)
    for _ in range(int(rng.integers(30, 90))):
        x, y = rng.uniform(-0.1, 1.1) * size[0], rng.uniform(0.2, 1.2) * size[1]
        lean, height = rng.normal(0, 0.1) * size[1], rng.uniform(0.12, 0.5) * size[1]
        blade = [(x, y), (x + 0.3 * lean, y - 0.6 * height), (x + lean, y - height)]
        tint = colour(hue + rng.normal(0, 0.025), rng.uniform(0.4, 0.85), rng.uniform(0.2, 0.7))
        pen.line(blade, tint, rng.uniform(1, 5))
    return image.filter(ImageFilter.BoxBlur(float(rng.uniform(0, 5))))


def _sky(rng: Rng, size: Size) -> Image.Image:
    hue = rng.uniform(0.53, 0.62)
    blue = colour(hue, rng.uniform(0.35, 0.85), rng.uniform(0.55, 0.95))
    pale = colour(hue, rng.uniform(0.0, 0.3), rng.uniform(0.85, 1.0))
    mix = clouds(rng, size, int(rng.integers(2, 5))) ** 2 + np.linspace(-0.2, 0.45, size[1], dtype=np.float32)[:, None]
    return _between(mix, blue, pale)


def _dusk(rng: Rng, size: Size) -> Image.Image:
    hue = rng.random()
    dark = colour(hue, rng.uniform(0.1, 0.7), rng.uniform(0.02, 0.1))
    light = colour(hue + 0.05, rng.uniform(0.1, 0.7), rng.uniform(0.15, 0.35))
    return _between(clouds(rng, size, 2), dark, light)


def _soil(rng: Rng, size: Size) -> Image.Image:
    hue = rng.uniform(0.03, 0.11)
    dark = colour(hue, rng.uniform(0.3, 0.6), rng.uniform(0.1, 0.25))
    light = colour(hue, rng.uniform(0.15, 0.45), rng.uniform(0.45, 0.75))
    return _between(clouds(rng, size, int(rng.integers(8, 24))), dark, light)


def _wall(rng: Rng, size: Size) -> Image.Image:
    hue, saturation, value = rng.random(), rng.uniform(0, 0.35), rng.uniform(0.5, 0.95)
    plain, other = colour(hue, saturation, value), colour(hue, saturation + 0.05, value - rng.uniform(0.1, 0.35))
    return _between(clouds(rng, size, 2), plain, other)


def _lights(rng: Rng, size: Size) -> Image.Image:
    image = (_meadow if rng.random() < 0.6 else _dusk)(rng, size)
    pen = Pen.on(image)
    hue = rng.random()
    for _ in range(int(rng.integers(8, 30))):
        tint = colour(hue + rng.normal(0, 0.12), rng.uniform(0.1, 0.8), rng.uniform(0.3, 0.95))
        radius = rng.uniform(0.02, 0.1) * size[0]
        pen.disc(rng.uniform(0, 1) * size[0], rng.uniform(0, 1) * size[1], radius, tint)
    return image.filter(ImageFilter.BoxBlur(float(rng.uniform(5, 14))))


_KINDS: tuple[Callable[[Rng, Size], Image.Image], ...] = (_meadow, _sky, _dusk, _soil, _wall, _lights)
_CHANCES = (0.36, 0.12, 0.12, 0.1, 0.1, 0.2)
