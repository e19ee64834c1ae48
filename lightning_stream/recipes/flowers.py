"""The flowers, from any source, as streamed training and validation data for Lightning."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from lightning_stream.formats.hashing import hashes_to_write
from lightning_stream.recipes.converted_set import TRAIN, VAL, split_datasets
from lightning_stream.recipes.image_classifier import ImageData
from lightning_stream.recipes.images import AugmentedImage, PlainImage
from lightning_stream.recipes.labelled_data import Described
from lightning_stream.recipes.photo_conversion import Conversion, ConversionConfig
from lightning_stream.recipes.photos import photo_source


class PhotoData(ImageData):
    """Photos, or drawings in their place.

    Args:
        conversion: Makes the shards that `datasets` read.
        datasets: Arguments of the ``train`` and ``val`` datasets, see `split_datasets`.
        **settings: As in `TaskData`.
    """

    def __init__(self, conversion: Conversion, datasets: Mapping[str, Mapping[str, Any]], **settings: Any) -> None:
        super().__init__(conversion, datasets, **settings)
        self.photos = conversion

    @property
    def kind(self) -> str:
        """Drawings are no photos."""
        return "drawings (not photos)" if self.photos.source.drawn else "photos"

    def notes(self, history: Mapping[int, Mapping[str, float]]) -> tuple[str, ...]:
        """How many, how well they are told apart, and what they are."""
        learnt, _ = super().notes(history)
        pictures = "drawings made by this package, not photos" if self.photos.source.drawn else self.source
        return learnt, f"The pictures are {pictures}."

    def told(self, description: Described) -> str:
        """What the set holds, and which files could not be decoded."""
        told = super().told(description)
        unreadable = self.photos.run().description.unreadable
        if unreadable:
            first = ", ".join(unreadable[:3])
            told += f"; {len(unreadable)} files could not be decoded and were left out ({first} ...)"
        return told


def flower_data(
    *,
    photos: str = "drawn",
    photos_sha256: str | None = None,
    drawn_count: int = 1000,
    drawn_seed: int = 1,
    downloads: str = "runs/downloads",
    held_out: float = 0.1,
    convert: Literal["local", "spark"] = "local",
    remote: str = "runs/shards/flowers",
    local: str | None = "runs/cache/flowers",
    compression: str | None = "zstd",
    hashes: Sequence[str] | None = None,
    size_limit: int | str = "512kb",
    image_size: int = 64,
    smallest_crop: float = 0.4,
    colour: float = 0.25,
    seed: int = 1,
    cache_limit: int | str | None = None,
    num_canonical_nodes: int | None = None,
    global_batch_size: int = 16,
    eval_batch_size: int = 64,
    num_workers: int = 1,
    persistent_workers: bool = True,
) -> PhotoData:
    """Streamed flowers: converted into shards under `remote`, read back through the cache in `local`.

    Args:
        photos: ``"drawn"`` (drawings by this package), a folder of class folders, a ``.tgz`` of one, or ``"download"``.
        photos_sha256: What the digest of an archive must be.
        drawn_count, drawn_seed: How many drawings, and which.
        downloads: Where a downloaded archive is kept.
        held_out: Share of each class that is never trained on.
        convert: Who makes the shards: ``"local"``, this process; or ``"spark"``, the executors of the active Spark
            session, or of one on this machine.
        remote: Folder or URL for the shards.
        local: Folder for the cache; None for the default one.
        compression, hashes, size_limit: Of the shards.
        image_size: Pixels to a side that the network sees.
        smallest_crop, colour: Of the augmentation, see `AugmentedImage`.
        seed: Of the order, the augmentation and dropout.
        cache_limit: Bytes that the cache may hold, e.g. ``"10gb"``.
        num_canonical_nodes: See `StreamingDataset`; None derives it from the global batch.
        global_batch_size: Samples of an optimizer step over all devices.
        eval_batch_size: Samples per device in validation.
        num_workers: Processes per device that read and decode; 0 does so between steps.
        persistent_workers: Whether they live on from epoch to epoch.
    """
    source = photo_source(photos, count=drawn_count, seed=drawn_seed, sha256=photos_sha256, downloads=downloads)
    config = ConversionConfig(compression, hashes_to_write(hashes), size_limit, held_out, convert)
    conversion = Conversion.plan(source, remote, config)
    datasets = split_datasets(
        conversion.place,
        local,
        {TRAIN: AugmentedImage(image_size, smallest_crop, colour), VAL: PlainImage(image_size)},
        seed=seed,
        cache_limit=cache_limit,
        num_canonical_nodes=num_canonical_nodes,
    )
    return PhotoData(
        conversion,
        datasets,
        global_batch_size=global_batch_size,
        eval_batch_size=eval_batch_size,
        num_workers=num_workers,
        persistent_workers=persistent_workers,
        seed=seed,
    )
