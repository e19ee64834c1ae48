"""From a sample's JPEG to pixels: augmented for training, plain for evaluation. Runs in the loader's workers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageEnhance

Box = tuple[float, float, float, float]


@dataclass(frozen=True)
class AugmentedImage:
    """Crops, mirrors and recolours at random; by torch's global generator, which the loader seeds for each sample.

    Attributes:
        size: Height and width of the result, in pixels.
        smallest_crop: Least share of the picture's area that a crop keeps.
        colour: How far brightness, contrast and saturation may go from 1.
    """

    size: int = 64
    smallest_crop: float = 0.4
    colour: float = 0.25

    def __call__(self, sample: dict[str, Any]) -> dict[str, Any]:
        """The sample with its image as uint8[3, size, size]."""
        chance = torch.rand(8).tolist()
        image = sample["image"]
        pixels = _resized(image, _random_box(image.size, self.smallest_crop, chance), self.size)
        if chance[4] < 0.5:
            pixels = pixels.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        for enhance, draw in zip(
            (ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color), chance[5:], strict=True
        ):
            pixels = enhance(pixels).enhance(1 + self.colour * (2 * draw - 1))
        return _with_pixels(sample, pixels)


@dataclass(frozen=True)
class PlainImage:
    """The middle of the picture, nothing random.

    Attributes:
        size: Height and width of the result, in pixels.
        margin: Share of the shorter side that is cut off.
    """

    size: int = 64
    margin: float = 0.06

    def __call__(self, sample: dict[str, Any]) -> dict[str, Any]:
        """The sample with its image as uint8[3, size, size]."""
        width, height = sample["image"].size
        side = min(width, height) * (1 - self.margin)
        left, top = (width - side) / 2, (height - side) / 2
        return _with_pixels(sample, _resized(sample["image"], (left, top, left + side, top + side), self.size))


@dataclass(frozen=True)
class ShiftedPixels:
    """Small pictures that are pixels already: shifted by up to `margin`, mirrored half of the time.

    Attributes:
        margin: Pixels; what comes in from outside is black.
    """

    margin: int = 4

    def __call__(self, sample: dict[str, Any]) -> dict[str, Any]:
        """The sample with its image, uint8[3, h, w], as a tensor of the same shape."""
        image, margin = sample["image"], self.margin
        down, right, mirrored = torch.rand(3).tolist()
        top, left = int(down * (2 * margin + 1)), int(right * (2 * margin + 1))
        wide = np.pad(image, ((0, 0), (margin, margin), (margin, margin)))
        seen = wide[:, top : top + image.shape[1], left : left + image.shape[2]]
        return {**sample, "image": torch.from_numpy((seen[:, :, ::-1] if mirrored < 0.5 else seen).copy())}


@dataclass(frozen=True)
class PlainPixels:
    """Small pictures that are pixels already, as they are."""

    def __call__(self, sample: dict[str, Any]) -> dict[str, Any]:
        """The sample with its image, uint8[3, h, w], as a tensor."""
        return {**sample, "image": torch.from_numpy(np.array(sample["image"]))}


def as_picture(image: Any) -> Image.Image:
    """A sample's image to look at, whether it was decoded or is pixels, uint8[3, h, w]."""
    return image if isinstance(image, Image.Image) else Image.fromarray(np.ascontiguousarray(image.transpose(1, 2, 0)))


def _random_box(size: tuple[int, int], smallest: float, chance: list[float]) -> Box:
    """A crop of random area, shape and place that lies inside the picture."""
    width, height = size
    area = width * height * (smallest + (1 - smallest) * chance[0])
    ratio = (4 / 3) ** (2 * chance[1] - 1)
    wide, high = min(width, (area * ratio) ** 0.5), min(height, (area / ratio) ** 0.5)
    left, top = (width - wide) * chance[2], (height - high) * chance[3]
    return left, top, left + wide, top + high


def _resized(image: Image.Image, box: Box, size: int) -> Image.Image:
    """The box of a picture as RGB of size x size; a JPEG is decoded no larger than that needs."""
    full = image.size
    enough = size / min(box[2] - box[0], box[3] - box[1])
    image.draft("RGB", (round(full[0] * enough), round(full[1] * enough)))
    scale = image.size[0] / full[0], image.size[1] / full[1]
    left, top, right, bottom = box[0] * scale[0], box[1] * scale[1], box[2] * scale[0], box[3] * scale[1]
    inside = left, top, min(right, image.size[0]), min(bottom, image.size[1])
    return image.convert("RGB").resize((size, size), Image.Resampling.BILINEAR, box=inside)


def _with_pixels(sample: dict[str, Any], image: Image.Image) -> dict[str, Any]:
    pixels = np.array(image).transpose(2, 0, 1)
    return {**sample, "image": torch.from_numpy(np.ascontiguousarray(pixels))}
