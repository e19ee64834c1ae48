"""Images with labels: class folders, archives of them, synthetic flowers, CIFAR-10 and ImageNet."""

import csv
import hashlib
import json
import os
import shutil
import tarfile
from collections.abc import Callable, Iterator
from functools import cached_property, partial
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torchvision.transforms import v2

from lightning_stream import DecodeCenterCrop, DecodeRandomCrop
from lightning_stream.convert import Inputs
from lightning_stream.errors import FormatError, NotFoundError, UnavailableError
from lightning_stream.formats.encodings.jpeg import Photo
from lightning_stream.stores import open_store
from recipes.data.base import SYNTHETIC, RecipeData
from recipes.data.synthetic import write_flowers

_FLOWERS_URL = "https://storage.googleapis.com/download.tensorflow.org/example_images/flower_photos.tgz"
_FLOWERS_SHA256 = "4c54ace7911aaffe13a365c34f650e71dd5bf1be0a58b464e5a7183e3e595d9c"
_CIFAR10 = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
_CIFAR10_FILES = {"train": [f"data_batch_{number}.bin" for number in range(1, 6)], "val": ["test_batch.bin"]}
_TRAIN_TAR, _VAL_TAR = "ILSVRC2012_img_train.tar", "ILSVRC2012_img_val.tar"
_VAL_LABELS = ("imagenet_2012_validation_synset_labels.txt", "LOC_val_solution.csv")
_IMAGENET_COLUMNS = {"image": "jpeg", "label": "int", "name": "str"}  # some of the files are PNG
_CLASSES = "classes.json"


class ImageData(RecipeData):
    """Class folders of images, streamed as ``{"image": uint8[n, 3, h, w], "label": int64[n]}``.

    `source` is ``<folder>/<class>/*.jpg``, ``<folder>/train|val/<class>/*.jpg``, a .tar or .tgz of such a folder, the
    URL of one, ``synthetic``, or ``download`` for TensorFlow's flowers. The settings are in configs/data/flowers.yaml.
    """

    def __init__(
        self, *, source: str | None = None, photos: str | None = None, source_sha256: str | None = None,
        synthetic_count: int = 1000, downloads: str = "runs/downloads", image_size: int = 64,
        crop_scale_min: float = 0.4, color_jitter: float = 0.25, **shared: Any,
    ) -> None:  # fmt: skip
        source = photos or source
        settings = {"synthetic_count": synthetic_count} if source == SYNTHETIC else {}
        val = ImageTransform(DecodeCenterCrop(image_size))
        shared = {"transforms": (augmentation(image_size, crop_scale_min, color_jitter), val), **shared}
        super().__init__(source=source, settings=settings, **shared)
        self.source_sha256, self.synthetic_count, self.downloads = source_sha256, synthetic_count, Path(downloads)

    def convert_source(self) -> None:
        """Convert class folders; the shards mix the classes."""
        folder = self.source_folder()
        has_splits = {"val_fraction": None} if (folder / "train").is_dir() else {}
        self.convert(str(folder), shuffle=True, **has_splits)

    def source_folder(self) -> Path:
        """The source as a folder: downloaded, extracted or drawn, unless that was done."""
        url, sha256 = str(self.source), self.source_sha256
        if url == SYNTHETIC:
            draw = partial(write_flowers, count=self.synthetic_count)
            return _written_once(self.downloads / f"synthetic_flowers-{self.synthetic_count}", draw)
        if url == "download":
            url, sha256 = _FLOWERS_URL, _FLOWERS_SHA256
        path = _download(url, self.downloads, sha256) if url.startswith(("http://", "https://")) else Path(url)
        if path.is_file():
            name = f"{path.name.partition('.')[0]}-{path.stat().st_size}-{path.stat().st_mtime_ns}"
            path = _written_once(self.downloads / name, partial(_extract, path))
            inside = [one for one in path.iterdir() if one.is_dir()]
            return inside[0] if len(inside) == 1 else path
        if not path.is_dir():
            raise NotFoundError(f"data.source must be a folder, an archive, a URL, synthetic or download; found {url}.")
        return path

    @cached_property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes; a label is an index into them."""
        found = self.manifest.classes.get("label")
        return tuple(found or json.loads(open_store(self.uri).read(_CLASSES)))

    @property
    def title(self) -> str:
        return "synthetic flowers, not photos" if self.source == SYNTHETIC else super().title


class Cifar10Data(ImageData):
    """CIFAR-10 from ``cifar-10-binary.tar.gz``, or the folder in it; training shifts it by up to `padding` pixels."""

    classes = _CIFAR10

    def __init__(self, *, padding: int = 4, **shared: Any) -> None:
        augment = v2.Compose([v2.RandomCrop(32, padding=padding), v2.RandomHorizontalFlip()])
        super().__init__(transforms=(ImageTransform(_as_stored, augment), ImageTransform(_as_stored)), **shared)

    def convert_source(self) -> None:
        """Convert both splits. The archive for Python is refused: it holds pickles, which run code when loaded."""
        folder = self.source_folder()
        for split, names in _CIFAR10_FILES.items():
            paths = [str(path) for name in names for path in folder.rglob(name)]
            if not paths:
                hint = "Pass cifar-10-binary.tar.gz, or the folder in it; the archive for Python holds pickles."
                raise NotFoundError(f"no {names[0]} in {self.source}. {hint}")
            self.convert(Inputs(paths, read_cifar10), split)


class ImageNetData(ImageData):
    """ImageNet (ILSVRC2012): train/ and val/, or its two tars, which are read in place, and the val images' labels."""

    def convert_source(self) -> None:
        """Convert both splits; the shards mix the classes."""
        folder = self.source_folder()
        if (folder / "train").is_dir():
            super().convert_source()
            return
        train_tar = folder / _TRAIN_TAR
        if not train_tar.is_file():
            raise NotFoundError(f"ImageNet is a folder with train/ and val/, or {_TRAIN_TAR}; {folder} has neither.")
        with tarfile.open(train_tar, "r:") as tar:
            members = sorted((each.name.removesuffix(".tar"), each.offset_data) for each in tar if each.isreg())
        labels = {synset: label for label, (synset, _) in enumerate(members)}
        inputs = [(str(train_tar), synset, offset, labels[synset]) for synset, offset in members]
        self.convert(Inputs(inputs, read_synset), "train", columns=_IMAGENET_COLUMNS, shuffle=True)
        label_val = partial(labeled, synsets=val_synsets(folder), labels=labels)
        self.convert(str(folder / _VAL_TAR), "val", columns=_IMAGENET_COLUMNS, kind="webdataset", transform=label_val)
        open_store(self.uri).put(_CLASSES, json.dumps([*labels]).encode())


class ImageTransform:
    """A sample's image as a decoded and changed tensor, uint8[3, h, w], with its label."""

    def __init__(
        self, decode: Callable[[dict[str, Any]], dict[str, Any]], change: Callable[[Tensor], Tensor] | None = None
    ) -> None:
        self.decode, self.change = decode, change

    def __call__(self, sample: dict[str, Any]) -> dict[str, Any]:
        image = self.decode(sample)["image"]
        return {"image": image if self.change is None else self.change(image), "label": sample["label"]}


def augmentation(size: int, crop_scale_min: float, jitter: float) -> ImageTransform:
    """Random crop, mirror and colors."""
    crop = DecodeRandomCrop(size, scale=(crop_scale_min, 1.0))
    return ImageTransform(crop, v2.ColorJitter(jitter, jitter, jitter))


def as_tensor(image: Any) -> Tensor:
    """An image of Pillow of any mode, an image file's bytes or an array uint8[3, h, w] as RGB, uint8[3, h, w]."""
    if isinstance(image, np.ndarray):
        return torch.from_numpy(image.copy())
    return torch.from_numpy(Photo(image).pixels()).permute(2, 0, 1)


def _as_stored(sample: dict[str, Any]) -> dict[str, Any]:
    return {"image": as_tensor(sample["image"])}


def read_cifar10(path: str) -> Iterator[dict[str, Any]]:
    """The samples of a binary batch: a byte of label, then 3 x 32 x 32 bytes of pixels."""
    data = np.fromfile(path, np.uint8)
    if not data.size or data.size % 3073:
        raise FormatError(f"a batch has samples of 3,073 bytes; {path} has {data.size:,} bytes. Fetch it again.")
    for row in data.reshape(-1, 3073):
        yield {"image": row[1:].reshape(3, 32, 32), "label": int(row[0])}


def read_synset(where: tuple[str, str, int, int]) -> Iterator[dict[str, Any]]:
    """The samples of a tar within ImageNet's train tar: (outer tar, synset, offset in bytes, label)."""
    outer, synset, offset, label = where
    with Path(outer).open("rb") as file:
        file.seek(offset)
        with tarfile.open(fileobj=file, mode="r|") as tar:
            for member in tar:
                if (held := tar.extractfile(member)) is not None:
                    yield {"image": held.read(), "label": label, "name": f"{synset}/{member.name}"}


def labeled(row: dict[str, Any], synsets: dict[str, str], labels: dict[str, int]) -> dict[str, Any]:
    """An image of the val tar, with the label of its synset."""
    name = PurePosixPath(row["__key__"]).name
    return {"image": row["jpeg"], "label": labels[synsets[name]], "name": f"{synsets[name]}/{name}.JPEG"}


def val_synsets(folder: Path) -> dict[str, str]:
    """The synset of each image in ImageNet's val tar, from one of two files: the tar does not have them."""
    lines, table = (folder / name for name in _VAL_LABELS)
    if lines.exists():
        return {f"ILSVRC2012_val_{n:08d}": synset for n, synset in enumerate(lines.read_text().split(), 1)}
    if table.exists():
        with table.open(newline="") as file:
            return {row["ImageId"]: row["PredictionString"].split()[0] for row in csv.DictReader(file)}
    raise NotFoundError(f"the labels of the val images are in {' or '.join(_VAL_LABELS)}; {folder} has neither.")


def _download(url: str, folder: Path, sha256: str | None) -> Path:
    path = folder / f"{hashlib.sha256(url.encode()).hexdigest()[:8]}-{PurePosixPath(url.partition('?')[0]).name}"
    folder.mkdir(parents=True, exist_ok=True)
    try:
        if not path.exists():
            torch.hub.download_url_to_file(url, str(path), hash_prefix=sha256)
    except (OSError, RuntimeError) as error:  # RuntimeError: another digest than data.source_sha256
        advice = "Pass data.source=<path of the archive>, or use data.source=synthetic."
        raise UnavailableError(f"{url} could not be downloaded: {error}. {advice}") from error
    return path


def _extract(archive: Path, folder: Path) -> None:
    try:
        with tarfile.open(archive) as tar:
            tar.extractall(folder, filter="data")
    except (tarfile.TarError, EOFError) as error:
        raise FormatError(f"{archive} must be a whole .tar or .tgz; reading it failed: {error}.") from error


def _written_once(folder: Path, write: Callable[[Path], None]) -> Path:
    """A folder that is whole or absent."""
    if not folder.exists():
        draft = folder.with_name(f".{folder.name}.{os.getpid()}")
        draft.mkdir(parents=True)
        try:
            write(draft)
            draft.rename(folder)
        finally:
            shutil.rmtree(draft, ignore_errors=True)
    return folder
