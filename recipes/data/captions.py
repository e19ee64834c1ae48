"""Images with captions, as img2dataset downloads LAION: tars, or folders, of ``.jpg`` with ``.txt`` or ``.json``."""

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import xxhash
from torchvision.transforms import v2

from lightning_stream import DecodeCenterCrop
from lightning_stream.convert import Inputs
from lightning_stream.errors import FormatError, NotFoundError
from recipes.data.base import PARTITION, SYNTHETIC, RecipeData
from recipes.data.synthetic_text import captioned_shape

CAPTION_PAD = 0
_COLUMNS = {"image": "jpeg", "caption": "str", "key": "str"}


def captioned(row: Mapping[str, Any]) -> dict[str, Any] | None:
    """A tar's sample as image, caption and key; None where img2dataset could not download the image."""
    image = row.get("jpg") or row.get("jpeg")
    caption = row.get("txt") or (row.get("json") or {}).get("caption")
    return {"image": image, "caption": str(caption), "key": str(row["__key__"])} if image and caption else None


def read_file(path: str) -> list[dict[str, Any]]:
    """The sample of an image that has a caption beside it."""
    text, about = (file.read_text("utf-8") if file.is_file() else "" for file in beside(Path(path)))
    row = {"jpg": Path(path).read_bytes(), "txt": text, "json": json.loads(about or "{}"), "__key__": Path(path).stem}
    return [sample for sample in [captioned(row)] if sample]


def beside(image: Path) -> tuple[Path, Path]:
    """Where an image's caption may be."""
    return image.with_suffix(".txt"), image.with_suffix(".json")


def read_shape(number: int, seed: int) -> list[dict[str, Any]]:
    image, caption = captioned_shape(number, seed)
    return [{"image": image, "caption": caption, "key": f"{number:09}"}]


def caption_tokens(caption: str, length: int) -> torch.Tensor:
    """uint8[length]: the caption's UTF-8 bytes, cut off or padded."""
    data = caption.encode().replace(b"\0", b" ")[:length]
    return torch.frombuffer(bytearray(data.ljust(length, b"\0")), dtype=torch.uint8)


class CaptionedPixels:
    """Transform: ``{"image": uint8[3, size, size], "tokens": uint8[length], "number": int64, a hash of the key}``."""

    def __init__(self, size: int, length: int, flip: float) -> None:
        self.length = length
        self.crop, self.flip = DecodeCenterCrop(size), v2.RandomHorizontalFlip(flip)

    def __call__(self, sample: dict[str, Any]) -> dict[str, Any]:
        number = torch.tensor(xxhash.xxh3_64_intdigest(sample["key"].encode()) >> 1)
        image = self.flip(self.crop(sample)["image"])
        return {"image": image, "tokens": caption_tokens(sample["caption"], self.length), "number": number}


class CaptionData(RecipeData):
    """Streams ``{"image": uint8[n, 3, h, w], "tokens": uint8[n, caption_length], "number": int64[n]}`` a batch.

    configs/data/laion.yaml describes the settings.
    """

    def __init__(
        self, *, synthetic_count: int = 1300, synthetic_seed: int = 1, image_size: int = 32, caption_length: int = 32,
        **shared: Any,
    ) -> None:  # fmt: skip
        self.synthetic = (synthetic_count, synthetic_seed)
        self.image_size, self.caption_length = image_size, caption_length
        transforms = [CaptionedPixels(image_size, caption_length, flip) for flip in (0.5, 0.0)]
        super().__init__(transforms=transforms, settings={"synthetic": self.synthetic}, **shared)

    def convert_source(self) -> None:
        """Write the images' own bytes with their captions."""
        source = self._files()
        tars: dict[str, Any] = {"kind": "webdataset", "transform": captioned}
        self.convert(
            source, columns=_COLUMNS, **({"partition_bytes": PARTITION} if isinstance(source, Inputs) else tars)
        )

    def _files(self) -> Any:
        """What `convert` reads."""
        if self.source == SYNTHETIC:
            count, seed = self.synthetic
            return Inputs(range(count), partial(read_shape, seed=seed))
        if "://" in str(self.source):
            return f"{self.source}/*.tar"
        folder = Path(str(self.source))
        if not folder.is_dir():
            raise NotFoundError(f"no folder at {folder}. Set data.source to the folder that img2dataset wrote.")
        if tars := sorted(map(str, folder.glob("*.tar"))):
            return tars
        images = sorted(file for file in folder.rglob("*") if file.suffix.lower() in (".jpg", ".jpeg"))
        captions = [file for image in images for file in beside(image) if file.is_file()]
        if not captions:
            raise FormatError(
                f"captioned images are tars, or .jpg files with .txt or .json beside; none of the images in {folder} "
                f"has a caption. If these are lists of URLs, download the images with img2dataset."
            )
        stamped = [(str(file), file.stat().st_mtime_ns) for file in (*images, *captions)]
        stamp = xxhash.xxh3_64_hexdigest(repr(stamped).encode())
        return Inputs([*map(str, images)], read_file, stamp)
