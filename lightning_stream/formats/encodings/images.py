"""Images: ``pil`` (raw pixels), ``jpeg``, ``png``, and lists of them. Pillow is imported on first use."""

from __future__ import annotations

import struct
import warnings
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lightning_stream.errors import FormatError, needs

from .base import CheckedEncoding, Encoding, Stored, ViewEncoding, describe

if TYPE_CHECKING:
    from PIL import Image

_MAX_MODE_BYTES = 16
_MAX_PIXELS_PER_BYTE = 8  # mode "1"
JPEG = b"\xff\xd8"
_GRAYS = [level for level in range(256) for _ in "RGB"]  # the palette of an image that is read without one
_PNG = b"\x89PNG\r\n\x1a\n"


class _Pil(CheckedEncoding):
    """Width, height, mode and raw pixels."""

    def _encode(self, value: Any) -> bytes:
        image = require_image(value, "pil")
        if image.mode in ("P", "PA") and (image.getpalette() or _GRAYS) != _GRAYS:
            warnings.warn(
                f"pil stores the numbers of the colours of mode {image.mode!r}, as masks of labels have them, but not "
                "their palette, so the colours are lost. convert('RGB') keeps these.",
                stacklevel=2,
            )
        mode = image.mode.encode()
        return struct.pack("<III", *image.size, len(mode)) + mode + image.tobytes()

    def decode(self, data: Stored) -> Image.Image:
        if len(data) < 12:
            raise ValueError("an image's head is missing")
        width, height, num_mode = struct.unpack_from("<III", data)
        pixels = bytes(data[12 + num_mode :])
        if num_mode > _MAX_MODE_BYTES or width * height > len(pixels) * _MAX_PIXELS_PER_BYTE:
            raise ValueError(f"an image of {width} x {height} pixels does not fit its {len(pixels)} bytes")
        mode = str(data[12 : 12 + num_mode], "ascii")
        image: Image.Image = pillow().frombytes(mode, (width, height), pixels)
        return image


class _ImageFile(ViewEncoding):
    """An image file's bytes. An image that was opened from a JPEG file and never changed keeps that file's bytes.

    Collections of photos hold PNG files among the JPEG files, also under names such as ``.JPEG``. So ``jpeg`` and
    ``png`` take and decode the bytes of either kind, and no other: Pillow runs programs to open some formats. An image
    without a file's bytes is stored as the kind that the name says.

    `decode` opens the image without loading its pixels, as mosaicml-streaming does: ``draft()`` still works, and an
    image that is written again keeps its bytes. With ``on_bad="substitute"`` the reader loads every image, so
    that a truncated one can be replaced.
    """

    stored_type = None

    def encode(self, value: Any) -> bytes:
        if isinstance(value, (bytes, bytearray, memoryview)):
            data = bytes(value)
            if data.startswith((JPEG, _PNG)):
                return data
            raise ValueError(
                f"{self.name} takes the bytes of a JPEG or PNG file, which begin with {JPEG!r} or {_PNG!r}; got "
                f"{len(data)} bytes that begin with {data[:8]!r}. Write the opened image, which is then stored as "
                f"{self.name.upper()}, or make it a column of 'bytes'."
            )
        pixels = isinstance(value, np.ndarray) and value.dtype == np.uint8 and value.ndim in (2, 3)
        image = require_image(pillow().fromarray(value) if pixels else value, self.name)
        if self.name == "jpeg" and image.format == "JPEG" and (original := _original_bytes(image)) is not None:
            return original
        out = BytesIO()
        try:
            image.save(out, format=self.name.upper())
        except OSError as error:
            raise ValueError(f"{self.name} cannot store mode {image.mode!r} ({error}). Convert the image.") from error
        return out.getvalue()

    def decode(self, data: Stored) -> Image.Image:
        image: Image.Image = pillow().open(BytesIO(data), formats=("JPEG", "PNG"))
        return image


class _ImageList(CheckedEncoding):
    """A sequence of images, of their files' bytes, or of uint8 pixels; or one array uint8[n, height, width, channels].

    ``jpeg_array`` has no reserved word in front of the images.
    """

    def __init__(self, name: str, element: Encoding, reserved: bytes) -> None:
        super().__init__(name)
        self._element = element
        self._reserved = reserved

    def _encode(self, value: Any) -> bytes:
        if isinstance(value, np.ndarray) and (value.ndim == 4 or value.dtype == object):
            value = list(value)
        if isinstance(value, (str, bytes, bytearray, memoryview)) or not isinstance(value, Sequence):
            raise TypeError(f"{self.name} takes a sequence of images; got {describe(value)}.")
        parts = list(map(self._element.encode, value))
        sizes = struct.pack(f"<{len(parts) + 1}I", len(parts), *map(len, parts))
        return b"".join((self._reserved, sizes, *parts))

    def decode(self, data: Stored) -> list[Image.Image]:
        return list(map(self._element.decode, self.stored(data)))

    def stored(self, data: Stored) -> list[Stored]:
        """Return the bytes of each image in the list."""
        at = len(self._reserved)
        if len(data) < at + 4 or bytes(data[:at]) != self._reserved:
            raise ValueError("a list's head is missing, or not of this version")
        (count,) = struct.unpack_from("<I", data, at)
        if 4 * count > len(data) - at - 4:
            raise ValueError(f"a list of {count} images does not fit its {len(data)} bytes")
        sizes = struct.unpack_from(f"<{count}I", data, at + 4)
        at += 4 + 4 * count
        if sum(sizes) != len(data) - at:
            raise ValueError(f"a list whose images take {sum(sizes)} bytes has {len(data) - at}")
        ends = at + np.cumsum(sizes)
        return [data[end - size : end] for end, size in zip(ends.tolist(), sizes, strict=True)]


def pillow() -> Any:
    """Return the module ``PIL.Image``; MissingExtraError if Pillow is not installed."""
    with needs("pillow", "images", "decoding and encoding images"):
        from PIL import Image
    return Image


def require_image(value: Any, name: str) -> Image.Image:
    """Return the value; TypeError if it is no image of Pillow, ValueError if its pixels can no longer be loaded."""
    if not isinstance(value, pillow().Image):
        raise TypeError(f"{name} takes a PIL image, or the encoded bytes; got {describe(value)}.")
    if getattr(value, "tile", None) and getattr(value, "fp", None) is None:
        raise ValueError(f"{name}: the image's file was closed before its pixels were loaded. Call its load() first.")
    image: Image.Image = value
    return image


def file_bytes(image: Image.Image) -> bytes:
    """Return the bytes of the file that an image was opened from; b"" where its pixels may differ from them.

    Pixels that were never loaded cannot differ, unless `draft` made them smaller.
    """
    opened: Any = image
    file = getattr(opened, "fp", None)
    if file is None or not opened.tile or opened.decoderconfig:
        return b""
    position = file.tell()
    file.seek(0)
    data: bytes = file.read()
    file.seek(position)
    return data


def load_images(column: str, value: Any) -> None:
    """Read the pixels of an image, or of all images in a list; FormatError if they are damaged."""
    if isinstance(value, list):
        for image in value:
            load_images(column, image)
    elif type(value).__module__.startswith("PIL."):
        try:
            value.load()
        except Exception as error:
            raise FormatError(f"column {column!r}: cannot be decoded ({type(error).__name__}: {error}).") from error


def _original_bytes(image: Image.Image) -> bytes | None:
    """Return the bytes of the JPEG file that an image was opened from, if the image still shows them; else None.

    A change of the image (drawn, pasted, rotated, removed) must not be lost, so the file is opened once more. Pixels
    that were never loaded cannot have changed, and would be read from this file, at these offsets (`tile`). Loaded
    pixels are compared, and so are the size, the mode and all metadata.
    """
    unloaded = bool(getattr(image, "tile", None))
    name = getattr(image, "filename", "")
    try:
        data = file_bytes(image) if unloaded else Path(name).read_bytes() if name else b""
        if not data.startswith(JPEG):
            return None
        now = pillow().open(BytesIO(data), formats=("JPEG",))
        same = (now.format, now.size, now.mode, now.info) == ("JPEG", image.size, image.mode, image.info)
        same = same and _exif(now, image) == _exif(image, image)
        same = same and (now.tile == getattr(image, "tile", None) if unloaded else now.tobytes() == image.tobytes())
    except Exception:  # noqa: BLE001 - a file that was replaced may be anything, and Pillow raises anything then
        return None
    return data if same else None


def _exif(image: Image.Image, opened: Image.Image) -> Any:
    """Return the EXIF data with all changes; None if those of ``opened`` were never read, so never changed."""
    if getattr(opened, "_exif", opened) is None:
        return None
    exif = image.getexif()
    return dict(exif), exif.tobytes()


def _make_list(name: str) -> Encoding:
    inner = name.removeprefix("list[").removesuffix("]")
    return _ImageList(name, _Pil(inner) if inner == "pil" else _ImageFile(inner), bytes(4))


ENCODINGS = {
    "pil": _Pil, "jpeg": _ImageFile, "png": _ImageFile,
    **dict.fromkeys(("jpeg_array", "jpegarray"), lambda name: _ImageList(name, _ImageFile("jpeg"), b"")),
    **dict.fromkeys(("list[pil]", "list[jpeg]", "list[png]"), _make_list),
}  # fmt: skip
