"""Photo rows (JPEG, class) from local shards: decoded to pixels, and as random parts of 224 x 224.

python benchmarks/read_photos.py [--only 500x375]      photos from $LIGHTNING_STREAM_SHARED/data or ../shared/data

The first table is of photos as they are. The others are of photos of one size, made of these: up to 640 x 480 one of
them, beyond that several side by side, so that they are as detailed as photos of cameras (1.5 to 2 bits a pixel).
From them come batches of uint8[n, 3, 224, 224], parts as torchvision's ``RandomResizedCrop(224)`` draws them, mirrored
at random: with the decoders of this package, and with torchvision's transforms on Pillow's images and on tensors.
"""

from __future__ import annotations

import io
import itertools
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import loaders
import numpy as np
from frame import Clock, Group, Job, Result, main
from loaders import PHOTO, photos

TILE = (640, 480)
SIZES = {(320, 240): 600, (500, 375): 400, (1024, 768): 150, (4000, 3000): 18}  # the photos of an epoch


def write(job: Job, images: Iterable[bytes]) -> None:
    from lightning_stream import MDSWriter

    with MDSWriter(out=job.folder / "photos", columns=PHOTO, size_limit="16mb") as writer:
        for label, image in enumerate(images):
            writer.write({"image": image, "label": label})


def prepare(job: Job) -> None:
    write(job, (path.read_bytes() for path in photos(job, job.sizes.photos)))


def prepare_size(job: Job, size: tuple[int, int]) -> None:
    files = photos(job, job.sizes.photos)
    shuffled = itertools.cycle(np.random.default_rng(1).permutation(len(files)).tolist())
    chosen = (files[k] for k in shuffled)
    write(job, (photo_of(size, chosen) for _ in range(min(SIZES[size], job.sizes.photos))))


def photo_of(size: tuple[int, int], files: Iterator[Path]) -> bytes:
    from PIL import Image, ImageOps

    image = Image.new("RGB", size)
    tile = (min(size[0], TILE[0]), min(size[1], TILE[1]))
    for x in range(0, size[0], tile[0]):
        for y in range(0, size[1], tile[1]):
            photo = Image.open(next(files)).convert("RGB")
            image.paste(ImageOps.fit(photo, tile, Image.Resampling.BICUBIC), (x, y))
    file = io.BytesIO()
    image.save(file, "JPEG", quality=90)
    return file.getvalue()


def decoded(job: Job, **options: Any) -> Result:
    from lightning_stream import decode_jpeg

    return loaders.read(loaders.ours(job, "photos", 64, decoders={"image": decode_jpeg}, **options))


def bare_decoder(job: Job) -> Result:
    """The floor: the same decoder over bytes in memory."""
    from lightning_stream import decode_jpeg

    files = [path.read_bytes() for path in photos(job, job.sizes.photos)]
    decode_jpeg(files[0])
    clock = Clock()
    for data in files:
        decode_jpeg(data)
    return clock.stop(len(files))


def mosaic(job: Job) -> Result:
    dataset = loaders.mosaic(job, "photos", 64).dataset
    clock = Clock()
    return clock.stop(sum(np.asarray(sample["image"].convert("RGB")).ndim // 3 for sample in dataset))


def litdata(job: Job) -> Result:
    from PIL import Image

    loaders.write_litdata(job, "photos", decoders={"image": bytes})
    dataset = loaders.litdata(job, "photos", 64).dataset
    clock = Clock()
    images = (Image.open(io.BytesIO(sample["image"])).convert("RGB") for sample in dataset)
    return clock.stop(sum(np.asarray(image).ndim // 3 for image in images))


def parts(job: Job, batch: int, decoder: str = "auto") -> Result:
    from lightning_stream import DecodeRandomCrop

    change = DecodeRandomCrop(224, decoder=decoder)
    return epoch(loaders.ours(job, "photos", batch, transform=change))


def parts_mosaic(job: Job, batch: int, as_tensors: bool = False) -> Result:
    from streaming import StreamingDataset
    from torch.utils.data import DataLoader
    from torchvision.transforms import v2

    to_tensor = v2.PILToTensor()
    steps = [v2.RandomResizedCrop(224, antialias=True), v2.RandomHorizontalFlip()]
    change = v2.Compose([to_tensor, *steps] if as_tensors else [*steps, to_tensor])

    class Photos(StreamingDataset):
        def __getitem__(self, at: Any) -> Any:
            sample = super().__getitem__(at)
            return {"image": change(sample["image"].convert("RGB")), "label": sample["label"]}

    dataset = Photos(local=str(job.folder / "photos"), shuffle=True, batch_size=batch, shuffle_algo="py1e")
    return epoch(DataLoader(dataset, batch))


def epoch(loader: Any) -> Result:
    batches = iter(loader)
    assert next(batches)["image"].shape[1:] == (3, 224, 224)  # imports and first pages are not measured
    return loaders.read(batches)


if __name__ == "__main__":
    readers = {
        "ours": decoded,
        "ours, two threads": partial(decoded, workers=2, loading={"workers": "threads"}),
        "ours, two workers": partial(decoded, workers=2),
        "bare decoder": bare_decoder,
        "mosaic": mosaic,
        "litdata": litdata,
    }
    groups = [Group("decoded to pixels", readers, prepare)]
    for size, count in SIZES.items():
        batch = min(64, count // 6)
        cases = {
            "ours": partial(parts, batch=batch),
            "ours, Pillow": partial(parts, batch=batch, decoder="pillow"),
            "mosaic, images": partial(parts_mosaic, batch=batch),
            "mosaic, tensors": partial(parts_mosaic, batch=batch, as_tensors=True),
        }
        title = f"parts of 224 x 224 of photos of {size[0]}x{size[1]}"
        groups.append(Group(title, cases, partial(prepare_size, size=size)))
    main(__doc__, groups, photos=(1000, 66))
