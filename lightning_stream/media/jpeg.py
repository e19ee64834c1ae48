"""Decode photo files to arrays of pixels, at the scale and down to the row that is needed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from importlib import import_module
from io import BytesIO
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_stream.errors import missing_extra
from lightning_stream.formats.encodings.images import JPEG, file_bytes, pillow, require_image

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")  # Pillow runs programs to open some others
_SCALES = (8, 4, 2)  # between these, libjpeg takes longer than at full size
_MARGIN = 8  # rows below the last one: its colors depend on the next row of colors, of which a file has a fourth
# Markers of a JPEG's header that say nothing about its height: tables, restarts, comments, data of applications.
_PASSED = frozenset((0xC4, 0xDB, 0xDD, 0xFE, *range(0xE0, 0xF0)))
_COLORS = ("YCbCr", "RGB", "Gray")
_MAX_PIXELS = 178_956_970  # from here on Pillow takes an image for a decompression bomb
Pixels = NDArray[np.uint8]


def decode_jpeg(data: bytes, min_height: int = 0, min_width: int = 0) -> Pixels:
    """Return the pixels of a JPEG: uint8[height, width, 3], RGB. Use it in place of a column's own decoding.

    With ``min_height`` and ``min_width`` the image is decoded at an eighth, a quarter or a half of its size, whichever
    is the smallest that is at least so large: much faster for large photos. simplejpeg decodes, if it is installed,
    else Pillow; both give the same pixels. To decode parts of photos, see `DecodeRandomCrop` and `DecodeCenterCrop`.

    Example::

        StreamingDataset(remote="s3://bucket/photos", decoders={"image": decode_jpeg})

    Raises:
        ValueError: It is not a JPEG (or a PNG), it is damaged, or it has more pixels than Pillow's limit.
        MissingExtraError: Pillow is not installed.
    """
    photo = Photo(data, formats=("JPEG", "PNG"))
    return photo.pixels(photo.scale_for(photo.height, photo.width, min_height, min_width))


class Photo:
    """An image whose pixels are not decoded yet.

    Example::

        photo = Photo(Path("photo.jpg").read_bytes())  # of 4,000 x 3,000 pixels
        photo.pixels(scale=photo.scale_for(photo.height, photo.width, 224, 224)).shape  # (375, 500, 3)

    Attributes:
        height, width: Its size in pixels, as it is stored: an orientation in its EXIF data is not applied.

    Args:
        value: The bytes of an image file, or an image of Pillow. Of one with several frames, the first counts.
        decoder: Name of the library that decodes JPEG files, see `DECODERS`; ``"auto"`` for simplejpeg, if it is
            installed, else Pillow. Pillow decodes all other files, and JPEG files that the library does not know.
        formats: The kinds of files that are opened.

    Raises:
        ValueError: The bytes are no such file, or it has more pixels than Pillow's limit.
        TypeError: It is something else.
    """

    def __init__(self, value: Any, decoder: str = "auto", formats: tuple[str, ...] = FORMATS) -> None:
        self._decoder = DECODERS[decoder]
        self._image: Any = None
        if isinstance(value, (bytes, bytearray, memoryview)):
            data = bytes(value)
            if (size := _size_of_jpeg(data)) is not None:  # opening it by Pillow takes a tenth of its decoding
                self._jpeg = data
                self.height, self.width = size
                return
            with _refused():
                value = pillow().open(BytesIO(data), formats=formats)
        self._image = require_image(value, "a decoder of photos")
        self.width, self.height = self._image.size
        data = file_bytes(self._image) if self._image.mode in ("RGB", "L") else b""
        self._jpeg = data if data.startswith(JPEG) else b""

    def scale_for(self, height: int, width: int, min_height: int, min_width: int) -> int:
        """Return the largest of 1, 2, 4 and 8 that divides a part's height and width to no less than these.

        It is 1 where no least size is given, and for files that are always decoded as a whole.
        """
        if not (self._jpeg and self._decoder.is_partial and (min_height or min_width)):
            return 1
        return next((k for k in _SCALES if height >= k * min_height and width >= k * min_width), 1)

    def pixels(self, scale: int = 1, bottom: int | None = None) -> Pixels:
        """Decode the image, or at least its rows above `bottom`, at one `scale`-th of its size: uint8[h, w, 3], RGB.

        The scale must be one that `scale_for` returned. ValueError if the file is damaged.
        """
        with _refused():
            if not self._jpeg:
                return np.array(rgb(self._image))
            part = _rows_above(self._jpeg, bottom) if self._decoder.is_partial else None
            with suppress(ValueError, RuntimeError):
                return self._decoder.decode(part or self._jpeg, scale, part is None)
            return _by_pillow(self._jpeg, scale, True)  # it knows more kinds, and has better messages


def rgb(image: Any) -> Any:
    """Return an image of Pillow, of any mode, as RGB, 8 bits a color."""
    if image.mode.startswith("I"):  # 16 bits, which `convert` would cut off at 255
        image = pillow().fromarray((np.asarray(image) // 256).clip(0, 255).astype(np.uint8))
    if image.mode == "P" and "transparency" in image.info:  # Pillow would warn
        image = image.convert("RGBA")
    return image.convert("RGB")


def _size_of_jpeg(data: bytes) -> tuple[int, int] | None:
    """Return the height and width of a JPEG in colors or grey; None for any other file, and without simplejpeg."""
    if (library := simplejpeg()) is None or not data.startswith(JPEG):
        return None
    try:
        height, width, colors, _ = library.decode_jpeg_header(data)
    except ValueError:
        return None
    return (height, width) if colors in _COLORS and height * width <= _MAX_PIXELS else None


def _rows_above(data: bytes, bottom: int | None) -> bytes | None:
    """Return a JPEG with a smaller height in its header, so that its decoding ends early; None where it must be whole.

    A progressive file has its rows in several scans. A file without its end is decoded as a whole, which finds that.
    """
    if bottom is None or not data.endswith(b"\xff\xd9"):
        return None
    at = 2
    frame = 0
    while (marker := data[at : at + 2]) != b"\xff\xda":
        if marker in (b"\xff\xc0", b"\xff\xc1"):
            frame = at
        elif marker[:1] != b"\xff" or marker[-1] not in _PASSED:
            return None
        at += 2 + int.from_bytes(data[at + 2 : at + 4], "big")
    height = int.from_bytes(data[frame + 5 : frame + 7], "big")
    rows = bottom + _MARGIN
    if not frame or rows >= height or data[frame + 9] not in data[at + 4 : at + 5]:  # not all colors in one scan
        return None
    return data[: frame + 5] + rows.to_bytes(2, "big") + data[frame + 7 :]


def _by_simplejpeg(data: bytes, scale: int, is_whole: bool) -> Pixels:
    library = simplejpeg()
    if library is None:
        raise missing_extra("simplejpeg", "images", "decoding by simplejpeg")
    height, width, *_ = library.decode_jpeg_header(data)
    size = {"min_height": -(-height // scale), "min_width": -(-width // scale)}
    pixels: Pixels = library.decode_jpeg(
        data, colorspace="RGB", fastdct=False, fastupsample=False, strict=is_whole, **size
    )
    return pixels


def _by_pillow(data: bytes, scale: int, is_whole: bool) -> Pixels:  # noqa: ARG001 - it ignores what follows anyway
    with pillow().open(BytesIO(data), formats=("JPEG",)) as image:
        if scale > 1:
            image.draft("RGB", (max(image.width // scale, 1), max(image.height // scale, 1)))
        return np.array(image.convert("RGB"))


def _by_any(data: bytes, scale: int, is_whole: bool) -> Pixels:
    return (_by_pillow if simplejpeg() is None else _by_simplejpeg)(data, scale, is_whole)


class Decoder(NamedTuple):
    """A function that decodes the bytes of a JPEG to RGB, and whether it can decode a part.

    `decode` gets the bytes, the number to divide the size by, and whether the bytes are those of a whole file: if not,
    the height in their header is smaller, and it ignores what follows. It raises ValueError or RuntimeError for bytes
    that it cannot decode. If `is_partial` is False, it always gets the number 1 and a whole file.
    """

    decode: Callable[[bytes, int, bool], Pixels]
    is_partial: bool = True


DECODERS = {"auto": Decoder(_by_any), "pillow": Decoder(_by_pillow), "simplejpeg": Decoder(_by_simplejpeg)}


@lru_cache(maxsize=1)
def simplejpeg() -> Any:
    """Return the module simplejpeg; None if it is not installed."""
    try:
        return import_module("simplejpeg")
    except ImportError:
        return None


@contextmanager
def _refused() -> Iterator[None]:
    """Turn Pillow's errors for bytes into a ValueError."""
    try:
        yield
    except (OSError, SyntaxError, pillow().DecompressionBombError) as error:
        raise ValueError(f"not a readable JPEG: {error}") from error
