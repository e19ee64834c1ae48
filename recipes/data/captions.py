"""Images with captions, as img2dataset downloads LAION: tars of ``.jpg`` with ``.txt`` or ``.json``."""

from collections.abc import Mapping
from typing import Any

import torch

from lightning_stream import DecodeCenterCrop
from lightning_stream.convert import Inputs
from lightning_stream.errors import FormatError
from recipes.data.base import INPUTS_AT_A_TIME, SYNTHETIC, ConvertedData
from recipes.data.synthetic import captioned_flower


def captioned(row: Mapping[str, Any]) -> dict[str, Any] | None:
    """A tar's sample as image and caption; None where img2dataset could not download the image, or had no caption.

    FormatError for images of another kind: they would be left out.
    """
    image = row.get("jpg") or row.get("jpeg")
    if not image and (others := sorted({"png", "webp"} & row.keys())):
        raise FormatError(
            f"the images of data=captions are JPEG files, .jpg or .jpeg; found .{others[0]} in a sample. Download them "
            "with encode_format=jpg of img2dataset, or leave those samples out"
        )
    caption = row.get("txt") or (row.get("json") or {}).get("caption")
    return {"image": image, "caption": str(caption)} if image and caption else None


class CaptionedPixels:
    """Transform: ``{"image": uint8[3, size, size], "tokens": uint8[length]}``, the UTF-8 bytes of the caption."""

    def __init__(self, size: int, length: int) -> None:
        self.crop = DecodeCenterCrop(size)
        self.length = length

    def __call__(self, sample: dict[str, Any]) -> dict[str, Any]:
        text = sample["caption"].encode()[: self.length].ljust(self.length, b"\0")
        return {
            "image": self.crop(sample)["image"],
            "tokens": torch.frombuffer(bytearray(text), dtype=torch.uint8),
        }


class CaptionData(ConvertedData):
    """Streams ``{"image": uint8[n, 3, h, w], "tokens": uint8[n, caption_length]}`` a batch.

    ``configs/data/captions.yaml`` describes the settings.
    """

    def __init__(
        self, *, synthetic_count: int = 1000, image_size: int = 32, caption_length: int = 32, **shared: Any
    ) -> None:
        self.synthetic_count = synthetic_count
        transform = CaptionedPixels(image_size, caption_length)
        super().__init__(transforms=(transform, transform), settings={"synthetic_count": synthetic_count}, **shared)

    def convert_source(self) -> None:
        """Write the images' own bytes with their captions."""
        columns = {"image": "jpeg", "caption": "str"}
        if self.source == SYNTHETIC:
            flowers = Inputs(range(self.synthetic_count), captioned_flower)
            self.convert(flowers, columns=columns, partition_bytes=INPUTS_AT_A_TIME)
        else:
            self.convert(f"{self.source}/*.tar", columns=columns, kind="webdataset", transform=captioned)
