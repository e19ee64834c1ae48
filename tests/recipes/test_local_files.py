"""Training from shards is training from local files: the losses are equal bit for bit.

A ResNet is trained on streamed shards of drawn flowers, and the order of the samples is noted; then on the files, by
torch's own `DataLoader` over torchvision's `ImageFolder`, in that order.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

pytest.importorskip("lightning", reason="the recipes need Lightning: uv sync")
pytest.importorskip("torchvision", reason="the recipes need torchvision: uv sync")
import torchvision.transforms.v2

from lightning_stream import StreamingDataLoader, StreamingDataset
from lightning_stream.convert import convert
from lightning_stream.media.jpeg import Photo
from recipes.data.synthetic import write_flowers


def pixels(image: Any) -> torch.Tensor:
    tensor = torch.from_numpy(Photo(image).pixels()).permute(2, 0, 1)
    return torchvision.transforms.v2.functional.resize(tensor, [32, 32]).float() / 255


def sample_pixels(sample: dict[str, Any]) -> tuple[torch.Tensor, int]:
    return pixels(sample["image"]), sample["label"]


def losses(batches: Iterable[Any]) -> list[float]:
    """The loss of each step of a ResNet that begins with fixed weights."""
    torch.manual_seed(1)
    model = torchvision.models.get_model("resnet18", weights=None, num_classes=5)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.002)
    found = []
    for images, labels in batches:
        loss = torch.nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(float(loss.detach()))
    return found


def test_training_from_shards_equals_training_from_files(tmp_path: Path) -> None:
    write_flowers(tmp_path / "flowers", 48)
    # Small shards, so that a batch is gathered from many.
    convert(str(tmp_path / "flowers"), str(tmp_path / "shards"), size_limit="8kb", num_workers=1)
    cache = str(tmp_path / "cache")
    dataset = StreamingDataset(remote=str(tmp_path / "shards"), local=cache, shuffle=True, transform=sample_pixels)
    loader = StreamingDataLoader(dataset, 16, tail="exact")
    order: list[list[int]] = []

    def streamed() -> Iterable[Any]:
        for _ in range(2):
            for batch in loader:
                order.append(loader.last_batch.delivered.tolist())  # type: ignore[union-attr]
                yield batch

    from_shards = losses(streamed())
    files = torchvision.datasets.ImageFolder(str(tmp_path / "flowers"), transform=pixels)
    number_of = {str(Path(path).relative_to(tmp_path / "flowers")): n for n, (path, _) in enumerate(files.samples)}
    batches = [[number_of[dataset[one]["name"]] for one in batch] for batch in order]
    assert len(from_shards) == 6
    assert batches[:3] != batches[3:]
    assert losses(DataLoader(files, batch_sampler=batches)) == from_shards
    assert losses(DataLoader(files, batch_sampler=[*batches[1:], batches[0]])) != from_shards
