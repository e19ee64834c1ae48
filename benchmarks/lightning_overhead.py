"""What the Lightning module adds to each training step over a bare DataLoader with the same batches.

python benchmarks/lightning_overhead.py [--steps 2000] [--rounds 5]

Two figures: the callback's own hooks, timed by themselves in a run, and the difference of whole runs, which is noisier.
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
from lightning_stream.trainers.lightning.callback import StreamingCallback

BATCH = 16
HOOKS = ("on_train_batch_start", "on_train_batch_end")


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


def timed_hooks(spent: dict[str, list[float]]) -> Callable[[], None]:
    originals = {name: getattr(StreamingCallback, name) for name in HOOKS}

    def wrap(name: str) -> Callable[..., None]:
        def hook(*arguments: Any) -> None:
            begun = time.thread_time()  # of this thread's own processor time: other processes do not count
            originals[name](*arguments)
            spent[name].append(time.thread_time() - begun)

        return hook

    for name in HOOKS:
        setattr(StreamingCallback, name, wrap(name))
    return lambda: [setattr(StreamingCallback, name, original) for name, original in originals.items()] and None


def seconds(fit: Callable[[], None]) -> float:
    begun = time.perf_counter()
    fit()
    return time.perf_counter() - begun


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
    for check in (True, False):
        spent: dict[str, list[float]] = {name: [] for name in HOOKS}
        restore = timed_hooks(spent)
        data = StreamingDataModule(train={"remote": folder}, batch_size=BATCH, check_delivery=check)
        trainer(steps).fit(Nothing(), datamodule=data)
        restore()
        each = np.array([spent[name] for name in HOOKS]).sum(axis=0) * 1e6
        what = "with" if check else "without"
        print(
            f"hooks {what} the comparison with the plan: median {median(each):.0f} us, mean {each.mean():.0f} us a step"
        )
    batches = [{"id": torch.arange(BATCH)} for _ in range(steps)]
    bare, ours = [], []
    for _ in range(rounds):
        loader: Any = DataLoader(batches, batch_size=None)  # type: ignore[arg-type]  # a list is a dataset
        bare.append(seconds(lambda: trainer(steps).fit(Nothing(), loader)))  # noqa: B023 (called at once)
        data = StreamingDataModule(train={"remote": folder}, batch_size=BATCH)
        ours.append(seconds(lambda: trainer(steps).fit(Nothing(), datamodule=data)))  # noqa: B023
    print(
        f"whole runs: bare {min(bare) / steps * 1e6:.0f} us, module {min(ours) / steps * 1e6:.0f} us a step (reads too)"
    )


if __name__ == "__main__":
    main()
