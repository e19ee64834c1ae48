"""JPEG bytes to an array of pixels, by simplejpeg if it is installed, else by Pillow; both give the same pixels."""

from __future__ import annotations

from functools import lru_cache
from importlib import import_module
from io import BytesIO
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .images import pillow

_MAX_PIXELS = 178_956_970  # from here on Pillow takes an image for a decompression bomb


def decode_jpeg(data: bytes, min_height: int = 0, min_width: int = 0) -> NDArray[np.uint8]:
    """Return the pixels of a JPEG: uint8[height, width, 3], RGB. Use it in place of a column's own decoding.

    With ``min_height`` and ``min_width`` the image is decoded at the smallest scale of the library that is at least so
    large: much faster, for training on small crops of large photos. simplejpeg has every eighth, Pillow a half, a
    quarter and an eighth, so scaled images differ between the two.

    Example::

        StreamingDataset(remote="s3://bucket/photos", decoders={"image": decode_jpeg})

    Raises:
        ValueError: It is not a JPEG, it is damaged, or it has more pixels than Pillow's limit.
        MissingExtraError: Neither library is installed.
    """
    fast = _simplejpeg()
    if fast is not None and bytes(data[:2]) == b"\xff\xd8":
        try:
            height, width, *_ = fast.decode_jpeg_header(data)
            if height * width > _MAX_PIXELS:
                raise ValueError("a decompression bomb")  # simplejpeg would take the memory; Pillow refuses it
            pixels: NDArray[np.uint8] = fast.decode_jpeg(
                data, colorspace="RGB", fastdct=False, fastupsample=False, min_height=min_height, min_width=min_width
            )
            return pixels
        except ValueError:
            pass  # CMYK and others: Pillow knows more kinds, and has better messages
    try:
        # Collections of photos may hold some PNGs; no other format is opened, since some run programs.
        with pillow().open(BytesIO(data), formats=("JPEG", "PNG")) as image:
            if min_height or min_width:
                image.draft("RGB", (min_width or min_height, min_height or min_width))
            return np.array(image.convert("RGB"))
    except (OSError, pillow().DecompressionBombError) as error:
        raise ValueError(f"not a readable JPEG: {error}") from error


@lru_cache(maxsize=1)
def _simplejpeg() -> Any:
    try:
        return import_module("simplejpeg")
    except ImportError:
        return None
