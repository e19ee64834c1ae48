"""Training from shards is training from local files: the same losses bit for bit, the same accuracy, at what speed.

    python recipes/local_files.py                                     # drawings made by this package, in a minute or so
    python recipes/local_files.py --photos flower_photos --size 96    # a folder of class folders

1. The photos are converted to shards.  2. A ResNet learns from the shards, streamed.  3. The same ResNet learns from
the files themselves, as torch reads a folder, by a sampler that follows the streamed run's order.  The figure shows
both; the run ends with 1 if any loss differs.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset, Sampler

from lightning_stream import StreamingDataLoader, StreamingDataset
from lightning_stream.loading.randomness import seed_sample
from lightning_stream.loading.shared_position import Start
from lightning_stream.order import BatchPlan
from lightning_stream.recipes.converted_set import TRAIN, VAL
from lightning_stream.recipes.drawing import CLASSES, drawn_jpeg
from lightning_stream.recipes.flowers import PhotoData, flower_data
from lightning_stream.recipes.image_classifier import ImageClassifier

Place = tuple[int, int, int]
"""Epoch and position, which seed the augmentation, and the number of the file."""


class FilesOfFolder(Dataset[dict[str, Any]]):
    """The photos of class folders, in sorted order, as torch users read them."""

    def __init__(self, folder: Path, transform: Any, seed: int) -> None:
        classes = sorted(path.name for path in folder.iterdir() if path.is_dir())
        found = [(file, label) for label, name in enumerate(classes) for file in sorted((folder / name).glob("*.jpg"))]
        self.files = found
        self.transform, self.seed = transform, seed

    def __getitem__(self, place: Place) -> dict[str, Any]:
        epoch, position, number = place
        file, label = self.files[number]
        seed_sample(self.seed, epoch, position)  # as the streamed run augments this place
        with Image.open(file) as image:
            sample: dict[str, Any] = self.transform({"image": image, "label": label})
        return sample

    def __len__(self) -> int:
        return len(self.files)


class SameOrder(Sampler[list[Place]]):
    """The batches of a streamed run, as numbers of files.

    Args:
        loader: Of the streamed run; only asked for its order.
        files: The number of each sample's file, by sample id.
    """

    def __init__(self, loader: StreamingDataLoader, files: list[int]) -> None:
        self.loader, self.files, self.epoch = loader, files, 0

    def __iter__(self) -> Iterator[list[Place]]:
        epoch, self.epoch = self.epoch, self.epoch + 1
        plan = self._plan(epoch)
        for step in range(plan.num_batches):
            share = plan.share(step)
            places = zip(share.positions.tolist(), share.ids.tolist(), strict=True)
            yield [(epoch, position, self.files[one]) for position, one in places]

    def __len__(self) -> int:
        return self._plan(self.epoch).num_batches

    def _plan(self, epoch: int) -> BatchPlan:
        """What the streamed run delivers in an epoch, computed and not read."""
        dataset = self.loader.dataset
        assert isinstance(dataset, StreamingDataset)
        return self.loader.settings().plan(dataset, Start(epoch))


@dataclass
class Curve:
    """One run.

    Attributes:
        losses: Of each step.
        accuracies: Of each epoch, on what was held out.
        samples_per_s: Over the training.
        read_per_s: Samples per second, read and augmented, without a model.
    """

    losses: list[float] = field(default_factory=list)
    accuracies: list[float] = field(default_factory=list)
    samples_per_s: float = 0.0
    read_per_s: float = 0.0


def learn(data: PhotoData, train: Iterable[Any], val: Iterable[Any], settings: argparse.Namespace) -> Curve:
    """Train a ResNet from its seed, and note every loss."""
    model = ImageClassifier(network=settings.network, learning_rate=0.002, seed=1)
    model.build(data)
    optimizer = model.optimizer()
    curve, seconds, count = Curve(), 0.0, 0
    for epoch in range(settings.epochs):
        model.train()
        model.begin_pass(VAL)
        begin = time.perf_counter()
        for batch in train:
            size = len(batch["label"])
            loss = model.loss(batch, torch.ones(size, dtype=torch.bool), size)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            curve.losses.append(float(loss.detach()))
            count += size
        seconds += time.perf_counter() - begin
        model.eval()
        with torch.inference_mode():
            for batch in val:
                model.evaluate(batch)
        curve.accuracies.append(model.end_pass(VAL, epoch, lambda counted: counted)["val/accuracy"])
    curve.samples_per_s = count / seconds
    return curve


def read_speed(train: Iterable[Any]) -> float:
    """Samples per second of one more epoch, without a model."""
    begin, count = time.perf_counter(), 0
    for batch in train:
        count += len(batch["label"])
    return count / (time.perf_counter() - begin)


def numbers_of_files(data: PhotoData, split: str, files: FilesOfFolder) -> list[int]:
    """For each sample id, the number of the file that it was made from."""
    dataset = data.datasets[split]
    assert dataset is not None
    number_of = {f"{file.parent.name}/{file.name}": number for number, (file, _) in enumerate(files.files)}
    return [number_of[dataset[one]["name"]] for one in range(dataset.size)]


def compare(photos: Path, settings: argparse.Namespace) -> tuple[Curve, Curve]:
    """Both runs: from shards, and from the files."""
    data = flower_data(
        photos=str(photos),
        remote=str(settings.out / "shards"),
        local=str(settings.out / "cache"),
        image_size=settings.size,
        compression=None,
        size_limit="64kb",  # small shards, so that a batch is gathered from many
        num_workers=0,
    )
    data.prepare_data()
    workers: dict[str, Any] = {"num_workers": settings.workers, "persistent_workers": settings.workers > 0}
    streamed, from_files, orders = [], [], []
    for split, batch_size in ((TRAIN, settings.batch), (VAL, 64)):
        dataset = data.datasets[split]
        assert dataset is not None
        loaders = [
            StreamingDataLoader(dataset, batch_size, tail="drop" if split == TRAIN else "exact", **more)
            for more in (workers, {"num_workers": 0})
        ]
        streamed.append(loaders[0])
        files = FilesOfFolder(photos, dataset.transform, dataset.shuffle_seed)
        orders.append(SameOrder(loaders[1], numbers_of_files(data, split, files)))
        from_files.append(DataLoader(files, batch_sampler=orders[-1], **workers))
    curves = []
    for train, val in (streamed, from_files):
        curves.append(learn(data, train, val, settings))
        curves[-1].read_per_s = read_speed(train)
    for loader in streamed:
        loader.close()
    return curves[0], curves[1]


def draw(shards: Curve, files: Curve, title: str, path: Path) -> None:
    """Both runs' losses and accuracies, one above the other."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    figure.suptitle(title)
    for curve, style in ((files, {"color": "0.6", "linewidth": 5}), (shards, {"color": "C3", "linewidth": 1.4})):
        name = "local files" if curve is files else "streamed from shards"
        left.plot(range(1, len(curve.losses) + 1), curve.losses, label=name, **style)
        right.plot(range(1, len(curve.accuracies) + 1), curve.accuracies, label=name, marker="o", **style)
    left.set(xlabel="optimizer step", ylabel="training loss")
    right.set(xlabel="epoch", ylabel="accuracy on held-out photos", ylim=(0, 1))
    right.xaxis.get_major_locator().set_params(integer=True)
    left.legend()
    right.legend()
    figure.savefig(path, dpi=110)


def draw_photos(folder: Path, count: int) -> Path:
    """A folder of class folders of drawings."""
    for number in range(count):
        kind = CLASSES[number % len(CLASSES)]
        file = folder / kind / f"{number:05d}.jpg"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(drawn_jpeg(kind, 1, number))
    return folder


def main(arguments: list[str] | None = None) -> int:
    """Run both, say and draw how they compare; 0 if every loss is the same, bit for bit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--photos", type=Path, help="folder of class folders of .jpg files; left out: drawings")
    parser.add_argument("--drawn", type=int, default=400, help="how many drawings")
    parser.add_argument("--network", default="resnet18")
    parser.add_argument("--size", type=int, default=48, help="pixels to a side")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("runs/local_files"))
    settings = parser.parse_args(arguments)
    photos = settings.photos or draw_photos(settings.out / "photos", settings.drawn)
    torch.use_deterministic_algorithms(True)
    shards, files = compare(photos, settings)
    same = shards.losses == files.losses and shards.accuracies == files.accuracies
    told = "equal bit for bit" if same else "DIFFERENT"
    print(f"{len(shards.losses)} losses and {len(shards.accuracies)} accuracies: {told}")
    print(f"{'':22}  last loss   accuracy   trained/s   read/s")
    for name, curve in (("local files", files), ("streamed from shards", shards)):
        last = f"{curve.losses[-1]:9.6f}   {curve.accuracies[-1]:8.4f}"
        print(f"{name:22}  {last}   {curve.samples_per_s:9.0f}   {curve.read_per_s:6.0f}")
    picture = settings.out / "losses.png"
    draw(shards, files, f"{settings.network} on {photos.name}: {told}", picture)
    print(f"picture: {picture}")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
