"""The same photos, shuffled, from shards and from local files: augmented for training, and as bytes alone.

PYTHONPATH=. python benchmarks/shards_or_files.py      photos from $LIGHTNING_STREAM_SHARED/data or ../shared/data

One process reads one epoch in batches of 32. ``shards`` is this package's loader over shards in a local folder, read in
place; ``files`` is torch's own DataLoader over a list of files, in a random order. Augmentation is that of the flowers:
a random crop to 96 pixels, mirrored and recoloured. ``..._bytes`` neither decodes nor augments: what the reading itself
takes. All files are in the page cache.
"""

from __future__ import annotations

from io import BytesIO
from pathlib import Path
from typing import Any

from PIL import Image
from side_by_side import Clock, main
from write_photos import COLUMNS, photos

BATCH, SIZE, MOST = 32, 96, 1000


def prepare(folder: Path) -> None:
    from lightning_stream import MDSWriter

    if not (folder / "mds" / "index.json").exists():
        with MDSWriter(out=folder / "mds", columns=COLUMNS, size_limit="16mb") as writer:
            for path, label in photos()[:MOST]:
                writer.write({"image": path.read_bytes(), "label": label})


class Files:
    """A list of photos, as a torch dataset."""

    def __init__(self, transform: Any) -> None:
        self.photos = photos()[:MOST]
        self.transform = transform

    def __len__(self) -> int:
        return len(self.photos)

    def __getitem__(self, index: int) -> dict[str, Any]:
        path, label = self.photos[index]
        data = path.read_bytes()
        image = data if self.transform is None else Image.open(BytesIO(data))
        sample = {"image": image, "label": label}
        return sample if self.transform is None else self.transform(sample)


def _augmented() -> Any:
    from recipes.data.images import augmentation

    return augmentation(SIZE, crop_scale_min=0.4, jitter=0.25)


def _from_files(transform: Any) -> dict:
    from torch.utils.data import DataLoader

    collate = None if transform is not None else list
    loader = DataLoader(Files(transform), BATCH, shuffle=True, collate_fn=collate)
    return _epoch(loader)


def _from_shards(folder: Path, transform: Any) -> dict:
    from lightning_stream import StreamingDataLoader, StreamingDataset

    decoders = None if transform is not None else {"image": bytes}
    dataset = StreamingDataset(remote=folder / "mds", shuffle=True, transform=transform, decoders=decoders)
    return _epoch(StreamingDataLoader(dataset, BATCH, tail="exact"))


def _epoch(loader: Any) -> dict:
    for _ in loader:  # imports, open files and the page cache are not what is measured
        pass
    clock, count = Clock(), 0
    for batch in loader:
        count += len(batch["label"] if isinstance(batch, dict) else batch)
    return clock.stop(count)


def shards(folder: Path) -> dict:
    return _from_shards(folder, _augmented())


def files(_: Path) -> dict:
    return _from_files(_augmented())


def shards_bytes(folder: Path) -> dict:
    return _from_shards(folder, None)


def files_bytes(_: Path) -> dict:
    return _from_files(None)


if __name__ == "__main__":
    main(
        __file__, {"shards": shards, "files": files, "shards_bytes": shards_bytes, "files_bytes": files_bytes}, prepare
    )
