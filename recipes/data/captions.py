"""Images with captions, as img2dataset downloads LAION: tars, or folders, of ``.jpg`` with ``.txt`` or ``.json``."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import xxhash
from torchvision.transforms import v2

from lightning_stream.convert import Inputs
from lightning_stream.errors import FormatError, NotFoundError
from recipes.data.base import RecipeData
from recipes.data.synthetic_text import captioned_shape
from recipes.data.text import SYNTHETIC, glob

CAPTION_PAD = 0
_COLUMNS = {"image": "jpeg", "caption": "str", "key": "str"}
_IMAGES = (".jpg", ".jpeg")
_IMAGES_OF_PARTITION = 1000


def captioned(row: Mapping[str, Any]) -> dict[str, Any] | None:
    """A tar's sample as image, caption and key; None where img2dataset could not download the image."""
    image = row.get("jpg") or row.get("jpeg")
    caption = row.get("txt") or (row.get("json") or {}).get("caption")
    return {"image": image, "caption": str(caption), "key": str(row["__key__"])} if image and caption else None


def read_files(stamped: list[tuple[str, list[int]]]) -> Iterator[dict[str, Any]]:
    """The samples of images with captions beside them, given with the times at which these files were changed."""
    for image in (Path(path) for path, _ in stamped):
        text, about = image.with_suffix(".txt"), image.with_suffix(".json")
        row = {"jpg": image.read_bytes(), "__key__": image.stem}
        row["txt"] = text.read_text(encoding="utf-8") if text.is_file() else ""
        row["json"] = json.loads(about.read_bytes()) if about.is_file() else {}
        if (sample := captioned(row)) is not None:
            yield sample


def read_shapes(numbers: tuple[int, int, int]) -> Iterator[dict[str, Any]]:
    """Synthetic captioned shapes: of a seed, from a first to a last number."""
    seed, begin, end = numbers
    for number in range(begin, end):
        image, caption = captioned_shape(number, seed)
        yield {"image": image, "caption": caption, "key": f"{number:09}"}


def caption_tokens(caption: str, length: int) -> torch.Tensor:
    """uint8[length]: the caption's UTF-8 bytes, cut off or padded."""
    data = caption.encode().replace(b"\0", b" ")[:length]
    return torch.frombuffer(bytearray(data.ljust(length, b"\0")), dtype=torch.uint8)


class CaptionedPixels:
    """Transform: ``{"image": uint8[3, size, size], "tokens": uint8[length], "number": int64, a hash of the key}``."""

    def __init__(self, size: int, length: int, flip: bool) -> None:
        steps = [v2.Resize(size, antialias=True), v2.CenterCrop(size), v2.PILToTensor()]
        self.length, self.pixels = length, v2.Compose([*steps, v2.RandomHorizontalFlip()] if flip else steps)

    def __call__(self, sample: dict[str, Any]) -> dict[str, Any]:
        number = torch.tensor(xxhash.xxh3_64_intdigest(sample["key"].encode()) >> 1)
        image = self.pixels(sample["image"].convert("RGB"))
        return {"image": image, "tokens": caption_tokens(sample["caption"], self.length), "number": number}


class CaptionData(RecipeData):
    """Streams ``{"image": uint8[n, 3, h, w], "tokens": uint8[n, caption_length], "number": int64[n]}`` a batch.

    Args:
        source: A folder of tars, or of folders of images with captions; or ``synthetic`` (shapes).
        synthetic_count, synthetic_seed: How many synthetic shapes, and which.
        image_size: Pixels per side.
        caption_length: Bytes of a caption that the model sees.
        **shared: See `RecipeData`.
    """

    def __init__(
        self, *, synthetic_count: int = 1300, synthetic_seed: int = 1, image_size: int = 32, caption_length: int = 32,
        **shared: Any,
    ) -> None:  # fmt: skip
        self.synthetic = (synthetic_count, synthetic_seed)
        transforms = [CaptionedPixels(image_size, caption_length, flip=flip) for flip in (True, False)]
        options = {"settings": {"synthetic": self.synthetic}, "name": "captioned images", **shared}
        super().__init__(train_transform=transforms[0], val_transform=transforms[1], **options)
        self.image_size, self.caption_length = image_size, caption_length

    def convert_source(self) -> None:
        """Write the images' own bytes with their captions."""
        source = self._files()
        transform = None if isinstance(source, Inputs) else captioned
        self.convert(source, columns=_COLUMNS, kind=None if transform is None else "webdataset", transform=transform)

    def captions(self, count: int) -> list[str]:
        """The first captions of the validation split, each once."""
        found = dict.fromkeys(self.val_dataset[index]["caption"] for index in range(min(64, self.val_dataset.size)))
        return [*found][:count]

    def _files(self) -> Any:
        """What `convert` reads."""
        assert self.source is not None
        if self.source == SYNTHETIC:
            (count, seed), size = self.synthetic, _IMAGES_OF_PARTITION
            return Inputs([(seed, begin, min(begin + size, count)) for begin in range(0, count, size)], read_shapes)
        if "://" in self.source:
            return f"{self.source}/*.tar"
        folder = Path(self.source)
        if not folder.is_dir():
            raise NotFoundError(f"no folder at {folder}. Set data.source to the folder that img2dataset wrote.")
        if any(folder.glob("*.tar")):
            return glob(self.source, "*.tar")
        images = sorted(file for file in folder.rglob("*") if file.suffix.lower() in _IMAGES)
        lists = not images and any(folder.rglob("*.parquet"))
        hint = " Its parquet files list URLs: download the images with img2dataset." if lists else ""
        files = [
            [file, *(one for end in (".txt", ".json") if (one := file.with_suffix(end)).exists())] for file in images
        ]
        if not any(len(of_image) > 1 for of_image in files):
            found = f"none of the images in {folder} has a caption" if images else f"{folder} has neither"
            raise FormatError(f"captioned images are tars, or .jpg files with .txt or .json beside; {found}.{hint}")
        stamped = [(str(of_image[0]), [file.stat().st_mtime_ns for file in of_image]) for of_image in files]
        size = _IMAGES_OF_PARTITION
        return Inputs([stamped[begin : begin + size] for begin in range(0, len(stamped), size)], read_files)
