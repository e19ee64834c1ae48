"""JPEG bytes to pixels: one answer, whichever library gives it."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from lightning_stream.formats.encodings import jpeg
from lightning_stream.formats.encodings.jpeg import decode_jpeg


def jpeg_bytes(mode: str, size: tuple[int, int] = (301, 203)) -> bytes:
    out = io.BytesIO()
    Image.effect_noise(size, 40).convert(mode).save(out, format="JPEG", quality=88)
    return out.getvalue()


@pytest.fixture(params=["simplejpeg", "pillow"])
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "simplejpeg":
        pytest.importorskip("simplejpeg")
    else:
        monkeypatch.setattr(jpeg, "_simplejpeg", lambda: None)
    return str(request.param)


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
def test_the_pixels_are_those_of_pillow(mode: str) -> None:
    data = jpeg_bytes(mode)
    assert np.array_equal(decode_jpeg(data), np.asarray(Image.open(io.BytesIO(data)).convert("RGB")))


@pytest.mark.usefixtures("library")
def test_photos_have_the_pixels_of_pillow(shared_data: Path) -> None:
    for path in sorted((shared_data / "flower_photos").glob("*/*.jpg"))[::50]:
        assert np.array_equal(decode_jpeg(path.read_bytes()), np.asarray(Image.open(path).convert("RGB")))


def test_a_scaled_decode_is_the_smallest_that_suffices(library: str) -> None:
    data = jpeg_bytes("RGB", (800, 600))
    assert decode_jpeg(data, 224, 224).shape == ((225, 300, 3) if library == "simplejpeg" else (300, 400, 3))
    assert decode_jpeg(data, 75, 100).shape == (75, 100, 3)
    assert decode_jpeg(data, 700, 700).shape == (600, 800, 3)


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("data", [b"", b"\xff\xd8", b"\xff\xd8" + b"x" * 50, b"no image"])
def test_what_is_no_jpeg_is_a_value_error(data: bytes) -> None:
    with pytest.raises(ValueError, match="not a readable JPEG"):
        decode_jpeg(data)
