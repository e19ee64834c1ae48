"""Images with labels: class folders, archives of them, and synthetic flowers."""

import os
from collections.abc import Callable
from functools import cached_property, partial
from pathlib import Path
from shutil import unpack_archive
from typing import Any

from torchvision.transforms import v2

from lightning_stream import DecodeCenterCrop, DecodeRandomCrop
from lightning_stream.convert import read_manifest
from lightning_stream.errors import NotFoundError
from lightning_stream.sources.choose import SPLIT_OF
from recipes.data.base import SYNTHETIC, ConvertedData, fetch
from recipes.data.synthetic import write_flowers


class ImageData(ConvertedData):
    """Class folders of images, streamed as ``{"image": uint8[n, 3, h, w], "label": int64[n]}``.

    `photos`, another name of `source`, is ``<folder>/<class>/*.jpg``, ``<folder>/train|val/<class>/*.jpg``, a .tar or
    .tgz of such a folder, its URL, or ``synthetic``. ``configs/data/flowers.yaml`` describes the settings.
    """

    def __init__(
        self, *, source: str | None = None, photos: str | None = None, synthetic_count: int = 1000,
        downloads: str = "runs/downloads", image_size: int = 64, crop_scale_min: float = 0.4,
        color_jitter: float = 0.25, **shared: Any,
    ) -> None:  # fmt: skip
        source = photos or source
        settings = {"synthetic_count": synthetic_count} if source == SYNTHETIC else {}
        crop = DecodeRandomCrop(image_size, scale=(crop_scale_min, 1.0))
        colors = v2.ColorJitter(color_jitter, color_jitter, color_jitter)
        transforms = (v2.Compose([crop, colors]), DecodeCenterCrop(image_size))
        super().__init__(source=source, settings=settings, transforms=transforms, **shared)
        self.synthetic_count = synthetic_count
        self.downloads = Path(downloads)

    def convert_source(self) -> None:
        """Convert class folders; the shards mix the classes."""
        folder = self.source_folder()
        splits = {split for name, split in SPLIT_OF.items() if (folder / name).is_dir()}
        has_splits = "train" in splits
        if has_splits and "val" not in splits:
            raise NotFoundError(
                f"images in train/ are validated on those in val/; {folder} has no val/. Add it, or put the class "
                "folders into one folder, of which data.val_fraction is the validation split."
            )
        self.convert(str(folder), shuffle=True, val_fraction=None if has_splits else self.val_fraction)

    def source_folder(self) -> Path:
        """The source as a folder: drawn, downloaded or extracted, unless that was done before."""
        if self.source == SYNTHETIC:
            draw = partial(write_flowers, count=self.synthetic_count)
            return _written_once(self.downloads / f"flowers-{self.synthetic_count}", draw)
        source = str(self.source)
        path = fetch(source, self.downloads) if "://" in source else Path(source)
        if path.is_file():
            extracted = f"{path.name.partition('.')[0]}-{path.stat().st_size}-{path.stat().st_mtime_ns}"
            path = _written_once(self.downloads / extracted, partial(unpack_archive, path, filter="data"))
            folders = [entry for entry in path.iterdir() if entry.is_dir()]
            path = folders[0] if len(folders) == 1 else path
        if not path.is_dir():
            raise NotFoundError(
                f"data.source (or data.photos) is a folder of class folders, an archive or a URL; there is no {path}."
            )
        return path

    @cached_property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes; a label is an index into them. None are known of other writers' shards."""
        try:
            written = read_manifest(self.uri)
        except NotFoundError:
            return ()
        return tuple(written.classes.get("label", ()))


def _written_once(folder: Path, write: Callable[[Path], None]) -> Path:
    """A folder that is whole or absent."""
    if not folder.exists():
        draft = folder.with_name(f".{folder.name}.{os.getpid()}")
        draft.mkdir(parents=True)
        write(draft)
        draft.rename(folder)
    return folder
