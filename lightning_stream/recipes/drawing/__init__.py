"""Pictures of five kinds of flowers, drawn: something to learn where there are no photos and no network.

They are drawings, not photos: whatever shows them must say so. Shape, colour, number, size, pose, light, background
and noise vary, and no single one of them tells the class.
"""

from __future__ import annotations

from io import BytesIO
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageFilter

from lightning_stream.recipes.drawing.backdrops import Rng, backdrop, clouds
from lightning_stream.recipes.drawing.blooms import BLOOMS
from lightning_stream.recipes.drawing.pen import Colour, Pen, Petal, colour, shade

VERSION = 1
"""Raised whenever the same seed gives other pictures than before."""

CLASSES: tuple[str, ...] = tuple(BLOOMS)
_FINER = 2  # drawn so many times larger, then reduced: that smooths the edges


def draw_flower(kind: str, seed: int, number: int) -> Image.Image:
    """Draw the picture of this number: the same for the same arguments, an RGB image of about 190 x 150 pixels.

    Args:
        kind: One of `CLASSES`.
        seed: Chooses the whole set of pictures.
        number: Which picture of the set, from 0.
    """
    rng = np.random.default_rng([seed, CLASSES.index(kind), number])
    size = (int(rng.integers(170, 213)), int(rng.integers(136, 181)))
    if rng.random() < 0.25:
        size = size[::-1]
    finer = (size[0] * _FINER, size[1] * _FINER)
    image = backdrop(rng, finer)
    _plant(image, rng, kind)
    image = image.reduce(_FINER)
    if rng.random() < 0.3:
        image = image.filter(ImageFilter.GaussianBlur(float(rng.uniform(0.3, 1.1))))
    return Image.fromarray(_lit(np.asarray(image, dtype=np.float32), rng))


def drawn_jpeg(kind: str, seed: int, number: int) -> bytes:
    """The picture as the bytes of a JPEG file."""
    out = BytesIO()
    draw_flower(kind, seed, number).save(out, format="JPEG", quality=78 + (7 * number) % 16)
    return out.getvalue()


def _plant(image: Image.Image, rng: Rng, kind: str) -> None:
    """Draw one to seven flowers, those further away first."""
    pen = Pen.on(image)
    count = int(rng.choice([1, 2, 3, 5, 7], p=[0.46, 0.2, 0.16, 0.1, 0.08]))
    side = min(image.size)
    radii = np.sort(rng.uniform(0.2, 0.48, count)) * side / count**0.42
    for radius in radii.tolist():
        x = image.size[0] * float(np.clip(rng.normal(0.5, 0.1 + 0.08 * min(count, 3)), 0.1, 0.9))
        y = image.size[1] * float(np.clip(rng.normal(0.46, 0.07 + 0.07 * min(count, 3)), 0.15, 0.85))
        upright = kind == "tulips"
        turn = float(rng.normal(0, 0.28)) if upright else float(rng.uniform(0, 6.28))
        tilt = float(rng.uniform(0.85, 1.0)) if upright or rng.random() < 0.5 else float(rng.uniform(0.5, 0.9))
        if upright or rng.random() < 0.75:
            _stem(pen.at(x, y, scale=radius), rng, long_leaves=upright)
        lean = float(rng.normal(0, 0.25))
        shape = pen.at(x, y, scale=radius * (0.8 if upright else 1.0), turn=0.0 if upright else lean, tilt=1.0)
        BLOOMS[kind](shape.at(0, 0, turn=turn, tilt=tilt), rng)


def _stem(pen: Pen, rng: Rng, *, long_leaves: bool) -> None:
    green = colour(rng.uniform(0.22, 0.36), rng.uniform(0.4, 0.8), rng.uniform(0.25, 0.6))
    lean = float(rng.normal(0, 0.5))
    along = np.linspace(0.0, 1.0, 8)
    path = np.stack([lean * along**2, 6.0 * along], 1)
    pen.line(path, shade(green, 0.7), rng.uniform(0.09, 0.16))
    pen.line(path - np.array([0.02, 0.0]), green, rng.uniform(0.04, 0.08))
    for _ in range(int(rng.integers(0, 4))):
        at = float(rng.uniform(0.18, 0.45))
        _leaf(pen.at(lean * at**2, 6.0 * at), rng, green, long_leaves=long_leaves)


def _leaf(pen: Pen, rng: Rng, green: Colour, *, long_leaves: bool) -> None:
    turn = float(rng.choice([-1, 1]) * rng.uniform(0.3, 0.8 if long_leaves else 1.5))
    length = float(rng.uniform(1.4, 2.4) if long_leaves else rng.uniform(0.7, 1.5))
    petal = Petal(length, length * float(rng.uniform(0.16, 0.26) if long_leaves else rng.uniform(0.35, 0.6)), 0.8, 0.9)
    tint = shade(green, float(rng.uniform(0.8, 1.3)))
    pen.at(0, 0, turn=turn).petal(petal, tint, bend=float(rng.normal(0, 0.15)), vein=0.75)


def _lit(pixels: NDArray[np.float32], rng: Rng) -> NDArray[np.uint8]:
    """Light from some side, in patches, of some colour; then contrast and the noise of a sensor."""
    height, width, _ = pixels.shape
    across, down = np.linspace(-1, 1, width, dtype=np.float32), np.linspace(-1, 1, height, dtype=np.float32)
    light: Any = 1 + rng.normal(0, 0.14) * across[None, :] + rng.normal(0, 0.14) * down[:, None]
    light = light + rng.uniform(0, 0.5) * (clouds(rng, (width, height), 3) - 0.5)
    light = light - rng.uniform(0, 0.3) * (across[None, :] ** 2 + down[:, None] ** 2) / 2
    tone = np.exp(rng.normal(0, 0.06, 3)).astype(np.float32) * np.float32(np.exp(rng.normal(0, 0.17)))
    middle = pixels.mean()
    lit = ((pixels - middle) * np.float32(rng.uniform(0.75, 1.15)) + middle) * light[..., None] * tone
    lit = lit + rng.normal(0, rng.uniform(1, 8), (height, width, 1)).astype(np.float32)
    cast: NDArray[np.uint8] = np.clip(lit, 0, 255).astype(np.uint8)
    return cast
