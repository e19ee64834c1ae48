"""One training run under a host: its data, its log of what fed each optimizer step, and its checkpoints."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from lightning_stream import MapDataset, StatefulDataLoader, StreamingDataLoader, StreamingDataset

GLOBAL_BATCH, EPOCHS = 8, 3
STEPS_PER_EPOCH = 7
NUM_STEPS = EPOCHS * STEPS_PER_EPOCH
# The stops: a name, the optimizer steps done there, and whether the epoch's loop was left.
STOPS = {"middle": 3, "last batch": 7, "epoch end": 7, "later epoch": 10}
_FILES = {"middle": "step-3", "last batch": "step-7", "epoch end": "epoch-1", "later epoch": "step-10"}


class Numbers(Dataset[dict[str, int]]):
    """An ordinary dataset."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, int]:
        return {"id": range(self.size)[index]}


@dataclass
class Run:
    """What a rank of one run knows.

    Args:
        shards: The data; or the number of samples of a map-style dataset.
        folder: Where this run logs and saves.
        world, rank: All processes, and this one.
        stop: The stop to continue from, of the run in `resumes`; None to begin.
        resumes: The folder of the run to continue.
    """

    shards: str
    folder: str
    world: int
    rank: int
    stop: str | None = None
    resumes: str | None = None

    @property
    def checkpoint(self) -> Path | None:
        """The checkpoint to continue from; a host adds its own suffix to the name."""
        return None if self.stop is None else Path(str(self.resumes)) / "ckpt" / _FILES[self.stop]

    @property
    def first_step(self) -> int:
        """Optimizer steps that are done already."""
        return 0 if self.stop is None else STOPS[self.stop]

    @property
    def saves(self) -> Path:
        """The folder of this run's checkpoints."""
        path = Path(self.folder) / "ckpt"
        path.mkdir(parents=True, exist_ok=True)
        return path

    def log(self, step: int, ids: list[int]) -> None:
        """Write down what fed an optimizer step."""
        with (Path(self.folder) / f"ids.{self.rank}").open("a") as file:
            file.write(json.dumps({"step": step, "ids": ids}) + "\n")

    def dataset(self, **options: Any) -> StreamingDataset:
        """The data in an order that each epoch changes."""
        if self.shards.isdigit():
            return MapDataset(Numbers(int(self.shards)), shuffle=True, seed=3)
        return StreamingDataset(remote=self.shards, shuffle=True, shuffle_seed=3, **options)

    def loader(self, **options: Any) -> StreamingDataLoader:
        """The loader that this library's hosts use."""
        if self.shards.isdigit():
            data = Numbers(int(self.shards))
            return StatefulDataLoader(data, shuffle=True, seed=3, global_batch_size=GLOBAL_BATCH, **options)
        return StreamingDataLoader(self.dataset(), global_batch_size=GLOBAL_BATCH, **options)

    def torch_loader(self, kind: Any = DataLoader) -> Any:
        """A loader of torch, or of its kind, over the dataset."""
        size = GLOBAL_BATCH // self.world
        return kind(self.dataset(batch_size=size), batch_size=size)


def trained(batch: dict[str, Any], loader: Any) -> list[int]:
    """The ids of a batch without padding, where the loader marks it."""
    info = getattr(loader, "last_batch", None)
    ids = batch["id"]
    return (ids if info is None else ids[~torch.from_numpy(info.filler).to(ids.device)]).tolist()
