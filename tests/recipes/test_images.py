"""Pictures become pixels: of one size, by the global generator alone, from JPEGs of any kind."""

from __future__ import annotations

from io import BytesIO

import numpy as np
import pytest
import torch
from PIL import Image

from lightning_stream.recipes.drawing import draw_flower
from lightning_stream.recipes.images import AugmentedImage, PlainImage


def jpeg(size: tuple[int, int] = (200, 150), mode: str = "RGB") -> Image.Image:
    out = BytesIO()
    draw_flower("roses", 1, 1).resize(size).convert(mode).save(out, format="JPEG", quality=95)
    return Image.open(out)


@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
@pytest.mark.parametrize("size", [(200, 150), (40, 300), (9, 7), (1200, 900)])
@pytest.mark.parametrize("transform", [AugmentedImage(32), PlainImage(32)])
def test_every_jpeg_becomes_a_square_of_bytes(transform: AugmentedImage, size: tuple[int, int], mode: str) -> None:
    seen = transform({"image": jpeg(size, mode), "label": 3})
    assert seen["label"] == 3
    assert seen["image"].dtype == torch.uint8
    assert seen["image"].shape == (3, 32, 32)


def test_the_augmentation_is_decided_by_torchs_generator() -> None:
    pictures = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        pictures.append(AugmentedImage(48)({"image": jpeg()})["image"])
    assert torch.equal(pictures[0], pictures[1])
    assert not torch.equal(pictures[0], pictures[2])


def test_the_plain_image_is_the_middle_of_the_picture() -> None:
    plain = PlainImage(50, margin=0.0)({"image": jpeg((300, 100))})["image"].float()
    middle = jpeg((300, 100)).crop((100, 0, 200, 100)).resize((50, 50), Image.Resampling.BILINEAR)
    difference = plain - torch.from_numpy(np.array(middle)).permute(2, 0, 1).float()
    assert difference.abs().mean() < 8  # decoded small, not decoded and then made small


def test_no_augmentation_is_left_where_all_is_set_to_nothing() -> None:
    torch.manual_seed(4)
    mild = AugmentedImage(48, smallest_crop=1.0, colour=0.0)({"image": jpeg((100, 100))})["image"].float()
    plain = PlainImage(48, margin=0.0)({"image": jpeg((100, 100))})["image"].float()
    assert min((mild - plain).abs().mean(), (mild.flip(2) - plain).abs().mean()) < 12  # a crop's shape still varies
