"""What the Lightning module adds to each training step over a bare DataLoader with the same batches.

python benchmarks/lightning_overhead.py [--steps 2000] [--rounds 5]

Three figures: the callback's own hooks (with the metrics of the data, and the rows of the report, every 50 steps) and
the loader's measuring, timed by themselves in a run; and the difference of whole runs, which is noisier.
"""

from __future__ import annotations

import argparse
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from torch.utils.data import DataLoader

from lightning_stream import MDSWriter, StreamingDataModule
from lightning_stream.loading.meter import Meter
from lightning_stream.trainers.lightning.callback import StreamingCallback

BATCH = 16
HOOKS = ("on_train_batch_start", "on_train_batch_end")
MEASURING = ("asked", "note")


class Nothing(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = True
        self.weight = torch.nn.Parameter(torch.zeros(1))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:  # noqa: ARG002 (Lightning's)
        return self.weight.sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def trainer(steps: int) -> pl.Trainer:
    return pl.Trainer(
        max_steps=steps, accelerator="cpu", devices=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip


def timed(owner: type, spent: dict[str, list[float]]) -> Callable[[], None]:
    """Time the methods of a class from now on; gives what ends that."""
    originals = {name: getattr(owner, name) for name in spent}

    def wrap(name: str) -> Callable[..., None]:
        def hook(*arguments: Any, **named: Any) -> None:
            begun = time.thread_time()  # of this thread's own processor time: other processes do not count
            originals[name](*arguments, **named)
            spent[name].append(time.thread_time() - begun)

        return hook

    for name in originals:
        setattr(owner, name, wrap(name))
    return lambda: [setattr(owner, name, original) for name, original in originals.items()] and None


def seconds(fit: Callable[[], None]) -> float:
    begun = time.process_time()  # other programs do not count
    fit()
    return time.process_time() - begun


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as folder:
        with MDSWriter(out=folder, columns={"id": "int"}) as writer:
            for number in range(given.steps * BATCH):
                writer.write({"id": number})
        measure(Path(folder), given.steps, given.rounds)


def measure(folder: Path, steps: int, rounds: int) -> None:
    reported, quiet = {"report": folder / "run"}, {"report": False}
    for options in (reported, quiet, {**quiet, "monitor": False}, {**quiet, "check_delivery": False}):
        spent: dict[str, list[float]] = {name: [] for name in HOOKS}
        measured: dict[str, list[float]] = {name: [] for name in MEASURING}
        restore, restore_meter = timed(StreamingCallback, spent), timed(Meter, measured)
        data = StreamingDataModule(train={"remote": folder}, batch_size=BATCH, **options)
        trainer(steps).fit(Nothing(), datamodule=data)
        restore()
        restore_meter()
        each = np.array([spent[name] for name in HOOKS]).sum(axis=0) * 1e6
        print(f"hooks {options}: median {median(each):.1f} us, mean {each.mean():.1f} us a step")
        each = 1e6 * np.array([measured[name][:steps] for name in MEASURING]).sum(axis=0)
        print(f"measuring: median {median(each):.1f} us, mean {each.mean():.1f} us a batch")
    batches = [{"id": torch.arange(BATCH)} for _ in range(steps)]
    spent = {name: [] for name in ("bare", "module", "module, monitor=False")}
    for _ in range(rounds):
        loader: Any = DataLoader(batches, batch_size=None)  # type: ignore[arg-type]  # a list is a dataset
        spent["bare"].append(seconds(lambda: trainer(steps).fit(Nothing(), loader)))  # noqa: B023 (called at once)
        for name, options in (("module", reported), ("module, monitor=False", {"monitor": False})):
            data = StreamingDataModule(train={"remote": folder}, batch_size=BATCH, **options)
            spent[name].append(seconds(lambda: trainer(steps).fit(Nothing(), datamodule=data)))  # noqa: B023
    for name, runs in spent.items():
        print(f"whole runs: {name} {min(runs) / steps * 1e6:.0f} us of CPU a step")


if __name__ == "__main__":
    main()
