"""The five flowers, each drawn by a pen whose unit is the flower's radius and whose origin is the flower's heart."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from lightning_stream.recipes.drawing.pen import Petal, blend, colour, shade

if TYPE_CHECKING:
    from collections.abc import Callable

    from lightning_stream.recipes.drawing.pen import Colour, Pen

Rng = np.random.Generator
_GOLDEN_ANGLE = np.pi * (3 - np.sqrt(5))


def _ring(
    pen: Pen, rng: Rng, petal: Petal, count: int, tint: Colour, *, loose: float = 0.06, start: float = 0.0
) -> None:
    """Petals around the heart, none quite like the next."""
    for index in rng.permutation(count):
        turn = start + 2 * np.pi * (index + rng.normal(0, loose)) / count
        own = Petal(
            petal.length * rng.uniform(0.88, 1.05), petal.width * rng.uniform(0.85, 1.12), petal.belly, petal.point
        )
        bend = rng.normal(0, 0.06) * petal.length
        pen.at(0, 0, turn=turn).petal(own, shade(tint, rng.uniform(0.86, 1.08)), bend=bend)


def _seeds(pen: Pen, rng: Rng, radius: float, count: int, inner: Colour, outer: Colour) -> None:
    """Dots in the spiral in which seeds grow, from the middle outwards."""
    for index in range(count):
        share = np.sqrt((index + 0.5) / count)
        angle = index * _GOLDEN_ANGLE
        tint = shade(blend(inner, outer, share), rng.uniform(0.75, 1.25))
        pen.disc(radius * share * np.cos(angle), radius * share * np.sin(angle), radius * 0.95 / np.sqrt(count), tint)


def daisy(pen: Pen, rng: Rng) -> None:
    """Many narrow petals, white, cream or pink, around a small yellow heart."""
    kind = rng.random()
    if kind < 0.7:
        tint = colour(rng.uniform(0.1, 0.7), rng.uniform(0.0, 0.08), rng.uniform(0.88, 1.0))
    elif kind < 0.9:
        tint = colour(rng.uniform(0.85, 0.98), rng.uniform(0.15, 0.5), rng.uniform(0.85, 1.0))
    else:
        tint = colour(rng.uniform(0.13, 0.16), rng.uniform(0.2, 0.6), 1.0)
    count = int(rng.integers(12, 27))
    petal = Petal(1.0, rng.uniform(3.2, 4.6) / count, belly=rng.uniform(1.2, 1.8), point=rng.uniform(0.45, 0.7))
    if rng.random() < 0.5:
        _ring(pen, rng, petal, count, shade(tint, 0.85), start=0.5)
    _ring(pen, rng, petal, count, tint)
    heart, hue = rng.uniform(0.22, 0.34), rng.uniform(0.11, 0.15)
    yellow = colour(hue, rng.uniform(0.8, 1.0), rng.uniform(0.85, 1.0))
    pen.disc(0, 0.04, heart * 1.06, shade(yellow, 0.6))
    pen.disc(0, 0, heart, yellow)
    _seeds(pen, rng, heart * 0.92, 42, colour(hue + 0.04, 0.8, 0.75), yellow)


def dandelion(pen: Pen, rng: Rng) -> None:
    """A shaggy yellow head of a hundred thin rays without a heart, or the white ball of seeds it becomes."""
    (_dandelion_head if rng.random() < 0.62 else _dandelion_clock)(pen, rng)


def _dandelion_head(pen: Pen, rng: Rng) -> None:
    hue = rng.uniform(0.12, 0.16)
    for layer, length in enumerate(np.linspace(1.0, 0.3, int(rng.integers(4, 6)))):
        count = int(34 * length + 10)
        petal = Petal(float(length), 0.13, belly=1.7, point=0.5)
        tint = colour(hue - 0.008 * layer, rng.uniform(0.8, 1.0), rng.uniform(0.85, 1.0) - 0.03 * layer)
        _ring(pen, rng, petal, count, tint, loose=0.35, start=float(rng.uniform(0, 6)))


def _dandelion_clock(pen: Pen, rng: Rng) -> None:
    pale = colour(rng.uniform(0.08, 0.6), rng.uniform(0.0, 0.12), rng.uniform(0.8, 1.0))
    bald = rng.uniform(0, 6.28) if rng.random() < 0.4 else None  # the wind took some seeds
    for depth in (0.55, 0.78, 1.0):
        for index in range(int(26 * depth + 12)):
            angle = index * _GOLDEN_ANGLE + depth
            if bald is not None and abs((angle - bald + np.pi) % (2 * np.pi) - np.pi) < 0.7:
                continue
            _parachute(pen.at(0, 0, turn=angle), rng, depth * rng.uniform(0.82, 1.0), shade(pale, 0.55 + 0.45 * depth))
    pen.disc(0, 0, rng.uniform(0.1, 0.17), colour(rng.uniform(0.06, 0.2), 0.5, rng.uniform(0.3, 0.5)))


def _parachute(pen: Pen, rng: Rng, reach: float, tint: Colour) -> None:
    pen.line([(0, -0.1), (0, -0.78 * reach)], shade(tint, 0.8), 0.012)
    for spread in np.linspace(-0.9, 0.9, 7):
        tip = 0.24 * rng.uniform(0.8, 1.1)
        pen.line([(0, -0.78 * reach), (tip * np.sin(spread), -0.78 * reach - tip * np.cos(spread))], tint, 0.014)


def rose(pen: Pen, rng: Rng) -> None:
    """Broad petals wrapped around each other, narrower and darker towards the heart."""
    tint = _rose_colour(rng)
    open_share = rng.uniform(0.75, 1.0)
    turn = rng.uniform(0, 6.28)
    for ring, reach in enumerate(np.linspace(1.0, 0.22, int(rng.integers(6, 9)))):
        count = max(3, 6 - ring)
        turn += rng.uniform(0.4, 0.9)
        body = shade(tint, 1.08 - 0.075 * ring * open_share)
        for index in rng.permutation(count):
            angle = turn + 2 * np.pi * (index + rng.normal(0, 0.07)) / count
            _wrapped_petal(pen.at(0, 0, turn=angle), rng, float(reach), count, body)
    spiral = np.linspace(0.5, 3.6 * np.pi, 34)
    path = np.stack([spiral * np.cos(spiral + turn), spiral * np.sin(spiral + turn)], 1) * 0.018
    pen.line(path, shade(tint, 0.42), 0.035)


def _rose_colour(rng: Rng) -> Colour:
    kind = rng.random()
    if kind < 0.36:
        return colour(rng.uniform(0.95, 1.02), rng.uniform(0.75, 1.0), rng.uniform(0.5, 0.9))
    if kind < 0.64:
        return colour(rng.uniform(0.9, 0.99), rng.uniform(0.25, 0.6), rng.uniform(0.8, 1.0))
    if kind < 0.82:
        return colour(rng.uniform(0.05, 0.17), rng.uniform(0.05, 0.2), rng.uniform(0.88, 1.0))
    return colour(rng.uniform(0.06, 0.15), rng.uniform(0.5, 0.9), rng.uniform(0.85, 1.0))


def _wrapped_petal(pen: Pen, rng: Rng, reach: float, count: int, tint: Colour) -> None:
    half = np.pi / count * rng.uniform(1.15, 1.4)
    angles = np.linspace(-half, half, 13)
    wave = 1 + 0.05 * np.sin(angles * rng.uniform(2, 5) + rng.uniform(0, 6)) - 0.16 * (angles / half) ** 4
    rim = np.stack([np.sin(angles), -np.cos(angles)], 1) * (reach * wave * rng.uniform(0.93, 1.05))[:, None]
    heart = np.zeros((1, 2))
    pen.polygon(np.concatenate([rim, heart]), shade(tint, 0.5))
    pen.polygon(np.concatenate([rim * 0.965, heart]), shade(tint, 1.16))
    pen.polygon(np.concatenate([rim * 0.9, heart]), tint)
    pen.polygon(np.concatenate([rim * 0.74, heart]), shade(tint, 0.86))


def sunflower(pen: Pen, rng: Rng) -> None:
    """Two rings of pointed golden petals around a broad dark disc of seeds."""
    hue = rng.uniform(0.09, 0.15)
    tint = colour(hue, rng.uniform(0.85, 1.0), rng.uniform(0.85, 1.0))
    count = int(rng.integers(15, 26))
    heart = rng.uniform(0.36, 0.54)
    petal = Petal(1.0, rng.uniform(4.4, 6.0) / count, belly=rng.uniform(0.85, 1.1), point=rng.uniform(0.9, 1.3))
    _ring(pen, rng, petal, count, shade(tint, 0.82), start=0.2)
    _ring(pen, rng, Petal(0.93, petal.width, petal.belly, petal.point), count, tint)
    dark = colour(rng.uniform(0.04, 0.1), rng.uniform(0.5, 0.9), rng.uniform(0.12, 0.32))
    inner = colour(rng.uniform(0.1, 0.26), rng.uniform(0.4, 0.8), rng.uniform(0.2, 0.5))
    pen.disc(0, 0.02, heart * 1.05, shade(dark, 0.6))
    pen.disc(0, 0, heart, dark)
    _seeds(pen, rng, heart * 0.96, 150, inner, blend(dark, tint, rng.uniform(0.05, 0.45)))


def tulip(pen: Pen, rng: Rng) -> None:
    """A cup of a few broad petals seen from the side, closed or opening."""
    tint = _tulip_colour(rng)
    opening = rng.uniform(0.0, 0.34)
    width = rng.uniform(0.8, 1.05)
    tip = colour(rng.uniform(0.1, 0.16), 0.6, 1.0) if rng.random() < 0.25 else shade(tint, 1.2)
    for lean, size, dim in ((-0.5, 0.92, 0.66), (0.5, 0.92, 0.66), (0.0, 1.0, 0.6)):
        _cup_petal(pen.at(0, 0.85, turn=lean * opening), rng, Petal(1.72 * size, width), shade(tint, dim), tip)
    for lean in (-1.0, 1.0) if rng.random() < 0.5 else (1.0, -1.0):
        side = Petal(1.75, width * 0.95, belly=0.72, point=0.85)
        _cup_petal(pen.at(0.2 * lean, 0.9, turn=lean * (0.13 + opening)), rng, side, shade(tint, 0.86), tip)
    _cup_petal(pen.at(rng.normal(0, 0.06), 0.95, turn=rng.normal(0, 0.08)), rng, Petal(1.6, width), tint, tip)


def _tulip_colour(rng: Rng) -> Colour:
    kind = rng.random()
    if kind < 0.3:
        return colour(rng.uniform(0.96, 1.03), rng.uniform(0.8, 1.0), rng.uniform(0.65, 0.95))
    if kind < 0.52:
        return colour(rng.uniform(0.88, 0.97), rng.uniform(0.35, 0.75), rng.uniform(0.8, 1.0))
    if kind < 0.72:
        return colour(rng.uniform(0.1, 0.16), rng.uniform(0.65, 1.0), rng.uniform(0.85, 1.0))
    if kind < 0.87:
        return colour(rng.uniform(0.74, 0.85), rng.uniform(0.4, 0.8), rng.uniform(0.35, 0.75))
    return colour(rng.uniform(0.1, 0.3), rng.uniform(0.02, 0.12), rng.uniform(0.88, 1.0))


def _cup_petal(pen: Pen, rng: Rng, petal: Petal, tint: Colour, tip: Colour) -> None:
    shaped = Petal(petal.length, petal.width, belly=0.78, point=rng.uniform(0.75, 0.95))
    pen.polygon(shaped.outline(), shade(tint, 0.68))
    pen.polygon(shaped.outline(0.07), blend(tint, tip, 0.25))
    pen.polygon(shaped.outline(0.2), tint)
    pen.polygon(shaped.outline(0.55), shade(tint, 1.1))
    for aside in (-0.24, -0.08, 0.08, 0.24):
        stripe = [(aside * petal.width * 0.7, -0.15 * petal.length), (aside * petal.width, -0.72 * petal.length)]
        pen.line(stripe, shade(tint, 0.9), 0.015)


BLOOMS: dict[str, Callable[[Pen, Rng], None]] = {
    "daisy": daisy,
    "dandelion": dandelion,
    "roses": rose,
    "sunflowers": sunflower,
    "tulips": tulip,
}
