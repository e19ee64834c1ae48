"""Drawn flowers: the same for the same seed, different otherwise, and not to be told apart by colour alone."""

from __future__ import annotations

from io import BytesIO

import numpy as np
import pytest
from PIL import Image

from lightning_stream.recipes.drawing import CLASSES, draw_flower, drawn_jpeg


@pytest.mark.parametrize("kind", CLASSES)
def test_the_same_arguments_draw_the_same_bytes(kind: str) -> None:
    assert drawn_jpeg(kind, 1, 3) == drawn_jpeg(kind, 1, 3)


@pytest.mark.parametrize("kind", CLASSES)
def test_every_number_and_every_seed_draws_another_picture(kind: str) -> None:
    pictures = {drawn_jpeg(kind, seed, number) for seed in (1, 2) for number in range(6)}
    assert len(pictures) == 12


def test_the_pictures_are_jpegs_of_various_sizes() -> None:
    opened = [Image.open(BytesIO(drawn_jpeg(kind, 1, n))) for kind in CLASSES for n in range(4)]
    assert {image.format for image in opened} == {"JPEG"}
    assert len({image.size for image in opened}) > 10
    assert all(120 < side < 240 for image in opened for side in image.size)


def test_brightness_and_colour_do_not_tell_the_class() -> None:
    # the nearest class mean of average colours: what a model without shapes could do at best
    colours = {
        kind: np.array([np.asarray(draw_flower(kind, 1, n)).mean(axis=(0, 1)) for n in range(24)]) for kind in CLASSES
    }
    means = np.array([colours[kind][:12].mean(axis=0) for kind in CLASSES])
    right = [
        int(np.argmin(np.linalg.norm(means - one, axis=1)) == place)
        for place, kind in enumerate(CLASSES)
        for one in colours[kind][12:]
    ]
    assert np.mean(right) < 0.5
