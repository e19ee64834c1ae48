"""Polygons on a Pillow image, in coordinates that can be moved, turned, scaled and tilted; and colours by hue."""

from __future__ import annotations

import colorsys
import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from PIL import ImageDraw

if TYPE_CHECKING:
    from PIL import Image

Colour = tuple[int, int, int]
Points = NDArray[np.float64]
_ANGLES = np.linspace(0.0, 2 * np.pi, 28, endpoint=False)
_CIRCLE = np.stack([np.cos(_ANGLES), np.sin(_ANGLES)], 1)
_EDGE = np.linspace(0.0, 1.0, 12)


def colour(hue: float, saturation: float, value: float) -> Colour:
    """An RGB colour from hue, saturation and value; hue turns round, the others are clipped to [0, 1]."""
    red, green, blue = colorsys.hsv_to_rgb(hue % 1.0, min(max(saturation, 0.0), 1.0), min(max(value, 0.0), 1.0))
    return round(255 * red), round(255 * green), round(255 * blue)


def blend(first: Colour, second: Colour, share: float) -> Colour:
    """The colour that lies `share` of the way from the first to the second."""
    red, green, blue = (round(a + (b - a) * share) for a, b in zip(first, second, strict=True))
    return red, green, blue


def shade(base: Colour, factor: float) -> Colour:
    """The colour made darker (factor below 1) or lighter (above 1)."""
    red, green, blue = (max(0, min(255, round(part * factor))) for part in base)
    return red, green, blue


@dataclass(frozen=True)
class Petal:
    """The outline of a petal along its length.

    Attributes:
        length, width: In the pen's units.
        belly: Where it is widest: 1 in the middle, above 1 nearer the tip, below 1 nearer the base.
        point: Below 1 for a round tip and base, above 1 for pointed ones.
    """

    length: float
    width: float
    belly: float = 1.0
    point: float = 0.7

    def outline(self, inset: float = 0.0, bend: float = 0.0) -> Points:
        """Points around the petal, which starts at the origin and points up (towards -y); `inset` makes it smaller."""
        half = (1 - inset) * self.width / 2 * np.sin(np.pi * _EDGE**self.belly) ** self.point
        along = -self.length * (_EDGE * (1 - 0.8 * inset) + 0.3 * inset)
        aside = bend * _EDGE**2
        around = np.empty((2, 2, len(_EDGE)))
        around[0, 0], around[0, 1], around[1] = aside - half, along, along[::-1]
        around[1, 0] = (aside + half)[::-1]
        outline: Points = around.transpose(0, 2, 1).reshape(-1, 2)
        return outline


@dataclass(frozen=True)
class Pen:
    """Draws in its own coordinates: x to the right, y down, one unit long as the transform says.

    Attributes:
        draw: Where it draws.
        matrix: 2 x 2, from own coordinates to pixels.
        origin: The pixel of the own origin.
    """

    draw: ImageDraw.ImageDraw
    matrix: Points
    origin: Points

    @classmethod
    def on(cls, image: Image.Image) -> Pen:
        """A pen whose units are the image's pixels."""
        return cls(ImageDraw.Draw(image), np.eye(2), np.zeros(2))

    def at(self, x: float, y: float, *, scale: float = 1.0, turn: float = 0.0, tilt: float = 1.0) -> Pen:
        """A pen with its origin at (x, y): turned by `turn` radians, then squeezed upright by `tilt`, then scaled."""
        cos, sin = math.cos(turn), math.sin(turn)
        local = scale * np.array([[1.0, 0.0], [0.0, tilt]]) @ np.array([[cos, -sin], [sin, cos]])
        return replace(self, matrix=self.matrix @ local, origin=self.origin + self.matrix @ np.array([x, y]))

    def polygon(self, points: Points, fill: Colour) -> None:
        """Fill a polygon."""
        self.draw.polygon((points @ self.matrix.T + self.origin).ravel().tolist(), fill=fill)

    def line(self, points: Any, fill: Colour, width: float) -> None:
        """A line through points; `width` in own units."""
        pixels = np.asarray(points, dtype=np.float64) @ self.matrix.T + self.origin
        (a, b), (c, d) = self.matrix.tolist()
        thick = max(1, round(width * math.sqrt(abs(a * d - b * c))))
        self.draw.line(pixels.ravel().tolist(), fill=fill, width=thick, joint="curve")

    def disc(self, x: float, y: float, radius: float, fill: Colour) -> None:
        """Fill a circle (an ellipse, where the pen is tilted)."""
        self.polygon(radius * _CIRCLE + (x, y), fill)

    def petal(self, petal: Petal, fill: Colour, *, bend: float = 0.0, vein: float = 0.86, glow: float = 1.12) -> None:
        """A petal with a dark rim, a lighter middle and a vein."""
        self.polygon(petal.outline(bend=bend), shade(fill, 0.72))
        self.polygon(petal.outline(0.14, bend), fill)
        self.polygon(petal.outline(0.5, bend), shade(fill, glow))
        if vein != 1.0:
            tip = np.array([[0.0, -0.12 * petal.length], [0.8 * bend, -0.82 * petal.length]])
            self.line(tip, shade(fill, vein), petal.width * 0.05)
