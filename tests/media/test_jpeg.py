"""JPEG bytes to pixels: one answer, whichever library gives it."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from lightning_stream.media import jpeg
from lightning_stream.media.jpeg import Photo, decode_jpeg


def jpeg_bytes(mode: str, size: tuple[int, int] = (301, 203)) -> bytes:
    out = io.BytesIO()
    Image.effect_noise(size, 40).convert(mode).save(out, format="JPEG", quality=88)
    return out.getvalue()


@pytest.fixture(params=["simplejpeg", "pillow"])
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "simplejpeg":
        pytest.importorskip("simplejpeg")
    else:
        monkeypatch.setattr(jpeg, "simplejpeg", lambda: None)
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


@pytest.mark.usefixtures("library")
def test_a_scaled_decode_is_the_smallest_that_suffices() -> None:
    data = jpeg_bytes("RGB", (800, 600))
    for minimum, shape in (
        ((224, 224), (300, 400, 3)), ((75, 100), (75, 100, 3)), ((76, 0), (150, 200, 3)), ((0, 101), (150, 200, 3)),
        ((301, 224), (600, 800, 3)), ((700, 700), (600, 800, 3)), ((0, 0), (600, 800, 3)), ((1, 1), (75, 100, 3)),
    ):  # fmt: skip
        assert decode_jpeg(data, *minimum).shape == shape


@pytest.mark.parametrize("subsampling", ["444", "422", "420", "440", "411"])
def test_scaled_pixels_and_upper_rows_are_the_same_in_both_libraries(subsampling: str) -> None:
    simplejpeg = pytest.importorskip("simplejpeg")
    pixels = np.asarray(Image.effect_noise((237, 231), 40).convert("RGB").rotate(30))
    data = simplejpeg.encode_jpeg(np.ascontiguousarray(pixels), quality=90, colorsubsampling=subsampling)
    fast, slow = Photo(data, "simplejpeg"), Photo(data, "pillow")
    for scale in (1, 2, 4, 8):
        whole = fast.pixels(scale)
        assert whole.shape == (-(-231 // scale), -(-237 // scale), 3)
        assert np.array_equal(whole, slow.pixels(scale))
        for bottom in (1, 15, 16, 17, 100, 223, 231):
            needed = -(-bottom // scale)
            for photo in (fast, slow):
                part = photo.pixels(scale, bottom)
                assert np.array_equal(part[:needed], whole[:needed])
                assert len(part) < len(whole) or bottom > 222


@pytest.mark.usefixtures("library")
def test_a_truncated_file_is_refused_although_the_rows_that_are_needed_are_whole() -> None:
    data = jpeg_bytes("RGB", (400, 300))
    cut = data[: len(data) * 9 // 10]
    assert Photo(data).pixels(bottom=20).shape == (28, 400, 3)
    for damaged in (cut, cut + b"\xff"):
        with pytest.raises(ValueError, match="truncated"):
            Photo(damaged).pixels(bottom=20)


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("options", [{"progressive": True}, {"restart_marker_rows": 1}, {"quality": 100}])
@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
@pytest.mark.parametrize("end", [b"", bytes(5), b"no image"])
def test_files_of_other_kinds_have_the_same_upper_rows(mode: str, options: dict[str, Any], end: bytes) -> None:
    out = io.BytesIO()
    Image.effect_noise((301, 203), 40).convert(mode).save(out, "JPEG", **options)
    for bottom in (1, 100, 203):
        part = Photo(out.getvalue() + end).pixels(bottom=bottom)
        assert np.array_equal(part[:bottom], np.asarray(Image.open(out).convert("RGB"))[:bottom])


def test_colors_in_separate_scans_are_decoded_as_a_whole() -> None:
    """The second scan of such a file begins where the whole first one ends."""
    data = jpeg_bytes("RGB", (64, 64))
    at = data.index(b"\xff\xda")
    assert jpeg._rows_above(data, 20) is not None
    assert jpeg._rows_above(data[: at + 4] + b"\x01" + data[at + 5 :], 20) is None
    assert jpeg._rows_above(data[:at] + b"\xff\xff" + data[at:], 20) is None  # a header of an unknown kind
    assert jpeg._rows_above(b"\xff\xd8\xff\xd9", 20) is None
    assert jpeg._rows_above(data[: at + 2] + b"\xff\xd9", 20) is None


def test_an_opened_image_is_decoded_from_its_file_unless_it_was_changed() -> None:
    data = jpeg_bytes("RGB", (400, 300))
    opened = Image.open(io.BytesIO(data))
    assert Photo(opened).scale_for(300, 400, 100, 100) == 2
    assert np.array_equal(Photo(opened).pixels(), decode_jpeg(data))
    drafted, loaded = Image.open(io.BytesIO(data)), Image.open(io.BytesIO(data))
    drafted.draft("RGB", (200, 150))
    loaded.load()
    loaded.paste((1, 2, 3), (0, 0, 400, 300))
    assert Photo(drafted).pixels(bottom=9).shape == (150, 200, 3)
    assert Photo(loaded).scale_for(300, 400, 100, 100) == 1
    assert set(Photo(loaded).pixels().reshape(-1, 3)[-1].tolist()) == {1, 2, 3}


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("data", [b"", b"\xff\xd8", b"\xff\xd8" + b"x" * 50, b"no image"])
def test_what_is_no_jpeg_is_a_value_error(data: bytes) -> None:
    with pytest.raises(ValueError, match="not a readable JPEG"):
        decode_jpeg(data)
