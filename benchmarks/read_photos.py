"""Photo rows (JPEG, class) in one process, from local shards: decoded to pixels, and as random parts of 224 x 224.

python benchmarks/read_photos.py [--rounds 3]      photos from $LIGHTNING_STREAM_SHARED/data or ../shared/data

The first table is of 1,000 photos as they are. The others are of photos of one size, made of these: up to 640 x 480 one
of them, beyond that several side by side, so that they are as detailed as photos of cameras (1.5 to 2 bits a pixel).
From them come batches of uint8[n, 3, 224, 224], parts as torchvision's ``RandomResizedCrop(224)`` draws them, mirrored
at random: with the decoders of this package, and with torchvision's transforms on Pillow's images and on tensors.
"""

from __future__ import annotations

import io
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from side_by_side import Clock, main
from write_photos import COLUMNS, photos

BATCH = 64
SIZES = {(320, 240): 600, (500, 375): 400, (1024, 768): 150, (4000, 3000): 18}  # number of photos
TILE = (640, 480)


def prepare(folder: Path) -> None:
    from lightning_stream import MDSWriter

    if not (folder / "mds" / "index.json").exists():
        with MDSWriter(out=folder / "mds", columns=COLUMNS, size_limit="16mb") as writer:
            for path, label in photos()[:1000]:
                writer.write({"image": path.read_bytes(), "label": label})


def prepare_size(folder: Path, size: tuple[int, int]) -> None:
    from PIL import Image, ImageOps

    from lightning_stream import MDSWriter

    if (folder / "x".join(map(str, size)) / "index.json").exists():
        return
    found = [path for path, _ in photos()]
    numbers = np.random.default_rng(1).permutation(len(found)).tolist() * 4
    tile = (min(size[0], TILE[0]), min(size[1], TILE[1]))
    with MDSWriter(out=folder / "x".join(map(str, size)), columns=COLUMNS, size_limit="16mb") as writer:
        for label in range(SIZES[size]):
            image = Image.new("RGB", size)
            for x in range(0, size[0], tile[0]):
                for y in range(0, size[1], tile[1]):
                    photo = Image.open(found[numbers.pop()]).convert("RGB")
                    image.paste(ImageOps.fit(photo, tile, Image.Resampling.BICUBIC), (x, y))
            out = io.BytesIO()
            image.save(out, "JPEG", quality=90)
            writer.write({"image": out.getvalue(), "label": label})


def _epoch(loader: Any) -> dict:
    batches = iter(loader)
    next(batches)  # imports and first pages are not what is measured
    clock, count = Clock(), 0
    for batch in batches:
        assert batch["image"].shape[1:] == (3, 224, 224)
        count += len(batch["image"])
    return clock.stop(count)


def _parts(folder: Path, size: tuple[int, int], transform: Any, **options: Any) -> dict:
    from lightning_stream import StreamingDataLoader, StreamingDataset

    dataset = StreamingDataset(local=folder / "x".join(map(str, size)), shuffle=True, transform=transform)
    return _epoch(StreamingDataLoader(dataset, min(BATCH, SIZES[size] // 6), **options))


def parts(folder: Path, size: tuple[int, int], decoder: str = "auto", **options: Any) -> dict:
    from lightning_stream import DecodeRandomCrop

    return _parts(folder, size, DecodeRandomCrop(224, decoder=decoder), **options)


def _torchvision(as_tensors: bool) -> Any:
    from torchvision.transforms import v2

    to_tensor, steps = v2.PILToTensor(), [v2.RandomResizedCrop(224, antialias=True), v2.RandomHorizontalFlip()]
    change = v2.Compose([to_tensor, *steps] if as_tensors else [*steps, to_tensor])
    return lambda sample: {"image": change(sample["image"].convert("RGB")), "label": sample["label"]}


def parts_torchvision(folder: Path, size: tuple[int, int]) -> dict:
    return _parts(folder, size, _torchvision(as_tensors=True))


def parts_mosaic(folder: Path, size: tuple[int, int], as_tensors: bool) -> dict:
    from streaming import StreamingDataLoader, StreamingDataset

    batch_size = min(BATCH, SIZES[size] // 6)

    class Photos(StreamingDataset):
        change = staticmethod(_torchvision(as_tensors))

        def __getitem__(self, at: Any) -> Any:
            return self.change(super().__getitem__(at))

    local = str(folder / "x".join(map(str, size)))
    dataset = Photos(local=local, shuffle=True, batch_size=batch_size, shuffle_algo="py1e")
    return _epoch(StreamingDataLoader(dataset, batch_size=batch_size))


def bare_decoder(_: Path) -> dict:
    """The floor: the same decoder over bytes in memory."""
    from lightning_stream.formats.encodings.jpeg import decode_jpeg

    files = [path.read_bytes() for path, _ in photos()[:1000]]
    decode_jpeg(files[0])
    clock = Clock()
    for data in files:
        decode_jpeg(data)
    return clock.stop(len(files))


def _ours(folder: Path, decoders: dict) -> dict:
    from lightning_stream.formats.index import Index
    from lightning_stream.formats.mds.gather import gather
    from lightning_stream.formats.shard import open_shard

    index = Index.from_file(folder / "mds" / "index.json")
    shards = [open_shard(index.entry(k), folder / "mds", decoders=decoders) for k in range(len(index))]
    starts = np.concatenate([[0], np.cumsum(index.shard_sizes)])
    order = np.random.default_rng(1).permutation(index.num_samples)
    clock, count = Clock(), 0
    for k in range(0, len(order), BATCH):
        ids = order[k : k + BATCH]
        which = np.searchsorted(starts, ids, side="right") - 1
        images = gather(shards, which, ids - starts[which])["image"]
        count += sum(
            np.asarray(image.convert("RGB") if hasattr(image, "convert") else image).ndim == 3 for image in images
        )
    return clock.stop(count)


def ours(folder: Path) -> dict:
    from lightning_stream.formats.encodings.jpeg import decode_jpeg

    return _ours(folder, {"image": decode_jpeg})


def ours_scaled(folder: Path) -> dict:
    from lightning_stream.formats.encodings.jpeg import decode_jpeg

    return _ours(folder, {"image": lambda data: decode_jpeg(data, 160, 160)})


def ours_pillow(folder: Path) -> dict:
    return _ours(folder, {})


def by_loader(folder: Path, **workers: Any) -> dict:
    from lightning_stream import StreamingDataLoader, StreamingDataset
    from lightning_stream.formats.encodings.jpeg import decode_jpeg

    dataset = StreamingDataset(local=str(folder / "mds"), shuffle=True, decoders={"image": decode_jpeg})
    loader = StreamingDataLoader(dataset, BATCH, **workers)
    clock = Clock()
    return clock.stop(sum(len(batch["image"]) for _ in range(4) for batch in loader))


def mosaic(folder: Path) -> dict:
    from streaming import StreamingDataset

    dataset = StreamingDataset(local=str(folder / "mds"), shuffle=True, batch_size=BATCH, shuffle_algo="py1e")
    clock, count = Clock(), 0
    for sample in dataset:
        count += np.asarray(sample["image"].convert("RGB")).ndim == 3
    return clock.stop(int(count))


def litdata(folder: Path) -> dict:
    import litdata
    from PIL import Image

    if not (folder / "litdata" / "index.json").exists():
        writer = litdata.streaming.Cache(str(folder / "litdata"), chunk_bytes=1 << 24)
        for k, (path, label) in enumerate(photos()[:1000]):
            writer[k] = {"image": path.read_bytes(), "label": label}
        writer.done()
        writer.merge()
    dataset = litdata.StreamingDataset(str(folder / "litdata"), shuffle=True)
    clock, count = Clock(), 0
    for sample in dataset:
        count += np.asarray(Image.open(io.BytesIO(sample["image"])).convert("RGB")).ndim == 3
    return clock.stop(int(count))


if __name__ == "__main__":
    contenders = {
        "ours": ours,
        "bare decoder": bare_decoder,
        "ours, scaled": ours_scaled,
        "ours, PIL images": ours_pillow,
        "loader": by_loader,
        "loader, two threads": partial(by_loader, num_workers=2, workers="threads"),
        "loader, two workers": partial(by_loader, num_workers=2),
        "mosaic": mosaic,
        "litdata": litdata,
    }
    main(__file__, contenders, prepare, "decoded to pixels")
    for width, height in SIZES:
        name, size = f"{width}x{height}", (width, height)
        contenders = {
            f"ours {name}": partial(parts, size=size),
            f"ours, Pillow {name}": partial(parts, size=size, decoder="pillow"),
            f"ours, two threads {name}": partial(parts, size=size, num_workers=2, workers="threads"),
            f"ours, two processes {name}": partial(parts, size=size, num_workers=2),
            f"ours, torchvision {name}": partial(parts_torchvision, size=size),
            f"mosaic {name}": partial(parts_mosaic, size=size, as_tensors=False),
            f"mosaic, tensors {name}": partial(parts_mosaic, size=size, as_tensors=True),
        }
        main(__file__, contenders, partial(prepare_size, size=size), f"\nparts of 224 x 224 of photos of {name}")
