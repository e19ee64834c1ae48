"""Labelled images as distributed (CIFAR-10, ImageNet, folders), converted once in parallel, then streamed."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from lightning_stream.convert import Inputs, convert
from lightning_stream.errors import FormatError
from lightning_stream.formats.hashing import hashes_to_write
from lightning_stream.recipes.cifar import Cifar10
from lightning_stream.recipes.classifier import ImageData, recognised
from lightning_stream.recipes.image_folders import ImageFolders
from lightning_stream.recipes.imagenet import ImageNet
from lightning_stream.recipes.images import AugmentedImage, PlainImage, PlainPixels, ShiftedPixels
from lightning_stream.recipes.once import describe
from lightning_stream.recipes.task import TRAIN, VAL
from lightning_stream.storage import open_store

DESCRIPTION = "images.json"
_VERSION = 1
Sample = dict[str, Any]


class ImageSource(Protocol):
    """Labelled images in a ``train`` and a ``val`` split, in pieces that are read in parallel. Picklable."""

    @property
    def title(self) -> str:
        """What it is, for people."""

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes; a label is an index into them."""

    @property
    def columns(self) -> Mapping[str, str]:
        """Encodings of a sample's columns: ``image``, ``label``, perhaps ``name``."""

    def fingerprint(self) -> str:
        """Of all that the samples depend on."""

    def pieces(self, split: str) -> Sequence[Any]:
        """What a split is made of, in its order."""

    def read(self, piece: Any) -> Iterable[Sample]:
        """The samples of a piece."""


@dataclass(frozen=True)
class ImageSetDescription:
    """What a converted set holds, as kept beside it."""

    title: str
    classes: tuple[str, ...]
    num_train: int
    num_val: int

    @classmethod
    def from_bytes(cls, data: bytes) -> ImageSetDescription:
        """Read it back."""
        held = json.loads(data)
        return cls(**{**held, "classes": tuple(held["classes"])})

    def to_bytes(self) -> bytes:
        """As JSON."""
        return json.dumps(asdict(self), indent=1).encode()


@dataclass(frozen=True)
class ImageSet:
    """A source under a config: where its shards belong, and how they come to be there.

    Attributes:
        source: The images; None where the shards are there already.
        place: Folder or URL of this very set.
        shards: Arguments of `convert`: compression, hashes, size_limit, num_workers.
    """

    source: ImageSource | None
    place: str
    shards: Mapping[str, Any]

    @classmethod
    def plan(cls, source: ImageSource | None, remote: str, shards: Mapping[str, Any]) -> ImageSet:
        """The set in a place of its own under `remote`; without a source, `remote` is the place."""
        if source is None:
            return cls(None, remote.rstrip("/"), shards)
        settings = {
            name: value for name, value in shards.items() if name != "num_workers"
        }  # any number writes the same
        told = json.dumps([_VERSION, source.fingerprint(), dict(source.columns), settings], sort_keys=True)
        return cls(source, f"{remote.rstrip('/')}/{hashlib.sha256(told.encode()).hexdigest()[:16]}", shards)

    @property
    def fingerprint(self) -> str:
        """What tells this set from others."""
        return self.place.rpartition("/")[2]

    def describe(self) -> ImageSetDescription | None:
        """What the converted set holds; None where there is none yet."""
        return describe(self.place, DESCRIPTION, ImageSetDescription.from_bytes)

    def run(self) -> ImageSetDescription:
        """Convert, unless it was done; what was cut short is gone on with.

        Raises:
            FormatError: The source is not what it should be; or there is none, and no shards either.
        """
        if (found := self.describe()) is not None:
            return found
        if self.source is None:
            raise FormatError(
                f"without data.source, data.remote holds a converted set; there is none at {self.place}. Set "
                "data.source to the images, or data.remote to the folder that an earlier run named."
            )
        counts = {split: self._convert(self.source, split) for split in (TRAIN, VAL)}
        done = ImageSetDescription(self.source.title, self.source.classes, counts[TRAIN], counts[VAL])
        open_store(self.place).put(DESCRIPTION, done.to_bytes())
        return done

    def _convert(self, source: ImageSource, split: str) -> int:
        inputs = Inputs(source.pieces(split), source.read, stamp=self.fingerprint)
        done = convert(
            inputs,
            f"{self.place}/{split}",
            columns=source.columns,
            progress_bar=sys.stderr.isatty(),
            **self.shards,
        )
        return done.total


class ImageSetData(ImageData):
    """A set of images that is converted once, then streamed.

    Args:
        images: Makes the shards that `train` and `val` read.
        datasets: Arguments of the ``train`` and ``val`` datasets.
        **settings: As in `StreamingDataModule`.
    """

    def __init__(self, images: ImageSet, datasets: Mapping[str, Mapping[str, Any]], **settings: Any) -> None:
        super().__init__(datasets[TRAIN], datasets[VAL], prepare=self._convert, **settings)
        self.images = images

    @property
    def description(self) -> ImageSetDescription:
        """What the converted set holds; converts it first where that was not done."""
        return self.images.run()

    @property
    def place(self) -> str:
        """Folder or URL of the shards."""
        return self.images.place

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes."""
        return self.description.classes

    @property
    def source(self) -> str:
        """Where the pictures come from."""
        return self.description.title

    def notes(self, history: Mapping[int, Mapping[str, float]]) -> tuple[str, ...]:
        """How many, how well they are told apart, and what they are."""
        held = self.description
        return (recognised(held.num_train, held.num_val, len(held.classes), history), f"It is {held.title}.")

    def _convert(self) -> None:
        known = self.images.describe() is not None
        done = self.images.run()
        told = f"{done.num_train} to train on and {done.num_val} held out, {done.title}"
        print(f"{'Found' if known else 'Converted'}: {told}, in {self.place}.", file=sys.stderr)


_KINDS: Mapping[str, Callable[[Path, float], ImageSource]] = {
    "cifar10": lambda path, _: Cifar10(path),
    "imagenet": lambda path, _: ImageNet(path),
    "folders": ImageFolders,
}


def image_data(
    *,
    kind: str = "folders",
    source: str | None = None,
    held_out: float = 0.1,
    conversion_workers: int | None = None,
    remote: str = "runs/shards/images",
    local: str | None = "runs/cache/images",
    compression: str | None = None,
    hashes: Sequence[str] | None = None,
    size_limit: int | str = "64mb",
    cache_limit: int | str | None = None,
    num_canonical_nodes: int | None = None,
    image_size: int = 224,
    smallest_crop: float = 0.08,
    colour: float = 0.0,
    margin: int = 4,
    shuffle: bool = True,
    seed: int = 1,
    global_batch_size: int = 256,
    eval_batch_size: int = 64,
    num_workers: int = 4,
    persistent_workers: bool = True,
) -> ImageSetData:
    """Streamed images: converted into shards under `remote`, read back through the cache in `local`.

    Args:
        kind: ``"cifar10"``, ``"imagenet"`` or ``"folders"``: what `source` is.
        source: The archive or folder as distributed, see `Cifar10`, `ImageNet` and `ImageFolders`; None where `remote`
            itself holds a converted set.
        held_out: Share of each class that is held out, of folders without a ``val``.
        conversion_workers: Processes that convert; None for one per processor.
        remote: Folder or URL for the shards.
        local: Folder for the cache; None for the default one.
        compression, hashes, size_limit: Of the shards.
        cache_limit: Bytes that the cache may hold, e.g. ``"100gb"``.
        num_canonical_nodes: See `StreamingDataset`; None derives it from the global batch.
        image_size: Pixels to a side that the network sees, where the pictures are files.
        smallest_crop, colour: Of the augmentation of files, see `AugmentedImage`.
        margin: Of the augmentation of pixels, see `ShiftedPixels`.
        shuffle: Whether samples are trained on in a shuffled order.
        seed: Of the order and the augmentation.
        global_batch_size: Samples of an optimizer step over all devices.
        eval_batch_size: Samples per device in validation.
        num_workers: Processes per device that read and decode; 0 does so between steps.
        persistent_workers: Whether they live on from epoch to epoch.

    Raises:
        ValueError: An unknown kind.
    """
    if kind not in _KINDS:
        raise ValueError(f"kind must be one of {', '.join(_KINDS)}; found {kind!r}.")
    given = None if source is None else _KINDS[kind](Path(source).expanduser().absolute(), held_out)
    shards = {"compression": compression, "hashes": hashes_to_write(hashes), "size_limit": size_limit}
    images = ImageSet.plan(given, remote, {**shards, "num_workers": conversion_workers})
    cache = f"{local}/{images.fingerprint}" if local else None
    pixels = kind == "cifar10"
    transforms = {
        TRAIN: ShiftedPixels(margin) if pixels else AugmentedImage(image_size, smallest_crop, colour),
        VAL: PlainPixels() if pixels else PlainImage(image_size),
    }
    datasets = {
        split: {
            "remote": f"{images.place}/{split}",
            "local": f"{cache}/{split}" if cache else None,
            "cache_limit": cache_limit,
            "num_canonical_nodes": num_canonical_nodes,
            "shuffle": shuffle and split == TRAIN,
            "shuffle_seed": seed,
            "transform": transform,
        }
        for split, transform in transforms.items()
    }
    return ImageSetData(
        images,
        datasets,
        global_batch_size=global_batch_size,
        eval_batch_size=eval_batch_size,
        num_workers=num_workers,
        persistent_workers=persistent_workers and num_workers > 0,
        seed_steps=seed,
    )
