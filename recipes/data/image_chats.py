"""Chats about images: whole conversations are packed by the places that their tokens and images take in the model."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import tee
from typing import Any, ClassVar

import numpy as np
import torch

from lightning_stream import DecodeCenterCrop
from lightning_stream.errors import FormatError
from recipes.data.chats import ChatData, TokenizeChats
from recipes.data.synthetic import flower_chat


@dataclass(frozen=True)
class TokenizeImageChats(TokenizeChats):
    """A conversation as `TokenizeChats` makes it, with its ``images``: any number of JPEG files."""

    images_key: str
    columns: ClassVar[Mapping[str, str]] = {**TokenizeChats.columns, "images": "list[jpeg]"}
    lengths: ClassVar[Mapping[str, Any]] = {"tokens": len, "images": len}
    example: ClassVar = staticmethod(flower_chat)

    def __call__(self, rows: Iterable[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
        rows, again = tee(rows)
        for row, chat in zip(again, super().__call__(rows), strict=True):
            if self.images_key not in row:
                columns = ", ".join(sorted(row))
                raise FormatError(
                    f"each row must have a list of JPEG files in {self.images_key!r}; it has {columns}. "
                    "Set data.images_key."
                )
            yield {**chat, "images": row[self.images_key]}


class ImagesFirst:
    """Transform: ``input_ids`` and ``loss_mask``, which begin with -1 and 0 for each patch of the images.

    ``pixels`` has the images, uint8[images, 3, size, size].
    """

    def __init__(self, size: int, patches: int) -> None:
        self.crop = DecodeCenterCrop(size)
        self.patches = patches

    def __call__(self, sample: dict[str, Any]) -> dict[str, Any]:
        images = sample["images"]
        pixels = torch.empty((len(images), 3, *self.crop.size), dtype=torch.uint8)
        for place, image in zip(pixels, images, strict=True):
            place[:] = self.crop({"image": image})["image"]
        before = (self.patches * len(images), 0)
        return {
            "input_ids": np.pad(sample["tokens"].astype("int64"), before, constant_values=-1),
            "loss_mask": np.pad(sample["loss_mask"], before),
            "pixels": pixels,
        }


class ImageChatData(ChatData):
    """Streams rows of packed conversations about images; ``configs/data/image_chats.yaml`` describes the settings."""

    def __init__(
        self, *, image_size: int = 32, patch_size: int = 8, images_key: str = "images", **chats: Any
    ) -> None:  # fmt: skip
        if not 1 <= patch_size <= image_size:
            raise ValueError(f"patch_size is from 1 to image_size; found {patch_size=}, {image_size=}")
        self.images_key = images_key
        patches = (image_size // patch_size) ** 2
        packing = {"lengths": f"tokens + {patches} * images"}
        transform = ImagesFirst(image_size, patches)
        super().__init__(packing=packing, transforms=(transform, transform), **chats)

    def rule(self, **of_text: Any) -> TokenizeImageChats:
        return TokenizeImageChats(**of_text, roles=self.roles, images_key=self.images_key)
