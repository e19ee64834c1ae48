"""Proof: training from shards is training from local files. The losses are equal bit for bit.

    python -m recipes.proofs.local_files                                      # 300 drawn flowers
    python -m recipes.proofs.local_files --photos flower_photos --size 96     # a folder of class folders

1. The images are converted to shards.  2. A ResNet is trained on the streamed shards, and the order of the samples is
noted.  3. The same ResNet is trained by torch's own `DataLoader` over torchvision's `ImageFolder`, in that order. The
exit code is 1 if any loss differs.
"""

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
from recipes.data.images import as_tensor
from recipes.data.synthetic import write_flowers


class Pixels:
    """Transform: float[3, size, size] of a file's image; of a sample of the shards, with its label."""

    def __init__(self, size: int) -> None:
        self.crop = v2.Compose([v2.Resize(size), v2.CenterCrop(size), v2.ToDtype(torch.float32, scale=True)])

    def __call__(self, given: Any) -> Any:
        return (self(given["image"]), given["label"]) if isinstance(given, dict) else self.crop(as_tensor(given))


def noted(loader: StreamingDataLoader, order: list[list[int]]) -> Iterator[Any]:
    """The batches of an epoch; appends the sample ids of each to `order`."""
    for batch in loader:
        assert loader.last_batch is not None
        order.append(loader.last_batch.delivered.tolist())
        yield batch


def fit(epochs: Iterable[Iterable[Any]], num_classes: int) -> tuple[list[float], float]:
    """Train a ResNet from fixed first weights; return the loss of each step, and the images per second."""
    torch.manual_seed(1)
    model = get_model("resnet18", weights=None, num_classes=num_classes)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.002)
    losses, trained, begin = [], 0, time.perf_counter()
    for images, labels in (batch for batches in epochs for batch in batches):
        loss = torch.nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
        trained += len(labels)
    return losses, trained / (time.perf_counter() - begin)


def main(arguments: list[str] | None = None) -> int:
    """Train from both; 0 if every loss is equal bit for bit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--photos", type=Path, help="a folder of class folders of images; default: drawn flowers")
    parser.add_argument("--count", type=int, default=300, help="number of drawn flowers")
    parser.add_argument("--size", type=int, default=48, help="pixels per side")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("runs/local_files"))
    options = parser.parse_args(arguments)
    photos = options.photos or options.out / "flowers"
    if options.photos is None:
        write_flowers(photos, options.count)
    shards, cache = str(options.out / "shards"), str(options.out / "cache")
    # Small shards, so that a batch is gathered from many.
    convert(str(photos), shards, compression=None, size_limit="64kb", num_workers=1, overwrite=True)
    files = ImageFolder(str(photos), transform=Pixels(options.size))
    dataset = StreamingDataset(remote=shards, local=cache, shuffle=True, transform=files.transform)
    number_of = {str(Path(path).relative_to(photos)): number for number, (path, _) in enumerate(files.samples)}
    order: list[list[int]] = []
    loader = StreamingDataLoader(dataset, options.batch, num_workers=options.workers, tail="exact")
    from_shards, shards_per_s = fit((noted(loader, order) for _ in range(options.epochs)), len(files.classes))
    batches = [[number_of[dataset[one]["name"]] for one in batch] for batch in order]
    local = DataLoader(files, batch_sampler=batches, num_workers=options.workers)
    from_files, files_per_s = fit([local], len(files.classes))
    print(f"{'':22}  last loss   images/s")
    print(f"{'local files':22}  {from_files[-1]:9.6f}   {files_per_s:8.0f}")
    print(f"{'streamed from shards':22}  {from_shards[-1]:9.6f}   {shards_per_s:8.0f}")
    print(f"{len(from_shards)} losses: {'equal bit for bit' if from_shards == from_files else 'DIFFERENT'}")
    return 0 if from_shards == from_files else 1


if __name__ == "__main__":
    sys.exit(main())
