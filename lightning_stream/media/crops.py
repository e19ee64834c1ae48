"""Transforms that decode only the part of a photo that is trained on, at the scale that is needed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_stream.errors import FormatError, checking, needs
from lightning_stream.formats.encodings.base import type_name
from lightning_stream.formats.sizes import whole_number
from lightning_stream.media.jpeg import DECODERS, Decoder, Photo, Pixels

_TRIES = 10  # random parts that are tried until one lies within the photo, as torchvision does


class _DecodeCrop:
    """The base of both transforms: it puts the decoded part of a sample's photo in the place of the photo."""

    def __init__(self, size: int | tuple[int, int], column: str, decoder: str) -> None:
        self.size = tuple(map(whole_number, size if isinstance(size, Iterable) else (size, size)))
        self.column = column
        self.decoder = decoder
        if len(self.size) != 2 or not all(isinstance(pixels, int) and pixels > 0 for pixels in self.size):
            raise ValueError(f"size must be a whole number of pixels, or (height, width); found {size!r}.")
        if decoder not in DECODERS:
            raise ValueError(f"decoder must be one of {', '.join(DECODERS)}; found {decoder!r}.")

    def _decoded(self, sample: Mapping[str, Any], **drawn: Any) -> dict[str, Any]:
        name = type(self).__name__
        if not isinstance(sample, Mapping):
            raise TypeError(f"{name} takes a sample, a dict; got {type_name(sample)}. Pass it as transform=.")
        if self.column not in sample:
            columns = ", ".join(map(str, sample))
            raise ValueError(f"{name} needs a column {self.column!r}; found {columns}. Pass column=.")
        try:
            image = self._crop(Photo(sample[self.column], self.decoder), **drawn)
        except TypeError as error:
            raise TypeError(f"column {self.column!r}: {error} Pass no decoder for the column, or bytes.") from error
        except ValueError as error:
            raise FormatError(f"column {self.column!r}: cannot be decoded ({error}).") from error
        return {**sample, self.column: image}

    def _crop(self, photo: Photo) -> Tensor:
        raise NotImplementedError


class DecodeRandomCrop(_DecodeCrop):
    """Transform: a random part of each photo, resized and mirrored at random, as a tensor uint8[3, height, width], RGB.

    The part is drawn as torchvision's ``RandomResizedCrop`` draws it, before anything is decoded. Rows below it are not
    decoded, and a part of a JPEG that is at least twice, four or eight times as large as `size` is decoded at a half, a
    quarter or an eighth of its size. Any other has the pixels of torchvision's function, rounded up or down. What is
    drawn depends on the sample's position in the training run alone.

    Example::

        dataset = StreamingDataset("s3://bucket/photos", shuffle=True, transform=DecodeRandomCrop(224))

        crop = DecodeRandomCrop(224)

        def augment(sample, rng):  # the same as a part of a transform of your own
            sample = crop(sample, rng)
            return {"image": sample["image"].float() / 255, "label": sample["label"]}

    Args:
        size: Height and width of the result, in pixels, or one number for both.
        scale: Least and greatest share of the photo's area that the part has.
        ratio: Least and greatest width of the part, divided by its height.
        flip: Probability that the part is mirrored.
        column: The column with the photo: of the encodings ``jpeg``, ``png`` or ``pil``, or ``bytes`` of image files.
        decoder: What decodes JPEG files: ``"auto"`` for simplejpeg if it is installed, else Pillow; or
            ``"simplejpeg"``, ``"pillow"``, or ``"torchvision"``, which decodes whole photos, and is deprecated since
            torchvision 0.29. Pillow decodes all other files.

    With ``on_bad="substitute"`` the reader decodes whole photos to find damaged ones, which costs the advantage.

    Raises:
        ValueError: A wrong argument, or a sample without the column.
        TypeError: The column has something else, e.g. decoded arrays.
        FormatError: The file is damaged, or of another kind than JPEG, PNG, WebP, GIF, BMP and TIFF.
        MissingExtraError: The decoder is not installed.
    """

    @checking
    def __init__(
        self, size: int | tuple[int, int], *, scale: tuple[float, float] = (0.08, 1.0),
        ratio: tuple[float, float] = (3 / 4, 4 / 3), flip: float = 0.5, column: str = "image", decoder: str = "auto",
    ) -> None:  # fmt: skip
        super().__init__(size, column, decoder)
        self.scale = scale
        self.ratio = ratio
        self.flip = flip
        for name, bounds, most in (("scale", scale, 1), ("ratio", ratio, math.inf)):
            numbers = list(bounds) if isinstance(bounds, Iterable) else []
            if len(numbers) != 2 or not 0 < numbers[0] <= numbers[1] <= most:
                limit = " of at most 1" if most == 1 else ""
                raise ValueError(f"{name} must be two numbers above 0{limit}, the least first; found {bounds!r}.")
        if not 0 <= flip <= 1:
            raise ValueError(f"flip must be a probability; found {flip!r}.")

    def __call__(self, sample: Mapping[str, Any], rng: np.random.Generator | None = None) -> dict[str, Any]:
        """Return the sample with the part in place of the photo.

        Without `rng`, numpy's global generator draws; the loader seeds it for transforms that have no `rng`.
        """
        return self._decoded(sample, draw=np.random if rng is None else rng)

    def _crop(self, photo: Photo, draw: Any = None) -> Tensor:
        top, left, height, width = self._draw(photo.height, photo.width, draw.random)
        scale = photo.scale_for(height, width, *self.size)
        pixels = photo.pixels(scale, bottom=top + height)
        rows, columns = (
            slice((begin + scale // 2) // scale, (begin + length + scale // 2) // scale)
            for begin, length in ((top, height), (left, width))
        )
        image = _resized(pixels[rows, columns], self.size)
        return image.flip(-1) if draw.random() < self.flip else image

    def _draw(self, height: int, width: int, random: Any) -> tuple[int, int, int, int]:
        """Draw a part: its top and left, its height and width."""
        (least, most), (narrowest, widest) = self.scale, self.ratio
        for _ in range(_TRIES):
            area = height * width * (least + (most - least) * random())
            ratio = narrowest * (widest / narrowest) ** random()
            h = round(math.sqrt(area / ratio))
            w = round(math.sqrt(area * ratio))
            if 0 < h <= height and 0 < w <= width:
                return int(random() * (height - h + 1)), int(random() * (width - w + 1)), h, w
        # The photo is too narrow or too wide: the largest part in its middle whose ratio is allowed.
        h = min(height, max(1, round(width / narrowest)))
        w = min(width, max(1, round(height * widest)))
        return (height - h) // 2, (width - w) // 2, h, w


class DecodeCenterCrop(_DecodeCrop):
    """Transform: the middle of each photo, as a tensor uint8[3, height, width], RGB. For validation.

    The photo is resized so that its shorter side has `resize` pixels, then cropped. A JPEG that is at least twice, four
    or eight times as large is decoded at a half, a quarter or an eighth of its size. Any other has the pixels of
    torchvision's ``Resize`` and ``CenterCrop``, rounded up or down.

    Example::

        dataset = StreamingDataset("s3://bucket/val", transform=DecodeCenterCrop(224, resize=256))

    Args:
        size, column, decoder: See `DecodeRandomCrop`, also for the errors.
        resize: Pixels of the photo's shorter side before it is cropped; None for the greater number of `size`.
    """

    @checking
    def __init__(
        self, size: int | tuple[int, int], *, resize: int | None = None, column: str = "image", decoder: str = "auto"
    ) -> None:
        super().__init__(size, column, decoder)
        self.resize = max(self.size) if resize is None else whole_number(resize)
        if not isinstance(self.resize, int) or self.resize < max(self.size):
            raise ValueError(f"resize must be a whole number of at least {max(self.size)}, the size; found {resize!r}.")

    def __call__(self, sample: Mapping[str, Any], rng: np.random.Generator | None = None) -> dict[str, Any]:  # noqa: ARG002
        """Return the sample with the middle of its photo. It draws nothing: `rng` allows it in threads."""
        return self._decoded(sample)

    def _crop(self, photo: Photo) -> Tensor:
        shorter = min(photo.height, photo.width)
        height, width = (self.resize * side // shorter for side in (photo.height, photo.width))
        pixels = photo.pixels(photo.scale_for(photo.height, photo.width, height, width))
        image = _resized(pixels, (height, width))
        top, left = (round((have - want) / 2) for have, want in zip((height, width), self.size, strict=True))
        return image[:, top : top + self.size[0], left : left + self.size[1]]


def _resized(pixels: Pixels, size: tuple[int, ...]) -> Tensor:
    """Return pixels uint8[h, w, 3] as a tensor uint8[3, *size]."""
    image = torch.from_numpy(pixels).permute(2, 0, 1)
    if image.shape[1:] == size:
        return image
    resized = torch.nn.functional.interpolate(image[None], size, mode="bilinear", antialias=True)
    return resized[0]


def _by_torchvision(data: bytes, scale: int, is_whole: bool) -> Pixels:  # noqa: ARG001 - the signature
    with needs("torchvision", "torchvision", "decoding by torchvision"):
        from torchvision.io import ImageReadMode, decode_jpeg
    image: Tensor = decode_jpeg(torch.frombuffer(bytearray(data), dtype=torch.uint8), mode=ImageReadMode.RGB)
    return image.permute(1, 2, 0).numpy()


DECODERS["torchvision"] = Decoder(_by_torchvision, is_partial=False)
