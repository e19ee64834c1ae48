"""Proof: training from shards is training from local files. The losses are equal bit for bit.

    python -m recipes.proofs.local_files                                      # 300 drawn shapes, about a minute
    python -m recipes.proofs.local_files --photos flower_photos --size 96     # a folder of class folders

1. The images are converted to shards.  2. A ResNet is trained on the streamed shards, and the order of the samples is
noted.  3. The same ResNet is trained by torch's own `DataLoader` over torchvision's `ImageFolder`, in that order. The
exit code is 1 if any loss differs.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader
from torchvision.datasets import ImageFolder
from torchvision.models import get_model
from torchvision.transforms import v2

from lightning_stream import StreamingDataLoader, StreamingDataset
from lightning_stream.convert import convert
from recipes.data.synthetic_text import captioned_shape


class Pixels:
    """Transform: resize and crop a sample's image to float[3, size, size]."""

    def __init__(self, size: int) -> None:
        steps = [v2.Resize(size), v2.CenterCrop(size), v2.PILToTensor(), v2.ToDtype(torch.float32, scale=True)]
        self._pixels = v2.Compose(steps)

    def __call__(self, sample: dict[str, Any]) -> dict[str, Any]:
        return {"image": self._pixels(sample["image"].convert("RGB")), "label": int(sample["label"])}


class Files(ImageFolder):
    """The files of class folders, as the samples that the shards have."""

    def __init__(self, folder: Path, pixels: Pixels) -> None:
        super().__init__(str(folder))
        self.pixels = pixels

    def __getitem__(self, index: int) -> dict[str, Any]:
        image, label = super().__getitem__(index)
        return self.pixels({"image": image, "label": label})


class Noted:
    """The batches of a streamed loader; appends the sample ids of each to `order`."""

    def __init__(self, loader: StreamingDataLoader) -> None:
        self.loader = loader
        self.order: list[list[int]] = []

    def __iter__(self) -> Iterator[Any]:
        for batch in self.loader:
            assert self.loader.last_batch is not None
            self.order.append(self.loader.last_batch.delivered.tolist())
            yield batch


def fit(epochs: Iterable[Iterable[Any]], num_classes: int) -> tuple[list[float], float]:
    """Train a ResNet from fixed first weights; return the loss of each step, and the images per second."""
    torch.manual_seed(1)
    model = get_model("resnet18", weights=None, num_classes=num_classes)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.002)
    losses, trained, begin = [], 0, time.perf_counter()
    for batches in epochs:
        for batch in batches:
            loss = torch.nn.functional.cross_entropy(model(batch["image"]), batch["label"])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
            trained += len(batch["label"])
    return losses, trained / (time.perf_counter() - begin)


def write_shapes(folder: Path, count: int) -> Path:
    """Write drawn shapes into class folders."""
    for number in range(count):
        jpeg, caption = captioned_shape(number)
        file = folder / caption.split()[2] / f"{number:05}.jpg"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(jpeg)
    return folder


def main(arguments: list[str] | None = None) -> int:
    """Train from both; 0 if every loss is equal bit for bit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--photos", type=Path, help="a folder of class folders of images; default: drawn shapes")
    parser.add_argument("--count", type=int, default=300, help="number of drawn shapes")
    parser.add_argument("--size", type=int, default=48, help="pixels per side")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("runs/local_files"))
    options = parser.parse_args(arguments)
    photos = options.photos or write_shapes(options.out / "shapes", options.count)
    shards = str(options.out / "shards")
    # Small shards, so that a batch is gathered from many.
    convert(str(photos), shards, compression=None, size_limit="64kb", num_workers=1, overwrite=True)
    dataset = StreamingDataset(
        remote=shards, local=str(options.out / "cache"), shuffle=True, transform=Pixels(options.size)
    )
    files = Files(photos, dataset.transform)
    file_of = {str(Path(path).relative_to(photos)): number for number, (path, _) in enumerate(files.samples)}
    ids = [file_of[dataset[number]["name"]] for number in range(dataset.size)]

    streamed = Noted(StreamingDataLoader(dataset, options.batch, num_workers=options.workers, tail="exact"))
    from_shards, shards_per_s = fit([streamed] * options.epochs, len(files.classes))
    order = [[ids[one] for one in batch] for batch in streamed.order]
    epoch = len(order) // options.epochs
    loaders = [
        DataLoader(files, batch_sampler=order[k * epoch : (k + 1) * epoch], num_workers=options.workers)
        for k in range(options.epochs)
    ]
    from_files, files_per_s = fit(loaders, len(files.classes))
    print(f"{'':22}  last loss   images/s")
    print(f"{'local files':22}  {from_files[-1]:9.6f}   {files_per_s:8.0f}")
    print(f"{'streamed from shards':22}  {from_shards[-1]:9.6f}   {shards_per_s:8.0f}")
    print(f"{len(from_shards)} losses: {'equal bit for bit' if from_shards == from_files else 'DIFFERENT'}")
    return 0 if from_shards == from_files else 1


if __name__ == "__main__":
    sys.exit(main())
