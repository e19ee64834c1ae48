"""What following the trainer adds to each training step under Composer, over a bare DataLoader with the same batches.

python benchmarks/composer_overhead.py [--steps 1000] [--rounds 3]

Two figures: the callback's own methods, timed in a run, and the difference of whole runs, which is noisier.
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

import numpy as np
import torch
from composer import ComposerModel, DataSpec, Trainer
from torch.utils.data import DataLoader

from lightning_stream import MDSWriter
from lightning_stream.trainers.composer.callback import StreamingPosition
from lightning_stream.trainers.composer.spec import data_spec

BATCH = 16
METHODS = ("batch_start", "batch_end", "batch_checkpoint", "before_dataloader")


class Nothing(ComposerModel):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))

    def forward(self, batch: Any) -> torch.Tensor:  # noqa: ARG002 (Composer's)
        return self.weight.sum()

    def loss(self, outputs: torch.Tensor, batch: Any) -> torch.Tensor:  # noqa: ARG002 (Composer's)
        return outputs


def fit(data: DataSpec, steps: int) -> float:
    """CPU seconds of a run, set-up left out: other programs do not count."""
    model = Nothing()
    trainer = Trainer(
        model=model, train_dataloader=data, optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
        max_duration=f"{steps}ba", device="cpu", progress_bar=False, device_train_microbatch_size=BATCH,
    )  # fmt: skip
    begun = time.process_time()
    trainer.fit()
    took = time.process_time() - begun
    trainer.close()
    return took


def timed(spent: dict[str, list[float]]) -> Callable[[], None]:
    """Time the methods of every callback from now on; gives what ends that."""
    originals = {name: getattr(StreamingPosition, name) for name in METHODS}

    def wrap(name: str) -> Callable[..., None]:
        def method(*arguments: Any) -> None:
            begun = time.thread_time()  # of this thread's own processor time: other processes do not count
            originals[name](*arguments)
            spent[name].append(time.thread_time() - begun)

        return method

    for name in METHODS:
        setattr(StreamingPosition, name, wrap(name))
    return lambda: [setattr(StreamingPosition, name, original) for name, original in originals.items()] and None


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as folder:
        with MDSWriter(out=folder, columns={"id": "int"}) as writer:
            for number in range(given.steps * BATCH):
                writer.write({"id": number})
        measure(Path(folder), given.steps, given.rounds)


def measure(folder: Path, steps: int, rounds: int) -> None:
    reported, quiet, off = {"report": folder / "run"}, {"report": False}, {"monitor": False}
    for options in (reported, quiet, off):
        spent: dict[str, list[float]] = {name: [] for name in METHODS}
        restore = timed(spent)
        fit(data_spec(remote=folder, batch_size=BATCH, **options), steps)
        restore()
        for name in METHODS:
            each = 1e6 * np.array(spent[name])
            print(f"{name}, {options}: median {median(each):.1f} us, mean {each.mean():.1f} us a step")
    batches = [{"id": torch.arange(BATCH)} for _ in range(steps)]
    runs: dict[str, list[float]] = {name: [] for name in ("bare", "data_spec", "data_spec, monitor=False")}
    for _ in range(rounds):
        loader: Any = DataLoader(batches, batch_size=None)  # type: ignore[arg-type]  # a list is a dataset
        count = {"get_num_samples_in_batch": lambda _: BATCH, "split_batch": lambda batch, _: [batch]}
        runs["bare"].append(fit(DataSpec(loader, **count), steps))
        for name, options in (("data_spec", reported), ("data_spec, monitor=False", off)):
            runs[name].append(fit(data_spec(remote=folder, batch_size=BATCH, **options), steps))
    for name, each in runs.items():
        print(f"whole runs: {name} {min(each) / steps * 1e6:.0f} us of CPU a step")


if __name__ == "__main__":
    main()
