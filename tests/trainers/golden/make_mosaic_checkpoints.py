"""Makes the checkpoints beside this file: runs of mosaicml-streaming's dataset under Composer, stopped.

Needs an environment of its own, with mosaicml 0.32.1 and mosaicml-streaming 0.13.0 (and pytest, numpy):

PYTHONPATH=tests python tests/trainers/golden/make_mosaic_checkpoints.py
"""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path

import numpy as np
import torch
from composer import ComposerModel, Trainer
from streaming import MDSWriter, StreamingDataLoader, StreamingDataset

HERE = Path(__file__).resolve().parent
NUM_SAMPLES, BATCH, EPOCHS = 167, 16, 3


class Net(ComposerModel):
    """The network of tests/support/composer_runs.py; notes the samples of each step."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.0), torch.nn.Linear(8, 1))
        self.steps: list[list[int]] = []

    def forward(self, batch):
        return self.net(batch["x"])

    def loss(self, outputs, batch):
        self.steps.append(sorted(batch["id"].tolist()))
        target = batch["x"].sum(dim=1, keepdim=True)
        return (outputs - target).square().mean()


def run(folder: Path, interval: str, arguments: dict) -> Net:
    dataset = StreamingDataset(local=str(folder / "shards"), batch_size=BATCH, **arguments)
    torch.manual_seed(0)
    net = Net()
    trainer = Trainer(
        model=net, train_dataloader=StreamingDataLoader(dataset, batch_size=BATCH),
        optimizers=torch.optim.Adam(net.parameters(), lr=0.01), max_duration=f"{EPOCHS}ep", device="cpu", seed=1,
        progress_bar=False, save_folder=str(folder / interval), save_interval=interval,
        save_filename="ba{batch}.pt",
    )  # fmt: skip
    trainer.fit()
    trainer.close()
    return net


def main() -> None:
    expected = json.loads((HERE / "mosaic_composer.json").read_text())
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        columns = {"id": "int", "x": "ndarray:float32:4"}
        with MDSWriter(out=str(folder / "shards"), columns=columns, size_limit=1000) as writer:
            for number in range(NUM_SAMPLES):
                writer.write({"id": number, "x": np.full(4, number / NUM_SAMPLES, np.float32)})
        for interval, step in (("14ba", 14), ("1ep", 11)):
            assert run(folder, interval, expected["arguments"]).steps == expected["steps"]
            shutil.copy(folder / interval / f"ba{step}.pt", HERE / f"mosaic_{interval}.pt")


if __name__ == "__main__":
    main()
