"""What a user's project says to a type checker."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, assert_type

import torch

from lightning_stream import (
    LocalDataset,
    MDSWriter,
    Position,
    Stream,
    StreamingDataLoader,
    StreamingDataModule,
    StreamingDataset,
    World,
    merge_index,
)


def halved(sample: Mapping[str, Any]) -> dict[str, Any]:
    return {"x": sample["x"] / 2}


def write(out: Path) -> None:
    with MDSWriter(out=out, columns={"x": "float32"}, compression="zstd", hashes=["xxh3_64"]) as writer:
        writer.write({"x": 1.0})
    merge_index(str(out))


class Halved(StreamingDataset):
    def __getitem__(self, idx: Any) -> Any:
        return halved(super().__getitem__(idx))


def train(out: Path) -> int:
    streams = [Stream(remote=str(out), proportion=0.5), Stream(remote=str(out), proportion=0.5)]
    dataset = StreamingDataset(streams=streams, shuffle=True, transform=halved, world=World(0, 1))
    loader = StreamingDataLoader(dataset, global_batch_size=4, num_workers=0)
    module = StreamingDataModule(train=dataset, global_batch_size=4)
    assert_type(len(dataset), int)
    assert_type(loader.state_dict(), dict[str, Any])
    assert_type(loader.position, Position)
    for batch in loader:
        torch.as_tensor(batch["x"])
    loader.load_state_dict(loader.state_dict())
    return len(loader) + len(LocalDataset(out)) + (module.train_dataloader() is not None)
