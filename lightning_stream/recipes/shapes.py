"""Captioned drawings by this package: one shape on a ground, told in words; to learn drawing from."""

from __future__ import annotations

import math
from io import BytesIO

import numpy as np
from PIL import Image, ImageDraw

VERSION = 1
"""Raised whenever the same seed gives other drawings than before."""

COLOURS: dict[str, tuple[int, int, int]] = {
    "red": (214, 48, 49),
    "orange": (240, 140, 30),
    "yellow": (245, 214, 60),
    "green": (46, 160, 80),
    "blue": (44, 100, 220),
    "purple": (130, 60, 180),
    "white": (250, 250, 248),
    "black": (28, 28, 34),
}
CORNERS = {"circle": 0, "square": 4, "triangle": 3}
_SIDE = 256
_FINER = 4  # drawn so many times larger, then reduced: that smooths the edges


def draw_shape(seed: int, number: int) -> tuple[Image.Image, str]:
    """The drawing of this number, 64 x 64 pixels, and its caption, e.g. ``"a red circle on white"``.

    Args:
        seed: Chooses the whole set of drawings.
        number: Which of the set, from 0.
    """
    rng = np.random.default_rng([seed, number])
    colour, ground = rng.choice([*COLOURS], 2, replace=False)
    shape = [*CORNERS][int(rng.integers(len(CORNERS)))]
    image = Image.new("RGB", (_SIDE, _SIDE), _tint(rng, ground))
    radius = rng.uniform(0.3, 0.44) * _SIDE
    across, down = rng.uniform(radius, _SIDE - radius, 2)
    pen, corners, fill = ImageDraw.Draw(image), CORNERS[shape], _tint(rng, colour)
    if not corners:
        pen.ellipse((across - radius, down - radius, across + radius, down + radius), fill=fill)
    else:
        turn = rng.uniform(-0.25, 0.25) + (math.pi / 4 if corners == 4 else 0.0)
        angles = [turn + 2 * math.pi * corner / corners for corner in range(corners)]
        pen.polygon([(across + radius * math.sin(a), down - radius * math.cos(a)) for a in angles], fill=fill)
    article = "an" if colour[0] in "aeiou" else "a"
    return image.reduce(_FINER), f"{article} {colour} {shape} on {ground}"


def shape_jpeg(seed: int, number: int) -> tuple[bytes, str]:
    """The drawing as the bytes of a JPEG file, and its caption."""
    image, caption = draw_shape(seed, number)
    out = BytesIO()
    image.save(out, format="JPEG", quality=90)
    return out.getvalue(), caption


def _tint(rng: np.random.Generator, colour: str) -> tuple[int, int, int]:
    """A colour as it comes out, a little different each time."""
    red, green, blue = np.clip(np.array(COLOURS[colour]) + rng.normal(0, 8, 3), 0, 255).astype(int).tolist()
    return red, green, blue
