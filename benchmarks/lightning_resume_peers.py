"""Runs stopped and resumed under Lightning with three libraries' loaders: samples lost, samples repeated.

python benchmarks/lightning_resume_peers.py --library ours        (or: mosaic, litdata; each in an environment that has
it and Lightning) [--workers 2]

Each library is used as its own documentation says: its loader, with its state, handed to the trainer. Each chain is
compared, epoch by epoch, with that library's own run without a stop.
"""

from __future__ import annotations

import argparse
import logging
import tempfile
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint

NUM_SAMPLES, BATCH, EPOCHS = 176, 16, 3
STEPS_PER_EPOCH = NUM_SAMPLES // BATCH
Feed = dict[int, tuple[int, list[int]]]  # optimizer step -> (epoch, sample ids)


@dataclass(frozen=True)
class Stop:
    """Where a run is left: at which step, and by which checkpoint it resumes."""

    step: int
    way: str  # "steps", "epoch" or "exception"


CHAINS: dict[str, tuple[list[Stop], dict[str, Any]]] = {
    "in the middle of an epoch": ([Stop(4, "steps")], {}),
    "twice in a row": ([Stop(4, "steps"), Stop(8, "steps")], {}),
    "in the middle of the second epoch": ([Stop(15, "steps")], {}),
    "at the last batch of an epoch": ([Stop(11, "steps")], {}),
    "at the end of an epoch": ([Stop(11, "epoch")], {}),
    "by an exception in a step": ([Stop(5, "exception")], {}),
    "inside an accumulation of 4": ([Stop(2, "exception")], {"accumulate_grad_batches": 4}),
}


class StoppedError(Exception):
    pass


class Noting(pl.LightningModule):
    """Notes the samples of every optimizer step."""

    def __init__(self, raise_at: int | None) -> None:
        super().__init__()
        self.net = torch.nn.Linear(4, 1)
        self.fed: dict[int, list[int]] = defaultdict(list)
        self.epochs: dict[int, int] = {}
        self.raise_at = raise_at

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> torch.Tensor:  # noqa: ARG002 (Lightning's)
        step = self.trainer.global_step
        if step == self.raise_at and (self.trainer.accumulate_grad_batches == 1 or self.fed[step]):
            raise StoppedError
        self.fed[step] += [int(number) for number in batch["id"]]
        self.epochs[step] = self.trainer.current_epoch
        return self.net(batch["x"]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def samples() -> list[dict[str, Any]]:
    return [{"id": number, "x": np.full(4, number / NUM_SAMPLES, np.float32)} for number in range(NUM_SAMPLES)]


def same(sample: Any) -> Any:
    return sample


def ours(folder: Path, workers: int) -> Callable[[], dict[str, Any]]:
    from lightning_stream import MDSWriter, StreamingDataModule

    with MDSWriter(out=str(folder), columns={"id": "int", "x": "ndarray:float32:4"}, size_limit=1000) as writer:
        for sample in samples():
            writer.write(sample)
    return lambda: {
        "datamodule": StreamingDataModule(
            train={"remote": folder, "shuffle": True}, global_batch_size=None, batch_size=BATCH, num_workers=workers
        )
    }


def mosaic(folder: Path, workers: int) -> Callable[[], dict[str, Any]]:
    from streaming import MDSWriter, StreamingDataLoader, StreamingDataset
    from streaming.base.util import clean_stale_shared_memory

    with MDSWriter(out=str(folder), columns={"id": "int", "x": "ndarray:float32:4"}, size_limit=1000) as writer:
        for sample in samples():
            writer.write(sample)

    def loader() -> dict[str, Any]:
        clean_stale_shared_memory()
        dataset = StreamingDataset(local=str(folder), batch_size=BATCH, shuffle=True)
        return {"train_dataloaders": StreamingDataLoader(dataset, batch_size=BATCH, num_workers=workers)}

    return loader


def litdata(folder: Path, workers: int) -> Callable[[], dict[str, Any]]:
    from litdata import StreamingDataLoader, StreamingDataset, optimize

    if not (folder / "index.json").exists():
        optimize(fn=same, inputs=samples(), output_dir=str(folder), chunk_size=16, num_workers=1)

    def loader() -> dict[str, Any]:
        dataset = StreamingDataset(str(folder), shuffle=True, drop_last=False)
        return {"train_dataloaders": StreamingDataLoader(dataset, batch_size=BATCH, num_workers=workers)}

    return loader


LIBRARIES = {"ours": ours, "mosaic": mosaic, "litdata": litdata}


def fit(
    data: dict[str, Any], folder: Path, ckpt: str | None, stop: Stop | None, options: dict[str, Any]
) -> tuple[Feed, str | None]:
    """Train to the stop, or to the end; gives what fed each step that counts, and the checkpoint."""
    callbacks: list[Any] = []
    if stop is not None and stop.way == "exception":
        callbacks = [OnExceptionCheckpoint(str(folder))]
    elif stop is not None:
        when = {"every_n_train_steps": stop.step} if stop.way == "steps" else {"every_n_epochs": 1}
        callbacks = [ModelCheckpoint(str(folder), save_top_k=-1, filename="{step}", **when)]
    module = Noting(stop.step if stop is not None and stop.way == "exception" else None)
    trainer = pl.Trainer(
        max_epochs=EPOCHS, max_steps=-1 if stop is None or stop.way == "exception" else stop.step + 2,
        callbacks=callbacks, enable_checkpointing=bool(callbacks), accelerator="cpu", devices=1, logger=False,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=str(folder), **options,
    )  # fmt: skip
    with suppress(StoppedError):
        trainer.fit(module, ckpt_path=ckpt, **data)
    fed = {step: (module.epochs[step], ids) for step, ids in module.fed.items()}
    if stop is None:
        return fed, None
    (saved,) = [path for path in folder.glob("*.ckpt") if _step_of(path) == stop.step]
    return {step: one for step, one in fed.items() if step < stop.step}, str(saved)


def _step_of(path: Path) -> int:
    return int(torch.load(path, weights_only=False)["global_step"])


def chain(
    loader: Callable[[], dict[str, Any]], folder: Path, stops: list[Stop], options: dict[str, Any]
) -> tuple[Feed, str]:
    """What fed each step over a run and its resumes; and why it ended before its time."""
    ckpt: str | None = None
    fed: Feed = {}
    for number, stop in enumerate([*stops, None]):
        own = folder / str(number)
        own.mkdir(parents=True)
        try:
            seen, ckpt = fit(loader(), own, ckpt, stop, options)
        except Exception as error:  # noqa: BLE001 - a library that cannot resume is a finding, not a failure
            return fed, f"{type(error).__name__}: {str(error).splitlines()[0][:60]}"
        fed |= seen
    return fed, ""


def compare(whole: Feed, resumed: Feed) -> tuple[int, int, int]:
    """Samples lost and repeated within their epochs, and steps fed otherwise."""
    lost = repeated = 0
    for epoch in range(EPOCHS):
        wanted, got = (
            Counter(number for of, ids in feed.values() if of == epoch for number in ids) for feed in (whole, resumed)
        )
        lost += sum((wanted - got).values())
        repeated += sum((got - wanted).values())
    steps = {*whole, *resumed}
    other = sum(sorted(whole.get(s, (0, []))[1]) != sorted(resumed.get(s, (0, []))[1]) for s in steps)
    return lost, repeated, other


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--library", choices=LIBRARIES, default="ours")
    parser.add_argument("--workers", type=int, default=0)
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    for name in ("lightning.pytorch", "lightning.pytorch.utilities.rank_zero", "pytorch_lightning.utilities.rank_zero"):
        logging.getLogger(name).setLevel(logging.ERROR)
    print(f"{given.library}, {given.workers} workers, {EPOCHS} epochs of {NUM_SAMPLES} samples, batch {BATCH}")
    print(f"{'stopped':36} {'lost':>6} {'repeated':>9} {'steps fed otherwise':>20}")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        loader = LIBRARIES[given.library](folder / "data", given.workers)
        for number, (title, (stops, options)) in enumerate(CHAINS.items()):
            own = folder / f"whole{number}"
            own.mkdir()
            whole, _ = fit(loader(), own, None, None, options)
            resumed, problem = chain(loader, folder / f"chain{number}", stops, options)
            lost, repeated, other = compare(whole, resumed)
            print(f"{title:36} {lost:6} {repeated:9} {other:13} of {len(whole):3} {problem}")


if __name__ == "__main__":
    main()
