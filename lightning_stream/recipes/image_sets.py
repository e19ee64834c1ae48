"""Labelled images as distributed (CIFAR-10, ImageNet, folders), converted once in parallel, then streamed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from lightning_stream.formats.hashing import hashes_to_write
from lightning_stream.recipes.cifar import Cifar10
from lightning_stream.recipes.converted_set import TRAIN, VAL, split_datasets
from lightning_stream.recipes.image_classifier import ImageData
from lightning_stream.recipes.image_folders import ImageFolders
from lightning_stream.recipes.imagenet import ImageNet
from lightning_stream.recipes.images import AugmentedImage, PlainImage, PlainPixels, ShiftedPixels
from lightning_stream.recipes.labelled_set import LabelledSet, LabelledSource

DESCRIPTION = "images.json"
_KINDS: Mapping[str, Callable[[Path, float], LabelledSource]] = {
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
) -> ImageData:
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
    images = LabelledSet.plan(given, remote, {**shards, "num_workers": conversion_workers}, DESCRIPTION)
    pixels = kind == "cifar10"
    transforms = {
        TRAIN: ShiftedPixels(margin) if pixels else AugmentedImage(image_size, smallest_crop, colour),
        VAL: PlainPixels() if pixels else PlainImage(image_size),
    }
    datasets = split_datasets(
        images.place,
        local,
        transforms,
        shuffle=shuffle,
        seed=seed,
        cache_limit=cache_limit,
        num_canonical_nodes=num_canonical_nodes,
    )
    return ImageData(
        images,
        datasets,
        global_batch_size=global_batch_size,
        eval_batch_size=eval_batch_size,
        num_workers=num_workers,
        persistent_workers=persistent_workers,
        seed=seed,
    )
